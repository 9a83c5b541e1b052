"""Contributions that somebody deletes: their authors say so, write them again, and the run goes on."""

import asyncio
from collections.abc import Callable

import pytest

import colab_swarm as cs
from colab_swarm.events import BatchDropped, Notice
from colab_swarm.mailbox.rounds import PLACE
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
