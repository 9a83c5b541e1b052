"""Objects, the chain of manifests, contributions and their mean: pure."""

import itertools
import math
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError
from colab_swarm.mailbox import contributions, rounds
from colab_swarm.mailbox.view import LEAST_PAUSE_S
from colab_swarm.net.handshake import VERSION
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import Floats, codec_of
from colab_swarm.tensors.vector import HostVector

ALICE, BOB, CAROL = (Identity(bytes([number]) * 32) for number in range(1, 4))
ROOT = bytes(32)


def contribution(who: Identity, values: Floats, round: int = 0, weight: float = 1.0) -> bytes:
    content = contributions.encode(codec_of("float32"), HostVector(values))
    told = {"weight": weight, "samples": weight, "samples_per_s": 1.0, "seconds": 10.0, "name": ""}
    place = {"prefix": "model", "key": who.public_key, "membership": b"", "round": round, "base": ROOT}
    head = rounds.PseudoGradient(content=rounds.content_digest(content), **place, **told)
    return rounds.seal(head.signed(who.sign), content)


def offer(
    who: Identity, values: Floats, round: int = 0, weight: float = 1.0
) -> contributions.ReadContribution:
    data = contribution(who, values, round, weight)
    head, content = rounds.unseal(data, rounds.PseudoGradient)
    norm = contributions.norm_of(codec_of("float32"), content, len(values))
    return contributions.ReadContribution(head, content, rounds.content_digest(data), norm)


def entries_of(
    chain: rounds.RoundChain, offered: Iterable[contributions.ReadContribution]
) -> tuple[rounds.ManifestEntry, ...]:
    return contributions.entries_of(chain, [contribution.offer for contribution in offered])


def manifest(
    chain: rounds.RoundChain, places: list[tuple[PeerId, int]], **other: object
) -> rounds.RoundManifest:
    entries = tuple(
        rounds.ManifestEntry(member, round, ROOT, 1.0, 1.0, 1.0, 10.0) for member, round in places
    )
    given = {"round": chain.round, "base": chain.base, "entries": entries, **other}
    return rounds.RoundManifest(prefix="model", key=ALICE.public_key, membership=b"", **given)


def after(chain: rounds.RoundChain, *members: Identity) -> rounds.RoundChain:
    made = manifest(chain, sorted((one.id, chain.round) for one in members))
    return chain.after(made, bytes([chain.round]) * 32, closed_at=chain.closed_at + 10.0)


def paced(chain: rounds.RoundChain, claims_s: dict[Identity, float], took_s: float) -> float:
    """Return the pace after a round of these members, which say how long they took."""
    made = manifest(chain, sorted((who.id, chain.round) for who in claims_s))
    by_id = {who.id: claim_s for who, claim_s in claims_s.items()}
    entries = tuple(msgspec.structs.replace(entry, seconds=by_id[entry.member]) for entry in made.entries)
    closed = msgspec.structs.replace(made, entries=entries)
    return chain.after(closed, b"x" * 32, closed_at=chain.closed_at + took_s).pace_s


FIRST = rounds.RoundChain.begin(0, ROOT, now=0.0)
CHAIN = after(FIRST, ALICE, BOB, CAROL)  # closed at 10 s, usual rounds of 10 s


def test_an_object_is_read_as_written_and_any_damage_is_found() -> None:
    data = contribution(ALICE, np.arange(5, dtype=np.float32))
    head, content = rounds.unseal(data, rounds.PseudoGradient)
    assert head.member == ALICE.id and bytes(content) == np.arange(5, dtype=np.float32).tobytes()
    forged = msgspec.structs.replace(head, key=BOB.public_key)
    others = [data[:end] for end in (0, 3, 4, 60, len(data) - 1)]
    others += [data + b"x", rounds.seal(head), rounds.seal(forged, content), rounds.seal(manifest(CHAIN, []))]
    others += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), 7)]
    for other in others:
        with pytest.raises(ProtocolError):
            rounds.unseal(other, rounds.PseudoGradient)


