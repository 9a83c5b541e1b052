import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.dht.records import KEY_BYTES
from colab_swarm.dht.service import Found
from colab_swarm.moe import grid as grids
from colab_swarm.moe.grid import ExpertPlace, Grid, GridPage, GridRecord, Index, Mask, announced, beam_search
from colab_swarm.net.peers import MAX_MESSAGE_BYTES, Contact, PeerId, Role
from colab_swarm.tensors.codecs import Floats


def test_names_prefixes_and_sides_that_make_no_grid_are_refused() -> None:
    for uid in ("ffn.1", "ffn.1.2.3", "ffn.1.9", "ffn.1.02", "ffn.1.-1", "ffn.1.²", "gfn.1.2", "", "ffn.1."):
        with pytest.raises(ValueError, match="not an expert of"):
            Grid("ffn", (2, 9)).index(uid)
    for prefix in ("", "a b", "ffn.1", "ffn.", "x" * 129):  # an expert could be meant
        with pytest.raises(ValueError, match="names no experts"):
            Grid(prefix, (2,))
    assert Grid("x" * 128, (2,)).size == 2
    for sides in ((), (0,), (2, 2, 2, 2, 2), (10_000,)):
        with pytest.raises(ValueError, match="dimensions"):
            Grid("ffn", sides)


GRID = Grid("ffn", (4, 300))
ALICE, BOB = PeerId(b"a" * 32), PeerId(b"b" * 32)


def found(value: Any) -> Found:
    return Found(value, 1060.0, Role.WORKER)


def received(record: Any) -> Found:
    """Return a record as the DHT does at swarm time 1000, one minute before it expires."""
    return found(msgspec.msgpack.decode(msgspec.msgpack.encode(record)))


PREFIXES, PLACES = GridPage(GRID, 1, 0), GridPage(GRID, 2, 3)


def read(page: GridPage, told: dict[PeerId, Found]) -> dict[PeerId, list[int]]:
    decoded = announced(page, told.items(), now=5.0, swarm_time=1000.0)
    assert all(one.until == 65.0 for held in decoded.values() for one in held.values())
    return {host: [*held] for host, held in decoded.items()}


@pytest.mark.parametrize(
    "record",
    [
        *([[], [7]], None, [[], [[-1, 2, 3, []]]], [[], [[grids.PAGE, 2, 3, []]]], [[], [[1, 2, -2, []]]]),
        *([[], [[1, 2, 3, [1] * 9]]], [["a" * 1000], []], [["a"] * 17, []]),
    ],
)
def test_records_that_are_invalid_are_dropped(record: Any) -> None:
    assert read(PLACES, {ALICE: received(record)}) == {}


def test_a_page_of_prefixes_is_empty_after_its_host_left_and_has_none_beyond_the_grid() -> None:
    told = {
        ALICE: received(GridRecord((), tuple(map(ExpertPlace, (0, 3, 4))))),
        BOB: received(GridRecord((), ())),
    }
    assert read(PREFIXES, told) == {ALICE: [0, 3], BOB: []}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
)


@settings(max_examples=50)
@given(VALUES, st.sampled_from([PREFIXES, PLACES]), st.binary(max_size=40))
def test_no_strangers_record_does_harm(value: Any, page: GridPage, peer: bytes) -> None:
    told = {PeerId(peer): found(value), ALICE: found(value)}
    announced(page, told.items(), now=5.0, swarm_time=1000.0)


ANY_SIDES = st.lists(st.integers(1, 40), min_size=1, max_size=3) | st.tuples(
    st.integers(1, 3), st.integers(200, 600)
)


@settings(max_examples=30)
@given(ANY_SIDES, st.data())
def test_every_place_has_one_position_in_one_page(sides: list[int], data: st.DataObject) -> None:
    grid = Grid("ffn", tuple(sides))
    place = tuple(data.draw(st.integers(0, side - 1)) for side in sides)
    assert grid.index(grid.uid(place)) == place and grid.size == math.prod(sides)
    for length in range(1, len(sides) + 1):
        page, position = GridPage.of(grid, place[:length]), grid.number(place[:length]) % grids.PAGE
        assert page in GridPage.below(grid, place[: length - 1]) and page.index_at(position) == place[:length]
    row = GridRecord((), (ExpertPlace(position, 1, 2, ()),))
    decoded = announced(page, [(ALICE, received(row))], now=5.0, swarm_time=1000.0)[ALICE]
    assert [one.uid for one in decoded.values()] == [grid.uid(place)]


