from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.dht.records import DHTSettings
from colab_swarm.dht.service import Found
from colab_swarm.moe.grid import (
    CLAIMED,
    MAX_ADDRESS_CHARS,
    PAGE,
    ExpertPlace,
    Grid,
    GridBranch,
    RecordRow,
    by_page,
    holdings,
    keys,
    position,
    shelf_of,
    short_addresses,
    width,
)
from colab_swarm.net.peers import MAX_MESSAGE_BYTES, Contact, PeerId

GRID = Grid("ffn", (4, 300))
ALICE, BOB = PeerId(b"a" * 32), PeerId(b"b" * 32)


def received(record: Any, owner: PeerId | None = ALICE) -> Found:
    """Return a record as the DHT does at swarm time 1000, one minute before it expires."""
    return Found(msgspec.msgpack.decode(msgspec.msgpack.encode(record)), 1060.0, owner)


def read(prefix: tuple[int, ...], found: dict[bytes, Found]) -> dict[PeerId, list[int]]:
    decoded = holdings(GRID, prefix, found, now=5.0, swarm_time=1000.0)
    assert all(one.until == 65.0 for records in decoded.values() for one in records)
    return {host: [one.index for one in records] for host, records in decoded.items()}


def test_a_row_describes_its_experts() -> None:
    row = RecordRow(
        ("ws://203.0.113.7:4500",), (ExpertPlace(7, 123, 5, (16, -1)), ExpertPlace(9, 124, CLAIMED, ()))
    )
    decoded = holdings(GRID, (3,), {ALICE: received(row)}, now=5.0, swarm_time=1000.0)
    (seven, nine) = decoded[ALICE]
    assert seven.host == Contact(ALICE, row.addresses) and seven.place == row.places[0]
    assert seven.served and not nine.served and seven.claim == (123, ALICE)


def test_a_branch_lists_next_indices_and_is_empty_after_its_host_left() -> None:
    found = {ALICE: received(GridBranch((0, 3))), BOB: received(GridBranch(()), BOB)}
    assert read((), found) == {ALICE: [0, 3], BOB: []}


ROW = RecordRow((), (ExpertPlace(1, 2, 3, ()),))


@pytest.mark.parametrize(
    ("subkey", "record", "owner"),
    [
        (ALICE, ROW, BOB),
        (ALICE, ROW, None),
        (b"", ROW, ALICE),
        (ALICE, GridBranch((1,)), ALICE),
        (ALICE, None, ALICE),
        (ALICE, [[], [[-1, 2, 3, []]]], ALICE),
        (ALICE, [[], [[1, 2, -2, []]]], ALICE),
        (ALICE, [[], [[1, 2, 3, [1] * 9]]], ALICE),
        (ALICE, [["a" * 1000], []], ALICE),
        (ALICE, [["a"] * 17, []], ALICE),
    ],
)
def test_records_that_are_invalid_or_not_the_hosts_own_are_dropped(
    subkey: bytes, record: Any, owner: PeerId | None
) -> None:
    assert read((3,), {subkey: received(record, owner)}) == {}


def test_indices_beyond_the_grid_are_dropped() -> None:
    assert read((), {ALICE: received(GridBranch((3, 4)))}) == {ALICE: [3]}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
)


@settings(max_examples=50)
@given(VALUES, st.sampled_from([(), (3,)]), st.binary(max_size=40))
def test_no_strangers_record_does_harm(value: Any, prefix: tuple[int, ...], subkey: bytes) -> None:
    found = {subkey: Found(value, 1060.0, PeerId(subkey)), ALICE: Found(value, 1060.0, ALICE)}
    holdings(GRID, prefix, found, now=5.0, swarm_time=1000.0)


def test_a_wide_prefix_has_several_keys() -> None:
    assert keys("run", GRID, ()) == ["run/experts/ffn/0"]
    assert keys("run", GRID, (3,)) == ["run/experts/ffn.3/0", "run/experts/ffn.3/1"]
    assert by_page([299, 0, 256, 255]) == {0: [0, 255], 1: [256, 299]}


SIDES = st.lists(st.integers(1, 40), min_size=1, max_size=3) | st.tuples(
    st.integers(1, 3), st.integers(200, 600)
)


@settings(max_examples=30)
@given(SIDES, st.data())
def test_every_place_has_one_position_on_its_shelf(sides: list[int], data: st.DataObject) -> None:
    grid = Grid.of("ffn", sides)
    some = st.tuples(*(st.integers(0, side - 1) for side in sides))
    places = data.draw(st.lists(some, min_size=1, max_size=20, unique=True))
    shelf = shelf_of(grid, places[0][:-1])
    neighbours = [place for place in places if shelf_of(grid, place[:-1]) == shelf]
    row = RecordRow((), tuple(ExpertPlace(position(grid, place), 1, 2, ()) for place in neighbours))
    decoded = holdings(grid, shelf, {ALICE: received(row)}, now=5.0, swarm_time=1000.0)[ALICE]
    assert [one.uid for one in decoded] == [grid.uid(place) for place in neighbours]
    assert shelf_of(grid, shelf) == shelf and max(one.index for one in decoded) < width(grid, shelf)


def test_a_shelf_ends_with_the_grid() -> None:
    grid = Grid("ffn", (5, 64))
    assert [shelf_of(grid, (i,)) for i in range(5)] == [(0,), (0,), (0,), (0,), (4,)]
    row = RecordRow((), (ExpertPlace(63, 1, 2, ()), ExpertPlace(64, 1, 2, ()), ExpertPlace(256, 1, 2, ())))
    decoded = holdings(grid, (4,), {ALICE: received(row)}, now=5.0, swarm_time=1000.0)
    assert [one.uid for one in decoded[ALICE]] == ["ffn.4.63"]


def test_addresses_that_do_not_fit_are_dropped() -> None:
    chosen = short_addresses(Contact(ALICE, ("a" * 100, "b" * 200, "c" * 100)))
    assert chosen == ("a" * 100, "c" * 100) and sum(map(len, chosen)) <= MAX_ADDRESS_CHARS


def test_a_full_page_of_hosts_with_many_addresses_fits_under_one_key() -> None:
    row = RecordRow(("a" * MAX_ADDRESS_CHARS,), (ExpertPlace(PAGE, 1 << 45, 1 << 40, (512, 1024)),))
    record_bytes = len(msgspec.msgpack.encode(row)) + 32
    assert PAGE * (record_bytes + 256) <= DHTSettings().key_bytes  # as a holder counts
    assert PAGE * (record_bytes + 150) <= MAX_MESSAGE_BYTES  # owner, signature, times
