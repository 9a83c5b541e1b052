"""The swarm's loss from the reports of single trainers."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from colab_swarm.backbone import keeper
from colab_swarm.backbone.config import Forward
from colab_swarm.backbone.keeper import Forwarder, LossCurve, LossPoint
from colab_swarm.net.peers import PeerId
from colab_swarm.training.records import ProgressRecord
from colab_swarm.training.view import Branch

ALICE, BOB, MALLORY = (PeerId(bytes([letter]) * 32) for letter in b"abm")


def record(step: int, loss: float | None, *, samples: float = 8.0) -> ProgressRecord:
    return ProgressRecord(step, b"", samples, 1.0, syncing=False, name="x", loss=loss)


def branch(step: int) -> Branch:
    return Branch(step, b"", frozenset({ALICE}), frozenset({ALICE}))


def point(step: int) -> LossPoint:
    return LossPoint(step, 0.0, 1.0, 2)


def test_a_step_counts_when_the_swarm_has_left_it() -> None:
    curve = LossCurve()
    assert curve.on_records({ALICE: record(4, 3.0), BOB: record(4, 5.0)}, branch(4), at=1.0) == []
    (ended,) = curve.on_records({ALICE: record(5, 2.0)}, branch(5), at=2.0)
    assert (ended.step, ended.loss, ended.peers) == (4, 4.0, 2)
    assert curve.loss_at(9) == 4.0 and curve.loss_at(3) is None


def test_a_loss_reported_right_after_a_step_belongs_to_the_batch_before() -> None:
    (ended,) = LossCurve().on_records({ALICE: record(5, 3.0, samples=0.0)}, branch(5), at=1.0)
    assert (ended.step, ended.loss) == (4, 3.0)


def losses(*reports: ProgressRecord) -> list[float]:
    curve, records = LossCurve(), dict(zip((ALICE, BOB, MALLORY), reports, strict=True))
    curve.on_records(records, branch(4), at=1.0)
    return [ended.loss for ended in curve.on_records(records, branch(5), at=2.0)]


def test_a_liar_among_three_moves_the_loss_to_an_honest_one_at_most_and_some_do_not_count() -> None:
    assert losses(record(4, 3.0), record(4, 3.2), record(4, 1e6)) == [3.2]
    assert losses(record(90, 1.0), record(4, float("nan")), record(4, None)) == []


def test_a_run_that_goes_back_to_a_checkpoint_replaces_what_came_after() -> None:
    curve = LossCurve(point(step) for step in range(10))
    curve.on_records({ALICE: record(6, 7.0)}, branch(6), at=1.0)
    curve.on_records({ALICE: record(7, 7.0)}, branch(7), at=2.0)
    assert [one.step for one in curve.points] == [0, 1, 2, 3, 4, 5, 6] and curve.points[-1].loss == 7.0


def test_a_long_run_is_thinned_and_keeps_its_newest_points() -> None:
    curve = LossCurve(point(step) for step in range(50_000))
    steps = [one.step for one in curve.points]
    assert len(steps) <= keeper.MAX_POINTS and steps[0] < 100 and steps[-3:] == [49_997, 49_998, 49_999]
    assert steps == sorted(set(steps))


def test_a_curve_with_a_record_that_was_cut_off_is_continued(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    file.write_bytes(b"".join(b"\n" + msgspec.json.encode(point(step)) for step in (3, 4))[:-5])
    with file.open("ab") as opened:
        opened.write(b"\n" + msgspec.json.encode(point(5)) + b"\n\xff\n[]")
    assert [one.step for one in keeper.read_losses(file)] == [3, 5]


def tracker(monkeypatch: pytest.MonkeyPatch, name: str, *, failures: int = 0) -> list[Any]:
    """Stand in for the tracker's module; return the list of the calls that it gets."""
    calls: list[Any] = []
    fails = iter([True] * failures)

    def init(**options: Any) -> None:
        if next(fails, False):
            raise ConnectionError("not today")
        calls.append(options)

    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.init, module.finish = init, lambda: calls.append("finish")
    module.log = lambda values, step: calls.append((step, values))
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def forward(to: Any) -> None:
    forwarder = Forwarder(Forward(to=to, project="bengali"), "r-1/model")
    forwarder.forward([point(1), point(2)])
    forwarder.close()


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_points_are_logged_and_the_run_is_resumed(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    calls = tracker(monkeypatch, name)
    forward(name)
    values = {"loss": 1.0, "trainers": 2.0}
    begin = {"project": "bengali", "resume": "allow", key: "r-1-model"}
    assert calls == [begin, (1, values), (2, values), "finish"]


def test_a_failing_or_missing_tracker_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tracker(monkeypatch, "wandb", failures=1)
    forward("wandb")
    assert calls[1:] == [(2, {"loss": 1.0, "trainers": 2.0}), "finish"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install trackio"):
        forward("trackio")
