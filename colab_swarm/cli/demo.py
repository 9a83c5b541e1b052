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
SURVIVORS = ("alice", "bob", "dave")


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
        command = [
            sys.executable,
            "-m",
            "colab_swarm.cli",
            *arguments,
            "--json-lines",
            "--peer-name",
            name,
        ]
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
    with _Screen(steps) as screen:
        _watch(children, steps, trainer, screen, began)
    trainers = [children.all[name] for name in SURVIVORS]
    _conclude(children, trainers, time.monotonic() - began)


def _watch(children: _Children, steps: int, trainer: list[str], screen: _Screen, began: float) -> None:
    """Until everybody who is to survive has finished; half-way, carol is killed and dave joins."""
    while not all(name in children.all and children.all[name].finished for name in SURVIVORS):
        child, told = _next(children, began)
        screen.show(child, told)
        if told["event"] == "ended" and child.name != "carol":
            raise SwarmError(f"{child.name} ended early with status {child.process.wait()}")
        if told["event"] == "step" and told["step"] >= steps // 2 and "dave" not in children.all:
            children.all["carol"].process.kill()
            children.start("dave", *trainer)
            screen.say("    --- carol is killed, dave joins ---")


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


class _Screen:
    """Shows the peers: a live table with progress in a terminal, a line per event elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rows: dict[str, str] = {}
        self._live = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(refresh_per_second=4)

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        print(text, flush=True)

    def show(self, child: _Child, told: dict[str, Any]) -> None:
        """What a peer told."""
        text = _described(told)
        if text is None:
            return
        if self._live is None:
            self.say(f"{child.name:>9}  {text}")
            return
        self._rows[child.name] = text
        self._live.update(self._table(child.steps[-1]["step"] if child.steps else 0))

    def _table(self, step: int) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table("peer", "what it does", box=None)
        for name, text in self._rows.items():
            table.add_row(name, text)
        return Group(table, "", ProgressBar(self._steps, step, width=60))


def _described(told: dict[str, Any]) -> str | None:
    match told["event"]:
        case "step":
            loss = "" if told["loss"] is None else f"loss {told['loss']:.3f}"
            speed = f"{told['samples']:.0f} samples, swarm {told['swarm_samples_per_s']:.0f}/s"
            return f"step {told['step']:>3}  {loss}  {speed}"
        case "state":
            return f"got the state of step {told['step']}: {told['bytes'] / 1e6:.1f} MB from {told['donors']} donors"
        case "round" if told["spans_lost"] or told["kept_local"]:
            return (
                f"a reducer vanished: {told['spans_lost']} spans lost, {told['kept_local']} values kept local"
            )
        case "training" | "finished" | "ended" as event:
            return str(event)
        case _:
            return None


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
