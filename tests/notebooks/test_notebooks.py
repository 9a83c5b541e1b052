"""The notebooks that people run: from top to bottom, two of them together, with stand-ins for their platforms."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.invite import Invite
from tests.net import agents
from tests.net.test_tunnels import folder as folder
from tests.net.test_tunnels import needs_posix, read, running
from tests.notebooks.kernel import NOTEBOOKS, CellFailed, Kernel, opened
from tests.notebooks.test_tutorials import code_of
from tests.swarm import wait

ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
COLAB = "from tests.notebooks.cells import stand_in_for_colab; stand_in_for_colab()"
KAGGLE_SECRETS = """
class UserSecretsClient:
    def get_secret(self, name):
        return open(name).read()
"""
SMALL = {"target_batch_size": 32, "size": "tiny", "lr": 1e-2, "codec": "float16"}

TOKEN = "2abcDEFsecretTOKEN"
ELSEWHERE = """
from colab_swarm import invite
from colab_swarm.net.node import Node

invite.only_local = lambda contacts: False  # the stand-in's public end is a port of this machine
Node.listening = lambda node: ()  # nobody can dial this kernel
"""
PORT = "print(swarm.network.node.port)"


def tunnels_of(folder: Path) -> list[int]:
    return [pid for pid in running(folder) if b"--log-format" in read(pid, "cmdline")]


@pytest.fixture(params=ALL)
def notebook(request: pytest.FixtureRequest) -> Any:
    return json.loads((NOTEBOOKS / f"{request.param}.ipynb").read_text(encoding="utf-8"))


def code(notebook: Any) -> list[str]:
    return ["".join(cell["source"]) for cell in code_of(notebook)]


def test_it_ships_without_outputs_of_somebodys_run_and_without_an_invitation(notebook: Any) -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code_of(notebook))
    assert not re.search(r"swarm://[\w-]+\.\w|/join#[\w-]+\.\w", json.dumps(notebook))


def test_it_installs_nothing_but_the_package(notebook: Any) -> None:
    (install,) = re.findall(r"%pip .*", "\n".join(code(notebook)))
    url = tomllib.loads((NOTEBOOKS.parent / "pyproject.toml").read_text())["project"].get("urls", {})
    source = f'"colab-swarm[notebook] @ git+{url["Repository"]}"' if url else '-e "..[notebook]"'
    assert install == f"%pip install -q {source}"


@pytest.mark.parametrize("folder", sorted((NOTEBOOKS / "kaggle").iterdir()), ids=lambda folder: folder.name)
def test_kaggle_is_told_to_switch_on_internet_and_gpu(folder: Path) -> None:
    """``kaggle kernels push -p notebooks/kaggle/swarm`` takes the notebook from where it is."""
    metadata = json.loads((folder / "kernel-metadata.json").read_text())
    assert metadata["enable_internet"] is metadata["enable_gpu"] is metadata["is_private"] is True
    assert (folder / metadata["code_file"]).resolve() == NOTEBOOKS / f"{folder.name}.ipynb"
    # or Kaggle renames it
    assert metadata["id"].partition("/")[2] == metadata["title"].lower().replace(" ", "-")


def test_a_notebook_that_needs_internet_or_a_gpu_has_a_folder_for_kaggle() -> None:
    # a classroom has no internet, and Kaggle no local network
    assert {folder.name for folder in (NOTEBOOKS / "kaggle").iterdir()} == {*ALL} - {"classroom"}


def connects(kernel: Kernel, max_steps: int) -> str:
    """Install and connect; let the training cell end after some steps."""
    at = next(at for at, cell in enumerate(kernel._cells) if "max_steps=1000" in cell)
    kernel._cells[at] = kernel._cells[at].replace("max_steps=1000", f"max_steps={max_steps}")
    return kernel.run() + kernel.run()


def press(kernel: Kernel, *, name: str, invitation: str = "", agreed: bool = False, token: str = "") -> str:
    """Fill in the form, with a token its second box too, and click; return its log."""
    fields = {"_name": name, "_invitation": invitation, "_agreed": agreed}
    fields |= {"_tunnels": bool(token), "_token": token}
    filled = "; ".join(f"swarm.{field}.value = {value!r}" for field, value in fields.items())
    kernel.execute(f"{filled}; swarm._button.click()")
    return kernel.execute("print(swarm._log.value)")


@pytest.mark.slow
@needs_posix
def test_on_colab_the_terms_come_first_and_a_tunnel_second(folder: Path) -> None:
    environment = {"HOME": str(folder), "PYNGROK_NGROK_PATH": agents.install("ngrok", folder)}
    first, second = (opened("swarm", folder, **environment) for _ in range(2))
    with first as alice, second as bob:
        for kernel in (alice, bob):
            kernel.execute(f"{COLAB}\n{ELSEWHERE}")
            assert "running distributed computing workers" in connects(kernel, 1)
        assert "✖ read the terms" in press(alice, name="alice")
        # nobody could join a run that starts here
        assert "by itself" in press(alice, name="alice", agreed=True) and tunnels_of(folder) == []
        assert "others reach you: tunnel" in press(alice, name="alice", agreed=True, token=TOKEN)
        invitation = alice.execute("print(swarm.invite())").strip()
        (address,) = Invite.parse(invitation).entries[0].addresses
        assert not address.endswith(alice.execute(PORT).strip())
        assert "✖ read the terms" in press(bob, name="bob", invitation=invitation)
        assert "✔ reached" in press(bob, name="bob", invitation=invitation, agreed=True)
        assert "Swarm(my-swarm, bob, 1 peer linked)" in bob.execute("print(swarm)")
        # her guardian and her agent
        assert len(tunnels_of(folder)) == 2
        for kernel in (bob, alice):
            assert TOKEN not in kernel.execute("print(swarm._token.value, swarm._log.value, swarm)")
            kernel.execute("swarm.leave()")
        assert tunnels_of(folder) == []


@pytest.mark.slow
def test_who_joins_from_kaggle_needs_the_line_in_a_secret_only(tmp_path: Path) -> None:
    (tmp_path / "kaggle_secrets.py").write_text(KAGGLE_SECRETS)
    environment = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "PYTHONPATH": str(tmp_path)}
    with cs.create("class-of-26", peer_name="organizer") as organizer:
        (tmp_path / "SWARM_INVITATION").write_text(str(organizer.invite()))
        with opened("swarm", tmp_path, **environment) as kaggle:
            assert "joining class-of-26" in connects(kaggle, 2)
            assert "step 2 of 2: loss" in kaggle.run_all()[0]


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_script_for_two_gpus_of_kaggle_trains_two_processes_as_one_peer(tmp_path: Path) -> None:
    (tmp_path / "kaggle_secrets.py").write_text(KAGGLE_SECRETS)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PYTHONPATH": f"{tmp_path}:{NOTEBOOKS.parent}", "PATH": path}
    with cs.create("class-of-26", peer_name="organizer") as organizer:
        (tmp_path / "SWARM_INVITATION").write_text(str(organizer.invite(settings=SMALL)))
        with opened("two_gpus", tmp_path, **environment) as kaggle:
            outputs = kaggle.run_all(TWO_GPUS=True, STEPS=2)
    assert "step 2, loss " in outputs[-1]
    assert (tmp_path / "model.pt").stat().st_size > 1e6


WANTED = {"prefix": "ffn", "dim": 16, "grid": "4x4"}


def host(kernel: Kernel, invitation: str) -> None:
    kernel.execute(COLAB)
    kernel.run()
    assert "running distributed computing workers" in kernel.run()
    assert "✖ read the terms" in press(kernel, name="carol", invitation=invitation)
    assert "in class-of-26" in press(kernel, name="carol", invitation=invitation, agreed=True)
    kernel.run()  # the doctor
    assert "16 of ffn[4 x 4] fit: 80% of " in kernel.run()
    kernel.run(COUNT=3)


def come_back(kernel: Kernel) -> None:
    kernel.skip_to("import colab_swarm as cs")
    kernel.run()
    assert "you are carol" in press(kernel, name="", agreed=True)
    kernel.skip_to("COUNT")
    kernel.run(COUNT=3)


@pytest.mark.slow
def test_who_hosts_from_colab_sees_what_fits_and_what_it_earns_and_comes_back_with_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        cs.create("class-of-26", peer_name="organizer") as organizer,
        opened("host_experts", tmp_path) as carol,
    ):
        host(carol, str(organizer.invite(settings=WANTED)))
        assert "3 of 3 experts" in carol.execute("print(host)")
        layer = organizer.experts.mixture("ffn", 16, grid=(4, 4), k=2)
        for _ in range(5):
            layer(torch.randn(8, 16)).square().mean().backward()
        assert len(layer.utilisation) >= 2
        wait(lambda: any(row.expert_calls >= 10 for row in organizer.contributions()), timeout_s=20)
        shown = carol.run_all(MINUTES=0.01)
        assert "my expert" in shown[0] and "done: torch.Size" in shown[2]
        # each call went forward and backward, for one or two experts
        assert re.match(r"\d\d calls answered, 160 samples\n", shown[1]) and "carol" in shown[1]
        come_back(carol)
        assert int(carol.execute("print(sum(expert.step for expert in host.experts.values()))")) >= 10
    kept = tmp_path / "host"
    assert (kept / "peer.json").exists() and any(path.is_file() for path in (kept / "experts").rglob("*"))


@pytest.mark.slow
def test_who_trains_with_experts_of_two_machines_reads_digits(tmp_path: Path) -> None:
    with cs.create("class-of-26", peer_name="host") as host, opened("train_with_experts", tmp_path) as kernel:
        hosted = host.experts.host("ffn", lambda: cs.moe.FeedForward(16), grid=(4, 4), count=3)
        kernel.run()
        kernel.run()
        line = str(host.invite(settings=WANTED))
        assert "in class-of-26" in press(kernel, name="carol", invitation=line, agreed=True)
        kernel.run()
        kernel.run(HOST_HERE=3)
        kernel.run(K=4)  # with three experts at home, each input needs one of the host's
        assert re.search(r"\d\d+ updates · loss", kernel.run(EPOCHS=4, IN_FLIGHT=3))
        accuracy = float(re.search(r"accuracy ([\d.]+)%", kernel.run())[1])  # type: ignore[index]
        assert accuracy > 50 and sum(one.step for one in hosted.experts.values()) > 5
        assert "host" in kernel.run()


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
