"""Averaging any vector among whoever calls for it, in the groups of a grid (see `grid` for why it is exact).

A pass: those who call at about the same time meet (`assembly`) and get the same list of peers, from which everyone
works out the same grid. Then there is one round per axis, in which each line is a group of its own. In the meeting
each member's weight is its vote for the group size, from the failures and times that it measured; the median counts,
so that a few liars do not.

Groups in turn instead of one group of all (Moshpit averaging; DeDLOC section 3.2 and Appendix C).

The peers are laid out on a virtual grid. Round r averages within the lines along axis r; after one round per axis
everyone has the exact mean of all, and whoever fails in a round costs only its own line.

What makes it exact:

- There is no empty cell: where the number of peers is no product of sides, some cells hold several peers. A line with
  a hole would leave another line's mean behind.
- Beside its values each peer carries a *weight*. After a round the weight of all who averaged is shared out, equally
  to the line's cells and within a cell equally to its peers, so that no weight is ever lost or counted twice: in the
  next round every line along the other axis gets the same part of it.
- Whoever misses a round keeps its values and its weight; the next pass mixes them in.

Peers that cannot be dialled are laid out such that every line has one that can.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colab_swarm.averaging.assembly import Assembly
from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundRefused, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker, PrefixRouter
from colab_swarm.averaging.round import Averager, RoundResult
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.markup import facts
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import Floats, Precision, mean_codec_for

Cell = tuple[int, ...]


class MoshpitGrid:
    """Who averages with whom, round by round; the same for all who know the same peers and seed.

    Args:
        seed: shuffles the peers, so that each pass has other groups.
        reachable: for every peer whether it accepts connections.
        group_size: wanted members of a group; it is raised until every line has a peer that accepts connections.

    Attributes:
        sides: cells along each axis; one round each.
    """

    def __init__(self, seed: bytes, reachable: Mapping[PeerId, bool], group_size: int) -> None:
        self._seed = seed
        shuffled = sorted(reachable, key=lambda peer: hashlib.sha256(seed + peer).digest())
        dialled = [peer for peer in shuffled if reachable[peer]]
        self.sides, cells = _covered(len(shuffled), group_size, len(dialled))
        order = dialled + [peer for peer in shuffled if not reachable[peer]]
        self.cells = {peer: cells[i % len(cells)] for i, peer in enumerate(order)}

    @property
    def rounds(self) -> int:
        """Rounds of one pass."""
        return len(self.sides)

    def line(self, peer: PeerId, axis: int) -> tuple[PeerId, ...]:
        """Who averages with ``peer`` along ``axis``, itself included; sorted."""
        mine = self._across(peer, axis)
        return tuple(sorted(other for other in self.cells if self._across(other, axis) == mine))

    def line_id(self, peer: PeerId, axis: int) -> bytes:
        """Names the line of ``peer`` along ``axis`` in this grid: 16 bytes."""
        return hashlib.sha256(self._seed + repr((axis, self._across(peer, axis))).encode()).digest()[:16]

    def carried(self, peer: PeerId, holders: Collection[PeerId], weight: float) -> float:
        """The weight that ``peer`` carries on from a round.

        Args:
            holders: who has the line's mean now, ``peer`` included.
            weight: of all contributions in that mean together.
        """
        cells = [self.cells[holder] for holder in holders]
        return weight / len(set(cells)) / cells.count(self.cells[peer])

    def _across(self, peer: PeerId, axis: int) -> Cell:
        cell = self.cells[peer]
        return cell[:axis] + cell[axis + 1 :]

    def __repr__(self) -> str:
        return f"Grid({len(self.cells)} peers on {'x'.join(map(str, self.sides))})"


def rounds_for(peers: int, group_size: int) -> int:
    """ceil(log_m n): rounds in groups of ``group_size`` until all ``peers`` have met."""
    rounds, met = 1, group_size
    while met < peers:
        rounds, met = rounds + 1, met * group_size
    return rounds


def plan_sides(peers: int, rounds: int) -> tuple[int, ...]:
    """Sides of a grid for so many rounds, as equal as can be, with at most as many cells as there are ``peers``.

    A side is 2 or more, so that there may be fewer rounds than asked for; the last side is the longest.
    """
    rounds = max(1, min(rounds, peers.bit_length() - 1))
    sides, left = [], peers
    for axes in range(rounds, 0, -1):
        side = next(s for s in itertools.count(1) if (s + 1) ** axes > left)
        sides.append(side)
        left //= side
    return tuple(sides)


def _covered(peers: int, group_size: int, reachable: int) -> tuple[tuple[int, ...], list[Cell]]:
    """Sides and cells, those first that hit every line at least once; as many as are ``reachable`` suffice."""
    for rounds in range(rounds_for(peers, group_size), 0, -1):
        sides = plan_sides(peers, rounds)
        shortest = min(sides)
        cells = sorted(itertools.product(*map(range, sides)), key=lambda cell: sum(cell) % shortest > 0)
        if sum(sum(cell) % shortest == 0 for cell in cells) <= reachable or rounds == 1:
            break
    return sides, cells


# --- how large a group should be ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTime:
    """How long a round takes: finding each other, and the transfer, of which a member moves (m - 1) / m.

    Attributes:
        overhead_s: whatever the size of the group.
        transfer_s: in a large group.
    """

    overhead_s: float
    transfer_s: float

    def seconds(self, group_size: int) -> float:
        """T(m), seconds."""
        return self.overhead_s + self.transfer_s * (group_size - 1) / group_size


def success_rate(peers: int, group_size: int, *, failures_per_s: float, time: RoundTime) -> float:
    """Global averages per second that nobody's failure spoils (DeDLOC Appendix C).

    r(m) = (1-q)^(m ceil(log_m n)) / (T(m) ceil(log_m n)). The chance q that a peer fails during a round grows with the
    round: q = 1 - exp(-failures_per_s T(m)). With one q for all sizes, pairs would never beat fours, because
    m / log m is the same for both; with this one a high failure rate gives pairs.
    """
    rounds, round_s = rounds_for(peers, group_size), time.seconds(group_size)
    return math.exp(-failures_per_s * round_s * group_size * rounds) / (round_s * rounds)


def choose_group_size(peers: int, *, failures_per_s: float, time: RoundTime) -> int:
    """The group size m, 2 or more, with the highest `success_rate`; the smallest of several as good."""
    sizes = range(2, max(3, peers + 1))
    return max(sizes, key=lambda m: success_rate(peers, m, failures_per_s=failures_per_s, time=time))


MEMORY_ROUNDS = 20

"""The figures are those of the last rounds, about so many."""


class RoundMeter:
    """What rounds cost and how often peers fail in them, as one peer sees it. Pure.

    Attributes:
        time: of undisturbed rounds; how long disturbed ones take tells of patience, not of the network.
    """

    def __init__(self) -> None:
        self.time = RoundTime(overhead_s=0.2, transfer_s=0.8)
        self._timed = 0
        self._failures, self._members, self._rounds = 0.05, 10.0, 1.0

    @property
    def failure_rate(self) -> float:
        """The chance q that a member of a group fails during a round."""
        return self._failures / self._members

    @property
    def failures_per_s(self) -> float:
        """How often a member fails, per second of an undisturbed round."""
        round_s = self.time.seconds(max(2, round(self._members / self._rounds)))
        return -math.log1p(-min(self.failure_rate, 0.999)) / round_s

    def on_round(self, members: int, failed: int, *, overhead_s: float, averaging_s: float) -> None:
        """A round of ``members`` is over; those who ``failed`` did not come, or were lost."""
        keep = 1 - 1 / MEMORY_ROUNDS
        self._failures = keep * self._failures + failed
        self._members = keep * self._members + members
        self._rounds = keep * self._rounds + 1
        if failed or members < 2:
            return
        self._timed = min(self._timed + 1, MEMORY_ROUNDS)
        old, transfer_s = self.time, averaging_s * members / (members - 1)
        self.time = RoundTime(
            old.overhead_s + (overhead_s - old.overhead_s) / self._timed,
            old.transfer_s + (transfer_s - old.transfer_s) / self._timed,
        )

    def choose_group_size(self, peers: int) -> int:
        """The best group size for so many ``peers``, as far as this peer can tell."""
        return choose_group_size(peers, failures_per_s=self.failures_per_s, time=self.time)


MAX_ROUNDS = 64

LAG_ROUNDS = 2.0

"""A peer that is still in the round before says that it needs as long as so many; its line waits no longer."""

MIN_WEIGHT, MAX_WEIGHT = 1e-4, 1e6

"""Shares of a weight have to be weights too (`group.valid_weight`)."""


@dataclass(frozen=True)
class MoshpitSettings:
    """How a vector is averaged in groups.

    Attributes:
        codec: on the wire (see `colab_swarm.tensors.codecs`). Warning: onebit and topk drop most of a vector, here for
            good, for there is no error feedback; means travel as float16 then.
        window_s: how long the first to call waits for others.
        round_timeout_s: bound on finding the others of one round.
    """

    codec: str = "float32"
    window_s: float = 5.0
    round_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        Precision(self.codec)


@dataclass(frozen=True, repr=False)
class MoshpitResult:
    """What became of a pass at this peer.

    Attributes:
        peers: who took part; this peer included.
        sides: of the grid.
        rounds: those that this peer's groups held, in order; None where it had no part.
        failed: members of this peer's groups that did not come or were lost.
        seconds: from the call to the mean.
        note: what went wrong, in words; empty if nothing.
    """

    peers: tuple[PeerId, ...]
    sides: tuple[int, ...]
    rounds: tuple[RoundResult | None, ...]
    failed: int
    seconds: float
    note: str = ""

    @property
    def complete(self) -> bool:
        """Whether nothing failed in this peer's own groups."""
        return not self.note and not self.failed

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.sides))
        what = "complete" if self.complete else f"{self.failed} failures" + f": {self.note}" * bool(self.note)
        return f"GridResult({len(self.peers)} peers on {grid}, {what}, {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        rows = [
            (f"{number}", repr(one) if one else "no part in it") for number, one in enumerate(self.rounds, 1)
        ]
        return facts(repr(self), {}, ("round", "what became of it"), rows)


