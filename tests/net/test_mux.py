from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError
from colab_swarm.net import mux as module
from colab_swarm.net.mux import Frame, FrameKind, Mux, encode
from colab_swarm.net.peers import ITEM_OVERHEAD_BYTES, STREAM_WINDOW_BYTES, Stream

PAYLOAD = bytes((1 << 16) - ITEM_OVERHEAD_BYTES)  # an item of it costs a 32nd of the window


def end(*, initiator: bool) -> Mux:
    link = SimpleNamespace(peer=b"")
    return Mux(partial(Stream, link), initiator=initiator)


class Pair:
    def __init__(self) -> None:
        self.alice = end(initiator=True)
        self.bob = end(initiator=False)

    def to_bob(self) -> list[Frame]:
        return receive(self.bob, *self.alice.take())

    def to_alice(self) -> list[Frame]:
        return receive(self.alice, *self.bob.take())


def kinds(frames: list[Frame]) -> list[tuple[FrameKind, int]]:
    return [(frame.kind, frame.id) for frame in frames]


def receive(mux: Mux, *packets: bytes) -> list[Frame]:
    return [frame for packet in packets for frame, _ in mux.on_packet(packet)]


def credit(size_bytes: int) -> bytes:
    return encode(FrameKind.CREDIT, 1, size_bytes.to_bytes(4, "little"))


def test_a_call_is_answered_by_its_number_and_a_cancelled_one_drops_its_late_reply() -> None:
    pair = Pair()
    first, second, third = (pair.alice.call(name, name) for name in (b"first", b"second", b"third"))
    assert [bytes(frame.message) for frame in pair.to_bob()] == [b"first", b"second", b"third"]
    assert not (pair.alice.quiet or pair.bob.quiet)
    pair.bob.reply(second, b"2")
    pair.bob.fail(first, "failed", "because")
    (packet,) = pair.bob.take()
    replies = [(frame.kind, frame.id, waiting) for frame, waiting in pair.alice.on_packet(packet)]
    assert replies == [(FrameKind.REPLY, 3, b"second"), (FrameKind.ERROR, 1, b"first")]
    pair.bob.reply(third, b"late")
    pair.alice.cancel(third)
    assert pair.to_alice() == []
    assert pair.to_bob() == []  # nor does the late cancel reach a handler that is done
    assert pair.alice.quiet and pair.bob.quiet
    pair.alice.leave()
    assert kinds(pair.to_bob()) == [(FrameKind.LEAVING, 0)]
    assert all(repr(end).endswith("streams=0, leaving)") for end in (pair.alice, pair.bob))


def test_too_many_calls_and_streams_of_the_peer_are_refused_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 1)
    monkeypatch.setattr(module, "MAX_STREAMS", 1)
    pair = Pair()
    pair.bob.open(b"")  # a stream of its own does not count
    pair.to_alice()
    streams = []
    for _ in range(2):
        pair.alice.call(b"", "waiting")
        streams.append(pair.alice.open(b""))
    assert [frame.kind for frame in pair.to_bob()] == [FrameKind.CALL, FrameKind.OPEN]
    refused = pair.to_alice()
    assert [frame.kind for frame in refused] == [FrameKind.ERROR, FrameKind.RESET]
    assert all(b"busy" in bytes(frame.message) for frame in refused)
    pair.alice.reset(streams[0].id)
    replacement = pair.alice.open(b"")
    assert [frame.id for frame in pair.to_bob()] == [streams[0].id, replacement.id]


def test_a_sender_stops_at_the_window_and_continues_with_credit() -> None:
    pair = Pair()
    stream = pair.alice.open(b"")
    while stream.credit_bytes > 0:
        pair.alice.send(stream, b"", PAYLOAD)
    assert len(pair.to_bob()) == 1 + 32
    far = pair.bob.streams[stream.id]
    for _ in range(2):
        pair.bob.consumed(far, STREAM_WINDOW_BYTES // 16)
    assert kinds(pair.to_alice()) == [(FrameKind.CREDIT, stream.id)]
    pair.alice.send(stream, b"", PAYLOAD)
    pair.alice.end(stream)
    assert kinds(pair.to_bob()) == [(FrameKind.ITEM, stream.id), (FrameKind.END, stream.id)]
    pair.bob.consumed(far, STREAM_WINDOW_BYTES)
    assert pair.to_alice() == []  # the sender needs no credit any more


def test_a_stream_is_over_after_both_ends_or_one_reset_which_drops_late_items() -> None:
    pair = Pair()
    ended, dropped = pair.alice.open(b""), pair.alice.open(b"")
    for _ in range(2):
        pair.alice.end(ended)
    assert len(pair.to_bob()) == 3 and {ended.id, dropped.id} == set(pair.bob.streams)
    pair.alice.send(dropped, b"late", b"")
    pair.bob.reset(dropped.id)
    assert pair.to_bob() == []
    far = pair.bob.streams[ended.id]
    pair.bob.send(far, b"still", b"")
    pair.bob.end(far)
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
        receive(end(initiator=False), *frames)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(FrameKind), st.integers(0, 9), st.binary(max_size=40)), max_size=12)
)
def test_random_frames_raise_nothing_but_protocol_error(parts: list[tuple[FrameKind, int, bytes]]) -> None:
    bob = end(initiator=False)
    bob.call(b"", "waiting")
    bob.open(b"")
    try:
        receive(bob, *(encode(kind, id, message) for kind, id, message in parts))
    except ProtocolError:
        return
    assert all(len(packet) > 0 for packet in bob.take())
