"""Reads what members wrote in a bucket, and checks who wrote it, and where."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TypeAlias, TypeVar

from colab_swarm.errors import JoinError, PeerError, ProtocolError, require
from colab_swarm.events import EventLog, Fault, PeerRefused
from colab_swarm.mailbox.branches import ObjectRejected, ObjectsUnread, Readings
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.contributions import ReadContribution, encoded_bytes, norm_of
from colab_swarm.mailbox.rounds import (
    CARD_PLACE,
    HEADER_BYTES,
    LEFT,
    MANIFEST,
    Card,
    Farewell,
    H,
    PseudoGradient,
    RoundListing,
    RoundManifest,
    content_digest,
    require_version,
    start_bytes,
    unseal,
    unseal_start,
)
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.runtime import loop_now
from colab_swarm.snapshot import PeerRow
from colab_swarm.tensors.codecs import Codec

logger = logging.getLogger(__name__)
T = TypeVar("T")
READS_AT_ONCE = 16
RoleOf: TypeAlias = Callable[[bytes, bytes, float], Role]
"""``role_of(key, membership, at)``: a member's role at a time; raises `PeerError` if it is none."""


class Statements:
    """What members that train wrote in a ``bucket`` about the model of ``prefix``."""

    def __init__(self, bucket: Bucket, prefix: str, role_of: RoleOf) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._role_of = role_of

    def opened(self, place: StoredObject, data: bytes | None, kind: type[H]) -> tuple[H, memoryview]:
        """Return a whole object's statement and content. Raises `PeerError` or ValueError."""
        require(data is not None, "it is not there", ProtocolError)
        statement, content = unseal(data or b"", kind)
        self._require_author(place, statement)
        return statement, content

    async def head(self, place: StoredObject, kind: type[H]) -> H:
        """Return the statement of an object by its start. Raises `PeerError` or ValueError."""
        data = await self._start(place, HEADER_BYTES)
        end = start_bytes(data)
        if len(data) < end <= min(place.size_bytes, kind.most_bytes):
            data = await self._start(place, end)
        statement, _ = unseal_start(data, kind)
        self._require_author(place, statement)
        return statement

    async def readable_head(self, place: StoredObject, kind: type[H]) -> H | None:
        """Return the statement of an object by its start; None if it is something else."""
        try:
            return await self.head(place, kind)
        except (PeerError, ValueError):
            return None

    async def first_card(self, on_fault: Callable[[StoredObject, str], None]) -> Card | None:
        """Return what the peers have agreed on, if they have; ``on_fault`` hears of garbage.

        Raises `ProtocolError` if another version of the package wrote it.
        """
        for place in sorted(await self._bucket.list("card"), key=lambda place: (len(place.path), place.path)):
            # Shorter names would go before the first card.
            if not CARD_PLACE.fullmatch(place.path):
                continue
            data = await self._start(place, Card.most_bytes)
            require_version(data)
            try:
                card, _ = self.opened(place, data, Card)
            except (PeerError, ValueError) as error:
                on_fault(place, str(error))
                continue
            return card
        return None

    async def _start(self, place: StoredObject, most_bytes: int) -> bytes:
        if place.size_bytes <= most_bytes:
            data = await self._bucket.read(place.path)
        else:
            data = await self._bucket.read(place.path, most_bytes)
        return data or b""

    def _require_author(self, place: StoredObject, statement: H) -> None:
        role = self._role_of(statement.key, statement.membership, place.modified_at)
        require(statement.prefix == self._prefix, "it is of another model", ProtocolError)
        require(role >= Role.WORKER, "its writer is no member that trains", ProtocolError)
        # Anybody can write a copy.
        is_own = statement.path_part in place.path
        require(is_own, "it is another member's, or another round's", ProtocolError)


