"""``python -m colab_swarm.bench NAME [--quick] [--json PATH] [--plot PNG]``: run one benchmark, print its table."""

from __future__ import annotations

import argparse
import importlib

from colab_swarm.bench.report import BenchReport

BENCHMARKS = (
    "link",
    "relay",
    "dht",
    "averaging",
    "groups",
    "strategy",
    "albert",
    "overhead",
    "join",
    "soak",
    "experts",
    "moe-throughput",
    "moe-convergence",
    "beam-search",
    "parameter-store",
    "workunits",
    "vc-asgd",
    "work-ordeal",
    "elastic",
    "panel",
)
"""Each is a module of this package with ``run(quick: bool) -> BenchReport``."""
PLOTTED = ("groups", "strategy", "albert", "moe-convergence", "vc-asgd", "elastic")
"""These also have ``plot(report, path)``, which draws the report's figures as the paper does."""
WITH_DATA = ("workunits", "vc-asgd", "elastic")
"""These take ``--data``."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m colab_swarm.bench", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher figures")
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")
    plotted, with_data = ", ".join(PLOTTED), ", ".join(WITH_DATA)
    parser.add_argument("--plot", metavar="PNG", help=f"also draw them ({plotted}; needs matplotlib)")
    parser.add_argument(
        "--faithful", action="store_true", help="moe-convergence: the published emulator's rules"
    )
    parser.add_argument("--data", metavar="NPZ", help=f"{with_data}: images of 32 x 32 instead of digits")
    parser.add_argument("--vs", choices=["hivemind"], help="averaging: compare side by side")
    parser.add_argument("--python", metavar="PATH", help="of an environment with the package of --vs")
    options = parser.parse_args(arguments)
    if (options.vs is None) != (options.python is None) or (options.vs and options.name != "averaging"):
        parser.error("use: averaging --vs hivemind --python PATH")
    if options.faithful and options.name != "moe-convergence":
        parser.error("use: moe-convergence --faithful")
    if options.data and options.name not in WITH_DATA:
        parser.error(f"--data is for {' or '.join(WITH_DATA)}, not {options.name}")
    if options.plot and options.name not in PLOTTED:
        parser.error(f"--plot draws {' or '.join(PLOTTED)}, not {options.name}")
    more = {"python": options.python, "faithful": options.faithful, "data": options.data}
    merged = BenchReport(options.name, options.quick)
    for name in BENCHMARKS if options.name == "all" else [options.name]:
        module = importlib.import_module(f"colab_swarm.bench.{name.replace('-', '_')}")
        report = module.run(quick=options.quick, **{key: value for key, value in more.items() if value})
        print(report.table(), flush=True)
        merged.rows += report.rows
        if options.plot:
            module.plot(report, options.plot)
    if options.json:
        merged.save(options.json)


if __name__ == "__main__":
    main()
