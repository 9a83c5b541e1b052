"""The swarm's loss from the reports of single trainers."""

import json
import sys
from pathlib import Path
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


Calls = list[list[Any]]
TRACKER = """
import json
FILE = {file!r}
FAILURES = {failures}

def record(*call):
    with open(FILE, "a") as file:
        file.write(json.dumps(call) + "\\n")

def init(**options):
    global FAILURES
    if FAILURES:
        FAILURES -= 1
        raise ConnectionError("not today")
    record("init", options)

def log(values, step):
    record("log", values, step)

def finish():
    record("finish")
"""


def forwarded(monkeypatch: pytest.MonkeyPatch, folder: Path, name: Any, *, failures: int = 0) -> Calls:
    """Forward two points to a module of this name; return the calls that it records."""
    (folder / f"{name}.py").write_text(TRACKER.format(file=str(folder / "calls"), failures=failures))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, name, None)  # so that it is removed afterwards
    del sys.modules[name]
    forwarder = Forwarder(Forward(to=name, project="bengali"), "r-1/model")
    forwarder.forward([point(1), point(2)])
    forwarder.close()
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_points_are_logged_and_the_run_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: Any, key: str
) -> None:
    begin, first, second, end = forwarded(monkeypatch, tmp_path, name)
    assert begin == ["init", {"project": "bengali", "resume": "allow", key: "r-1-model"}]
    assert first == ["log", {"loss": 1.0, "trainers": 2.0}, 1] and second[2] == 2 and end == ["finish"]


def test_a_failing_or_missing_tracker_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = forwarded(monkeypatch, tmp_path, "wandb", failures=1)
    assert [call[0] for call in calls] == ["init", "log", "finish"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install trackio"):
        Forwarder(Forward(to="trackio", project="x"), "r-1/model")
