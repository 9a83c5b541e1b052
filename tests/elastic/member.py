"""A member of an elastic group, as a process: ``python -m tests.elastic.member INVITATION PEERS STEPS DIES_AT``.

Prints a JSON line with the moment (monotonic) at which it kills itself, in mid-backward of step ``DIES_AT``; or
the bound and inconsistency of the last step, if that is none of its steps.
"""

import json
import os
import signal
import sys
import time

import torch

import colab_swarm as cs
from colab_swarm.elastic.schedulers import CrashTolerant
from colab_swarm.elastic.steps import ElasticStep
from colab_swarm.swarm.swarm import Swarm
from tests.elastic.group import join_group

OPTIONS = cs.NetworkOptions(lan=False, use_relays=False)
SCHEDULER = CrashTolerant(1, 20.0)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))


def train(swarm: Swarm, peers: int, steps: int, dies_at: int) -> list[tuple[float, ElasticStep]]:
    """Time and result of each step."""
    net = network()
    optimizer = join_group(swarm, net, peers, scheduler=SCHEDULER, wait_s=60.0)
    steps_done: list[tuple[float, ElasticStep]] = []

    def die(_: torch.Tensor) -> None:
        if len(steps_done) == dies_at:
            print(json.dumps({"at": time.monotonic()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    net[0].bias.register_post_accumulate_grad_hook(die)
    for step in range(steps):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(17 * step + optimizer.member))
        (net(inputs) - inputs).square().mean().backward()
        result = optimizer.step()
        steps_done.append((time.monotonic(), result))
    optimizer.close()
    return steps_done


def main(invite: str, peers: int, steps: int, dies_at: int) -> None:
    with cs.join(invite, options=OPTIONS) as swarm:
        _, last = train(swarm, peers, steps, dies_at)[-1]
    print(
        json.dumps({"lost": last.lost, "inconsistency": last.inconsistency, "bound": last.bound}), flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
