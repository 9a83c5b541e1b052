"""VC-ASGD: Figures 3 and 4, and section IV-D: time per epoch by arrangement, the effect of alpha, and the store.

And work units while their processes are killed.

*workunits*: time per epoch by parameter servers, volunteers and units at a time (PnCnTn), all real
processes. As in the paper, the volunteers limit an epoch at first, and with more of their units at
a time the parameter servers do: each measures the accuracy after every result, here of a small
ResNetV2 on 11,504 images, which takes far longer than to train a unit of 30 images.

*vc-asgd*: the effect of alpha, compared with serial training. Digits by an MLP instead of CIFAR-10 by
a ResNet of 552 layers. The product's own code trains and assimilates units. Finishing times are
random: 3 volunteers, the slowest of which takes twice as long as the fastest, with 4 units at a time
each (P3C3T4). A unit starts from the parameters at its assignment, so up to 11 others precede it.

*parameter-store*: how long one update of 5 M parameters takes in each store (paper: Redis 0.87 s, MySQL 1.29 s).
An update is all work of a parameter server except measuring accuracy: it claims a result, reads it
and the parameters, computes ``W_s <- alpha W_s + (1 - alpha) W_c`` and writes the new ones.

*work-ordeal*: the coordinator is killed (SIGKILL) at random moments together with its parameter servers, and restarted
in the same folder. Volunteers are killed in the middle of a unit with probability 0.2 and come back under their names.
At the end the store's log must contain every unit of every epoch as assimilated exactly once.
"""

import heapq
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colab_swarm.bench.harness import BenchReport, Channel, Crew, Lines, benchmark, draw
from colab_swarm.errors import JoinError
from colab_swarm.recipes.classify import classification_job, shape_of
from colab_swarm.workunits import WorkPlan, coordinate, volunteer
from colab_swarm.workunits.job import Alpha, Job, UnitTraining, measure, unit_seed
from colab_swarm.workunits.state import Accepted, Assigned, Assimilated, EpochEnded, Finished, Unit
from colab_swarm.workunits.store import KEEP_MEMORY, open_store
from colab_swarm.workunits.weights import Floats, Schema, assimilate

CODE = """
from dataclasses import replace
import colab_swarm as cs
import numpy as np
from colab_swarm.recipes.classify import classification_job

plan = cs.workunits.WorkPlan(
    subsets={subsets}, max_epochs={epochs}, alpha=0.95, batch_size=16, validation_samples=12_000
)
learned = classification_job(model="resnet", plan=plan)
job = replace(learned, validation=lambda: [np.concatenate([part] * 8) for part in learned.data()])
"""
SUBSETS = 48
TIME_LIMIT_S = 300.0


@benchmark("workunits")
def run_workunits(report: BenchReport) -> None:
    for servers, volunteers, units in ((1, 3, 8), (3, 3, 8)):
        with tempfile.TemporaryDirectory() as folder:
            seconds = epoch_seconds(Path(folder), servers, volunteers, units, epochs=2 if report.quick else 3)
        report.add(f"p{servers}c{volunteers}t{units}_epoch_s", seconds, "s", f"{SUBSETS} units")
    ratio = report.figures["p1c3t8_epoch_s"] / report.figures["p3c3t8_epoch_s"]
    report.add("p1c3t8_vs_p3c3t8", ratio, "x", "the paper: over 1, assimilation is the bottleneck")


