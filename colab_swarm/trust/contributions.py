"""The contribution ledger: what each peer contributed, as other peers saw it. No peer can credit itself.

- *Samples.* A contributor is credited once in total with the samples of its gradient in a round.
  The other reducers divide this by their shares of the averaged vector: j credits p with
  ``samples_p * share_j / (1 - share_p)``. If p is the only reducer, the other members divide the
  credit evenly. A round of one is not counted.
- *Bytes reduced.* Every other member credits a reducer with the float32 bytes that it averaged for it.
- *Bytes relayed.* Each end of a circuit credits the relay with half of the circuit's bytes.
- *Work units, expert calls.* The served peer credits the serving one.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from colab_swarm.averaging.group import Group, Span
from colab_swarm.dht.records import Record
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError, require
from colab_swarm.markup import count, facts, plain, size
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import Key
from colab_swarm.net.node import Node
from colab_swarm.net.peers import UNDECODABLE, Message, PeerId, short

logger = logging.getLogger(__name__)
Kind: TypeAlias = Literal["samples", "reduced_bytes", "relayed_bytes", "units", "expert_calls"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VALUE_BYTES = 4
MAX_ROWS = 300  # peers in a tally; they fit in one record
MAX_AMOUNT = 1e18
PUBLISH_S = 30.0
RECORD_S = 24 * 3600.0
SHARDS = 8  # keys over which the tallies are spread: all records of one key must fit in one message
COLUMNS = ("", "peer", "id", "samples", "averaged for others", "relayed for others", "units", "expert calls")
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_AMOUNT)]


class TallyRow(Message, frozen=True):
    """What one peer contributed, as another saw it; amounts in the order of `KINDS`."""

    peer: Key
    amounts: Annotated[tuple[Amount, ...], msgspec.Meta(min_length=len(KINDS), max_length=len(KINDS))]


class ContributionTally(Message, frozen=True):
    """What a peer saw others contribute; ``key`` is the writer's."""

    key: Key
    rows: Annotated[tuple[TallyRow, ...], msgspec.Meta(max_length=MAX_ROWS)]


@dataclass(frozen=True, repr=False)
class Contribution:
    """What a peer contributed to the swarm, as other peers saw it."""

    peer: PeerId
    samples: float = 0.0
    reduced_bytes: float = 0.0
    relayed_bytes: float = 0.0
    units: float = 0.0
    expert_calls: float = 0.0

    def __repr__(self) -> str:
        words = [short(self.peer)]
        for kind in KINDS:
            amount = getattr(self, kind)
            if amount:
                words.append(f"{kind}={amount:,.0f}")
        return f"Contribution({', '.join(words)})"


class ContributionLedger:
    """One peer's tally of the others' contributions. Free of I/O."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._totals: dict[tuple[Kind, PeerId], int] = {}
        self._amounts: dict[PeerId, list[float]] = {}

    def credit(self, peer: PeerId, kind: Kind, amount: float) -> None:
        """Count a contribution, none of this peer itself; ValueError unless finite and >= 0."""
        require(0 <= amount < math.inf, f"{amount} {kind} cannot be credited")
        if peer == self._own or not amount:
            return
        amounts = self._amounts.setdefault(peer, [0.0] * len(KINDS))
        index = KINDS.index(kind)
        amounts[index] = min(amounts[index] + amount, MAX_AMOUNT)
        if len(self._amounts) > 2 * MAX_ROWS:
            self._amounts = dict(self._largest())

    def on_totals(self, kind: Kind, totals: Mapping[PeerId, int], part: float = 1.0) -> None:
        """Count what others did for this peer since the last time, a ``part`` of it; ``totals`` began at its start."""
        for peer, total in totals.items():
            self.credit(peer, kind, part * (total - self._totals.get((kind, peer), 0)))
            self._totals[kind, peer] = total

    def on_bucket_round(self, samples: Mapping[PeerId, float]) -> None:
        """Count a round in a bucket, by its contributors' samples: all members confirm an equal part of each."""
        others = max(1, len(samples) - 1)
        for member, computed in samples.items():
            self.credit(member, "samples", computed / others)

    def on_round(
        self, group: Group, contributors: Collection[PeerId], spans_lost: Collection[Span] = ()
    ) -> None:
        """Count a round of this peer over links, as in its `GroupResult`."""
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

    def rows(self) -> tuple[TallyRow, ...]:
        return tuple(TallyRow(peer, tuple(amounts)) for peer, amounts in self._largest())

    def resume(self, rows: Iterable[TallyRow]) -> None:
        for row in rows:
            for kind, amount in zip(KINDS, row.amounts, strict=True):
                self.credit(PeerId(row.peer), kind, amount)

    def _largest(self) -> list[tuple[PeerId, list[float]]]:
        totals = [sum(column) or 1.0 for column in zip(*self._amounts.values(), strict=True)]
        parts = {}
        for peer, amounts in self._amounts.items():
            parts[peer] = sum(amount / total for amount, total in zip(amounts, totals, strict=True))
        return sorted(self._amounts.items(), key=lambda entry: parts[entry[0]], reverse=True)[:MAX_ROWS]