def test_addresses_that_do_not_fit_are_dropped() -> None:
    chosen = grids.short_addresses(Contact(ALICE, ("a" * 100, "b" * 157, "c" * 156)))
    assert chosen == ("a" * 100, "c" * 156) and sum(map(len, chosen)) == grids.MAX_ADDRESS_CHARS


def test_a_full_page_of_hosts_with_many_addresses_fits_under_one_key() -> None:
    place = ExpertPlace(grids.PAGE - 1, 1 << 45, 1 << 40, (512, 1024))
    row = GridRecord(("a" * grids.MAX_ADDRESS_CHARS,), (place,))
    record_bytes = len(msgspec.msgpack.encode(row)) + 32
    assert grids.PAGE * (record_bytes + 256) <= KEY_BYTES  # as a holder counts
    assert grids.PAGE * (record_bytes + 150) <= MAX_MESSAGE_BYTES  # owner, signature, times


Scores = list[Floats]
Problem = tuple[tuple[int, ...], set[Index], Scores, int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Sides, live experts, scores with many ties, k."""
    sides = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    everywhere = list(itertools.product(*map(range, sides)))
    live = set(draw(st.lists(st.sampled_from(everywhere), max_size=20)))
    samples = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    scores = [rng.integers(-3, 4, (samples, side)).astype(np.float32) for side in sides]
    return sides, live, scores, draw(st.integers(1, 5))


def children_of(sides: tuple[int, ...], live: set[Index], prefix: Index) -> Mask:
    """Return what up-to-date records in the DHT would say."""
    depth = len(prefix)
    mask = np.zeros(sides[depth], np.bool_)
    mask[[index[depth] for index in live if index[:depth] == prefix]] = True
    return mask


def value(scores: Scores, sample: int, index: Index) -> float:
    return float(sum(scores[i][sample, j] for i, j in enumerate(index)))


def top(scores: Scores, sample: int, candidates: set[Index], k: int) -> list[Index]:
    return sorted(candidates, key=lambda index: (-value(scores, sample, index), index))[:k]


def replacing_beams(children: Callable[[Index], Mask], scores: Scores, k: int) -> list[list[Index]]:
    """Algorithm 1 for all samples at once, repeated without the prefixes found to have no live child.

    Which barren prefixes a beam meets depends on those met before, so the result belongs to this order.
    """
    barren: set[Index] = set()
    while True:
        known, beams = len(barren), [[()] for _ in scores[0]]
        for _ in scores:
            prefixes = set[Index]().union(*beams)
            below = {p: {(*p, int(j)) for j in np.flatnonzero(children(p))} - barren for p in prefixes}
            barren |= {prefix for prefix, live in below.items() if prefix and not live}
            candidates = [set[Index]().union(*map(below.get, beam)) for beam in beams]
            beams = [top(scores, n, found, k) for n, found in enumerate(candidates)]
        if len(barren) == known:
            return beams


@settings(max_examples=50)
@given(problems(), st.data())
def test_stale_prefixes_are_replaced_by_the_next_best(problem: Problem, data: st.DataObject) -> None:
    sides, live, scores, k = problem
    dead = data.draw(st.sets(st.sampled_from(sorted(live)))) if live else set()

    def children(prefix: Index) -> Mask:
        """Rows are up to date, prefixes above them still contain dead experts."""
        return children_of(sides, live - dead if len(prefix) == len(sides) - 1 else live, prefix)

    found = beam_search(scores, k, children)[0]
    assert all(index in live - dead for best in found for index in best)
    assert found == replacing_beams(children, scores, k)


def test_nan_is_the_worst_score_and_an_empty_grid_or_batch_gives_an_empty_result() -> None:
    scores = [np.array([[np.nan, 1.0, np.inf, -np.inf]], np.float32)]
    assert beam_search(scores, 4, lambda _: np.ones(4, np.bool_))[0] == [[(2,), (1,), (0,), (3,)]]
    assert beam_search([np.zeros((2, 3), np.float32)], 1, lambda _: np.zeros(3, np.bool_))[0] == [[], []]
    assert beam_search([np.zeros((0, 3), np.float32)], 1, lambda _: np.ones(3, np.bool_))[0] == []
