"""The volunteer's notebook, against a coordinator in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

import colab_swarm as cs
from tests.notebooks.kernel import CellFailed, opened

CODE = """
import numpy as np
from torch import nn

import colab_swarm as cs

inputs = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
labels = (inputs[:, 0] > 0).astype(np.int64)
job = cs.workunits.Job(
    "signs",
    lambda: nn.Linear(8, 2),
    data=(inputs, labels),
    validation=(inputs, labels),
    plan=cs.workunits.WorkPlan(subsets=2, max_epochs=2, local_epochs=5),
)
"""


@pytest.mark.slow
def test_a_volunteer_reads_the_code_trusts_it_and_trains_the_job_to_its_end(tmp_path: Path) -> None:
    job, folder = tmp_path / "job.py", tmp_path / "coordinator"
    job.write_text(CODE)
    with (
        cs.workunits.coordinate(job, folder=folder, host="127.0.0.1", servers=1) as coordinator,
        opened("volunteer", tmp_path) as notebook,
    ):
        link = str(coordinator.link)
        notebook.run()
        shown = notebook.run(LINK=link)
        assert "trust_code=True" in shown and 'cs.workunits.Job(\n    "signs"' in shown
        with pytest.raises(CellFailed, match="trust_code=True"):
            notebook.run(MY_NAME="alice")
        notebook.run(MY_NAME="alice", I_TRUST_THE_CODE=True)
        assert "the job is finished" in notebook.run(MINUTES=60)
        assert "4 units accepted" in "".join(notebook.run_all())
        assert coordinator.wait(10)
    assert link.partition("#")[2] not in shown
