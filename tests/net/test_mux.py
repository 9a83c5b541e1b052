from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError
from colab_swarm.net import mux as module
from colab_swarm.net.mux import (
    HEADER,
    MAX_PACKET_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    Mux,
    encode,
    to_packets,
)
from colab_swarm.net.peers import (
    ITEM_OVERHEAD_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    Stream,
)

WHOLE = encode(FrameKind.ITEM, 1, b"", bytes(MAX_PAYLOAD_BYTES))
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
    pair.alice.ping(token := bytes(range(32)))
    assert pair.to_bob() == []
    assert [(frame.kind, bytes(frame.message)) for frame in pair.to_alice()] == [(FrameKind.PONG, token)]
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


def oversized(kind: FrameKind, message_bytes: int, payload_bytes: int) -> bytes:
    """A packet whose header names lengths that it has no room for."""
    header = HEADER.pack(1, payload_bytes, message_bytes << 8 | kind)
    return header.ljust(MAX_PACKET_BYTES, b"\0")


@pytest.mark.parametrize(
    ("packets", "fault"),
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
        # malformed; these are refused before memory is set aside
        ([encode(FrameKind.ITEM, 1, b"message", b"payload")[:-1]], "truncated"),
        ([encode(FrameKind.PING, 0) * 2 + b"x"], "truncated"),
        ([oversized(FrameKind.ITEM, 0, MAX_PAYLOAD_BYTES + 1)], "oversized"),
        ([oversized(FrameKind.ITEM, MAX_MESSAGE_BYTES + 1, 0)], "oversized"),
        ([oversized(FrameKind.CALL, 0, 1)], "oversized"),
        ([encode(99, 1)], "unknown frame kind 99"),
        ([to_packets([WHOLE])[0], encode(FrameKind.PING, 0)], "do not continue"),
    ],
)
def test_breaking_the_rules_is_a_protocol_error(packets: list[bytes], fault: str) -> None:
    with pytest.raises(ProtocolError, match=fault):
        receive(end(initiator=False), *packets)


def read_all(packets: list[bytes]) -> list[Frame]:
    reader = FrameReader()
    return [frame for packet in packets for frame in reader.read(packet)]


PARTS = st.tuples(st.integers(0, 2**63), st.binary(max_size=300), st.integers(0, 200_000))


@settings(max_examples=50)
@given(st.lists(PARTS, max_size=8))
def test_frames_are_read_back_unchanged(parts: list[tuple[int, bytes, int]]) -> None:
    items = [(id, message, bytes([id % 251]) * size) for id, message, size in parts]
    packets = to_packets(encode(FrameKind.ITEM, *item) for item in items)
    assert all(len(packet) <= MAX_PACKET_BYTES for packet in packets)
    frames = read_all(packets)
    assert [(frame.id, bytes(frame.message), bytes(frame.payload)) for frame in frames] == items


def test_small_frames_share_a_packet_and_a_payload_of_64_kib_takes_one() -> None:
    (packet,) = to_packets(encode(FrameKind.CALL, id, b"x" * id) for id in range(1, 40))
    assert [frame.id for frame in read_all([packet])] == list(range(1, 40))
    half = encode(FrameKind.ITEM, 1, b"", bytes(MAX_PACKET_BYTES // 2 - HEADER.size))
    assert [len(packet) for packet in to_packets([half] * 3)] == [MAX_PACKET_BYTES, len(half)]
    (packet,) = to_packets([encode(FrameKind.ITEM, 1, b"message", bytes(1 << 16))])
    assert len(packet) - len(b"message") - (1 << 16) == HEADER.size == 16  # aligned for floats


FRAMES = st.tuples(st.sampled_from(FrameKind), st.integers(0, 9), st.binary(max_size=40))


@settings(max_examples=200)
@given(st.lists(FRAMES.map(lambda frame: encode(*frame)) | st.binary(max_size=100), max_size=12))
def test_random_frames_raise_nothing_but_protocol_error(packets: list[bytes]) -> None:
    bob = end(initiator=False)
    bob.call(b"", "waiting")
    bob.open(b"")
    try:
        receive(bob, *packets)
    except ProtocolError:
        return
    assert all(len(packet) > 0 for packet in bob.take())
