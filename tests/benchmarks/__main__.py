"""``python -m tests.benchmarks NAME [--quick] [--json PATH] [--plot PNG]``: run one benchmark, print its table."""

import argparse
import importlib
import time

from colab_swarm.experiments.report import Report
from tests.benchmarks.harness import save, store_findings, table

BENCHMARKS = {
    "link": "tests.benchmarks.link:run",
    "relay": "tests.benchmarks.link:run_relay",
    "dht": "tests.benchmarks.dht:run",
    "averaging": "tests.benchmarks.averaging:run",
    "groups": "colab_swarm.experiments.dedloc:run_groups",
    "strategy": "colab_swarm.experiments.dedloc:run_strategy",
    "albert": "colab_swarm.experiments.dedloc:run_albert",
    "swav": "colab_swarm.experiments.dedloc:run_swav",
    "overhead": "tests.benchmarks.overhead:run",
    "join": "tests.benchmarks.overhead:run_join",
    "soak": "tests.benchmarks.overhead:run_soak",
    "experts": "tests.benchmarks.experts:run_experts",
    "expert-ordeal": "tests.benchmarks.ordeal:run_experts",
    "moe-throughput": "colab_swarm.experiments.learning_at_home:run_throughput",
    "moe-convergence": "colab_swarm.experiments.learning_at_home:run_convergence",
    "moe-transfers": "colab_swarm.experiments.learning_at_home:run_transfers",
    "beam-search": "tests.benchmarks.dht:run_beam_search",
    "parameter-store": "tests.benchmarks.work_units:run_stores",
    "workunits": "tests.benchmarks.work_units:run_workunits",
    "vc-asgd": "colab_swarm.experiments.vc_asgd:run",
    "preemption": "colab_swarm.experiments.vc_asgd:run_preemption",
    "work-ordeal": "tests.benchmarks.work_units:run_ordeal",
    "scale": "tests.benchmarks.scale:run",
    "elastic": "tests.benchmarks.elastic:run",
    "panel": "tests.benchmarks.overhead:run_panel",
    "loss-per-byte": "colab_swarm.experiments.loss_per_byte:run",
    "mailbox": "tests.benchmarks.mailbox:run",
    "gpu": "tests.benchmarks.gpu:run",
}
"""The functions that run them; what ``run…`` returns, ``plot…`` draws."""
STORED = ("groups", "strategy", "albert", "swav", "moe-throughput", "moe-transfers", "beam-search")
STORED += ("moe-convergence", "vc-asgd", "preemption", "elastic", "loss-per-byte")
PLOTTED = ("groups", "strategy", "albert", "moe-convergence", "vc-asgd", "elastic", "loss-per-byte")


def main(arguments: list[str] | None = None) -> None:
    """Run a benchmark and print its table."""
    about = "Run one benchmark, or all, and print its table."
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=about)
    parser.epilog = "example: python -m tests.benchmarks link --quick --json link.json"
    parser.add_argument(
        "name", choices=[*BENCHMARKS, "all"], metavar="NAME", help=", ".join(BENCHMARKS) + ", all"
    )
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher figures")
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")
    parser.add_argument("--store", action="store_true", help="keep a full preset's verdicts in the package")
    parser.add_argument("--plot", metavar="PNG", help=f"{', '.join(PLOTTED)}: also draw them")
    parser.add_argument("--faithful", action="store_true", help="moe-convergence: the published rules")
    parser.add_argument("--vs", choices=["hivemind"], help="averaging: compare side by side")
    parser.add_argument("--python", metavar="PATH", help="averaging: of an environment with hivemind")
    options = parser.parse_args(arguments)
    of = dict(
        plot=PLOTTED, faithful=("moe-convergence",), vs=("averaging",), python=("averaging",), store=STORED
    )
    for option, allowed in of.items():
        if getattr(options, option) and options.name not in allowed:
            parser.error(f"--{option} is for {' or '.join(allowed)}, not {options.name}")
    if (options.vs is None) != (options.python is None):
        parser.error("use: averaging --vs hivemind --python PATH")
    if options.store and (options.quick or options.faithful):
        parser.error("--store is for full presets, without --quick or --faithful")
    more = {}
    for key in ("python", "faithful"):
        if getattr(options, key):
            more[key] = getattr(options, key)
    merged = Report(options.name, options.quick)
    for name in BENCHMARKS if options.name == "all" else [options.name]:
        module_name, _, run = BENCHMARKS[name].partition(":")
        module = importlib.import_module(module_name)
        began = time.process_time()
        report = getattr(module, run)(quick=options.quick, **more)
        print(table(report), flush=True)
        if options.store:
            store_findings(report, minutes=(time.process_time() - began) / 60)
        merged.rows += report.rows
        if options.plot:
            getattr(module, run.replace("run", "plot"))(report, options.plot)
    if options.json:
        save(merged, options.json)


if __name__ == "__main__":
    main()
