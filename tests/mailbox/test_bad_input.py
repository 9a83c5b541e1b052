"""Runs in a bucket on virtual time, with members that lie and stores that are slow."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

import colab_swarm as cs
from colab_swarm.errors import SwarmError
from colab_swarm.events import PeerRefused
from colab_swarm.mailbox.bucket import Bucket, MemoryStore
from colab_swarm.mailbox.objects import (
    MANIFEST_BYTES,
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
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.run import ROUNDS, Change, Create, agree, faults, manifests, train

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


def test_of_two_manifests_at_once_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    written: list[bool] = []
    create = MemoryStore.create

    async def slowly(store: MemoryStore, path: str, data: bytes, mode: str = "create") -> bool:
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        is_first = await create(store, path, data, mode)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        if "manifest" in path:
            written.append(is_first)
        return is_first

    monkeypatch.setattr(MemoryStore, "create", slowly)
    with cs.simulate(3, mailbox=True) as sim:
        agree(sim.run(train, seconds=900), "alice", "bob", "carol")
        assert False in written and written.count(True) == len(manifests(sim)) >= ROUNDS


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
