"""The result of a benchmark, printed and saved."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One figure. ``key`` is stable, because other programs read it from the JSON."""

    key: str
    value: float
    unit: str
    note: str = ""


@dataclass
class BenchReport:
    """The figures of one benchmark run."""

    name: str
    quick: bool
    rows: list[Figure] = field(default_factory=list)

    def add(self, key: str, value: float, unit: str = "", note: str = "") -> None:
        """Add one figure."""
        self.rows.append(Figure(key, float(value), unit, note))

    def table(self) -> str:
        """Return the figures as aligned text."""
        width = max((len(row.key) for row in self.rows), default=0)
        lines = [f"{self.name}{' (quick)' if self.quick else ''}"]
        lines += [f"  {r.key:<{width}}  {r.value:>12,.4g} {r.unit:<12} {r.note}".rstrip() for r in self.rows]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write ``{"metrics": {key: number}, "environment": {...}}``."""
        metrics = {row.key: row.value for row in self.rows}
        Path(path).write_text(json.dumps({"metrics": metrics, "environment": environment()}, indent=1))


def environment() -> dict[str, str | int | float]:
    """Describe the machine and the installed versions."""
    found: dict[str, str | int | float] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count() or 0,
        "load_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else -1.0,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for package in ("colab-swarm", "torch", "aiohttp", "cryptography", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
