"""A storm: faults and a liar for a small simulated swarm that trains; its peers record their histories.

``python -m tests.sim.storm 2000 500`` tries the 2,000 storms from number 500 on, on all cores.
"""

import asyncio
import math
import random
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import msgspec

import colab_swarm as cs
from colab_swarm.averaging.group import JoinEta, JoinRound, RoundTerms
from colab_swarm.averaging.messages import Chunk
from colab_swarm.errors import StateError
from colab_swarm.events import Applied, Notice
from colab_swarm.swarm.simulation import NAMES, Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.records import ProgressRecord
from tests.sim.histories import History, check
from tests.training.toy import join_training, loss_of, model

TARGET, SAMPLES, SAMPLES_PER_S = 16, 2, 1.0  # four peers step each four seconds
CALM_S = 40.0  # at the end
SLOWER = {"lan": 2000.0, "home": 50.0}  # one way takes a second or so
LIAR, MUCH = "mallory", 1e6
SHRINK_S = 60.0


@dataclass(frozen=True)
class Fault:
    """``kind``: kill, lose (for good), freeze, slow, or partition: the peer and those after it from others.

    It lasts from ``begin`` to ``end``, percent of its spell. A kill and a partition wait for the peer's
    next round, and happen between two of its messages; a killed peer comes back after the spell.
    """

    kind: str
    peer: str
    begin: int = 10
    end: int = 90


@dataclass(frozen=True)
class Storm:
    """Spells of faults, one after another, then calm. ``spells``: seconds and faults of each."""

    seed: int
    spells: tuple[tuple[float, tuple[Fault, ...]], ...]
    peers: int = 4
    late: int = 0  # late joiners: one after each spell
    liar: str = ""  # one of `LIARS`
    network: str = "lan"

    @property
    def names(self) -> list[str]:
        return list(NAMES[: self.peers])

    def script(self, simulation: Simulation) -> float:
        """Schedule everything; return when the calm begins."""
        at, late = simulation.time, list(NAMES[-self.late :] if self.late else ())
        for seconds, faults in self.spells:
            returning = set(late[:1])
            del late[:1]
            for fault in faults:
                if fault.peer in self.names:
                    shares = fault.begin, fault.end
                    begin, end = (at + 2.0 + (seconds - 3.0) * share / 100 for share in shares)
                    returning |= self._schedule(simulation, fault, begin, end)
            at += seconds
            for name in sorted(returning):
                simulation.join(name, at=at)
        return at

    def _schedule(self, simulation: Simulation, fault: Fault, begin: float, end: float) -> set[str]:
        """Schedule a fault; return the peer if it comes back after the spell."""
        network, peer = simulation.network, fault.peer

        def in_a_round(what: str, *arguments: object) -> None:
            chunks, nth = (lambda message: isinstance(message, Chunk)), 1 + fault.begin % 6
            trap = network.when(chunks, sender=peer, nth=nth)
            network.loop.call_at(begin, lambda: getattr(trap, what)(*arguments))
            network.loop.call_at(end, network.traps.clear)

        match fault.kind:
            case "freeze":
                network.at(begin).freeze(peer, end - begin)
            case "slow":
                network.at(begin).slow(peer, SLOWER[self.network])
                network.at(end).slow(peer, 1.0)
            case "partition":
                there = set(self.names[self.names.index(peer) :])
                in_a_round("partition", set(self.names) - there, there)
                network.at(end).heal()
            case "kill" | "lose" if peer != NAMES[0]:  # one stays, or the model would be lost
                in_a_round("crash", peer)
                network.at(end).crash(peer)  # at the latest
                if fault.kind == "kill" or self.liar:  # else the liar might be half of the swarm
                    return {peer}
        return set()


LIARS = {
    "flips": "the gradient, times -2",
    "swells": "the gradient, times 1e30",
    "weighs": f"its samples are {MUCH:g}",
    "boasts": "its records tell of a step far ahead",
    "babbles": "its records make no sense",
    "hangs": "it never answers as an organizer",
    "promises": "it is about to come, and never comes",
}
TIMES = {"flips": -2.0, "swells": 1e30}


class Liar:
    """Makes a peer lie; each lie is an event of its history."""

    def __init__(self, how: str, optimizer: SwarmOptimizer, swarm: Swarm) -> None:
        self.how, self._swarm, self._progress = how, swarm, optimizer.rounds.view
        handlers, prefix = swarm.services.router._handlers, self._progress.prefix
        if how == "hangs":
            handlers[JoinRound][prefix] = self._hang
        elif how == "promises":
            handlers[RoundTerms][prefix] = self._promise
        if how in ("boasts", "babbles", "promises"):
            self._publish, swarm.services.dht.publish = swarm.services.dht.publish, self._tell  # type: ignore[method-assign]

    def on_lie(self) -> None:
        self._swarm.events.emit(Notice(self._swarm.runtime.time(), f"it {self.how}"))

    async def _hang(self, *_: object) -> None:
        self.on_lie()
        await asyncio.Event().wait()

    async def _promise(self, *_: object) -> JoinEta:
        self.on_lie()
        return JoinEta(2.0)

    async def _tell(self, key: str | bytes, value: Any, *, ttl_s: float) -> int:
        if isinstance(value, ProgressRecord):
            value = self._false(value)
            if self.how != "promises":
                self.on_lie()
        return await self._publish(key, value, ttl_s=ttl_s)

    def _false(self, record: ProgressRecord) -> Any:
        branch, change = self._progress.election.branch(), msgspec.structs.replace
        match self.how:
            case "boasts":
                return change(record, step=1_000_000, lineage=bytes(16))
            case "promises":  # it would be idle otherwise
                facts = {"samples": 1.0, "samples_per_s": 1.0, "syncing": False, "idle": False}
                return change(record, step=branch.step, lineage=branch.lineage, **facts)
        nonsense = b"\xff" * 40, {"step": "far"}, change(record, step=-1), change(record, samples=math.nan)
        return nonsense[int(self._swarm.runtime.time()) % len(nonsense)]


