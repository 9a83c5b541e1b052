"""The contributions of each peer, as this peer saw them and as linked peers reported them. No peer can credit itself.

- *Samples.* In a round, all other reducers together credit a contributor once with the samples of its gradient. Each
  gives a part in proportion to its share of the averaged vector: reducer j credits contributor p with
  ``samples_p * share_j / (1 - share_p)``. If p is the only reducer, the other members share the
  credit evenly. A round with only one member does not count. In a bucket, each member credits all samples.
- *Bytes reduced.* Every other member credits a reducer with the float32 bytes that the reducer averaged for it.
- *Bytes relayed.* Each end of a circuit credits the relay with half of the circuit's bytes.
- *Work units, expert calls.* The peer that gets a service credits the peer that gives it.

A *tally* is one peer's list of the contributions that it saw. A peer sends only its own tally, over a link, and the
link proves the peer's identity. So tallies need no signature.
"""

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from colab_swarm.averaging.group import Group, Span
from colab_swarm.errors import PeerError, require
from colab_swarm.markup import count, facts, plain, size
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Role, remember, short

logger = logging.getLogger(__name__)
Kind: TypeAlias = Literal["samples", "reduced_bytes", "relayed_bytes", "units", "expert_calls"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VALUE_BYTES = 4
MAX_ROWS = 300  # maximum number of peers in a tally
MAX_TALLIES = 100  # maximum number of other peers' tallies
MAX_AMOUNT = 1e18
SHARE_S = 30.0
SHARE_TIMEOUT_S = 3.0
COLUMNS = ("", "peer", "id", "samples", "averaged for others", "relayed for others", "units", "expert calls")
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_AMOUNT)]


class Contribution(Message, frozen=True):
    """A peer's contributions to the swarm, as other peers saw them."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=32, max_length=32)]
    samples: Amount = 0.0
    reduced_bytes: Amount = 0.0
    relayed_bytes: Amount = 0.0
    units: Amount = 0.0
    expert_calls: Amount = 0.0

    def __repr__(self) -> str:
        words = [short(self.peer)]
        for kind in KINDS:
            amount = getattr(self, kind)
            if amount:
                words.append(f"{kind}={amount:,.0f}")
        return f"Contribution({', '.join(words)})"


# what one peer saw the others contribute
Tally: TypeAlias = Annotated[tuple[Contribution, ...], msgspec.Meta(max_length=MAX_ROWS)]


class ShareTally(Message, frozen=True):
    """Call and answer: the contributions of other peers that the sender saw."""

    tally: Tally


class ContributionLedger:
    """One peer's tally of the others' contributions. Free of I/O."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._totals: dict[tuple[Kind, PeerId], int] = {}
        self._amounts: dict[PeerId, dict[Kind, float]] = {}

    def credit(self, peer: PeerId, kind: Kind, amount: float) -> None:
        """Count a contribution of another peer, but none of this peer itself.

        Raises ValueError if the amount is negative or not finite.
        """
        require(0 <= amount < math.inf, f"{amount} {kind} cannot be credited")
        if peer == self._own or not amount:
            return
        amounts = self._amounts.setdefault(peer, dict.fromkeys(KINDS, 0.0))
        amounts[kind] = min(amounts[kind] + amount, MAX_AMOUNT)
        if len(self._amounts) > 2 * MAX_ROWS:
            self._amounts = self._largest()

    def on_totals(self, kind: Kind, totals: Mapping[PeerId, int], part: float = 1.0) -> None:
        """Credit other peers with the fraction ``part`` of their services to this peer since the last call.

        ``totals`` has the amounts since this peer's start.
        """
        for peer, total in totals.items():
            self.credit(peer, kind, part * (total - self._totals.get((kind, peer), 0)))
            self._totals[kind, peer] = total

    def on_bucket_round(self, samples: Mapping[PeerId, float]) -> None:
        """Count a round in a bucket by its contributors' samples. Every member reads them in the bucket."""
        for member, computed in samples.items():
            self.credit(member, "samples", computed)

    def on_round(
        self, group: Group, contributors: Collection[PeerId], spans_lost: Collection[Span] = ()
    ) -> None:
        """Count a round over links in which this peer took part. The arguments come from its `GroupResult`."""
        total = sum(member.share for member in group.members)
        mine = sum(member.share for member in group.members if member.id == self._own) / total
        for member, span in zip(group.members, group.spans(), strict=True):
            if member.id in contributors:
                others = 1.0 - member.share / total
                if others > 1e-9:
                    part = mine / others
                else:
                    part = 1.0 / max(1, len(group.members) - 1)
                self.credit(member.id, "samples", member.samples * part)
            if span not in spans_lost:
                self.credit(member.id, "reduced_bytes", float(span.numel * VALUE_BYTES))

    def tally(self) -> Tally:
        return tuple(Contribution(peer, **amounts) for peer, amounts in self._largest().items())

    def resume(self, tally: Tally) -> None:
        for contribution in tally:
            for kind in KINDS:
                self.credit(contribution.peer, kind, getattr(contribution, kind))

    def _largest(self) -> dict[PeerId, dict[Kind, float]]:
        """Return the `MAX_ROWS` peers with the largest fractions of all totals, the largest first."""
        totals = {kind: sum(amounts[kind] for amounts in self._amounts.values()) or 1.0 for kind in KINDS}
        parts = {}
        for peer, amounts in self._amounts.items():
            parts[peer] = sum(amounts[kind] / totals[kind] for kind in KINDS)
        largest = sorted(parts, key=lambda peer: parts[peer], reverse=True)
        return {peer: self._amounts[peer] for peer in largest[:MAX_ROWS]}


