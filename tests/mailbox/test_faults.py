"""Faults of stores, folders and members, scripted in virtual time: the run heals, and nothing counts twice."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

import colab_swarm as cs
from colab_swarm.errors import SwarmError
from colab_swarm.events import BatchDropped, PeerRefused
from colab_swarm.mailbox import follower
from colab_swarm.mailbox.bucket import Bucket, MemoryStore
from colab_swarm.mailbox.objects import (
    MANIFEST_BYTES,
    PLACE,
    ManifestEntry,
    PseudoGradient,
    RoundManifest,
    content_digest,
    seal,
    unseal,
)
from colab_swarm.mailbox.spectator import last_members
from colab_swarm.net.handshake import VERSION
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import Codec
from colab_swarm.tensors.vector import Vector
from tests.mailbox.run import (
    BATCH,
    ROUNDS,
    SETTINGS,
    Change,
    Create,
    Trained,
    agree,
    count,
    faults,
    manifests,
    notices,
    train,
)
from tests.training.toy import join_training, model, take


def on_create(sim: Simulation, change: Callable[[Create, str, bytes], Awaitable[bool]]) -> None:
    """Let the store do this in place of each create."""
    create = sim.bucket.create

    async def changed(path: str, data: bytes, mode: str = "create") -> bool:
        if mode != "create":
            return await create(path, data, mode)
        return await change(create, path, data)

    sim.bucket.create = changed  # type: ignore[method-assign]


def is_contribution_to(round: int, path: str) -> bool:
    place = PLACE.search(path)
    return place is not None and bool(place[2]) and int(place[1]) == round


def test_a_contribution_whose_answer_was_lost_counts_once_and_leaves_only_what_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(follower, "_keep_loss", lambda vector, codec, content: kept.append(len(content)))
    lost: list[str] = []

    async def lossy(create: Create, path: str, data: bytes) -> bool:
        written = await create(path, data)
        if is_contribution_to(1, path) and not lost:
            lost.append(path)
            raise OSError("connection reset")
        return written

    with cs.simulate(1, mailbox=True) as sim:
        on_create(sim, lossy)
        results = sim.run(lambda swarm: train(swarm, rounds=4, compression="sparseloco"), seconds=900)
        agree(results, "alice", rounds=4)
        assert lost and not kept, "it did not take its own object for another one's"
        assert [len(made.entries) for made in manifests(sim)] == [1] * 4


def test_an_earlier_sessions_contribution_counts_and_the_new_one_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    written: list[str] = []
    keep_loss = follower._keep_loss

    def keep(vector: Vector, codec: Codec, content: bytes) -> None:
        kept.append(len(content))
        keep_loss(vector, codec, content)

    async def hold(create: Create, path: str, data: bytes) -> bool:
        if is_contribution_to(2, path):
            if path.endswith(bob.hex()):
                written.append(path)
            while path.endswith(alice.hex()) and len(written) < 2:
                await asyncio.sleep(1.0)
        return await create(path, data)

    monkeypatch.setattr(follower, "_keep_loss", keep)
    with cs.simulate(2, mailbox=True) as sim:
        alice, bob = (sim.swarms[name].id for name in ("alice", "bob"))
        on_create(sim, hold)
        sim.network.at(32.0).crash("bob")
        sim.join("bob", at=33.0)
        agree(sim.run(lambda swarm: train(swarm, compression="sparseloco"), seconds=900), *sim.swarms)
        assert len(written) == 2 and kept == [0]


def test_a_contribution_that_is_empty_after_a_power_cut_is_written_again() -> None:
    damaged: list[str] = []

    async def cut_off(create: Create, path: str, data: bytes) -> bool:
        written = await create(path, data)
        if is_contribution_to(2, path):
            damaged.append(path)
            sim.bucket.objects[path] = b"", sim.time
        return written

    with cs.simulate(2, mailbox=True) as sim:
        on_create(sim, cut_off)
        agree(sim.run(train, seconds=900), *sim.swarms)
        assert len(damaged) == 2 and not count(sim, BatchDropped)
        for name in sim.swarms:
            assert sum("contribution to round 2 was damaged in" in text for text in notices(sim, name)) == 1


@pytest.mark.slow
def test_deleted_contributions_are_told_and_count_all_the_same() -> None:
    deleted: list[str] = []

    def delete(swarm: Swarm) -> Trained:
        """Delete each contribution to four rounds once, before a manifest lists it."""
        while not any("/00000011-" in path for path in sim.bucket.objects):
            swarm.runtime.call(asyncio.sleep(0.25))
            for path in list(sim.bucket.objects):
                place = PLACE.search(path)
                closed = f"{path.rpartition('/')[0]}/manifest-00" in sim.bucket.objects
                is_open = place is not None and place[2] and not closed and path not in deleted
                if place is not None and is_open and 3 <= int(place[1]) <= 6:
                    del sim.bucket.objects[path]
                    deleted.append(path)
        return Trained()

    with cs.simulate(4, mailbox=True) as sim:
        results = sim.run(
            lambda one: delete(one) if one.name == "dave" else train(one, rounds=12), seconds=3000
        )
        assert deleted, "no contribution was deleted"
        agree(results, "alice", "bob", "carol", rounds=12)
        assert not count(sim, BatchDropped)
        listed = {(entry.member, entry.round) for one in manifests(sim) for entry in one.entries}
        for name, swarm in sim.swarms.items():
            for path in deleted:
                place = PLACE.search(path)
                if place is not None and place[2] == swarm.id.hex():
                    round = int(place[1])
                    assert (swarm.id, round) in listed
                    text = f"contribution to round {round} was deleted"
                    assert sum(text in told for told in notices(sim, name)) == 1


@pytest.mark.slow
def test_contributions_that_are_deleted_as_a_manifest_lists_them_part_nobody() -> None:
    deleted: list[str] = []

    async def create_and_delete(create: Create, path: str, data: bytes) -> bool:
        written = await create(path, data)
        if written and "/00000004-" in path and path.endswith("manifest-00"):
            for place in list(sim.bucket.objects):
                if is_contribution_to(4, place):
                    del sim.bucket.objects[place]
                    deleted.append(place)
        return written

    with cs.simulate(3, mailbox=True) as sim:
        on_create(sim, create_and_delete)
        results = sim.run(lambda swarm: train(swarm, rounds=12), seconds=3000)
        assert deleted, "no contribution was deleted"
        agree(results, *sim.swarms, rounds=12)
        assert set(deleted) <= set(sim.bucket.objects), "their authors have written them again"
        listed = {entry.member for manifest in manifests(sim) for entry in manifest.entries}
        assert listed == {swarm.id for swarm in sim.swarms.values()}


def test_an_answer_that_was_cut_off_parts_nobody() -> None:
    """A synced folder may show a placeholder first."""
    cut: list[str] = []

    def cut_once(bucket: Any) -> None:
        real = bucket.read

        async def read(path: str, most_bytes: int | None = None) -> bytes | None:
            data: bytes | None = await real(path, most_bytes)
            is_others = is_contribution_to(4, path) and not path.endswith(sim.swarms["carol"].id.hex())
            if cut or data is None or not is_others:
                return data
            cut.append(path)
            return data[:-3]

        bucket.read = read

    def life(swarm: Swarm) -> Trained:
        return train(swarm, rounds=12, meddle=cut_once) if swarm.name == "carol" else train(swarm, rounds=12)

    with cs.simulate(3, mailbox=True) as sim:
        agree(sim.run(life, seconds=900), *sim.swarms, rounds=12)
        assert cut and not count(sim, BatchDropped)


def test_min_peers_is_for_the_first_round_only() -> None:
    def life(swarm: Swarm) -> None:
        train(swarm, rounds=4 if swarm.name == "alice" else 2, min_peers=2)
        swarm.optimizers["model"].close()

    with cs.simulate(2, mailbox=True) as sim:
        assert "alice" in sim.run(life, seconds=600), "bob has left for good"
        assert len(manifests(sim)[0].entries) == 2
        text = "the first step waits until 2 peers train; now alice"
        assert notices(sim, "alice").count(text) == 1


class SyncedFolder:
    """A folder as one peer sees it: for some time, some have a copy that is not synced."""

    errors = (OSError,)
    refusals = (PermissionError,)
    rights = ""

    def __init__(self, now_seen: Callable[[], MemoryStore], reads: list[str]) -> None:
        self._now_seen = now_seen
        self._reads = reads

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        async def do(*arguments: Any) -> Any:
            if verb == "read":
                self._reads.append(arguments[0])
            return await getattr(self._now_seen(), verb)(*arguments)

        return do


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offline", "most_s", "pause_s"),
    [
        (("alice",), 90.0, 0.0),
        # a state that leads to their own branch does not count
        (("alice", "bob"), 120.0, 3.0),
        pytest.param(("alice",), 400.0, 0.0, marks=pytest.mark.ordeal),
    ],
)
def test_branches_of_a_synced_folder_become_one_again(
    offline: tuple[str, ...], most_s: float, pause_s: float
) -> None:
    def seen_by(name: str) -> MemoryStore:
        away = 30.0 <= sim.time < most_s
        if away and name in offline:
            if not copy.objects:
                copy.objects.update(sim.bucket.objects)
            return copy
        if not away:
            # of two files with one name, the folder keeps the shared one
            while copy.objects:
                sim.bucket.objects.setdefault(*copy.objects.popitem())
        return sim.bucket

    def life(swarm: Swarm) -> bytes:
        optimizer = join_training(swarm, net := model(), **SETTINGS)
        folder = SyncedFolder(lambda: seen_by(swarm.name), reads)
        optimizer.rounds._journal.bucket._store = folder  # type: ignore[attr-defined]
        while swarm.runtime.time() < most_s + 250.0:
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
            lineages.setdefault(optimizer.global_step, {})[swarm.name] = optimizer.lineage
            if pause_s and swarm.name in offline and swarm.runtime.time() > 30.0:
                swarm.runtime.call(asyncio.sleep(pause_s))
        return optimizer.lineage

    lineages: dict[int, dict[str, bytes]] = {}
    reads = list[str]()
    with cs.simulate(3, mailbox=True) as sim:
        copy = MemoryStore(sim.bucket.clock)
        sim.run(life, seconds=3 * most_s + 2000.0)
        parted = [step for step, by in lineages.items() if len(set(by.values())) > 1]
        together = [step for step, by in lineages.items() if len(by) == 3 and len(set(by.values())) == 1]
        assert parted and max(together) > max(parted), (parted[-1:], together[-1:])
        told = [text for name in sim.swarms for text in notices(sim, name)]
        assert any("on another branch: it gives up round" in text for text in told)
        assert sum("/states/" in path for path in reads) <= 12


Lie = Callable[[Any, str, bytes], tuple[str, bytes]]
"""What a member writes in place of its contribution, and where."""


def writing(lie: Lie) -> Change:
    async def write(part: Any, create: Create, path: str, data: bytes) -> bool:
        with suppress(StopIteration):  # alice is not known yet
            path, data = lie(part, path, data)
        return await create(path, data)

    return write


def resealed(part: Any, data: bytes, content: bytes | None = None, **changes: Any) -> bytes:
    head, old = unseal(data, PseudoGradient)
    content = bytes(old) if content is None else content
    changed = msgspec.structs.replace(head, content=content_digest(content), **changes)
    return seal(changed.signed(part.services.peers.sign), content)


def times(factor: float) -> Lie:
    def scaled(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
        with np.errstate(over="ignore"):
            values = np.frombuffer(unseal(data, PseudoGradient)[1], np.float32) * np.float32(factor)
        return path, resealed(part, data, values.tobytes())

    return scaled


def as_alice(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
    alice = next(one for one, r in part.view.all.items() if r.name == "alice")
    return path.replace(part.services.peers.id.hex(), alice.hex()), data


def replay() -> Lie:
    first: list[bytes] = []

    def replayed(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
        first.append(data)
        return path, first[0]

    return replayed


def changed(**changes: Any) -> Lie:
    return lambda part, path, data: (path, resealed(part, data, **changes))


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        (lambda part, path, data: (path, data[:-1]), "cut off"),
        (lambda part, path, data: (path, data + bytes(1 << 20)), "too large"),
        (lambda part, path, data: (path, b"garbage"), "cut off"),
        (times(float("nan")), "not finite"),
        (as_alice, "another member's"),
        (replay(), "another round's"),
        (changed(weight=0.0), "no readable"),
        (changed(seconds=float("nan")), "no readable"),
        (changed(prefix="other"), "another model"),
        (times(1e20), "times as long as the others"),
    ],
)
def test_a_contribution_that_is_none_does_not_count(lie: Lie, fault: str) -> None:
    with cs.simulate(3, mailbox=True) as sim:
        read, sim.bucket.read = sim.bucket.read, lambda path, most: looked.append(path) or read(path, most)
        looked: list[str] = []
        results = sim.run(lambda one: train(one, writing(lie) if one.name == "carol" else None), seconds=900)
        agree(results, "alice", "bob")
        told = [line for line in faults(sim, "alice", "bob").splitlines() if fault in line]
        refused = {
            event.peer for name in ("alice", "bob") for event in sim.swarms[name].events.recent(PeerRefused)
        }
        assert refused <= {sim.swarms["carol"].id.hex()}
        assert refused or "long" not in fault, "its author is named"
        assert told and ("large" not in fault or not any(line.split()[0] in looked for line in told))


def test_the_status_of_a_run_passes_over_what_no_member_wrote_at_its_own_place() -> None:
    with cs.simulate(3, mailbox=True) as sim:
        no_number = writing(changed(loss=float("nan")))
        sim.run(lambda one: train(one, no_number if one.name == "carol" else None), seconds=900)
        objects = sim.bucket.objects
        newest = manifests(sim)[-1]
        *_, last = sorted(path for path in objects if "/manifest-" in path)
        root, _, _ = last.partition("/rounds/")
        ids = {name: swarm.id.hex() for name, swarm in sim.swarms.items()}
        *_, carols = sorted(path for path in objects if path.endswith(ids["carol"]))
        late = f"{root}/rounds/00000099-{'0' * 16}"
        lies = {f"{root}/states/zzz": b"", f"{root}/states/99999999-{bytes(8).hex()}": b"no state"}
        # a replayed manifest, one that is too large, an empty one
        lies |= {f"{late}/manifest-00": objects[last][0], f"{late}/manifest-01": bytes(2 * MANIFEST_BYTES)}
        lies |= {f"{late}/manifest-02": b"", f"{late}/{ids['alice']}": objects[carols][0]}
        lies |= {f"{late}/{ids['alice']}-left": b"colab_swarm", f"{late}/{ids['bob']}": bytes(64)}
        objects.update({path: (data, 0.0) for path, data in lies.items()})
        received = []
        read = sim.bucket.read

        async def counted(path: str, most_bytes: int | None) -> bytes | None:
            data = await read(path, most_bytes)
            received.append(len(data or b""))
            return data

        sim.bucket.read = counted  # type: ignore[method-assign]
        bucket = Bucket(f"memory://{id(sim):x}", root.removeprefix("runs/"))
        rows = asyncio.run(last_members(bucket, root.removeprefix("runs/"), None))
        assert [row.id for row in rows] == [short(entry.member) for entry in newest.entries]
        assert np.isnan(unseal(objects[carols][0], PseudoGradient)[0].loss)
        assert {row.name: row.loss for row in rows} == dict.fromkeys(("alice", "bob", "carol"))
        assert {(row.role, row.step) for row in rows} == {("trainer", newest.round + 1)}
        assert max(received) <= MANIFEST_BYTES and len(received) > len(rows)


def test_a_stranger_does_not_count() -> None:
    with cs.simulate(3, mailbox=True) as sim:
        sim.network.by_name["carol"].role = Role.VIEWER
        results = sim.run(train, seconds=900)
        agree(results, "alice", "bob")
        assert "no member that trains" in faults(sim, "alice", "bob")
        carol = sim.swarms["carol"].id
        assert any(carol.hex() in path for path in sim.bucket.objects)
        assert not any(carol == entry.member for one in manifests(sim) for entry in one.entries)


@pytest.mark.parametrize("lists", ["nothing", "a ghost"])
def test_a_manifest_that_lies_is_skipped_and_its_author_named(lists: str) -> None:
    lied: list[str] = []

    async def write(part: Any, create: Create, path: str, data: bytes) -> bool:
        written = await create(path, data)
        journal, chain = part._journal, part._follower.chain
        ghost = ManifestEntry(PeerId(bytes(32)), chain.round, bytes(32), 1.0, 1.0, 1.0)
        entries = (ghost,) if lists == "a ghost" else ()
        told = journal.signed(RoundManifest, round=chain.round, base=chain.base, entries=entries)
        if chain.round and await create(f"{chain.folder}/manifest-00", told):
            lied.append(chain.folder)
        return written

    with cs.simulate(3, mailbox=True) as sim:
        results = sim.run(lambda one: train(one, write if one.name == "carol" else None), seconds=3000)
        agree(results, "alice", "bob")
        assert lied and any(path.endswith(f"{lied[0]}/manifest-01") for path in sim.bucket.objects)
        told = faults(sim, "alice", "bob")
        assert any(f"{folder}/manifest-00 does not count" in told for folder in lied)


def test_of_two_first_states_or_manifests_at_once_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    written: dict[str, list[bool]] = {"states": [], "manifest": []}
    create = MemoryStore.create

    async def slowly(store: MemoryStore, path: str, data: bytes, mode: str = "create") -> bool:
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        is_first = await create(store, path, data, mode)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        for kind, all_written in written.items():
            if kind in path:
                all_written.append(is_first)
        return is_first

    monkeypatch.setattr(MemoryStore, "create", slowly)
    with cs.simulate(3, mailbox=True) as sim:
        agree(sim.run(train, seconds=900), "alice", "bob", "carol")
        assert False in written["manifest"]
        assert written["manifest"].count(True) == len(manifests(sim)) >= ROUNDS
        assert False in written["states"] and written["states"].count(True) == 1


SENTENCE = (
    f"the run was written by protocol {VERSION - 1}, this package speaks {VERSION}: update the older of both"
)


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("card/first", SENTENCE, ""),
        (
            "states/00000000-first",
            f"no state in the bucket can be read: {SENTENCE}",
            f"states/00000000-first does not count: {SENTENCE}",
        ),
    ],
)
def test_a_run_of_an_older_version_is_refused_in_a_sentence(path: str, text: str, told: str) -> None:
    """The older package wrote the card, or a state since."""

    def life(swarm: Swarm) -> str:
        older = b"colab_swarm" + bytes([VERSION - 1]) + b"what comes of it"
        swarm.runtime.call(sim.bucket.create(f"runs/{swarm.run_id}/model/{path}", older))
        with pytest.raises(SwarmError) as caught:
            train(swarm, rounds=1)
        return str(caught.value)

    with cs.simulate(1, mailbox=True) as sim:
        assert sim.run(life)["alice"] == text
        assert faults(sim, "alice") == told
