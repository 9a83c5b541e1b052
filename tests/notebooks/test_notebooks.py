"""The notebooks that people run: from top to bottom, two of them together, with stand-ins for their platforms."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from tests.notebooks.kernel import NOTEBOOKS, CellFailed, Kernel, opened
from tests.notebooks.test_tutorials import code_of

ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
COLAB = "from colab_swarm.bench.overhead import stand_in_for_colab; stand_in_for_colab()"
KAGGLE_SECRETS = """
class UserSecretsClient:
    def get_secret(self, name):
        return open(name).read()
"""
SMALL = {"target_batch_size": 32, "size": "tiny", "lr": 1e-2, "codec": "float16"}


@pytest.fixture(params=ALL)
def notebook(request: pytest.FixtureRequest) -> Any:
    return json.loads((NOTEBOOKS / f"{request.param}.ipynb").read_text(encoding="utf-8"))


def code(notebook: Any) -> list[str]:
    return ["".join(cell["source"]) for cell in code_of(notebook)]


def test_a_notebook_for_others_is_stored_without_outputs(notebook: Any) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_of(notebook))


def test_its_cells_stay_short(notebook: Any) -> None:
    assert max(sum(bool(line.strip()) for line in cell.splitlines()) for cell in code(notebook)) <= 10


def test_it_installs_nothing_but_the_package(notebook: Any) -> None:
    (install,) = re.findall(r"%pip .*", "\n".join(code(notebook)))
    assert install == '%pip install -q "colab-swarm[notebook] @ git+https://github.com/OWNER/colab_swarm"'


def test_kaggle_is_told_to_switch_on_internet_and_gpu() -> None:
    told = json.loads((NOTEBOOKS / "kernel-metadata.json").read_text())
    assert told["enable_internet"] == told["enable_gpu"] == "true"
    assert (NOTEBOOKS / told["code_file"]).exists()
    assert told["id"].partition("/")[2] == told["title"].lower().replace(" ", "-")  # or Kaggle renames it


def created(organizer: Kernel, **form: object) -> str:
    organizer.run()
    organizer.run(RUN="class-of-26", **form)
    organizer.run()
    return organizer.execute(f"print(swarm.invite(settings={SMALL!r}))").strip()


@pytest.mark.slow
def test_who_joins_from_colab_trains_in_the_organizers_run(tmp_path: Path) -> None:
    with opened("organizer", tmp_path) as organizer, opened("join_colab", tmp_path) as colab:
        invitation = created(organizer)
        colab.execute(COLAB)
        form = {"INVITATION": invitation, "MY_NAME": "carol", "MICRO_BATCH": 8, "MINUTES": 0.05}
        colab.run()
        colab.run()
        with pytest.raises(CellFailed, match="accept_terms=True"):
            colab.run(**form)
        assert "Swarm(class-of-26, carol, 1 peer linked)" in colab.run(I_HAVE_READ_THE_TERMS=True, **form)
        assert "'target_batch_size': 32" in colab.run(**form) and "prediction" in colab.run(**form)
        colab.run(**form)
        assert "class-of-26: training, step" in colab.train_to(1, **form)
        shown = "\n".join(organizer.run_all())
        assert "class-of-26: linked to 1 peer" in shown  # by the doctor
        assert "class-of-26, recorded by organizer" in shown  # by the recording
        shown = "\n".join(colab.run_all(**form))
        assert "before" in shown and "from before are not known" not in shown
    assert (tmp_path / "receipt.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_who_joins_from_kaggle_needs_the_line_in_a_secret_only(tmp_path: Path) -> None:
    (tmp_path / "kaggle_secrets.py").write_text(KAGGLE_SECRETS)
    environment = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "PYTHONPATH": str(tmp_path)}
    with opened("organizer", tmp_path) as organizer, opened("join_kaggle", tmp_path, **environment) as kaggle:
        (tmp_path / "SWARM_INVITATION").write_text(created(organizer))
        outputs = kaggle.run_all(MY_NAME="dave", MICRO_BATCH=8, MINUTES=0.05)
    assert "Swarm(class-of-26, dave, 1 peer linked)" in outputs[1]
    assert (tmp_path / "model.pt").stat().st_size > 1e6


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_script_for_two_gpus_of_kaggle_trains_two_processes_as_one_peer(tmp_path: Path) -> None:
    (tmp_path / "kaggle_secrets.py").write_text(KAGGLE_SECRETS)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PYTHONPATH": f"{tmp_path}:{NOTEBOOKS.parent}", "PATH": path}
    with opened("organizer", tmp_path) as organizer, opened("join_kaggle", tmp_path, **environment) as kaggle:
        (tmp_path / "SWARM_INVITATION").write_text(created(organizer))
        kaggle.run()
        kaggle.skip_to("%%writefile train.py")
        outputs = kaggle.run_all(TWO_GPUS=True, STEPS=2)
    assert "step 2, loss " in outputs[-1]
    assert (tmp_path / "model.pt").stat().st_size > 1e6


@pytest.mark.slow
def test_the_organizers_run_survives_a_restart(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        with opened("organizer", tmp_path) as organizer:
            created(organizer)
            ids.append(organizer.execute("print(swarm.run_id, swarm.id.hex())"))
            shown = organizer.run_all()
            assert "join class-of-26 as worker" in shown[1] and "QR code" in shown[1]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_an_open_run_is_begun_by_the_same_cells(tmp_path: Path) -> None:
    with opened("organizer", tmp_path) as organizer:
        created(organizer, ACCESS="open")
        organizer.run_all(ACCESS="open")


WANTED = {"prefix": "ffn", "dim": 16, "grid": "4x4"}
TRAIN_LAYER = """
import torch
layer = swarm.mixture_of_experts("ffn", 16, grid=(4, 4), k=2)
for _ in range(5):
    layer(torch.randn(8, 16)).square().mean().backward()
