"""Averaging any vector among all peers that call for it: a meeting (`assembly`), then groups on a grid.

One such averaging is a *pass*. All peers of a pass compute the same grid, in which each peer has a cell. A *line* along
an axis has the cells that differ only in their coordinate on this axis. In round r, the peers of each line along axis r
form one group and average. After one round per axis all peers have the exact mean. A failed peer affects only its own
line (DeDLOC section 3.2 and Appendix C). The mean is exact for these reasons:

- Each cell has at least one peer, and may have several. If a cell were empty, a line through it would miss the mean of
  the line that crosses there.
- Each peer carries a *weight* with its values. A round divides the sum of its contributors' weights equally among the
  line's cells, and a cell's part equally among the peers of this cell.
- A peer that misses a round takes its old values and its old weight into the next round of the pass.

Members may vote for a group size, and the median vote counts. Without a vote, the organizer chooses the size by its
measurements.

From the beginning of a pass, a peer has a stream open to the organizer of each of its lines. So the organizer knows
whether the peer will still come.
"""

import asyncio
import hashlib
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import msgspec

from colab_swarm.averaging.assembly import Assembly, Gathering
from colab_swarm.averaging.forming import FormationSettings
from colab_swarm.averaging.group import Group, RoundRefused, RoundTerms, SharePlan, Ticket
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.round import Averager
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError, require
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Floats, Precision, all_finite, mean_codec_for
from colab_swarm.tensors.vector import HostVector

_MEMORY_ROUNDS = 20  # `RoundMeter` averages over about this many rounds
# A line waits for peers that are still in the round before: `_LAG_S` seconds, because a silent member may delay that
# round, plus `_LAG_ROUNDS` times the usual time of a round.
_LAG_S = 7.5
_LAG_ROUNDS = 2.0
# Parts of a weight must be valid weights, too (`group.valid_weight`).
_MIN_WEIGHT = 1e-4
_MAX_WEIGHT = 1e6
_ROUND_TIMEOUT_S = 120.0  # maximum time for finding the group of one round


class MoshpitGrid:
    """The groups of each round of a pass; equal at all peers that know the same peers and the same seed.

    ``reachable`` says for each peer whether it accepts connections. If too few peers do, lines become longer than
    ``group_size``, until each line has such a peer. ``sides`` are the numbers of cells along the axes; each axis takes
    one round.
    """

    def __init__(self, seed: bytes, reachable: Mapping[PeerId, bool], group_size: int) -> None:
        self._seed = seed
        order = sorted(
            reachable, key=lambda peer: (not reachable[peer], hashlib.sha256(seed + peer).digest())
        )
        for rounds in range(rounds_for(len(order), group_size), 0, -1):
            self.sides = plan_sides(len(order), rounds)
            diagonal, others = _cells_of(self.sides)
            # The peers that can be dialled come first, so each cell of the diagonal gets one of them.
            if len(diagonal) <= sum(reachable.values()):
                break
        cells = itertools.cycle(diagonal + others)
        self.cells = dict(zip(order, cells, strict=False))

    def line(self, peer: PeerId, axis: int) -> tuple[PeerId, ...]:
        """Return the peers of the line along ``axis`` through ``peer``, sorted; ``peer`` is one of them."""
        mine = self._across(peer, axis)
        return tuple(sorted(other for other in self.cells if self._across(other, axis) == mine))

    def line_id(self, peer: PeerId, axis: int) -> bytes:
        return hashlib.sha256(self._seed + repr((axis, self._across(peer, axis))).encode()).digest()[:16]

    def carried(self, peer: PeerId, holders: Collection[PeerId], weight: float) -> float:
        """Return the weight that ``peer`` has in the next round.

        The weights of this round's contributions sum to ``weight``. This sum is divided equally among the cells of the
        ``holders``, and a cell's part equally among the holders in it. The ``holders`` are the peers of the line that
        received its mean; ``peer`` is one of them.
        """
        cells = [self.cells[holder] for holder in holders]
        return weight / len(set(cells)) / cells.count(self.cells[peer])

    def _across(self, peer: PeerId, axis: int) -> tuple[int, ...]:
        cell = self.cells[peer]
        return cell[:axis] + cell[axis + 1 :]


