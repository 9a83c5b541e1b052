"""``python -m colab_swarm.bench NAME [--quick] [--json PATH] [--plot PNG]``: run one benchmark, print its table."""

import argparse
import importlib

from colab_swarm.bench.harness import BenchReport

BENCHMARKS = {
    "link": "link:run",
    "relay": "link:run_relay",
    "dht": "dht:run",
    "averaging": "averaging:run",
    "groups": "dedloc:run_groups",
    "strategy": "dedloc:run_strategy",
    "albert": "dedloc:run_albert",
    "overhead": "overhead:run",
    "join": "overhead:run_join",
    "soak": "overhead:run_soak",
    "experts": "moe:run_experts",
    "expert-ordeal": "ordeal:run_experts",
    "moe-throughput": "moe:run_throughput",
    "moe-convergence": "moe:run_convergence",
    "beam-search": "dht:run_beam_search",
    "parameter-store": "vc_asgd:run_stores",
    "workunits": "vc_asgd:run_workunits",
    "vc-asgd": "vc_asgd:run",
    "work-ordeal": "vc_asgd:run_ordeal",
    "scale": "scale:run",
    "elastic": "elastic_consistency:run",
    "panel": "overhead:run_panel",
    "loss-per-byte": "loss_per_byte:run",
    "mailbox": "mailbox:run",
}
"""The functions that run them; ``run…`` is drawn by ``plot…``."""
PLOTTED = ("groups", "strategy", "albert", "moe-convergence", "vc-asgd", "elastic", "loss-per-byte")


def main(arguments: list[str] | None = None, program: str = "python -m colab_swarm.bench") -> None:
    """Run a benchmark and print its table; ``program`` is what the user typed, for the help."""
    parser = argparse.ArgumentParser(program, description="Run one benchmark, or all, and print its table.")
    parser.epilog = f"example: {program} link --quick --json link.json"
    parser.add_argument(
        "name", choices=[*BENCHMARKS, "all"], metavar="NAME", help=", ".join(BENCHMARKS) + ", all"
    )
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher figures")
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")
    parser.add_argument("--plot", metavar="PNG", help=f"{', '.join(PLOTTED)}: also draw them")
    parser.add_argument("--faithful", action="store_true", help="moe-convergence: the published rules")
    parser.add_argument("--vs", choices=["hivemind"], help="averaging: compare side by side")
    parser.add_argument("--python", metavar="PATH", help="averaging: of an environment with hivemind")
    options = parser.parse_args(arguments)
    of = dict(plot=PLOTTED, faithful=("moe-convergence",), vs=("averaging",), python=("averaging",))
    for option, allowed in of.items():
        if getattr(options, option) and options.name not in allowed:
            parser.error(f"--{option} is for {' or '.join(allowed)}, not {options.name}")
    if (options.vs is None) != (options.python is None):
        parser.error("use: averaging --vs hivemind --python PATH")
    more = {key: value for key in ("python", "faithful") if (value := getattr(options, key))}
    merged = BenchReport(options.name, options.quick)
    for name in BENCHMARKS if options.name == "all" else [options.name]:
        module_name, _, run = BENCHMARKS[name].partition(":")
        module = importlib.import_module(f"colab_swarm.bench.{module_name}")
        report = getattr(module, run)(quick=options.quick, **more)
        print(report.table(), flush=True)
        merged.rows += report.rows
        if options.plot:
            getattr(module, run.replace("run", "plot"))(report, options.plot)
    if options.json:
        merged.save(options.json)


if __name__ == "__main__":
    main()