print(sorted(layer.utilisation))
"""


def host(kernel: Kernel, invitation: str) -> None:
    kernel.execute(COLAB)
    form = {"INVITATION": invitation, "MY_NAME": "carol", "COUNT": 3}
    kernel.run()
    with pytest.raises(CellFailed, match="accept_terms=True"):
        kernel.run(**form)
    assert "Swarm(class-of-26, carol, 1 peer linked)" in kernel.run(I_HAVE_READ_THE_TERMS=True, **form)
    kernel.run()  # the doctor
    kernel.run(**form)


@pytest.mark.slow
def test_who_hosts_from_colab_serves_the_organizers_layer_and_leaves_saves_behind(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("organizer", "carol")]
    for home in homes:
        home.mkdir()
    with opened("organizer", homes[0]) as organizer, opened("host_experts", homes[1]) as carol:
        for form in ({}, {"RUN": "class-of-26"}, {}):
            organizer.run(**form)
        invitation = organizer.execute(f"print(swarm.invite(settings={WANTED!r}))").strip()
        host(carol, invitation)
        assert "3 of 3 experts" in carol.execute("print(host)")
        assert organizer.execute(TRAIN_LAYER).count("ffn.") >= 2
        shown = carol.run_all(MINUTES=0.01)
        assert "my expert" in shown[0] and "done: torch.Size" in shown[1]
    kept = homes[1] / "host"
    assert (kept / "peer.json").exists() and any(path.is_file() for path in (kept / "experts").rglob("*"))


JOB = """
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
    job.write_text(JOB)
    organizer = cs.workunits.coordinate(job, folder=folder, host="127.0.0.1", servers=1)
    with organizer as coordinator, opened("volunteer", tmp_path) as notebook:
        link = str(coordinator.link)
        notebook.run()
        shown = notebook.run(LINK=link)
        assert "trust_code=True" in shown and 'cs.workunits.Job(\n    "signs"' in shown
        with pytest.raises(CellFailed, match="trust_code=True"):
            notebook.run(MY_NAME="alice")
        notebook.run(MY_NAME="alice", I_TRUST_THE_CODE=True)
        assert "the job is finished" in notebook.run(MINUTES=60)
        assert "4 units accepted" in "".join(notebook.run_all()) and coordinator.wait(10)
    assert link.partition("#")[2] not in shown
