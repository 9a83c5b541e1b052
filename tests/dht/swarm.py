"""A simulated swarm of DHTs for these tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.sim import LAN, NetworkProfile, SimNetwork, SimPeers

NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


@dataclass
class Member:
    """One peer and its DHT."""

    peers: SimPeers
    dht: DHT


async def join(
    network: SimNetwork, name: str, entry: SimPeers | None = None, *, listen: bool = True
) -> Member:
    """Add a peer that joins through ``entry``."""
    peers = network.peer(name, listen=listen)
    member = Member(peers, DHT(peers, DHTSettings(), random.Random(name)))
    if entry is not None:
        await member.dht.bootstrap([entry.contact])
    return member


async def swarm(
    count: int = 8, *, profile: NetworkProfile = LAN, seed: int = 0
) -> tuple[SimNetwork, list[Member]]:
    """``count`` peers that all joined through alice."""
    network = SimNetwork(profile, seed=seed)
    members = [await join(network, NAMES[0])]
    for i in range(1, count):
        name = NAMES[i] if i < len(NAMES) else f"peer {i}"
        members.append(await join(network, name, members[0].peers))
    return network, members
