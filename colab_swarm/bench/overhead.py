"""What it costs to be a peer: training speed, memory and time to join, against the same loop without a swarm.

*soak*: do all peers keep training in twenty virtual hours of churn? The ideal is what the online
peers could do without ever waiting: their samples, divided by the target batch size.
"""

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import colab_swarm as cs
from colab_swarm.bench.harness import BenchReport, Channel, Crew, benchmark, call_all, receive_all

SAMPLES, AVERAGE_EVERY = 2, 4


@benchmark("overhead")
def run(report: BenchReport) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for measure in (_throughput, _late_joiner, _idle_peer):
        with cs.create("overhead", peer_name="backbone") as backbone, Crew() as crew:
            measure(report, crew, backbone)


class TrainingLoop:
    def __init__(
        self, swarm: "cs.Swarm | None", size: str = "tiny", average_every: int = AVERAGE_EVERY
    ) -> None:
        import torch

        torch.set_num_threads(1)
        self._model, batches = cs.recipes.albert(size, batch_size=SAMPLES, sequence_length=128)
        self._batch, self._average_every, self._batches = next(iter(batches)), average_every, 0
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
        """Return the speed over so many batches, or so long, without global steps."""
        began, done, stepping_s, took_s = time.perf_counter(), 0, 0.0, 0.0
        while done < batches and took_s < seconds:
            stepping_s += self.batch()
            after_each()
            done, took_s = done + 1, time.perf_counter() - began - stepping_s
        return SAMPLES * done / took_s


def train(parent: Channel, size: str, batches: int, invite: str) -> None:
    loop, found = TrainingLoop(cs.join(invite) if invite else None, size), dict[str, float]()
    while True:
        parent.call(**found)
        found = {"samples_per_s": loop.samples_per_s(batches=batches)}


def _throughput(report: BenchReport, crew: Crew, backbone: "cs.Swarm") -> None:
    size, batches, phases = ("tiny", 40, 2) if report.quick else ("base", 8, 5)
    invite, ratios = str(backbone.invite()), []
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
    memory, children, began = memory_mib(), _children(), time.perf_counter()
    cs.join(invite)
    took_s = time.perf_counter() - began
    time.sleep(3.0)
    parent.call(memory=memory_mib() - memory, children=_children() - children, took_s=took_s)


def _idle_peer(report: BenchReport, crew: Crew, backbone: "cs.Swarm") -> None:
    found = crew.start(idle, str(backbone.invite())).receive()
    report.add_rows(
        ("memory_mib", found["memory"], "MiB", "an idle peer, torch loaded before"),
        ("processes", found["children"], "", "child processes of an idle peer"),
        ("join_s", found["took_s"], "s", "import colab_swarm and join"),
    )


def join_late(parent: Channel, numel: int, invite: str) -> None:
    import torch

    from colab_swarm.swarm.joining import join

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(numel // 8)) for _ in range(8)]
    parent.call()
    began = time.perf_counter()
    optimizer = join(invite).optimizer(torch.optim.Adam(parameters, lr=1e-4), target_batch_size=16)
    for batches in itertools.count():
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        time.sleep(0.1)  # the forward and backward pass of a GPU
        stepped = optimizer.step(samples=1) is not None
        if batches == 0:
            parent.send(seconds=time.perf_counter() - began)
        elif stepped:
            parent.send(at=time.time())


def _late_joiner(report: BenchReport, crew: Crew, backbone: "cs.Swarm") -> None:
    numel = 2_000_000 if report.quick else 18_000_000
    carol, *others = (crew.start(join_late, numel, str(backbone.invite())) for _ in range(3))
    receive_all(crew)
    call_all(others)
    moments, steps = [time.time()], [0.0]
    time.sleep(5.0)
    moments.append(time.time())
    found = carol.call()
    moments.append(time.time())
    while steps[-1] < moments[-1]:
        steps.append(others[0].receive()["at"])
    rates = [
        sum(begin <= at < end for at in steps) / (end - begin) for begin, end in itertools.pairwise(moments)
    ]
    joined = BenchReport("join", report.quick, rows=report.rows)
    joined.add("first_sample_s", found["seconds"], "s", f"{numel / 1e6:g} M parameters and Adam")
    joined.add("others_step_rate", rates[1] / rates[0], "", "of the others meanwhile, against before")


SAMPLES_PER_S, MICRO_BATCH, SEED = 1.0, 20, 1
SESSION_S, ABSENCE_S = 4 * 3600.0, 1800.0


def _train(swarm: "cs.Swarm", target_batch_size: int) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = swarm.optimizer(torch.optim.SGD(parameters, lr=0.1), target_batch_size=target_batch_size)
    while True:
        parameters[0].grad = torch.ones(64)
        optimizer.step(samples=MICRO_BATCH)


@benchmark("soak")
def run_soak(report: BenchReport) -> None:
    from colab_swarm.events import RoundFinished, StateReceived
    from colab_swarm.sim.profiles import ChurnProfile
    from colab_swarm.swarm.simulation import simulate

    # step_s: with all peers online
    peers, hours, step_s = (8, 2.0, 300.0) if report.quick else (16, 20.0, 600.0)
    began, batch = time.perf_counter(), int(peers * step_s * SAMPLES_PER_S)
    churn, end_s = ChurnProfile(mean_session_s=SESSION_S, mean_absence_s=ABSENCE_S), hours * 3600
    with simulate(peers, network="home", seed=SEED, samples_per_s=SAMPLES_PER_S) as simulation:
        online, since, peer_seconds = peers, 0.0, 0.0  # of peers that never wait, with the same churn
        for event in churn.events(list(simulation.swarms), until_s=end_s, rng=random.Random(f"churn {SEED}")):
            peer_seconds += online * (event.at - since)
            online, since = online + 2 * event.online - 1, event.at
        ideal_steps = (peer_seconds + online * (end_s - since)) * SAMPLES_PER_S / batch
        simulation.run(partial(_train, target_batch_size=batch), seconds=end_s, churn=churn)
        steps = [swarm.snapshot().step for swarm in simulation.swarms.values()]
        events = [event for swarm in simulation.swarms.values() for event in swarm.events.recent()]
    report.add("step_share", max(steps) / ideal_steps, "", f"of the ideal; {peers} peers, {hours:g} hours")
    found = {
        "stuck_peers": sum(step < max(steps) - 1 for step in steps),
        "caught_up": sum(isinstance(event, StateReceived) for event in events),
        "kept_local": sum(event.kept_local for event in events if isinstance(event, RoundFinished)),
    }
    report.add_all(found, "", "peers behind at the end, late joiners online, values without a mean")
    report.add("real_s", time.perf_counter() - began, "s", "to simulate it")
