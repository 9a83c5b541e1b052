"""A simulated group that trains the toy model of `tests.training.toy`, and what one process makes of it."""

from __future__ import annotations

from typing import Any

import torch

from colab_swarm.elastic.group import PeerGroup
from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.settings import ElasticSettings
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import BATCH, loss_of, model, parameters_of

LR = 0.05


def join_group(swarm: Swarm, net: torch.nn.Module, peers: int, **options: Any) -> ElasticOptimizer:
    services = swarm.services
    settings = ElasticSettings(f"{swarm.run_id}/elastic/model", peers, **options)
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    return ElasticOptimizer(swarm.runtime, sgd, settings, PeerGroup(services), services.events, services.pace)


def rows_of(member: int, peers: int) -> slice:
    """A member's part of a batch; all have equally many rows."""
    each = BATCH // peers
    return slice(member * each, (member + 1) * each)


def reference(steps: int, peers: int = 2, seed: int = 0) -> torch.Tensor:
    """What one process with all members' rows gets."""
    net = model(seed)
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        loss_of(net, step, slice(0, BATCH // peers * peers)).backward()
        sgd.step()
    return parameters_of(net)