class MoshpitAverager:
    """Averages one named vector, again and again, with the other peers that do.

    Attributes:
        codec: of its settings.
        meter: what was measured so far.
    """

    def __init__(
        self,
        rooms: PrefixRouter,
        dht: DHT,
        averager: Averager,
        prefix: str,
        settings: MoshpitSettings | None = None,
    ) -> None:
        self._peers, self._averager, self._prefix = rooms.peers, averager, prefix
        self._settings = settings or MoshpitSettings()
        self.codec = self._settings.codec
        self._assembly = Assembly(rooms, dht, f"{prefix}/meeting", window_s=self._settings.window_s)
        self._matchmaker = Matchmaker(
            rooms,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            settings=GroupFormationSettings(window_s=2.0, slack_s=1.0, call_timeout_s=5.0),
        )
        self.meter = RoundMeter()
        self._busy = False
        self._pass: _Pass | None = None
        self._begun = asyncio.Event()

    def close(self) -> None:
        """Take part no more."""
        self._matchmaker.close()
        self._assembly.close()
        self._averager.forget(self._prefix)

    async def average(
        self, values: Floats, *, weight: float = 1.0, group_size: int | None = None
    ) -> tuple[Floats, MoshpitResult]:
        """The weighted mean of all who call at about the same time, and what became of it.

        Args:
            values: float32, one-dimensional, of equal length for all; left as they are.
            weight: 0 (only receive), or between 1e-4 and 1e6.
            group_size: vote for this; None: for what the measurements suggest.

        Returns:
            The mean, as far as it was reached: a peer's fault shows in the result and is never raised.

        Raises:
            ValueError: the weight, group size or values are not usable.
            RuntimeError: this peer is averaging already.
        """
        _check(values, weight, group_size)
        if self._busy:
            raise RuntimeError("this peer is averaging these values already: wait for that to end")
        begun, self._busy = _now(), True
        schema = hashlib.sha256(f"{len(values)} {self.codec}".encode()).digest()[:8]
        try:
            meeting = await self._assembly.meet(
                len(values), schema, lambda peers: group_size or self.meter.choose_group_size(peers)
            )
            self._pass = _Pass(meeting, values, weight)
            self._begun.set()
            for axis in range(self._pass.grid.rounds):
                await self._round(self._pass, axis)
            return self._pass.outcome(_now() - begun)
        except RoundRefused as refusal:
            alone = MoshpitResult((self._peers.id,), (1,), (), 0, _now() - begun, str(refusal))
            return values.copy(), alone
        finally:
            self._busy, self._pass = False, None
            self._begun.clear()

    async def _round(self, run: _Pass, axis: int) -> None:
        """Average along one axis; whatever becomes of it is noted."""
        begun, me, run.axis = _now(), self._peers.id, axis
        line = run.grid.line(me, axis)
        if len(line) == 1:
            return
        values = run.values.copy()  # the last round's vector belongs to those who recover from it
        try:
            ticket = self._ticket(run, run.grid.line_id(me, axis))
            group = await self._matchmaker.join(ticket, line, begun + self._settings.round_timeout_s)
            joined = _now()
            result = await self._averager.average(group, values)
        except PeerError as error:
            run.notes.append(f"round {axis + 1}: {error}")
            run.rounds.append(None)
            self.meter.on_round(len(line), 1, overhead_s=0.0, averaging_s=0.0)
        else:
            failed = run.on_round(me, line, values, result)
            overhead_s, averaging_s = joined - begun, result.seconds["total"]
            self.meter.on_round(len(line), failed, overhead_s=overhead_s, averaging_s=averaging_s)

    def _ticket(self, run: _Pass, line_id: bytes) -> Ticket:
        links = self._peers.statistics()
        return Ticket(
            prefix=self._prefix,
            step=run.number * MAX_ROUNDS + run.axis,
            lineage=line_id,
            weight=run.weight,
            numel=len(run.values),
            schema=b"",
            reduces=bool(self._peers.contact.addresses),
            upload_bps=links.upload_bps,
            download_bps=links.download_bps,
            codec=self.codec,
            mean_codec=mean_codec_for(self.codec),
        )

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        """An organizer begins a line's round; who is not through with the round before comes a little later."""
        number, axis = divmod(terms.step, MAX_ROUNDS)
        if not self._busy or number != self._assembly.number:
            return None
        if self._pass is None:  # the meeting's group is on its way
            return self._lag_s
        if axis < self._pass.axis or terms.lineage != self._pass.grid.line_id(self._peers.id, axis):
            return None
        return 0.0 if axis == self._pass.axis else self._lag_s

    @property
    def _lag_s(self) -> float:
        time = self.meter.time
        return LAG_ROUNDS * (time.overhead_s + time.transfer_s)

    async def _expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lag_s):
                await self._begun.wait()
        return self._pass.grid.line(self._peers.id, step % MAX_ROUNDS) if self._pass else ()


