"""A program of the lab: a real peer that does what it is told on stdin, a JSON line each, and answers likewise.

    python -m tests.netlab.peer create RUN OPTIONS
    python -m tests.netlab.peer join INVITATION OPTIONS

OPTIONS is JSON for `PeerOptions`. The first line printed has the peer's contact (id and addresses), its reachability
and an invitation. Commands: ``["reach"]``; ``["path", CONTACT, WAY, SECONDS]`` waits for a link that runs that way
(any, if WAY is empty); ``["send", CONTACT, BYTES]`` sends so much noise and tells whether it came whole.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from hashlib import sha256
from random import Random
from typing import Any

import colab_swarm as cs
from colab_swarm.errors import PeerError
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Message, PeerId, Stream, StreamEnded
from colab_swarm.runtime import Runtime

PIECE_BYTES = 120 * 1024
TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.005


class Noise(Message, frozen=True):
    """Opens a stream, and is each piece of it."""


class Digest(Message, frozen=True):
    sha256: bytes


async def take(opening: Noise, stream: Stream) -> None:
    """Receive all, answer with its digest."""
    digest = sha256()
    try:
        while True:
            digest.update((await stream.receive(Noise))[1])
    except StreamEnded:
        await stream.send(Digest(digest.digest()))


async def send(node: Node, peer: PeerId, size: int) -> dict[str, Any]:
    """Whether ``size`` bytes came whole, how long it took, which way."""
    began_at = time.monotonic()
    data = memoryview(Random(size).randbytes(size))
    try:
        async with await node.stream(peer, Noise(), timeout_s=TIMEOUT_S) as stream:
            for begin in range(0, size, PIECE_BYTES):
                await stream.send(Noise(), data[begin : begin + PIECE_BYTES])
            await stream.end()
            answer, _ = await stream.receive(Digest)
    except PeerError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began_at}
    intact = answer.sha256 == sha256(data).digest()
    return {"intact": intact, "seconds": time.monotonic() - began_at, "path": str(node.path_to(peer))}


async def path(node: Node, peer: PeerId, way: str, seconds: float) -> dict[str, Any]:
    """Link to the peer if there is no link, wait until it runs that way; the first and the last path seen."""
    began_at = time.monotonic()
    try:
        if peer not in node.linked():
            await (await node.stream(peer, Noise(), timeout_s=seconds)).end()
    except PeerError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began_at}
    first, linked_s = str(node.path_to(peer)), time.monotonic() - began_at
    while (now := node.path_to(peer)) is None or way not in ("", now.way.value):
        if time.monotonic() - began_at > seconds:
            break
        await asyncio.sleep(LOOK_EVERY_S)
    return {
        "first": first,
        "linked_s": linked_s,
        "path": str(node.path_to(peer)),
        "seconds": time.monotonic() - began_at,
    }


def main() -> None:
    verb, what, options = sys.argv[1], sys.argv[2], cs.PeerOptions(**json.loads(sys.argv[3]))
    swarm = (cs.create if verb == "create" else cs.join)(what, options=options)
    node = swarm._services.peers
    assert isinstance(node, Node)
    node.serve_stream(Noise, take)

    def state() -> dict[str, Any]:
        contact = (swarm.id.hex(), swarm.contact.addresses)
        return {"contact": contact, "reach": str(swarm.reachability), "why": swarm.reachability.explain()}

    def met(contact: tuple[str, list[str]]) -> PeerId:
        peer = PeerId(bytes.fromhex(contact[0]))
        node.learn(Contact(peer, tuple(contact[1])))
        return peer

    print(json.dumps({**state(), "invite": str(swarm.invite())}), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["reach"]:
                answer = state()
            case ["path", contact, way, seconds]:
                answer = Runtime.shared().call(path(node, met(contact), way, seconds))
            case ["send", contact, size]:
                answer = Runtime.shared().call(send(node, met(contact), size))
            case unknown:
                raise ValueError(f"no such command: {unknown}")
        print(json.dumps(answer), flush=True)
    swarm.leave()


if __name__ == "__main__":
    main()
