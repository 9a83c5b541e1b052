"""Passing on the state of a trainer that late joiners cannot reach."""

from __future__ import annotations

import numpy as np
import pytest

from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.errors import StateError
from colab_swarm.net.peers import PeerId
from colab_swarm.sim import HOME, SimNetwork, SimPeers
from colab_swarm.tensors.chunks import Snapshot, StateChunk
from colab_swarm.training.state import Mirror, StateSharing
from tests.training.test_state import BLOB, snapshot


class Scene:
    """A mirror that all peers can dial, donors and a late joiner that only dial out."""

    def __init__(self, donors: dict[str, Snapshot]) -> None:
        self.network = SimNetwork(HOME, seed=1)
        self.backbone = self.network.peer("backbone")
        self.donors = {name: self.client(name) for name in donors}
        self.joiner = self.client("joiner")
        self.network.introduce()
        self.sent_bytes = 0
        router = PrefixRouter(self.backbone)
        self.mirror = Mirror(router, "run", self.stored, donors=self.trainers, on_sent=self.on_sent)
        for name, peers in self.donors.items():
            StateSharing(PrefixRouter(peers), "run", lambda made=donors[name]: self.give(made))

    def client(self, name: str) -> SimPeers:
        return self.network.peer(name, listen=False)

    def on_sent(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes

    async def stored(self) -> Snapshot | None:
        return None

    async def trainers(self) -> list[PeerId]:
        return [peers.id for peers in self.donors.values()]

    @staticmethod
    async def give(made: Snapshot) -> Snapshot:
        return made

    async def download(self) -> Snapshot:
        for peers in self.donors.values():  # a trainer's own link is how it is called back
            (await peers.stream(self.backbone.id, StateChunk(), timeout_s=5)).reset()
        sharing = StateSharing(PrefixRouter(self.joiner), "run", lambda: self.give(snapshot()))
        return await sharing.download([self.backbone.id])


async def test_a_state_passes_through_whole() -> None:
    scene = Scene({"alice": snapshot()})
    got = await scene.download()
    assert np.array_equal(got.blob, BLOB) and got.manifest == snapshot().manifest
    assert scene.sent_bytes == BLOB.nbytes and scene.joiner.linked() == {scene.backbone.id}


async def test_a_donor_that_vanishes_half_way_is_replaced() -> None:
    scene = Scene({"alice": snapshot(), "bob": snapshot()})
    scene.network.when(lambda m: isinstance(m, StateChunk), sender="alice", nth=6).crash("alice")
    assert np.array_equal((await scene.download()).blob, BLOB)
    assert [fault.name for fault in scene.network.fired] == ["crash"]


async def test_a_donor_that_lies_is_passed_over() -> None:
    scene = Scene({"mallory": Snapshot(snapshot().manifest, np.zeros_like(BLOB)), "bob": snapshot()})
    assert np.array_equal((await scene.download()).blob, BLOB)


async def test_without_a_donor_in_reach_it_says_so() -> None:
    scene = Scene({"alice": snapshot()})
    sharing = StateSharing(PrefixRouter(scene.joiner), "run", lambda: scene.give(snapshot()))
    with pytest.raises(StateError, match="no trainer linked to this assistant"):
        await sharing.download([scene.backbone.id])
