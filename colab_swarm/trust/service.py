"""All that a peer does about trust, wired together.

How a revocation reaches every peer within a minute: over the DHT, and from peer to peer.

The authority stores its signed list under its own subkey, which nobody else can write. Every peer reads it each 20 s
and asks one linked peer what it knows; whoever learns something new hands it to all it is linked to, so the news
passes even where the DHT does not (its key can be stuffed by a malicious member, its records end after a day).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError, ProtocolError
from colab_swarm.events import EventLog, Fault, PeersRevoked
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Peers, Role, short
from colab_swarm.trust.authority import Authority, AuthorityBook, AuthoritySettings, ShareRevoked
from colab_swarm.trust.contributions import Contributions
from colab_swarm.trust.member import Credentials, RunMember

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


@dataclass(frozen=True)
class LinkControl:
    """What trust wants of the links.

    Attributes:
        readmit, recheck: see `Linker`.
        behind_s: see `SwarmClock`.
        relayed_bytes: see `Metering`.
    """

    readmit: Callable[[PeerId, bytes], Role]
    recheck: Callable[[], None]
    behind_s: Callable[[], float]
    relayed_bytes: Callable[[], dict[PeerId, int]] = dict

    @classmethod
    def of(cls, node: Node) -> LinkControl:
        """That of a peer on the real network."""
        linker = node.linker
        return cls(
            linker.readmit, linker.recheck, lambda: linker.clock.behind_s, linker.metering.relayed_bytes
        )


@dataclass(frozen=True)
class ClosedRun:
    """A peer's place in a run that is not open to everybody.

    Attributes:
        admission: the one that its links ask.
        credentials: what lets it in; None at the authority.
        book: the authority's memory; None elsewhere.
        settings: how the authority admits.
    """

    admission: MembershipAdmission
    credentials: Credentials | None = None
    book: AuthorityBook | None = None
    settings: AuthoritySettings = field(default_factory=AuthoritySettings)


class Trust:
    """A peer's membership, its news of revocations, and the contribution ledger; in an open run the last alone.

    Attributes:
        contributions: the ledger.
        authority: where this peer is the authority of a closed run.
    """

    def __init__(
        self,
        peers: Peers,
        dht: DHT,
        events: EventLog,
        rng: random.Random,
        run_id: str,
        closed: ClosedRun | None = None,
        links: LinkControl | None = None,
    ) -> None:
        admission = closed.admission if closed else None
        self.contributions = Contributions(
            peers, dht, run_id, admission, links.relayed_bytes if links else dict, events
        )
        self.authority: Authority | None = None
        self._member: RunMember | None = None
        self._watch: RevocationWatch | None = None
        if closed is None or admission is None or links is None:
            return
        self._member = RunMember(
            peers, dht, admission, events, closed.credentials, links.readmit, links.behind_s
        )
        self._watch = RevocationWatch(peers, dht, admission, events, rng, links.recheck)
        if closed.book is not None:
            self.authority = Authority(peers, admission, closed.book, closed.settings, links.readmit)

    async def join(self) -> None:
        """Get a membership, before the DHT is asked for anything.

        Raises:
            JoinError: this peer is not let in.
        """
        if self._member is not None:
            await self._member.join()

    def start(self) -> None:
        """Keep it all going until `stop`."""
        self.contributions.start()
        if self._member is not None and self._watch is not None:
            self._member.start()
            self._watch.start()

    async def stop(self) -> None:
        """End the background work; while the DHT still runs."""
        async with contextlib.AsyncExitStack() as ends:  # the last first; no failure skips another
            if self._member is not None and self._watch is not None:
                ends.push_async_callback(self._watch.stop)
                ends.push_async_callback(self._member.stop)
            if self.authority is not None:
                ends.callback(self.authority.close)
            await self.contributions.stop()

    def revoke(self, subject: PeerId) -> None:
        """Put a peer out of the run, or an invitation (the id of its key).

        Raises:
            PermissionError: this peer is not the authority.
            ValueError: it is, and would put itself out.
        """
        if self.authority is None or self._watch is None:
            raise PermissionError("only the peer that created the run, if it is not open, can put others out")
        self.authority.revoke(subject)
        self._watch.spread()
