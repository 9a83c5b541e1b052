"""The curves in a tracker: a stand-in module that records its calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.backbone.config import Forward
from colab_swarm.backbone.keeper import Forwarder, LossPoint

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


def make_tracker(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, failures: int = 0) -> Path:
    """Make a module of this name importable; return the file of its calls."""
    (folder / f"{name}.py").write_text(TRACKER.format(file=str(folder / "calls"), failures=failures))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, name, None)  # so that it is removed afterwards
    del sys.modules[name]
    return folder / "calls"


def point(step: int) -> LossPoint:
    return LossPoint(step, 0.0, 2.5, 3)


@pytest.mark.parametrize(
    ("name", "run"), [("wandb", {"id": "r-1-model"}), ("trackio", {"name": "r-1-model"})]
)
def test_points_are_logged_and_the_run_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: Any, run: dict[str, str]
) -> None:
    file = make_tracker(monkeypatch, tmp_path, name)
    forwarder = Forwarder(Forward(to=name, project="bengali"), "r-1/model")
    forwarder.forward([point(1), point(2)])
    forwarder.close()
    begin, first, second, end = map(json.loads, file.read_text().splitlines())
    assert begin == ["init", {"project": "bengali", "resume": "allow", **run}] and end == ["finish"]
    assert first == ["log", {"loss": 2.5, "trainers": 3.0}, 1] and second[2] == 2


def test_a_tracker_that_fails_costs_points_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = make_tracker(monkeypatch, tmp_path, "wandb", failures=1)
    forwarder = Forwarder(Forward(to="wandb", project="bengali"), "r-1/model")
    forwarder.forward([point(1), point(2)])
    forwarder.close()
    assert [call[0] for call in map(json.loads, file.read_text().splitlines())] == ["init", "log", "finish"]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install trackio"):
        Forwarder(Forward(to="trackio", project="x"), "r-1/model")
