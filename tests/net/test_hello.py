import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError, WrongPeer
from colab_swarm.net.handshake import VERSION, Hello, Introduction
from colab_swarm.net.noise import TAG_BYTES, Keys
from colab_swarm.net.peers import Contact
from tests.net.swarm import identity

NOW = 1.7e9


def ends(run_id: str = "", other_run_id: str = "", expected: str = "bob") -> list[Introduction]:
    alice = Introduction(identity("alice"), addresses=(), run_id=run_id, expected=identity(expected).id)
    bob = Introduction(identity("bob"), addresses=("ws://b:1",), run_id=other_run_id, expected=None)
    return [alice, bob]


def reply(end: Introduction, message: bytes | None) -> bytes | None:
    assert message is not None
    return end.on_message(message, wall_time=NOW)


def sealed(keys: Keys | None, plaintext: bytes) -> memoryview:
    assert keys is not None
    packet = memoryview(bytearray(len(plaintext) + TAG_BYTES))
    keys[0].encrypt_into(plaintext, packet)
    return packet


def test_both_ends_know_each_other_and_share_keys_after_three_messages() -> None:
    alice, bob = ends()
    assert reply(bob, reply(alice, reply(bob, alice.start()))) is None
    assert alice.result is not None and bob.result is not None
    assert alice.result.contact == Contact(identity("bob").id, ("ws://b:1",))
    assert bob.result.contact.id == identity("alice").id and bob.result.time == NOW
    assert bob.result.keys is not None and alice.result.keys is not None
    assert bob.result.keys[1].decrypt(sealed(alice.result.keys, b"there")) == b"there"
    assert alice.result.keys[1].decrypt(sealed(bob.result.keys, b"back")) == b"back"


@pytest.mark.parametrize(("run_id", "version"), [("red", VERSION), ("blue", VERSION + 1)])
def test_another_run_and_an_older_protocol_are_refused_with_ours(
    run_id: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bob = ends(other_run_id="blue")
    monkeypatch.setattr("colab_swarm.net.handshake.VERSION", version)
    alice, _ = ends(run_id=run_id)
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match=f"this peer belongs to run 'blue', protocol {VERSION}"):
        reply(bob, alice.start())


def test_an_unexpected_peer_is_a_wrong_peer() -> None:
    alice, bob = ends(expected="carol")
    with pytest.raises(WrongPeer, match="was expected"):
        reply(alice, reply(bob, alice.start()))


def test_a_replayed_handshake_is_refused() -> None:
    """An attacker that replays alice's messages, membership included, is not taken for her."""
    alice, bob = ends()
    first = alice.start()
    last = reply(alice, reply(bob, first))
    assert reply(bob, last) is None and bob.result is not None
    _, again = ends()
    reply(again, first)
    with pytest.raises(ProtocolError):
        reply(again, last)
    assert again.result is None


@given(st.binary(max_size=400), st.integers(0, 2))
def test_random_bytes_raise_nothing_but_protocol_error(data: bytes, turn: int) -> None:
    alice, bob = ends()
    reader, message = bob, alice.start()
    if turn >= 1:
        reader, answer = alice, reply(bob, message)
    if turn == 2:
        reply(alice, answer)
        reader = bob
    with pytest.raises(ProtocolError):
        reply(reader, data)


TIMES = -1.0, float("inf"), float("nan")


@pytest.mark.parametrize(
    ("at", "wrong"),
    [(0, b"short"), (1, b"short"), (2, ("ws://x",) * 17), (2, ("x" * 257,)), *((3, time) for time in TIMES)],
)
def test_a_hello_out_of_bounds_does_not_decode(at: int, wrong: object) -> None:
    hello: list[object] = [b"k" * 32, b"s" * 64, ("x" * 256,) * 16, NOW]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello).time == NOW
    hello[at] = wrong
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello)
