"""Chaos: faults at random moments or by a script, and what training makes of them. Pure: it kills nobody.

One fault a line: when (seconds, or ``step`` and a number), kind, peer, and the seconds that it lasts:

    12      kill bob 20        killed, and started again after 20 s; without a number never
    40.5    freeze carol 10    stopped (SIGSTOP), then continued
    step30  restart alice      killed, and started at once
    60      cut dave 15        nothing passes between it and the others
    80      slow dave 30       its connection is `SLOWER` times slower

`colab_swarm.bench.chaos` plays it on processes and in virtual time.
"""

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from colab_swarm.errors import require

LASTS_S = {"kill": (5, 30), "freeze": (1, 40), "restart": (0, 0), "cut": (5, 40), "slow": (10, 40)}
"""The kinds of faults, and for how many seconds random ones last."""
KILLS = ("kill", "restart")
SLOWER = 20.0
STARTS_S = 10.0  # from the start of a peer to the next random fault
SETTLE_S = 20.0  # without random faults, at the end: forks that last longer count


@dataclass(frozen=True)
class ChaosFault:
    """A fault of ``peer`` that begins, or ``ends``, at second ``at`` or, ``by_step``, at that step of the swarm."""

    at: float
    kind: str
    peer: str
    seconds: float = math.inf
    by_step: bool = False
    ends: bool = False


def read_script(text: str, peers: Sequence[str]) -> list[ChaosFault]:
    """Return the faults of a script; a ValueError quotes the line that is wrong. ``#`` begins a comment."""
    faults = []
    for line in text.splitlines():
        match line.partition("#")[0].split():
            case []:
                pass
            case [when, kind, peer, *rest] if kind in LASTS_S and peer in peers and len(rest) < 2:
                seconds = float(rest[0]) if rest else 0.0 if kind == "restart" else math.inf
                by_step = when.startswith("step")
                faults.append(ChaosFault(float(when.removeprefix("step")), kind, peer, seconds, by_step))
            case _:
                shape = "SECONDS KIND PEER [SECONDS] or stepNUMBER KIND PEER [SECONDS]"
                raise ValueError(f"{line!r}: write {shape}; {', '.join(LASTS_S)}; {', '.join(peers)}")
    return faults


def random_faults(
    peers: Sequence[str], *, until_s: float, mean_s: float, kinds: Sequence[str], rng: random.Random
) -> list[ChaosFault]:
    """Return faults that are over at ``until_s``, one each ``mean_s`` on average; one peer at least has none.

    Raises ValueError for an unknown kind, and for a ``mean_s`` of 0 or less.
    """
    known = set(kinds) <= LASTS_S.keys()
    require(known and mean_s > 0, f"kinds={','.join(kinds)}: choose of {', '.join(LASTS_S)}")
    faults, at, free_at = list[ChaosFault](), 0.0, dict.fromkeys(peers, 0.0)
    while (at := at + rng.expovariate(1 / mean_s)) < until_s:
        free, kind = [peer for peer in peers if free_at[peer] <= at], rng.choice(kinds)
        if len(free) > 1:
            seconds = min(rng.uniform(*LASTS_S[kind]), until_s - at)
            faults.append(ChaosFault(at, kind, rng.choice(free), seconds))
            free_at[faults[-1].peer] = at + seconds + STARTS_S * (kind in KILLS)
    return faults


class ChaosMeter:
    """Measures a training by what happens to its peers, at rising times in seconds."""

    def __init__(self, peers: Iterable[str]) -> None:
        self.peers, self.step, self.faults = tuple(peers), 0, 0
        self.training: set[str] = set()  # they have taken a step since they were started
        self.disturbed: set[str] = set()  # by a freeze or a cut, now
        self.errors: list[str] = []
        self._restarts_s: list[float] = []  # from a start to the first step
        self._lineages: dict[str, dict[int, str]] = {peer: {} for peer in self.peers}
        self._started_at: dict[str, float] = {}  # of started peers that do not train yet
        self._stepped_at = dict.fromkeys(self.peers, -math.inf)
        self._began = self._at = self._waited_s = self._longest_s = self._available_s = 0.0
        self._undisturbed, self._first = 0.0, 0

    def begin(self, at: float) -> None:
        """Start to measure; earlier steps give the undisturbed speed."""
        self._undisturbed = self._per_minute(at)
        self._first, self._began, self._at, self._restarts_s = self.step, at, at, []
        self._waited_s = self._longest_s = self._available_s = 0.0

    def _per_minute(self, at: float) -> float:
        return 60 * (self.step - self._first) / max(at - self._began, 1e-9)

    def pass_time(self, at: float) -> None:
        """Call it before each change of ``training`` and ``disturbed``."""
        well = len(self.training - self.disturbed)
        self._available_s += well * (at - self._at)
        self._waited_s += (at - self._at) * (well >= 2)
        self._longest_s, self._at = max(self._longest_s, self._waited_s), at

    def on_start(self, at: float, peer: str) -> None:
        self._started_at[peer] = at

    def on_stop(self, at: float, peer: str, *errors: str) -> None:
        self.pass_time(at)
        self.errors += errors
        self.training.discard(peer)
        self._started_at.pop(peer, None)

    def on_step(self, at: float, peer: str, step: int, lineage: str) -> None:
        """The peer took a step with the swarm, to ``step``."""
        self.pass_time(at)
        if (started_at := self._started_at.pop(peer, None)) is not None:
            self._restarts_s.append(at - started_at)
        self.training.add(peer)
        self._lineages[peer][step], self._stepped_at[peer] = lineage, at
        if step > self.step:
            self.step, self._waited_s = step, 0.0

    def report(self, at: float) -> dict[str, Any]:
        """Return the figures by name; a fork lasts if a peer still steps where the leader took another way."""
        self.pass_time(at)
        taken, starts, lasted_s = self._lineages, self._restarts_s, max(at - self._began, 1e-9)
        last = {peer: max(taken[peer]) for peer in self.peers if self._stepped_at[peer] > at - SETTLE_S}
        leader = taken[max(last, key=lambda peer: last[peer])] if last else {}
        return {
            "faults": self.faults,
            "steps": self.step - self._first,
            "steps a minute": self._per_minute(at),
            "undisturbed steps a minute": self._undisturbed,
            "part of the undisturbed steps": self._per_minute(at) / max(self._undisturbed, 1e-9),
            "part of the peers' time without a fault": self._available_s / lasted_s / len(self.peers),
            "longest wait for a step with two peers, s": self._longest_s,
            "restarts that trained again": len(starts),
            "restarts that did not": len(self._started_at),
            "median time until then, s": statistics.median(starts) if starts else None,
            "worst, s": max(starts, default=None),
            "forks that lasted": [
                peer for peer, at in last.items() if leader.get(at, taken[peer][at]) != taken[peer][at]
            ],
            "exceptions in a loop": self.errors,
        }
