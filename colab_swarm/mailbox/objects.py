"""What members write into a bucket: signed statements, their paths, and the bytes of an object. Pure.

An object consists of a statement, which its writer signs, and the content, such as encoded values.
"""

import re
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from blake3 import blake3

from colab_swarm.averaging.group import MAX_STEP
from colab_swarm.errors import ProtocolError, require
from colab_swarm.net.handshake import VERSION
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES, Key, Signed
from colab_swarm.net.peers import Buffer, Message, PeerId, decoded
from colab_swarm.training.records import Agreement, Rates, StateSketch

H = TypeVar("H", bound="Statement")
MOST_MEMBERS = 256  # maximum number of members of a round
HEADER_BYTES = 1 << 16  # maximum size of a statement
MANIFEST_BYTES = 1 << 20
MIN_PACE_S = 1.0
MAX_PACE_S = 6 * 3600.0
CARD = "card/first"
LEFT = "-left"
MANIFEST = "manifest-"
PLACE: Final = re.compile(
    r"rounds/([0-9]{8})-[0-9a-f]{16}/(?:([0-9a-f]{64})|manifest-[0-9]{2,6}|[0-9a-f]{64}-left)"
)
STATE_PLACE: Final = re.compile(r"states/[0-9]{8}-(?:first|[0-9a-f]{16})")
_MARK: Final = b"colab_swarm"
_HEAD: Final = len(_MARK) + 1 + 4  # bytes of an object before its statement


def folder_of(round: int, base: bytes) -> str:
    """Return the folder of a round after the manifest with the digest ``base``. It is unknown before that manifest."""
    return f"rounds/{round:08d}-{base[:8].hex()}"


def round_of(path: str) -> int:
    """Return the round in the path of a state or of an object of a round."""
    return int(path.partition("/")[2][:8])


Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Pace = Annotated[float, msgspec.Meta(ge=MIN_PACE_S, le=MAX_PACE_S)]
Round = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Statement(Signed, frozen=True, kw_only=True):
    """A signed text about one model of a run, with the membership of its writer."""

    prefix: Annotated[str, msgspec.Meta(max_length=200)]
    key: Key
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]
    content: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # digest of the rest of the object
    most_bytes: ClassVar[int] = HEADER_BYTES  # maximum size of an object without its content

    @property
    def member(self) -> PeerId:
        return id_of(self.key)

    @property
    def path_part(self) -> str:
        """Part of the object's path. Without it, the statement does not count: any member can copy it elsewhere."""
        raise NotImplementedError


class Card(Statement, frozen=True, kw_only=True):
    """``card/first``: the agreement of a model's peers.

    Attributes:
        schema: digest of the vector's layout and of the agreement.
        agreement: names and values of the settings that all peers share.
        min_peers: number of peers whose contributions the first round needs.
    """

    schema: bytes
    agreement: Agreement
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=MOST_MEMBERS)] = 1
    most_bytes: ClassVar[int] = MANIFEST_BYTES

    @property
    def path_part(self) -> str:
        return CARD


class PseudoGradient(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/MEMBER``: a member's contribution to a round. The encoded pseudo-gradient follows."""

    round: Round
    base: Hash  # digest of the manifest from which this member's model went on
    weight: Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
    samples: Figure
    samples_per_s: Figure  # this member's speed
    seconds: Figure  # since the member learned of that manifest, plus the time of its last upload
    name: Annotated[str, msgspec.Meta(max_length=100)]  # for people
    loss: float | None = None
    rates: Rates = ()  # as in `ProgressRecord`
    sketch: StateSketch | None = None  # a sketch of the member's state at that manifest, every few rounds

    @property
    def path_part(self) -> str:
        return f"{folder_of(self.round, self.base)}/{self.member.hex()}"


class Farewell(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/MEMBER-left``: rounds need not wait for this member until it contributes again."""

    base: Hash

    @property
    def path_part(self) -> str:
        return f"-{self.base[:8].hex()}/{self.member.hex()}{LEFT}"


class ManifestEntry(Message, frozen=True):
    """A contribution that counts, with the figures that it contains."""

    member: PeerId
    round: Round
    digest: Hash  # of the object
    weight: Figure
    samples: Figure
    seconds: Figure


class RoundManifest(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/manifest-NUMBER``: closes a round, and lists the contributions that count."""

    round: Round
    base: Hash  # digest of the manifest before
    entries: Annotated[tuple[ManifestEntry, ...], msgspec.Meta(min_length=1, max_length=MOST_MEMBERS)]
    most_bytes: ClassVar[int] = MANIFEST_BYTES

    @property
    def path_part(self) -> str:
        return f"{folder_of(self.round, self.base)}/{MANIFEST}"


def content_digest(content: Buffer) -> bytes:
    return blake3(content, max_threads=blake3.AUTO).digest()


def seal(statement: Statement, content: Buffer = b"") -> bytes:
    """Return an object: mark, version, the statement's length in 4 bytes, statement, content."""
    head = statement.encode()
    return b"".join((_MARK, bytes([VERSION]), len(head).to_bytes(4, "big"), head, content))


def unseal(data: bytes, kind: type[H]) -> tuple[H, memoryview]:
    """Check an object's signature and content; return its statement and its content. Raises `ProtocolError`."""
    statement, content = unseal_start(data, kind)
    named = statement.content or content_digest(b"")
    require(content_digest(content) == named, "it is cut off or changed", ProtocolError)
    return statement, content


def unseal_start(data: bytes, kind: type[H]) -> tuple[H, memoryview]:
    """Check the signature at the start of an object; return the statement and the bytes after it."""
    require_version(data)
    end = start_bytes(data)
    is_whole = data.startswith(_MARK) and len(data) >= _HEAD and end <= len(data)
    require(is_whole, f"an object of {len(data)} bytes is cut off", ProtocolError)
    statement = decoded(data[_HEAD:end], kind, f"no readable {kind.__name__}", ProtocolError)
    require(statement.is_signed_by(statement.key), "its signature is wrong", ProtocolError)
    return statement, memoryview(data)[end:]


def require_version(data: bytes) -> None:
    """Raise `ProtocolError` if another protocol version wrote this object."""
    version = data[len(_MARK) : len(_MARK) + 1]
    is_other = data.startswith(_MARK) and version not in (b"", bytes([VERSION]))
    require(
        not is_other,
        f"the run was written by protocol {int.from_bytes(version)}, this package speaks {VERSION}: update "
        "the older of both",
        ProtocolError,
    )


def start_bytes(data: bytes) -> int:
    """Return the number of bytes up to the end of an object's statement, from the object's first bytes."""
    return _HEAD + int.from_bytes(data[_HEAD - 4 : _HEAD], "big")
