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
    """One process and the events it reported."""

    name: str
    process: subprocess.Popen[str]
    steps: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[str, Any] | None = None


class _Children:
    """Processes that report JSON lines."""

    def __init__(self) -> None:
        self.all: dict[str, _Child] = {}
        self._events: queue.Queue[tuple[_Child, dict[str, Any]]] = queue.Queue()
        self._deadline = time.monotonic() + TIME_LIMIT_S

    def start(self, name: str, *arguments: str) -> None:
        options = ["--json-lines", "--peer-name", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            [sys.executable, "-m", "colab_swarm.cli", *arguments, *options],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
        )
        child = self.all[name] = _Child(name, process)
        threading.Thread(target=self._read, args=(child,), daemon=True).start()

    def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None
        for line in child.process.stdout:
            self._events.put((child, json.loads(line)))
        self._events.put((child, {"event": "ended"}))

    def next_event(self, *, may_end: str = "") -> tuple[_Child, dict[str, Any]]:
        """Return the next event; only the child ``may_end`` may end before it has finished."""
        try:
            child, event = self._events.get(timeout=max(0.1, self._deadline - time.monotonic()))
        except queue.Empty:
            raise SwarmError(f"the demo did not finish within {TIME_LIMIT_S:.0f} s") from None
        if event["event"] == "step":
            child.steps.append(event)
        elif event["event"] == "finished":
            child.finished = event
        elif event["event"] == "ended" and child.name != may_end:
            raise SwarmError(f"{child.name} ended early with status {child.process.wait()}")
        return child, event

    def stop(self) -> None:
        for child in self.all.values():
            child.process.kill()
        for child in self.all.values():
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    pipe.close()


def demo(*, steps: int = 60) -> None:
    """Run the demo and print what happens.

    Raises:
        SwarmError: the trainers ended with different parameters, or a process did not finish.
    """
    children, began = _Children(), time.monotonic()
    try:
        children.start("backbone", "backbone", "demo")
        event: dict[str, Any] = {}
        while "invite" not in event:
            _, event = children.next_event()
        print(f"invitation  {event['invite'][:60]}…\n", flush=True)
        batch = ["--target-batch-size", str(TARGET_BATCH_SIZE)]
        trainer = ["peer", event["invite"], "--steps", str(steps), *batch]
        for name in ("alice", "bob", "carol"):
            children.start(name, *trainer)
        with _Screen(steps) as screen:
            _watch(children, steps, trainer, screen)
        _conclude(children, time.monotonic() - began)
    finally:
        children.stop()


def _watch(children: _Children, steps: int, trainer: list[str], screen: _Screen) -> None:
    """Show events until all survivors have finished; half-way, carol is killed and dave joins."""
    while not all(name in children.all and children.all[name].finished for name in SURVIVORS):
        child, event = children.next_event(may_end="carol")
        screen.show(child, event)
        if event["event"] == "step" and event["step"] >= steps // 2 and "dave" not in children.all:
            children.all["carol"].process.kill()
            children.start("dave", *trainer)
            print("    --- carol is killed, dave joins ---", flush=True)


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

    def show(self, child: _Child, event: dict[str, Any]) -> None:
        text = _describe(event)
        if text is None:
            return
        if self._live is None:
            print(f"{child.name:>9}  {text}", flush=True)
            return
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        self._rows[child.name] = text
        table = Table("peer", "status", box=None)
        for row in self._rows.items():
            table.add_row(*row)
        step = child.steps[-1]["step"] if child.steps else 0
        self._live.update(Group(table, "", ProgressBar(self._steps, step, width=60)))


def _describe(event: dict[str, Any]) -> str | None:
    match event["event"]:
        case "step":
            loss = "" if event["loss"] is None else f"loss {event['loss']:.3f}"
            speed = f"{event['samples']:.0f} samples, swarm {event['swarm_samples_per_s']:.0f}/s"
            return f"step {event['step']:>3}  {loss}  {speed}"
        case "state":
            size_mb = event["bytes"] / 1e6
            return (
                f"received the state of step {event['step']}: {size_mb:.1f} MB from {event['donors']} donors"
            )
        case "round" if event["spans_lost"] or event["kept_local"]:
            lost, local = event["spans_lost"], event["kept_local"]
            return f"a reducer vanished: {lost} spans lost, {local} values stay local"
        case "training" | "finished" | "ended" as kind:
            return str(kind)
        case _:
            return None


def _conclude(children: _Children, seconds: float) -> None:
    by_step = {event["step"]: event for child in children.all.values() for event in child.steps}
    losses = [event["loss"] for _, event in sorted(by_step.items()) if event["loss"] is not None]
    samples = sum(event["samples"] for event in by_step.values())
    trainers = [children.all[name] for name in SURVIVORS]
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
