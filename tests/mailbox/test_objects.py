"""Objects, the chain of manifests, contributions and their mean: pure."""

import msgspec
import numpy as np
import pytest

from colab_swarm.errors import ProtocolError
from colab_swarm.mailbox import contributions
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.chain import RoundChain, StateHead
from colab_swarm.mailbox.journal import Statements
from colab_swarm.mailbox.objects import (
    LEFT,
    MIN_PACE_S,
    Card,
    Farewell,
    ManifestEntry,
    PseudoGradient,
    Statement,
    seal,
    unseal,
)
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.tensors.vector import HostVector
from tests.mailbox.board import ALICE, BOB, CAROL, PACE_S, ROOT, contribution, manifest_of

FIRST = RoundChain(0, {0: ROOT}, closed_at=0.0)


def entry_of(member: PeerId, round: int, seconds: float = PACE_S) -> ManifestEntry:
    return ManifestEntry(member, round, ROOT, 1.0, 1.0, seconds)


def after(chain: RoundChain, seconds: dict[Identity, float]) -> RoundChain:
    """Return the chain after a round of these members, which say how long they took."""
    ordered = sorted((who.id, taken_s) for who, taken_s in seconds.items())
    made = manifest_of(chain, *[entry_of(member, chain.round, taken_s) for member, taken_s in ordered])
    return chain.after(made, bytes([chain.round]) * 32, closed_at=chain.closed_at + PACE_S)


CHAIN = after(FIRST, {ALICE: PACE_S, BOB: PACE_S, CAROL: PACE_S})


def test_an_object_is_read_as_written_and_any_damage_is_found() -> None:
    head = contribution(ALICE, FIRST).head
    content = np.ones(4, np.float32).tobytes()
    data = seal(head, content)
    read, values = unseal(data, PseudoGradient)
    assert read == head and read.member == ALICE.id and bytes(values) == content
    forged = msgspec.structs.replace(head, key=BOB.public_key)
    others = [data[:end] for end in (0, 3, 4, 60, len(data) - 1)]
    others += [data + b"x", seal(head), seal(forged, content), seal(manifest_of(CHAIN))]
    others += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), 7)]
    for other in others:
        with pytest.raises(ProtocolError):
            unseal(other, PseudoGradient)


WHO = {"prefix": "model", "key": ALICE.public_key, "membership": b"", "signature": bytes(64)}
STATEMENTS: dict[str, Statement] = {
    "card": Card(schema=b"", agreement=(), **WHO),
    "manifest": manifest_of(CHAIN, entry_of(ALICE.id, 1)),
    "contribution": contribution(ALICE, FIRST).head,
    "state": StateHead(chain=CHAIN, manifest=b"", **WHO),
}


def test_nobody_says_farewell_in_the_name_of_another_member() -> None:
    statements = Statements(Bucket("memory://names", "run"), "model", lambda key, membership, at: Role.WORKER)
    farewell = Farewell(prefix="model", key=BOB.public_key, membership=b"", base=FIRST.base).signed(BOB.sign)

    def opened(who: Identity, chain: RoundChain) -> Farewell:
        place = StoredObject(f"{chain.folder}/{who.id.hex()}{LEFT}", 1, 0.0)
        return statements.opened(place, seal(farewell), Farewell)[0]

    assert opened(BOB, FIRST) == farewell
    for who, chain in ((ALICE, FIRST), (BOB, after(CHAIN, {BOB: PACE_S}))):
        with pytest.raises(ProtocolError, match="it is another member's, or another round's"):
            opened(who, chain)


@pytest.mark.parametrize(
    ("seconds", "pace_s"),
    [
        ({ALICE: 9.0, BOB: 11.0, CAROL: 12.0}, 11.0),
        ({ALICE: 9.0, BOB: 11.0, CAROL: 9e11}, 11.0),
        ({ALICE: 9.0, BOB: 8 * 3600.0}, 9.0),
        ({ALICE: 0.0}, MIN_PACE_S),
        ({ALICE: 9e11}, 6 * 3600.0),
    ],
)
def test_a_usual_round_is_the_median_time_of_its_members(
    seconds: dict[Identity, float], pace_s: float
) -> None:
    """One whose laptop slept for a night stretches the next round at most while it is alone."""
    chain = after(CHAIN, seconds)
    assert chain.pace_s == pace_s
    assert after(chain, {ALICE: PACE_S}).pace_s == PACE_S


@pytest.mark.parametrize("name", ["float32", "int8", "sparseloco"])
@pytest.mark.parametrize("numel", [0, 1, 5000, contributions.PIECE, contributions.PIECE + 1])
def test_vectors_are_encoded_in_pieces_of_known_size(name: str, numel: int) -> None:
    codec = codec_of(name)
    values = np.linspace(-1, 1, numel, dtype=np.float32)
    content = memoryview(contributions.encode(codec, HostVector(values)))
    assert len(content) == contributions.encoded_bytes(codec, numel)
    expected = [values[:0]]
    for at in range(0, numel, contributions.PIECE):
        piece = values[at : at + contributions.PIECE]
        expected.append(codec.decode(codec.encode(piece), len(piece)))
    decoded = [piece for _, piece in contributions.decode(codec, content, numel)]
    np.testing.assert_array_equal(np.concatenate([values[:0], *decoded]), np.concatenate(expected))
    norm = np.linalg.norm(np.concatenate(expected).astype(np.float64))
    assert contributions.norm_of(codec, content, numel) == pytest.approx(norm)
    with pytest.raises(ValueError, match="encoded"):
        contributions.norm_of(codec, memoryview(bytes(content) + b"x"), numel)
