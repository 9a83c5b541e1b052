import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging import group as groups
from colab_swarm.averaging.forming import elect
from colab_swarm.averaging.group import GroupMember, Span, plan_spans
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES, PeerId
from colab_swarm.tensors.codecs import CODECS, codec_of

ALICE, BOB = (PeerId(bytes([i]) * 32) for i in (1, 2))
TERMS = groups.RoundTerms("run", 7, b"lineage", 100, b"schema")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": b"short"},
        {"terms": msgspec.structs.replace(TERMS, codec="zip")},
        {"members": ()},
        {"members": (GroupMember(BOB, (), 1, 1), GroupMember(ALICE, (), 1, 1))},
        {"members": (GroupMember(ALICE, (), 1, 1), GroupMember(ALICE, (), 1, 1))},
        *({"members": (GroupMember(ALICE, (), *one),)} for one in ((-1, 1), (1, -1))),
        *({"predicted_s": math.nan}, {"predicted_s": math.inf}, {"predicted_s": -1.0}),
        *({"grants": (1.0, one)} for one in (-1.0, math.nan, math.inf)),
        *({"holders": (2,)}, {"holders": (-1,)}, {"agreeing": (0, 1 << 40)}),
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


@pytest.mark.parametrize("absurd", [math.nan, -math.inf, 1e6])
def test_an_absurd_loss_of_one_member_does_not_count(absurd: float) -> None:
    losses = [1.0, 4.0, absurd]
    members = tuple(
        GroupMember(PeerId(bytes([i]) * 32), (), 1.0 + i, 1.0, loss=loss) for i, loss in enumerate(losses)
    )
    group = groups.Group(bytes(16), TERMS, members)
    group.check()
    assert group.loss == pytest.approx((1.0 + 2 * 4.0) / 3)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(2.0, None), (0.0, 3.0)], None),
        ([(1.0, math.nan)], None),
        ([], None),
        ([(2.0, None), (1.0, -3.0), (3.0, -1.0)], -1.5),
        ([(1e9, 0.0), (1e-9, 0.0)], 0.0),
        ([(1.0, 1e29), (1.0, 1e29)], 1e29),
    ],
)
def test_the_swarms_loss_is_that_of_the_members_that_sent_one(
    losses: list[tuple[float, float | None]], expected: float | None
) -> None:
    assert groups.swarm_loss(losses) == pytest.approx(expected)


def test_a_members_loss_is_a_part_of_its_offer() -> None:
    ticket = groups.Ticket(TERMS, 1.0, loss=0.5)
    member = GroupMember(ALICE, (), 1.0, 1.0, *groups.offer_of(ticket))
    assert member.loss == 0.5 and groups.offer_of(member) == groups.offer_of(ticket)
    assert groups.offer_of(msgspec.structs.replace(member, loss=0.6)) != groups.offer_of(ticket)


SAME, OTHER, NONE = (1.0,), (2.0,), ()


@pytest.mark.parametrize(
    ("rates", "sketches", "changed", "expected"),
    [
        ([0.1, 0.1, 0.1], [SAME, SAME, OTHER], [], (0, 1)),
        # Joiners agree with everybody, and hide nobody.
        ([0.1] * 5, [SAME, SAME, OTHER, NONE, NONE], [], (0, 1)),
        # Most rates count, whoever has a sketch.
        ([0.2, 0.1, 0.1], [SAME, NONE, NONE], [], (1, 2)),
        # One of two: who changed nothing, else the first.
        ([0.1, 0.1], [OTHER, SAME], [0], (1,)),
        ([0.1, 0.1], [OTHER, SAME], [], (0,)),
    ],
)
def test_most_rates_and_then_most_sketches_are_the_witness(
    rates: list[float],
    sketches: list[tuple[float, ...]],
    changed: list[int],
    expected: tuple[int, ...],
) -> None:
    tickets = {}
    for place, (rate, sketch) in enumerate(zip(rates, sketches, strict=True)):
        ticket = groups.Ticket(TERMS, 1.0, rates=(rate,), sketch=sketch, changed=place in changed)
        tickets[PeerId(bytes([place]) * 32)] = ticket

    def agree(one: groups.Ticket, other: groups.Ticket) -> bool:
        return one.rates == other.rates and (not one.sketch or not other.sketch or one.sketch == other.sketch)

    witness, agreeing = elect(tickets, agree, min(tickets))
    assert agreeing == expected
    assert witness == list(tickets.values())[expected[0]]
