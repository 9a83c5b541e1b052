"""A simulated swarm that is played: the same actions give the same run; it ends, fails and stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.notebook.lessons import Action
from colab_swarm.swarm.lesson import InteractiveRun
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import wait
from tests.training.toy import join_training, loss_of, model

CRASH = Action(3.0, "crash", ("bob",))
COME_BACK = Action(8.0, "join", ("bob",))


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with cs.simulate(3, network="home", seed=1, samples_per_s=4.0) as simulation:
        yield simulation


def train(swarm: Swarm, steps: int = 5) -> bytes:
    """Two samples at a time, so that steps of 10 samples take a while."""
    net = model()
    optimizer = join_training(swarm, net)
    while optimizer.global_step < steps:
        loss = loss_of(net, optimizer.global_step)
        loss.backward()
        optimizer.step(samples=2, loss=loss.item())
    return optimizer.lineage


def train_forever(swarm: Swarm) -> bytes:
    return train(swarm, steps=1_000_000)


@pytest.mark.slow
def test_without_a_front_end_the_story_is_printed_and_can_be_repeated(
    simulation: Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = [CRASH, COME_BACK, Action(8.0, "speed", ("carol", 1.0))]
    lesson = simulation.play(train, actions=actions, live=False)
    story = capsys.readouterr().out
    assert len(set(lesson.wait().values())) == 1
    for line in (
        "bob crashes",
        "bob has joined",
        "step 2: ",
        "carol now trains 1 samples/s",
        "bob has finished",
    ):
        assert line in story
    assert [fault.name for fault in simulation.network.fired] == ["crash"]
    with cs.simulate(3, network="home", seed=1, samples_per_s=4.0) as again:
        again.play(train, actions=lesson.actions, live=False)
    assert capsys.readouterr().out == story
    assert "finished" in repr(lesson) and "step 5" in repr(lesson)


def test_a_run_ends_after_its_seconds(simulation: Simulation, capsys: pytest.CaptureFixture[str]) -> None:
    lesson = simulation.play(train_forever, seconds=1.0, live=False)
    assert simulation.time == pytest.approx(lesson.snapshot().simulation.at)
    assert lesson.wait() == {} and lesson.over
    assert "1.0 s" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (("crash", "zoe"), "crash zoe: not possible, zoe is not online"),
        (("speed", "bob", -1.0), "not possible"),
        (("speed", "nobody", 1.0), "not possible"),
        (("peers", 0), "not possible"),
        (("lose", 2.0), "not possible"),
        (("latency", 0.0), "not possible"),
        (("slow", "bob", -1.0), "not possible"),
    ],
)
def test_an_impossible_action_is_reported_and_changes_nothing(
    simulation: Simulation, action: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *arguments = action
    actions = [Action(0.0, verb, tuple(arguments))]
    lesson = simulation.play(train_forever, seconds=0.5, actions=actions, live=False)
    assert why in capsys.readouterr().out and why in "".join(lesson.snapshot().story)
    assert not simulation.network.fired and not lesson.actions


def test_an_error_of_a_peers_code_is_raised_without_a_front_end(simulation: Simulation) -> None:
    def broken(swarm: Swarm) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        simulation.play(broken, live=False)


@pytest.mark.slow
def test_a_crashed_peer_is_shown_at_its_last_step(simulation: Simulation) -> None:
    simulation.play(train, actions=[Action(8.0, "crash", ("bob",))], live=False)
    alice, bob, _ = simulation.snapshot().peers
    assert bob.state == "crashed" and 0 < bob.step < alice.step and bob.loss is not None
    assert [fault.name for fault in simulation.network.fired] == ["crash"]


def test_time_stands_still_while_every_peer_is_crashed(simulation: Simulation) -> None:
    everybody = [Action(1.0, "crash", (name,)) for name in ("alice", "bob", "carol")]
    lesson = simulation.play(train_forever, actions=everybody, live=False)
    crashed = [peer.state for peer in lesson.snapshot().simulation.peers]
    assert crashed == ["crashed"] * 3 and simulation.time < 2
    assert len(simulation.network.fired) == 3


def played(
    simulation: Simulation, train: Callable[[Swarm], Any] = train_forever, **options: Any
) -> InteractiveRun:
    return simulation.play(train, speed=1000.0, live=True, **options)


@pytest.mark.slow
def test_a_run_in_the_background_applies_injected_actions(simulation: Simulation) -> None:
    lesson = played(simulation)
    wait(lambda: lesson.snapshot().simulation.at > 2)
    lesson.inject("crash", "carol")
    wait(lambda: [peer.state for peer in lesson.snapshot().simulation.peers][2] == "crashed")
    lesson.inject("peers", 4)
    wait(lambda: len(lesson.snapshot().simulation.peers) == 4)
    lesson.pause()
    wait(lambda: lesson.snapshot().state == "paused")
    lesson.stop()
    lesson.stop()
    snapshot = lesson.snapshot()
    assert snapshot.state == "stopped" and any("carol crashes" in line for line in snapshot.story)
    assert [action.verb for action in lesson.actions] == ["crash", "peers"]
    assert "carol" in lesson._repr_html_()


@pytest.mark.slow
def test_a_run_with_injected_actions_can_be_repeated(simulation: Simulation) -> None:
    def state(one: Simulation) -> tuple[list[Any], list[str], float]:
        steps = [(name, swarm.snapshot().step) for name, swarm in one.swarms.items()]
        return steps, [fault.name for fault in one.network.fired], one.time

    lesson = played(simulation, seconds=20.0)
    wait(lambda: lesson.snapshot().simulation.at > 1)
    lesson.inject("slow", "alice", 10.0)
    lesson.inject("crash", "bob")
    lesson.wait()
    with cs.simulate(3, network="home", seed=1, samples_per_s=4.0) as again:
        again.play(train_forever, seconds=20.0, actions=lesson.actions, live=False)
        assert state(again) == state(simulation)
        assert state(again)[1] == ["slow", "crash"]


def test_a_new_run_stops_the_former_one_and_so_does_closing(simulation: Simulation) -> None:
    first = played(simulation)
    second = played(simulation)
    assert first.over and not second.over
    simulation.close()
    assert second.over and second.snapshot().state == "stopped"


def test_an_error_in_the_background_is_shown_and_raised_by_wait(simulation: Simulation) -> None:
    def broken(swarm: Swarm) -> None:
        raise ZeroDivisionError("<mine>")

    lesson = played(simulation, broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        lesson.wait()
    assert lesson.snapshot().state == "failed"
    assert "ZeroDivisionError: &lt;mine&gt;" in lesson._repr_html_()


def test_step_advances_time_while_paused(simulation: Simulation) -> None:
    lesson = played(simulation)
    lesson.pause()
    wait(lambda: lesson.snapshot().state == "paused")
    at = lesson.snapshot().simulation.at
    lesson.step()
    wait(lambda: lesson.snapshot().simulation.at > at)
    lesson.stop()


def test_a_simulation_shows_its_peers_and_the_faults_to_come(simulation: Simulation) -> None:
    simulation.network.at(60.0).crash("bob")
    shown = simulation._repr_html_()
    assert "alice" in shown and "to come: 60 s: bob crashes" in shown
    torch.manual_seed(0)
    simulation.run(train, seconds=1.0)
    assert simulation.snapshot().target_batch_size == 10


@pytest.mark.slow
def test_a_peer_added_twice_before_time_passes_joins_once(simulation: Simulation) -> None:
    lesson = played(simulation, seconds=5.0)
    lesson.pause()
    wait(lambda: lesson.snapshot().state == "paused")
    lesson.inject("crash", "bob")
    for _ in range(2):
        lesson.inject("join", "bob")
    for wanted in (6, 8, 2, 5):
        lesson.inject("peers", wanted)
    lesson.wait()
    snapshot = lesson.snapshot()
    assert any("join bob: not possible" in line for line in snapshot.story) and not snapshot.error
    assert sum(peer.state != "crashed" for peer in snapshot.simulation.peers) == 5


@pytest.mark.slow
def test_time_continues_when_a_peer_joins_an_empty_swarm(simulation: Simulation) -> None:
    lesson = played(simulation)
    for name in ("alice", "bob", "carol"):
        lesson.inject("crash", name)
    wait(lambda: all(peer.state == "crashed" for peer in lesson.snapshot().simulation.peers))
    lesson.inject("join", "bob")
    wait(lambda: any("bob has joined" in line for line in lesson.snapshot().story))


def test_a_run_that_cannot_start_does_not_block_the_next(simulation: Simulation) -> None:
    with pytest.raises(AttributeError):
        simulation.play(train_forever, actions=("crash bob",), live=True)  # type: ignore[arg-type]
    assert simulation.play(train_forever, seconds=1.0, live=False).over


def test_a_peers_code_that_exits_fails_its_run(simulation: Simulation) -> None:
    with pytest.raises(RuntimeError, match="end of the whole process"):
        played(simulation, lambda _: exit()).wait()


def test_a_speed_of_zero_means_the_lowest_speed(simulation: Simulation) -> None:
    lesson = played(simulation, seconds=50.0)
    lesson.speed = 0
    lesson.inject("crash", "bob")
    wait(lambda: bool(lesson.actions))
    lesson.speed = 1000.0
    lesson.stop()
    assert lesson.snapshot().state in ("stopped", "finished")
