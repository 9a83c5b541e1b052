"""A backbone as a process of its own, killed with SIGKILL while others train, and restarted."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from colab_swarm.files import StepFiles
from colab_swarm.training.state import read_snapshot
from tests.netlab.lab import ROOT, Program

pytestmark = pytest.mark.ordeal
LIMIT_S = 120.0
BACKBONE = """
import json, sys, threading
from colab_swarm.backbone.config import read_run_file
from colab_swarm.backbone.backbone import serve
with serve(read_run_file(sys.argv[1])) as served:
    print(json.dumps({"invite": served.invite, "dashboard": served.dashboard, "id": served.swarm.id.hex()}), flush=True)
    threading.Event().wait()
"""
TRAINER = """
import json, sys, threading
import colab_swarm as cs
from tests.training.toy import join_training, loss_of, model
with cs.join(sys.argv[1], peer_name=sys.argv[2], options=cs.NetworkOptions(lan=False)) as swarm:
    net = model(seed=len(sys.argv[2]))
    optimizer = join_training(swarm, net)
    print(json.dumps({"began_at": optimizer.global_step}), flush=True)
    while True:
        loss = loss_of(net, optimizer.global_step, slice(0, 2))
        loss.backward()
        if optimizer.step(samples=2, loss=loss.item()):
            print(json.dumps({"step": optimizer.global_step}), flush=True)
        threading.Event().wait(0.02)
"""
RUN = """
name = "killed"
[network]
port = {port}
announce = ["ws://127.0.0.1:{port}"]
lan = false
[dashboard]
port = 0
[[collaborations]]
every_steps = 5
keep = 2
"""


def wait_message(program: Program, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    while not wanted(message := program.line(LIMIT_S)):
        pass
    return dict(message)


class Scene:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.stack = stack
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.file = folder / "run.toml"
        self.file.write_text(RUN.format(port=port))
        self.vault = folder / "killed" / "model"

    def start(self, script: str, *arguments: str) -> Program:
        command = [sys.executable, "-c", script, *arguments]
        program = Program("this machine", subprocess.Popen(command, stdout=PIPE, text=True, cwd=ROOT))
        self.stack.callback(program.kill)
        return program

    def backbone(self) -> tuple[Program, dict[str, Any]]:
        program = self.start(BACKBONE, str(self.file))
        return program, wait_message(program, lambda message: "invite" in message)

    def wait_checkpoint(self, step: int) -> int:
        until = time.monotonic() + LIMIT_S
        while (newest := StepFiles(self.vault).newest_step) < step:
            assert time.monotonic() < until, f"no checkpoint beyond step {step}: {newest}"
            time.sleep(0.1)
        return newest


@pytest.mark.ordeal
def test_a_run_survives_its_backbone_and_then_all_its_trainers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = Scene(tmp_path, stack)
        backbone, before = run.backbone()
        trainers = [run.start(TRAINER, before["invite"], name) for name in ("alice", "bob")]
        kept = run.wait_checkpoint(5)
        backbone.kill()
        wait_message(trainers[0], lambda message: message.get("step", 0) > kept)  # they continue without it
        backbone, after = run.backbone()
        assert after["id"] == before["id"]
        assert after["invite"][:16] == before["invite"][:16]
        kept = run.wait_checkpoint(kept + 10)  # the trainers found it again, by the address they knew
        for trainer in trainers:
            trainer.kill()
        carol = run.start(TRAINER, before["invite"], "carol")  # an old invitation is good for the same run
        began_at = wait_message(carol, lambda message: "began_at" in message)["began_at"]
        assert began_at >= kept
        run.wait_checkpoint(began_at + 5)
        with urllib.request.urlopen(f"{after['dashboard']}status.json", timeout=10) as answer:
            (model,) = json.load(answer)
        assert model["step"] >= began_at and model["loss_history"]
        assert "carol" in {peer["name"] for peer in model["peers"] if peer["role"] == "trainer"}
    for path in StepFiles(run.vault).paths():
        read_snapshot(path)