def _cells_of(sides: Sequence[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the cells of a diagonal that crosses every line, and all other cells."""
    shortest = min(sides)
    diagonal = []
    others = []
    for cell in itertools.product(*map(range, sides)):
        if sum(cell) % shortest == 0:
            diagonal.append(cell)
        else:
            others.append(cell)
    return diagonal, others


def rounds_for(peers: int, group_size: int) -> int:
    """Return how many rounds in groups of m = ``group_size`` give all n = ``peers`` the mean: ceil(log_m n)."""
    rounds = 1
    while group_size**rounds < peers:
        rounds += 1
    return rounds


def plan_sides(peers: int, rounds: int) -> tuple[int, ...]:
    """Return the nearly equal sides of a grid that has at most ``peers`` cells and at most ``rounds`` axes.

    With few peers there are fewer sides than ``rounds``, because a side has at least 2 cells. The last side is the
    longest.
    """
    rounds = max(1, min(rounds, peers.bit_length() - 1))
    sides = []
    left = peers
    for axes in range(rounds, 0, -1):
        side = 1
        while (side + 1) ** axes <= left:
            side += 1
        sides.append(side)
        left //= side
    return tuple(sides)


@dataclass
class RoundMeter:
    """Chooses the size of groups by measured times of rounds and by the rate of failures. Pure."""

    overhead_s: float = 0.2  # time to find a group of any size, measured in rounds without failures
    transfer_s: float = 0.8  # time to average in a very large group; one of m members takes (m - 1) / m of it
    failures_per_s: float = 0.005  # failures of one peer in a second
    _timed: int = 0

    def seconds(self, group_size: int) -> float:
        return self.overhead_s + self.transfer_s * (group_size - 1) / group_size

    def success_rate(self, peers: int, group_size: int) -> float:
        """Return how many global averages per second succeed, for groups of this size (DeDLOC Appendix C).

        r(m) = (1-q)^(m ceil(log_m n)) / (T(m) ceil(log_m n)), with n = ``peers``, m = ``group_size`` and T(m) the
        seconds of a round. A peer fails in a round with the probability q = 1 - exp(-failures_per_s T(m)). If q were
        equal for all m, pairs would never be better than groups of four.
        """
        rounds = rounds_for(peers, group_size)
        round_s = self.seconds(group_size)
        return math.exp(-self.failures_per_s * round_s * group_size * rounds) / (round_s * rounds)

    def choose_group_size(self, peers: int) -> int:
        """Return the group size, at least 2, with the highest `success_rate`; if several are equal, the smallest."""
        return max(range(2, max(3, peers + 1)), key=partial(self.success_rate, peers))

    def on_round(self, members: int, failed: int, *, overhead_s: float, averaging_s: float) -> None:
        failures_per_s = failed / members / self.seconds(members)
        self.failures_per_s += (failures_per_s - self.failures_per_s) / _MEMORY_ROUNDS
        if not failed:
            self._timed = min(self._timed + 1, _MEMORY_ROUNDS)
            self.overhead_s += (overhead_s - self.overhead_s) / self._timed
            self.transfer_s += (averaging_s * members / (members - 1) - self.transfer_s) / self._timed


@dataclass(frozen=True, repr=False)
class MoshpitResult:
    """Result of one pass, as seen by this peer."""

    peers: tuple[PeerId, ...]  # all peers that took part, this peer included
    sides: tuple[int, ...]  # number of cells along each axis of the grid
    rounds: tuple[GroupResult | None, ...]  # of this peer, in order; None where it took no part
    failed: int  # number of members of this peer's groups that did not join or were lost
    seconds: float  # time from the call to its return
    note: str = ""  # description of all problems; empty if there were none

    @property
    def complete(self) -> bool:
        return not self.note and not self.failed

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.sides))
        what = "complete"
        if not self.complete:
            what = f"{self.failed} failures"
        if self.note:
            what = f"{what}: {self.note}"
        return f"MoshpitResult({len(self.peers)} peers on {grid}, {what}, {self.seconds:.1f} s)"


class MoshpitAverager:
    """Averages one named vector repeatedly, each time with the peers that call for it at about the same time.

    Warning: the codecs onebit, topk and sparseloco lose most of a vector, because there is no error feedback here. The
    means come back as float16 if one of these codecs is used.
    """

    def __init__(
        self, router: PrefixRouter, dht: DHT, averager: Averager, prefix: str, codec: str = "float32"
    ) -> None:
        Precision(codec)
        self._router = router
        self._peers = router.peers
        self._averager = averager
        self._prefix = prefix
        self.codec = codec
        self._codecs = (codec, mean_codec_for(codec))
        self._assembly = Assembly(router, dht, f"{prefix}/meeting", self._plan_size)
        self.meter = RoundMeter()
        self._busy = False

    def close(self) -> None:
        self._assembly.close()
        self._averager.forget(self._prefix)

    def _plan_size(self, tickets: Sequence[Ticket]) -> SharePlan:
        """Return a plan in which each share is the size of the groups; the tickets' weights are the votes for it."""
        votes = [ticket.weight for ticket in tickets if ticket.weight]
        size: float = self.meter.choose_group_size(len(tickets))
        if votes:
            size = statistics.median_high(votes)
        return SharePlan((float(size),) * len(tickets))

    async def average(
        self, values: Floats, *, weight: float = 1.0, group_size: int | None = None
    ) -> tuple[Floats, MoshpitResult]:
        """Average ``values`` with all peers that call now; return the weighted mean, and the result of the pass.

        If rounds failed, the returned vector is the mean over fewer peers.

        Args:
            values: a flat vector of finite numbers, of equal length at all peers; it is not changed.
            weight: 0 (only receive), or between 1e-4 and 1e6.
            group_size: vote for this size; None for no vote.

        Raises ValueError if an argument is not usable, RuntimeError if this peer is averaging
        already. Failures of other peers raise no error; the result shows them.
        """
        require(all_finite(values), "values must be finite: there is a NaN, or a value beyond float32")
        text = f"weight={weight}: give 0 (only receive) or {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}"
        require(weight == 0 or _MIN_WEIGHT <= weight <= _MAX_WEIGHT, text)
        require(group_size is None or group_size >= 2, f"group_size={group_size}: give 2 or more")
        require(not self._busy, "already averaging these values: wait for that", RuntimeError)
        begun = loop_now()
        self._busy = True
        try:
            meeting = await self._assembly.meet(
                f"{len(values)} values as {self.codec}", float(group_size or 0)
            )
            run = _Pass(meeting, values, float(weight))
            async with AsyncExitStack() as lines:
                gatherings = []
                for axis in range(len(run.grid.sides)):
                    gatherings.append(await lines.enter_async_context(self._line(meeting, run, axis)))
                for axis, gathering in enumerate(gatherings):
                    await self._round(run, axis, gathering)
            return run.values.copy(), run.result(loop_now() - begun)
        finally:
            self._busy = False

    def _line(self, meeting: Group, run: "_Pass", axis: int) -> Gathering:
        """Return the gathering of this peer's line along ``axis``.

        The first member of the line that can be dialled organizes; if it is lost, the next one does.
        """
        me = self._peers.id
        line = run.grid.line(me, axis)
        contacts = []
        for member in meeting.members:
            if member.id in line and (member.addresses or line == (me,)):
                contacts.append(Contact(member.id, member.addresses))

        async def organizers() -> Sequence[Contact]:
            return contacts

        line_id = run.grid.line_id(me, axis)
        terms = RoundTerms(
            f"{self._prefix}/{line_id.hex()}", axis, line_id, len(run.values), b"", *self._codecs
        )
        window_s = _LAG_S + _LAG_ROUNDS * (self.meter.overhead_s + self.meter.transfer_s)
        settings = FormationSettings(terms, 0.0, adaptive_shares, window_s=window_s, awaited=frozenset(line))
        return Gathering(self._router, settings, organizers)

    async def _round(self, run: "_Pass", axis: int, gathering: Gathering) -> None:
        begun = loop_now()
        me = self._peers.id
        line = run.grid.line(me, axis)
        if len(line) == 1:
            return
        values = run.values.copy()  # other members may still recover chunks from the last round's vector
        links = self._peers.statistics()
        speed = links.upload_bps, links.download_bps
        reduces = bool(self._peers.contact.addresses)
        gathering.offer(Ticket(gathering.terms, run.weight, reduces, *speed, metered=self._peers.metered))
        try:
            async with asyncio.timeout(_ROUND_TIMEOUT_S):
                group = await gathering.group
            if group.index_of(me) is None:
                raise RoundRefused("late", "the group formed without this peer")
            # The averager needs one prefix for all rounds of a vector.
            terms = msgspec.structs.replace(group.terms, prefix=self._prefix)
            joined = loop_now()
            result = await self._averager.average(
                msgspec.structs.replace(group, terms=terms), HostVector(values)
            )
        except (PeerError, TimeoutError) as error:
            run.notes.append(f"round {axis + 1}: {error or 'no organizer answered'}")
            run.rounds.append(None)
            self.meter.on_round(len(line), 1, overhead_s=0.0, averaging_s=0.0)
        else:
            failed = run.on_round(me, line, values, result)
            overhead_s = joined - begun
            averaging_s = result.seconds
            self.meter.on_round(len(line), failed, overhead_s=overhead_s, averaging_s=averaging_s)


class _Pass:
    def __init__(self, meeting: Group, values: Floats, weight: float) -> None:
        group_size = max(2, int(meeting.members[0].share))
        reachable = {member.id: bool(member.addresses) for member in meeting.members}
        self.grid = MoshpitGrid(meeting.round_id, reachable, group_size)
        self.values = values
        self.weight = weight
        self.rounds: list[GroupResult | None] = []
        self.notes: list[str] = []
        self.failed = 0

    def on_round(self, me: PeerId, line: Sequence[PeerId], values: Floats, result: GroupResult) -> int:
        """Take the line's mean; return how many peers of the line failed."""
        weights = {member.id: member.weight for member in result.group.members}
        contributors = set(result.contributors)
        holders = []
        for peer in line:
            if peer == me or peer in contributors or weights.get(peer) == 0:
                holders.append(peer)
        total = sum(weights[peer] for peer in contributors)
        if total:
            self.values = values
            self.weight = self.grid.carried(me, holders, total)
        if total and result.kept_local:
            lacking = sum(span.numel for span in result.kept_local)
            self.notes.append(
                f"round {len(self.rounds) + 1}: no peer reduced {lacking} of {len(values)} values"
            )
        self.rounds.append(result)
        failed = len(line) - len(holders)
        self.failed += failed
        return failed

    def result(self, seconds: float) -> MoshpitResult:
        peers = tuple(sorted(self.grid.cells))
        sides = self.grid.sides
        return MoshpitResult(peers, sides, tuple(self.rounds), self.failed, seconds, "; ".join(self.notes))
