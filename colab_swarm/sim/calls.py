"""Ten thousand peers that call each other on virtual time: latency only, no links, streams, credit or faults.

For the DHT at scale. A `SimNetwork` runs two real links for each pair that ever talked, which is too much for it.
"""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from colab_swarm.errors import CallRefused, PeerTimeout
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import Contact, M, Message, PeerId, R, Refusal, Role
from colab_swarm.sim.network import EPOCH
from colab_swarm.sim.profiles import NetworkProfile

HEADER_BYTES = 100
DIAL_ROUND_TRIPS = 3  # TCP, the WebSocket upgrade, the handshake


class CallNetwork:
    """Thousands of peers that call each other in virtual time: latency without links, credit and shared bandwidth.

    Attributes:
        silent: names of peers that never answer.
        linked: whether two peers have a link already; other pairs dial, which takes three round trips.
        on_message: called with each message that arrives.
    """

    def __init__(self, profile: NetworkProfile, *, seed: int = 0) -> None:
        self.profile, self.seed = profile, seed
        self.rng, self.loop = random.Random(seed), asyncio.get_running_loop()
        self.by_id: dict[PeerId, CallPeer] = {}
        self.silent: set[str] = set()
        self.linked: Callable[[CallPeer, CallPeer], bool] = lambda one, other: False
        self.on_message: Callable[[Message], object] = lambda message: None

    def peer(self, name: str) -> "CallPeer":
        peer = CallPeer(self, name)
        self.by_id[peer.id] = peer
        return peer

    async def carry(self, message: Message, receiver: "CallPeer", latency_s: float) -> None:
        """Wait until the message has arrived."""
        size_bytes = len(msgspec.msgpack.encode(message)) + HEADER_BYTES
        jitter_s = self.rng.expovariate(1 / self.profile.jitter_s) if latency_s else 0.0
        await asyncio.sleep(latency_s + jitter_s + 8 * size_bytes / self.profile.hosts[0].upload_bps)
        receiver.received_bytes += size_bytes
        self.on_message(message)


class CallPeer:
    """As much of `Peers` as a DHT and an expert directory use."""

    def __init__(self, network: CallNetwork, name: str) -> None:
        identity = Identity(hashlib.sha256(f"{network.seed} {name}".encode()).digest())
        self.id, self.public_key, self.sign = identity.id, identity.public_key, identity.sign
        self.name, self.contact = name, Contact(identity.id, (f"ws://peer-{name}:1",))
        self.received_bytes = 0
        self._network = network
        self._links: dict[PeerId, float] = {self.id: 0.0}  # one-way latency
        self._contacts: dict[PeerId, Contact] = {}
        self._handlers: dict[type[Message], Callable[[PeerId, Any], Awaitable[Any]]] = {}

    def time(self) -> float:
        return EPOCH + self._network.loop.time()

    def learn(self, contact: Contact) -> None:
        self._contacts[contact.id] = contact

    def contact_of(self, peer: PeerId) -> Contact:
        return self._contacts.get(peer, Contact(peer))

    def serve(
        self, kind: type[M], handler: Callable[[PeerId, M], Awaitable[Message]], *, role: Role = Role.VIEWER
    ) -> None:
        self._handlers[kind] = handler

    def unserve(self, kind: type[Message]) -> None:
        self._handlers.pop(kind, None)

    async def call(self, peer: PeerId, message: Message, reply: type[R], *, timeout_s: float) -> R:
        network, other = self._network, self._network.by_id[peer]
        try:
            async with asyncio.timeout(timeout_s):
                if {self.name, other.name} & network.silent:
                    await network.loop.create_future()
                if peer not in self._links:
                    await self._link_to(other)
                latency_s = self._links[peer]
                await network.carry(message, other, latency_s)
                answer: R = await other._handlers[type(message)](self.id, message)
                await network.carry(answer, self, latency_s)
                return answer
        except TimeoutError as error:
            raise PeerTimeout(f"{other.name} does not answer") from error
        except Refusal as error:
            raise CallRefused("refused", str(error)) from error

    async def _link_to(self, other: "CallPeer") -> None:
        network = self._network
        latency_s = network.profile.pair_latency_s(self.name, other.name, seed=network.seed)
        if not network.linked(self, other):
            await asyncio.sleep(2 * latency_s * DIAL_ROUND_TRIPS)
        self._links[other.id] = other._links[self.id] = latency_s
