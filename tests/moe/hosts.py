"""A simulated run whose peers host small experts, for these tests."""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from colab_swarm.dht.service import DHT, RunServices
from colab_swarm.events import Event, EventLog
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import Expert, ExpertRule, HostPlan, measure
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ExpertHost, HostResources
from colab_swarm.moe.saves import ReplicaStore
from colab_swarm.runtime import Runner
from colab_swarm.sim import LAN, SimNetwork, SimPeers
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import pack

GRID = Grid("ffn", (2, 3))
RULE = ExpertRule(lambda parameters: torch.optim.Adam(parameters, lr=0.1))


def make() -> FeedForward:
    return FeedForward(4, 8)


MODEL = measure(Expert("ffn", make(), RULE, (4,)))
PLAN = HostPlan(GRID, make, RULE, (4,), MODEL, save_s=30.0, takeover_s=10.0, spare=0)


def host_of(resources: HostResources, plan: HostPlan) -> ExpertHost:
    """Return a host whose coroutines the test awaits itself."""
    return ExpertHost(cast(Runner, None), resources, plan, repr)


@dataclass
class Member:
    """One peer of the run."""

    peers: SimPeers
    services: RunServices
    resources: HostResources

    def events(self, kind: type[Event]) -> list[Event]:
        return self.services.events.recent(kind)


class Run:
    """Peers that join through alice, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entry: SimPeers | None = None

    @cached_property
    def network(self) -> SimNetwork:
        return SimNetwork(LAN, seed=0)

    def begin_again(self) -> None:
        """Let the next peer join nobody."""
        self._entry = None

    async def join(self, name: str, *, folder: Path | None = None) -> Member:
        peers = self.network.peer(name)
        dht = DHT(peers, random.Random(name))
        if self._entry is not None:
            await dht.bootstrap([self._entry.contact])
        self._entry = self._entry or peers
        dht.start()
        services = RunServices(peers, dht, EventLog(), random.Random(name), "run")
        peers.when_down(lambda: [*dht.kill()])
        directory = Directory(services)
        resources = HostResources(services, directory, folder or self._folder / name)
        return Member(peers, services, resources)

    async def host(
        self,
        name: str,
        count: int = 1,
        *,
        capacity: int | None = None,
        uids: tuple[str, ...] | None = None,
        **settings: Any,
    ) -> tuple[Member, ExpertHost]:
        """A new peer that hosts ``count`` experts, and may take over more."""
        member = await self.join(name)
        plan = replace(PLAN, count=count, capacity=capacity or count, uids=uids, **settings)
        hosting = host_of(member.resources, plan)
        member.peers.when_down(hosting.kill)
        await member.resources.saves.start()
        await hosting.start()
        return member, hosting


def train(hosting: ExpertHost, steps: int = 1) -> None:
    for expert in hosting.experts.values():
        for _ in range(steps):
            expert.backward(torch.rand(2, 4), torch.rand(2, 4))


def saved(uid: str = "ffn.0.0", *, step: int = 1, value: float = 0.0, size: int = 300_000) -> Snapshot:
    """A made-up state of some chunks, of which the last holds ``value``."""
    state = {"big": torch.arange(size), "last": torch.full((10,), value), "step": step}
    return Snapshot.of(uid.encode(), step, pack(state))


def shelf_of(member: Member) -> ReplicaStore:
    return member.resources.saves.store