def epoch_seconds(folder: Path, servers: int, volunteers: int, units: int, *, epochs: int) -> float:
    """Return the median time of a later epoch, from first assignment to last measured result."""
    file = folder / "job.py"
    file.write_text(CODE.format(subsets=SUBSETS, epochs=epochs))
    coordinator = coordinate(file, folder=folder / "work", host="127.0.0.1", servers=servers)
    try:
        with Crew() as crew:
            for number in range(volunteers):
                name = f"volunteer-{number}"
                crew.start(volunteer_all, str(coordinator.link), str(folder / "volunteers"), name, units)
            if not coordinator.wait(TIME_LIMIT_S):
                raise TimeoutError(f"no {epochs} epochs in {TIME_LIMIT_S:.0f} s: {coordinator!r}")
        log = list(coordinator.log())
    finally:
        coordinator.stop()
    begun = {entry.unit.epoch: entry.at for entry in reversed(log) if isinstance(entry, Assigned)}
    took_s = [entry.at - begun[entry.epoch] for entry in log if isinstance(entry, EpochEnded)]
    return statistics.median(took_s[1:])


def volunteer_all(parent: Channel, link: str, folder: str, name: str, units: int) -> None:
    torch.set_num_threads(1)
    volunteer(link, trust_code=True, name=name, folder=folder, units=units).wait()


ALPHAS: dict[str, Alpha] = {"0.7": 0.7, "0.95": 0.95, "0.999": 0.999, "e/(e+1)": "e/(e+1)"}
SPEEDS = (1.0, 1.5, 2.0)
SCATTER = 0.2
EARLY = 6  # epochs; in the paper the order of 0.7 and 0.95 turns after them


@dataclass(frozen=True)
class Epoch:
    """Accuracy over the units of an epoch, each after its assimilation."""

    mean: float
    low: float
    high: float


def train_by_volunteers(job: Job, *, seed: int) -> list[Epoch]:
    plan, rng = job.plan, random.Random(seed)
    rows, validation = job.rows(), job.validation_rows()
    parts = rows.cut(plan.subsets_of(len(rows), rows.size_bytes), seed=plan.seed)
    schema = Schema.of(model := job.first_model())
    values: Floats = schema.flatten(model)
    epochs, now = list[Epoch](), 0.0
    for epoch in range(1, plan.max_epochs + 1):
        waiting, accuracies = rng.sample(range(len(parts)), len(parts)), []
        flying: list[tuple[float, int, float, Floats]] = []  # returned at, subset, speed, first parameters
        free = list(SPEEDS) * 4  # units at a time
        while waiting or flying:
            while waiting and free:
                speed = free.pop()
                back = now + speed * rng.uniform(1 - SCATTER, 1 + SCATTER)
                heapq.heappush(flying, (back, waiting.pop(), speed, values))
            now, subset, speed, base = heapq.heappop(flying)
            free.append(speed)
            schema.load(model, base)
            UnitTraining(job, parts[subset], seed=unit_seed(plan.seed, epoch, subset), model=model).finish()
            values = assimilate(values, schema.flatten(model), plan.alpha_of(epoch))
            schema.load(model, values)
            accuracies.append(measure(job, model, validation))
        epochs.append(Epoch(statistics.mean(accuracies), min(accuracies), max(accuracies)))
    return epochs


def _job(data: str, seed: int, alpha: Alpha, *, quick: bool) -> Job:
    size = {"subsets": 20, "max_epochs": 8} if quick else {"subsets": 50, "max_epochs": 40}
    plan = WorkPlan(**size, local_epochs=4, batch_size=8, alpha=alpha, seed=seed, validation_samples=400)
    return classification_job(
        data, shape=shape_of(data), model="mlp" if data == "digits" else "resnet", plan=plan
    )


