"""Replicas of saves on the simulated network: what is sent, what survives crashes, and peers that lie."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from colab_swarm.dht import records
from colab_swarm.errors import CallRefused, PeerError, StateError
from colab_swarm.moe import saves as expert_saves
from colab_swarm.net.peers import Buffer, Contact, PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot, StateChunk, digest_of
from tests.moe.hosts import GRID, Member, Run, saved, shelf_of

LIMIT_BYTES = saved().blob.nbytes


class Scene:
    """Alice saves, the other peers are holders."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.members: dict[str, Member] = {}

    async def open(self, *names: str) -> None:
        for name in names:
            self.members[name] = await self.run.join(name)
            await self.saves(name).start()

    def saves(self, name: str) -> expert_saves.ExpertSaves:
        return self.members[name].resources.saves

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
        others = (name for name in self.members if name != "alice")
        return next(self.saves(n) for n in others if self.members[n].peers.id not in kept.holders)

    def holders(self, step: int) -> set[str]:
        return {name for name, m in self.members.items() if any(s.step == step for s in shelf_of(m).saves())}

    def crash(self, name: str) -> None:
        self.run.network.now().crash(name)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def fetched(saves: expert_saves.ExpertSaves, uid: str = "ffn.0.0") -> Snapshot:
    _, place = (await saves.claims(uid))[0]
    return await saves.fetch(uid, place, limit_bytes=LIMIT_BYTES)


async def test_only_changed_chunks_are_sent_and_an_equal_save_is_renewed(scene: Scene) -> None:
    await scene.open("alice", "bob")
    store, sizes = shelf_of(scene.members["bob"]), list[int]()
    put = store.put

    def count(data: Buffer) -> bytes:
        sizes.append(len(data))
        return put(data)

    store.put = count  # type: ignore[method-assign]
    await scene.save(saved(step=1))
    assert sum(sizes[1:]) == saved().blob.nbytes > 2_000_000  # after the manifest
    sizes.clear()
    second = await scene.save(saved(step=2, value=1.0))
    assert len(sizes) == 3 and sum(sizes[1:]) <= 2 << 18  # the chunk of the head, and the last one
    assert scene.saves("alice").safe["ffn.0.0"].step == 2
    sizes.clear()
    await asyncio.sleep(60)
    await scene.save(saved(step=2, value=1.0))
    assert len(sizes) == 1 and store.saves()[0].at > second.at