def object_of(version: int, statement: rounds.Statement, content: bytes = b"") -> bytes:
    """As another version of the package writes it, with fields that this one does not know."""
    head = msgspec.msgpack.encode([*msgspec.structs.astuple(statement), "a field of then"])
    return b"colab_swarm" + bytes([version]) + len(head).to_bytes(4, "big") + head + content


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, 255])
@pytest.mark.parametrize("kind", ["card", "manifest", "contribution", "state"])
def test_an_object_of_another_version_is_told_by_both_versions_and_no_signature(
    kind: str, version: int
) -> None:
    who = {"prefix": "model", "key": ALICE.public_key, "membership": b"", "signature": bytes(64)}
    statements: dict[str, rounds.Statement] = {
        "card": rounds.Card(schema=b"", agreement=(), **who),
        "manifest": manifest(CHAIN, [(ALICE.id, 1)]),
        "contribution": offer(ALICE, np.ones(3, np.float32)).head,
        "state": rounds.StateHead(chain=CHAIN, manifest=b"", **who),
    }
    text = (
        f"the run was written by protocol {version}, this package speaks {VERSION}: update the older of both"
    )
    with pytest.raises(ProtocolError, match=f"^{text}$"):
        rounds.unseal(object_of(version, statements[kind]), type(statements[kind]))


@pytest.mark.parametrize(
    ("present", "wait_s"),
    [
        ([], math.inf),
        ([ALICE, BOB, CAROL], 0.0),
        ([ALICE, BOB], 10.0 + rounds.LEAST_GRACE_S / 2 + 4.0),
        ([ALICE], 20.0 + rounds.LEAST_GRACE_S),
    ],
)
def test_a_round_waits_for_the_members_of_the_last_one(present: list[Identity], wait_s: float) -> None:
    due_at = CHAIN.due_at([one.id for one in present], patience_s=lambda member: 4.0)
    assert due_at == CHAIN.closed_at + wait_s


@pytest.mark.parametrize(
    ("pace_s", "wait_s"), [(1.0, 8.0), (10.0, 26.0), (60.0, 135.0), (360.0, 810.0), (3600.0, 7290.0)]
)
def test_the_wait_for_most_members_is_two_usual_rounds_and_a_grace(pace_s: float, wait_s: float) -> None:
    chain = msgspec.structs.replace(CHAIN, pace_s=pace_s)
    assert chain.due_at([ALICE.id]) == chain.closed_at + wait_s


@given(st.floats(rounds.MIN_PACE_S, rounds.MAX_PACE_S), st.floats(0.0, 1e9))
def test_most_members_replace_a_manifest_before_its_writer_goes_on_alone(
    pace_s: float, claimed_s: float
) -> None:
    """Whatever pace it claims, with whole seconds of the store's and a pause between two looks."""
    chain = msgspec.structs.replace(CHAIN, pace_s=pace_s)
    made = manifest(chain, sorted((who.id, 1) for who in (ALICE, BOB)))
    entries = [msgspec.structs.replace(entry, seconds=claimed_s) for entry in made.entries]
    forged = msgspec.structs.replace(made, entries=tuple(entries))
    later = chain.after(forged, b"x" * 32, closed_at=100.0)
    assert later.deadline - 1.0 > 100.0 + chain.missing_s + 1.0 + LEAST_PAUSE_S


def test_the_pace_is_the_median_claim_and_not_more_than_the_round_took() -> None:
    claims_s = {ALICE: 9.0, BOB: 11.0, CAROL: 12.0}
    assert paced(CHAIN, claims_s, took_s=13.0) == 11.0
    # one member claims hours, or nothing
    assert paced(CHAIN, {**claims_s, CAROL: 9e11}, took_s=13.0) == 11.0
    assert paced(CHAIN, {**claims_s, CAROL: 0.0}, took_s=13.0) == 9.0
    assert paced(CHAIN, {ALICE: 9.0, BOB: 9e11, CAROL: 9e11}, took_s=13.0) == 13.0


def test_one_long_round_does_not_stretch_the_rounds_after_it_for_long() -> None:
    chain = msgspec.structs.replace(CHAIN, pace_s=3600.0)
    paces = []
    for _ in range(6):
        chain = after(chain, ALICE, BOB)
        paces.append(chain.pace_s)
    assert paces == [900.0, 225.0, 56.25, 14.0625, 10.0, 10.0]


