import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError
from colab_swarm.net.mux import HEADER, MAX_PACKET_BYTES, Frame, FrameKind, FrameReader, encode, to_packets
from colab_swarm.net.peers import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES

PARTS = st.tuples(st.integers(0, 2**63), st.binary(max_size=300), st.integers(0, 200_000))


def read_all(packets: list[bytes]) -> list[Frame]:
    reader = FrameReader()
    return [frame for packet in packets for frame in reader.read(packet)]


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
    assert [frame.id for frame in FrameReader().read(packet)] == list(range(1, 40))
    half = encode(FrameKind.ITEM, 1, b"", bytes(MAX_PACKET_BYTES // 2 - HEADER.size))
    assert [len(packet) for packet in to_packets([half] * 3)] == [MAX_PACKET_BYTES, len(half)]
    (packet,) = to_packets([encode(FrameKind.ITEM, 1, b"message", bytes(1 << 16))])
    (frame,) = FrameReader().read(packet)
    assert len(frame.payload) == 1 << 16
    assert len(packet) - len(frame.message) - len(frame.payload) == HEADER.size == 16  # aligned for floats


def oversized(kind: FrameKind, message_bytes: int, payload_bytes: int) -> bytes:
    """A packet whose header names lengths that it has no room for."""
    header = HEADER.pack(1, payload_bytes, message_bytes << 8 | kind)
    return header.ljust(MAX_PACKET_BYTES, b"\0")


@pytest.mark.parametrize(
    ("packet", "fault"),
    [
        (encode(FrameKind.ITEM, 1, b"message", b"payload")[:-1], "truncated"),
        (encode(FrameKind.PING, 0)[:-1], "truncated"),
        (encode(FrameKind.PING, 0) * 2 + b"x", "truncated"),
        (oversized(FrameKind.ITEM, 0, MAX_PAYLOAD_BYTES + 1), "oversized"),
        (oversized(FrameKind.ITEM, MAX_MESSAGE_BYTES + 1, 0), "oversized"),
        (oversized(FrameKind.CALL, 0, 1), "oversized"),
        (encode(99, 1), "unknown frame kind 99"),
    ],
)
def test_a_malformed_frame_is_refused_before_memory_is_set_aside(packet: bytes, fault: str) -> None:
    with pytest.raises(ProtocolError, match=fault):
        FrameReader().read(packet)


def test_another_frame_inside_a_cut_one_is_refused() -> None:
    first, *_ = to_packets([encode(FrameKind.ITEM, 1, b"", bytes(MAX_PAYLOAD_BYTES))])
    reader = FrameReader()
    assert reader.read(first) == []
    with pytest.raises(ProtocolError, match="do not continue"):
        reader.read(encode(FrameKind.PING, 0))


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_random_bytes_raise_nothing_but_protocol_error(packets: list[bytes]) -> None:
    try:
        frames = read_all(packets)
    except ProtocolError:
        return
    assert all(isinstance(frame.kind, FrameKind) for frame in frames)
