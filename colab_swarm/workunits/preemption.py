"""What preemptible instances do to the time and the price of a job: the real dispatcher on virtual time.

The VC-ASGD paper (section IV) reckons: of n units that a slot trains one after the other, a share p is lost with its
instance; each costs the timeout t_o until it is known, and so the job takes ``n t_e + n p t_o``. The dispatcher
behaves so: a lost unit counts as in flight until its deadline, and its slot gets nothing meanwhile. The formula stops
to hold where

- p is not small: what is lost may be lost again, so it is rather ``n t_e + n p / (1 - p) t_o``;
- n is small, or epochs are short: each ends only when its last unit is back, and all slots wait for one that was lost
  near the end. The paper's 40 epochs of 50 units on 10 slots lose 2.6 times as much as the formula says at p = 0.05;
- an instance may have more units in flight than it trains at once: then it need not wait for the timeout.
"""

from __future__ import annotations

import asyncio
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from colab_swarm.sim.runtime import run_virtual, virtual_time
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated, Measured


@dataclass(frozen=True)
class PreemptionModel:
    """A job on preemptible instances.

    Attributes:
        volunteers: instances.
        slots: units that each trains at a time.
        units: of an epoch.
        unit_s: what one takes (t_e).
        deadline_s: when it is given up (t_o).
        kill_probability: that the instance is taken away during a unit (p).
        restart_s: until another instance is there instead.
        epochs: of the job.
    """

    volunteers: int
    slots: int
    units: int
    unit_s: float
    deadline_s: float
    kill_probability: float
    restart_s: float = 60.0
    epochs: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.kill_probability < 1:
            raise ValueError(f"kill_probability={self.kill_probability}: it must be at least 0 and below 1")
        if not 0 < self.unit_s < self.deadline_s:
            raise ValueError(f"unit_s={self.unit_s}, deadline_s={self.deadline_s}: no unit would be in time")

    @property
    def undisturbed_s(self) -> float:
        """Without kills: n t_e."""
        return self.units_per_slot * self.unit_s

    @property
    def units_per_slot(self) -> float:
        """How many a slot trains one after the other: n."""
        return self.units * self.epochs / (self.volunteers * self.slots)

    @property
    def expected_s(self) -> float:
        """By the paper's formula: n t_e + n p t_o."""
        return self.undisturbed_s + self.units_per_slot * self.kill_probability * self.deadline_s


@dataclass(frozen=True)
class Prices:
    """Of one instance, in $ per hour."""

    standard: float
    preemptible: float


@dataclass(frozen=True)
class PreemptionResult:
    """How the job went.

    Attributes:
        model: of it.
        seconds: it took.
        kills: instances taken away.
        lost: units lost with them.
    """

    model: PreemptionModel
    seconds: float
    kills: int
    lost: int

    @property
    def extra_s(self) -> float:
        """What the kills cost."""
        return self.seconds - self.model.undisturbed_s

    def costs(self, prices: Prices) -> tuple[float, float]:
        """In $: on standard instances, which nobody takes away, and on preemptible ones."""
        standard_h = self.model.undisturbed_s / 3600
        return (
            self.model.volunteers * standard_h * prices.standard,
            self.model.volunteers * self.seconds / 3600 * prices.preemptible,
        )

    def line(self, prices: Prices) -> str:
        """For people: time and price, standard and preemptible."""
        standard, preemptible = self.costs(prices)
        return (
            f"{self.model.undisturbed_s / 3600:.2f} h and ${standard:.2f} on standard instances; "
            f"{self.seconds / 3600:.2f} h ({self.model.expected_s / 3600:.2f} h expected) and ${preemptible:.2f} "
            f"on preemptible ones, of which {self.kills} were taken away"
        )


def simulate_preemption(model: PreemptionModel, seed: int = 0) -> PreemptionResult:
    """Run the job once; the same ``seed`` gives the same result."""
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a loop that runs already
        return thread.submit(lambda: run_virtual(_Fleet(model, seed).run())).result()


class _Fleet:
    """Instances that ask the dispatcher for units; results are assimilated at once."""

    def __init__(self, model: PreemptionModel, seed: int) -> None:
        self._model, self._rng = model, random.Random(seed)
        plan = WorkPlan(
            subsets=model.units,
            max_epochs=model.epochs,
            deadline_s=model.deadline_s,
            in_flight=model.slots,
        )
        digests = [f"{subset:064x}" for subset in range(model.units)]
        self._dispatcher = Dispatcher(plan, digests, random.Random(seed + 1))
        self._kills = self._lost = self._version = 0
        self._ended_at = 0.0

    async def run(self) -> PreemptionResult:
        async with asyncio.TaskGroup() as instances:
            for number in range(self._model.volunteers):
                instances.create_task(self._instances(f"instance {number}"))
        return PreemptionResult(self._model, self._ended_at, self._kills, self._lost)

    async def _instances(self, volunteer: str) -> None:
        """One after the other. Within ``unit_s`` each is taken away with the model's probability."""
        rate = -math.log(1 - self._model.kill_probability) / self._model.unit_s
        while not self._dispatcher.finished:
            life_s = self._rng.expovariate(rate) if rate else math.inf
            try:
                async with asyncio.timeout(life_s if rate else None), asyncio.TaskGroup() as slots:
                    for _ in range(self._model.slots):
                        slots.create_task(self._slot(volunteer))
            except TimeoutError:
                self._kills += not self._dispatcher.finished
                await asyncio.sleep(self._model.restart_s)

    async def _slot(self, volunteer: str) -> None:
        while not self._dispatcher.finished:
            now = virtual_time()
            self._commit(*self._dispatcher.expired(now=now))
            given = self._dispatcher.assign(volunteer, 1, (), now=now, version=self._version)
            self._commit(*given)
            if not given:
                await asyncio.sleep(self._dispatcher.wait_s(volunteer, now=now))
                continue
            try:
                await asyncio.sleep(self._model.unit_s)
            except asyncio.CancelledError:
                self._lost += not self._dispatcher.finished
                raise
            self._finish(given[0].assignment)

    def _finish(self, assignment: str) -> None:
        now, name = virtual_time(), f"result-{assignment}"
        (accepted,) = self._dispatcher.on_result(assignment, 1.0, name, now=now)
        assert isinstance(accepted, Accepted)
        self._version += 1
        assimilated = Assimilated(
            at=now,
            unit=accepted.unit,
            assignment=assignment,
            server="simulated",
            version=self._version,
            seconds=0.0,
        )
        self._commit(accepted, assimilated, Measured(at=now, unit=accepted.unit, accuracy=0.0))
        self._commit(*self._dispatcher.advance(now=now))
        self._ended_at = now

    def _commit(self, *entries: AnyEntry) -> None:
        for entry in entries:
            self._dispatcher.apply(entry)