@benchmark("vc_asgd")
def run(report: BenchReport, data: str = "digits") -> None:
    """Report the orders that the paper found, as differences that are over 0 where they hold.

    ``data`` may be an ``.npz`` file of images, such as CIFAR-10's, see `classification_job`: a ResNet learns them.
    """
    seeds = range(1 if report.quick else 3)
    runs = {
        name: [train_by_volunteers(_job(data, seed, alpha, quick=report.quick), seed=seed) for seed in seeds]
        for name, alpha in ALPHAS.items()
    }
    runs["serial"] = [
        [Epoch(one, one, one) for one in _job(data, seed, 0.0, quick=report.quick).train_serially()[1]]
        for seed in seeds
    ]
    report.curves |= runs
    for name, curves in runs.items():
        key = re.sub(r"[()]", "", name.replace("/", "_over_"))
        report.add(f"{key}.final", _mean(curves, slice(-1, None)), "%", f"{len(curves)} seeds")
        report.add(f"{key}.early", _mean(curves, slice(EARLY)), "%", f"mean of the first {EARLY} epochs")
        if name != "serial":
            report.add(f"{key}.spread", spread(curves), "points", "of the units of an epoch, mean")
    found = report.figures
    names = ("0.7", "0.95", "e_over_e+1")
    best = max(found[f"{name}.final"] for name in (*names, "0.999"))
    orders = {
        "slowest_is_0.999_by": min(found[f"{name}.early"] for name in names) - found["0.999.early"],
        "variable_ahead_of_0.95_by": found["e_over_e+1.early"] - found["0.95.early"],
        "spread_of_0.7_over_0.95": found["0.7.spread"] - found["0.95.spread"],
        "serial_minus_best": found["serial.final"] - best,
    }
    report.add_all(orders, "points", "the paper: over 0")


def _mean(curves: Sequence[Sequence[Epoch]], part: slice) -> float:
    return 100 * statistics.mean(epoch.mean for curve in curves for epoch in curve[part])


def spread(curves: Sequence[Sequence[Epoch]]) -> float:
    return 100 * statistics.mean(epoch.high - epoch.low for curve in curves for epoch in curve)


def plot(report: BenchReport, path: str | Path) -> None:
    lines: Lines = {}
    for index, (name, (first, *_)) in enumerate(report.curves.items()):
        epochs = range(1, len(first) + 1)
        lines[name] = epochs, [epoch.mean for epoch in first], f"C{index}o-"
        lines[f"_{name}, lowest"] = epochs, [epoch.low for epoch in first], f"C{index}:"
        lines[f"_{name}, highest"] = epochs, [epoch.high for epoch in first], f"C{index}:"
    draw(path, [({"xlabel": "epoch", "ylabel": "validation accuracy"}, lines)])


NUMEL = 5_000_000
START_S, STOP_S = 60.0, 30.0


@contextmanager
def redis_server(*, durable: bool = False) -> Iterator[str]:
    """Run a Redis server, in memory or writing all to disk, if it is installed; give its URL."""
    with _folder() as folder:
        socket = folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
        command = [_program("redis-server"), *options, "--appendonly", "yes" if durable else "no"]
        with _running([command], socket.exists, folder):
            yield f"unix://{socket}"


@contextmanager
def postgresql_server() -> Iterator[str]:
    found = map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
    folders = os.pathsep.join([*found, os.environ.get("PATH", "")])
    initdb, postgres = (_program(name, folders) for name in ("initdb", "postgres"))
    with _folder("postgres") as folder:
        data, pid = folder / "data", folder / "data" / "postmaster.pid"
        options = ["--no-sync", "--auth=trust", "--username=swarm", "--encoding=UTF8", "--no-locale"]
        install = [initdb, *options, f"--pgdata={data}"]
        server = [postgres, "-D", str(data), "-k", str(folder), "-h", ""]
        with _running(
            [install, server],
            lambda: pid.exists() and "ready" in pid.read_text(),
            folder,
            end=signal.SIGINT,  # SIGTERM waits for clients to leave
        ):
            yield f"postgresql+psycopg://swarm@/postgres?host={folder}"


@contextmanager
def mariadb_server() -> Iterator[str]:
    program = _program("mariadb-install-db")
    mariadbd = _program("mariadbd", os.environ.get("PATH", "") + ":/usr/sbin")
    with _folder("mysql") as folder:
        data, socket = f"--datadir={folder / 'data'}", folder / "mariadb.sock"
        options = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        server = [mariadbd, "--no-defaults", "--skip-networking", data, f"--socket={socket}"]
        with _running([[program, *options, data], server], socket.exists, folder):
            yield f"mysql+pymysql://root@localhost/mysql?unix_socket={socket}"


