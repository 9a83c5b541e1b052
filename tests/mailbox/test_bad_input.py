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
from colab_swarm.mailbox.bucket import Bucket
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
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.run import ROUNDS, Create, Trained, agree, faults, manifests, train


def resealed(part: Any, data: bytes, content: bytes | None = None, **changes: Any) -> bytes:
    head, old = unseal(data, PseudoGradient)
    content = bytes(old) if content is None else content
    changed = msgspec.structs.replace(head, content=content_digest(content), **changes)
    return seal(changed.signed(part.services.peers.sign), content)


def times(factor: float) -> Callable[[Any, str, bytes], tuple[str, bytes]]:
    def scaled(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
        with np.errstate(over="ignore"):
            values = np.frombuffer(unseal(data, PseudoGradient)[1], np.float32) * np.float32(factor)
        return path, resealed(part, data, values.tobytes())

    return scaled


def as_alice(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
    alice = next(one for one, r in part.view.all.items() if r.name == "alice")
    return path.replace(part.services.peers.id.hex(), alice.hex()), data


def replay() -> Callable[[Any, str, bytes], tuple[str, bytes]]:
    first: list[bytes] = []

    def replayed(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
        first.append(data)
        return path, first[0]

    return replayed


async def no_number(part: Any, create: Create, path: str, data: bytes) -> bool:
    return await create(path, resealed(part, data, loss=float("nan")))


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        (lambda part, path, data: (path, data[:-1]), "cut off"),
        (lambda part, path, data: (path, data + bytes(1 << 20)), "too large"),
        (lambda part, path, data: (path, b"garbage"), "cut off"),
        (times(float("nan")), "not finite"),
        (as_alice, "another member's"),
        (replay(), "another round's"),
        (lambda part, path, data: (path, resealed(part, data, weight=0.0)), "no readable"),
        (lambda part, path, data: (path, resealed(part, data, seconds=float("nan"))), "no readable"),
        (lambda part, path, data: (path, resealed(part, data, prefix="other")), "another model"),
    ],
)
def test_a_contribution_that_is_none_does_not_count(lie: Any, fault: str) -> None:
    async def write(part: Any, create: Create, path: str, data: bytes) -> bool:
        with suppress(StopIteration):  # alice is not known yet
            path, data = lie(part, path, data)
        return await create(path, data)

    with cs.simulate(3, mailbox=True) as sim:
        read, sim.bucket.read = sim.bucket.read, lambda path, most: looked.append(path) or read(path, most)
        looked: list[str] = []
        results = sim.run(lambda one: train(one, write if one.name == "carol" else None), seconds=900)
        agree(results, "alice", "bob")
        told = [line for line in faults(sim, "alice", "bob").splitlines() if fault in line]
        assert told and ("large" not in fault or not any(line.split()[0] in looked for line in told))


def test_the_status_of_a_run_passes_over_what_no_member_wrote_at_its_own_place() -> None:
    with cs.simulate(3, mailbox=True) as sim:
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


def test_absurdly_long_contributions_do_not_count_and_their_author_is_named() -> None:
    async def write(part: Any, create: Create, path: str, data: bytes) -> bool:
        return await create(*times(1e20)(part, path, data))

    with cs.simulate(3, mailbox=True) as sim:
        results = sim.run(lambda one: train(one, write if one.name == "carol" else None), seconds=900)
        agree(results, "alice", "bob")
        carol = sim.swarms["carol"].id
        refused = [swarm.events.recent(PeerRefused) for swarm in sim.swarms.values()]
        assert {event.peer for events in refused for event in events} == {carol.hex()}


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


@pytest.mark.slow
def test_contributions_that_are_overwritten_split_nobody_for_long() -> None:
    overwritten: list[str] = []

    def overwrite(swarm: Swarm, sim: Simulation) -> Trained:
        """Change five contributions, a little after the first manifest that lists them."""
        while len(overwritten) < 5:
            swarm.runtime.call(asyncio.sleep(0.25))
            for path, (data, _) in list(sim.bucket.objects.items()):
                manifest = f"{path.rpartition('/')[0]}/manifest-00"
                closed_at = sim.bucket.objects.get(manifest, (b"", sim.time))[1]
                if path.endswith(carol) and path not in overwritten and sim.time - closed_at > 3.0:
                    sim.bucket.objects[path] = data[:-1] + bytes([data[-1] ^ 1]), sim.time
                    overwritten.append(path)
        return Trained()

    with cs.simulate(4, mailbox=True) as sim:
        carol = sim.swarms["carol"].id.hex()
        results = sim.run(
            lambda one: overwrite(one, sim) if one.name == "dave" else train(one, rounds=30), seconds=3000
        )
        last = {results[name].lineages[30] for name in ("alice", "bob", "carol")}
        assert len(last) == 1 and len(overwritten) == 5


@pytest.mark.slow
def test_garbage_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.mailbox.bucket_rounds.STATE_ROUNDS", 4)
    # Else a member that has joined a short time ago writes none.
    monkeypatch.setattr("colab_swarm.training.digests.SKETCH_STEPS", 2)
    rng = random.Random(0)

    def litter(swarm: Swarm, sim: Simulation) -> Trained:
        while True:
            swarm.runtime.call(asyncio.sleep(2.0))
            root = next(iter(sim.bucket.objects)).partition("card")[0]
            folders = {path.rpartition("/")[0] for path in sim.bucket.objects if "/rounds/" in path}
            names = [
                f"{root}{name}"
                for name in ("rounds/x", "states/x", "states/99999999", f"states/99999999-{bytes(8).hex()}")
            ]
            names += [f"{root}rounds/00000999-{bytes(8).hex()}/manifest-00", f"{root}rounds/é/../manifest-00"]
            names += [
                f"{folder}/{name}"
                for folder in folders
                for name in ("x", f"manifest-{rng.randint(1, 99):02d}")
            ]
            for name in names:
                swarm.runtime.call(sim.bucket.create(name, b"garbage"))

    with cs.simulate(3, mailbox=True) as sim:
        sim.join("dave", at=60.0)
        agree(
            sim.run(
                lambda one: litter(one, sim) if one.name == "carol" else train(one, rounds=8), seconds=450
            ),
            *("alice", "bob", "dave"),
            rounds=8,
        )
        assert "manifest" in faults(sim, "alice", "bob") and "states/99999999" in faults(sim, "dave")
        assert any("states/00000004-" in path for path in sim.bucket.objects)


def test_of_two_manifests_at_once_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, written, do = random.Random(0), list[bool](), Bucket._do

    async def slowly(self: Bucket, verb: Any, *given: Any) -> Any:
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        answer = await do(self, verb, *given)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        if "manifest" in str(given[0]) and verb.__name__ == "create":
            written.append(answer)
        return answer

    monkeypatch.setattr(Bucket, "_do", slowly)
    with cs.simulate(3, mailbox=True) as sim:
        agree(sim.run(train, seconds=900), "alice", "bob", "carol")
        assert False in written and written.count(True) == len(manifests(sim)) >= ROUNDS


@pytest.mark.parametrize("kind", ["card", "state"])
def test_a_run_of_an_older_version_is_refused_in_a_sentence(kind: str) -> None:
    """The older package wrote the card, or a state since."""
    older = b"colab_swarm" + bytes([VERSION - 1]) + b"what comes of it"

    def life(swarm: Swarm) -> tuple[str, str]:
        swarm.runtime.call(sim.bucket.create(f"{root}/{path}", older))
        with pytest.raises(SwarmError) as caught:
            train(swarm, rounds=1)
        return str(caught.value), faults(sim, swarm.name)

    path = {"card": "card/first", "state": "states/00000000-first"}[kind]
    with cs.simulate(1, mailbox=True) as sim:
        root = f"runs/{sim.swarms['alice'].run_id}/model"
        text, said = sim.run(life)["alice"]
    sentence = f"the run was written by protocol {VERSION - 1}, this package speaks {VERSION}: update the older of both"
    if kind == "card":
        assert text == sentence
    else:
        assert text == f"no state in the bucket can be read: {sentence}"
        assert said == f"states/00000000-first does not count: {sentence}"
