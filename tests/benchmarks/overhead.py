"""The costs of being a peer, joining late and watching, against the same loop without a swarm.

*join*: a fresh process runs the cells of ``notebooks/swarm.ipynb`` from the top, in IPython, with
the invitation as a secret. The creator has trained a step before.

*soak*: do all peers keep training in twenty virtual hours of churn? The ideal is what the online
peers could do without ever waiting: their samples, divided by the target batch size.

*panel*: a peer trains in a real kernel, driven by nbclient, which keeps the widgets' state as a browser does,
in turns with panel and recorder and without. Then its panel is refreshed for half an hour.
"""

import gc
import io
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import colab_swarm as cs
from colab_swarm.experiments.report import Report, reports
from tests.benchmarks.harness import Channel, Crew, call_all, receive_all
from tests.notebooks.cells import code_cells

SAMPLES = 2


@reports("overhead")
def run(report: Report) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for measure in (_throughput, _idle_peer):
        with cs.create("overhead", peer_name="backbone") as backbone, Crew() as crew:
            measure(report, crew, backbone)


class TrainingLoop:
    # quoted: the evaluated name would import before `idle` measures the import
    def __init__(self, swarm: "cs.Swarm | None", size: str = "tiny", average_every: int = 4) -> None:
        import torch

        torch.set_num_threads(1)
        self._model, batches = cs.recipes.albert(size, batch_size=SAMPLES, sequence_length=128)
        self._batch = next(iter(batches))
        self._average_every = average_every
        self._batches = 0
        self._bare = inner = cs.Lamb(self._model.parameters(), lr=1e-3)
        target = 2 * SAMPLES * average_every
        self._joined = None if swarm is None else swarm.optimizer(inner, target_batch_size=target)

    def batch(self) -> float:
        """Train on a micro-batch; return the seconds of a global step, if there was one."""
        loss = self._model(**self._batch).loss
        loss.backward()
        self._batches += 1
        began = time.perf_counter()
        if self._joined is not None:
            stepped = self._joined.step(samples=SAMPLES, loss=loss.item()) is not None
        elif stepped := self._batches % self._average_every == 0:
            self._bare.step()
            self._bare.zero_grad()
        return time.perf_counter() - began if stepped else 0.0

    def samples_per_s(
        self, *, batches: float = math.inf, seconds: float = math.inf, after_each: Callable[[], object] = int
    ) -> float:
        """Return the speed over the given batches or seconds, without global steps."""
        began = time.perf_counter()
        done = 0
        stepping_s = 0.0
        took_s = 0.0
        while done < batches and took_s < seconds:
            stepping_s += self.batch()
            after_each()
            done = done + 1
            took_s = time.perf_counter() - began - stepping_s
        return SAMPLES * done / took_s


def train(parent: Channel, size: str, batches: int, invite: str) -> None:
    loop = TrainingLoop(cs.join(invite) if invite else None, size)
    found = dict[str, float]()
    while True:
        parent.call(**found)
        found = {"samples_per_s": loop.samples_per_s(batches=batches)}


def _throughput(report: Report, crew: Crew, backbone: "cs.Swarm") -> None:
    size, batches, phases = ("tiny", 40, 2) if report.quick else ("base", 8, 5)
    invite = str(backbone.invite())
    ratios = []
    for one in ("", "", invite, invite):
        crew.start(train, size, batches, one)
    receive_all(crew)
    for _ in range(phases + 1):
        answers = call_all(crew[:2]), call_all(crew[2:])  # one pair after the other
        bare, joined = (sum(one["samples_per_s"] for one in pair) for pair in answers)
        ratios.append(joined / bare)
    report.add("throughput_ratio", statistics.median(ratios[1:]), "", f"ALBERT-{size}, 2 peers, 2 bare loops")


def memory_mib(listing: str = "smaps_rollup", field: str = "Pss:") -> float:
    """Return this process's memory, by default proportional; NaN where it is not counted."""
    path = Path("/proc/self") / listing
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), math.nan)


def _children() -> int:
    return sum(len(listing.read_text().split()) for listing in Path("/proc/self/task").glob("*/children"))


