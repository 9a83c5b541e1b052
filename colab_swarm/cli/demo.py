"""``colab-swarm demo``: a backbone and three trainers, as processes on this machine, train
ALBERT-tiny.

Half-way one trainer is killed and another one joins. At the end all must hold equal parameters.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from colab_swarm.errors import SwarmError

TARGET_BATCH_SIZE = 96
TIME_LIMIT_S = 600.0
SURVIVORS = ("alice", "bob", "dave")


class _Children:
    """Processes that report JSON lines."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._deadline = time.monotonic() + TIME_LIMIT_S

    def start(self, name: str, *arguments: str) -> None:
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "colab_swarm.cli", *arguments, "--json-lines", "--peer-name", name],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        threading.Thread(target=self._read, args=(name,), daemon=True).start()

    def _read(self, name: str) -> None:
        for line in self.processes[name].stdout or ():
            self._events.put((name, json.loads(line)))
        self._events.put((name, {"event": "ended"}))

    def next_event(self) -> tuple[str, dict[str, Any]]:
        """Return the next event and its peer; only carol may end before she has finished."""
        try:
            name, event = self._events.get(timeout=max(0.1, self._deadline - time.monotonic()))
        except queue.Empty:
            raise SwarmError(f"the demo did not finish within {TIME_LIMIT_S:.0f} s") from None
        if event["event"] == "ended" and name != "carol":
            raise SwarmError(f"{name} ended early with status {self.processes[name].wait()}")
        return name, event

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            with process:  # waits, and closes its pipes
                pass


def demo(*, steps: int = 60) -> None:
    """Run the demo; raise SwarmError if the trainers end with different parameters, or one hangs."""
    children = _Children()
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
        _watch(children, steps, trainer)
    finally:
        children.stop()


def _watch(children: _Children, steps: int, trainer: list[str]) -> None:
    digests: dict[str, str] = {}
    while not digests.keys() >= set(SURVIVORS):
        name, event = children.next_event()
        if text := _describe(event):
            print(f"{name:>9}  {text}", flush=True)
        if event["event"] == "finished":
            digests[name] = event["parameters"]
        if event["event"] == "step" and event["step"] >= steps // 2 and "dave" not in children.processes:
            children.processes["carol"].kill()
            children.start("dave", *trainer)
            print("    --- carol is killed, dave joins ---", flush=True)
    if len({digests[name] for name in SURVIVORS}) != 1:
        raise SwarmError(f"the trainers hold different parameters: {digests}")
    print(f"equal parameters on {', '.join(SURVIVORS)}: {digests['dave']}", flush=True)


def _describe(event: dict[str, Any]) -> str | None:
    match event["event"]:
        case "step":
            loss = "" if event["loss"] is None else f"loss {event['loss']:.3f}"
            speed = f"{event['samples']:.0f} samples, swarm {event['swarm_samples_per_s']:.0f}/s"
            return f"step {event['step']:>3}  {loss}  {speed}"
        case "state":
            size = f"{event['bytes'] / 1e6:.1f} MB from {event['donors']} donors"
            return f"received the state of step {event['step']}: {size}"
        case "training" | "finished" | "ended" as kind:
            return str(kind)
    return None
