"""A storm: faults for a simulated swarm that trains; its peers record their histories.

``python -m tests.sim.storm 2000 500`` tries the 2,000 storms from number 500 on, on all cores.
"""

import asyncio
import math
import random
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import colab_swarm as cs
from colab_swarm.averaging.messages import Chunk
from colab_swarm.errors import StateError
from colab_swarm.sim.network import SimNetwork
from colab_swarm.swarm.simulation import Simulation, _nth_name
from colab_swarm.swarm.swarm import Swarm
from tests.sim.histories import History, Ledger, check

SAMPLES = 2  # in a micro-batch, which takes two seconds
BATCHES = 2  # micro-batches of a peer in a step, if all are there
CALM_S = 40.0  # at the end
SLOWER = {"lan": 2000.0, "home": 50.0}  # one way takes a second or so


@dataclass(frozen=True)
class Fault:
    """``kind``: kill, lose (for good), leave, freeze, slow, or partition: the peer and those after it from others.

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
    network: str = "lan"

    @property
    def names(self) -> list[str]:
        """Those that are there from the begin, then those that come late."""
        return [_nth_name(number) for number in range(self.peers + self.late)]

    @property
    def faults(self) -> list[Fault]:
        """Those that happen: alice stays, or the model would be lost."""
        there = set(self.names[: self.peers])
        faults = [fault for _, faults in self.spells for fault in faults if fault.peer in there]
        return [fault for fault in faults if fault.peer != self.names[0] or fault.kind not in GOES]

    def script(self, simulation: Simulation, leaves_at: dict[str, float]) -> float:
        """Schedule everything; return when the calm begins."""
        at = simulation.time
        late = self.names[self.peers :]
        for seconds, faults in self.spells:
            returning = set(late[:1])
            del late[:1]
            for fault in self.faults:
                if not any(fault is one for one in faults):
                    continue
                begin = at + 2.0 + (seconds - 3.0) * fault.begin / 100
                end = at + 2.0 + (seconds - 3.0) * fault.end / 100
                self._schedule(simulation.network, fault, begin, end)
                if fault.kind == "leave":
                    leaves_at.setdefault(fault.peer, begin)
                elif fault.kind == "kill":
                    returning.add(fault.peer)
            at += seconds
            for name in sorted(returning):
                simulation.join(name, at=at)
        return at

    def _schedule(self, network: SimNetwork, fault: Fault, begin: float, end: float) -> None:
        peer = fault.peer

        def in_a_round(name: str, *arguments: object) -> None:
            """Between two messages of the peer's next round, or half-way to the end."""

            def set_trap() -> None:
                chunks = network.when(lambda message: isinstance(message, Chunk), sender=peer, nth=nth)
                getattr(chunks, name)(*arguments)
                network.loop.call_at((begin + end) / 2, at_the_latest, network.traps[-1])

            def at_the_latest(trap: Any) -> None:
                if trap in network.traps:
                    network.traps.remove(trap)
                    network.fire(name, *arguments)

            nth = 1 + fault.begin % 6
            network.loop.call_at(begin, set_trap)

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
            case "kill" | "lose":
                in_a_round("crash", peer)


GOES = {"kill", "lose", "leave"}
FIRED = {
    "kill": "crash",
    "lose": "crash",
    "freeze": "freeze",
    "slow": "slow",
    "partition": "partition",
}
"""By kind, the name that the network records."""


class Scene:
    """The processes of a storm, and what they recorded."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.recorded: list[tuple[Swarm, History, float]] = []
        self.leaves_at: dict[str, float] = {}
        self.left: set[str] = set()

    def train(self, swarm: Swarm) -> None:
        """Train without end, or until this peer leaves."""
        names = self.storm.names
        began_at = swarm.runtime.time()
        ledger = Ledger(len(names))
        history = History(swarm.id.hex(), names.index(swarm.name))
        self.recorded.append((swarm, history, began_at))
        optimizer = None
        while optimizer is None:
            try:
                target = self.storm.peers * BATCHES * SAMPLES
                optimizer = swarm.optimizer(ledger.optimizer(), target_batch_size=target)
            except StateError:  # its donors are killed or cut off just now
                swarm.runtime.call(asyncio.sleep(1.0))
        history.record(swarm, optimizer, ledger)
        leaves_at = self.leaves_at.get(swarm.name, math.inf)
        while not began_at < leaves_at <= swarm.runtime.time():
            history.look(swarm, optimizer, ledger)
            ledger.rows[history.row].sum().backward()
            history.computed += SAMPLES
            optimizer.step(samples=SAMPLES)
        optimizer.close()
        history.left = True
        self.left.add(swarm.name)


def endure(storm: Storm) -> list[History]:
    """Return the histories of all processes, those that were killed included."""
    scene = Scene(storm)
    with cs.simulate(storm.peers, network=storm.network, seed=storm.seed, samples_per_s=1.0) as simulation:
        calm_at = storm.script(simulation, scene.leaves_at)
        simulation.run(scene.train, seconds=calm_at + CALM_S)
        network = simulation.network
        assert not network.coming and not network.traps, "a fault did not happen"
        fired = {fault.name for fault in network.fired}
        crashed = {fault.arguments[0] for fault in network.fired if fault.name == "crash"}
        assert fired >= {FIRED[fault.kind] for fault in storm.faults if fault.kind in FIRED}
        assert scene.leaves_at.keys() <= scene.left | crashed
        for swarm, history, began_at in scene.recorded:
            if simulation.swarms.get(swarm.name) is swarm and not history.left:
                history.steady = max(began_at, calm_at), calm_at + CALM_S
    return [history for _, history, _ in scene.recorded]


def assert_consistent(storm: Storm) -> list[History]:
    """All that live took the same steps, and hold the same at the end."""
    histories = endure(storm)
    found = check(histories)
    assert not found, "\n".join(map(str, [storm, *found]))
    ends = [history.states[-1].step for history in histories if history.steady]
    assert min(ends) >= max(ends) - 1 and max(ends) > 3, storm
    return histories


def storm_of(number: int) -> Storm:
    """Return a storm of three or four peers; each fourth one has 8, and each sixteenth one 24."""
    rng = random.Random(number)
    peers = rng.randint(3, 4)
    if number % 4 == 3:
        peers = 24 if number % 16 == 15 else 8
    spells = []
    for _ in range(rng.randint(1, 2)):
        faults = []
        for _ in range(max(rng.randint(1, 2), peers // 4)):
            kind = rng.choice(("freeze", "kill", "partition", "slow", "lose", "leave"))
            peer = _nth_name(rng.randrange(peers))
            faults.append(Fault(kind, peer, rng.randint(0, 50), rng.randint(60, 100)))
        spells.append((rng.choice((12.0, 24.0, 40.0)), tuple(faults)))
    network = rng.choice(("lan", "home"))
    return Storm(number, tuple(spells), peers=peers, late=rng.randint(0, 2), network=network)


def report_of(number: int) -> str:
    """Return what is wrong in a storm; empty if nothing is."""
    storm = storm_of(number)
    try:
        assert_consistent(storm)
    except Exception:  # of any kind: the report quotes it
        return f"storm {number}, {storm}: {traceback.format_exc(limit=-3)}"
    return ""


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
