"""A program of the lab: a real peer that obeys commands on stdin, a JSON line each, and answers likewise.

    python -m tests.netlab.peer create RUN OPTIONS
    python -m tests.netlab.peer join INVITATION OPTIONS

OPTIONS is JSON for `NetworkOptions`. The first line printed has the peer's contact (id and addresses), its reachability
and an invitation; ``["reach"]`` prints the like again. The other commands are coroutines here of the same name:
``["path", CONTACT, WAY, SECONDS]``, ``["send", CONTACT, BYTES]``.
"""

import asyncio
import json
import sys
import time
from hashlib import sha256
from typing import Any

import numpy as np

import colab_swarm as cs
from colab_swarm.errors import PeerError
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Message, PeerId, Stream, StreamEnded
from colab_swarm.runtime import Runtime

PIECE_BYTES = 120 * 1024
TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.005


class Piece(Message, frozen=True):
    """Opens a stream, and goes with each piece of a tensor."""


class Digest(Message, frozen=True):
    sha256: bytes


class Echo(Message, frozen=True):
    text: str


async def take(opening: Piece, stream: Stream) -> None:
    digest = sha256()
    try:
        while True:
            digest.update((await stream.receive(Piece))[1])
    except StreamEnded:
        await stream.send(Digest(digest.digest()))


async def echo(peer: PeerId, message: Echo) -> Echo:
    return message


async def send(node: Node, peer: PeerId, size: int) -> dict[str, Any]:
    """Send the tensor of ``size`` bytes; says whether it came intact."""
    values = np.random.default_rng(size).standard_normal(size // 4, dtype=np.float32)
    data = memoryview(values).cast("B")
    async with await node.stream(peer, Piece(), timeout_s=TIMEOUT_S) as stream:
        path = node.path_to(peer)
        for begin in range(0, size, PIECE_BYTES):
            await stream.send(Piece(), data[begin : begin + PIECE_BYTES])
        await stream.end()
        answer, _ = await stream.receive(Digest)
    return {"intact": answer.sha256 == sha256(data).digest(), "path": str(path)}


async def path(node: Node, peer: PeerId, way: str, seconds: float) -> dict[str, Any]:
    """Call the peer, then wait until the link to it runs one of the ways (any if empty)."""
    began_at = time.monotonic()
    await node.call(peer, Echo("hello"), Echo, timeout_s=seconds)
    linked_s = time.monotonic() - began_at
    while (now := node.path_to(peer)) is None or (way and now.way.value not in way):
        if time.monotonic() - began_at > seconds:
            break
        await asyncio.sleep(LOOK_EVERY_S)
    return {"path": str(node.path_to(peer)), "linked_s": linked_s}


COMMANDS = {command.__name__: command for command in (send, path)}


async def obey(node: Node, command: str, contact: tuple[str, list[str]], *rest: Any) -> dict[str, Any]:
    peer = PeerId(bytes.fromhex(contact[0]))
    node.learn(Contact(peer, tuple(contact[1])))
    try:
        return await COMMANDS[command](node, peer, *rest)
    except PeerError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def tell(fact: dict[str, Any]) -> None:
    print(json.dumps(fact), flush=True)


def state(swarm: cs.Swarm) -> dict[str, Any]:
    contact = (swarm.id.hex(), swarm.services.peers.contact.addresses)
    return {"contact": contact, "reach": str(swarm.reachability), "why": swarm.reachability.explain()}


def main() -> None:
    verb, what, options = sys.argv[1], sys.argv[2], cs.NetworkOptions(**json.loads(sys.argv[3]))
    swarm = (cs.create if verb == "create" else cs.join)(what, options=options)
    node = swarm.services.peers
    assert isinstance(node, Node)
    node.serve(Echo, echo)
    node.serve_stream(Piece, take)
    tell({**state(swarm), "invite": str(swarm.invite())})
    for line in sys.stdin:
        command = json.loads(line)
        tell(state(swarm) if command == ["reach"] else Runtime.shared().call(obey(node, *command)))
    swarm.leave()


if __name__ == "__main__":
    main()