def leaderboard(tallies: Iterable[ContributionTally]) -> tuple[Contribution, ...]:
    sums: dict[PeerId, list[float]] = {}
    for tally in tallies:
        writer = id_of(tally.key)
        for row in {row.peer: row for row in tally.rows if row.peer != writer}.values():
            amounts = sums.setdefault(PeerId(row.peer), [0.0] * len(KINDS))
            for kind, amount in enumerate(row.amounts):
                amounts[kind] += amount
    contributions = [Contribution(peer, *amounts) for peer, amounts in sums.items()]
    contributions.sort(key=lambda credit: (-credit.samples, -credit.reduced_bytes, credit.peer))
    return tuple(contributions)


def merged(*tallies: Iterable[TallyRow]) -> tuple[TallyRow, ...]:
    """Merge tallies of one writer: keep the largest value of each amount, since amounts only grow."""
    found: dict[bytes, TallyRow] = {}
    for row in (row for rows in tallies for row in rows):
        found[row.peer] = TallyRow(row.peer, tuple(map(max, row.amounts, found.get(row.peer, row).amounts)))
    return tuple(found.values())


class Contributions:
    """Publishes this peer's ledger in the DHT and reads all others'."""

    def __init__(
        self, peers: Node, dht: DHT, run_id: str, relayed_bytes: Callable[[], Mapping[PeerId, int]] = dict
    ) -> None:
        self._peers = peers
        self._dht = dht
        self._run_id = run_id
        self._relayed_bytes = relayed_bytes
        self._loop = asyncio.get_running_loop()
        self._published: tuple[TallyRow, ...] = ()
        self._published_at = float("-inf")
        self._resumed = False
        self.ledger = ContributionLedger(peers.id)
        self.saved: tuple[TallyRow, ...] = ()
        self.expert_calls: Mapping[PeerId, int] = {}  # that the experts of each host have answered
        # by coordinator: the units that volunteers have trained for it
        self.units: dict[object, Callable[[], Mapping[PeerId, int]]] = {}
        self._key = tally_key(run_id, peers.id)

    async def tick(self) -> None:
        """Resume the tally, then publish its changes; call it every `PUBLISH_S`."""
        if self._resumed:
            await self.publish()
            return
        try:
            await self.resume()
        except PeerError as error:  # a new tally would replace the last one
            logger.info("this peer's last tally cannot be read now: %s", error)
        except Exception:
            self._resumed = True  # what cannot be read at all does not keep this peer from publishing
            raise

    async def stop(self) -> None:
        if self._resumed:
            await self.publish()

    async def resume(self) -> None:
        """Continue from the tally that this peer published, or saved, before it was restarted."""
        records = await self._dht.records(self._key)
        own = [tally_of(record) for record in records if record.writer == self._peers.id]
        self._resumed = True
        self.ledger.resume(merged(self.saved, *(tally.rows for tally in own if tally is not None)))

    async def publish(self) -> None:
        """Store the tally if it has changed, or again after a quarter of its record's life."""
        rows = self._own_tally().rows
        now = self._loop.time()
        if not rows or (rows == self._published and now - self._published_at < RECORD_S / 4):
            return
        if await self._dht.publish(self._key, self._own_tally(), ttl_s=RECORD_S):
            self._published = rows
            self._published_at = now

    async def read(self) -> tuple[Contribution, ...]:
        """Return the leaderboard, this peer's newest tally included; most samples first."""
        return leaderboard([self._own_tally(), *await self._others()])

    async def _others(self) -> list[ContributionTally]:
        keys = [f"{self._run_id}/credits/{shard}" for shard in range(SHARDS)]
        records_of_keys = await asyncio.gather(*map(self._dht.records, keys))
        tallies: list[ContributionTally] = []
        for key, records in zip(keys, records_of_keys, strict=True):
            for record in records:
                if record.writer == self._peers.id or key != tally_key(self._run_id, record.writer):
                    continue
                tally = tally_of(record)
                if tally is not None:
                    tallies.append(tally)
        return tallies

    def _own_tally(self) -> ContributionTally:
        # each end of a circuit counts half
        self.ledger.on_totals("relayed_bytes", self._relayed_bytes(), 0.5)
        self.ledger.on_totals("expert_calls", dict(self.expert_calls))
        units = Counter[PeerId]()
        for accepted in self.units.values():
            units.update(accepted())
        self.ledger.on_totals("units", units)
        return ContributionTally(self._peers.public_key, self.ledger.rows())


def tally_key(run_id: str, writer: PeerId) -> str:
    return f"{run_id}/credits/{writer[0] % SHARDS}"


def tally_of(record: Record) -> ContributionTally | None:
    """Return the tally in a record of checked signature; None if it is none by its owner."""
    try:
        tally = msgspec.msgpack.decode(record.value, type=ContributionTally)
    except UNDECODABLE:
        return None
    return tally if id_of(tally.key) == record.writer else None


class Leaderboard(tuple[Contribution, ...]):
    """Each peer's contributions, as other peers saw them; most samples first."""

    names: Mapping[str, str]  # that peers chose, by short id; not verified
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
        return facts(f"Leaderboard: contributions seen by other peers{nothing}", {}, COLUMNS, rows)

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
