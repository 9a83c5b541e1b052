"""The WebSocket frames of the carrier, alone and against aiohttp's own implementation."""

import asyncio
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.net import websocket
from colab_swarm.net.websocket import WebSocket, accept
from tests.net.swarm import served, until

SIZES = (0, 1, 125, 126, 65535, 65536, websocket.MAX_MESSAGE_BYTES)


class Collector:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.seen_after_reads: list[list[bytes]] = []
        self.lost = ""

    def on_message(self, data: memoryview) -> None:
        self.messages.append(bytes(data))

    def on_writable(self, writable: bool) -> None: ...
    def on_lost(self, reason: str) -> None:
        self.lost = reason


def scratch() -> memoryview:
    return memoryview(bytearray(websocket.SCRATCH_BYTES))


async def test_our_server_talks_to_aiohttps_client_which_masks() -> None:
    got, ends = Collector(), list[WebSocket]()

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        websocket = accept(request, scratch=scratch(), receiver=got)
        ends.append(websocket)
        await until(lambda: bool(got.messages))
        websocket.send_bytes(b"taken over")
        await websocket.wait_closed()
        return web.Response()

    async with (
        served(serve) as at,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://{at}") as client,
    ):
        await client.send_bytes(b"first")
        assert await client.receive_bytes() == b"taken over"
        await client.ping(b"are you there")
        for size in SIZES:
            message = bytes([size % 251]) * size
            await client.send_bytes(message)
            ends[0].send_bytes(message)
            assert await client.receive_bytes() == message
        await until(lambda: len(got.messages) == 1 + len(SIZES))
        ends[0].close("enough " * 20)
        assert (await client.receive()).extra == ("enough " * 20)[:123]
    assert got.messages == [b"first"] + [bytes([size % 251]) * size for size in SIZES]
    await until(lambda: bool(got.lost))


def feed(data: bytes, *, step: int) -> tuple[Collector, Any]:
    """What a server's end makes of these bytes, read step by step."""
    got, transport = Collector(), MagicMock(asyncio.Transport)
    transport.get_write_buffer_size.return_value = 0
    transport.is_closing.side_effect = lambda: transport.abort.called or transport.close.called

    async def main() -> None:
        websocket = WebSocket(transport, scratch=scratch(), client=False, receiver=got)
        websocket.after_read = lambda: got.seen_after_reads.append(list(got.messages))
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            websocket.get_buffer(-1)[: len(piece)] = piece
            websocket.buffer_updated(len(piece))
        websocket.connection_lost(ConnectionResetError("reset"))

    asyncio.run(main())
    return got, transport


@given(st.integers(1, 40))
def test_messages_are_whole_however_the_bytes_arrive(step: int) -> None:
    frames = b"\x02\x03abc" + b"\x89\x02hi" + b"\x00\x02de" + b"\x80\x01f" + b"\x82\x00"
    frames += b"\x82\x7e\x00\x7e" + bytes(126) + b"\x82\x84\1\2\3\4mcpp"
    got, transport = feed(frames, step=step)
    assert got.messages == [b"abcdef", b"", bytes(126), b"last"] and got.lost == "reset"
    written = b"".join(bytes(call.args[0]) for call in transport.write.call_args_list)
    assert written == b"\x8a\x02hi"  # a pong in the middle of a fragmented message


@pytest.mark.parametrize(
    "frames",
    [
        *(b"\x81\x02hi", b"\x80\x02hi", b"\x02\x01a\x82\x01b", b"\xc2\x01a", b"\x89\x7e\x00\x7e"),
        b"\x02\x00" + 2 * (b"\x00\x7e\xff\xff" + bytes(65535)),
    ],
    ids=["text", "no message to continue", "a second begins", "compressed", "long ping", "no end"],
)
def test_frames_out_of_place_abort_the_connection(frames: bytes) -> None:
    got, transport = feed(frames, step=1 << 14)
    assert transport.is_closing() and got.messages == [] and got.lost != "reset"


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_bytes_never_raise(pieces: list[bytes]) -> None:
    got, transport = feed(b"".join(pieces), step=17)
    assert transport.is_closing() or sum(map(len, got.messages)) <= sum(map(len, pieces))


@pytest.mark.parametrize("end", [b"\x88\x02\x03\xe8", b"\x81\x02hi"], ids=["close", "protocol error"])
def test_messages_of_the_same_read_before_the_end_are_delivered(end: bytes) -> None:
    # a relay forwards after each read: messages left behind would go to the next circuit's peer
    got, transport = feed(b"\x82\x04last" + end, step=99)
    assert transport.is_closing() and got.seen_after_reads == [[b"last"]]
