"""A trainer that cannot join the rounds gets the reason, and no peer stops the others for long."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

import colab_swarm as cs
from colab_swarm.events import StepFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.rounds import Ready
from colab_swarm.training.settings import StepOffer
from tests.training.toy import join_training, model, take, train_to, wait_for_peers

COMMON_STEPS, IDLE_UNTIL_S, LAST = 3, 200.0, 60


def train_beside_idle_peers(swarm: Swarm, active: str, pauses: bool) -> tuple[int, bytes, bool]:
    """All stop after `COMMON_STEPS` but the active one; at `IDLE_UNTIL_S` all train on, to the same step.

    Returns the step before that, the lineage at the end, and whether the step only rose in between.
    """
    optimizer = join_training(swarm, net := model(), target_batch_size=16)
    wait_for_peers(swarm, optimizer, 3)
    steps: list[int] = []

    def train_while(more: Callable[[], bool]) -> None:
        while more():
            take(optimizer, net, optimizer.global_step, slice(0, 2))
            steps.append(optimizer.global_step)

    train_while(lambda: optimizer.global_step < COMMON_STEPS)
    if swarm.name == active:
        train_while(lambda: swarm.runtime.time() < IDLE_UNTIL_S)
    reached = optimizer.global_step
    steps.clear()
    with swarm.paused() if pauses and swarm.name != active else contextlib.nullcontext():
        swarm.runtime.call(asyncio.sleep(max(0.0, IDLE_UNTIL_S - swarm.runtime.time())))
    train_while(lambda: optimizer.global_step < LAST)
    return reached, optimizer.lineage, steps == sorted(steps)


@pytest.mark.slow
@pytest.mark.parametrize(("active", "pauses"), [("alice", True), ("carol", False)])
def test_a_trainer_advances_beside_idle_peers_which_catch_up_later(active: str, pauses: bool) -> None:
    with cs.simulate(3, network="lan", seed=0, samples_per_s=4.0) as sim:
        ended = sim.run(lambda swarm: train_beside_idle_peers(swarm, active, pauses), seconds=900)
        steps = {
            name: [one.step for one in swarm.events.recent(StepFinished)]
            for name, swarm in sim.swarms.items()
        }
    assert len({lineage for _, lineage, _ in ended.values()}) == 1 and ended[active][2]
    assert pauses or all(taken == [*range(1, LAST + 1)] for taken in steps.values())
    assert ended[active][0] > 12  # at 4 s a step alone, after two minutes in which the others were waited for


def test_a_peer_whose_organizer_is_a_step_further_takes_the_state() -> None:
    """The others may wait for it, and take no further step that would show it how far they are."""

    def train(swarm: Swarm) -> tuple[Ready, Ready]:
        optimizer = join_training(swarm, net := model(), target_batch_size=4)
        train_to(2, optimizer, net, slice(0, 2))
        rounds = optimizer.rounds
        assert isinstance(rounds, LinkRounds)

        def ready_after(first_step: int) -> Ready:
            rounds._rendezvous.first_step = first_step  # as told to who comes to stand there
            return swarm.runtime.call(rounds.ready(StepOffer(0.0), swarm.runtime.time() + 10.0, idle=True))

        return ready_after(2), ready_after(3)

    with cs.simulate(1, network="lan", seed=0) as sim:
        assert sim.run(train)["alice"] == (Ready.NOTHING, Ready.CATCH_UP)