class Reader:
    """What this peer has read of a model's rounds. Each fault is reported once.

    ``fetch`` returns the object at a path.
    """

    def __init__(
        self,
        fetch: Callable[[str], Coroutine[None, None, bytes | None]],
        statements: Statements,
        events: EventLog,
        codec: Codec,
        numel: int,
    ) -> None:
        self.readings = Readings()
        self._fetch = fetch
        self._statements = statements
        self._events = events
        self._codec = codec
        self._numel = numel
        self._turns = asyncio.Semaphore(READS_AT_ONCE)

    async def answer(self, question: Callable[[], T]) -> T:
        """Ask until the answer is settled, and do the steps that it needs. Raises `BucketError`."""
        while True:
            try:
                return question()
            except ObjectsUnread as step:
                await asyncio.gather(*map(self._read_in_turn, step.places))
            except ObjectRejected as step:
                self.readings.reject(step.place, step.fault, may_stand=step.may_stand)
                self.tell_fault(step.place, step.fault, step.author)

    def tell_fault(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        """Report an object that does not count; ``author`` signed it, where that is known."""
        text = f"{place.path} does not count: {fault}"
        logger.info("%s", text)
        if author is None:
            self._events.emit(Fault(loop_now(), "the bucket", text))
        else:
            self._events.emit(PeerRefused(loop_now(), author.hex(), place.path, fault))

    async def whole(
        self, place: StoredObject, kind: type[H], content_bytes: int = 0
    ) -> tuple[bytes, H, memoryview]:
        """Return an object, its statement and its content. Raises `PeerError` or ValueError."""
        require(place.size_bytes > content_bytes, "it is cut off", ProtocolError)
        require(place.size_bytes <= kind.most_bytes + content_bytes, "it is too large", ProtocolError)
        data = await self._fetch(place.path)
        statement, content = self._statements.opened(place, data, kind)
        return data or b"", statement, content

    def _reject(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        self.readings.reject(place, fault)
        self.tell_fault(place, fault, author)

    async def _read_in_turn(self, place: StoredObject) -> None:
        # All at once would be in memory before any of them is judged.
        async with self._turns:
            await self._read(place)

    async def _read(self, place: StoredObject) -> None:
        name = place.path.rpartition("/")[2]
        try:
            if name.startswith(MANIFEST):
                data, manifest, _ = await self.whole(place, RoundManifest)
                self.readings.manifests[place] = manifest, content_digest(data)
            elif name.endswith(LEFT):
                _, farewell, _ = await self.whole(place, Farewell)
                self.readings.farewells[place] = farewell
            else:
                await self._read_contribution(place)
        except (PeerError, ValueError) as error:
            self._reject(place, str(error))

    async def _read_contribution(self, place: StoredObject) -> None:
        content_bytes = encoded_bytes(self._codec, self._numel)
        data, head, content = await self.whole(place, PseudoGradient, content_bytes)
        try:
            require(head.weight > 0, "it has no weight", ProtocolError)
            norm = await asyncio.to_thread(norm_of, self._codec, content, self._numel)
        except (PeerError, ValueError) as error:
            self._reject(place, str(error), head.member)
            return
        self.readings.hold(place, ReadContribution(head, content, content_digest(data), norm))


class Spectator:
    """Reads who trains a model by the objects in its ``bucket``, and writes nothing.

    It reads the start of an object, and not its values. ``admission`` is the run's; None in an open
    run.
    """

    def __init__(self, bucket: Bucket, prefix: str, admission: MembershipAdmission | None) -> None:
        def role_of(key: bytes, membership: bytes, at: float) -> Role:
            if admission is None:
                return Role.WORKER
            return admission.verify(key, membership, now=at)

        self._bucket = bucket
        self._statements = Statements(bucket, prefix, role_of)

    async def last_members(self) -> list[PeerRow]:
        """Return the members of the newest closed round; raises `JoinError` if there is none."""
        listing = RoundListing.of(await self._bucket.list("rounds"))
        for folder in sorted(listing.manifests, reverse=True):
            _, manifest = await self._first_of(listing.manifests[folder], RoundManifest)
            if manifest is not None:
                return [await self._row(entry.member, manifest, listing) for entry in manifest.entries]
        raise JoinError(
            f"no round is over yet in {self._bucket.address}: nobody has trained this model there"
        )

    async def _row(self, member: PeerId, manifest: RoundManifest, listing: RoundListing) -> PeerRow:
        row = PeerRow(
            name=short(member),
            id=short(member),
            role="trainer",
            step=manifest.round + 1,
            samples_per_s=0.0,
            samples=0.0,
            reachable=None,
            me=False,
        )
        # the newest contribution may be of the round that is open
        contributions = reversed(listing.contributions_of(member))
        place, head = await self._first_of(contributions, PseudoGradient)
        folder = ""
        if place is not None and head is not None:
            folder = place.folder
            loss = head.loss
            # JSON has no other numbers
            if loss is not None and not math.isfinite(loss):
                loss = None
            heard_s = max(0.0, self._bucket.now() - place.modified_at)
            row = replace(
                row, name=head.name, compute_samples_per_s=head.samples_per_s, loss=loss, heard_s=heard_s
            )
        farewells = [place for place in listing.farewells.values() if place.member == member]
        left, _ = await self._first_of(reversed(farewells), Farewell)
        if left is not None and left.folder >= folder:
            row = replace(row, role="away")
        return row

    async def _first_of(
        self, places: Iterable[StoredObject], kind: type[H]
    ) -> tuple[StoredObject, H] | tuple[None, None]:
        """Return the first object that is a member's statement of this kind, and its statement."""
        for place in places:
            statement = await self._statements.readable_head(place, kind)
            if statement is not None:
                return place, statement
        return None, None
