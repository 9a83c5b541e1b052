"""All that a peer does about trust, wired together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from colab_swarm.dht.service import DHT
from colab_swarm.events import EventLog
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Peers, Role
from colab_swarm.trust.authority import Authority, AuthoritySettings
from colab_swarm.trust.book import AuthorityBook
from colab_swarm.trust.contributions import Contributions
from colab_swarm.trust.member import Credentials, Member
from colab_swarm.trust.revocation import RevocationWatch


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
        self._member: Member | None = None
        self._watch: RevocationWatch | None = None
        if closed is None or admission is None or links is None:
            return
        self._member = Member(
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
