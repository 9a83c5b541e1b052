"""Faults of stores, folders and machines, scripted in virtual time: the run heals, and nothing counts twice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.events import BatchDropped, Notice
from colab_swarm.mailbox import follower
from colab_swarm.mailbox.bucket import MemoryStore
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.run import BATCH, SETTINGS, agree, count, manifests, train
from tests.training.toy import join_training, model, take


def test_a_contribution_whose_answer_was_lost_counts_once_and_leaves_only_what_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(follower, "_keep_loss", lambda vector, codec, content: kept.append(len(content)))
    lost: list[str] = []
    with cs.simulate(1, mailbox=True) as sim:
        create = sim.bucket.create

        async def lossy(path: str, data: bytes) -> bool:
            written = await create(path, data)
            if "/00000001-" in path and "manifest" not in path and not lost:
                lost.append(path)
                raise OSError("connection reset")
            return written

        sim.bucket.create = lossy  # type: ignore[method-assign, assignment]
        results = sim.run(lambda swarm: train(swarm, rounds=4, compression="sparseloco"), seconds=900)
        agree(results, "alice", rounds=4)
        assert lost and not kept, "it did not take its own object for another one's"
        assert [len(made.entries) for made in manifests(sim)] == [1] * 4


@pytest.mark.parametrize("peers", [1, 2])
def test_a_contribution_that_is_empty_after_a_power_cut_is_written_again(peers: int) -> None:
    damaged: list[str] = []
    with cs.simulate(peers, mailbox=True) as sim:
        create = sim.bucket.create

        async def cut_off(path: str, data: bytes, mode: str = "create") -> bool:
            written = await create(path, data, mode)
            if mode == "create" and "/00000002-" in path and "manifest" not in path:
                damaged.append(path)
                sim.bucket.objects[path] = b"", sim.time
            return written

        sim.bucket.create = cut_off  # type: ignore[method-assign]
        agree(sim.run(train, seconds=900), *sim.swarms)
        assert len(damaged) == peers and not count(sim, BatchDropped)
        texts = [event.text for event in sim.swarms["alice"].events.recent(Notice)]
        assert sum("contribution to round 2 was damaged in" in text for text in texts) == 1


def test_an_answer_that_was_cut_off_parts_nobody() -> None:
    """A synced folder may show a placeholder first."""
    cut: list[str] = []

    def life(swarm: Swarm) -> Any:
        optimizer = join_training(swarm, net := model(), **SETTINGS)
        bucket: Any = optimizer.rounds._journal.bucket  # type: ignore[attr-defined]
        read = bucket.read

        async def cut_once(path: str, most_bytes: int | None = None) -> bytes | None:
            data: bytes | None = await read(path, most_bytes)
            is_others = "/00000004-" in path and "manifest" not in path and swarm.id.hex() not in path
            if swarm.name == "carol" and is_others and not cut and data is not None:
                cut.append(path)
                return data[:-3]
            return data

        bucket.read = cut_once
        lineages = {}
        while optimizer.global_step < 12:
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
            lineages[optimizer.global_step] = optimizer.lineage
        return lineages

    with cs.simulate(3, mailbox=True) as sim:
        results = sim.run(life, seconds=900)
        assert cut
        for step in range(5, 13):
            assert len({lineages[step] for lineages in results.values() if step in lineages}) == 1
        assert not count(sim, BatchDropped)


def test_min_peers_is_for_the_first_round_only() -> None:
    """Three have begun, two left for good, and the third one returns."""

    def life(swarm: Swarm) -> None:
        is_back = swarm.runtime.time() > 60.0
        rounds = 11 if is_back else 5
        if swarm.name == "alice" and not is_back:
            rounds = 100
        train(swarm, rounds=rounds, min_peers=3)
        swarm.optimizers["model"].close()

    with cs.simulate(3, mailbox=True) as sim:
        sim.network.at(100.0).crash("alice")
        sim.join("alice", at=110.0)
        results = sim.run(life, seconds=2000)
        assert "alice" in results and sim.time < 1000


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
        (("alice",), 90.0, 0.0),
        pytest.param(("alice", "bob"), 90.0, 0.0, marks=pytest.mark.ordeal),
        (("alice", "bob"), 120.0, 3.0),
        pytest.param(("alice",), 400.0, 0.0, marks=pytest.mark.ordeal),
    ],
    ids=["one for a minute", "two for a minute", "two that are slower", "one for long"],
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
        told = [event.text for swarm in sim.swarms.values() for event in swarm.events.recent(Notice)]
        assert any("on another branch: it gives up round" in text for text in told)
        assert folder.states_read <= 12
