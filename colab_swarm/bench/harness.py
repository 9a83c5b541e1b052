"""What benchmarks share: child processes, the report of figures, and plots.

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
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

import colab_swarm as cs

if TYPE_CHECKING:
    from colab_swarm.training.part import TrainingPart

T = TypeVar("T")
PACKAGES = ("colab-swarm", "torch", "aiohttp", "cryptography", "numpy")


class Figure(NamedTuple):
    """One figure. ``key`` is stable, because other programs read it from the JSON."""

    key: str
    value: float
    unit: str
    note: str


@dataclass
class BenchReport:
    """The figures of a run; their keys begin with ``name``. ``curves`` are also drawn, each by seed."""

    name: str
    quick: bool
    rows: list[Figure] = field(default_factory=list)
    curves: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, key: str, value: float, unit: str = "", note: str = "") -> None:
        self.rows.append(Figure(f"{self.name}.{key}", float(value), unit, note))

    def add_rows(self, *rows: tuple[str, float, str, str]) -> None:
        for row in rows:
            self.add(*row)

    def add_all(self, figures: Mapping[str, float], unit: str = "", note: str = "") -> None:
        self.add_rows(*((key, value, unit, note) for key, value in figures.items()))

    @property
    def figures(self) -> dict[str, float]:
        return {row.key.removeprefix(f"{self.name}."): row.value for row in self.rows}

    def table(self) -> str:
        width = max((len(row.key) for row in self.rows), default=0)
        lines = [f"{self.name}{' (quick)' if self.quick else ''}"]
        lines += [f"  {r.key:<{width}}  {r.value:>12,.4g} {r.unit:<12} {r.note}".rstrip() for r in self.rows]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        installed = {one.name: one.version for one in distributions()}
        environment = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **{name: installed.get(name) for name in PACKAGES},
        }
        found = {"metrics": {row.key: row.value for row in self.rows}, "environment": environment}
        Path(path).write_text(json.dumps(found, indent=1))


def benchmark(name: str) -> Callable[[Callable[..., None]], Callable[..., BenchReport]]:
    """Make ``run(quick=…, **options)``, which returns the report, of a function that fills it."""

    def decorate(measure: Callable[..., None]) -> Callable[..., BenchReport]:
        @wraps(measure)
        def run(quick: bool = False, **options: Any) -> BenchReport:
            report = BenchReport(name, quick)
            measure(report, **options)
            return report

        return run

    return decorate


def beside_paper(*rows: tuple[str, str, str, bool, str]) -> str:
    """Return a table: quantity, the paper's figure, ours, and a verdict.

    A row ends with whether the figures agree, and the reason if they do not.
    """
    shown = [("", "paper", "ours", "verdict")]
    shown += [(*row[:3], "agrees" if row[3] else f"differs, because {row[4]}") for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)


Lines: TypeAlias = dict[str, tuple[Iterable[Any], Iterable[Any], str]]


def draw(path: str | Path, panels: Sequence[tuple[dict[str, Any], Lines]]) -> None:
    """Save panels side by side as a PNG: settings of the axes, and by label what is plotted: x, y and format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    for axes, (style, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, line in lines.items():
            axes.plot(*line, label=label)
        axes.set(**style)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    figure.savefig(path, dpi=150)


def enter(*invites: str, name: str = "") -> "cs.Swarm":
    """Join a run, or create one without an invitation; peers meet over loopback only."""
    options = cs.NetworkOptions(lan=False, use_relays=False)
    if invites:
        return cs.join(*invites, peer_name=name, options=options)
    return cs.create("bench", peer_name=name, options=options)


def wait_trainers(swarm: "cs.Swarm", part: "TrainingPart", count: int) -> None:
    while len(part.progress.records) < count:
        swarm.runtime.call(part.refresh())


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
        self._source, self._target = source, target

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
    """Workers in the order of their start. They are killed at the end of the ``with`` block.

    What those with a name send is in ``messages``; an empty message says that its worker ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Worker] = {}
        self.messages: queue.Queue[tuple[str, Worker, dict[str, Any]]] = queue.Queue()

    def start(
        self, work: Callable[..., object] | list[Any], *arguments: object, name: str = "", **options: Any
    ) -> Worker:
        self.append(worker := Worker(work, *arguments, **options))
        if name:
            self.by_name[name] = worker
            threading.Thread(target=self._read, args=(name, worker), daemon=True).start()
        return worker

    def _read(self, name: str, worker: Worker) -> None:
        with suppress(EOFError, ValueError):  # it ended, or is closed
            while True:
                self.messages.put((name, worker, worker.receive()))
        self.messages.put((name, worker, {}))

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
