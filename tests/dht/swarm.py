"""A simulated swarm of DHTs for these tests."""

import random
from dataclasses import dataclass

import msgspec

from colab_swarm.dht.records import Record
from colab_swarm.dht.service import DHT, key_id
from colab_swarm.sim import LAN, NetworkProfile, SimNetwork, SimPeers

NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


@dataclass
class Member:
    peers: SimPeers
    dht: DHT


async def join(network: SimNetwork, name: str, entry: SimPeers | None = None, listen: bool = True) -> Member:
    peers = network.peer(name, listen=listen)
    member = Member(peers, DHT(peers, random.Random(name)))
    if entry is not None:
        await member.dht.bootstrap([entry.contact])
    return member


async def swarm(
    count: int = 8, *, profile: NetworkProfile = LAN, seed: int = 0, upkeep: bool = False
) -> tuple[SimNetwork, list[Member]]:
    network = SimNetwork(profile, seed=seed)
    members = [await join(network, NAMES[0])]
    for i in range(1, count):
        name = NAMES[i] if i < len(NAMES) else f"peer {i}"
        members.append(await join(network, name, members[0].peers))
    for member in members if upkeep else ():
        member.dht.start()
    return network, members


def holders(members: list[Member], key: str) -> list[Member]:
    return [member for member in members if key_id(key) in member.dht._storage]


def forged(owner: SimPeers) -> Record:
    at, value = owner.time() + 60, msgspec.msgpack.encode("false")
    return Record(value, at, int(at * 1e6), 60.0, owner.public_key, b"", bytes(64))
