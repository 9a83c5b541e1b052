"""Logs of twenty simulated runs, to compare two versions of the package: ``python -m tests.sim.golden >FILE``.

Each line has a run, one of its processes, the number and a digest of its events. Where two versions differ,
``python -m tests.sim.golden RUN`` prints that run's events. Digests of floats depend on the processor: make both
files on one machine.
"""

import sys
from collections.abc import Callable
from dataclasses import fields
from hashlib import sha256
from typing import Any

import numpy as np

import colab_swarm as cs
from colab_swarm.events import Event
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.sim.histories import State
from tests.sim.storm import Storm, endure, storm_of
from tests.training.toy import join_training, loss_of, model

STORMS = range(12)
PEERS = 3
SAMPLES = 2
STEPS = 12
WAYS: dict[str, dict[str, Any]] = {
    "compressed": {"compression": "int8"},
    "delayed": {"overlap": True},
    "local steps": {"local_steps": 4, "compression": "float16"},
    "sparse": {"local_steps": 4, "compression": "sparseloco"},
    "sparse, delayed": {"local_steps": 4, "compression": "sparseloco", "overlap": True},
    "late joiner": {},
    "killed": {},
}
IN_A_BUCKET = {
    "bucket": {"local_steps": 4, "compression": "sparseloco"},
    "bucket, killed": {"local_steps": 4, "compression": "float16"},
}
RUNS = (*(f"storm {number}" for number in STORMS), *WAYS, *IN_A_BUCKET)
Logs = dict[str, list[str]]


def text_of(event: Event | State) -> str:
    """Return the event with its fields, arrays as digests."""
    values = []
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, bytes | np.ndarray):
            value = sha256(bytes(value)).hexdigest()[:16]
        values.append(f"{field.name}={value!r}")
    return f"{type(event).__name__}({', '.join(values)})"


def logs_of_storm(storm: Storm) -> Logs:
    return {
        f"{number} {history.peer[:8]}": [text_of(event) for event in (*history.rounds, *history.states)]
        for number, history in enumerate(endure(storm))
    }


def logs_of_training(options: dict[str, Any], script: Callable[[Simulation], None], *, bucket: bool) -> Logs:
    logs: Logs = {}

    def work(swarm: Swarm) -> None:
        log = logs.setdefault(f"{len(logs)} {swarm.name}", [])
        swarm.events.listen(lambda event: log.append(text_of(event)))
        net = model()
        optimizer = join_training(swarm, net, target_batch_size=PEERS * SAMPLES, **options)
        rows = slice(0, SAMPLES)
        while optimizer.global_step < STEPS:
            loss_of(net, optimizer.global_step, rows).backward()
            optimizer.step(samples=SAMPLES)

    with cs.simulate(PEERS, network="home", seed=1, samples_per_s=1.0, mailbox=bucket) as simulation:
        script(simulation)
        simulation.run(work, seconds=1000.0)
    return logs


def script_of(name: str) -> Callable[[Simulation], None]:
    def late_joiner(simulation: Simulation) -> None:
        simulation.join("dave", at=10.0)

    def killed(simulation: Simulation) -> None:
        simulation.network.at(10.0).crash("bob")
        simulation.join("bob", at=20.0)

    if name == "late joiner":
        return late_joiner
    if name.endswith("killed"):
        return killed
    return lambda simulation: None


def logs_of(name: str) -> Logs:
    if name.startswith("storm"):
        return logs_of_storm(storm_of(int(name.split()[1])))
    if name in IN_A_BUCKET:
        return logs_of_training(IN_A_BUCKET[name], script_of(name), bucket=True)
    return logs_of_training(WAYS[name], script_of(name), bucket=False)


def main(names: list[str]) -> None:
    for name in names or RUNS:
        for process, log in sorted(logs_of(name).items()):
            if names:
                print(f"== {process}", *log, sep="\n")
            else:
                digest = sha256("\n".join(log).encode()).hexdigest()[:16]
                print(f"{name}: {process}: {len(log)} events, {digest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
