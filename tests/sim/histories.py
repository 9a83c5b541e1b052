"""Check the histories of peers: training loses nothing, counts nothing twice and goes on.

As in Jepsen, faults happen, each process records its history, and `check` finds what contradicts these rules:

| rule | what holds |
|---|---|
| sum | an applied mean is that of the contributions that its result acknowledges, each exactly once |
| once | no sample is acknowledged in two steps |
| state | equal lineages mean equal steps, equal last means and bit-equal states |
| lost | while nothing disturbs the peers, each step that one of them takes stays in the swarm's history |
| progress | a peer that is alive and connected takes the swarm's steps |

A result acknowledges a contribution where its ``gaps`` do not list it. Sums are compared at sampled values, in rounds
whose contributors all have a history, with float32 on the wire and ``local_steps=1``. A contribution far larger
than the others may count for less: reducers scale it down.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from colab_swarm.events import Applied, Contributed, Event, Loaded, stride

E = TypeVar("E", bound=Event)
RTOL = 1e-5  # of a mean in float32
SCALABLE = 3.0  # times the median size: a larger contribution may be scaled down


@dataclass
class History:
    """The events of one process of ``peer`` (hex id), in order, recorded with `EventLog.detailed`.

    It is ``steady`` while alive, connected and undisturbed, from and to a time of its events' clock. Unless it is
    ``honest`` only its contributions count: it need not keep the rules.
    """

    peer: str
    events: list[Event] = field(default_factory=list)
    steady: tuple[float, float] | None = None
    honest: bool = True

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def states(self) -> list[Applied | Loaded]:
        """Return the events after which it held another state."""
        return [event for event in self.events if isinstance(event, Applied | Loaded)]


@dataclass(frozen=True)
class Violation:
    """One contradiction in a set of histories: ``peer`` (hex id) broke ``rule`` at ``step``."""

    rule: str
    peer: str
    step: int
    text: str


def check(histories: Sequence[History], *, patience_s: float = 30.0) -> list[Violation]:
    """Return all violations of the rules by the histories of all processes, those that were killed included.

    ``patience_s``: longest time between two steps of a steady peer, and from a fault until steps last.
    """
    given = {(one.round, history.peer): one for history in histories for one in history.of(Contributed)}
    honest = [history for history in histories if history.honest]
    found = _bad_sums(honest, given), _counted_twice(honest), _unequal_states(honest)
    return [*chain(*found, _standstills(honest, patience_s))]


def _bad_sums(honest: Sequence[History], given: Mapping[tuple[str, str], Contributed]) -> Iterator[Violation]:
    for history in honest:
        for applied in history.of(Applied):
            parts = {peer: given.get((applied.round, peer)) for peer in applied.weights}
            known = {peer: one for peer, one in parts.items() if one is not None}
            if 0 < len(known) == len(parts) and not _is_mean(applied, known):
                text = f"its mean is not that of the contributions of {len(parts)} peers"
                yield Violation("sum", history.peer, applied.step, text)


def _is_mean(applied: Applied, given: Mapping[str, Contributed]) -> bool:
    """Axes: M the round's contributors, N the sampled values."""
    values_MN = np.array([np.frombuffer(one.values, np.float32) for one in given.values()], np.float64)
    told_M = [min(applied.weights[peer], one.weight) for peer, one in given.items()]
    weights_MN = np.repeat(np.array(told_M)[:, None], values_MN.shape[1], axis=1)
    for start, stop, lacking in applied.gaps:
        cut = slice(*(-(-end // stride(applied.numel)) for end in (start, stop)))
        weights_MN[[peer in lacking for peer in given], cut] = 0.0
    parts_MN = np.where(weights_MN, values_MN, 0.0) * weights_MN  # one that is left out may be infinite
    sum_N = np.frombuffer(applied.mean, np.float32) * weights_MN.sum(axis=0)  # 0: there is no mean
    rms_M = np.sqrt((values_MN**2).mean(axis=1))
    scaled_M1 = (rms_M > SCALABLE * statistics.median_low(rms_M))[:, None]
    least_N, most_N = (
        np.where(scaled_M1, bound(parts_MN, 0.0), parts_MN).sum(axis=0) for bound in (np.minimum, np.maximum)
    )
    error_N = RTOL * np.abs(parts_MN).sum(axis=0)
    return bool(((least_N - error_N <= sum_N) & (sum_N <= most_N + error_N)).all())


def acknowledges(applied: Applied, peer: str) -> bool:
    """Return True if the peer's contribution is in a part of the mean at least."""
    return sum(stop - start for start, stop, lacking in applied.gaps if peer in lacking) < applied.numel


def _counted_twice(honest: Sequence[History]) -> Iterator[Violation]:
    results = [applied for history in honest for applied in history.of(Applied)]
    counted = {(one.round, peer) for one in results for peer in one.weights if acknowledges(one, peer)}
    for history in honest:
        spent = 0.0
        for one in history.of(Contributed):
            if spent + one.samples > 1.000001 * one.computed:
                text = f"it contributed {one.samples:g} samples when {one.computed - spent:g} were left"
                yield Violation("once", history.peer, one.step, text)
            spent += one.samples * ((one.round, history.peer) in counted)


def _unequal_states(honest: Sequence[History]) -> Iterator[Violation]:
    known: dict[tuple[str, str], object] = {}  # by lineage and what
    for history in honest:
        for event in history.states():
            last = (event.before, event.mean) if isinstance(event, Applied) else None
            for what, value in {"step": event.step, "state": event.state, "last mean": last}.items():
                if value and known.setdefault((event.lineage, what), value) != value:
                    text = f"another peer had lineage {event.lineage:.8} with another {what}"
                    yield Violation("state", history.peer, event.step, text)


def _swarm_history(honest: Sequence[History]) -> set[str]:
    """Return the lineages up to the highest step of the steady peers; of equal steps, that of most."""
    parents = {one.lineage: one.before for history in honest for one in history.of(Applied)}
    held = Counter((event.step, event.lineage) for one in honest if one.steady for event in one.states())
    _, lineage = max(held, key=lambda state: (state[0], held[state]), default=(0, ""))
    lineages = {lineage}
    while (lineage := parents.get(lineage, "")) and lineage not in lineages:
        lineages.add(lineage)
    return lineages


def _standstills(honest: Sequence[History], patience_s: float) -> Iterator[Violation]:
    lineages = _swarm_history(honest)
    for history in honest:
        begin, end = history.steady or (0.0, 0.0)
        first: dict[int, float] = {}  # when it reached each step
        for event in history.states():
            if event.lineage in lineages:
                first.setdefault(event.step, event.at)
            elif isinstance(event, Applied) and begin + patience_s <= event.at <= end:
                yield Violation("lost", history.peer, event.step, "the swarm did not follow this step")
        times = pairwise([begin, *(at for at in first.values() if begin < at < end), end])
        longest_s, since = max((later - one, one) for one, later in times)
        if longest_s > patience_s:
            text = f"no step of the swarm for {longest_s:.0f} s from {since:.0f} s on"
            yield Violation("progress", history.peer, max(first, default=-1), text)
