"""A peer's use of relays: `Circuits` dials through them, and keeps places at the nearest so that others can dial back.

The messages are those of `colab_swarm.net.relay`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from colab_swarm.errors import PeerError, PeerLost, PeerUnreachable
from colab_swarm.net.addresses import circuit_address, host_of, is_local, is_loopback, relay_of
from colab_swarm.net.carrier import HostPort, LinkType, Path, Receiver
from colab_swarm.net.handshake import TICKET, HandshakeReceiver
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Ack, Contact, PeerId, Refusal, Role, short
from colab_swarm.net.relay import CircuitOffer, CircuitTicket, OpenCircuit, Reserve, Reserved
from colab_swarm.net.websocket import WebSocket

logger = logging.getLogger(__name__)
PLACES = 2
LOOK_EVERY_S = 30.0
SECOND_PLACE_S = 5.0
CALL_TIMEOUT_S = 5.0
CANDIDATES = 8
ENTRIES = 2
"""Addresses of one relay that others learn."""
RETRY_S = 1.0
OFFERS_AT_ONCE = 32
"""Circuits that one relay may offer while this peer still connects: each costs a connection."""
NEARER = 0.7
"""A relay replaces another if its round trip is shorter by this factor."""


def choose(rtts_s: dict[PeerId, float], held: Iterable[PeerId], places: int = PLACES) -> list[PeerId]:
    """Return the relays to have a place at, nearest first; those held get a bonus, to avoid needless changes.

    Args:
        rtts_s: measured round trips to the relays that are alive, seconds.
        held: relays where this peer has a place now.
        places: how many to choose.
    """
    held = set(held)
    return sorted(rtts_s, key=lambda id: (rtts_s[id] * (NEARER if id in held else 1.0), id))[:places]


class Circuits:
    """Lets a node dial through relays at once and, after `start`, be dialled through them.

    Args:
        candidates: returns the relays of the run that this peer knows, in any order.
        on_change: called when the places have changed.

    Attributes:
        places: the relays that hold a place for this peer, each with its circuit addresses.
        seen_at: where each relay sees this peer's connection to it.
    """

    def __init__(
        self,
        node: Node,
        candidates: Callable[[], Awaitable[list[Contact]]],
        on_change: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._node, self._candidates, self._on_change, self._rng = node, candidates, on_change, rng
        self._loop = asyncio.get_running_loop()
        self._look, self._looked = asyncio.Event(), asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self.seen_at: dict[PeerId, HostPort] = {}
        self._accepting: list[PeerId] = []
        self._until: dict[PeerId, float] = {}
        self.places: dict[PeerId, tuple[str, ...]] = {}
        node.linker.open_circuit = self._open
        node.serve(CircuitOffer, self._on_offer, role=Role.REDUCER)
        self._stop_listening = node.on_lost(self._on_lost)

    def start(self) -> None:
        """Look for relays and keep places at the nearest."""
        if self._keeping is None:
            self._keeping = self._node.linker.spawn(self._keep())

    async def wait_looked(self, timeout_s: float) -> None:
        """Return when all relays known at the start have been tried, or the time is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), timeout_s)

    def stop(self) -> None:
        """Give up all places."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        self._forget(list(self.places))

    def close(self) -> None:
        """Stop using relays."""
        self.stop()
        self._stop_listening()
        self._node.linker.open_circuit = None
        self._node.unserve(CircuitOffer)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Circuit addresses of this peer."""
        return tuple(address for addresses in self.places.values() for address in addresses)

    # --- dialling others ------------------------------------------------------------------------------------

    async def _open(self, relay: Contact, peer: PeerId, receiver: HandshakeReceiver) -> WebSocket:
        """Open a connection to ``peer`` through the relay."""
        self._node.learn(relay)
        ticket = await self._node.call(relay.id, OpenCircuit(peer), CircuitTicket, timeout_s=CALL_TIMEOUT_S)
        self.seen_at[relay.id] = (ticket.seen_host, ticket.seen_port)
        websocket = await self._show(relay.id, ticket.token, receiver)
        try:
            await receiver.opened.wait()  # the relay's message: the other end is connected
        except BaseException:
            websocket.abort("no circuit")
            raise
        return websocket

    async def _show(self, relay: PeerId, token: bytes, receiver: Receiver) -> WebSocket:
        """Connect to the relay where the link to it goes, and show a ticket."""
        websocket = await self._node.linker.connect(self._entries(relay)[0], receiver)
        websocket.send_bytes(TICKET + token)
        return websocket

    def _entries(self, relay: PeerId) -> list[str]:
        """Return the direct addresses of the relay, that of the link to it first."""
        path = self._node.path_to(relay)
        known = ((path.address if path else ""), *self._node.contact_of(relay).addresses)
        direct = [address for address in dict.fromkeys(known) if address and relay_of(address) is None]
        if not direct:
            raise PeerUnreachable(f"no address of relay {short(relay)} is known")
        return direct

    # --- being dialled --------------------------------------------------------------------------------------

    async def _on_offer(self, relay: PeerId, offer: CircuitOffer) -> Ack:
        try:
            self._node.linker.require_room()
        except PeerLost as error:
            raise Refusal(str(error)) from error
        if self._accepting.count(relay) >= OFFERS_AT_ONCE:
            raise Refusal(f"{OFFERS_AT_ONCE} of your offers are being accepted: wait")
        self._accepting.append(relay)
        accepting = self._node.linker.spawn(self._accept(relay, offer))
        accepting.add_done_callback(lambda _: self._accepting.remove(relay))
        return Ack()

    async def _accept(self, relay: PeerId, offer: CircuitOffer) -> None:
        path = Path(LinkType.RELAYED, relay=relay, caller_host=offer.seen_host)
        try:
            connect = partial(self._show, relay, offer.token)
            await self._node.linker.shake_hands(connect, expected=None, path=path)
        except PeerError as error:
            logger.info("circuit of %s through %s: %s", short(PeerId(offer.peer)), short(relay), error)

    async def _keep(self) -> None:
        while True:
            began = self._loop.time()
            self._look.clear()
            for relay in [relay for relay in self.places if self._until[relay] - began < 2 * LOOK_EVERY_S]:
                await self._reserve(relay)
            nearest = choose(await self._survey(), self.places)
            for relay in nearest:
                if relay not in self.places:
                    await self._reserve(relay)
            self._looked.set()
            if len(self.places) > PLACES:
                self._forget([relay for relay in self.places if relay not in nearest])
            wait_s = (RETRY_S, SECOND_PLACE_S, LOOK_EVERY_S)[min(len(self.places), 2)]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + wait_s * self._rng.uniform(0.8, 1.2)):
                    await self._look.wait()
            # a relay may give places and hang up, again and again
            await asyncio.sleep(began + RETRY_S * self._rng.uniform(0.8, 1.0) - self._loop.time())

    async def _survey(self) -> dict[PeerId, float]:
        """Return the round trips to relays: those with a place and, while places are missing, a few more."""
        known = {contact.id: contact for contact in await self._candidates()}
        known.pop(self._node.id, None)
        for contact in known.values():
            self._node.learn(contact)
        fresh = [id for id in known if id not in self.places]
        ids = [*self.places, *self._rng.sample(fresh, min(CANDIDATES, len(fresh)))]
        rtts = await asyncio.gather(*(self._rtt(id) for id in ids))
        return {id: rtt_s for id, rtt_s in zip(ids, rtts, strict=True) if rtt_s is not None}

    async def _rtt(self, relay: PeerId) -> float | None:
        """Return the round trip that the handshake or pings measured; None if the relay cannot be reached."""
        if relay not in self._node.linked():
            try:
                await self._node.linker.link_to(relay, CALL_TIMEOUT_S)
            except PeerError as error:
                logger.info("relay %s: %s", short(relay), error)
                return None
        return self._node.statistics(relay).rtt_s

    async def _reserve(self, relay: PeerId) -> None:
        try:
            reserved = await self._node.call(relay, Reserve(), Reserved, timeout_s=CALL_TIMEOUT_S)
            entries = self._entries(relay)
        except PeerError as error:
            logger.info("no place at relay %s: %s", short(relay), error)
            self._forget([relay])
            return
        self._node.linker.pinned.add(relay)
        # others may have to dial it elsewhere than we do
        entries.sort(key=lambda one: (is_loopback(host_of(one)), is_local(host_of(one))))
        before = self.addresses
        self.seen_at[relay] = (reserved.seen_host, reserved.seen_port)
        self.places[relay] = tuple(circuit_address(entry, relay) for entry in entries[:ENTRIES])
        self._until[relay] = self._loop.time() + reserved.seconds
        if self.addresses != before:
            self._on_change()

    def _forget(self, relays: list[PeerId]) -> None:
        gone = [self.places.pop(relay) for relay in relays if relay in self.places]
        self._node.linker.pinned.difference_update(relays)
        if gone:
            self._on_change()

    def _on_lost(self, peer: PeerId) -> None:
        self.seen_at.pop(peer, None)
        if peer in self.places:
            self._forget([peer])
            self._look.set()