class _Pass:
    """A pass under way, at one peer."""

    def __init__(self, meeting: Group, values: Floats, weight: float) -> None:
        votes = sorted(member.weight for member in meeting.members)
        group_size = max(2, int(votes[len(votes) // 2]))
        self.number = meeting.step
        self.grid = MoshpitGrid(
            meeting.round_id, {m.id: bool(m.addresses) for m in meeting.members}, group_size
        )
        self.values, self.weight, self.axis = values, weight, 0
        self.rounds: list[RoundResult | None] = []
        self.notes: list[str] = []
        self.failed = 0

    def on_round(self, me: PeerId, line: Sequence[PeerId], values: Floats, result: RoundResult) -> int:
        """The line averaged; returns how many of it failed."""
        weights = {member.id: member.weight for member in result.group.members}
        given = set(result.contributors)
        holders = [p for p in line if p in given or p == me or weights.get(p) == 0]
        total = sum(weights[peer] for peer in given)
        if total:
            self.values, self.weight = values, self.grid.carried(me, holders, total)
        if total and result.kept_local:
            lacking = sum(span.numel for span in result.kept_local)
            self.notes.append(f"round {self.axis + 1}: nobody reduced {lacking} of {len(values)} values")
        self.rounds.append(result)
        self.failed += len(line) - len(holders)
        return len(line) - len(holders)

    def outcome(self, seconds: float) -> tuple[Floats, MoshpitResult]:
        """The mean and the report."""
        peers, sides = tuple(sorted(self.grid.cells)), self.grid.sides
        told = MoshpitResult(peers, sides, tuple(self.rounds), self.failed, seconds, "; ".join(self.notes))
        return self.values.copy(), told


def _check(values: Floats, weight: float, group_size: int | None) -> None:
    if values.ndim != 1 or values.dtype != np.float32 or not np.isfinite(values).all():
        raise ValueError("what is averaged is a flat vector of finite float32 values")
    if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight={weight}: give 0 (only receive) or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    if group_size is not None and group_size < 2:
        raise ValueError(f"group_size={group_size}: a group has 2 members or more")


def _now() -> float:
    return asyncio.get_running_loop().time()


class ArrayAverages:
    """All that a peer averages with whoever calls for it, by name."""

    def __init__(self, rooms: PrefixRouter, dht: DHT, averager: Averager, run_id: str) -> None:
        self._services = rooms, dht, averager
        self._run_id = run_id
        self._averagers: dict[str, MoshpitAverager] = {}

    async def average(
        self, values: Any, *, weight: float, group_size: int | None, name: str, codec: str = "float32"
    ) -> tuple[Any, MoshpitResult]:
        """The mean in the shape and kind of ``values``; see `MoshpitAverager.average` and `MoshpitSettings.codec`.

        Raises:
            ValueError: also if the values of this name travelled by another codec before.
        """
        flat, restore = flatten(values)
        if name not in self._averagers:
            prefix, settings = f"{self._run_id}/average/{name}", MoshpitSettings(codec)
            self._averagers[name] = MoshpitAverager(*self._services, prefix, settings)
        averager = self._averagers[name]
        if averager.codec != codec:
            raise ValueError(
                f"{name!r} is averaged as {averager.codec} here: choose another name for {codec}"
            )
        mean, result = await averager.average(flat, weight=weight, group_size=group_size)
        return restore(mean), result

    async def close(self) -> None:
        """Average no more."""
        for averager in self._averagers.values():
            averager.close()
        self._averagers.clear()


def flatten(values: Any) -> tuple[Floats, Callable[[Floats], Any]]:
    """The values as a flat float32 vector, and what makes a vector an array of the same shape and kind again.

    Args:
        values: a torch tensor, or whatever NumPy makes an array of.

    Raises:
        ValueError: they are no real numbers.
    """
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(values, torch.Tensor):
        flat = values.detach().to("cpu", torch.float32).flatten().numpy()
        return flat, lambda mean: torch.from_numpy(mean).reshape(values.shape).to(values)
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{array.dtype} cannot be averaged: pass an array or tensor of real numbers")
    kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.float32)
    return array.astype(np.float32).ravel(), lambda mean: mean.reshape(array.shape).astype(kind)
