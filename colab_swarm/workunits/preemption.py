"""The time and price of a job on preemptible instances: the real dispatcher on virtual time.

The VC-ASGD paper (section IV): of n units that a slot trains in sequence, a share p is lost with
its instance, and each loss costs the timeout t_o. So the job takes ``n t_e + n p t_o``; more where
p is large or epochs are short.
"""

import asyncio
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from colab_swarm.runtime import loop_now
from colab_swarm.sim.runtime import run_virtual
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.state import AnyEntry, Assimilated, Measured


@dataclass(frozen=True)
class PreemptionModel:
    """``volunteers`` instances train ``slots`` units at a time each; an epoch has ``units``, the
    job ``epochs``. A unit takes ``unit_s`` (t_e) and expires after ``deadline_s`` (t_o). An
    instance is preempted during a unit with ``kill_probability`` (p) and replaced after
    ``restart_s``.
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
        if not (0 <= self.kill_probability < 1 and 0 < self.unit_s < self.deadline_s):
            raise ValueError(f"{self}: kill_probability must be in [0, 1), unit_s below deadline_s")

    @property
    def undisturbed_s(self) -> float:
        """Time without preemptions: n t_e."""
        return self.units * self.epochs / (self.volunteers * self.slots) * self.unit_s

    @property
    def expected_s(self) -> float:
        """Time by the paper's formula: n t_e + n p t_o."""
        return self.undisturbed_s * (1 + self.kill_probability * self.deadline_s / self.unit_s)


def simulate_preemption(model: PreemptionModel, seed: int = 0) -> tuple[float, int]:
    """Simulate the job; return its seconds, and how many instances were preempted. Instances cost
    ``volunteers * seconds``. The same ``seed`` gives the same result.
    """
    with ThreadPoolExecutor(1) as thread:  # in a notebook this thread already runs a loop
        return thread.submit(lambda: run_virtual(_Fleet(model, seed).run())).result()


class _Fleet:
    """Instances that request units from a dispatcher; results are assimilated at once."""

    def __init__(self, model: PreemptionModel, seed: int) -> None:
        self._model, self._rng = model, random.Random(seed)
        plan = WorkPlan(
            subsets=model.units, max_epochs=model.epochs, deadline_s=model.deadline_s, in_flight=model.slots
        )
        digests = [f"{unit:064x}" for unit in range(model.units)]
        self._dispatcher = Dispatcher(plan, digests, random.Random(seed + 1))
        self._kills, self._ended_at = 0, 0.0

    async def run(self) -> tuple[float, int]:
        async with asyncio.TaskGroup() as instances:
            for number in range(self._model.volunteers):
                instances.create_task(self._instance(f"instance {number}"))
        return self._ended_at, self._kills

    async def _instance(self, name: str) -> None:
        rate = -math.log(1 - self._model.kill_probability) / self._model.unit_s
        while not self._dispatcher.state.finished:
            try:
                async with asyncio.timeout(self._rng.expovariate(rate) if rate else None):
                    await asyncio.gather(*(self._slot(name) for _ in range(self._model.slots)))
            except TimeoutError:
                self._kills += not self._dispatcher.state.finished
                await asyncio.sleep(self._model.restart_s)

    async def _slot(self, instance: str) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.state.finished:
            now = loop_now()
            self._commit(*dispatcher.expired(now=now))
            if not (given := dispatcher.assign(instance, 1, (), now=now)):
                await asyncio.sleep(dispatcher.wait_s(instance, now=now))
                continue
            self._commit(*given)
            await asyncio.sleep(self._model.unit_s)
            now = self._ended_at = loop_now()
            unit, name = given[0].unit, given[0].assignment
            self._commit(
                *dispatcher.on_result(name, 1.0, lambda *_: 0.0, now=now),
                Assimilated(at=now, unit=unit, assignment=name, server="", version=0, seconds=0.0),
                Measured(at=now, unit=unit, accuracy=0.0),
            )
            while due := dispatcher.advance(now=now):
                self._commit(*due)

    def _commit(self, *entries: AnyEntry) -> None:
        for entry in entries:
            self._dispatcher.state.apply(entry)
