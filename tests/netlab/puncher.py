"""A program of the lab: punches again and again, coordinated through a plain TCP server instead of a relayed link.

    python -m tests.netlab.puncher coordinate PORT
    python -m tests.netlab.puncher ask|answer HOST PORT TRIES SECONDS

The end that asks prints a line per try: the seconds until a connection carried both ends' greetings, or null.
"""

import asyncio
import json
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from colab_swarm.net.upgrade import Endpoint, plan_tries, punch
from colab_swarm.net.websocket import bound_socket

GREETING = {True: b"I was asked", False: b"I asked you"}
COORDINATION_S = 30.0


async def coordinate(port: int) -> None:
    """Pair connections as they come; report to each its address, then pass their lines to each other."""
    waiting: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(writer.get_extra_info("peername")[:2]).encode() + b"\n")
        waiting.append((reader, writer))
        if len(waiting) == 2:
            (one, to_one), (other, to_other) = waiting
            waiting.clear()
            await asyncio.gather(pump(one, to_other), pump(other, to_one))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    async with await asyncio.start_server(on_connection, "0.0.0.0", port) as server:
        print(json.dumps({"ready": True}), flush=True)
        await server.serve_forever()


async def punch_once(answering: bool, coordinator: tuple[str, int], seconds: float) -> float | None:
    """Seconds from the start signal to the first connection that both greeted over; None if there was none."""
    loop = asyncio.get_running_loop()
    control = bound_socket()
    await loop.sock_connect(control, coordinator)
    own: Endpoint = control.getsockname()[:2]
    reader, writer = await asyncio.open_connection(sock=control)
    async with asyncio.timeout(COORDINATION_S):
        seen = msgspec.json.decode(await reader.readline(), type=Endpoint)
        told_at = loop.time()
        if not answering:
            writer.write(msgspec.json.encode((seen, own)) + b"\n")
        targets = msgspec.json.decode(await reader.readline(), type=tuple[Endpoint, ...])
        if answering:
            writer.write(msgspec.json.encode((seen, own)) + b"\n")
            rtt_s = float(await reader.readline())
        else:
            rtt_s = loop.time() - told_at
            writer.write(b"%f\n" % rtt_s)
    began_at = loop.time()
    tries = plan_tries(began_at, began_at + seconds, rtt_s=rtt_s, answering=answering, rng=random.Random())
    done = await first_greeted(own[1], targets, tries, began_at + seconds, answering)
    writer.close()
    return None if done is None else done - began_at


async def first_greeted(
    port: int, targets: Sequence[Endpoint], tries: Sequence[float], until: float, answering: bool
) -> float | None:
    """When the first connection had carried a greeting each way (loop time)."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[float] = loop.create_future()

    async def greet(connected: socket.socket) -> None:
        with connected, suppress(OSError):
            await loop.sock_sendall(connected, GREETING[answering])
            if await loop.sock_recv(connected, 64) == GREETING[not answering] and not first.done():
                first.set_result(loop.time())
            await loop.sock_recv(connected, 64)  # until the other end is satisfied, too

    greetings: list[asyncio.Task[None]] = []
    punching = asyncio.create_task(
        punch(port, targets, tries, lambda connected: greetings.append(asyncio.create_task(greet(connected))))
    )
    await asyncio.wait((first,), timeout=until - loop.time())
    for task in (punching, *greetings):
        task.cancel()
    await asyncio.gather(punching, *greetings, return_exceptions=True)
    return first.result() if first.done() else None


async def main() -> None:
    if sys.argv[1] == "coordinate":
        await coordinate(int(sys.argv[2]))
    answering = sys.argv[1] == "answer"
    for _ in range(int(sys.argv[4])):
        seconds = await punch_once(answering, (sys.argv[2], int(sys.argv[3])), float(sys.argv[5]))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
