"""``colab-swarm demo``: a backbone and three trainers, as separate processes on this machine, train ALBERT-tiny.

Half-way one trainer is killed and another one joins. At the end all trainers must hold equal parameters.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from colab_swarm.errors import SwarmError

TARGET_BATCH_SIZE = 96
TIME_LIMIT_S = 600.0


@dataclass
class _Child:
    """One process and what it told."""

    name: str
    process: subprocess.Popen[str]
    steps: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[str, Any] | None = None


class _Children:
    """Processes that tell JSON lines, in the order in which they come."""

    def __init__(self) -> None:
        self.all: dict[str, _Child] = {}
        self.told: queue.Queue[tuple[_Child, dict[str, Any]]] = queue.Queue()

    def start(self, name: str, *arguments: str) -> _Child:
        command = [sys.executable, "-m", "colab_swarm.cli", *arguments, "--json-lines", "--peer-name", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment
        )
        child = self.all[name] = _Child(name, process)
        threading.Thread(target=self._read, args=(child,), daemon=True).start()
        return child

    def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None
        for line in child.process.stdout:
            self.told.put((child, json.loads(line)))
        self.told.put((child, {"event": "ended"}))

    def stop(self) -> None:
        for child in self.all.values():
            child.process.kill()
        for child in self.all.values():
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    pipe.close()


def demo(*, steps: int = 60) -> None:
    """Run the demo; prints what happens.

    Raises:
        SwarmError: the trainers ended with different parameters, or something did not finish.
    """
    children = _Children()
    try:
        _run(children, steps)
    finally:
        children.stop()


def _run(children: _Children, steps: int) -> None:
    began = time.monotonic()
    children.start("backbone", "backbone", "demo")
    invite = _wait(children, "invite", began)["invite"]
    print(f"invitation  {invite[:60]}…\n", flush=True)
    trainer = ["peer", invite, "--steps", str(steps), "--target-batch-size", str(TARGET_BATCH_SIZE)]
    for name in ("alice", "bob", "carol"):
        children.start(name, *trainer)
    expected = {"alice", "bob", "dave"}
    swapped = False
    while not all(name in children.all and children.all[name].finished for name in expected):
        child, told = _next(children, began)
        _show(child, told)
        if told["event"] == "ended" and child.name in expected:
            raise SwarmError(f"{child.name} ended early with status {child.process.wait()}")
        if told["event"] == "step" and told["step"] >= steps // 2 and not swapped:
            swapped = True
            children.all["carol"].process.kill()
            children.start("dave", *trainer)
            print("    --- carol is killed, dave joins ---", flush=True)
    _conclude(children, [children.all[name] for name in sorted(expected)], time.monotonic() - began)


def _wait(children: _Children, event: str, began: float) -> dict[str, Any]:
    while True:
        child, told = _next(children, began)
        if told["event"] == event:
            return told
        if told["event"] == "ended":
            raise SwarmError(f"{child.name} ended early with status {child.process.wait()}")


def _next(children: _Children, began: float) -> tuple[_Child, dict[str, Any]]:
    try:
        child, told = children.told.get(timeout=max(0.1, began + TIME_LIMIT_S - time.monotonic()))
    except queue.Empty:
        raise SwarmError(f"the demo did not finish within {TIME_LIMIT_S:.0f} s") from None
    if told["event"] == "step":
        child.steps.append(told)
    elif told["event"] == "finished":
        child.finished = told
    return child, told


def _show(child: _Child, told: dict[str, Any]) -> None:
    match told["event"]:
        case "step":
            loss = "" if told["loss"] is None else f"loss {told['loss']:.3f}"
            speed = f"{told['samples']:.0f} samples, swarm {told['swarm_samples_per_s']:.0f}/s"
            text = f"step {told['step']:>3}  {loss}  {speed}"
        case "state":
            text = f"got the state of step {told['step']}: {told['bytes'] / 1e6:.1f} MB from {told['donors']} donors"
        case "round" if told["spans_lost"] or told["kept_local"]:
            text = (
                f"a reducer vanished: {told['spans_lost']} spans lost, {told['kept_local']} values kept local"
            )
        case "training" | "finished" | "ended" as event:
            text = event
        case _:
            return
    print(f"{child.name:>9}  {text}", flush=True)


def _conclude(children: _Children, trainers: list[_Child], seconds: float) -> None:
    everybody = children.all.values()
    by_step = {told["step"]: told for child in everybody for told in child.steps}
    losses = [told["loss"] for _, told in sorted(by_step.items()) if told["loss"] is not None]
    samples = sum(told["samples"] for told in by_step.values())
    sent = sum(child.finished["sent"] for child in trainers if child.finished)
    print(
        f"\n{max(by_step)} steps, {samples:.0f} samples, {seconds:.0f} s with start-up "
        f"({samples / seconds:.0f} samples/s), {sent / 1e6:.0f} MB sent by the trainers\n"
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    )
    digests = {child.name: child.finished["parameters"] for child in trainers if child.finished}
    for child in trainers:
        assert child.process.stdin is not None
        child.process.stdin.write("\n")
        child.process.stdin.flush()
        child.process.wait(30)
    if len(set(digests.values())) != 1:
        raise SwarmError(f"the trainers hold different parameters: {digests}")
    print(f"equal parameters on {', '.join(digests)}: {next(iter(digests.values()))}", flush=True)
