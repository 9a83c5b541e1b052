"""Check the histories of peers: training loses nothing, counts nothing twice and goes on.

As in Jepsen, faults happen, each process records its history, and `check` finds what contradicts these rules:

| rule | what holds |
|---|---|
| sum | a step is that of the mean of its round's contributors, each by its samples |
| once | no sample is in the means of two rounds |
| state | equal lineages mean equal steps and bit-equal parameters |
| fork | while nothing disturbs the peers, all that take a step have the same lineage after it |
| progress | a peer that is alive and connected takes the swarm's steps |

All peers train a `Ledger`: its row i has the gradient 1 at peer i and 0 at the others, so the parameters tell whose
contributions are in each step. Sums are checked in rounds that lost nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch

from colab_swarm.events import Event, RoundFinished, StateReceived, StepFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.optimizer import SwarmOptimizer

MOMENTUM = 0.5
WIDTH = 16  # values of a peer's row
TOLERANCE = 1e-4


class Ledger(torch.nn.Module):
    """A row of values for each peer."""

    def __init__(self, peers: int) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(peers, WIDTH))

    def optimizer(self) -> torch.optim.Optimizer:
        """Its state is the mean of the steps so far: one that is not loaded with the parameters shows, too."""
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=MOMENTUM)


@dataclass(frozen=True)
class State:
    """What a process held at ``at``; ``values``: of the ledger. ``round``: that led there, if it took part in one."""

    at: float
    step: int
    lineage: str
    values: Floats
    round: RoundFinished | None = None


@dataclass
class History:
    """What one process of ``peer`` (hex id) held and averaged, in order.

    ``computed``: its samples. ``left``: of its own accord. ``loads``: its next state is one of others. It is
    ``steady`` while alive, connected and undisturbed,
    from and to a time.
    """

    peer: str
    row: int
    states: list[State] = field(default_factory=list)
    rounds: list[RoundFinished] = field(default_factory=list)
    computed: float = 0.0
    left: bool = False
    loads: bool = False
    steady: tuple[float, float] | None = None

    def record(self, swarm: Swarm, optimizer: SwarmOptimizer, ledger: Ledger) -> None:
        """Record from now on what is heard; the trainer calls `look`, too, as some steps are taken unheard."""

        def on_event(event: Event) -> None:
            if isinstance(event, RoundFinished):
                self.rounds.append(event)
            elif isinstance(event, StateReceived):
                self.loads = True
            elif isinstance(event, StepFinished):
                self.look(swarm, optimizer, ledger)

        swarm.events.listen(on_event)

    def look(self, swarm: Swarm, optimizer: SwarmOptimizer, ledger: Ledger) -> None:
        step = optimizer.global_step
        lineage = optimizer.lineage.hex()
        if self.states and (self.states[-1].step, self.states[-1].lineage) == (step, lineage):
            return
        averaged = [one for one in self.rounds if one.step == step - 1]
        last = averaged[-1] if averaged and not self.loads else None
        self.loads = False
        values = ledger.rows.detach().numpy().copy()
        self.states.append(State(swarm.runtime.time(), step, lineage, values, last))


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
    found = _bad_sums(histories), _counted_twice(histories), _unequal_states(histories)
    return [*chain(*found, _forks(histories, patience_s), _standstills(histories, patience_s))]


def _lost_nothing(averaged: RoundFinished) -> bool:
    missing = [one for one in averaged.members if one.samples and one.peer not in averaged.contributors]
    return not (missing or averaged.spans_lost or averaged.kept_local)


def _bad_sums(histories: Sequence[History]) -> Iterator[Violation]:
    rows = {history.peer: history.row for history in histories}
    for history in histories:
        for first, second, third in zip(history.states, history.states[1:], history.states[2:], strict=False):
            averaged = third.round
            in_order = (second.step, third.step) == (first.step + 1, first.step + 2)
            if not in_order or second.round is None or averaged is None:
                continue
            if not _lost_nothing(averaged) or not averaged.samples:
                continue
            mean = (second.values - third.values) - MOMENTUM * (first.values - second.values)
            expected = np.zeros_like(mean)
            for member in averaged.members:
                expected[rows[member.peer]] = member.samples / averaged.samples
            if not np.allclose(mean, expected, atol=TOLERANCE):
                text = f"its step is {mean[:, 0].round(3)} where {expected[:, 0].round(3)} were averaged"
                yield Violation("sum", history.peer, third.step, text)


def _counted_twice(histories: Sequence[History]) -> Iterator[Violation]:
    """Compare what each peer computed with its samples in all rounds of which any member knows."""
    counted: dict[object, dict[str, float]] = defaultdict(dict)
    last: dict[str, int] = {}
    for history in histories:
        for averaged in history.rounds:
            key = averaged.step, tuple((member.peer, member.samples) for member in averaged.members)
            for member in averaged.members:
                if member.peer in averaged.contributors:
                    counted[key][member.peer] = member.samples
                    last[member.peer] = max(averaged.step, last.get(member.peer, 0))
    for peer in sorted({history.peer for history in histories}):
        computed = sum(history.computed for history in histories if history.peer == peer)
        spent = sum(samples.get(peer, 0.0) for samples in counted.values())
        if spent > 1.000001 * computed:
            yield Violation("once", peer, last[peer], f"{spent:g} of its {computed:g} samples count")


def _unequal_states(histories: Sequence[History]) -> Iterator[Violation]:
    known: dict[str, tuple[int, bytes]] = {}
    for history in histories:
        for state in history.states:
            held = state.step, state.values.tobytes()
            if known.setdefault(state.lineage, held) != held:
                text = f"another peer had lineage {state.lineage:.8} with another step or other parameters"
                yield Violation("state", history.peer, state.step, text)


def _steady(histories: Iterable[History], after_s: float) -> Iterator[tuple[History, State]]:
    """Yield the states that steady peers held so long after the last fault."""
    for history in histories:
        begin, end = history.steady or (0.0, -1.0)
        for state in history.states:
            if begin + after_s <= state.at <= end:
                yield history, state


def _forks(histories: Sequence[History], patience_s: float) -> Iterator[Violation]:
    lineages: dict[int, str] = {}
    for history, state in _steady(histories, patience_s):
        if lineages.setdefault(state.step, state.lineage) != state.lineage:
            yield Violation(
                "fork", history.peer, state.step, "another steady peer took this step another way"
            )


def _standstills(histories: Sequence[History], patience_s: float) -> Iterator[Violation]:
    for history in histories:
        if history.steady is None:
            continue
        begin, end = history.steady
        first: dict[int, float] = {}  # when it reached each step
        for state in history.states:
            first.setdefault(state.step, state.at)
        times = pairwise([begin, *sorted(at for at in first.values() if begin < at < end), end])
        longest_s, since = max((later - earlier, earlier) for earlier, later in times)
        if longest_s > patience_s:
            text = f"no new step for {longest_s:.0f} s from {since:.0f} s on"
            yield Violation("progress", history.peer, max(first, default=-1), text)
