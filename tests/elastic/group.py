"""A simulated group that trains the toy model of `tests.training.toy`, and one process as reference."""

from typing import Any

import torch

from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.steps import ElasticSettings, ElasticStep
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import BATCH, loss_of, model, parameters_of

LR = 0.05


def join_group(swarm: Swarm, net: torch.nn.Module, peers: int, **options: Any) -> ElasticOptimizer:
    settings = ElasticSettings(f"{swarm.run_id}/elastic/model", peers, **options)
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    return ElasticOptimizer(swarm.runtime, sgd, settings, swarm.services)


def take(optimizer: ElasticOptimizer, net: torch.nn.Module, step: int, peers: int = 2) -> ElasticStep:
    """A step with this member's rows of a batch."""
    loss_of(net, step, rows_of(optimizer.member, peers)).backward()
    return optimizer.step(samples=5)


def rows_of(member: int, peers: int) -> slice:
    each = BATCH // peers
    return slice(member * each, (member + 1) * each)


def reference(steps: int, peers: int = 2, seed: int = 0) -> torch.Tensor:
    """Parameters of one process that trains on all members' rows."""
    net = model(seed)
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        loss_of(net, step, slice(0, BATCH // peers * peers)).backward()
        sgd.step()
    return parameters_of(net)