def idle(parent: Channel, invite: str) -> None:
    import torch

    torch.ones(256, 256) @ torch.ones(256, 256)
    memory = memory_mib()
    children = _children()
    began = time.perf_counter()
    cs.join(invite)
    took_s = time.perf_counter() - began
    time.sleep(3.0)
    parent.call(memory=memory_mib() - memory, children=_children() - children, took_s=took_s)


def _idle_peer(report: Report, crew: Crew, backbone: "cs.Swarm") -> None:
    found = crew.start(idle, str(backbone.invite())).receive()
    report.add_rows(
        ("memory_mib", found["memory"], "MiB", "an idle peer, torch loaded before"),
        ("processes", found["children"], "", "child processes of an idle peer"),
        ("join_s", found["took_s"], "s", "import colab_swarm and join"),
    )


NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "swarm.ipynb"
TIME_LIMIT_S = 120.0


def run_notebook(parent: Channel, invite: str) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell: Any = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    parent.call()
    with redirect_stdout(io.StringIO()):
        for cell in code_cells(NOTEBOOK):
            # there is no form to press here
            shell.run_cell(cell.replace("cs.connect()", f"cs.join({invite!r})")).raise_error()


def _counted_s() -> float:
    train = next(cell for cell in code_cells(NOTEBOOK) if "swarm.batches" in cell)
    with cs.create("join", peer_name="creator") as creator, Crew() as crew:
        with redirect_stdout(io.StringIO()):
            exec(train.replace("max_steps=1000", "max_steps=1"), {"swarm": creator})
        worker = crew.start(run_notebook, str(creator.invite()))
        worker.receive()
        began = time.perf_counter()
        worker.send()
        while not any(
            row.samples or row.step > 1 for row in creator.snapshot().peers if row.name != "creator"
        ):
            if time.perf_counter() - began > TIME_LIMIT_S:
                raise TimeoutError(f"no sample of the late joiner was counted within {TIME_LIMIT_S:g} s")
            time.sleep(0.01)
        return time.perf_counter() - began


@reports("join")
def run_join(report: Report) -> None:
    times = 1 if report.quick else 3
    counted_s = statistics.median(_counted_s() for _ in range(times))
    report.add("counted_s", counted_s, "s", "from pasting the invitation to a sample that others count")


SAMPLES_PER_S = 1.0
MICRO_BATCH = 20
SEED = 1


def _train(swarm: "cs.Swarm", target_batch_size: int) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = swarm.optimizer(torch.optim.SGD(parameters, lr=0.1), target_batch_size=target_batch_size)
    while True:
        parameters[0].grad = torch.ones(64)
        optimizer.step(samples=MICRO_BATCH)


@reports("soak")
def run_soak(report: Report) -> None:
    from colab_swarm.events import StateReceived
    from colab_swarm.sim.profiles import ChurnProfile
    from colab_swarm.swarm.simulation import simulate

    # step_s: with all peers online
    peers, hours, step_s = (8, 2.0, 300.0) if report.quick else (16, 20.0, 600.0)
    batch = int(peers * step_s * SAMPLES_PER_S)
    churn = ChurnProfile(mean_session_s=4 * 3600.0, mean_absence_s=1800.0)
    end_s = hours * 3600
    with simulate(peers, network="home", seed=SEED, samples_per_s=SAMPLES_PER_S) as simulation:
        # of peers that never wait, with the same churn
        online = peers
        since = 0.0
        peer_seconds = 0.0
        for event in churn.events(list(simulation.swarms), until_s=end_s, rng=random.Random(f"churn {SEED}")):
            peer_seconds += online * (event.at - since)
            online = online + 2 * event.online - 1
            since = event.at
            if event.online:
                simulation.join(event.peer, at=event.at)
            else:
                simulation.network.at(event.at).crash(event.peer)
        ideal_steps = (peer_seconds + online * (end_s - since)) * SAMPLES_PER_S / batch
        simulation.run(partial(_train, target_batch_size=batch), seconds=end_s)
        steps = [swarm.snapshot().step for swarm in simulation.swarms.values()]
        events = [event for swarm in simulation.swarms.values() for event in swarm.events.recent()]
    report.add("step_share", max(steps) / ideal_steps, "", f"of the ideal; {peers} peers, {hours:g} hours")
    caught_up = sum(isinstance(event, StateReceived) for event in events)
    stuck = sum(step < max(steps) - 1 for step in steps)
    report.add_all({"stuck_peers": stuck, "caught_up": caught_up}, "", "at the end; late joiners online")


