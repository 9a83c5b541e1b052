"""An organizer's run: a backbone from ``run.toml``, and late trainers as processes with folders of their own."""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from colab_swarm.files import StepFiles
from colab_swarm.recipes.text import train_tokenizer
from colab_swarm.training.state import read_snapshot
from tests.netlab.lab import ROOT, Program
from tests.recipes.test_tokenizer import BENGALI

LIMIT_S = 120.0
LAST = 25
RUN = """
name = "organized"
network = {port = 0, lan = false}
dashboard = {enabled = false}
settings = {size = "tiny", tokenizer = "tokenizer.json", target_batch_size = 192}
[[collaborations]]
every_steps = 5
keep = 2
"""


class Command:
    """A command of its own in an own folder, without a cache that it shares with others."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(exist_ok=True)
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "colab_swarm", *arguments, "--json-lines"]
        process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=folder, env={**os.environ, **own})
        self.program = Program(folder.name, process)

    def until(self, event: str, *, step: int = 0) -> dict[str, Any]:
        """Return the facts of the first such event, of this step or a later one."""
        while True:
            line = self.program.line(LIMIT_S)
            if line["event"] == event and line.get("step", step) >= step:
                return dict(line)


@pytest.mark.ordeal
def test_late_trainers_from_folders_of_their_own_have_one_tokenizer_and_one_model(tmp_path: Path) -> None:
    train_tokenizer(BENGALI * 20, vocabulary=200).save_pretrained(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "text.txt"
    text.write_text("\n".join(BENGALI * 20), encoding="utf-8")
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Command:
            started = Command(tmp_path / name, *arguments)
            stack.callback(started.program.kill)
            return started

        def train(name: str) -> Command:
            how = ("--text", str(text), "--batch-size", "4", "--steps", str(LAST), "--peer-name", name)
            return start(name, "train-albert", invitation, *how)

        backbone = start("backbone", "create", str(tmp_path / "run.toml"))
        invitation = backbone.until("invite")["invite"]
        first = train("first")
        first.until("step", step=2)
        killed = train("killed")
        killed.until("step")
        killed.program.kill()
        late = train("late")
        late.until("state")
        ends = [trainer.until("finished") for trainer in (first, late)]
        for trainer in (first, late):
            trainer.program.tell("")
        assert ends[0]["step"] >= LAST and ends[0]["parameters"] == ends[1]["parameters"]
        kept = StepFiles(tmp_path / "organized" / "model")
        until = time.monotonic() + LIMIT_S
        while kept.newest_step < LAST - 5:
            assert time.monotonic() < until
            time.sleep(0.1)
    # what the file of run.toml says reached them all, through the run
    files = [path.read_bytes() for path in tmp_path.glob("*/cache/colab_swarm/files/*")]
    assert len(files) >= 3 and {*files} == {(tmp_path / "tokenizer.json").read_bytes()}
    for path in kept.paths():
        read_snapshot(path)
    assert json.loads(files[0])["model"]["type"] == "Unigram"
