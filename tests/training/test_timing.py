"""How the time of a loop divides: by given times, by a stand-in for a GPU's events, and in simulated runs."""

from collections import Counter
from typing import Any

import pytest
import torch

from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors import device
from colab_swarm.training.settings import Due
from colab_swarm.training.timing import StepTimes
from tests.training import toy

CPU = torch.device("cpu")


def times_of(*calls: tuple[float, float | None], on: torch.device = CPU) -> StepTimes:
    """A loop whose calls of `step()` began and ended then; None: it raised."""
    times = StepTimes(on)
    for began, ended in calls:
        times.begin(began)
        if ended is not None:
            times.end(ended, Due.NOTHING)
    return times


@pytest.mark.parametrize(
    ("now", "share"),
    [(21.0, 0.8), (71.0, 0.8), (72.0, 8.0 / 9.0), (80.9, 8.0 / 9.0), (81.0, 0.0), (1e6, 0.0)],
)
def test_only_turns_of_the_last_minute_count(now: float, share: float) -> None:
    assert times_of((0.0, 1.0), (9.0, 12.0), (20.0, 21.0)).share(now) == share


@pytest.mark.parametrize(
    ("calls", "turns"),
    [
        ([(0.0, 1.0), (9.0, 12.0), (20.0, 21.0)], [(12.0, 8.0, 3.0), (21.0, 8.0, 1.0)]),
        ([], []),
        ([(5.0, 6.0)], []),
        ([(5.0, None), (8.0, 9.0)], []),
        ([(0.0, 1.0), (5.0, None), (8.0, 9.0)], []),
        ([(0.0, 1.0), (5.0, None), (6.0, None), (8.0, 9.0)], []),
        ([(0.0, 1.0), (2.0, None), (8.0, 9.0), (12.0, 13.0)], [(13.0, 3.0, 1.0)]),
    ],
)
def test_a_turn_is_between_the_ends_of_two_calls_and_one_that_raised_spoils_only_its_own(
    calls: list[tuple[float, float | None]], turns: list[tuple[float, float, float]]
) -> None:
    times = times_of(*calls)
    assert [(turn.at, turn.own_s, turn.step_s) for turn in times.turns] == turns
    assert turns or times.share(9.0) == 0.0


class Event:
    """A CUDA event: `done_ms` is the device's clock when it comes there; None: it has not come so far."""

    recorded: list["Event"]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.done_ms: float | None = None

    def record(self, stream: object) -> None:
        assert stream == "main stream"
        self.recorded.append(self)

    def query(self) -> bool:
        return self.done_ms is not None

    def elapsed_time(self, later: "Event") -> float:
        assert self.done_ms is not None and later.done_ms is not None
        return later.done_ms - self.done_ms


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    monkeypatch.setattr(Event, "recorded", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: "main stream")
    return Event.recorded


def test_on_a_gpu_its_own_clock_counts_and_nothing_waits_for_it(events: list[Event]) -> None:
    times = times_of((0.0, 0.001), (0.002, 0.003), on=torch.device("cuda"))
    # The host enqueued two turns in 3 ms, and the device has done none.
    assert len(events) == 4 and not times.turns
    first, *others = events
    first.done_ms = 5.0
    times.begin(0.004)
    for event, done_ms in zip(others, [6.0, 45.0, 50.0], strict=True):
        event.done_ms = done_ms
    times.end(0.005, Due.LOCAL_STEP)
    (turn,) = times.turns
    assert (turn.at, turn.due, turn.own_s, turn.step_s) == (0.003, Due.NOTHING, 0.039, 0.005)
    assert times.share(1.0) == pytest.approx(39 / 44)


def test_a_turn_on_two_streams_waits_for_all_its_events(events: list[Event]) -> None:
    times = times_of((0.0, 0.001), (0.002, 0.003), on=torch.device("cuda"))
    _, before, began, ended = events
    ended.done_ms = 50.0
    began.done_ms = 45.0
    times.begin(0.004)
    times.end(0.005, Due.NOTHING)
    assert not times.turns
    before.done_ms = 6.0
    times.begin(0.006)
    times.end(0.007, Due.NOTHING)
    assert [turn.own_s for turn in times.turns] == [0.039]


@pytest.mark.parametrize("kind", ["mps", "meta"])
def test_of_a_device_without_such_a_clock_nothing_is_said(kind: str) -> None:
    times = times_of((0.0, 1.0), (9.0, 12.0), (20.0, 21.0), on=torch.device(kind))
    assert (list(times.turns), times.share(21.0)) == ([], 0.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_batch_size": 30}, {Due.NOTHING: 7, Due.ROUND: 4}),
        ({"local_steps": 4}, {Due.LOCAL_STEP: 8, Due.ROUND: 3}),
        ({"target_batch_size": 10, "overlap": True}, {Due.ROUND: 11}),
        ({"local_steps": 4, "overlap": True}, {Due.LOCAL_STEP: 6, Due.LANDING: 2, Due.ROUND: 3}),
    ],
)
def test_a_turn_says_what_its_step_did(settings: dict[str, Any], expected: dict[Due, int]) -> None:
    def train(swarm: Swarm) -> list[Any]:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, **settings)
        for index in range(12):
            toy.take(optimizer, net, index)
        # A simulated peer computes in step(), so its panel shows no share.
        assert swarm.snapshot().computing == 0.0
        return list(optimizer.times.turns)

    turns = toy.alone(train)
    assert Counter(turn.due for turn in turns) == expected
    assert all(turn.own_s == 0.0 < turn.step_s for turn in turns)


def test_waiting_without_data_is_nobodys_time() -> None:
    def train(swarm: Swarm) -> list[Any]:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=1000)
        for index in range(3):
            toy.take(optimizer, net, index)
        optimizer.wait_step(timeout_s=5.0)
        for index in range(3):
            toy.take(optimizer, net, index)
        return list(optimizer.times.turns)

    turns = toy.alone(train)
    assert len(turns) == 4 and all(turn.own_s == 0.0 for turn in turns)


def test_turns_count_what_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    times = times_of((0.0, 1.0))
    monkeypatch.setattr(device.copied, "out_bytes", device.copied.out_bytes + 300)
    monkeypatch.setattr(device.copied, "in_bytes", device.copied.in_bytes + 50)
    before = device.copied.out_bytes + device.copied.in_bytes - 350
    times.begin(2.0)
    times.end(3.0, Due.ROUND)
    assert [turn.copied_bytes - before for turn in times.turns] == [350]
