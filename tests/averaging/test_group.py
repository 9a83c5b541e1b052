import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging import group as groups
from colab_swarm.averaging.group import GroupFormation, GroupMember, Span, equal_shares, plan_spans, rank
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES, Contact, PeerId
from colab_swarm.tensors.codecs import CODECS, codec_of

ALICE, BOB, CAROL = (PeerId(bytes([i]) * 32) for i in (1, 2, 3))
TERMS = groups.RoundTerms("run", 7, b"lineage", 100, b"schema")
TICKET = groups.Ticket(TERMS, 10.0)
SETTINGS = groups.GroupFormationSettings(window_s=2, slack_s=1, max_window_s=30, call_timeout_s=3)


@pytest.fixture
def g() -> GroupFormation:
    return GroupFormation(TERMS, now=100.0, settings=SETTINGS)


def contact(peer: PeerId) -> Contact:
    return Contact(peer, ("ws://somewhere",))


def test_a_group_closes_when_all_accepted_peers_have_joined(g: GroupFormation) -> None:
    g.expect(BOB, due=101.0, until=103.0)
    assert g.closes_at() == 103.0
    g.on_coming(BOB, 5.0, now=101.0)
    assert g.closes_at() == 107.0
    assert g.on_join(TICKET, contact(BOB), now=101.0) is None
    assert g.closes_at() == -math.inf


def test_a_group_does_not_wait_for_declined_peers_and_gives_silent_ones_the_window(g: GroupFormation) -> None:
    g.expect(BOB, due=101.0, until=103.0)
    g.on_declined(BOB)
    g.expect(CAROL, due=102.0, until=102.0)
    assert g.closes_at() == 102.0


@pytest.mark.parametrize(
    ("ready_in_s", "closes_at"), [(1e9, 130.0), (math.inf, 130.0), (-5.0, 101.0), (math.nan, 101.0)]
)
def test_no_peer_is_waited_for_beyond_the_longest_window_and_an_invalid_time_counts_as_now(
    g: GroupFormation, ready_in_s: float, closes_at: float
) -> None:
    g.on_coming(BOB, ready_in_s, now=100.0)
    assert g.closes_at() == closes_at


def test_a_peer_that_joined_and_gave_up_is_no_member(g: GroupFormation) -> None:
    for peer in (ALICE, BOB):
        g.on_join(TICKET, contact(peer), now=101.0)
    g.on_lost(BOB)
    assert [member.id for member in g.form(bytes(16), equal_shares).members] == [ALICE]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e9, 1e-300])
def test_invalid_weights_are_refused(g: GroupFormation, weight: float) -> None:
    refusal = g.on_join(msgspec.structs.replace(TICKET, weight=weight), contact(ALICE), now=101.0)
    assert refusal is not None and refusal.reason == "invalid" and str(weight) in refusal.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(({"lineage": b"other"}, "resync"), ({"step": 8}, "resync"), ({"numel": 99}, "invalid")),
        *(({"schema": b"other"}, "invalid"), ({"codec": "int8"}, "invalid")),
    ],
)
def test_a_ticket_of_another_run_is_refused(
    g: GroupFormation, change: dict[str, object], reason: str
) -> None:
    refusal = g.on_join(
        groups.Ticket(msgspec.structs.replace(TERMS, **change), 10.0), contact(ALICE), now=101.0
    )
    assert refusal is not None and refusal.reason == reason


def test_members_are_sorted_and_share_equally_unless_in_client_mode(g: GroupFormation) -> None:
    for peer, reduces in ((CAROL, True), (ALICE, True), (BOB, False)):
        g.on_join(msgspec.structs.replace(TICKET, reduces=reduces), contact(peer), now=101.0)
    group = g.form(bytes(16), equal_shares)
    assert [(member.id, member.share) for member in group.members] == [(ALICE, 1), (BOB, 0), (CAROL, 1)]


def test_a_client_alone_reduces_for_itself_but_two_clients_are_no_group(g: GroupFormation) -> None:
    ticket = msgspec.structs.replace(TICKET, reduces=False)
    g.on_join(ticket, contact(ALICE), now=101.0)
    assert g.form(bytes(16), equal_shares).members[0].share == 1.0
    g.on_join(ticket, contact(BOB), now=101.0)
    with pytest.raises(ValueError, match="not all 0"):
        g.form(bytes(16), equal_shares)


def test_the_rank_is_the_same_for_everyone_and_changes_with_the_step() -> None:
    peers = [PeerId(bytes([i]) * 32) for i in range(50)]
    assert rank("run", 1, peers) == rank("run", 1, reversed(peers))
    assert len({rank("run", step, peers)[0] for step in range(20)}) > 5


