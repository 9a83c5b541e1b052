"""A process that is killed at any operation on its files: what it was told to be saved is there, and whole."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from colab_swarm.training.state import CheckpointFolder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks a process for each point")
SAVES = 5
ZYGOTE = """
import json, os, signal, sys, threading
from pathlib import Path
import torch
from colab_swarm.trust.authority import AuthorityBook
from colab_swarm.training.state import CheckpointFolder

SAVES = int(sys.argv[3])
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}

def checkpoints(folder, tell):
    saves = CheckpointFolder(folder, keep=2)
    for step in range(1, SAVES + 1):
        saves.save(step, {"step": step, "values": torch.full((5000,), float(step))})
        tell(step)

def books(folder, tell):
    folder.mkdir(exist_ok=True)
    for step in range(1, SAVES + 1):
        AuthorityBook("run", revocations=bytes([step]) * 900, path=f"{folder}/key.authority").save()
        tell(step)

def run(folder, killed_at):
    # An operation on a file of the folder, before or after which the process is killed.
    left = [killed_at]
    def count(*_):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def audit(event, arguments):
        if event in TOUCHES and str(folder) in str(arguments[0]):
            count()
    sync = os.fsync
    def fsync(descriptor):
        # half of the file is there
        count()
        sync(descriptor)
    os.fsync = fsync
    sys.addaudithook(audit)
    work = globals()[sys.argv[2]]
    work(folder, lambda step: os.write(1, f"{folder} {step}\\n".encode()))
    os.write(1, f"{folder} done\\n".encode())

killed_at = 0
while True:
    killed_at += 1
    folder = Path(sys.argv[1]) / str(killed_at)
    child = os.fork()
    if child == 0:
        run(folder, killed_at)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0
        break
"""


def whole_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint, whose values are as they were saved; 0 without any."""
    state = CheckpointFolder(folder).latest()
    if state is None:
        return 0
    assert torch.equal(state["values"], torch.full((5000,), float(state["step"])))
    # each file is whole: a partial one has another name
    assert all(path.stat().st_size > 20_000 for path in CheckpointFolder(folder).paths())
    return int(state["step"])


def whole_book(folder: Path) -> int:
    from colab_swarm.trust.authority import AuthorityBook

    if not (folder / "key.authority").exists():
        return 0
    revocations = AuthorityBook.of("run", folder / "key").revocations
    assert revocations == revocations[:1] * 900
    return revocations[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "newest"),
    [("checkpoints", whole_checkpoint), ("books", whole_book)],
)
def test_what_was_reported_as_saved_is_there_after_a_kill_at_any_operation(
    work: str, newest: Callable[[Path], int], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ZYGOTE, str(tmp_path), work, str(SAVES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told: dict[str, int] = {}
    finished = []
    for line in done.stdout.splitlines():
        folder, _, step = line.rpartition(" ")
        if step == "done":
            finished.append(folder)
        else:
            told[folder] = int(step)
    points = sorted(tmp_path.iterdir())
    assert len(points) > 3 * SAVES and len(finished) == 1
    for folder in points:
        reported = told.get(str(folder), 0)
        assert reported <= newest(folder) <= reported + 1
