"""The curves in a tracker: a stand-in module that records its calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.backbone.config import Forward
from colab_swarm.backbone.observer import Forwarder, LossPoint

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


class Tracker:
    """A module of this name, in ``folder``."""

    def __init__(self, folder: Path, name: str, failures: int = 0) -> None:
        self.file = folder / "calls"
        (folder / f"{name}.py").write_text(TRACKER.format(file=str(self.file), failures=failures))

    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def point(step: int) -> LossPoint:
    return LossPoint(step, 0.0, 2.5, 3)


@pytest.mark.parametrize(
    ("name", "run"), [("wandb", {"id": "r-1-model"}), ("trackio", {"name": "r-1-model"})]
)
def test_points_are_logged_and_the_run_is_resumed(folder: Path, name: Any, run: dict[str, str]) -> None:
    tracker = Tracker(folder, name)
    forwarder = Forwarder(Forward(to=name, project="bengali"), "r-1/model")
    forwarder.forward([point(1), point(2)])
    forwarder.close()
    begin, first, second, end = tracker.calls()
    assert begin == ["init", {"project": "bengali", "resume": "allow", **run}] and end == ["finish"]
    assert first == ["log", {"loss": 2.5, "trainers": 3.0}, 1] and second[2] == 2


def test_a_tracker_that_fails_costs_points_only(folder: Path) -> None:
    tracker = Tracker(folder, "wandb", failures=1)
    forwarder = Forwarder(Forward(to="wandb", project="bengali"), "r-1/model")
    forwarder.forward([point(1), point(2)])
    forwarder.close()
    assert [call[0] for call in tracker.calls()] == ["init", "log", "finish"]


def test_a_tracker_that_is_not_installed_is_named() -> None:
    if "trackio" in sys.modules:
        pytest.skip("it is installed")
    with pytest.raises(ValueError, match="pip install trackio"):
        Forwarder(Forward(to="trackio", project="x"), "r-1/model")
