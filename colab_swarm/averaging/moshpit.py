"""Averaging any vector among whoever calls for it, in the groups of a grid (see `grid` for why it is exact).

A pass: those who call at about the same time meet (`assembly`) and get the same list of peers, from which everyone
works out the same grid. Then there is one round per axis, in which each line is a group of its own. In the meeting
each member's weight is its vote for the group size, from the failures and times that it measured; the median counts,
so that a few liars do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colab_swarm.averaging.assembly import Assembly
from colab_swarm.averaging.grid import Grid, RoundMeter
from colab_swarm.averaging.group import GatheringSettings, Group, RoundRefused, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.rooms import Rooms
from colab_swarm.averaging.round import Averager, RoundResult
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.markup import facts
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import Floats, Precision, mean_codec_for

MAX_ROUNDS = 64
LAG_ROUNDS = 2.0
"""A peer that is still in the round before says that it needs as long as so many; its line waits no longer."""
MIN_WEIGHT, MAX_WEIGHT = 1e-4, 1e6
"""Shares of a weight have to be weights too (`group.valid_weight`)."""


@dataclass(frozen=True)
class GridSettings:
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
class GridResult:
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


class GridAverager:
    """Averages one named vector, again and again, with the other peers that do.

    Attributes:
        codec: of its settings.
        meter: what was measured so far.
    """

    def __init__(
        self, rooms: Rooms, dht: DHT, averager: Averager, prefix: str, settings: GridSettings | None = None
    ) -> None:
        self._peers, self._averager, self._prefix = rooms.peers, averager, prefix
        self._settings = settings or GridSettings()
        self.codec = self._settings.codec
        self._assembly = Assembly(rooms, dht, f"{prefix}/meeting", window_s=self._settings.window_s)
        self._matchmaker = Matchmaker(
            rooms,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            settings=GatheringSettings(window_s=2.0, slack_s=1.0, call_timeout_s=5.0),
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
    ) -> tuple[Floats, GridResult]:
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
            alone = GridResult((self._peers.id,), (1,), (), 0, _now() - begun, str(refusal))
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
        self.grid = Grid(meeting.round_id, {m.id: bool(m.addresses) for m in meeting.members}, group_size)
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

    def outcome(self, seconds: float) -> tuple[Floats, GridResult]:
        """The mean and the report."""
        peers, sides = tuple(sorted(self.grid.cells)), self.grid.sides
        told = GridResult(peers, sides, tuple(self.rounds), self.failed, seconds, "; ".join(self.notes))
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
