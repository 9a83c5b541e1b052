"""What a trainer does next: its table of states, and a way of averaging that needs no network."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import colab_swarm as cs
from colab_swarm.averaging.result import RoundResult
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.collaboration import Collaboration, Due
from colab_swarm.training.progress import WATCHING
from colab_swarm.training.records import Mean, StepTaken
from colab_swarm.training.rounds import RoundOutcome, Rounds, TrainedModel
from colab_swarm.training.settings import RoundInput, TrainingSettings
from colab_swarm.training.trainer_state import TRANSITIONS, TrainerEvent, TrainerState, next_state

TARGET = 4.0
ALICE = PeerId(bytes(32))


class SoloRounds(Rounds):
    """Rounds of one peer: its contribution is the mean, until ``rounds_left`` is 0; then no mean comes, or ever."""

    behind = False
    rounds_left = 100
    hangs = False

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def refresh(self) -> None: ...
    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None: ...
    async def distrust(self, donors: Sequence[PeerId]) -> None: ...
    async def take_state(self, *, has_state: bool) -> None: ...
    def on_loaded(self, donors: tuple[PeerId, ...]) -> None: ...
    def kill(self) -> None: ...
    def check(self) -> None: ...

    def samples(self, now: float, *, aside: bool) -> float:
        return self.progress.known.own.samples

    def round_due(self, now: float, *, waiting: bool) -> bool:
        return self.samples(now, aside=False) >= TARGET

    async def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        if self.rounds_left:
            self.rounds_left -= 1
            yield RoundOutcome(Mean(contribution.vector.values, b"mean"), result_of(contribution))
        elif self.hangs:
            await asyncio.Event().wait()


def result_of(contribution: RoundInput) -> RoundResult:
    return RoundResult(
        step=0,
        announced={ALICE: contribution.samples},
        contributors=(ALICE,),
        sent_bytes=0,
        received_bytes=0,
        seconds=0.0,
        exchange_s=0.0,
        members=(),
    )


def no_state() -> Snapshot:
    raise AssertionError("nobody asks for it")


async def solo(swarm: Swarm) -> Collaboration:
    settings = TrainingSettings("solo", TARGET)
    model = TrainedModel(3, b"", no_state, 0.0, lambda: None)
    trainer = Collaboration(SoloRounds(swarm.services, settings, WATCHING, model))
    await trainer.start()
    assert await trainer.catch_up() is None  # its own state counts
    return trainer


def alone(train: Callable[[Swarm], Coroutine[Any, Any, None]]) -> None:
    with cs.simulate(1) as simulation:
        simulation.run(lambda swarm: swarm.runtime.call(train(swarm)), seconds=20_000.0)


def contribution_of(samples: float) -> RoundInput:
    return RoundInput(HostVector(np.ones(3, np.float32)), samples, samples)


async def take_part(trainer: Collaboration, *, aside: bool = False) -> int:
    """Contribute, and apply what comes; return how many means came."""
    means = 0
    contribution = contribution_of(trainer.progress.known.own.samples)
    async for outcome in trainer.contribute(contribution, aside=aside):
        assert trainer.state is TrainerState.APPLYING
        await trainer.on_applied(outcome, StepTaken(b"next"))
        means += 1
    return means


def test_a_trainer_computes_averages_and_applies_in_turn_over_any_rounds() -> None:
    async def train(swarm: Swarm) -> None:
        trainer = await solo(swarm)
        dues = [await trainer.report(1.0) for _ in range(4)]
        assert dues == [Due.NOTHING] * 3 + [Due.ROUND]
        assert await take_part(trainer) == 1
        assert trainer.state is TrainerState.COMPUTING
        assert trainer.progress.known.own.step == 1 and trainer.progress.known.own.samples == 0.0

    alone(train)


def test_samples_of_a_round_that_was_not_stay_and_those_beside_a_round_count_for_the_next() -> None:
    async def train(swarm: Swarm) -> None:
        trainer = await solo(swarm)
        await trainer.report(4.0)
        trainer.rounds.rounds_left = 1  # type: ignore[attr-defined]
        async for outcome in trainer.contribute(contribution_of(4.0), aside=True):
            assert await trainer.report(1.0) is Due.NOTHING  # while the step is taken
            await trainer.on_applied(outcome, StepTaken(b"next"))
        assert trainer.progress.known.own.samples == 1.0
        assert await take_part(trainer, aside=True) == 0
        assert trainer.state is TrainerState.COMPUTING and trainer.progress.known.own.samples == 1.0

    alone(train)


def test_a_pause_within_a_round_begins_when_that_is_over_and_nothing_is_due_meanwhile() -> None:
    async def train(swarm: Swarm) -> None:
        trainer = await solo(swarm)
        await trainer.report(4.0)
        async for outcome in trainer.contribute(contribution_of(4.0)):
            swarm.services.gate.hold()
            trainer.on_gate()
            assert trainer.state is TrainerState.APPLYING and trainer.progress.known.own.paused
            await trainer.on_applied(outcome, StepTaken(b"next"))
        assert trainer.state is TrainerState.PAUSED and await trainer.report(4.0) is Due.NOTHING
        swarm.services.gate.release()
        trainer.on_gate()
        assert trainer.state is TrainerState.COMPUTING

    alone(train)


def test_a_cancelled_round_and_a_failed_step_leave_a_trainer_that_computes() -> None:
    async def train(swarm: Swarm) -> None:
        trainer = await solo(swarm)
        await trainer.report(4.0)
        outcomes = trainer.contribute(contribution_of(4.0))
        await anext(outcomes)
        await outcomes.aclose()  # the step failed
        assert trainer.state is TrainerState.COMPUTING and trainer.progress.known.own.step == 0
        trainer.rounds.rounds_left = 0  # type: ignore[attr-defined]
        trainer.rounds.hangs = True  # type: ignore[attr-defined]
        task = asyncio.create_task(take_part(trainer))
        while trainer.state is not TrainerState.AVERAGING:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert trainer.state is TrainerState.COMPUTING and trainer.progress.known.own.samples == 4.0

    alone(train)


def test_a_call_that_cannot_be_now_raises_and_changes_nothing() -> None:
    async def train(swarm: Swarm) -> None:
        trainer = await solo(swarm)
        trainer.kill()
        record = trainer.progress.known.own
        with pytest.raises(RuntimeError, match="a trainer that is left cannot take the event: reported"):
            await trainer.report(1.0)
        assert trainer.state is TrainerState.LEFT and trainer.progress.known.own == record

    alone(train)


@given(st.lists(st.sampled_from(TrainerEvent), max_size=30))
def test_whatever_happens_a_trainer_stays_in_the_table_and_can_always_leave(
    events: list[TrainerEvent],
) -> None:
    state = TrainerState.JOINING
    for event in events:
        if (state, event) in TRANSITIONS:
            state = next_state(state, event)
        else:
            with pytest.raises(RuntimeError, match="cannot take the event"):
                next_state(state, event)
    assert next_state(next_state(state, TrainerEvent.LEAVES), TrainerEvent.LEFT) is TrainerState.LEFT


def test_every_state_and_event_of_the_table_is_reached() -> None:
    reached = {TrainerState.JOINING}
    while True:
        more = {after for (state, _), after in TRANSITIONS.items() if state in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == {*TrainerState} and {event for _, event in TRANSITIONS} == {*TrainerEvent}


def test_a_wait_that_the_user_interrupts_leaves_no_trainer_that_says_it_is_ready() -> None:
    async def train(swarm: Swarm) -> None:
        trainer = await solo(swarm)
        await trainer.report(1.0)
        waiting = asyncio.create_task(trainer.wait_due(math.inf))
        await asyncio.sleep(1.0)
        assert trainer.state is TrainerState.WAITING
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert trainer.state is TrainerState.COMPUTING
        await asyncio.sleep(10_000.0)
        assert trainer.rounds.throughput.idle(asyncio.get_running_loop().time())

    alone(train)
