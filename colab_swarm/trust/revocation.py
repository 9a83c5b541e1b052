"""How a revocation reaches every peer within a minute: over the DHT, and from peer to peer.

The authority stores its signed list under its own subkey, which nobody else can write. Every peer reads it each 20 s
and asks one linked peer what it knows; whoever learns something new hands it to all it is linked to, so the news
passes even where the DHT does not (its key can be stuffed by a malicious member, its records end after a day).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError, ProtocolError
from colab_swarm.events import EventLog, Fault, PeersRevoked
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, Peers, short
from colab_swarm.trust.messages import ShareRevoked

logger = logging.getLogger(__name__)
PERIOD_S = 20.0
RECORD_S = 24 * 3600.0
CALL_TIMEOUT_S = 10.0


class RevocationWatch:
    """Keeps a peer's `MembershipAdmission` up to date with the authority's list.

    Args:
        peers: the network.
        dht: where the list is found.
        admission: learns the list.
        events: gets `PeersRevoked`, and a `Fault` when looking for revocations fails.
        rng: chooses moments and peers.
        recheck: called when the list has changed; closes the links of the revoked, see `Linker.recheck`.
    """

    def __init__(
        self,
        peers: Peers,
        dht: DHT,
        admission: MembershipAdmission,
        events: EventLog,
        rng: random.Random,
        recheck: Callable[[], None],
    ) -> None:
        self._peers, self._dht, self._admission = peers, dht, admission
        self._events, self._rng, self._recheck = events, rng, recheck
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stored_at = float("-inf")
        peers.serve(ShareRevoked, self._on_share)

    @property
    def key(self) -> str:
        """Where the list lies in the DHT."""
        return f"{self._admission.run_id}/revoked"

    def start(self) -> None:
        """Watch until `stop`."""
        self._spawn(self._watch())

    async def stop(self) -> None:
        """End the background work."""
        self._peers.unserve(ShareRevoked)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spread(self) -> None:
        """Put out who is revoked, and tell everybody: call it at the authority after `Authority.revoke`."""
        self._recheck()
        self._stored_at = float("-inf")
        self._spawn(self._store())
        self._tell_all(but=None)

    # --- learning ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception as error:
                logger.exception("looking for revocations failed")
                self._events.emit(Fault.of(self._loop.time(), "looking for revocations", error))
            await asyncio.sleep(PERIOD_S * self._rng.uniform(0.5, 1.0))

    async def poll(self) -> None:
        """Look once: in the DHT, and at one linked peer."""
        if self._admission.own == self._admission.authority:
            await self._store()
            return
        found = (await self._dht.get(self.key)).get(id_of(self._admission.authority))
        if found is not None and isinstance(found.value, bytes):
            self._learn(found.value, source=None)
        linked = sorted(self._peers.linked())
        if linked:
            await self._share(self._rng.choice(linked), b"")

    def _learn(self, revocations: bytes, source: PeerId | None) -> None:
        before = set(self._admission.revoked.subjects)
        try:
            if not self._admission.learn(revocations):
                return
        except ProtocolError as error:
            logger.warning("%s shares %s", "the DHT" if source is None else short(source), error)
            return
        count = len(set(self._admission.revoked.subjects) - before)
        self._events.emit(PeersRevoked(self._loop.time(), count))
        self._recheck()
        self._tell_all(but=source)

    # --- telling ----------------------------------------------------------------------------------------------

    async def _store(self) -> None:
        """Keep the authority's list in the DHT: it forgets after a day."""
        now = self._loop.time()
        if self._admission.revoked.version and now - self._stored_at > RECORD_S / 24:
            encoded, subkey = self._admission.revoked.encode(), self._peers.id
            if await self._dht.store(self.key, encoded, subkey=subkey, ttl_s=RECORD_S, signed=True):
                self._stored_at = now

    def _tell_all(self, but: PeerId | None) -> None:
        encoded = self._admission.revoked.encode()
        for peer in self._peers.linked() - {but}:
            self._spawn(self._share(peer, encoded))

    async def _share(self, peer: PeerId, encoded: bytes) -> None:
        """Say what we know, and learn what the peer knows."""
        message = ShareRevoked(self._admission.revoked.version, encoded)
        try:
            answer = await self._peers.call(peer, message, ShareRevoked, timeout_s=CALL_TIMEOUT_S)
        except PeerError as error:
            logger.debug("%s does not share its revocations: %s", short(peer), error)
            return
        if answer.revocations:
            self._learn(answer.revocations, peer)

    async def _on_share(self, peer: PeerId, message: ShareRevoked) -> ShareRevoked:
        if message.revocations:
            self._learn(message.revocations, peer)
        known = self._admission.revoked
        return ShareRevoked(known.version, known.encode() if known.version > message.version else b"")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
