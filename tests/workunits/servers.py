"""Servers of stores for tests, those that are installed."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from colab_swarm.workunits.state import Accepted, Unit

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


SERVERS = {"redis": redis_server, "postgresql": postgresql_server, "mariadb": mariadb_server}


def accepted(subset: int, *, epoch: int = 1) -> Accepted:
    name = f"{epoch:016x}{subset:016x}"
    return Accepted(at=5.0, unit=Unit(epoch, subset), assignment=name, alpha=0.5, change=1.0)
