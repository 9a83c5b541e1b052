"""How long one update of 5 M parameters takes in each store (VC-ASGD, section IV-D: Redis 0.87 s, MySQL 1.29 s).

An update is all work of a parameter server except measuring accuracy: it claims a result, reads it
and the parameters, computes ``W_s <- alpha W_s + (1 - alpha) W_c`` and writes the new ones.
"""

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from colab_swarm.bench.harness import BenchReport, Channel, Crew, benchmark
from colab_swarm.workunits.state import Accepted, Unit
from colab_swarm.workunits.store import KEEP_MEMORY, open_store
from colab_swarm.workunits.weights import assimilate

NUMEL = 5_000_000
ALPHA = 0.95
LEASE_S = 60.0
START_S, STOP_S = 60.0, 30.0
DEBIAN_POSTGRESQL = Path("/usr/lib/postgresql")


class Absent(Exception):
    """A program is not installed; the text says which."""


@contextmanager
def redis_server(*, durable: bool = False) -> Iterator[str]:
    """Run a Redis server, in memory or writing all to disk, if it is installed; give its URL."""
    program = _program("redis-server")
    with _folder() as (folder, user):
        socket = folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
        command = [program, *options, "--appendonly", "yes" if durable else "no"]
        with _running([command], socket.exists, folder, user):
            yield f"unix://{socket}"


@contextmanager
def postgresql_server() -> Iterator[str]:
    found = map(str, sorted(DEBIAN_POSTGRESQL.glob("*/bin"), reverse=True))
    folders = os.pathsep.join([*found, os.environ.get("PATH", "")])
    initdb, postgres = (_program(name, folders) for name in ("initdb", "postgres"))
    with _folder("postgres") as (folder, user):
        data, pid = folder / "data", folder / "data" / "postmaster.pid"
        options = ["--no-sync", "--auth=trust", "--username=swarm", "--encoding=UTF8", "--no-locale"]
        install = [initdb, *options, f"--pgdata={data}"]
        server = [postgres, "-D", str(data), "-k", str(folder), "-h", ""]

        def ready() -> bool:
            return pid.exists() and "ready" in pid.read_text()

        # SIGTERM waits for clients to leave
        with _running([install, server], ready, folder, user, end=signal.SIGINT):
            yield f"postgresql+psycopg://swarm@/postgres?host={folder}"


@contextmanager
def mariadb_server() -> Iterator[str]:
    program = _program("mariadb-install-db")
    mariadbd = _program("mariadbd", os.environ.get("PATH", "") + ":/usr/sbin")
    with _folder("mysql") as (folder, user):
        data, socket = f"--datadir={folder / 'data'}", folder / "mariadb.sock"
        options = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        server = [mariadbd, "--no-defaults", "--skip-networking", data, f"--socket={socket}"]
        with _running([[program, *options, data], server], socket.exists, folder, user):
            yield f"mysql+pymysql://root@localhost/mysql?unix_socket={socket}"


def _program(name: str, path: str | None = None) -> str:
    if found := shutil.which(name, path=path):
        return found
    raise Absent(f"{name} is not installed")


@contextmanager
def _folder(user: str | None = None) -> Iterator[tuple[Path, str | None]]:
    """Make a folder with a path short enough for sockets; as root it belongs to ``user``, else to None."""
    if os.name != "posix" or os.geteuid() != 0:
        user = None
    with tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True) as folder:
        if user is not None:
            try:
                shutil.chown(folder, user)
            except LookupError as error:
                raise Absent(f"there is no user {user}, and its server refuses to run as root") from error
        yield Path(folder), user


@contextmanager
def _running(
    commands: Sequence[list[str]],
    ready: Callable[[], bool],
    folder: Path,
    user: str | None,
    *,
    end: int = signal.SIGTERM,
) -> Iterator[None]:
    """Run the last command as a server, after the others have ended."""
    *before, command = commands
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
    with _folder() as (folder, _):
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


@benchmark("parameter-store", "store")
def run(report: BenchReport) -> None:
    updates = 5 if report.quick else 20
    for name, (opened, note) in STORES.items():
        try:
            with opened() as url, Crew() as crew:
                worker = crew.start(time_updates, url, NUMEL, updates, environment=KEEP_MEMORY)
                report.add(f"{name}_ms", worker.receive()["ms"], "ms", f"median of {updates}; {note}")
        except Absent as absent:
            print(f"{name} is left out: {absent}", flush=True)
    found = report.figures
    if sql := next((name for name in SQL if f"{name}_ms" in found), None):
        report.add("sql_ms", found[f"{sql}_ms"], "ms", sql)
        if "redis_ms" in found:
            report.add(
                "sql_to_redis", found[f"{sql}_ms"] / found["redis_ms"], "times", f"{sql}; published 1.5"
            )


def time_updates(parent: Channel, url: str, numel: int, updates: int) -> None:
    store, rng = open_store(url, "bench"), np.random.default_rng(0)
    store.begin(rng.random(numel, np.float32))
    result, took_s = rng.random(numel, np.float32).tobytes(), []
    for subset in range(updates + 1):
        name = f"{subset:032x}"
        accepted = Accepted(at=0.0, unit=Unit(1, subset), assignment=name, alpha=ALPHA, change=1.0)
        store.append([accepted], put={accepted.result: result})
        began = time.perf_counter()
        claimed = store.claim("bench", now=1.0, lease_s=LEASE_S)
        assert claimed is not None
        update = partial(assimilate, result=np.frombuffer(store.blob(claimed.result), "<f4"), alpha=ALPHA)
        store.assimilate(claimed, update, server="bench", now=1.0)
        took_s.append(time.perf_counter() - began)
    store.close()
    parent.send(ms=1000 * statistics.median(took_s[1:]))  # the first grows files and memory