def sum_tallies(tallies: Mapping[PeerId, Tally]) -> tuple[Contribution, ...]:
    """Add up ``tallies``, a mapping by writer; return the contributions with most samples first.

    A writer's report about itself does not count.
    """
    sums: dict[PeerId, dict[Kind, float]] = {}
    for writer, tally in tallies.items():
        # a tally counts each peer only once
        by_peer = {contribution.peer: contribution for contribution in tally}
        by_peer.pop(writer, None)
        for peer, contribution in by_peer.items():
            amounts = sums.setdefault(peer, dict.fromkeys(KINDS, 0.0))
            for kind in KINDS:
                amounts[kind] += getattr(contribution, kind)
    contributions = [Contribution(peer, **amounts) for peer, amounts in sums.items()]
    contributions.sort(key=lambda credit: (-credit.samples, -credit.reduced_bytes, credit.peer))
    return tuple(contributions)


class Contributions:
    """This peer's ledger, which continues the ``saved`` tally, and the last tallies from reducers and workers."""

    def __init__(self, peers: Node, rng: random.Random, saved: Tally = ()) -> None:
        self._peers = peers
        self._rng = rng
        self._told: dict[PeerId, Tally] = {}
        self.ledger = ContributionLedger(peers.id)
        self.ledger.resume(saved)
        self.expert_calls: Mapping[PeerId, int] = {}  # number of calls that the experts of each host answered
        # for each coordinator here, a function that returns how many units each volunteer has trained for it
        self.units: dict[object, Callable[[], Mapping[PeerId, int]]] = {}
        peers.serve(ShareTally, self._on_share)

    async def share(self) -> None:
        """Exchange tallies with one linked peer. Call this every `SHARE_S` seconds."""
        linked = sorted(self._peers.linked())
        if linked:
            await self._share_with(self._rng.choice(linked))

    async def share_with_all(self) -> None:
        """Exchange tallies with all linked peers."""
        await asyncio.gather(*map(self._share_with, self._peers.linked()))

    async def read(self) -> tuple[Contribution, ...]:
        """Ask all linked peers for their tallies; return the sum of all tallies, most samples first."""
        await self.share_with_all()
        return self.known()

    def known(self) -> tuple[Contribution, ...]:
        """Return the sum of this peer's tally and the received tallies, most samples first."""
        return sum_tallies({**self._told, self._peers.id: self.tally()})

    def tally(self) -> Tally:
        """Return the ledger's tally, with all services that this peer has received until now."""
        # each end of a circuit counts half
        self.ledger.on_totals("relayed_bytes", self._peers.metering.relayed_bytes(), 0.5)
        self.ledger.on_totals("expert_calls", dict(self.expert_calls))
        units = Counter[PeerId]()
        for accepted in self.units.values():
            units.update(accepted())
        self.ledger.on_totals("units", units)
        return self.ledger.tally()

    async def _share_with(self, peer: PeerId) -> None:
        try:
            message = ShareTally(self.tally())
            answer = await self._peers.call(peer, message, ShareTally, timeout_s=SHARE_TIMEOUT_S)
            self._take(peer, answer.tally)
        except PeerError as error:
            logger.debug("%s does not share its tally: %s", short(peer), error)

    async def _on_share(self, peer: PeerId, message: ShareTally) -> ShareTally:
        self._take(peer, message.tally)
        return ShareTally(self.tally())

    def _take(self, peer: PeerId, tally: Tally) -> None:
        # viewers take no part in rounds, so their tallies do not count
        if self._peers.role_of(peer) >= Role.REDUCER:
            remember(self._told, peer, tally, MAX_TALLIES)


class Leaderboard(tuple[Contribution, ...]):
    """Each peer's contributions, as this peer saw them or as linked peers reported them, most samples first."""

    names: Mapping[str, str]  # names that peers chose, by short id; not verified
    me: PeerId

    def __new__(cls, given: Iterable[Contribution], names: Mapping[str, str], me: PeerId) -> "Leaderboard":
        board = super().__new__(cls, given)
        board.names = names
        board.me = me
        return board

    def __getnewargs__(self) -> tuple[tuple[Contribution, ...], Mapping[str, str], PeerId]:
        return tuple(self), self.names, self.me

    def __repr__(self) -> str:
        samples = sum(contribution.samples for contribution in self)
        return f"Leaderboard({count(len(self), 'peer')}, {samples:,.0f} samples)"

    def _repr_html_(self) -> str:
        nothing = "" if self else ": none yet"
        rows = [self._row(place, contribution) for place, contribution in enumerate(self, 1)]
        title = f"Leaderboard: contributions that this peer saw, or that linked peers told it{nothing}"
        return facts(title, {}, COLUMNS, rows)

    def _row(self, place: int, contribution: Contribution) -> tuple[str, ...]:
        peer = short(contribution.peer)
        name = plain(self.names.get(peer, ""), 40)
        if contribution.peer == self.me:
            name += " (me)"
        return (
            f"{place}.",
            name,
            peer,
            f"{contribution.samples:,.0f}",
            size(contribution.reduced_bytes),
            size(contribution.relayed_bytes),
            f"{contribution.units:,.0f}",
            f"{contribution.expert_calls:,.0f}",
        )
