"""What it costs to watch: training with the panel open and the recorder on, compared with the same loop without.

A peer trains in a real kernel, driven by nbclient, which keeps the widgets' state as a browser does,
in turns with panel and recorder and without. Then its panel is refreshed for half an hour.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from colab_swarm.bench.harness import BenchReport, Channel, Crew, benchmark
from colab_swarm.bench.overhead import TrainingLoop, memory_mib
from colab_swarm.events import MemberTrace, RoundFinished, StepFinished
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.recorder import Header, Recorder
from colab_swarm.swarm.joining import create, join

WARM_UP, PORTION = 1500, 100
WATCH = """
from colab_swarm.bench.panel import Watched
watched = Watched({invite!r})
watched.panel
"""
AVERAGE_EVERY = 8
MEMBERS = 8
OWN_MEMORY = "status", "RssAnon:"  # without libraries, whose share depends on what else runs


@benchmark("panel")
def run(report: BenchReport) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # the refreshes of half an hour at four a second
    pairs, phase_s, refreshes = (3, 1.0, 400) if report.quick else (40, 2.5, 7200)
    notebook = Notebook()
    with create("panel", peer_name="backbone") as backbone, notebook.client.setup_kernel(), Crew() as crew:
        invite = str(backbone.invite())
        notebook.run(WATCH.format(invite=invite))
        bob = crew.start(train_beside, invite)
        bob.receive()
        firsts = [pair % 2 for pair in range(pairs + 1)]
        ratios = [notebook.evaluate(f"watched.ratio({phase_s}, first={first})") for first in firsts]
        bob.process.kill()
        notebook.refresh(WARM_UP)
        before = notebook.saved_bytes()
        grown_mb, refresh_s = notebook.refresh(refreshes)
        grown_kb = (notebook.saved_bytes() - before) / 1e3
    report.add_rows(
        ("throughput_ratio", statistics.median(ratios[1:]), "", f"panel and recorder on; {pairs} pairs"),
        ("memory_mb", grown_mb, "MB", f"of the kernel over {refreshes} refreshes, each of another view"),
        ("notebook_kb", grown_kb, "kB", "of the saved notebook"),
        ("refresh_ms", 1e3 * refresh_s, "ms", "processor time, of all threads"),
        ("core_share", 4 * refresh_s, "", "of a core, at four refreshes a second"),
    )


class Notebook:
    def __init__(self) -> None:
        empty = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
        self.client: Any = NotebookClient(empty, timeout=1200, kernel_name="python3")

    def run(self, code: str) -> Any:
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(code))  # type: ignore[no-untyped-call]
        return self.client.execute_cell(cells[-1], len(cells) - 1)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression. Only its effect on widgets stays in the notebook."""
        outputs = self.run(f"import json; print(json.dumps({expression}))").outputs
        del self.client.nb.cells[-1]
        printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
        return json.loads(printed.splitlines()[-1])

    def refresh(self, times: int) -> tuple[float, float]:
        """Refresh the panel in portions: if the kernel is far ahead of its client, ZeroMQ drops messages."""
        found = [self.evaluate(f"watched.refresh({PORTION})") for _ in range(times // PORTION)]
        grown_mb, seconds = zip(*found, strict=True)
        return sum(grown_mb), statistics.mean(seconds)

    def saved_bytes(self) -> int:
        self.client.set_widgets_metadata()
        return len(nbformat.writes(self.client.nb).encode())  # type: ignore[no-untyped-call]


def train_beside(parent: Channel, invite: str) -> None:
    loop = TrainingLoop(join(invite, peer_name="bob"), average_every=AVERAGE_EVERY)
    parent.send()
    while True:
        loop.batch()


class Watched:
    def __init__(self, invite: str) -> None:
        self._swarm = join(invite, peer_name="alice")
        self._loop = TrainingLoop(self._swarm, average_every=AVERAGE_EVERY)
        self._folder = tempfile.TemporaryDirectory()
        self._step = 0
        # live without a front-end: nbclient keeps the widgets' state as a page does
        self.panel = Panel(self._swarm.snapshot, self._swarm.leave, pause=lambda on: None, live=True)

    def ratio(self, seconds: float, *, first: int) -> float:
        """Return the speed while watched over that while not; vary which is ``first`` (1: watched)."""
        speeds = {watched: self._speed(seconds, watched) for watched in (first, 1 - first)}
        return speeds[1] / speeds[0]

    def _speed(self, seconds: float, watched: int) -> float:
        swarm, path = self._swarm, Path(self._folder.name) / "run.jsonl"
        header = Header(swarm.run, swarm.name, swarm.id.hex(), time.time(), time.monotonic())
        with closing(Recorder(swarm.events, path, header)) if watched else nullcontext():
            return self._loop.samples_per_s(seconds=seconds, after_each=self.panel.tick if watched else int)

    def refresh(self, times: int) -> tuple[float, float]:
        """Show so many views; return the kernel's growth in MB and a view's processor seconds."""
        gc.collect()
        before, began, pretending_s = memory_mib(*OWN_MEMORY), time.process_time(), 0.0
        for _ in range(times):
            since = time.thread_time()
            self._pretend_round()
            pretending_s += time.thread_time() - since
            self.panel.refresh()
        spent_s = time.process_time() - began - pretending_s
        gc.collect()
        return (memory_mib(*OWN_MEMORY) - before) * 1024**2 / 1e6, spent_s / times

    def _pretend_round(self) -> None:
        self._step += 1
        now, samples, part = time.monotonic(), 4.0 * MEMBERS, (0.1, 0.2)
        peers = tuple(f"{member:02x}" * 32 for member in range(MEMBERS))
        members = tuple(MemberTrace(peer, 4.0, 1 / MEMBERS, part, part, part) for peer in peers)
        round_finished = RoundFinished(
            now, self._step, MEMBERS, peers, samples, 0, 0, 1000, 1000, 0.5, averaging_s=0.3, members=members
        )
        self._swarm.events.emit(round_finished)
        self._swarm.events.emit(StepFinished(now, self._step, samples, 1 + 1 / self._step))