def _program(name: str, path: str | None = None) -> str:
    if found := shutil.which(name, path=path):
        return found
    raise FileNotFoundError(f"{name} is not installed")


@contextmanager
def _folder(user: str = "") -> Iterator[Path]:
    """Make a folder with a path short enough for sockets; root gives it to ``user``, to run its server."""
    with tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True) as folder:
        if user and os.name == "posix" and os.geteuid() == 0:
            try:
                shutil.chown(folder, user)
            except LookupError as error:
                raise FileNotFoundError(f"there is no user {user} to run its server") from error
        yield Path(folder)


@contextmanager
def _running(
    commands: Sequence[list[str]], ready: Callable[[], bool], folder: Path, *, end: int = signal.SIGTERM
) -> Iterator[None]:
    """Run the last command as a server, after the others have ended, all by the folder's owner."""
    *before, command = commands
    user = folder.stat().st_uid if os.name == "posix" else None
    for program in before:
        subprocess.run(program, user=user, cwd="/", check=True, capture_output=True)
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, user=user, cwd="/", stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not ready():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()}")
            time.sleep(0.02)
        yield
    finally:
        server.send_signal(end)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def _sqlite() -> Iterator[str]:
    with _folder() as folder:
        yield str(folder / "job.db")


STORES: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "memory": (lambda: nullcontext("memory"), "of this process"),
    "sqlite": (_sqlite, "durable"),
    "redis": (redis_server, "in memory, as the paper has it; published 870 ms"),
    "redis_durable": (partial(redis_server, durable=True), "appendonly yes"),
    "postgresql": (postgresql_server, "durable, strong consistency"),
    "mariadb": (mariadb_server, "durable, strong consistency; published 1,290 ms (MySQL)"),
}
SQL = ("mariadb", "postgresql")


@benchmark("store")
def run_stores(report: BenchReport) -> None:
    updates = 5 if report.quick else 20
    for name, (opened, note) in STORES.items():
        try:
            with opened() as url, Crew() as crew:
                worker = crew.start(time_updates, url, NUMEL, updates, environment=KEEP_MEMORY)
                report.add(f"{name}_ms", worker.receive()["ms"], "ms", f"median of {updates}; {note}")
        except FileNotFoundError as absent:
            print(f"{name} is left out: {absent}", flush=True)
    found = report.figures
    if sql := next((name for name in SQL if f"{name}_ms" in found), None):
        report.add("sql_ms", found[f"{sql}_ms"], "ms", sql)
        if "redis_ms" in found:
            report.add("sql_to_redis", found[f"{sql}_ms"] / found["redis_ms"], "times", "paper: 1.5")


def time_updates(parent: Channel, url: str, numel: int, updates: int) -> None:
    store, rng = open_store(url, "bench"), np.random.default_rng(0)
    store.begin(rng.random(numel, np.float32))
    result, took_s = rng.random(numel, np.float32).tobytes(), []
    for subset in range(updates + 1):
        name = f"{subset:032x}"
        accepted = Accepted(at=0.0, unit=Unit(1, subset), assignment=name, alpha=0.95, change=1.0)
        store.append([accepted], put={accepted.result: result})
        began = time.perf_counter()
        claimed = store.claim("bench", now=1.0, lease_s=60.0)
        assert claimed is not None
        update = partial(assimilate, result=np.frombuffer(store.blob(claimed.result), "<f4"), alpha=0.95)
        store.assimilate(claimed, update, server="bench", now=1.0)
        took_s.append(time.perf_counter() - began)
    store.close()
    parent.send(ms=1000 * statistics.median(took_s[1:]))  # the first grows files and memory