@pytest.mark.parametrize(
    ("places", "other", "late", "fault"),
    [
        ([(ALICE, 1), (BOB, 1), (CAROL, 1)], {}, False, ""),
        ([(ALICE, 1), (BOB, 1)], {}, True, ""),
        ([(ALICE, 1), (BOB, 1)], {}, False, "before a usual round is over"),
        ([(ALICE, 1), (BOB, 1)], {"base": b"x" * 32}, False, "does not follow"),
        ([(ALICE, 1), (BOB, 1)], {"round": 2}, False, "does not follow"),
        ([(ALICE, 1), (ALICE, 1), (BOB, 1)], {}, False, "twice"),
        ([(ALICE, 0), (ALICE, 1), (BOB, 1)], {}, False, "twice"),
        ([(ALICE, 0), (BOB, 1), (CAROL, 1)], {}, False, "counted before"),
        ([(ALICE, 2), (BOB, 1)], {}, False, "too old"),
        ([(ALICE, 1)], {}, False, "leaves out"),
        ([(ALICE, 1)], {}, True, ""),
    ],
)
def test_faults_of_a_manifest(
    places: list[tuple[Identity, int]], other: dict[str, object], late: bool, fault: str
) -> None:
    made = manifest(CHAIN, sorted((who.id, round) for who, round in places), **other)
    early_at = CHAIN.late_at - rounds.WHOLE_SECOND_S - 0.1
    found = CHAIN.fault_of(made, written_at=CHAIN.deadline if late else early_at)
    assert fault in found and bool(fault) == bool(found)


@given(
    st.lists(
        st.sets(st.tuples(st.sampled_from([ALICE.id, BOB.id]), st.integers(0, 9)), min_size=1), max_size=9
    )
)
def test_no_contribution_counts_twice_or_late(proposals: list[set[tuple[PeerId, int]]]) -> None:
    chain, counted = FIRST, list[tuple[PeerId, int]]()
    for number, places in enumerate(proposals):
        made = manifest(chain, sorted(places))
        if not chain.fault_of(made, written_at=math.inf):
            assert all(chain.round - rounds.WINDOW <= round <= chain.round for _, round in places)
            counted += places
            chain = chain.after(made, bytes([number]) * 32, closed_at=0.0)
    assert len(counted) == len(set(counted))


def test_nobody_weighs_or_moves_more_than_the_bounds() -> None:
    ones = np.ones(4, np.float32)
    offers = [offer(ALICE, ones), offer(BOB, 0.5 * ones), offer(CAROL, 1e30 * ones, weight=1e9)]
    entries = {entry.member: entry for entry in entries_of(CHAIN, offers)}
    assert entries[CAROL.id].weight == 1.0 and entries[ALICE.id].scale == 1.0
    assert entries[CAROL.id].scale * offers[2].norm == pytest.approx(offers[0].norm)


@pytest.mark.parametrize("honest", [2, 3, 4])
@pytest.mark.parametrize(("size", "weight"), [(0.0, 1e-9), (1e-9, 1e-9), (1e30, 1e9)])
def test_a_minority_scales_no_other_contribution(honest: int, size: float, weight: float) -> None:
    ones = np.ones(4, np.float32)
    members = [Identity(bytes([number]) * 32) for number in range(10, 10 + honest + (honest - 1))]
    offers = [offer(who, ones, weight=3.0) for who in members[:honest]]
    offers += [offer(who, size * ones, weight=weight) for who in members[honest:]]
    entries = {entry.member: entry for entry in entries_of(CHAIN, offers)}
    assert all(entries[who.id].scale == 1.0 and entries[who.id].weight == 3.0 for who in members[:honest])
    for one in offers:
        entry = entries[one.head.member]
        assert entry.weight * entry.scale * one.norm <= 3.0 * offers[0].norm * (1 + 1e-6)


