"""``python -m colab_swarm.bench NAME [--quick] [--json PATH]``: run one benchmark, print its table."""

from __future__ import annotations

import argparse
import importlib
from typing import cast

from colab_swarm.bench.report import Report

BENCHMARKS = ("link", "relay", "dht", "averaging", "overhead", "join", "soak")
"""Each is a module of this package with ``run(quick: bool) -> Report``."""


def run(name: str, *, quick: bool) -> Report:
    """Run one benchmark by name."""
    return cast(Report, importlib.import_module(f"colab_swarm.bench.{name}").run(quick=quick))


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m colab_swarm.bench", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher figures")
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    merged = Report(options.name, options.quick)
    for name in BENCHMARKS if options.name == "all" else [options.name]:
        report = run(name, quick=options.quick)
        print(report.table(), flush=True)
        merged.rows += report.rows
    if options.json:
        merged.save(options.json)


if __name__ == "__main__":
    main()
