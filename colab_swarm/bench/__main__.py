"""``python -m colab_swarm.bench NAME [--quick] [--json PATH] [--plot PNG]``: run one benchmark, print its table."""

from __future__ import annotations

import argparse
import importlib

from colab_swarm.bench.harness import BenchReport

BENCHMARKS = {
    "link": "link:run",
    "relay": "link:run_relay",
    "dht": "dht:run",
    "averaging": "averaging:run",
    "groups": "groups:run",
    "strategy": "strategy:run",
    "albert": "albert:run",
    "overhead": "overhead:run",
    "join": "join:run",
    "soak": "overhead:run_soak",
    "experts": "moe_throughput:run_experts",
    "moe-throughput": "moe_throughput:run",
    "moe-convergence": "moe_convergence:run",
    "beam-search": "dht:run_beam_search",
    "parameter-store": "parameter_store:run",
    "workunits": "workunits:run",
    "vc-asgd": "vc_asgd:run",
    "work-ordeal": "workunits:run_ordeal",
    "elastic": "elastic_consistency:run_all",
    "panel": "panel:run",
}
OPTIONS = {
    "plot": ("groups", "strategy", "albert", "moe-convergence", "vc-asgd", "elastic"),
    "data": ("workunits", "vc-asgd", "elastic"),
    "faithful": ("moe-convergence",),
    "python": ("averaging",),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m colab_swarm.bench", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher figures")
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")
    plotted, with_data = (", ".join(OPTIONS[option]) for option in ("plot", "data"))
    parser.add_argument("--plot", metavar="PNG", help=f"also draw them ({plotted}; needs matplotlib)")
    parser.add_argument("--faithful", action="store_true", help="moe-convergence: the published rules")
    parser.add_argument("--data", metavar="NPZ", help=f"{with_data}: images of 32 x 32 instead of digits")
    parser.add_argument("--vs", choices=["hivemind"], help="averaging: compare side by side")
    parser.add_argument("--python", metavar="PATH", help="of an environment with the package of --vs")
    options = parser.parse_args(arguments)
    _check(parser, options)
    more = {key: value for key in ("python", "faithful", "data") if (value := getattr(options, key))}
    merged = BenchReport(options.name, options.quick)
    for name in BENCHMARKS if options.name == "all" else [options.name]:
        module_name, _, run = BENCHMARKS[name].partition(":")
        module = importlib.import_module(f"colab_swarm.bench.{module_name}")
        report = getattr(module, run)(quick=options.quick, **more)
        print(report.table(), flush=True)
        merged.rows += report.rows
        if options.plot:
            module.plot(report, options.plot)
    if options.json:
        merged.save(options.json)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.vs is None) != (options.python is None):
        parser.error("use: averaging --vs hivemind --python PATH")
    for option, names in OPTIONS.items():
        if getattr(options, option) and options.name not in names:
            parser.error(f"--{option} is for {' or '.join(names)}, not {options.name}")


if __name__ == "__main__":
    main()
