"""Stands in for ngrok's agent (version 3), as far as pyngrok 7.2 to 9 uses it.

The token selects what it does: ``session-NNN`` fails at the start with ERR_NGROK_NNN, ``tunnel-NNN`` at the
opening of a tunnel, ``offline`` never reaches ngrok, ``silent`` stays silent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import edge


def log(**fields: object) -> None:
    said = " ".join(f'{key}="{value}"' for key, value in fields.items())
    print(f"t=2026-01-01T00:00:00+0000 {said}", flush=True)


def fail(error: str) -> None:
    log(lvl="eror", msg="session closing", obj="tunnels.session", err=error)


def read_token() -> str:
    if "--authtoken" in sys.argv:
        sys.exit("every user can read a token on the command line")
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    return str((config["agent"] if config["version"] == "3" else config)["authtoken"])


def reply(status: str, body: object) -> bytes:
    encoded = json.dumps(body).encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(encoded)}\r\nConnection: close\r\n\r\n".encode() + encoded
    )


async def open_tunnel(wanted: dict[str, Any], token: str) -> bytes:
    if token.startswith("tunnel-"):
        error = f"failed to start tunnel: no such luck. ERR_NGROK_{token.removeprefix('tunnel-')}"
        return reply("502 Bad Gateway", {"error_code": 103, "status_code": 502, "details": {"err": error}})
    upstream = wanted["upstream"]["url"] if "upstream" in wanted else wanted["addr"]
    url = f"http://127.0.0.1:{await edge.open_edge(int(upstream.rpartition(':')[2]))}"
    config = {"addr": upstream, "inspect": True}
    tunnel = {"name": wanted["name"], "uri": f"/api/tunnels/{wanted['name']}", "public_url": url, "url": url}
    return reply("201 Created", {**tunnel, "ID": "1", "proto": "http", "config": config, "metrics": {}})


async def serve_api(token: str) -> int:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await edge.read_head(reader)).decode()
        if head.startswith("POST"):
            length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
            wanted = json.loads(await reader.readexactly(int(length.partition(":")[2])))
            writer.write(await open_tunnel(wanted, token))
        else:
            writer.write(reply("200 OK", {"tunnels": [], "endpoints": []}))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def run(token: str) -> None:
    port = await serve_api(token)
    log(lvl="info", msg="starting web service", obj="web", addr=f"127.0.0.1:{port}")
    log(lvl="info", msg="client session established", obj="tunnels.session")
    log(lvl="info", msg="tunnel session started", obj="tunnels.session")
    await asyncio.Event().wait()


def main() -> None:
    token = read_token()
    if token.startswith("session-"):
        fail(f"The authtoken you specified is invalid. Your authtoken: {token} ERR_NGROK_{token[8:]}")
        sys.exit(1)
    if token == "offline":
        fail("failed to dial ngrok server with address connect.ngrok-agent.com:443: lookup: i/o timeout")
        sys.exit(1)
    if token == "silent":
        time.sleep(1000)
    asyncio.run(run(token))