def test_of_two_members_each_counts_for_more_than_the_other_within_bounds() -> None:
    """A notebook with a GPU and a laptop: neither is the median member."""
    ones = np.ones(4, np.float32)
    pair = after(FIRST, ALICE, BOB)
    laptop, notebook = offer(ALICE, ones), offer(BOB, 3 * ones, weight=10.0)
    entries = {entry.member: entry for entry in entries_of(pair, [laptop, notebook])}
    assert (entries[BOB.id].weight, entries[BOB.id].scale) == (10.0, 1.0)
    # of three members, none may count for more than another while the third is late
    entries = {entry.member: entry for entry in entries_of(CHAIN, [laptop, notebook])}
    assert entries[BOB.id].weight == 1.0 and entries[BOB.id].scale == pytest.approx(1 / 3)
    broken = offer(BOB, 1e20 * ones, weight=1e9)
    entries = {entry.member: entry for entry in entries_of(pair, [laptop, broken])}
    assert entries[BOB.id].weight == contributions.HEAVIEST_OF_TWO
    assert entries[BOB.id].scale * broken.norm == pytest.approx(contributions.LONGEST_OF_TWO * laptop.norm)


def test_a_manifest_must_list_the_contributions_as_they_are() -> None:
    offers = sorted(
        (offer(who, np.ones(4, np.float32)) for who in (ALICE, BOB)), key=lambda one: one.head.member
    )
    mine, theirs = entries_of(CHAIN, offers)
    bids = [one.offer for one in offers]
    for changed in (
        {"weight": 2.0},
        {"scale": 0.5},
        {"samples": 2.0},
        {"seconds": 1.0},
        {"member": CAROL.id},
    ):
        lie = (msgspec.structs.replace(mine, **changed), theirs)
        assert contributions.differs(CHAIN, manifest(FIRST, [], entries=lie), bids)
    assert not contributions.differs(CHAIN, manifest(FIRST, [], entries=(mine, theirs)), bids)
    twice = (msgspec.structs.replace(theirs, member=mine.member), theirs)  # by one digest
    assert contributions.differs(CHAIN, manifest(FIRST, [], entries=twice), [bids[1], bids[1]])


def test_the_mean_is_exact_and_the_same_in_any_order_of_reading() -> None:
    rng, means = np.random.default_rng(0), set()
    vectors = {who: rng.standard_normal(1000).astype(np.float32) for who in (ALICE, BOB, CAROL)}
    offers = [offer(who, one, weight=index + 1.0) for index, (who, one) in enumerate(vectors.items())]
    median_norm = sorted(one.norm for one in offers)[1]
    bounded = [
        one.astype(np.float64) * min(1.0, median_norm / np.linalg.norm(one)) for one in vectors.values()
    ]
    for order in itertools.permutations(offers):
        found = {one.digest: one for one in order}
        out = np.empty(1000, np.float32)
        means.add(contributions.mean_of(entries_of(CHAIN, order), found, codec_of("float32"), out).tobytes())
    expected = np.average(bounded, axis=0, weights=[1, 2, 2])
    np.testing.assert_allclose(np.frombuffer(means.pop(), np.float32), expected, rtol=0, atol=1e-6)
    assert not means


@pytest.mark.parametrize("name", ["float32", "int8", "sparseloco"])
@pytest.mark.parametrize(
    "numel", [0, 1, 5000, contributions.PIECE - 1, contributions.PIECE, contributions.PIECE + 1]
)
def test_vectors_are_encoded_in_pieces_of_known_size(name: str, numel: int) -> None:
    codec, values = codec_of(name), np.linspace(-1, 1, numel, dtype=np.float32)
    content = memoryview(contributions.encode(codec, HostVector(values)))
    assert len(content) == contributions.encoded_bytes(codec, numel)
    pieces = [codec.encode(values[: contributions.PIECE]), codec.encode(values[contributions.PIECE :])]
    lengths = min(numel, contributions.PIECE), max(numel - contributions.PIECE, 0)
    expected = [codec.decode(one, count) for one, count in zip(pieces, lengths, strict=True) if count]
    decoded = [piece for _, piece in contributions.decode(codec, content, numel)]
    np.testing.assert_array_equal(
        np.concatenate([values[:0], *decoded]), np.concatenate([values[:0], *expected])
    )
    with pytest.raises(ValueError, match="encoded"):
        contributions.norm_of(codec, memoryview(bytes(content) + b"x"), numel)


def test_values_that_are_not_finite_are_found() -> None:
    with pytest.raises(ValueError, match="finite"):
        offer(ALICE, np.array([1.0, math.nan], np.float32))
