"""Temporary Redis, PostgreSQL and MariaDB servers from installed programs, on Unix sockets in a new folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

START_S, STOP_S = 60.0, 30.0
DEBIAN_POSTGRESQL = Path("/usr/lib/postgresql")


class Absent(Exception):
    """A program is not installed; the text says which."""


@contextmanager
def redis_server(*, durable: bool = False) -> Iterator[str]:
    """Run a Redis server, in memory or writing all to disk; give its URL.

    Raises:
        Absent: redis-server is not installed.
    """
    program = _program("redis-server")
    with _folder(None) as folder:
        socket = folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
        options += ["--appendonly", "yes" if durable else "no"]
        with _running([program, *options], socket.exists, folder, None):
            yield f"unix://{socket}"


@contextmanager
def postgresql_server() -> Iterator[str]:
    """Run a PostgreSQL server with default settings; give the URL of a database.

    Raises:
        Absent: its programs, or a user to run them as, are missing.
    """
    found = sorted(DEBIAN_POSTGRESQL.glob("*/bin"))
    folders = os.pathsep.join([str(path) for path in found[::-1]] + [os.environ.get("PATH", "")])
    initdb, postgres = (_program(name, folders) for name in ("initdb", "postgres"))
    user = _other_user("postgres")
    with _folder(user) as folder:
        data = folder / "data"
        options = ["--no-sync", "--auth=trust", "--username=swarm", "--encoding=UTF8", "--no-locale"]
        _run([initdb, *options, f"--pgdata={data}"], user)
        server = [postgres, "-D", str(data), "-k", str(folder), "-h", ""]
        ready = partial(_postgresql_ready, data / "postmaster.pid")
        with _running(server, ready, folder, user, end=signal.SIGINT):  # SIGTERM waits for clients to leave
            yield f"postgresql+psycopg://swarm@/postgres?host={folder}"


def _postgresql_ready(file: Path) -> bool:
    return file.exists() and "ready" in file.read_text()


@contextmanager
def mariadb_server() -> Iterator[str]:
    """Run a MariaDB server with default settings; give the URL of a database.

    Raises:
        Absent: its programs, or a user to run them as, are missing.
    """
    install = _program("mariadb-install-db")
    server = _program("mariadbd", os.environ.get("PATH", "") + ":/usr/sbin")
    user = _other_user("mysql")
    with _folder(user) as folder:
        data, socket = folder / "data", folder / "mariadb.sock"
        options = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        _run([install, *options, f"--datadir={data}"], user)
        command = [server, "--no-defaults", "--skip-networking", f"--datadir={data}", f"--socket={socket}"]
        with _running(command, socket.exists, folder, user):
            yield f"mysql+pymysql://root@localhost/mysql?unix_socket={socket}"


def _program(name: str, path: str | None = None) -> str:
    found = shutil.which(name, path=path)
    if found is None:
        raise Absent(f"{name} is not installed")
    return found


def _other_user(name: str) -> str | None:
    """Return the user to run a server as that refuses to run as root; None for the current one."""
    if os.name != "posix" or os.geteuid() != 0:
        return None
    import pwd

    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        raise Absent(f"there is no user {name}, and its server refuses to run as root") from None


@contextmanager
def _folder(user: str | None) -> Iterator[Path]:
    """Make a folder that belongs to ``user``; its path is short, as that of a socket must be."""
    folder = Path(tempfile.mkdtemp(prefix="swarm-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], user: str | None) -> None:
    done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")


@contextmanager
def _running(
    command: list[str],
    ready: Callable[[], bool],
    folder: Path,
    user: str | None,
    *,
    end: int = signal.SIGTERM,
) -> Iterator[None]:
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
