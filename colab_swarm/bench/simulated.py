"""One averaging round of peers with given bandwidths, on the simulated network: real groups, real bytes, real sums."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

from colab_swarm.averaging.group import GroupFormation, GroupFormationSettings, Sharing, Strategy, Ticket
from colab_swarm.averaging.round import Averager, AveragingSettings, RoundResult
from colab_swarm.net.peers import Contact
from colab_swarm.sim import HostProfile, NetworkProfile, SimNetwork, SimPeers, run_virtual

LATENCY_S = 0.0003
"""One way: the paper's peers are in one cloud region."""
PATIENT = AveragingSettings(round_timeout_s=600.0, patience_s=60.0)


@dataclass(frozen=True)
class SimulatedHost:
    """A peer with a symmetric connection; one that does not train assists."""

    bps: float
    trains: bool = True


@dataclass(frozen=True)
class Vector:
    """What is averaged: so many values, but ``scale`` times fewer are moved, over as much slower connections."""

    numel: int
    codec: str = "float32"
    scale: int = 1


def ticket(host: SimulatedHost, vector: Vector) -> Ticket:
    """What the host brings to a round, its bandwidth known."""
    scaled = Ticket("bench", 0, b"lineage", float(host.trains), vector.numel // vector.scale, b"schema")
    rate_bps = host.bps / vector.scale
    return msgspec.structs.replace(
        scaled,
        codec=vector.codec,
        mean_codec=vector.codec,
        upload_bps=rate_bps,
        download_bps=rate_bps,
        assists=not host.trains,
    )


def simulate_round(hosts: Sequence[SimulatedHost], strategy: Strategy, vector: Vector) -> float:
    """Seconds of a round until the last peer has its means."""
    if sum(host.trains for host in hosts) < 2:
        return 0.0
    with ThreadPoolExecutor(1) as pool:  # in a notebook, this thread has a loop already
        return pool.submit(run_virtual, _round(hosts, strategy, vector)).result()


async def _round(hosts: Sequence[SimulatedHost], strategy: Strategy, vector: Vector) -> float:
    network = SimNetwork(NetworkProfile("bench", LATENCY_S))
    peers = [
        network.peer(f"p{i}", host_profile=HostProfile(host.bps / vector.scale, host.bps / vector.scale))
        for i, host in enumerate(hosts)
    ]
    network.introduce()
    tickets = {peer.id: ticket(host, vector) for peer, host in zip(peers, hosts, strict=True)}
    gathering = GroupFormation(next(iter(tickets.values())), now=0.0, settings=GroupFormationSettings())
    for peer, brought in tickets.items():
        gathering.on_join(brought, Contact(peer, (f"sim://{peer.hex()}",)))
    group = gathering.form(bytes(16), strategy)

    async def take_part(peer: SimPeers) -> RoundResult:
        averager, brought = Averager(peer, PATIENT), tickets[peer.id]
        if brought.assists:
            return await averager.reduce(group)
        values = np.full(brought.numel, float(peers.index(peer)), np.float32)
        result = await averager.average(group, values)
        if result.kept_local:
            raise RuntimeError(f"{peer.name} did not get all means: {result}")
        return result

    results = await asyncio.gather(*map(take_part, peers))
    return max(result.seconds["total"] for result in results)


def one_server(tickets: Sequence[Ticket]) -> Sharing:
    """A strategy: the fastest peer reduces everything; one that assists, if several are as fast."""
    rates = [(brought.upload_bps or 0.0, brought.assists) for brought in tickets]
    server = rates.index(max(rates))
    return Sharing(tuple(float(index == server) for index in range(len(tickets))))