WARM_UP = 1500
PORTION = 100
WATCH = """
from tests.benchmarks.overhead import Watched
watched = Watched({invite!r})
watched.panel
"""
PANEL_AVERAGE_EVERY = 8
MEMBERS = 8
OWN_MEMORY = "status", "RssAnon:"  # without libraries, whose share depends on what else runs


@reports("panel")
def run_panel(report: Report) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # the refreshes of half an hour at four a second
    pairs, phase_s, refreshes = (3, 1.0, 400) if report.quick else (40, 2.5, 7200)
    notebook = Notebook()
    with cs.create("panel", peer_name="backbone") as backbone, notebook.client.setup_kernel(), Crew() as crew:
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
        import nbformat
        from nbclient import NotebookClient

        self._format = nbformat
        empty = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
        self.client: Any = NotebookClient(empty, timeout=1200, kernel_name="python3")

    def run(self, code: str) -> Any:
        cells = self.client.nb.cells
        cells.append(self._format.v4.new_code_cell(code))  # type: ignore[no-untyped-call]
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
        return len(self._format.writes(self.client.nb).encode())  # type: ignore[no-untyped-call]


def train_beside(parent: Channel, invite: str) -> None:
    loop = TrainingLoop(cs.join(invite, peer_name="bob"), average_every=PANEL_AVERAGE_EVERY)
    parent.send()
    while True:
        loop.batch()


class Watched:
    def __init__(self, invite: str) -> None:
        from colab_swarm.notebook.panel import Panel

        self._swarm = cs.join(invite, peer_name="alice")
        self._loop = TrainingLoop(self._swarm, average_every=PANEL_AVERAGE_EVERY)
        self._folder = TemporaryDirectory()
        self._step = 0
        # live without a front-end: nbclient keeps the widgets' state as a page does
        self.panel = Panel(self._swarm.snapshot, self._swarm.leave, pause=lambda on: None, live=True)

    def ratio(self, seconds: float, *, first: int) -> float:
        """Return the speed while watched over that while not; vary which is ``first`` (1: watched)."""
        speeds = {watched: self._speed(seconds, watched) for watched in (first, 1 - first)}
        return speeds[1] / speeds[0]

    def _speed(self, seconds: float, watched: int) -> float:
        from colab_swarm.notebook.recorder import Header, Recorder

        swarm = self._swarm
        path = Path(self._folder.name) / "run.jsonl"
        header = Header(swarm.run, swarm.name, swarm.id.hex(), time.time(), time.monotonic())
        with closing(Recorder(swarm.events, path, header)) if watched else nullcontext():
            return self._loop.samples_per_s(seconds=seconds, after_each=self.panel.tick if watched else int)

    def refresh(self, times: int) -> tuple[float, float]:
        """Show the view ``times`` times; return the kernel's growth in MB and a view's processor seconds."""
        from colab_swarm.events import MemberTrace, RoundFinished, StepFinished

        gc.collect()
        before = memory_mib(*OWN_MEMORY)
        began = time.process_time()
        pretending_s = 0.0
        for _ in range(times):
            since = time.thread_time()
            self._step += 1
            now = time.monotonic()
            samples = 4.0 * MEMBERS
            part = (0.1, 0.2)
            peers = tuple(f"{member:02x}" * 32 for member in range(MEMBERS))
            members = tuple(MemberTrace(peer, 4.0, 1 / MEMBERS, part, part, part) for peer in peers)
            received = peers, samples, 0, 0, 1000, 1000, 0.5
            event = RoundFinished(now, self._step, MEMBERS, *received, averaging_s=0.3, members=members)
            self._swarm.events.emit(event)
            self._swarm.events.emit(StepFinished(now, self._step, samples, 1 + 1 / self._step))
            pretending_s += time.thread_time() - since
            self.panel.refresh()
        spent_s = time.process_time() - began - pretending_s
        gc.collect()
        return (memory_mib(*OWN_MEMORY) - before) * 1024**2 / 1e6, spent_s / times
