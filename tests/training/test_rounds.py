"""A trainer that cannot join the rounds gets the reason, and no peer stops the others for long."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

import colab_swarm as cs
from colab_swarm.events import Event, Fault, RoundFinished, StateReceived
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import ROWS, join_training, loss_of, model, take, wait_for_peers


@pytest.mark.slow
def test_a_peer_with_another_codec_gets_one_event() -> None:
    def train(swarm: Swarm) -> list[str]:
        net = model()
        codec = "float16" if swarm.name == "alice" else "float32"
        optimizer = join_training(swarm, net, compression=codec)
        wait_for_peers(swarm, optimizer, 3)
        for step in range(4):
            loss_of(net, step).backward()
            optimizer.step(samples=5)
        return [fault.text for fault in swarm.events.recent(Fault)]

    with cs.simulate(3, network="lan", seed=1, samples_per_s=10.0) as simulation:
        faults = simulation.run(train, seconds=300)
    advice = "all peers of a run take the same model, compression and mean_compression"
    told = [texts for texts in faults.values() if any("compression" in text for text in texts)]
    assert told and all(len(texts) == 1 and advice in texts[0] for texts in told)


WAKE_AT_S, COMMON_STEPS, END = 60.0, 3, 12


def train_idle_and_train(swarm: Swarm, eager: str) -> bytes:
    """All stop after `COMMON_STEPS`, but one takes another step; a minute later all train to the same step."""
    optimizer = join_training(swarm, net := model(), target_batch_size=16, matchmaking_timeout_s=5.0)
    wait_for_peers(swarm, optimizer, 3)

    def train_until(step: int) -> None:
        while optimizer.global_step < step:
            take(optimizer, net, optimizer.global_step, slice(0, 2))

    train_until(COMMON_STEPS + (swarm.name == eager))
    swarm.runtime.call(asyncio.sleep(WAKE_AT_S - swarm.runtime.time()))
    train_until(END)
    return optimizer.lineage


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("eager", ["alice", "bob", "carol"])
def test_a_step_that_one_peer_takes_alone_while_the_others_idle_stops_no_peer(eager: str, seed: int) -> None:
    with cs.simulate(3, network="lan", seed=seed, samples_per_s=40.0) as sim:
        lineages = sim.run(lambda swarm: train_idle_and_train(swarm, eager), seconds=600)
        alone = [e for e in sim.swarms[eager].events.recent(RoundFinished) if e.group_size == 1]
        assert [e.step for e in alone] == [COMMON_STEPS]
        assert sim.time < WAKE_AT_S + 5.0  # a round that waits for a peer in vain would take longer
    assert len(lineages) == 3 and len(set(lineages.values())) == 1


IDLE_UNTIL_S, LAST = 300.0, 90


def train_beside_idle_peers(swarm: Swarm, active: str, pauses: bool) -> tuple[int, bytes, bool]:
    """All stop after `COMMON_STEPS` but the active one; at `IDLE_UNTIL_S` all train on, to the same step.

    Returns the step before that, the lineage at the end, and whether the step only rose in between.
    """
    optimizer = join_training(swarm, net := model(), target_batch_size=16, matchmaking_timeout_s=5.0)
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
@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("active", ["alice", "carol"])
def test_a_trainer_advances_beside_idle_peers_which_catch_up_when_they_train_again(
    active: str, pauses: bool
) -> None:
    with cs.simulate(3, network="lan", seed=0, samples_per_s=4.0) as sim:
        ended = sim.run(lambda swarm: train_beside_idle_peers(swarm, active, pauses), seconds=900)
    assert len({lineage for _, lineage, _ in ended.values()}) == 1 and ended[active][2]
    assert ended[active][0] > 30  # at 4 s a step alone, after two minutes in which the others were waited for


def train_rounded(swarm: Swarm, rounding: float) -> bytes:
    """On a processor that rounds gradients in its own way; alice only helps."""
    if swarm.name == "alice":
        swarm.serve_as_reducer()
        return b""
    optimizer = join_training(swarm, net := model(), target_batch_size=80)
    while optimizer.global_step < 6:
        loss = loss_of(net, optimizer.global_step, ROWS[swarm.name])
        (loss * (1 + rounding)).backward()
        optimizer.step(samples=10, loss=loss.item())
    return optimizer.lineage


def summary(event: Event) -> tuple[float, str, object]:
    """All but its values."""
    who = event.donors if isinstance(event, StateReceived) else None
    return event.at, type(event).__name__, event.contributors if isinstance(event, RoundFinished) else who


@pytest.mark.slow
def test_peers_cut_off_from_each_other_agree_on_the_same_one_however_values_are_rounded() -> None:
    ends, stories = set(), []
    for rounding in (0.0, 1e-6, 2e-6):
        with cs.simulate(1, network="home", seed=1, samples_per_s=10.0) as sim:
            for name in ("bob", "carol", "dave"):
                sim.join(name, listen=False)
            sim.network.at(5.0).crash("alice")  # no peer can reach another one
            sim.join("alice", at=25.0)
            results = sim.run(lambda swarm, rounding=rounding: train_rounded(swarm, rounding))
            assert [fault.name for fault in sim.network.fired] == ["crash"]
            logs = {name: swarm.events.recent() for name, swarm in sim.swarms.items()}
        ends.add(results["bob"])
        assert any(isinstance(event, StateReceived) for log in logs.values() for event in log)
        stories.append({name: [summary(event) for event in log] for name, log in logs.items()})
    assert len(ends) == 3, "the values did not differ"
    assert all(story == stories[0] for story in stories)
