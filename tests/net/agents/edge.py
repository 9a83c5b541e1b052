"""What the stand-ins share: the public end of a tunnel. Standard library only, to start fast."""

import asyncio


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one end left; the close informs the other
    finally:
        writer.close()


async def open_edge(upstream_port: int) -> int:
    """Listen on a port that leads to the upstream one, as the real edge does it.

    It adds a header, and shows a page to requests without the header that skips it.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request, headers = (await read_head(reader)).split(b"\r\n", 1)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        except (OSError, asyncio.IncompleteReadError):
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nNgrok-Error-Code: ERR_NGROK_8012\r\n\r\n")
            writer.close()
            return
        if b"ngrok-skip-browser-warning" not in headers:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\nYou are about to visit a tunnel.\n")
            writer.close()
            far_writer.close()
            return
        far_writer.write(request + b"\r\nX-Forwarded-For: 203.0.113.9\r\n" + headers)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 18)
    return int(server.sockets[0].getsockname()[1])
