"""Rounds in a bucket: what is written there, when a round closes, what counts. Pure.

A round is closed by a *manifest*, which lists the contributions that count, with their weights and
scales. The first one that is written for a round stands. So all peers apply the same means in the
same order, and each contribution counts in one manifest or in none.
"""

import itertools
import math
import os
import re
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Self, TypeVar

import msgspec
from blake3 import blake3

from colab_swarm.averaging.group import MAX_STEP
from colab_swarm.errors import ProtocolError, require
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.net.handshake import VERSION
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES, Key, Signed
from colab_swarm.net.peers import Buffer, Message, PeerId, decoded
from colab_swarm.training.records import Agreement, Rates, StateSketch

H = TypeVar("H", bound="Statement")
WINDOW = 2  # rounds after its own in which a contribution may still be listed
MOST_MEMBERS = 256  # of a round
# A round waits for absent members for two usual rounds and a grace, then closes without them. The grace is a
# quarter of a usual round within these limits: a store answers in a few seconds however short the rounds are.
LEAST_GRACE_S = 6.0
MOST_GRACE_S = 90.0
MIN_PACE_S = 1.0
WHOLE_SECOND_S = 1.0  # S3's times have no fractions
MAX_PACE_S = 6 * 3600.0
HEADER_BYTES = 1 << 16  # at most
MANIFEST_BYTES = 1 << 20
PLACE: Final = re.compile(
    r"rounds/([0-9]{8})-[0-9a-f]{16}/"
    r"(?:([0-9a-f]{64})(?:-[0-9a-f]{8})?|manifest-(?:[0-9]{2}|[1-9][0-9]{2,5})|[0-9a-f]{64}-left)"
)
CARD = "card/first"
CARD_PLACE: Final = re.compile(r"card/first(?:-[0-9]{1,2})?")
_MARK: Final = b"colab_swarm"
_HEAD: Final = len(_MARK) + 1 + 4  # bytes of an object before its statement
LEFT = "-left"
MANIFEST = "manifest-"
STATE_PLACE: Final = re.compile(r"states/([0-9]{8})(?:-[0-9a-f]{1,8})?")
MOST_PLACES = 100  # of garbage that a run's first card or state passes over
STATE_ROUNDS = 16  # from one state in the bucket to the next


def folder_of(round: int, base: bytes) -> str:
    """Return a round's folder after the manifest with this digest: nobody knows it before."""
    return f"rounds/{round:08d}-{base[:8].hex()}"


def state_path(round: int) -> str:
    return f"states/{round:08d}"


def round_of(path: str) -> int:
    """Return the round of the path of a state, or of an object of a round."""
    return int(path[7:15])


def numbered(path: str, attempt: int) -> str:
    """Return the path of an object whose first places are taken, which two peers write to."""
    if attempt:
        return f"{path}-{attempt}"
    return path


def elsewhere(path: str) -> str:
    """Return a path beside one that is taken, which nobody can take before."""
    return f"{path}-{os.urandom(4).hex()}"


Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Pace = Annotated[float, msgspec.Meta(ge=MIN_PACE_S, le=MAX_PACE_S)]
Round = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Statement(Signed, frozen=True, kw_only=True):
    """What a member writes: signed, about one model of a run, with its membership."""

    prefix: Annotated[str, msgspec.Meta(max_length=200)]
    key: Key
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]
    content: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # digest of the rest of the object
    most_bytes: ClassVar[int] = HEADER_BYTES  # of an object without its content

    @property
    def member(self) -> PeerId:
        return id_of(self.key)

    @property
    def path_part(self) -> str:
        """A part of the paths where such a statement counts."""
        raise NotImplementedError


class Card(Statement, frozen=True, kw_only=True):
    """``card/first``: what the peers of a model have agreed on; the first one stands.

    Attributes:
        min_peers: whose contributions the first round needs.
    """

    schema: bytes
    agreement: Agreement
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=MOST_MEMBERS)] = 1
    most_bytes: ClassVar[int] = MANIFEST_BYTES

    @property
    def path_part(self) -> str:
        return CARD


