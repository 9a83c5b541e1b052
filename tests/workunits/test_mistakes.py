"""Common mistakes raise at once in `cs.workunits.coordinate`, with messages that help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

import colab_swarm as cs
from tests.workunits.local import tiny_job

INPUTS = np.zeros((64, 4), np.float32)


def broken(*_: Any) -> Any:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": (INPUTS, np.array(["cat"] * 64))}, "column 1 holds <U3: rows are numbers"),
        ({"data": (INPUTS, np.zeros(64, np.float32))}, "one batch could not be trained"),
        ({"data": (INPUTS[:, :3], np.zeros(64, int))}, "one batch could not be trained"),
        ({"validation": (INPUTS[:0], np.zeros(0, int))}, "hold no sample"),
        ({"validation": broken}, "no such layer"),
        ({"loss": broken}, "one batch could not be trained: KeyError: 'no such layer'"),
        ({"accuracy": broken}, "the accuracy could not be measured: KeyError: 'no such layer'"),
        ({"accuracy": lambda model, batch: torch.ones(2)}, "the accuracy could not be measured"),
        ({"accuracy": lambda model, batch: 87.5}, "accuracy is 87.5: it must be between 0 and 1"),
        ({"model": broken}, "no such layer"),
    ],
)
def test_a_job_that_cannot_work_is_not_handed_out(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, KeyError), match=None) as caught:
        cs.workunits.coordinate(
            replace(tiny_job(), **changes), folder=tmp_path, host="127.0.0.1", servers=1, store="memory"
        )
    assert text in str(caught.value)


def test_a_folder_has_one_coordinator(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", thread_local=False)  # as another process holds it
    with lock, pytest.raises(ValueError, match="another coordinator works in"):
        cs.workunits.coordinate(tiny_job(), folder=tmp_path, host="127.0.0.1", servers=1)
    with cs.workunits.coordinate(tiny_job(), folder=tmp_path, host="127.0.0.1", servers=1) as one:
        assert cs.workunits.coordinate(tiny_job(), folder=tmp_path) is one
    with cs.workunits.coordinate(tiny_job(), folder=tmp_path, host="127.0.0.1", servers=1) as again:
        assert again is not one


def test_a_name_with_spaces_gives_the_same_volunteer_again(tmp_path: Path) -> None:
    job = tiny_job(max_epochs=1000)
    with cs.workunits.coordinate(job, folder=tmp_path, host="127.0.0.1", servers=1, store="memory") as one:
        alice = cs.workunits.volunteer(one.link, job=job, name="Alice's laptop", folder=tmp_path)
        try:
            assert cs.workunits.volunteer(one.link, job=job, name="Alice's laptop", folder=tmp_path) is alice
        finally:
            alice.stop(finish_s=0.0)


def test_a_volunteer_with_a_fixed_job_reuses_its_folder(tmp_path: Path) -> None:
    job = tiny_job(max_epochs=1000)
    with cs.workunits.coordinate(job, folder=tmp_path, host="127.0.0.1", servers=1, store="memory") as one:
        first = cs.workunits.volunteer(one.link, job=replace(job, loss=broken), name="alice", folder=tmp_path)
        assert first.wait(10) and "no such layer" in first.snapshot().fault
        second = cs.workunits.volunteer(one.link, job=job, name="alice", folder=tmp_path)
        second.stop(finish_s=0.0)
        assert second is not first and second.folder == first.folder
