"""K-buckets: which contacts stay, which are replaced, which are nearest."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.dht.routing import MAX_FAILURES, MAX_LOST, MAX_RETRIES, RoutingTable, common_bits, distance
from colab_swarm.net.peers import Contact, PeerId

ME = PeerId(bytes(32))


def contact(number: int) -> Contact:
    return Contact(PeerId(number.to_bytes(2, "big") + bytes(30)), (f"sim://{number}",))


def far(number: int) -> Contact:
    return contact(0x8000 + number)


@pytest.fixture
def table() -> Iterator[RoutingTable]:
    table = RoutingTable(ME)
    yield table
    check_table(table)


def check_table(table: RoutingTable) -> None:
    for i, bucket in table._buckets.items():
        assert len(bucket) <= table._bucket_size
        assert all(common_bits(table._me, peer) == i for peer in bucket)
        assert not bucket.keys() & table.lost.keys()
    assert table.lost.keys() <= table._failures.keys() and len(table.lost) <= MAX_LOST


@settings(max_examples=50)
@given(st.sets(st.integers(1, 0xFFFF), max_size=80), st.integers(0, 0xFFFF), st.integers(1, 30))
def test_nearest_agrees_with_sorting_all_contacts(known: set[int], target: int, count: int) -> None:
    table = RoutingTable(contact(0x5555).id, bucket_size=100)
    for number in known - {0x5555}:
        table.saw(contact(number), 0.0)
    goal = contact(target).id
    expected = sorted(map(contact, known - {0x5555}), key=lambda c: distance(c.id, goal))[:count]
    assert table.nearest(goal, count) == expected
    check_table(table)


def test_a_full_bucket_keeps_its_old_members_while_they_answer() -> None:
    table = RoutingTable(ME, bucket_size=3)
    assert [table.saw(far(i), 0.0) for i in range(5)] == [True, True, True, False, False]
    assert set(table) == {far(0), far(1), far(2)}
    check_table(table)


def test_a_peer_may_fail_once_and_a_dropped_one_is_remembered_until_it_is_back(table: RoutingTable) -> None:
    table.saw(far(0), 0.0)
    for _ in range(2):  # an answer makes up for earlier failures
        table.saw(far(0), 0.0)
        table.failed(far(0).id)
    assert far(0).id in table and not table.lost
    table.failed(far(0).id)
    assert far(0).id not in table and list(table) == [] and list(table.lost.values()) == [far(0)]
    table.saw(Contact(far(0).id, ("sim://moved",)), 1.0)
    assert not table.lost and [contact.addresses for contact in table] == [("sim://moved",)]


def test_a_peer_that_stays_away_is_forgotten_and_the_lost_are_bounded() -> None:
    table = RoutingTable(ME, bucket_size=1000)
    for i in range(MAX_LOST + 5):
        table.saw(far(i), 0.0)
        for _ in range(MAX_FAILURES):
            table.failed(far(i).id)
    assert len(table.lost) == MAX_LOST
    for _ in range(MAX_RETRIES):
        table.failed(far(50).id)
    assert far(50).id not in table.lost
    check_table(table)


def test_peers_that_cannot_be_dialled_and_oneself_do_not_enter(table: RoutingTable) -> None:
    assert not table.saw(Contact(far(0).id), 0.0) and not table.saw(Contact(ME, ("sim://me",)), 0.0)
    table.saw(far(0), 0.0)
    assert not table.saw(Contact(far(0).id), 1.0) and len(table) == 0  # it could be dialled once
    assert table.refresh_targets(2e3, older_than_s=1e3, rng=random.Random(0))


def test_only_quiet_buckets_are_refreshed_with_an_id_of_their_range(table: RoutingTable) -> None:
    table.saw(contact(0x8000), 0.0)
    table.saw(contact(0x0001), 500.0)
    targets = table.refresh_targets(600.0, older_than_s=600.0, rng=random.Random(0))
    assert [common_bits(ME, target) for target in targets] == [0]
    targets = table.refresh_targets(2000.0, older_than_s=600.0, rng=random.Random(0))
    assert [common_bits(ME, target) for target in targets] == [0, 15]
