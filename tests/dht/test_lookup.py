"""The lookup decides well: whom it asks, whom it does not wait for, when it ends."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.dht.routing import GRACE, Lookup, distance
from colab_swarm.net.peers import Contact, PeerId

TARGET = bytes(32)


def near(number: int) -> Contact:
    return Contact(PeerId(number.to_bytes(32, "big")), ("sim://x",))


def lookup(*seeds: int, width: int = 3, alpha: int = 2, patience_s: float = 1.0) -> Lookup:
    return Lookup(TARGET, map(near, seeds), width=width, alpha=alpha, patience_s=patience_s)


def test_the_nearest_are_asked_by_twos_until_none_nearer_is_named() -> None:
    search = lookup(9, 5, 7, 8)
    assert search.next_queries(0.0) == [near(5), near(7)] and search.next_queries(0.0) == []
    search.on_answer(near(5).id, [near(4), near(9)])
    assert search.next_queries(0.0) == [near(4)]
    search.on_answer(near(7).id, [])
    search.on_answer(near(4).id, [near(8)])
    assert search.done(0.0) and search.next_queries(0.0) == [] and search.calls == 3
    assert search.hops(near(4).id) == 2 and search.nearest(2) == [near(4), near(5)]


def test_a_slow_peer_blocks_neither_the_next_query_nor_the_end() -> None:
    search = lookup(1, 2, 3, width=2, alpha=1)
    assert search.next_queries(0.0) == [near(1)] and search.wake_at(0.0) == 1.0
    assert search.next_queries(0.9) == [] and search.next_queries(1.0) == [near(2)]
    search.on_answer(near(2).id, [])
    assert search.next_queries(1.1) == [near(3)]
    search.on_answer(near(3).id, [])
    assert search.done(1.2)
    search.on_answer(near(1).id, [])  # after all
    assert search.done(1.2) and search.nearest(2) == [near(1), near(2)]


def test_where_there_are_too_few_others_slow_peers_are_given_grace() -> None:
    search = lookup(1, 2, width=3, alpha=3)
    search.next_queries(0.0)
    search.on_answer(near(2).id, [])
    assert not search.done(GRACE - 0.1) and search.done(GRACE) and search.wake_at(1.0) == GRACE


def test_without_any_answer_it_waits_to_the_end() -> None:
    search = lookup(1)
    search.next_queries(0.0)
    assert not search.done(1000.0) and search.wake_at(1000.0) is None
    search.on_answer(near(1).id, None)
    assert search.done(1000.0) and search.nearest(3) == []
    assert lookup().done(0.0), "without seeds"


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(5, 60), st.floats(0, 0.5))
def test_it_finds_the_nearest_living_whatever_dies(seed: int, peers: int, dead_share: float) -> None:
    rng = random.Random(seed)
    everyone = [Contact(PeerId(rng.randbytes(32)), ("sim://x",)) for _ in range(peers)]
    dead = {contact.id for contact in everyone if rng.random() < dead_share} - {everyone[0].id}
    search = Lookup(TARGET, everyone[:5], width=3, alpha=3)
    while not search.done(0.0):
        for contact in search.next_queries(0.0):
            search.on_answer(contact.id, None if contact.id in dead else everyone)
    alive = sorted((c for c in everyone if c.id not in dead), key=lambda c: distance(c.id, TARGET))
    assert search.nearest(3) == alive[:3]
