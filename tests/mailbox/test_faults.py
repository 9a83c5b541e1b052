"""Faults of stores, folders and machines, scripted in virtual time: the run heals, and nothing counts twice."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.events import BatchDropped
from colab_swarm.mailbox import follower
from colab_swarm.mailbox.bucket import MemoryStore
from colab_swarm.mailbox.objects import PLACE, RoundManifest, unseal
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.run import BATCH, SETTINGS, Trained, agree, count, manifests, notices, train
from tests.training.toy import join_training, model, take

Create = Callable[[str, bytes], Awaitable[bool]]


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


Chosen = Callable[[int, int], bool]
"""``chosen(round, before)``: whether a contribution is deleted, after so many others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [lambda round, before: round == 4 and before == 0, lambda round, before: 3 <= round <= 6],
    ids=["one of a round", "all of four rounds"],
)
def test_deleted_contributions_are_told_and_count_all_the_same(chosen: Chosen) -> None:
    deleted: list[str] = []

    def delete(swarm: Swarm) -> Trained:
        """Delete each chosen contribution once, before a manifest lists it."""
        while not any("/00000011-" in path for path in sim.bucket.objects):
            swarm.runtime.call(asyncio.sleep(0.25))
            for path in list(sim.bucket.objects):
                place = PLACE.search(path)
                closed = f"{path.rpartition('/')[0]}/manifest-00" in sim.bucket.objects
                is_open = place is not None and place[2] and not closed and path not in deleted
                if place is not None and is_open and chosen(int(place[1]), len(deleted)):
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
@pytest.mark.parametrize("whose", ["the closer's", "another's"])
def test_a_contribution_that_is_deleted_as_a_manifest_lists_it_parts_nobody(whose: str) -> None:
    deleted: list[str] = []

    async def create_and_delete(create: Create, path: str, data: bytes) -> bool:
        written = await create(path, data)
        if written and "/00000004-" in path and path.endswith("manifest-00"):
            closer = unseal(data, RoundManifest)[0].member.hex()
            for place in list(sim.bucket.objects):
                is_closers = place.endswith(closer)
                if is_contribution_to(4, place) and is_closers == (whose == "the closer's"):
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

    def life(swarm: Swarm) -> Trained:
        optimizer = join_training(swarm, net := model(), **SETTINGS)
        bucket: Any = optimizer.rounds._journal.bucket  # type: ignore[attr-defined]
        read = bucket.read

        async def cut_once(path: str, most_bytes: int | None = None) -> bytes | None:
            data: bytes | None = await read(path, most_bytes)
            is_others = is_contribution_to(4, path) and not path.endswith(swarm.id.hex())
            if swarm.name == "carol" and is_others and not cut and data is not None:
                cut.append(path)
                return data[:-3]
            return data

        bucket.read = cut_once
        told = Trained()
        while optimizer.global_step < 12:
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
            told.lineages[optimizer.global_step] = optimizer.lineage
        return told

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
    """A folder whose copy on some peers' machines is not synced from one time to another."""

    def __init__(self, sim: Simulation, offline: tuple[str, ...], begin: float, end: float) -> None:
        self._sim = sim
        self._offline = offline
        self._begin = begin
        self._end = end
        self._copy = MemoryStore(sim.bucket.clock)
        self._is_merged = False
        self.states_read = 0

    def seen_by(self, name: str) -> MemoryStore:
        now = self._sim.time
        shared = self._sim.bucket
        if self._begin <= now < self._end and name in self._offline:
            if not self._copy.objects:
                self._copy.objects.update(shared.objects)
            return self._copy
        if now >= self._end and not self._is_merged:
            self._is_merged = True
            # of two files with one name, the folder keeps the shared one
            for path, content in self._copy.objects.items():
                shared.objects.setdefault(path, content)
        return shared

    def store_of(self, name: str) -> Any:
        folder = self

        class View:
            errors = (OSError,)
            refusals = (PermissionError,)
            rights = ""

            def __getattr__(self, verb: str) -> Callable[..., Any]:
                async def do(*arguments: Any) -> Any:
                    if verb == "read" and "/states/" in arguments[0]:
                        folder.states_read += 1
                    return await getattr(folder.seen_by(name), verb)(*arguments)

                return do

        return View()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offline", "most_s", "pause_s"),
    [
        pytest.param(("alice",), 90.0, 0.0, id="one for a minute"),
        pytest.param(("alice", "bob"), 120.0, 3.0, id="two that are slower"),
        pytest.param(("alice",), 400.0, 0.0, id="one for long", marks=pytest.mark.ordeal),
    ],
)
def test_branches_of_a_synced_folder_become_one_again(
    offline: tuple[str, ...], most_s: float, pause_s: float
) -> None:
    def life(swarm: Swarm) -> bytes:
        optimizer = join_training(swarm, net := model(), **SETTINGS)
        optimizer.rounds._journal.bucket._store = folder.store_of(swarm.name)  # type: ignore[attr-defined]
        while swarm.runtime.time() < most_s + 250.0:
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
            lineages.setdefault(optimizer.global_step, {})[swarm.name] = optimizer.lineage
            if pause_s and swarm.name in offline and swarm.runtime.time() > 30.0:
                swarm.runtime.call(asyncio.sleep(pause_s))
        return optimizer.lineage

    lineages: dict[int, dict[str, bytes]] = {}
    with cs.simulate(3, mailbox=True) as sim:
        folder = SyncedFolder(sim, offline, 30.0, most_s)
        sim.run(life, seconds=3 * most_s + 2000.0)
        parted = [step for step, by in lineages.items() if len(set(by.values())) > 1]
        together = [step for step, by in lineages.items() if len(by) == 3 and len(set(by.values())) == 1]
        assert parted and max(together) > max(parted), (parted[-1:], together[-1:])
        told = [text for name in sim.swarms for text in notices(sim, name)]
        assert any("on another branch: it gives up round" in text for text in told)
        assert folder.states_read <= 12
