"""What a peer holds: latest wins, owners keep what is theirs, everything ends and is bounded."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.dht import records
from colab_swarm.dht.records import Fetch, Fetched, Record, Storage, Stored, StoreRecord
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import UNDECODABLE, Role

KEY, RUN = bytes(32), "run"
WALL = 1.75e9
ALICE, BOB, CAROL = (Identity(letter * 32) for letter in (b"a", b"b", b"c"))


def record(
    value: bytes = b"v",
    by: Identity = ALICE,
    at: float = 0,
    ttl_s: float = 60,
    key: bytes = KEY,
    membership: bytes = b"",
) -> Record:
    version = int((WALL + at) * 1e6)
    unsigned = Record(
        msgspec.msgpack.encode(value), WALL + at + ttl_s, version, ttl_s, by.public_key, membership
    )
    return msgspec.structs.replace(unsigned, signature=by.sign(unsigned.signed_bytes(key)))


def resigned(**change: object) -> Record:
    changed = msgspec.structs.replace(record(), **change)
    return msgspec.structs.replace(changed, signature=ALICE.sign(changed.signed_bytes(KEY)))


def storage_of(role: Role = Role.WORKER) -> Storage:
    return Storage(lambda key, membership, at: role)


def put(storage: Storage, new: Record, *, now: float = 0.0) -> str | None:
    refusal = storage.put(KEY, new, now=now, swarm_time=WALL + now)
    check_storage(storage)
    return refusal


def check_storage(storage: Storage) -> None:
    sizes: dict[bytes, int] = {}
    for key, held in storage._keys.items():
        sizes[key] = sum(record.size_bytes for record, _ in held.values())
        assert 0 < sizes[key] <= records.KEY_BYTES
    assert storage.total_bytes == sum(sizes.values()) <= records.TOTAL_BYTES
    owned = storage._owned
    assert owned.total() == storage.total_bytes and all(owned.values())
    assert len(storage._places) == sum(map(len, storage._keys.values()))
    assert all(size <= records.OWNER_BYTES for size in owned.values())


def values(storage: Storage, *, now: float = 0.0) -> set[bytes]:
    return {msgspec.msgpack.decode(held.value) for held in storage.get(KEY, now=now)}


@pytest.fixture
def storage() -> Storage:
    return storage_of()


def test_the_latest_version_of_each_owner_wins_until_it_ends(storage: Storage) -> None:
    assert put(storage, record(b"new", at=2, ttl_s=10)) is None
    assert put(storage, record(b"bob's", BOB)) is None
    again = msgspec.structs.replace(record(b"new", at=2, ttl_s=10), ttl_s=8000.0)
    assert put(storage, again) is None  # and changes nothing
    assert put(storage, record(b"old", at=1, ttl_s=5), now=9.9) == "a newer record is held"
    assert values(storage, now=9.9) == {b"new", b"bob's"}
    assert min(held.ttl_s for held in storage.get(KEY, now=4.0)) == 6.0
    assert values(storage, now=10.0) == {b"bob's"}
    assert put(storage, record(b"old", at=1), now=10.0) is None
    assert put(storage, record(b"newest", at=3), now=10.0) is None
    assert values(storage, now=11.0) == {b"newest", b"bob's"}
    assert values(storage, now=70.0) == set() and storage.total_bytes == 0


def test_what_may_only_watch_publishes_nothing() -> None:
    storage = storage_of(Role.VIEWER)
    assert "may only watch" in str(put(storage, record())) and values(storage) == set()


@pytest.mark.parametrize("field", ["value", "expires_at", "version", "membership", "signature"])
def test_a_forged_record_is_refused(storage: Storage, field: str) -> None:
    good = record()
    forged = {"expires_at": good.expires_at + 1, "version": good.version + 1}.get(field, bytes(64))
    refusal = put(storage, msgspec.structs.replace(good, **{field: forged}))
    assert refusal == "its signature is forged" and values(storage) == set()
    assert put(storage, record(key=b"k" * 32)) == "its signature is forged"


@pytest.mark.parametrize("skew_s", [-records.CLOCK_SLACK_S, records.CLOCK_SLACK_S])
def test_a_writer_whose_clock_is_off_is_heard(storage: Storage, skew_s: float) -> None:
    assert put(storage, record(at=skew_s, ttl_s=30)) is None
    assert values(storage, now=29.0) == {b"v"} and values(storage, now=31.0) == set()


@pytest.mark.parametrize(
    "bad",
    [
        record(ttl_s=0.0),
        record(ttl_s=math.nan),
        record(ttl_s=1e9),
        record(at=-records.CLOCK_SLACK_S - 61),  # replayed after its end
        record(at=2 * records.CLOCK_SLACK_S),
        record(bytes((1 << 15) - 2)),
        resigned(value=b"\xa1\xff"),
        resigned(value=b"\x91" * 30_000),
        Record(b"", math.inf, 0, 60.0, b""),
        Record(b"", math.nan, 0, 60.0, b""),
        Record(b"", WALL + 60, 1 << 63, 60.0, b""),
    ],
)
def test_a_record_out_of_bounds_is_refused(storage: Storage, bad: Record) -> None:
    assert put(storage, bad) is not None and storage.total_bytes == 0


def test_in_a_full_key_a_new_record_takes_the_place_of_the_oldest_of_the_long_ones(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEY_BYTES", 3 * 300)
    for by in (ALICE, BOB, CAROL):
        assert put(storage, record(by.public_key[:1], by)) is None
    put(storage, record(ALICE.public_key[:1], ALICE, at=1))  # renewed
    assert put(storage, record(b"new", Identity(b"d" * 32))) is None
    assert values(storage) == {ALICE.public_key[:1], CAROL.public_key[:1], b"new"}
    assert "key is full" in str(put(storage, record(bytes(2000), Identity(b"e" * 32))))


def test_a_stuffed_key_loses_the_longest_records_first(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEY_BYTES", 8 * 4096)
    for i in range(8):
        put(storage, record(bytes(3700), Identity(bytes([i]) * 32)))
    for i in range(20):
        assert put(storage, record(b"%d" % i, Identity(bytes([100 + i]) * 32))) is None
    assert {b"%d" % i for i in range(20)} <= values(storage)


def test_one_owner_fills_neither_a_peer_nor_more_than_its_part(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "OWNER_BYTES", 900)
    monkeypatch.setattr(records, "TOTAL_BYTES", 1500)
    keys = [bytes([i]) * 32 for i in range(9)]

    def store(by: Identity, key: bytes) -> str | None:
        refusal = storage.put(key, record(by=by, key=key), now=0.0, swarm_time=WALL)
        check_storage(storage)
        return refusal

    assert [store(ALICE, key) for key in keys[:3]] == [None] * 3
    assert "its owner has 900 bytes" in str(store(ALICE, keys[3]))
    assert [store(BOB, key) for key in keys[4:7]] == [None] * 3  # the third in place of alice's oldest
    assert not storage.get(keys[0], now=0.0) and storage.get(keys[1], now=0.0)
    assert store(CAROL, keys[8]) is None and len([*storage]) == 5


def test_a_record_of_the_largest_size_is_held_and_many_updates_take_no_more_room(storage: Storage) -> None:
    assert put(storage, record(bytes((1 << 15) - 3), ttl_s=86_400.0)) is None
    for i in range(1, 50):
        assert put(storage, record(at=i / 1000)) is None
    assert storage.total_bytes == record().size_bytes == len(record().value) + 256


wild_records = st.builds(
    Record,
    value=st.binary(max_size=40),
    expires_at=st.floats() | st.floats(WALL - 1000, WALL + 1000),
    version=st.integers(-(1 << 63), 1 << 63) | st.just(int(WALL * 1e6)),
    ttl_s=st.floats() | st.floats(0, 1000),
    owner=st.binary(max_size=40) | st.just(ALICE.public_key),
    membership=st.binary(max_size=40),
    signature=st.binary(max_size=70),
)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.tuples(wild_records, st.floats(0, 100)), max_size=8))
def test_no_record_breaks_the_counters(arrivals: list[tuple[Record, float]]) -> None:
    storage = storage_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "TOTAL_BYTES", 1500)
        for new, now in sorted(arrivals, key=lambda arrival: arrival[1]):
            put(storage, new, now=now)
    assert values(storage, now=100.0 + records.MAX_TTL_S) == set()


MESSAGES = [records.FindNear, records.FoundNear, Fetch, Fetched, StoreRecord, Stored]


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from(MESSAGES))
def test_random_bytes_are_no_message_or_a_valid_one(data: bytes, kind: type[Any]) -> None:
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
