"""Units in hand, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.workunits.client import UnitInHand, UnitSaves
from colab_swarm.workunits.messages import GivenUnit

UNIT = GivenUnit("a" * 32, 1, 2, "b" * 64, "parameters", 60.0, 7)
STATE: dict[str, Any] = {
    "done": 3,
    "seed": 7,
    "model": {
        "0.weight": torch.arange(6.0).reshape(2, 3),
        "steps": torch.tensor(3),
        "none": torch.zeros(0, 4),
    },
    "optimizer": {
        "state": {0: {"exp_avg": torch.ones(2, 3)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}],
    },
}


def saves(folder: Path, owner: str = "alice in digits") -> UnitSaves:
    return UnitSaves(folder, owner)


def test_a_unit_is_found_as_it_was_saved_last(tmp_path: Path) -> None:
    first = saves(tmp_path)
    first.save(UnitInHand(UNIT, 100.0))
    first.save(UnitInHand(UNIT, 100.0, STATE))
    second = saves(tmp_path)
    (found,) = second.left_behind(now=99.0)
    assert (found.unit, found.deadline) == (UNIT, 100.0)
    assert found.state is not None and found.state["done"] == 3
    assert torch.equal(found.state["model"]["0.weight"], STATE["model"]["0.weight"])
    assert found.state["model"]["none"].shape == (0, 4)
    assert found.state["optimizer"]["param_groups"] == STATE["optimizer"]["param_groups"]
    second.drop(UNIT)
    assert saves(tmp_path).left_behind(now=99.0) == []


def test_a_saved_unit_past_its_deadline_is_deleted(tmp_path: Path) -> None:
    saves(tmp_path).save(UnitInHand(UNIT, 100.0))
    assert saves(tmp_path).left_behind(now=100.0) == []
    assert not list(tmp_path.glob("*.unit"))


def test_units_of_others_are_left_to_them(tmp_path: Path) -> None:
    saves(tmp_path).save(UnitInHand(UNIT, 100.0))
    assert saves(tmp_path, "bob in digits").left_behind(now=1.0) == []
    assert len(saves(tmp_path).left_behind(now=1.0)) == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_garbled_file_is_forgotten(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("units")
    saves(folder).save(UnitInHand(UNIT, 100.0, STATE))
    (path,) = folder.glob("*.unit")
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    for found in saves(folder).left_behind(now=1.0):  # a bit that means nothing, such as a blank of the head
        assert found.unit == UNIT


def test_a_unit_that_cannot_be_saved_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves(tmp_path).save(UnitInHand(UNIT, 100.0, {"optimizer": object()}))
    (tmp_path / "file").write_text("")
    saves(tmp_path / "file").save(UnitInHand(UNIT, 100.0))
    assert caplog.text.count("is not saved") == 2
