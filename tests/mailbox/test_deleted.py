"""Contributions that somebody deletes, before or after a manifest lists them: the run goes on."""

import asyncio
from collections.abc import Callable

import pytest

import colab_swarm as cs
from colab_swarm.events import BatchDropped, Notice
from colab_swarm.mailbox.objects import PLACE, RoundManifest, unseal
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.run import Trained, agree, count, manifests, train

NAMES = ("alice", "bob", "carol")
Chosen = Callable[[int, int], bool]
"""``chosen(round, before)``: whether a contribution is deleted, after so many others."""


def train_beside_deletions(sim: Simulation, swarm: Swarm, chosen: Chosen, deleted: list[str]) -> Trained:
    """Train; dave deletes each chosen contribution once, before a manifest lists it."""
    if swarm.name != "dave":
        return train(swarm, rounds=12)
    while not any("-00000011" in path or "/00000011-" in path for path in sim.bucket.objects):
        swarm.runtime.call(asyncio.sleep(0.25))
        for path in list(sim.bucket.objects):
            place = PLACE.search(path)
            closed = f"{path.rpartition('/')[0]}/manifest-00" in sim.bucket.objects
            if place is None or not place[2] or closed or path in deleted:
                continue
            if chosen(int(place[1]), len(deleted)):
                del sim.bucket.objects[path]
                deleted.append(path)
    return Trained()


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        lambda round, before: round == 4,
        lambda round, before: round == 4 and before == 0,
        lambda round, before: 3 <= round <= 6,
    ],
    ids=["all of a round", "one of a round", "all of four rounds"],
)
def test_deleted_contributions_are_told_and_count_all_the_same(chosen: Chosen) -> None:
    deleted: list[str] = []
    with cs.simulate(4, mailbox=True) as sim:
        results = sim.run(lambda swarm: train_beside_deletions(sim, swarm, chosen, deleted), seconds=3000)
        assert deleted, "no contribution was deleted"
        agree(results, *NAMES, rounds=12)
        authors = {name for name in NAMES if any(sim.swarms[name].id.hex() in path for path in deleted)}
        for name in authors:
            texts = [notice.text for notice in sim.swarms[name].events.recent(Notice)]
            rounds = {int(PLACE.search(path)[1]) for path in deleted if sim.swarms[name].id.hex() in path}  # type: ignore[index]
            for round in rounds:
                assert sum(f"contribution to round {round} was deleted" in text for text in texts) == 1
        assert not count(sim, BatchDropped)
        listed = {(entry.member.hex(), entry.round) for one in manifests(sim) for entry in one.entries}
        for path in deleted:
            place = PLACE.search(path)
            assert place is not None and (place[2], int(place[1])) in listed


def of_the_closer(author: PeerId, closer: PeerId) -> bool:
    return author == closer


def of_another(author: PeerId, closer: PeerId) -> bool:
    return author != closer


def of_anybody(author: PeerId, closer: PeerId) -> bool:
    return True


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [of_the_closer, of_another, of_anybody])
def test_a_contribution_that_is_deleted_as_a_manifest_lists_it_parts_nobody(
    chosen: Callable[[PeerId, PeerId], bool],
) -> None:
    deleted: list[str] = []
    with cs.simulate(3, mailbox=True) as sim:
        create = sim.bucket.create

        async def create_and_delete(path: str, data: bytes) -> bool:
            written = await create(path, data)
            if written and "/00000004-" in path and path.endswith("manifest-00"):
                closer = unseal(data, RoundManifest)[0].member
                for place in list(sim.bucket.objects):
                    match = PLACE.search(place)
                    in_round = place.rpartition("/")[0] == path.rpartition("/")[0]
                    if in_round and match and match[2] and chosen(PeerId(bytes.fromhex(match[2])), closer):
                        del sim.bucket.objects[place]
                        deleted.append(place)
            return written

        sim.bucket.create = create_and_delete  # type: ignore[method-assign]
        results = sim.run(lambda swarm: train(swarm, rounds=12), seconds=3000)
        assert deleted, "no contribution was deleted"
        agree(results, *NAMES, rounds=12)
        assert set(deleted) <= set(sim.bucket.objects), "their authors have written them again"
        listed = {entry.member for manifest in manifests(sim) for entry in manifest.entries}
        assert listed == {sim.swarms[name].id for name in NAMES}
