"""``colab-swarm demo``: a backbone and trainers as processes on this machine. One of the trainers is killed."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any, Self

from typer import Option

from colab_swarm.cli.command import command
from colab_swarm.cli.lines import say, step_line
from colab_swarm.errors import SwarmError, require
from colab_swarm.markup import count
from colab_swarm.notebook.explanation import install_line

DEMO_S = 600.0  # time limit
SURVIVORS = ("alice", "bob", "dave")
NEXT = """
Next: colab-swarm create my-run               start your own run and send its invitation to a friend,
      colab-swarm train-albert 'swarm://…'    who trains ALBERT with you. Your own model: cs.create(…) in Python"""


class Crew:
    """The processes of the demo by name, and their output. They are killed at the end of the ``with`` block."""

    def __init__(self) -> None:
        self.by_name: dict[str, subprocess.Popen[str]] = {}
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._deadline = time.monotonic() + DEMO_S

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "colab_swarm", *arguments, "--json-lines", "--peer-name", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.by_name[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        # the last line of a killed process may be incomplete
        with suppress(ValueError):
            for line in process.stdout:
                # lines that are not JSON are from libraries
                if line.startswith("{"):
                    self._events.put((name, json.loads(line)))
        self._events.put((name, {"event": "ended"}))

    def next_event(self) -> tuple[str, dict[str, Any]]:
        """Return the next event and its peer. Only the process of carol may end early."""
        try:
            name, event = self._events.get(timeout=max(0.1, self._deadline - time.monotonic()))
        except queue.Empty:
            raise SwarmError(f"the demo did not end within {DEMO_S:.0f} s") from None
        if event["event"] == "ended" and name != "carol":
            raise SwarmError(f"{name} ended early with status {self.by_name[name].wait()}")
        return name, event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.by_name.values():
            process.kill()
            process.wait()


@command("train ALBERT-tiny with several processes here; 2 minutes", "demo", "demo --steps 20")
def demo(steps: Annotated[int, Option(min=2, help="number of global steps")] = 60) -> None:
    """Train with a backbone and three trainers; half-way one is killed and another one joins."""
    require(find_spec("torch"), f"the demo needs torch: {install_line('torch')}", SwarmError)
    with Crew() as crew:
        crew.start("backbone", "create", "demo")
        event: dict[str, Any] = {}
        while "invite" not in event:
            _, event = crew.next_event()
        say("The run demo is there; alice, bob and carol join it.")
        trainer = ["train-albert", event["invite"], "--steps", str(steps), "--target-batch-size", "96"]
        for name in ("alice", "bob", "carol"):
            crew.start(name, *trainer)
        digests: dict[str, str] = {}
        last = 0
        while not digests.keys() >= set(SURVIVORS):
            name, event = crew.next_event()
            if event["event"] == "finished":
                digests[name] = event["parameters"]
            elif event["event"] == "step":
                if event["step"] <= last:  # another peer has reported this step
                    continue
                last = event["step"]
            line = _line(name, event, steps)
            if line:
                say(line)
            if last >= steps // 2 and "dave" not in crew.by_name:
                crew.by_name["carol"].kill()
                crew.start("dave", *trainer)
                say("--- carol is killed, dave joins ---")
    if len({digests[name] for name in SURVIVORS}) != 1:
        raise SwarmError(f"the trainers hold different parameters: {digests}")
    say(f"equal parameters on {', '.join(SURVIVORS)}: {digests['dave']}")
    say(NEXT)


def _line(name: str, event: dict[str, Any], steps: int) -> str:
    """Return the line for an event of a trainer; empty if the demo does not show the event."""
    match event:
        case {"event": "step"}:
            return step_line(event, steps)
        case {"event": "training", "step": step}:
            return f"{name} trains from step {step}"
        case {"event": "state", "step": step, "bytes": size, "donors": donors}:
            return f"{name} downloaded step {step}: {size / 1e6:.1f} MB from {count(donors, 'peer')}"
        case {"event": "finished", "step": step, "sent": sent, "received": received}:
            return f"{name} finished at step {step}: {(sent + received) / 1e6:.0f} MB sent and received"
        case {"event": "ended"}:
            return f"{name} ended"
    return ""
