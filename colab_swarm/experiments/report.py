"""The report that an experiment returns: its figures and their plots. `claims` compares them with the paper's."""

import math
import statistics
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Figure(NamedTuple):
    """One figure. Its ``key`` never changes, because other programs read it from the JSON."""

    key: str
    value: float
    unit: str
    note: str


@dataclass
class Report:
    """The figures of a run; their keys begin with ``name``. ``curves`` are also drawn, each for every seed."""

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

    def add_seeds(self, key: str, values: Sequence[float], unit: str = "", note: str = "") -> None:
        """Add the mean over seeds and, if there are several seeds, its standard error as ``KEY_error``."""
        self.add(key, statistics.mean(values), unit, note or f"{len(values)} seeds")
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            self.add(f"{key}_error", error, unit, "standard error of the mean")

    @property
    def figures(self) -> dict[str, float]:
        """The values by key, without the report's name."""
        return {row.key.removeprefix(f"{self.name}."): row.value for row in self.rows}


def reports(name: str) -> Callable[[Callable[..., None]], Callable[..., Report]]:
    """Turn a function that fills a report into ``run(quick=…, **options)``, which returns the report."""

    def decorate(measure: Callable[..., None]) -> Callable[..., Report]:
        @wraps(measure)
        def run(quick: bool = False, **options: Any) -> Report:
            report = Report(name, quick)
            measure(report, **options)
            return report

        return run

    return decorate


def simulated(main: Coroutine[Any, Any, T]) -> T:
    """Return ``run_virtual(main)``, run on a new thread, because in a notebook this thread has a loop already."""
    # imported here, because benchmarks measure the memory of processes that import this module
    from colab_swarm.sim import run_virtual

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run_virtual, main).result()


Lines: TypeAlias = dict[str, tuple[Iterable[Any], Iterable[Any], str]]


def draw(path: str | Path, panels: Sequence[tuple[dict[str, Any], Lines]]) -> None:
    """Save panels side by side as a PNG. A panel has settings of the axes, and for each label x, y and a format."""
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