@pytest.mark.parametrize(
    "change",
    [
        {"seed": b"short"},
        {"terms": msgspec.structs.replace(TERMS, codec="zip")},
        {"members": ()},
        {"members": (GroupMember(BOB, (), 1, 1), GroupMember(ALICE, (), 1, 1))},
        {"members": (GroupMember(ALICE, (), 1, 1), GroupMember(ALICE, (), 1, 1))},
        *({"members": (GroupMember(ALICE, (), *one),)} for one in ((-1, 1), (1, -1))),
        *({"explanation": "x" * (groups.MAX_TEXT + 1)}, {"explanation": "\x1b[2J"}),
    ],
)
def test_a_group_that_no_honest_organizer_forms_is_refused(change: dict[str, object]) -> None:
    group = groups.Group(bytes(16), TERMS, (GroupMember(ALICE, (), 1, 1), GroupMember(BOB, (), 1, 1)))
    msgspec.structs.replace(group, explanation="x" * groups.MAX_TEXT).check()
    with pytest.raises(ValueError):
        msgspec.structs.replace(group, **change).check()


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": 1 << 63}, {"numel": -1}, {"numel": 1 << 62}, {"lineage": bytes(600)}]
)
def test_terms_out_of_range_cannot_be_decoded(change: dict[str, object]) -> None:
    fields = list((msgspec.structs.asdict(TERMS) | change).values())
    for kind, wire in ((groups.Ticket, [fields, 10.0]), (groups.Group, [bytes(16), fields, []])):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=kind)


def test_an_assistant_reduces_for_several_trainers_but_not_for_one(g: GroupFormation) -> None:
    g.on_join(msgspec.structs.replace(TICKET, weight=0.0, assists=True), contact(CAROL), now=101.0)
    with pytest.raises(ValueError, match="no trainer has joined"):
        g.form(bytes(16), equal_shares)
    g.on_join(msgspec.structs.replace(TICKET, reduces=False), Contact(ALICE), now=101.0)
    assert [member.id for member in g.form(bytes(16), equal_shares).members] == [ALICE]
    g.on_join(msgspec.structs.replace(TICKET, reduces=False), Contact(BOB), now=101.0)
    assert [member.share for member in g.form(bytes(16), equal_shares).members] == [0, 0, 1]


def test_a_group_has_the_forecast_and_explanation_of_its_strategy(g: GroupFormation) -> None:
    for peer, rate_bps in ((ALICE, 1e6), (BOB, 1e6), (CAROL, 1e7)):
        ticket = msgspec.structs.replace(TICKET, upload_bps=rate_bps, download_bps=rate_bps)
        g.on_join(ticket, contact(peer), now=101.0)
    group = g.form(bytes(16), adaptive_shares)
    assert group.predicted_s is not None and "bottleneck" in group.explanation
    assert [member.share for member in group.members] == pytest.approx([0, 0, 1])


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-(1 << 63), (1 << 64) - 1))
def test_any_step_of_a_stranger_is_ranked_or_refused(step: int, numel: int) -> None:
    wire = msgspec.msgpack.encode(["run", step, b"lineage", numel, b"schema"])
    try:
        call = msgspec.msgpack.decode(wire, type=groups.RoundTerms)
    except msgspec.ValidationError:
        assert not (0 <= step < groups.MAX_STEP and 0 <= numel < groups.MAX_NUMEL)
    else:
        assert len(rank(call.prefix, call.step, [ALICE, BOB])) == 2


names = st.sampled_from([*CODECS, "topk:0.0001", "topk:0.01", "topk:0.5"])
shares = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda s: sum(s) > 0)


@given(st.integers(0, 1 << 40), shares)
@settings(max_examples=100)
def test_spans_tile_the_vector_and_idle_members_get_none(numel: int, shares: list[float]) -> None:
    spans = plan_spans(numel, shares)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    assert all(span.numel == 0 for span, share in zip(spans, shares, strict=True) if share == 0)
    assert all(span.numel >= 0 for span in spans)


def test_equal_shares_give_equal_spans_and_senseless_ones_are_named() -> None:
    assert plan_spans(10, [1, 1]) == [Span(0, 5), Span(5, 10)]
    assert plan_spans(9, [1, 0, 2]) == [Span(0, 3), Span(3, 3), Span(3, 9)]
    for shares in ([], [0, 0], [1, -1], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="shares must be >= 0"):
            plan_spans(10, shares)


@given(st.integers(0, 1000), st.integers(0, 200_000), names, names)
@settings(max_examples=100)
def test_chunks_tile_their_span_and_fit_a_frame(start: int, numel: int, codec: str, mean_codec: str) -> None:
    span, values = Span(start, start + numel), groups.chunk_values(codec, mean_codec)
    chunks = groups.cut_chunks(span, values)
    assert [start, *(chunk.stop for chunk in chunks)] == [*(chunk.start for chunk in chunks), span.stop]
    assert all((chunk.start - start) % 4096 == 0 for chunk in chunks)
    assert max(codec_of(name).encoded_bytes(values) for name in (codec, mean_codec)) <= groups.CHUNK_BYTES
    assert groups.chunk_values("float16") == groups.CHUNK_BYTES // 2, "as many as fit"
    assert 4 * values <= MAX_PAYLOAD_BYTES  # as recovery sends it
