"""Cores of several peers against each other: in every order of events they end, and in one group if nobody lies."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.group import Group, GroupMember, Joined
from colab_swarm.net.peers import PeerId
from tests.averaging.cores import PEERS, TERMS, Book, CorePeer, CoreTown, Liar, Script

seeds = st.integers(0, 1 << 32)
counts = st.integers(1, len(PEERS))


@given(seeds, counts, st.sampled_from([0.0, 0.01, 0.1]), st.sampled_from([0.0, 0.5, 1.5]))
@settings(max_examples=200, deadline=None)
def test_all_peers_end_in_one_group_when_nobody_lies_and_nobody_is_lost(
    seed: int, count: int, latest_s: float, apart_s: float
) -> None:
    script = Script(random.Random(seed), latest_s)
    town = CoreTown(script, count)
    for peer in town.everybody:
        town.add(CorePeer(peer, town, script.now + script.rng.uniform(0.0, apart_s)))
    script.run()
    groups = {peer.group for peer in town.honest()}
    assert len(groups) == 1
    group = groups.pop()
    assert group is not None and [member.id for member in group.members] == town.everybody


@given(seeds, st.integers(2, len(PEERS)), st.sampled_from([0.0, 0.01, 0.5]))
@settings(max_examples=200, deadline=None)
def test_peers_that_know_different_candidates_end_with_one_group_for_each_round(
    seed: int, count: int, latest_s: float
) -> None:
    script = Script(random.Random(seed), latest_s)
    town = CoreTown(script, count)
    for peer in town.everybody:
        town.add(CorePeer(peer, town, script.now + script.rng.uniform(0.0, 0.5)))
        town.peer(peer).candidates = script.rng.sample(town.everybody, script.rng.randint(1, count))
    script.run()
    town.check_groups()


@given(seeds, st.integers(2, len(PEERS)), st.sampled_from([0.01, 0.5, 3.0]), st.floats(0.0, 6.0))
@settings(max_examples=200, deadline=None)
def test_every_peer_that_is_left_has_a_group_when_one_is_lost_on_a_slow_network(
    seed: int, count: int, latest_s: float, lost_after_s: float
) -> None:
    script = Script(random.Random(seed), latest_s)
    town = CoreTown(script, count)
    for peer in town.everybody:
        town.add(CorePeer(peer, town, script.now + script.rng.uniform(0.0, 2.0)))
    lost = script.rng.choice(town.everybody)
    script.at(script.now + lost_after_s, lambda: town.crash(lost))
    script.run()
    town.check_groups()
    assert latest_s > 0.1 or all(peer.group is not None for peer in town.honest())


def lies(rng: random.Random, everybody: list[PeerId], asker: PeerId) -> Joined | None:
    member = GroupMember(asker, (), 10.0, 1.0)
    return rng.choice(
        [
            None,
            Joined(reason="late", text="no"),
            Joined(reason="resync", text="no"),
            Joined(reason="unreachable"),
            Joined(organizer=Book(rng.choice(everybody)).contact),
            Joined(Group(bytes(16), TERMS, (member,))),
            Joined(Group(b"short", TERMS, (member,))),
            Joined(Group(bytes(16), TERMS, (GroupMember(everybody[-1], (), 10.0, 1.0),))),
        ]
    )


@given(seeds, st.integers(3, len(PEERS)), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_with_liars_each_search_ends_and_the_members_of_a_round_have_one_group(
    seed: int, count: int, hostile: int
) -> None:
    script = Script(random.Random(seed), 0.1)
    town = CoreTown(script, count)
    liars = script.rng.sample(town.everybody, min(hostile, count - 2))
    for peer in town.everybody:
        if peer in liars:
            town.add(Liar(peer, town, lambda asker: lies(script.rng, town.everybody, asker)))
        else:
            town.add(CorePeer(peer, town, script.now + script.rng.uniform(0.0, 1.0)))
    script.run()
    town.check_groups()