def train(swarm: Swarm, row: int, how: str) -> None:
    """Train without end, on two rows of each step's batch; a peer that has to lie does so as `LIARS` says."""
    net, optimizer = model(), None
    while optimizer is None:
        try:
            optimizer = join_training(swarm, net, target_batch_size=TARGET)
        except StateError:  # its donors are killed or cut off just now
            swarm.runtime.call(asyncio.sleep(1.0))
    liar = Liar(how, optimizer, swarm) if how else None
    while how == "promises":
        swarm.runtime.call(asyncio.sleep(1.0))
    while True:
        loss = loss_of(net, optimizer.global_step, slice(row, row + SAMPLES))
        (TIMES.get(how, 1.0) * loss).backward()
        if liar is not None and (how in TIMES or how == "weighs"):
            liar.on_lie()
        optimizer.step(samples=MUCH if how == "weighs" else SAMPLES)


def endure(storm: Storm) -> list[History]:
    """Return the histories of all processes, those that were killed included."""
    recorded: list[tuple[Swarm, History, float]] = []

    def work(swarm: Swarm) -> None:
        history = History(swarm.id.hex(), honest=swarm.name != LIAR)
        recorded.append((swarm, history, swarm.runtime.time()))
        swarm.events.detailed = True
        swarm.events.listen(history.events.append)
        row = [*NAMES, LIAR].index(swarm.name) % 5 * SAMPLES
        train(swarm, row, "" if history.honest else storm.liar)

    much = MUCH / SAMPLES if storm.liar == "weighs" else 1.0
    settings = {"network": storm.network, "seed": storm.seed, "samples_per_s": SAMPLES_PER_S}
    with cs.simulate(storm.peers, **settings) as simulation:
        if storm.liar:
            simulation.join(LIAR, samples_per_s=much * SAMPLES_PER_S)
        calm_at = storm.script(simulation)
        simulation.run(work, seconds=calm_at + CALM_S)
        assert not simulation.network.coming, "a fault did not happen"
        for swarm, history, began_at in recorded:
            if history.honest and simulation.swarms.get(swarm.name) is swarm:
                history.steady = max(began_at, calm_at), calm_at + CALM_S
    return [history for _, history, _ in recorded]


def assert_consistent(storm: Storm) -> list[History]:
    histories = endure(storm)
    assert sum(len(history.of(Applied)) for history in histories) > storm.peers
    assert not (found := check(histories)), "\n".join(map(str, [storm, *found]))
    return histories


def storm_of(number: int) -> Storm:
    rng = random.Random(number)

    def fault() -> Fault:
        kind = rng.choice(("freeze", "kill", "partition", "slow", "lose"))
        return Fault(kind, rng.choice(NAMES[:4]), rng.randint(0, 50), rng.randint(60, 100))

    spells = tuple(
        (rng.choice((12.0, 24.0, 40.0)), tuple(fault() for _ in range(rng.randint(1, 2))))
        for _ in range(rng.randint(1, 2))
    )
    chosen = {"peers": rng.randint(3, 4), "late": rng.randint(0, 2), "liar": rng.choice(("", "", *LIARS))}
    return Storm(number, spells, network=rng.choice(("lan", "home")), **chosen)


def error_of(storm: Storm) -> str:
    try:
        assert_consistent(storm)
    except Exception:  # of any kind: the report quotes it
        return traceback.format_exc(limit=-3)
    return ""


def simpler(storm: Storm) -> Iterator[Storm]:
    """Yield storms without one spell, fault, liar, late joiner or peer of this one."""
    for index, (seconds, faults) in enumerate(storm.spells):
        before, after = storm.spells[:index], storm.spells[index + 1 :]
        if before or after:
            yield replace(storm, spells=(*before, *after))
        for fault in faults if len(faults) > 1 else ():
            left = tuple(one for one in faults if one is not fault)
            yield replace(storm, spells=(*before, (seconds, left), *after))
    changes = {"liar": "", "late": max(0, storm.late - 1), "peers": 3, "network": "lan"}
    yield from (replace(storm, **{name: value}) for name, value in changes.items())


def shrink(storm: Storm) -> Storm:
    """Return a storm that fails, none simpler of which does, as far as `SHRINK_S` lead."""
    until, tried = time.monotonic() + SHRINK_S, {storm}
    left = deque(simpler(storm))
    while left and time.monotonic() < until:
        one = left.popleft()
        if one not in tried and error_of(one):
            storm, left = one, deque(simpler(one))
        tried.add(one)
    return storm


def report_of(number: int) -> str:
    """Return what is wrong in a storm, and a simpler one that fails, too; empty if nothing is."""
    if not (error := error_of(storm_of(number))):
        return ""
    return f"storm {number}: {error}\nshrunk to {shrink(storm_of(number))}"


def reports_of(numbers: Sequence[int]) -> list[str]:
    """Return the reports of the storms that fail, and print them as they come."""
    failed = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for report in filter(None, pool.map(report_of, numbers)):
            print(report, flush=True)
            failed.append(report)
    return failed


if __name__ == "__main__":
    count, first = (*map(int, sys.argv[1:]), 0)[:2]
    failed = reports_of(range(first, first + count))
    print(f"{len(failed)} of {count} storms failed")
    sys.exit(bool(failed))
