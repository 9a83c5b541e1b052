import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError
from colab_swarm.net.mux import ITEM_OVERHEAD_BYTES, STREAM_WINDOW_BYTES, Frame, FrameKind, Mux, encode

PAYLOAD = bytes((1 << 16) - ITEM_OVERHEAD_BYTES)  # an item of it costs a 32nd of the window


class Pair:
    def __init__(self, *, max_streams: int = 8, max_calls: int = 8) -> None:
        self.alice = Mux(initiator=True, max_streams=max_streams, max_calls=max_calls)
        self.bob = Mux(initiator=False, max_streams=max_streams, max_calls=max_calls)

    def to_bob(self) -> list[Frame]:
        return [frame for packet in self.alice.take() for frame in self.bob.on_packet(packet)]

    def to_alice(self) -> list[Frame]:
        return [frame for packet in self.bob.take() for frame in self.alice.on_packet(packet)]


def kinds(frames: list[Frame]) -> list[tuple[FrameKind, int]]:
    return [(frame.kind, frame.id) for frame in frames]


def receive(mux: Mux, *frames: bytes) -> list[Frame]:
    return [got for frame in frames for got in mux.on_packet(frame)]


def credit(size_bytes: int) -> bytes:
    return encode(FrameKind.CREDIT, 1, size_bytes.to_bytes(4, "little"))


def test_a_call_is_answered_by_its_number() -> None:
    pair = Pair()
    first, second = pair.alice.call(b"first"), pair.alice.call(b"second")
    assert [bytes(frame.message) for frame in pair.to_bob()] == [b"first", b"second"]
    assert not (pair.alice.quiet or pair.bob.quiet)
    pair.bob.reply(second, b"2")
    pair.bob.fail(first, "failed", "because")
    assert kinds(pair.to_alice()) == [(FrameKind.REPLY, 3), (FrameKind.ERROR, 1)]
    assert pair.alice.quiet and pair.bob.quiet
    pair.alice.leave()
    assert kinds(pair.to_bob()) == [(FrameKind.LEAVING, 0)]
    assert all(repr(end).endswith("streams=0, leaving)") for end in (pair.alice, pair.bob))


def test_a_cancelled_call_drops_its_late_reply() -> None:
    pair = Pair()
    id = pair.alice.call(b"call")
    pair.to_bob()
    pair.bob.reply(id, b"late")
    pair.alice.cancel(id)
    assert pair.to_alice() == []
    assert pair.to_bob() == []  # nor does the late cancel reach a handler that is done
    assert pair.alice.quiet and pair.bob.quiet


def test_too_many_calls_and_streams_are_refused_as_busy() -> None:
    pair = Pair(max_calls=1, max_streams=1)
    for _ in range(2):
        pair.alice.call(b"")
        pair.alice.open(b"")
    assert [frame.kind for frame in pair.to_bob()] == [FrameKind.CALL, FrameKind.OPEN]
    refused = pair.to_alice()
    assert [frame.kind for frame in refused] == [FrameKind.ERROR, FrameKind.RESET]
    assert all(b"busy" in bytes(frame.message) for frame in refused)


def test_our_own_streams_do_not_count_against_the_peers_limit() -> None:
    pair = Pair(max_streams=2)
    for _ in range(2):
        pair.bob.open(b"")
    pair.to_alice()
    for _ in range(3):
        pair.alice.open(b"")
    assert kinds(pair.to_bob()) == [(FrameKind.OPEN, 1), (FrameKind.OPEN, 3)]
    assert kinds(pair.to_alice()) == [(FrameKind.RESET, 5)]
    pair.to_bob()
    pair.alice.reset(1)
    replacement = pair.alice.open(b"")
    assert kinds(pair.to_bob()) == [(FrameKind.RESET, 1), (FrameKind.OPEN, replacement)]


def test_a_sender_stops_at_the_window_and_continues_with_credit() -> None:
    pair = Pair()
    id = pair.alice.open(b"")
    while pair.alice.may_send(id):
        pair.alice.send(id, b"", PAYLOAD)
    assert len(pair.to_bob()) == 1 + 32
    for _ in range(2):
        pair.bob.consumed(id, STREAM_WINDOW_BYTES // 16)
    assert kinds(pair.to_alice()) == [(FrameKind.CREDIT, id)]
    pair.alice.send(id, b"", PAYLOAD)
    pair.alice.end(id)
    assert kinds(pair.to_bob()) == [(FrameKind.ITEM, id), (FrameKind.END, id)]
    pair.bob.consumed(id, STREAM_WINDOW_BYTES)
    assert pair.to_alice() == []  # the sender needs no credit any more


def test_a_stream_is_over_after_both_ends_or_one_reset_which_drops_late_items() -> None:
    pair = Pair()
    ended, dropped = pair.alice.open(b""), pair.alice.open(b"")
    for _ in range(2):
        pair.alice.end(ended)
    assert len(pair.to_bob()) == 3 and {ended, dropped} == set(pair.bob.streams)
    pair.alice.send(dropped, b"late", b"")
    pair.bob.reset(dropped)
    assert pair.to_bob() == []
    pair.bob.send(ended, b"still", b"")
    pair.bob.end(ended)
    assert [frame.kind for frame in pair.to_alice()] == [FrameKind.RESET, FrameKind.ITEM, FrameKind.END]
    assert pair.alice.quiet and pair.bob.quiet


def test_a_ping_comes_back_as_a_pong() -> None:
    pair, token = Pair(), bytes(range(32))
    pair.alice.ping(token)
    assert pair.to_bob() == []
    assert [(frame.kind, bytes(frame.message)) for frame in pair.to_alice()] == [(FrameKind.PONG, token)]


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([encode(FrameKind.REPLY, 2)], "never opened"),
        ([encode(FrameKind.ITEM, 1)], "never opened"),
        ([encode(FrameKind.CALL, 2, b"")], "number 2"),
        ([encode(FrameKind.CALL, 3, b"")] * 2, "number 3 after 3"),
        ([encode(FrameKind.OPEN, 1), encode(FrameKind.END, 1), encode(FrameKind.ITEM, 1)], "after its end"),
        ([encode(FrameKind.OPEN, 1), encode(FrameKind.END, 1), encode(FrameKind.END, 1)], "second end"),
        ([encode(FrameKind.OPEN, 1), encode(FrameKind.CREDIT, 1, b"abc")], "wrong size"),
        ([encode(FrameKind.OPEN, 1), credit((1 << 31) - (1 << 21)), credit(1)], "for 2147483649 bytes"),
        ([encode(FrameKind.PING, 0, bytes(33))], "a ping of 33"),
        ([encode(FrameKind.OPEN, 1), *[encode(FrameKind.ITEM, 1, b"", PAYLOAD)] * 33], "without credit"),
    ],
)
def test_breaking_the_rules_is_a_protocol_error(frames: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        receive(Mux(initiator=False, max_streams=8, max_calls=8), *frames)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(FrameKind), st.integers(0, 9), st.binary(max_size=40)), max_size=12)
)
def test_random_frames_raise_nothing_but_protocol_error(parts: list[tuple[FrameKind, int, bytes]]) -> None:
    bob = Mux(initiator=False, max_streams=2, max_calls=2)
    bob.call(b"")
    bob.open(b"")
    try:
        receive(bob, *(encode(kind, id, message) for kind, id, message in parts))
    except ProtocolError:
        return
    assert all(len(packet) > 0 for packet in bob.take())
