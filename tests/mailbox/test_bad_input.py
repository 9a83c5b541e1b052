"""Runs in a bucket on virtual time: members that lie, stores that fail, and ordinary life."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

import colab_swarm as cs
from colab_swarm.errors import BucketError
from colab_swarm.events import BatchDropped, Fault, Notice
from colab_swarm.mailbox import collaboration as mailbox
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.journal import Journal
from colab_swarm.mailbox.rounds import (
    ManifestEntry,
    PseudoGradient,
    RoundChain,
    RoundManifest,
    content_digest,
    encode,
    entries_of,
    seal,
    unseal,
)
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model, parameters_of, take

ROUNDS, BATCH = 6, 4
SETTINGS: dict[str, Any] = {"target_batch_size": 40, "local_steps": 3}


Create = Callable[[str, bytes], Awaitable[bool]]
Change = Callable[[Any, Create, str, bytes], Awaitable[bool]]
"""What a liar does in place of writing its own contribution; it gets its part in the training."""


@dataclass
class Trained:
    lineages: dict[int, bytes] = field(default_factory=dict)  # by step
    samples: float = 0.0
    refusals: int = 0
    requests: int = 0
    finite: bool = True


def train(
    swarm: Swarm, change: "Change | None" = None, *, rounds: int = ROUNDS, leave: bool = False, **more: Any
) -> Trained:
    optimizer, told = join_training(swarm, net := model(), **SETTINGS, **more), Trained()
    bucket = optimizer.collaboration._journal.bucket  # type: ignore[attr-defined]
    before = bucket.requests
    if change is not None:
        create = bucket.create

        async def changed(path: str, data: bytes) -> bool:
            own = path.endswith(swarm.id.hex())
            return (
                await change(optimizer.collaboration, create, path, data) if own else await create(path, data)
            )

        bucket.create = changed
    while optimizer.global_step < rounds:
        try:
            told.samples += BATCH
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
        except BucketError:
            told.refusals += 1
            swarm.runtime.call(asyncio.sleep(10.0))
        told.lineages[optimizer.global_step] = optimizer.lineage
    told.requests, told.finite = bucket.requests - before, bool(parameters_of(net).isfinite().all())
    if leave:
        while optimizer._gathered.samples < 2 * BATCH:
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
            told.samples += BATCH
        swarm.leave(hand_over_s=120.0)
    return told


def agree(results: dict[str, Trained], *names: str, rounds: int = ROUNDS) -> None:
    """All of these have reached the last round, on one branch."""
    assert set(names) <= set(results)
    for step in range(1, rounds + 9):
        assert len({one.lineages[step] for one in results.values() if step in one.lineages}) <= 1
    assert all(max(results[name].lineages) >= rounds and results[name].finite for name in names)


def manifests(sim: Simulation) -> list[RoundManifest]:
    found = sorted(path for path in sim.bucket.objects if "manifest" in path)
    return [unseal(sim.bucket.objects[path][0], RoundManifest)[0] for path in found]


def faults(sim: Simulation, *names: str) -> str:
    return "\n".join(one.text for name in names for one in sim.swarms[name].events.recent(Fault))


def count(sim: Simulation, kind: type[Any]) -> int:
    return sum(len(swarm.events.recent(kind)) for swarm in sim.swarms.values())


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
    alice = next(one for one, r in part.progress.records.items() if r.name == "alice")
    return path.replace(part.services.peers.id.hex(), alice.hex()), data


def replay() -> Callable[[Any, str, bytes], tuple[str, bytes]]:
    first: list[bytes] = []

    def replayed(part: Any, path: str, data: bytes) -> tuple[str, bytes]:
        first.append(data)
        return path, first[0]

    return replayed


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        (lambda part, path, data: (path, data[:-1]), "cut off"),
        (lambda part, path, data: (path, data + bytes(1 << 20)), "too large"),
        (lambda part, path, data: (path, b"garbage"), "cut off"),
        (times(float("nan")), "not finite"),
        (as_alice, "another member's"),
        (replay(), "another round's"),
        (lambda part, path, data: (path, resealed(part, data, weight=0.0)), "no weight"),
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
        read, sim.bucket.read = sim.bucket.read, lambda path: looked.append(path) or read(path)
        looked: list[str] = []
        results = sim.run(lambda one: train(one, write if one.name == "carol" else None), seconds=900)
        agree(results, "alice", "bob")
        told = [line for line in faults(sim, "alice", "bob").splitlines() if fault in line]
        assert told and ("large" not in fault or not any(line.split()[0] in looked for line in told))


def test_a_stranger_does_not_count() -> None:
    with cs.simulate(3, mailbox=True) as sim:
        sim.network.by_name["carol"].role = Role.VIEWER
        results = sim.run(train, seconds=900)
        agree(results, "alice", "bob")
        assert "no member that trains" in faults(sim, "alice", "bob")
        carol = sim.swarms["carol"].id
        assert any(carol.hex() in path for path in sim.bucket.objects)
        assert not any(carol == entry.member for one in manifests(sim) for entry in one.entries)


@pytest.mark.parametrize(
    "lie", [times(1e20), lambda part, path, data: (path, resealed(part, data, weight=1e11))]
)
def test_huge_contributions_are_bounded(lie: Any) -> None:
    async def write(part: Any, create: Create, path: str, data: bytes) -> bool:
        return await create(*lie(part, path, data))

    with cs.simulate(3, mailbox=True) as sim:
        agree(
            sim.run(lambda one: train(one, write if one.name == "carol" else None), seconds=900),
            "alice",
            "bob",
        )
        entries = [one for made in manifests(sim) if len(made.entries) == 3 for one in made.entries]
        bounded = [one for one in entries if one.member == sim.swarms["carol"].id]
        assert bounded and all(one.scale < 1e-18 or 100 < one.weight < 1e4 for one in bounded)


Entries = tuple[ManifestEntry, ...]


def with_nothing(entries: Entries, me: PeerId) -> Entries:
    ghost = msgspec.structs.replace(entries[0], member=PeerId(bytes(32)))
    return ghost, *entries


def heavier(entries: Entries, me: PeerId) -> Entries:
    return tuple(
        msgspec.structs.replace(one, weight=one.weight * (1 + 9 * (one.member == me))) for one in entries
    )


def renamed(entries: Entries, me: PeerId) -> Entries:
    return msgspec.structs.replace(entries[-1], member=PeerId(bytes(32))), *entries[1:]


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        (with_nothing, ""),
        (renamed, ""),
        (lambda entries, me: (*entries, entries[-1]), "twice"),
        (lambda entries, me: tuple(one for one in entries if one.member == me), "leaves out"),
        (heavier, "not those of the contributions"),
        (lambda entries, me: (), "no readable"),
    ],
)
def test_a_manifest_that_lies_is_replaced(lie: Any, fault: str) -> None:
    lied: list[str] = []

    async def write(part: Any, create: Create, path: str, data: bytes) -> bool:
        written = await create(path, data)
        journal, chain = part._journal, part._chain
        places = journal.open_places(chain, await journal.look(chain))
        entries = lie(entries_of((await journal._offers(places)).values()), part.services.peers.id)
        told = journal.signed(RoundManifest, round=chain.round, base=chain.base, entries=entries)
        if chain.round and await create(f"{chain.folder}/manifest-00", told):
            lied.append(chain.folder)
        return written

    with cs.simulate(3, mailbox=True) as sim:
        results = sim.run(lambda one: train(one, write if one.name == "carol" else None), seconds=3000)
        agree(results, "alice", "bob")
        assert (
            lied
            and any(f"{folder}/manifest-00 does not" in faults(sim, "alice") for folder in lied)
            or not fault
        )
        assert fault in faults(sim, "alice")
        assert any(path.endswith(f"{lied[0]}/manifest-01") for path in sim.bucket.objects)


@pytest.mark.parametrize("delay_s", [0.0, 3.0])
def test_a_contribution_that_is_overwritten_splits_nobody(delay_s: float) -> None:
    overwritten: list[str] = []

    def overwrite(swarm: Swarm, sim: Simulation) -> Trained:
        """Change what this peer wrote once a manifest lists it."""
        while True:
            swarm.runtime.call(asyncio.sleep(0.25))
            for path, (data, at) in list(sim.bucket.objects.items()):
                folder = path.rpartition("/")[0]
                closed = sim.bucket.objects.get(f"{folder}/manifest-00", (b"", sim.time))[1]
                if path.endswith(victim) and path not in overwritten and sim.time - closed > delay_s:
                    sim.bucket.objects[path] = data[:-1] + bytes([data[-1] ^ 1]), sim.time
                    overwritten.append(path)

    with cs.simulate(4, mailbox=True) as sim:
        victim = sim.swarms["carol"].id.hex()
        results = sim.run(
            lambda swarm: overwrite(swarm, sim) if swarm.name == "dave" else train(swarm, rounds=20),
            seconds=4000,
        )
        agree(results, "alice", "bob", rounds=20)
        print(
            sim.time,
            len(overwritten),
            {n: (max(r.lineages), r.requests) for n, r in results.items()},
            sorted(x[-40:] for x in sim.bucket.objects if "manifest" in x and not x.endswith("00")),
            count(sim, BatchDropped),
        )


def test_garbage_is_passed_over() -> None:
    def litter(swarm: Swarm, sim: Simulation) -> Trained:
        while True:
            swarm.runtime.call(asyncio.sleep(5.0))
            root = next(iter(sim.bucket.objects)).partition("card")[0]
            folders = {path.rpartition("/")[0] for path in sim.bucket.objects if "/rounds/" in path}
            names = [
                f"{root}{name}" for name in ("rounds/x", "states/x", "states/99999999", "states/00000003")
            ]
            names += [f"{root}rounds/00000999-{bytes(8).hex()}/manifest-00", f"{root}rounds/é/../manifest-00"]
            names += [
                f"{folder}/{name}"
                for folder in folders
                for name in ("x", f"manifest-{random.randint(1, 99):02d}")
            ]
            for name in names:
                sim.bucket.create(name, b"garbage")

    with cs.simulate(3, mailbox=True) as sim:
        sim.join("dave", at=60.0)
        agree(
            sim.run(
                lambda one: litter(one, sim) if one.name == "carol" else train(one, rounds=20), seconds=1500
            ),
            *("alice", "bob", "dave"),
            rounds=20,
        )
        assert "manifest" in faults(sim, "alice", "bob") and "states/99999999" in faults(sim, "dave")
        assert any(path.endswith("states/00000016") for path in sim.bucket.objects)


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


def fail(sim: Simulation, error: Exception, begin: float, end: float) -> None:
    """Let the store fail from one time to another."""
    for name in ("create", "read", "list"):

        def verb(*given: Any, real: Any = getattr(sim.bucket, name)) -> Any:
            if begin <= sim.time < end:
                raise error
            return real(*given)

        setattr(sim.bucket, name, verb)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [OSError("off"), PermissionError("revoked")])
@pytest.mark.parametrize("compression", ["float32", "sparseloco"])
def test_a_store_that_fails_for_minutes_costs_nothing(
    error: Exception, overlap: bool, compression: str
) -> None:
    with cs.simulate(3, mailbox=True) as sim:
        fail(sim, error, 20.0, 300.0)
        results = sim.run(lambda swarm: train(swarm, overlap=overlap, compression=compression), seconds=1500)
        agree(results, "alice", "bob", "carol")
        assert not count(sim, BatchDropped)
        if isinstance(error, PermissionError):
            assert all(one.refusals for one in results.values())
        else:
            assert "the bucket answers again" in [
                one.text for one in sim.swarms["alice"].events.recent(Notice)
            ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compression", ["float32", "int8", "sparseloco"])
def test_peers_join_crash_return_and_leave(compression: str, overlap: bool) -> None:
    def life(swarm: Swarm) -> Trained:
        carol = swarm.name == "carol"
        return train(swarm, rounds=5 if carol else 20, leave=carol, compression=compression, overlap=overlap)

    with cs.simulate(3, mailbox=True) as sim:
        sim.network.at(40.0).crash("bob")
        sim.join("dave", at=50.0)
        sim.join("bob", at=90.0)
        carol = sim.swarms["carol"]
        results = sim.run(life, seconds=1500)
        agree(results, "alice", "bob", "dave", rounds=20)
        counted = Counter[PeerId]()
        for one in manifests(sim):
            for entry in one.entries:
                counted[entry.member] += entry.samples
        assert counted[carol.id] == results["carol"].samples, "what it left behind counts too"
        for name in ("alice", "dave"):
            assert results[name].requests <= 20 * len(results[name].lineages)
        assert any("states/00000016" in path for path in sim.bucket.objects)


def test_wait_step_ends_in_time_and_hands_the_samples_over() -> None:
    def hand_over(swarm: Swarm) -> tuple[float, bool]:
        optimizer = join_training(swarm, net := model(), **SETTINGS, overlap=True)
        loss_of(net, 0).backward()
        optimizer.step(samples=1000)  # a round begins beside the trainer; bob will never come
        began = swarm.runtime.time()
        return swarm.runtime.time() - began, optimizer.wait_step(20.0) is None

    with cs.simulate(1, mailbox=True) as sim:
        fail(sim, OSError("off"), 5.0, 1e9)
        print(sim.run(hand_over))
