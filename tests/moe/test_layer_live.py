"""The layer over real encrypted links on loopback, DHT, directory and servers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from colab_swarm.dht.service import DHT, DHTSettings, RunServices
from colab_swarm.events import EventLog, ExpertBanned
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
from colab_swarm.moe.grid import Grid, Index
from colab_swarm.moe.layer import MixtureOfExperts, MixtureSettings, mixing_weights, priorities
from colab_swarm.moe.server import ExpertServer
from colab_swarm.net.node import Node
from colab_swarm.runtime import Runtime
from tests.net.swarm import start

GRID, DIM = Grid("ffn", (2, 2)), 4
RULE = ExpertRule(partial(torch.optim.Adam, lr=0.01))


@dataclass
class Member:
    """One peer; only hosts have experts."""

    node: Node
    directory: Directory
    server: ExpertServer
    experts: dict[str, Expert]
    events: EventLog


class Live:
    """Peers on a runtime of their own: alice trains, bob and carol host half of the grid each."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.alice, self.bob, self.carol = self.runtime.call(self._start())
        self.experts = self.bob.experts | self.carol.experts
        self.calls = ExpertCalls(self.alice.node, self.alice.directory, self.runtime, timeout_s=10.0)

    async def _start(self) -> list[Member]:
        members: list[Member] = []
        for name, row in (("alice", None), ("bob", 0), ("carol", 1)):
            node = await start(name)
            dht = DHT(node, DHTSettings(), random.Random(name))
            await dht.bootstrap([member.node.contact for member in members])
            events = EventLog()
            directory = Directory(RunServices(node, dht, events, random.Random(name), "run"))
            member = Member(node, directory, ExpertServer(node, events), {}, events)
            for index in [] if row is None else [(row, 0), (row, 1)]:
                self._host(member, index)
            members.append(member)
        for member in members[1:]:
            experts = {uid: (expert.shape, expert.step) for uid, expert in member.experts.items()}
            await member.directory.announce(GRID, experts)
        return members

    def _host(self, member: Member, index: Index) -> None:
        expert = Expert(GRID.uid(index), FeedForward(DIM, 8), RULE, (DIM,))
        member.experts[expert.uid] = expert
        member.server.add(expert)

    def layer(self, k: int = 4) -> MixtureOfExperts:
        return MixtureOfExperts(self.calls, GRID, DIM, MixtureSettings(k=k))

    def kill(self, *members: Member) -> None:
        for member in members:
            self.runtime.call(member.server.close())
            self.runtime.call(member.node.close())

    def close(self) -> None:
        self.kill(self.alice, self.bob, self.carol)
        self.runtime.close()


@pytest.fixture
def live() -> Iterator[Live]:
    torch.manual_seed(0)
    found = Live()
    yield found
    found.close()


def locally(layer: MixtureOfExperts, experts: Sequence[Expert], x: Tensor) -> Tensor:
    """Equation 1 over all experts."""
    indices = torch.tensor([GRID.index(expert.uid) for expert in experts]).expand(len(x), -1, -1)
    logits = priorities(layer.gating(x), indices)
    weights = mixing_weights(logits, torch.ones_like(logits, dtype=torch.bool))
    outputs = torch.stack([expert._module(x) for expert in experts], 1)
    return (weights[:, :, None] * outputs).sum(1)


def test_values_gradients_and_learning_are_those_of_local_modules(live: Live) -> None:
    layer, replicas = live.layer(), [copy.deepcopy(expert) for expert in live.experts.values()]
    optimizers = [RULE.optimizer(replica._module.parameters()) for replica in replicas]
    twin = copy.deepcopy(layer)
    for _ in range(5):
        x, target = torch.randn(6, DIM), torch.randn(6, DIM)
        far, near = x.clone().requires_grad_(), x.clone().requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        layer.zero_grad()
        twin.zero_grad()
        mixed, expected = layer(far), locally(twin, replicas, near)
        (mixed * target).sum().backward()
        (expected * target).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(far.grad, near.grad, atol=1e-5, rtol=0)
        for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=0)
    for expert, replica in zip(live.experts.values(), replicas, strict=True):
        assert expert.step == 5
        for a, b in zip(expert._module.parameters(), replica._module.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_host_killed_between_forward_and_backward_costs_only_its_part(live: Live) -> None:
    layer, x = live.layer(), torch.randn(6, DIM, requires_grad=True)
    mixed = layer(x)
    live.kill(live.bob)
    mixed.square().sum().backward()
    assert layer.statistics().lost_gradients == 2 and len(live.alice.events.recent(ExpertBanned)) == 2
    assert x.grad is not None and x.grad.any() and layer.gating.maps.weight.grad is not None
    assert [expert.step for expert in live.carol.experts.values()] == [1, 1]
    assert layer(x).shape == x.shape, "the other host is enough"
