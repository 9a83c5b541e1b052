"""Replicas of saves on the simulated network: what is sent, what survives crashes, and peers that lie."""

import asyncio
import random
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from colab_swarm.dht import records
from colab_swarm.dht.service import RunServices
from colab_swarm.errors import CallRefused, PeerError, StateError
from colab_swarm.events import EventLog
from colab_swarm.moe import saves as expert_saves
from colab_swarm.net.peers import Ack, Contact, Message, PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, SimNetwork, SimPeers
from colab_swarm.tensors.chunks import Manifest, Snapshot, StateChunk
from colab_swarm.tensors.statedict import pack
from tests.dht.swarm import join
from tests.moe.hosts import GRID


class Member(NamedTuple):
    """One peer of the run."""

    peers: SimPeers
    services: RunServices
    saves: expert_saves.ExpertSaves


class Scene:
    """Peers on a simulated LAN, each with a folder of its own: alice saves, the others are holders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, Member] = {}

    @cached_property
    def network(self) -> SimNetwork:
        return SimNetwork(LAN, seed=0)

    async def join(self, name: str) -> Member:
        first = next((member.peers for member in self.members.values()), None)
        joined = await join(self.network, name, first)
        peers, dht = joined.peers, joined.dht
        dht.start()
        peers.when_down(lambda: [*dht.kill()])
        services = RunServices(peers, dht, EventLog(), random.Random(name), "run")
        store = expert_saves.ReplicaStore(self.folder / name, me=peers.id)
        self.members[name] = Member(peers, services, expert_saves.ExpertSaves(services, store))
        return self.members[name]

    async def open(self, *names: str) -> None:
        for name in names:
            await (await self.join(name)).saves.start()

    def saves(self, name: str) -> expert_saves.ExpertSaves:
        return self.members[name].saves

    async def save(self, state: Snapshot, copies: int = 2) -> expert_saves.SaveResult:
        alice = self.saves("alice")
        return await alice.save(state, await alice.others(), copies)

    async def due(self, copies: int) -> bool:
        alice = self.saves("alice")
        return alice.due("ffn.0.0", 1, await alice.others(), copies)

    def name(self, peer: PeerId) -> str:
        return next(name for name, member in self.members.items() if member.peers.id == peer)

    def reader(self, kept: expert_saves.SaveResult) -> expert_saves.ExpertSaves:
        """Return the saves of a peer that holds none of it."""
        holders = {"alice", *map(self.name, kept.holders)}
        return next(self.saves(name) for name in self.members if name not in holders)

    def holders(self, step: int) -> set[str]:
        def has(member: Member) -> bool:
            return any(save.manifest.step == step for save in member.saves.store.saves())

        return {name for name, member in self.members.items() if has(member)}

    def crash(self, name: str) -> None:
        self.network.now().crash(name)


def saved(uid: str = "ffn.0.0", *, step: int = 1, value: float = 0.0, size: int = 300_000) -> Snapshot:
    """A made-up state of some chunks, of which the last holds ``value``."""
    state = {"big": torch.arange(size), "last": torch.full((10,), value), "step": step}
    return Snapshot.of(uid.encode(), step, pack(state))


LIMIT_BYTES = saved().blob.nbytes


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def fetched(saves: expert_saves.ExpertSaves, uid: str = "ffn.0.0") -> Snapshot:
    _, place = (await saves.claims(uid))[0]
    return await saves.fetch(uid, place, limit_bytes=LIMIT_BYTES)


async def test_an_equal_save_is_renewed_and_not_sent_again(scene: Scene) -> None:
    await scene.open("alice", "bob")
    alice, bob = (scene.members[name].peers for name in ("alice", "bob"))
    sent_bytes = []
    for step in (1, 2, 2):
        last = await scene.save(saved(step=step))
        sent_bytes.append(alice.statistics(bob.id).sent_bytes)
        await asyncio.sleep(60)
    first, second, third = sent_bytes
    assert second - first > saved().blob.nbytes > 100 * (third - second)
    assert scene.saves("alice").safe["ffn.0.0"].step == 2
    renewed, before = scene.members["bob"].saves.store.saves()
    assert (renewed.manifest.step, before.manifest.step) == (2, 1) and renewed.at > last.at - 60


async def test_a_save_that_a_holder_lost_does_not_drop_the_one_before(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol")
    await scene.save(saved(step=1))
    chunk = scene.network.when(lambda m: isinstance(m, StateChunk), sender="alice", receiver="carol", nth=2)
    chunk.crash("carol")
    await scene.save(saved(step=2, value=1.0))
    assert [fault.name for fault in scene.network.fired] == ["crash"]
    assert scene.holders(1) == {"alice", "bob", "carol"} and scene.holders(2) == {"alice", "bob"}
    await scene.open("dave")
    await scene.save(saved(step=3, value=2.0))
    assert scene.holders(3) == {"alice", "bob", "dave"} and scene.holders(2) == {"alice", "bob"}
    assert scene.holders(1) == {"carol"}  # who is away


async def test_a_save_that_no_holder_accepts_does_not_hide_the_previous_one(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol", "dave")
    first = await scene.save(saved(step=1))
    for name in ("bob", "carol", "dave"):
        scene.members[name].saves.store._quota_bytes = 1000
    for step in (2, 3):
        assert not (await scene.save(saved(step=step, value=float(step)))).holders
    assert len(first.holders) == 2 and not (await scene.save(saved("ffn.0.1"))).holders
    assert scene.saves("alice").safe["ffn.0.1"].step == 1, "there is no better one"
    scene.crash("alice")
    reader = scene.saves("dave")
    (_, lost), (_, safe) = await reader.claims("ffn.0.0")
    assert (lost.step, safe.step) == (3, 1) and scene.network.fired
    with pytest.raises(StateError, match="none of 1 holders"):
        await reader.fetch("ffn.0.0", lost, limit_bytes=LIMIT_BYTES)
    again = await reader.fetch("ffn.0.0", safe, limit_bytes=LIMIT_BYTES)
    assert np.array_equal(again.blob, saved(step=1).blob)


async def test_a_holder_that_failed_is_left_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.open("alice")
    alice, tried = scene.saves("alice"), list[PeerId]()
    away = PeerId(bytes(32))

    async def fails(peer: PeerId, message: Any, *args: Any, **options: Any) -> Any:
        tried.append(peer)
        raise PeerError("full, or not there")

    monkeypatch.setattr(scene.members["alice"].peers, "call", fails)
    for i in range(3):
        await alice.save(saved(f"ffn.0.{i}"), {away}, 1)
    assert tried.count(away) == 1
    await asyncio.sleep(60)
    await alice.save(saved("ffn.0.0"), {away}, 1)
    assert tried.count(away) == 2


async def test_a_save_whose_record_no_peer_stores_is_reported(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.open("alice")
    monkeypatch.setattr(records, "TOTAL_BYTES", 0)
    assert "no peer stored the record" in str((await scene.save(saved())).fault)


async def test_a_lost_holder_is_replaced(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol")
    lost = scene.name(*(await scene.save(saved(step=1), copies=1)).holders)
    assert not await scene.due(1)
    assert {lost} == {*map(scene.name, (await scene.save(saved(step=1), copies=1)).holders)}
    scene.crash(lost)
    await asyncio.sleep(200)
    assert await scene.due(1)
    (other,) = (await scene.save(saved(step=1), copies=1)).holders
    assert scene.name(other) != lost and not await scene.due(1)
    assert scene.network.fired


async def test_a_save_comes_back_from_holders_when_its_host_is_dead(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol", "dave")
    kept = await scene.save(saved(step=7))
    assert len(kept.holders) == 2 and kept.fault is None
    liar = scene.members[scene.name(min(kept.holders))]
    lies: list[bytes] = []

    async def lie(ask: expert_saves.FetchSave, stream: Any) -> None:
        for digest in ask.digests:
            lies.append(digest)
            await stream.send(StateChunk(), bytes(1 << 18))

    scene.crash("alice")
    for lies_now in (False, True):
        if lies_now:
            liar.peers.unserve(expert_saves.FetchSave)
            liar.peers.serve_stream(expert_saves.FetchSave, lie)
        again = await fetched(scene.reader(kept))
        assert np.array_equal(again.blob, saved(step=7).blob) and again.manifest.step == 7
    assert lies and [fault.name for fault in scene.network.fired] == ["crash"]


async def test_a_damaged_save_on_our_disk_is_fetched_from_a_holder(scene: Scene, tmp_path: Path) -> None:
    await scene.open("alice", "bob")
    await scene.save(saved(step=7))
    (damaged,) = (tmp_path / "alice").rglob("*.safetensors")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert np.array_equal((await fetched(scene.saves("alice"))).blob, saved(step=7).blob)
    assert not damaged.exists() and not scene.members["alice"].saves.store.saves()


async def test_a_silent_holder_delays_a_fetch_for_seconds_only(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol", "dave")
    await scene.join("erin")
    kept = await scene.save(saved(step=7), copies=3)
    ((_, claim),) = await scene.saves("erin").claims("ffn.0.0")
    silent = scene.name(min(kept.holders))
    scene.network.now().partition({silent}, scene.members.keys() - {silent})
    scene.crash("alice")
    began = loop_now()
    again = await scene.saves("erin").fetch("ffn.0.0", claim, limit_bytes=LIMIT_BYTES)
    assert np.array_equal(again.blob, saved(step=7).blob) and 9 < loop_now() - began < 12
    assert [fault.name for fault in scene.network.fired] == ["partition", "crash"]


async def test_a_save_that_is_not_what_was_claimed_or_too_large_is_refused(scene: Scene) -> None:
    await scene.open("alice", "bob")
    await scene.save(saved(step=7))
    ((_, claim),) = await scene.saves("bob").claims("ffn.0.0")
    for uid, wrong, limit_bytes, text in (
        ("ffn.0.0", msgspec.structs.replace(claim, step=8), LIMIT_BYTES, "of another expert or step"),
        ("ffn.0.1", claim, LIMIT_BYTES, "of another expert or step"),
        ("ffn.0.0", claim, LIMIT_BYTES - 1, "bytes, .* fit"),
    ):
        with pytest.raises(StateError, match=text):
            await scene.saves("bob").fetch(uid, wrong, limit_bytes=limit_bytes)


async def test_a_save_that_does_not_match_its_hash_is_not_kept(scene: Scene) -> None:
    await scene.open("alice", "bob")
    alice, bob = scene.members["alice"].peers, scene.members["bob"]
    told = [saved(step=2).manifest, saved().manifest]

    async def describe(_peer: PeerId, _ask: Message) -> Manifest:
        return told.pop(0)

    async def send(_ask: Message, stream: Any) -> None:
        await stream.send(StateChunk(), b"something else")

    for kind in (expert_saves.DescribeSave, expert_saves.FetchSave):
        alice.unserve(kind)
    alice.serve(expert_saves.DescribeSave, describe)
    alice.serve_stream(expert_saves.FetchSave, send)
    for text in ("none of 1 holders", "did not arrive"):
        with pytest.raises(CallRefused, match=text):
            await alice.call(bob.peers.id, expert_saves.KeepSave(saved().root), Ack, timeout_s=60)
    assert not bob.saves.store.saves()


async def test_invalid_records_of_saves_are_ignored(scene: Scene) -> None:
    await scene.open("alice", "bob")
    services, alice = scene.members["bob"].services, scene.saves("alice")
    many = (Contact(PeerId(bytes(32)), ()),) * 50
    for key, value in (
        ("run/experts/ffn.0.0/save", "rubbish"),
        ("run/experts/ffn.0.0/save", [[[1, bytes(32), many]]]),
        ("run/experts/ffn.0.0/save", [[[1, bytes(3), ()]]]),
        ("run/expert-holders", {"addresses": 7}),
        ("run/experts/ffn/saves", [((7, 7), (0, 0))]),
        ("run/experts/ffn/saves", 7),
    ):
        await services.dht.publish(key, value, ttl_s=60)
        assert not await alice.claims("ffn.0.0") and not await alice.saved(GRID)
    assert await alice.others() == set()


async def test_an_interrupted_start_still_announces(scene: Scene) -> None:
    alice, bob = [(await scene.join(name)).saves for name in ("alice", "bob")]
    starting = asyncio.create_task(alice.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.sleep(400)  # a record of the interrupted one has expired
    assert starting.cancelled() and len(await bob.others()) == 1
