"""A simulated swarm that is played: actions are applied; the run ends, fails and stops."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.notebook.lessons import OVER
from colab_swarm.swarm.simulation import InteractiveRun, Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import wait
from tests.training.toy import train_freely


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with cs.simulate(3, network="home", seed=1, samples_per_s=4.0) as simulation:
        yield simulation


def train(swarm: Swarm, steps: int = 5) -> bytes:
    return train_freely(swarm, steps)[1]  # two samples at a time, so that steps of 10 take a while


def train_forever(swarm: Swarm) -> bytes:
    return train(swarm, steps=1_000_000)


@pytest.mark.slow
def test_without_a_front_end_the_story_is_printed_and_can_be_repeated(
    simulation: Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(simulation: Simulation) -> str:
        simulation.network.at(3.0).crash("bob")
        simulation.join("bob", at=8.0)
        lesson = simulation.play(train, live=False)
        assert len(set(lesson.wait().values())) == 1
        assert "finished" in repr(lesson) and "step 5" in repr(lesson)
        return capsys.readouterr().out

    story = play(simulation)
    assert all(line in story for line in ("bob crashes", "bob has joined", ": round 2: ", "bob has finished"))
    assert [fault.name for fault in simulation.network.fired] == ["crash"]
    with cs.simulate(3, network="home", seed=1, samples_per_s=4.0) as again:
        assert play(again) == story


@pytest.mark.slow
def test_a_run_ends_after_its_seconds_and_a_crashed_peer_is_shown_at_its_last_step(
    simulation: Simulation,
) -> None:
    began = simulation.time
    simulation.network.at(5.0).crash("bob")
    assert "alice" in simulation._repr_html_() and "to come: 5 s: bob crashes" in simulation._repr_html_()
    lesson = simulation.play(train_forever, seconds=10.0, live=False)
    assert simulation.time == lesson.snapshot().at == pytest.approx(began + 10.0)
    assert lesson.wait() == {} and lesson.snapshot().state == "finished"
    alice, bob, _ = simulation.snapshot().peers
    assert bob.role == "crashed" and 0 < bob.step < alice.step and bob.loss is not None
    assert [fault.name for fault in simulation.network.fired] == ["crash"]


@pytest.mark.slow
def test_an_impossible_action_is_reported_and_every_other_happens(simulation: Simulation) -> None:
    impossible: list[tuple[Any, ...]] = [("crash", "zoe"), ("crash",), ("join", "bob"), ("peers", 0)]
    impossible += [("speed", "bob", -1.0), ("speed", "nobody", 1.0), ("slow", "bob", -1.0)]
    impossible += [("lose", 2.0), ("latency", 0.0), ("latency", None)]
    lesson = played(simulation)
    for verb, *arguments in impossible:
        lesson.inject(verb, *arguments)
    wait(lambda: sum("not possible" in line for line in lesson.snapshot().story) == len(impossible))
    assert not simulation.network.fired and lesson.snapshot().state == "playing"
    lesson.pause()
    actions = (("lose", 0.0), ("latency", 2.0), ("slow", "bob", 3.0), ("speed", "bob", 1), ("join",))
    for verb, *arguments in actions:
        lesson.inject(verb, *arguments)
    wait(lambda: len(simulation.network.fired) == 3 and simulation.speed_of("bob") == 1)
    lesson.pause(False)
    wait(lambda: any("dave has joined" in line for line in lesson.snapshot().story))


def played(
    simulation: Simulation, train: Callable[[Swarm], Any] = train_forever, **options: Any
) -> InteractiveRun:
    return simulation.play(train, speed=1000.0, live=True, **options)


def test_an_error_of_a_peers_code_is_shown_and_raised(simulation: Simulation) -> None:
    def broken(swarm: Swarm) -> None:
        raise ZeroDivisionError("<mine>")

    with pytest.raises(ZeroDivisionError, match="mine"):
        simulation.play(broken, live=False)
    lesson = played(simulation, broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        lesson.wait()
    assert lesson.snapshot().state == "failed"
    assert "ZeroDivisionError: &lt;mine&gt;" in lesson._repr_mimebundle_()["text/html"]
    with pytest.raises(RuntimeError, match="end of the whole process"):
        played(simulation, lambda _: exit()).wait()


def test_a_run_is_paused_stepped_slowed_and_stopped_by_the_next(simulation: Simulation) -> None:
    lesson = played(simulation)
    lesson.pause()

    def time_after(number: int) -> float:
        """The time once one more fault was injected, ``number`` in all."""
        lesson.inject("lose", 0.0)
        wait(lambda: len(simulation.network.fired) == number)
        return simulation.time

    at = time_after(1)
    assert at == time_after(2) == time_after(3)
    lesson.step()
    wait(lambda: lesson.snapshot().at == pytest.approx(at + 1.0))
    assert time_after(4) == pytest.approx(at + 1.0) and lesson.snapshot().state == "paused"
    lesson.speed = 0  # the lowest one
    lesson.pause(False)
    time_after(5)
    lesson.speed = 1000.0
    second = played(simulation)
    assert lesson.snapshot().state in OVER and second.snapshot().state == "playing"
    lesson.close()
    simulation.close()
    assert second.snapshot().state == "stopped"


@pytest.mark.slow
def test_a_peer_added_twice_joins_once_and_wakes_an_empty_swarm(simulation: Simulation) -> None:
    lesson = played(simulation)
    for name in ("alice", "bob", "carol"):
        lesson.inject("crash", name)
    wait(lambda: all(peer.role == "crashed" for peer in lesson.snapshot().peers))
    at = simulation.time
    lesson.pause()
    for _ in range(2):
        lesson.inject("join", "bob")
    wait(lambda: any("join bob: not possible" in line for line in lesson.snapshot().story))
    lesson.pause(False)
    wait(lambda: any("bob has joined" in line for line in lesson.snapshot().story))
    assert at < 100 and len(simulation.network.fired) == 3 and not lesson.snapshot().error