NAMES = ("alice", "bob", "carol")
ORDEAL_SUBSETS = 12
UP_S, ORDEAL_LIMIT_S = (0.2, 4.0), 600.0  # life of a coordinator, of all


def ordeal_job(epochs: int) -> Job:
    settings: dict[str, Any] = {"alpha": 0.7, "deadline_s": 4.0, "in_flight": 2}
    plan = WorkPlan(subsets=ORDEAL_SUBSETS, max_epochs=epochs, local_epochs=4, batch_size=8, **settings)
    return classification_job(plan=plan)


@benchmark("work_ordeal")
def run_ordeal(report: BenchReport) -> None:
    kills, epochs = (3, 3) if report.quick else (20, 30)
    with tempfile.TemporaryDirectory() as folder, Crew() as crew:
        killed, volunteers_killed = _kill_in_turn(crew, folder, epochs, kills)
        store = open_store(str(Path(folder) / "work" / "job.db"), ordeal_job(epochs).name)
        log = [entry for _, entry in store.entries()]
        store.close()
    assimilated = [entry for entry in log if isinstance(entry, Assimilated)]
    ends = [entry.reason for entry in log if isinstance(entry, Finished)]
    found = {
        "once": list(Counter(entry.unit for entry in assimilated).values()).count(1),
        "units": epochs * ORDEAL_SUBSETS,
        "versions_in_order": [one.version for one in assimilated] == list(range(1, len(assimilated) + 1)),
    }
    report.add_all(found, "", f"by the store's log; the end: {', '.join(ends)}")
    report.add_all({"coordinator_kills": killed, "volunteer_kills": volunteers_killed}, "", "SIGKILL")


def _kill_in_turn(crew: Crew, folder: str, epochs: int, kills: int) -> tuple[int, int]:
    """Restart what is killed until the job is done; return how often coordinator and volunteers were."""
    rng, until = random.Random(0), time.monotonic() + ORDEAL_LIMIT_S
    coordinator = crew.start(coordinate_until_killed, epochs, folder)
    start = partial(crew.start, die_in_units, epochs, folder, coordinator.receive()["link"])
    volunteers = {name: start(name) for name in NAMES}
    killed, volunteers_killed, die_at = 0, 0, time.monotonic() + rng.uniform(*UP_S)
    while coordinator.process.poll() is None and time.monotonic() < until:
        for name, worker in volunteers.items():
            if worker.process.poll() is not None:
                volunteers_killed += worker.process.returncode == -signal.SIGKILL
                volunteers[name] = start(name)
        if killed < kills and time.monotonic() >= die_at:
            coordinator.process.kill()
            killed += coordinator.process.wait() == -signal.SIGKILL
            coordinator = crew.start(coordinate_until_killed, epochs, folder)
            coordinator.receive()  # its link is that of the first one
            die_at = time.monotonic() + rng.uniform(*UP_S)
        time.sleep(0.02)
    for worker in (coordinator, *volunteers.values()):
        worker.close()
    return killed, volunteers_killed


def coordinate_until_killed(parent: Channel, epochs: int, folder: str) -> None:
    coordinator = coordinate(ordeal_job(epochs), folder=Path(folder) / "work", host="127.0.0.1", servers=2)
    parent.send(link=coordinator.link)
    coordinator.wait()
    os._exit(0)


def die_in_units(parent: Channel, epochs: int, folder: str, link: str, name: str) -> None:
    rng, own, last = random.Random(f"{name} {os.getpid()}"), None, ""
    while own is None:
        with suppress(JoinError):  # the coordinator is being started again
            own = volunteer(link, job=ordeal_job(epochs), name=name, folder=Path(folder) / "volunteers")
        time.sleep(0.02)
    while not own.wait(0.01):
        unit = own.snapshot().units[0].unit
        if unit and unit != last and rng.random() < 0.2:
            threading.Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = unit or last
