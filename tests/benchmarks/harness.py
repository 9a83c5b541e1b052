"""What benchmarks share: child processes, the table and the file of figures.

A worker is a function, plain or async, ``work(parent, *arguments)`` at the top level of a module.
`Worker` runs it in a fresh Python. Parent and child exchange JSON objects, one per line:

    with Crew() as crew:
        alice = crew.start(work, 4)
        answer = alice.call(batch=32)
"""

import asyncio
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import colab_swarm as cs
from colab_swarm.experiments.report import Report

T = TypeVar("T")
PACKAGES = ("colab-swarm", "torch", "aiohttp", "cryptography", "numpy")


def table(report: Report) -> str:
    width = max((len(row.key) for row in report.rows), default=0)
    lines = [f"{report.name}{' (quick)' if report.quick else ''}"]
    lines += [f"  {r.key:<{width}}  {r.value:>12,.4g} {r.unit:<12} {r.note}".rstrip() for r in report.rows]
    return "\n".join(lines)


def save(report: Report, path: str | Path) -> None:
    """Write the figures as JSON, by their keys, and what they were measured with."""
    installed = {one.name: one.version for one in distributions()}
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{name: installed.get(name) for name in PACKAGES},
    }
    metrics = {row.key: row.value for row in report.rows}
    Path(path).write_text(json.dumps({"metrics": metrics, "environment": environment}, indent=1))


def store_findings(report: Report, *, minutes: float) -> None:
    """Keep the findings and figures of a full preset in the package, with date, machine and version."""
    # not by the processes whose memory is measured: it loads torch
    from colab_swarm.experiments import claims

    runs = json.loads(claims.FULL_RUNS_FILE.read_text())
    measured = {key: found for key, found in claims.findings_of(report).items() if found.ours}
    runs[report.name] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "version": version("colab-swarm"),
        "minutes": round(minutes, 1),
        "findings": measured,
        "figures": {key: float(f"{value:.6g}") for key, value in report.figures.items()},
    }
    claims.FULL_RUNS_FILE.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n")
    print(claims.compare(report))


def processor() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.machine()


def enter(*invites: str, name: str = "") -> "cs.Swarm":
    """Join a run, or create one without an invitation; peers meet over loopback only."""
    options = cs.NetworkOptions(lan=False, use_relays=False)
    if invites:
        return cs.join(*invites, peer_name=name, options=options)
    return cs.create("bench", peer_name=name, options=options)


async def timed(work: Awaitable[T]) -> tuple[float, T]:
    """Return the seconds that it takes, and its result."""
    began = time.perf_counter()
    result = await work
    return time.perf_counter() - began, result


def python_command(function: Callable[..., object], *arguments: object) -> list[str]:
    """Return the command that runs ``function(parent, *arguments)``; arguments are JSON values."""
    module = sys.modules[function.__module__].__spec__  # its own name, even if it is __main__ here
    assert module is not None
    return [sys.executable, "-m", __name__, f"{module.name}:{function.__name__}", json.dumps(arguments)]


class Channel:
    def __init__(self, source: IO[str], target: IO[str]) -> None:
        self._source = source
        self._target = target

    def send(self, **message: object) -> None:
        print(json.dumps(message), file=self._target, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return the next message, or raise `EOFError`; lines printed by libraries are skipped."""
        for line in self._source:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise EOFError("the other process has ended: see its error above")

    def call(self, **message: object) -> dict[str, Any]:
        self.send(**message)
        return self.receive()

    async def wait_call(self, **message: object) -> dict[str, Any]:
        return await asyncio.to_thread(self.call, **message)


class Worker(Channel):
    """A child process that runs a function or a command; it has ``grace_s`` to end by itself."""

    def __init__(
        self,
        work: Callable[..., object] | list[Any],
        *arguments: object,
        grace_s: float = 0.0,
        environment: Mapping[str, str] = {},
    ) -> None:
        self._grace_s = grace_s
        command = [*work, *arguments] if isinstance(work, list) else python_command(work, *arguments)
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        super().__init__(self.process.stdout, self.process.stdin)

    def close(self) -> None:
        try:
            self._target.close()
            self.process.wait(self._grace_s)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()
            self.process.wait()
        self._source.close()


class Crew(list[Worker]):
    """Workers in the order of their start. They are killed at the end of the ``with`` block."""

    def start(self, work: Callable[..., object] | list[Any], *arguments: object, **options: Any) -> Worker:
        worker = Worker(work, *arguments, **options)
        self.append(worker)
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self[::-1]:
            worker.close()


def receive_all(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    return [worker.receive() for worker in workers]


def call_all(workers: Collection[Worker], **message: object) -> list[dict[str, Any]]:
    for worker in workers:
        worker.send(**message)
    return receive_all(workers)


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    try:
        work = getattr(importlib.import_module(module), name)(
            Channel(sys.stdin, sys.stdout), *json.loads(sys.argv[2])
        )
        if inspect.iscoroutine(work):
            asyncio.run(work)
    except EOFError:
        sys.exit(0)