async def test_a_save_that_a_holder_lost_does_not_drop_the_one_before(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol")
    await scene.save(saved(step=1))
    chunk = scene.run.network.when(
        lambda m: isinstance(m, StateChunk), sender="alice", receiver="carol", nth=2
    )
    chunk.crash("carol")
    await scene.save(saved(step=2, value=1.0))
    assert [fault.name for fault in scene.run.network.fired] == ["crash"]
    assert scene.holders(1) == {"alice", "bob", "carol"} and scene.holders(2) == {"alice", "bob"}
    await scene.open("dave")
    await scene.save(saved(step=3, value=2.0))
    assert scene.holders(3) == {"alice", "bob", "dave"} and scene.holders(2) == {"alice", "bob"}
    assert scene.holders(1) == {"carol"}  # who is away


async def test_a_save_that_no_holder_accepts_does_not_hide_the_previous_one(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol", "dave")
    first = await scene.save(saved(step=1))
    for name in ("bob", "carol", "dave"):
        shelf_of(scene.members[name])._quota_bytes = 1000
    for step in (2, 3):
        assert not (await scene.save(saved(step=step, value=float(step)))).holders
    assert len(first.holders) == 2 and not (await scene.save(saved("ffn.0.1"))).holders
    assert scene.saves("alice").safe["ffn.0.1"].step == 1, "there is no better one"
    scene.crash("alice")
    reader = scene.saves("dave")
    (_, lost), (_, safe) = await reader.claims("ffn.0.0")
    assert (lost.step, safe.step) == (3, 1) and scene.run.network.fired
    with pytest.raises(StateError, match="none of 1 holders"):
        await reader.fetch("ffn.0.0", lost, limit_bytes=LIMIT_BYTES)
    again = await reader.fetch("ffn.0.0", safe, limit_bytes=LIMIT_BYTES)
    assert np.array_equal(again.blob, saved(step=1).blob)


async def test_a_save_whose_record_no_peer_stores_is_reported(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.open("alice")
    monkeypatch.setattr(records, "TOTAL_BYTES", 0)
    assert "no peer stored the record" in str((await scene.save(saved())).fault)


async def test_a_holder_that_failed_is_left_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_peers: object, holder: PeerId, _saved: Snapshot) -> None:
        tried.append(holder)
        raise PeerError("full, or not there")

    tried, (away, *crowd) = list[PeerId](), [PeerId(bytes([i]) * 32) for i in range(41)]
    await scene.open("alice")
    alice = scene.saves("alice")
    monkeypatch.setattr(expert_saves, "send_save", fails)
    for i in range(3):
        await alice.save(saved(f"ffn.0.{i}"), {away}, 1)
    assert tried == [away]
    await asyncio.sleep(60)
    await alice.save(saved("ffn.0.0"), {away}, 1)
    assert tried == [away] * 2
    for _ in range(4):
        await alice.save(saved(), {*crowd}, copies=2)
        await asyncio.sleep(100)
    assert len(tried) - 1 == len({*tried}) == 1 + 4 * 8, "few at a time, then others"


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
    assert scene.run.network.fired


async def test_a_save_comes_back_from_holders_when_its_host_is_dead(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol", "dave")
    kept = await scene.save(saved(step=7))
    assert len(kept.holders) == 2 and kept.fault is None
    liar = scene.members[scene.name(min(kept.holders))]
    (save,) = shelf_of(liar).saves()
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
    assert lies and len(save.digests) == 11 and [fault.name for fault in scene.run.network.fired] == ["crash"]


async def test_a_damaged_chunk_on_our_disk_is_fetched_from_a_holder(scene: Scene, tmp_path: Path) -> None:
    await scene.open("alice", "bob")
    await scene.save(saved(step=7))
    garbled = [path for path in (tmp_path / "alice" / "chunks").rglob("*") if path.is_file()]
    for path in garbled:
        path.write_bytes(bytes(path.stat().st_size))
    assert np.array_equal((await fetched(scene.saves("alice"))).blob, saved(step=7).blob)
    assert len(garbled) == 11 and not any(path.exists() for path in garbled)


async def test_a_silent_holder_delays_a_fetch_for_seconds_only(scene: Scene) -> None:
    await scene.open("alice", "bob", "carol", "dave")
    scene.members["erin"] = await scene.run.join("erin")
    kept = await scene.save(saved(step=7), copies=3)
    ((_, claim),) = await scene.saves("erin").claims("ffn.0.0")
    silent = scene.name(min(kept.holders))
    scene.run.network.now().partition({silent}, scene.members.keys() - {silent})
    scene.crash("alice")
    began = loop_now()
    again = await scene.saves("erin").fetch("ffn.0.0", claim, limit_bytes=LIMIT_BYTES)
    assert np.array_equal(again.blob, saved(step=7).blob) and 9 < loop_now() - began < 12
    assert [fault.name for fault in scene.run.network.fired] == ["partition", "crash"]


async def test_a_false_claim_of_a_real_save_does_not_hide_the_owners(scene: Scene) -> None:
    await scene.open("alice", "bob", "mallory", "zoe")
    await scene.save(saved(step=7))
    ((owner, claim),) = await scene.saves("bob").claims("ffn.0.0")
    for name in ("mallory", "zoe"):  # an id below and above alice's
        liar = scene.members[name].services
        record = expert_saves.SaveRecord(
            (msgspec.structs.replace(claim, step=10**9, holders=(liar.peers.contact,)),)
        )
        await liar.dht.publish("run/experts/ffn.0.0/save", record, ttl_s=600)
    assert (owner, claim) in await scene.saves("bob").claims("ffn.0.0")


async def test_a_save_that_is_not_what_was_claimed_or_too_large_is_refused(scene: Scene) -> None:
    await scene.open("alice", "bob")
    await scene.save(saved(step=7))
    ((_, claim),) = await scene.saves("bob").claims("ffn.0.0")
    for uid, wrong, limit_bytes in (
        ("ffn.0.0", msgspec.structs.replace(claim, step=8), LIMIT_BYTES),
        ("ffn.0.1", claim, LIMIT_BYTES),
        ("ffn.0.0", claim, LIMIT_BYTES - 1),
    ):
        with pytest.raises(StateError, match="another expert or step, or larger"):
            await scene.saves("bob").fetch(uid, wrong, limit_bytes=limit_bytes)


async def test_a_manifest_that_is_wrong_about_the_length_of_a_chunk_is_refused(scene: Scene) -> None:
    await scene.open("alice", "bob")
    whole, chunks = saved(), shelf_of(scene.members["alice"])
    short = chunks.put(b"short")
    lie = msgspec.structs.replace(whole.manifest, digests=short + whole.manifest.digests[32:])
    head = chunks.put(msgspec.msgpack.encode(lie))
    for piece in whole.chunks.values():
        chunks.put(piece)
    with pytest.raises(StateError, match="1 of 10 chunks"):
        await scene.saves("alice").fetch(
            "ffn.0.0", expert_saves.SavePlace(1, head, ()), limit_bytes=LIMIT_BYTES
        )


@pytest.mark.parametrize("fault", ["hash", "length"])
async def test_a_save_whose_chunks_do_not_match_is_not_kept(scene: Scene, tmp_path: Path, fault: str) -> None:
    await scene.open("alice", "bob")
    alice, bob, manifest = scene.members["alice"].peers, scene.members["bob"].peers.id, saved().manifest
    if fault == "length":
        digests = digest_of(b"something else") + manifest.digests[32:]
        manifest = msgspec.structs.replace(manifest, digests=digests)
    head = msgspec.msgpack.encode(manifest)
    async with await alice.stream(bob, expert_saves.KeepSave(digest_of(head)), timeout_s=5) as stream:
        await stream.send(StateChunk(), head)
        lacked, _ = await stream.receive(expert_saves.LackedChunks)
        assert len(lacked.places) == 10
        await stream.send(StateChunk(), b"something else")
        with pytest.raises(CallRefused, match="does not match its hash or its length"):
            await stream.receive(expert_saves.LackedChunks)
    assert not shelf_of(scene.members["bob"]).saves()
    assert not [path for path in (tmp_path / "bob" / "chunks").rglob("*") if path.is_file()]


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
    alice, bob = [(await scene.run.join(name)).resources.saves for name in ("alice", "bob")]
    starting = asyncio.create_task(alice.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.sleep(400)  # a record of the interrupted one has expired
    assert starting.cancelled() and len(await bob.others()) == 1