class PseudoGradient(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/MEMBER``: a pseudo-gradient, which follows encoded."""

    round: Round
    base: Hash  # digest of the manifest that this member's model was at
    weight: Figure
    samples: Figure
    samples_per_s: Figure  # of this member
    seconds: Figure  # since it knew that manifest, and of its last upload: a usual round has both
    name: Annotated[str, msgspec.Meta(max_length=100)]  # for people
    loss: float | None = None
    rates: Rates = ()  # as in `ProgressRecord`
    sketch: StateSketch | None = None  # of the member's state at that manifest, every few rounds

    @property
    def path_part(self) -> str:
        return f"{folder_of(self.round, self.base)}/{self.member.hex()}"


class Farewell(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/MEMBER-left``: no round need wait until this member contributes again."""

    base: Hash

    @property
    def path_part(self) -> str:
        return f"-{self.base[:8].hex()}/{self.member.hex()}{LEFT}"


class ManifestEntry(Message, frozen=True):
    """A contribution that counts."""

    member: PeerId
    round: Round
    digest: Hash  # of the object
    weight: Figure
    scale: Annotated[float, msgspec.Meta(ge=0, le=1)]
    samples: Figure
    seconds: Figure


class RoundManifest(Statement, frozen=True, kw_only=True):
    """``rounds/ROUND-BASE/manifest-ATTEMPT``: closes a round."""

    round: Round
    base: Hash  # digest of the manifest before
    entries: Annotated[tuple[ManifestEntry, ...], msgspec.Meta(min_length=1, max_length=MOST_MEMBERS)]
    most_bytes: ClassVar[int] = MANIFEST_BYTES

    @property
    def path_part(self) -> str:
        return f"{folder_of(self.round, self.base)}/{MANIFEST}"


class RoundChain(Message, frozen=True):
    """Where the run is: its next ``round``, and what is known of the last ones."""

    round: Round
    digests: dict[int, Hash]  # of the manifest before round r, for the rounds of the window
    closed_at: Figure  # the last manifest, by the store's clock
    pace_s: Pace = MIN_PACE_S  # the median time of a round's contributors
    members: tuple[PeerId, ...] = ()  # of the last round
    listed: tuple[tuple[PeerId, int], ...] = ()  # members and rounds of contributions that counted

    def __post_init__(self) -> None:
        require(self.round in self.digests, "a chain needs the digest of its last manifest")

    @classmethod
    def begin(cls, round: int, root: bytes, *, now: float) -> Self:
        """Return the chain before the first round, of the state with this digest."""
        return cls(round, {round: root}, now)

    @property
    def base(self) -> bytes:
        return self.digests[self.round]

    @property
    def folders(self) -> dict[int, str]:
        """Of the rounds whose contributions may count."""
        return {round: folder_of(round, base) for round, base in self.digests.items()}

    @property
    def folder(self) -> str:
        return folder_of(self.round, self.base)

    @property
    def farewells(self) -> dict[str, PeerId]:
        """Where members of the last round may have said farewell since they contributed."""
        last_rounds = dict(sorted(self.listed))
        members: dict[str, PeerId] = {}
        for round, folder in self.folders.items():
            for member in self.members:
                if round >= last_rounds.get(member, 0):
                    members[f"{folder}/{member.hex()}{LEFT}"] = member
        return members

    def due_at(
        self,
        present: Collection[PeerId],
        gone: Collection[PeerId] = (),
        patience_s: Callable[[PeerId], float] = lambda member: 0.0,
    ) -> float:
        """Return when the round may close with these members; at once if none is missing.

        ``patience_s(member)``: how much longer than usual this peer waits for a member.
        """
        if not present:
            return math.inf
        missing = self.missing(present, gone)
        if not missing:
            return self.closed_at
        if self.is_quorum({*present, *gone}):
            return min(self.late_at + max(map(patience_s, missing)), self.deadline)
        return self.deadline

    def missing(self, present: Collection[PeerId], gone: Collection[PeerId] = ()) -> set[PeerId]:
        """Return the members of the last round for whom this one waits."""
        return set(self.members).difference(present, gone)

    @property
    def deadline(self) -> float:
        """When a round may close without the majority of the last one's members."""
        return self.closed_at + 2 * self.pace_s + self._grace_s

    @property
    def late_at(self) -> float:
        """When a round takes longer than usual."""
        return self.closed_at + self.pace_s + self._grace_s / 2

    @property
    def missing_s(self) -> float:
        """How long a manifest that cannot be followed is awaited at most.

        A majority that cannot follow it has replaced it before a minority may close the round after it.
        """
        return self._grace_s * 2 / 3

    @property
    def settled_s(self) -> float:
        """Age of a contribution that a manifest must list: its upload is over by then."""
        return max(self.pace_s, self._grace_s)

    @property
    def _grace_s(self) -> float:
        return min(max(self.pace_s / 4, LEAST_GRACE_S), MOST_GRACE_S)

    def is_quorum(self, members: Collection[PeerId]) -> bool:
        return 2 * len(set(self.members).intersection(members)) > len(self.members)

    def may_count(self, member: PeerId, round: int) -> bool:
        return self.round - WINDOW <= round <= self.round and (member, round) not in self.listed

    def fault_of(self, manifest: RoundManifest, *, written_at: float, gone: Collection[PeerId] = ()) -> str:
        """Return what is wrong with a manifest, apart from its contributions; or nothing."""
        members = [entry.member for entry in manifest.entries]
        if (manifest.round, manifest.base) != (self.round, self.base):
            return "it does not follow the manifest before"
        if members != sorted(set(members)):
            return "it lists a member twice"
        for entry in manifest.entries:
            if not self.may_count(entry.member, entry.round):
                return "it lists a contribution that counted before, or is too old"
        at = written_at + WHOLE_SECOND_S
        leaves_out_most = bool(self.members) and not self.is_quorum({*members, *gone})
        if at < self.deadline and leaves_out_most:
            return "it leaves out most members of the last round"
        if at < self.late_at and self.missing(members, gone):
            return "it leaves out members of the last round before a usual round is over"
        return ""

    def after(self, manifest: RoundManifest, digest: bytes, *, closed_at: float) -> "RoundChain":
        """Return the chain after this manifest, the one with this digest."""
        round = self.round + 1
        oldest = round - WINDOW
        digests = {**self.digests, round: digest}
        listed = list(self.listed)
        members = set[PeerId]()
        for entry in manifest.entries:
            listed.append((entry.member, entry.round))
            members.add(entry.member)
        # Whatever members claim, it is not more than the round took by the store's clock.
        claims_s = [entry.seconds for entry in manifest.entries]
        pace_s = min(statistics.median_low(claims_s), closed_at - self.closed_at)
        # If a manifest that nobody can read claims a short round, its writer must still wait longer than `missing_s`.
        least_s = max(self.pace_s / 4, MIN_PACE_S)
        return RoundChain(
            round,
            {number: base for number, base in digests.items() if number >= oldest},
            closed_at,
            min(max(pace_s, least_s), MAX_PACE_S),
            tuple(sorted(members)),
            tuple((member, number) for member, number in listed if number >= oldest),
        )


@dataclass(frozen=True)
class RoundListing:
    """The objects of the last rounds."""

    contributions: dict[str, list[StoredObject]]  # by folder
    manifests: dict[str, list[StoredObject]]  # by folder, the oldest first
    farewells: dict[str, StoredObject]  # by path
    latest: int  # round that has a manifest, on whatever branch; -1 if none has

    @classmethod
    def of(cls, objects: Iterable[StoredObject]) -> Self:
        contributions: dict[str, list[StoredObject]] = {}
        manifests: dict[str, list[StoredObject]] = {}
        farewells: dict[str, StoredObject] = {}
        latest = -1
        for place in objects:
            match = PLACE.fullmatch(place.path)
            if match is None:
                continue
            if match[2]:
                contributions.setdefault(place.folder, []).append(place)
            elif place.path.endswith(LEFT):
                farewells[place.path] = place
            else:
                manifests.setdefault(place.folder, []).append(place)
                latest = max(latest, round_of(place.path))
        for places in manifests.values():
            places.sort(key=lambda place: (place.modified_at, len(place.path), place.path))
        return cls(contributions, manifests, farewells, latest)

    def at(self, path: str) -> StoredObject | None:
        """Return the contribution at a path, if there is one."""
        for place in self.contributions.get(path.rpartition("/")[0], ()):
            if place.path == path:
                return place
        return None

    def contributions_of(self, member: PeerId) -> list[StoredObject]:
        """Return the contributions of a member by their paths, the newest round last."""
        places = itertools.chain(*self.contributions.values())
        return [place for place in places if place.member == member]

    def next_attempt(self, folder: str) -> str:
        """Return the path of another manifest."""
        taken = {place.path for place in self.manifests.get(folder, ())}
        paths = (f"{folder}/{MANIFEST}{number:02d}" for number in itertools.count())
        return next(path for path in paths if path not in taken)


class StateHead(Statement, frozen=True, kw_only=True):
    """``states/ROUND``: a training state before that round, whose blob follows."""

    chain: RoundChain
    manifest: bytes  # the state's own, in chunks
    most_bytes: ClassVar[int] = 1 << 24

    @property
    def path_part(self) -> str:
        return state_path(self.chain.round)


def seal(statement: Statement, content: Buffer = b"") -> bytes:
    """Return an object: mark, version, the statement's length in 4 bytes, statement, content."""
    head = statement.encode()
    return b"".join((_MARK, bytes([VERSION]), len(head).to_bytes(4, "big"), head, content))


def content_digest(content: Buffer) -> bytes:
    return blake3(content, max_threads=blake3.AUTO).digest()


def unseal(data: bytes, kind: type[H]) -> tuple[H, memoryview]:
    """Return a statement that its own key signed, and the content; raises `ProtocolError`."""
    statement, content = unseal_start(data, kind)
    named = statement.content or content_digest(b"")
    require(content_digest(content) == named, "it is cut off or changed", ProtocolError)
    return statement, content


def unseal_start(data: bytes, kind: type[H]) -> tuple[H, memoryview]:
    """Return a statement that its own key signed, and the rest of the start of an object."""
    require_version(data)
    end = start_bytes(data)
    is_whole = data.startswith(_MARK) and len(data) >= _HEAD and end <= len(data)
    require(is_whole, f"an object of {len(data)} bytes is cut off", ProtocolError)
    head = data[_HEAD:end]
    content = memoryview(data)[end:]
    statement = decoded(head, kind, f"no readable {kind.__name__}", ProtocolError)
    require(statement.is_signed_by(statement.key), "its signature is wrong", ProtocolError)
    return statement, content


def require_version(data: bytes) -> None:
    """Raise `ProtocolError` for an object that another version of the package wrote."""
    version = data[len(_MARK) : len(_MARK) + 1]
    is_other = data.startswith(_MARK) and version not in (b"", bytes([VERSION]))
    require(
        not is_other,
        f"the run was written by protocol {int.from_bytes(version)}, this package speaks {VERSION}: update "
        "the older of both",
        ProtocolError,
    )


def start_bytes(data: bytes) -> int:
    """Return where the statement of an object ends, by the object's first bytes."""
    return _HEAD + int.from_bytes(data[_HEAD - 4 : _HEAD], "big")
