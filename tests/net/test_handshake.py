"""The handshake: three messages, published vectors, damage and replays."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import ProtocolError
from colab_swarm.net.handshake import VERSION, Hello, Introduction
from colab_swarm.net.noise import MAX_HANDSHAKE_BYTES, TAG_BYTES, Handshake, Keys
from colab_swarm.net.peers import Contact
from tests.net.swarm import identity

NOW = 1.7e9


def ends(run_id: str = "", other_run_id: str = "") -> list[Introduction]:
    alice = Introduction(identity("alice"), addresses=(), run_id=run_id, expected=identity("bob").id)
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


@pytest.mark.parametrize(
    ("at", "wrong"),
    [(0, b"short"), (1, b"short"), (2, ("ws://x",) * 17), (2, ("x" * 257,)), (3, float("nan"))],
)
def test_a_hello_out_of_bounds_does_not_decode(at: int, wrong: object) -> None:
    hello: list[object] = [b"k" * 32, b"s" * 64, ("x" * 256,) * 16, NOW]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello).time == NOW
    hello[at] = wrong
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello)


# From the test vectors of the cacophony library (Haskell), as also shipped with snow (Rust):
# https://github.com/haskell-cryptography/cacophony/blob/master/vectors/cacophony.txt
PROLOGUE = "4a6f686e2047616c74"
INITIATOR_STATIC = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
INITIATOR_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESPONDER_STATIC = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
RESPONDER_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
PAYLOADS = (
    *("4c756477696720766f6e204d69736573", "4d757272617920526f746862617264", "462e20412e20486179656b"),
    *("4361726c204d656e676572", "4a65616e2d426170746973746520536179"),
    "457567656e2042f6686d20766f6e2042617765726b",
)
HASH = "c7c118c30ea6b4b4fb8b576a2a29da04bbbb63e2b3a8430856a2a6d58f5953ad"
CIPHERTEXTS = (
    "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79444c756477696720766f6e204d69736573",
    "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843757117acceb05bd7a45733bc22015c97"
    "a9d0cbaf41b80446d5988ff5127235d76b79eade70f473d6a4ef521fdcbeda5340d01e028ba793fc059f2724a83af05f"
    "12dda0448a7621a926b379a92477fd",
    "c90f1cf77eba4e50edb038991565e36c9758943a989229b6051244dc4fbecb6946744b401af2ee1a5881b65fbb87fd07"
    "cb6a328ececc9ce6ce84c399dc332d4fd521fa4bb7f467ce909395",
    "bc3fa77f6aca3e8466d7dc6bea10013e88a6a29add5132b461806c",
    "250b01074cdfe0df2ecf8ccbf1737b15a2ddb5b52fd9a396604e9c793cee3b3bb9",
    "449d4d433b3cdc3d02bf6fc881774b9df54366ebcffb9689bb13f14709822cd7ef42bcdb4d",
)


def key(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def pair() -> tuple[Handshake, Handshake]:
    def end(initiator: bool, static: str, ephemeral: str) -> Handshake:
        keys = {"static": key(static), "ephemeral": key(ephemeral)}
        return Handshake(initiator=initiator, prologue=bytes.fromhex(PROLOGUE), **keys)

    initiator = end(True, INITIATOR_STATIC, INITIATOR_EPHEMERAL)
    return initiator, end(False, RESPONDER_STATIC, RESPONDER_EPHEMERAL)


def test_handshake_and_transport_equal_the_published_vectors() -> None:
    alice, bob = pair()
    for index in range(3):
        writer, reader = (alice, bob) if index % 2 == 0 else (bob, alice)
        message = writer.write(bytes.fromhex(PAYLOADS[index]))
        assert message.hex() == CIPHERTEXTS[index]
        assert reader.read(message).hex() == PAYLOADS[index]
        if index == 1:  # the published hash is the one after the second message
            assert alice.hash.hex() == HASH
        assert alice.hash == bob.hash
    assert alice.remote_static == key(RESPONDER_STATIC).public_key().public_bytes_raw()
    assert bob.remote_static == key(INITIATOR_STATIC).public_key().public_bytes_raw()
    keys, other_keys = alice.split(), bob.split()
    for index in range(3, 6):
        # the published vectors keep alternating: message 4 is the responder's
        sender, receiver = (other_keys, keys) if index % 2 else (keys, other_keys)
        sealed = sender[0].encrypt(bytes.fromhex(PAYLOADS[index]))
        assert sealed.hex() == CIPHERTEXTS[index]
        assert receiver[1].decrypt(sealed).hex() == PAYLOADS[index]


def test_a_public_key_of_small_order_is_refused() -> None:
    _, bob = pair()
    bob.read(bytes(MAX_HANDSHAKE_BYTES))
    with pytest.raises(ProtocolError, match="unusable public key"):
        bob.write(b"")


@given(st.integers(0, 110), st.integers(1, 255))
def test_any_changed_byte_of_the_second_message_is_noticed(position: int, change: int) -> None:
    alice, bob = pair()
    bob.read(alice.write(b"hello"))
    message = bytearray(bob.write(bytes.fromhex(PAYLOADS[1])))
    message[position % len(message)] ^= change
    with pytest.raises(ProtocolError):
        alice.read(bytes(message))
