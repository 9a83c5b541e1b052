"""Reads the objects of a run's rounds, each once, and checks what members wrote. Each fault is reported once."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from colab_swarm.errors import JoinError, PeerError, ProtocolError, require
from colab_swarm.events import Fault, PeerRefused
from colab_swarm.mailbox.branches import Readings, ObjectRejected, ObjectsUnread
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.rounds import (
    CARD_PLACE,
    HEADER_BYTES,
    LEFT,
    MANIFEST,
    MANIFEST_BYTES,
    STATE_PLACE,
    STATE_ROUNDS,
    Card,
    Farewell,
    H,
    PseudoGradient,
    ReadContribution,
    RoundListing,
    RoundManifest,
    content_digest,
    encoded_bytes,
    folder_of,
    norm_of,
    require_version,
    round_of,
    unseal,
    unseal_start,
)
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.runtime import loop_now
from colab_swarm.snapshot import PeerRow
from colab_swarm.tensors.codecs import Codec
from colab_swarm.training.settings import PeerServices

logger = logging.getLogger(__name__)
ELSEWHERE = "it is another member's, or another round's"
T = TypeVar("T")
Placed = TypeVar("Placed", RoundManifest, PseudoGradient, Farewell)
RoleOf: TypeAlias = Callable[[bytes, bytes, float], Role]
"""``role_of(key, membership, at)``: the role of a member at a time; raises `PeerError` if it is none."""


def existing(data: bytes | None) -> bytes:
    """Return an object; raises `ProtocolError` if there is none."""
    if data is None:
        raise ProtocolError("it is not there")
    return data


async def start_of(bucket: Bucket, place: StoredObject, most_bytes: int) -> bytes:
    """Return an object, or its first ``most_bytes``; raises `ProtocolError` if there is none."""
    if place.size_bytes <= most_bytes:
        return existing(await bucket.read(place.path))
    return existing(await bucket.read(place.path, most_bytes))


def require_trainer(statement: H, prefix: str, role: Role) -> None:
    """Raise `ProtocolError` unless a member that trains wrote this about the model of ``prefix``; ``role`` is its."""
    require(statement.prefix == prefix, "it is of another model", ProtocolError)
    require(role >= Role.WORKER, "its writer is no member that trains", ProtocolError)


class Reader:
    """What this peer has read of a model's rounds; ``fetch`` returns the object at a path."""

    def __init__(
        self,
        fetch: Callable[[str], Coroutine[Any, Any, bytes | None]],
        services: PeerServices,
        prefix: str,
        codec: Codec,
        numel: int,
    ) -> None:
        self.readings = Readings()
        self._fetch = fetch
        self._services = services
        self._prefix = prefix
        self._codec = codec
        self._numel = numel

    async def answer(self, question: Callable[[], T]) -> T:
        """Ask until the answer is settled, and do each step that it needs first. Raises `BucketError`."""
        while True:
            try:
                return question()
            except ObjectsUnread as step:
                await asyncio.gather(*map(self._read, step.places))
            except ObjectRejected as step:
                self._reject(step.place, step.fault, step.author)

    def opened(self, data: bytes, kind: type[H], written_at: float) -> tuple[H, memoryview]:
        """Return a member's statement about this model, and its content; raises `ProtocolError` if it is none."""
        statement, content = unseal(data, kind)
        role = self._services.peers.role_by(statement.key, statement.membership, written_at)
        require_trainer(statement, self._prefix, role)
        return statement, content

    def tell_fault(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        """Report an object that does not count; ``author`` signed it, where that is known."""
        text = f"{place.path} does not count: {fault}"
        logger.info("%s", text)
        if author is None:
            self._services.events.emit(Fault(loop_now(), "the bucket", text))
        else:
            self._services.events.emit(PeerRefused(loop_now(), author.hex(), place.path, fault))

    def _reject(self, place: StoredObject, fault: str, author: PeerId | None = None) -> None:
        self.readings.faults[place] = fault
        self.tell_fault(place, fault, author)

    async def _read(self, place: StoredObject) -> None:
        name = place.path.rpartition("/")[2]
        try:
            if name.startswith(MANIFEST):
                await self._read_manifest(place)
            elif name.endswith(LEFT):
                await self._read_farewell(place)
            else:
                await self._read_contribution(place)
        except (PeerError, ValueError) as error:
            self._reject(place, str(error))

    async def _read_manifest(self, place: StoredObject) -> None:
        data = await self._bounded(place, MANIFEST_BYTES)
        manifest, _ = self.opened(data, RoundManifest, place.modified_at)
        # Whoever copied it here: its author has not.
        require(place.folder == folder_of(manifest.round, manifest.base), ELSEWHERE, ProtocolError)
        self.readings.manifests[place] = manifest, content_digest(data)

    async def _read_farewell(self, place: StoredObject) -> None:
        data = await self._bounded(place, HEADER_BYTES)
        farewell, _ = self.opened(data, Farewell, place.modified_at)
        folder = folder_of(round_of(place.path), farewell.base)
        named = place.path == f"{folder}/{farewell.member.hex()}{LEFT}"
        require(named, ELSEWHERE, ProtocolError)
        self.readings.farewells[place] = farewell

    async def _read_contribution(self, place: StoredObject) -> None:
        content_bytes = encoded_bytes(self._codec, self._numel)
        require(place.size_bytes > content_bytes, "it is cut off", ProtocolError)
        data = await self._bounded(place, HEADER_BYTES + content_bytes)
        head, content = self.opened(data, PseudoGradient, place.modified_at)
        named = (place.folder, place.member) == (folder_of(head.round, head.base), head.member)
        require(named, ELSEWHERE, ProtocolError)
        try:
            require(head.weight > 0, "it has no weight", ProtocolError)
            norm = await asyncio.to_thread(norm_of, self._codec, content, self._numel)
        except (PeerError, ValueError) as error:
            self._reject(place, str(error), head.member)
            return
        self.readings.contributions[place] = ReadContribution(head, content, content_digest(data), norm)

    async def _bounded(self, place: StoredObject, most_bytes: int) -> bytes:
        """Return an object of at most this size; raises `ProtocolError` if there is none."""
        require(place.size_bytes <= most_bytes, "it is too large", ProtocolError)
        return existing(await self._fetch(place.path))


async def first_card(
    bucket: Bucket, prefix: str, role_of: RoleOf, on_fault: Callable[[StoredObject, str], None]
) -> Card | None:
    """Return what the peers of a model have agreed on, if they have; ``on_fault`` is told of garbage.

    Raises `ProtocolError` if another version of the package wrote it.
    """
    for place in sorted(await bucket.list("card"), key=lambda place: (len(place.path), place.path)):
        # Shorter names would go before the first card.
        if place.size_bytes == 0 or not CARD_PLACE.fullmatch(place.path):
            continue
        data = await start_of(bucket, place, MANIFEST_BYTES)
        require_version(data)
        try:
            card, _ = unseal(data, Card)
            require_trainer(card, prefix, role_of(card.key, card.membership, place.modified_at))
        except (PeerError, ValueError) as error:
            on_fault(place, str(error))
            continue
        return card
    return None


async def read_statement(
    bucket: Bucket, place: StoredObject, kind: type[Placed], prefix: str, role_of: RoleOf
) -> Placed | None:
    """Read the start of an object, and return what a member that trains wrote there about a model.

    None if it is something else.
    """
    most_bytes = HEADER_BYTES
    if kind is RoundManifest:
        most_bytes = MANIFEST_BYTES
    try:
        statement, _ = unseal_start(await start_of(bucket, place, most_bytes), kind)
        role = role_of(statement.key, statement.membership, place.modified_at)
        require_trainer(statement, prefix, role)
        folder = folder_of(round_of(place.path), statement.base)
        require(place.folder == folder, "it is of another round", ProtocolError)
    except (PeerError, ValueError):
        return None
    return statement


class Spectator:
    """Reads who trains a model by the objects in its ``bucket``, and writes nothing.

    It reads the start of an object, and not its values. ``admission`` is that of the run; None in an open run.
    """

    def __init__(self, bucket: Bucket, prefix: str, admission: MembershipAdmission | None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._admission = admission

    async def last_members(self) -> list[PeerRow]:
        """Return the members of the newest round that a member closed; `JoinError` if there is none."""
        for first in await self._first_rounds():
            listing = RoundListing.of(await self._bucket.list("rounds", f"rounds/{first:08d}"))
            for folder in sorted(listing.manifests, reverse=True):
                for place in listing.manifests[folder]:
                    manifest = await self._statement(place, RoundManifest)
                    if manifest is not None:
                        return [
                            await self._row(entry.member, manifest, listing) for entry in manifest.entries
                        ]
        raise JoinError(
            f"no round is over yet in {self._bucket.address}: nobody has trained this model there"
        )

    async def _first_rounds(self) -> list[int]:
        """Return from which rounds on to look: the last ones, then all, because a state may be no member's."""
        first = 0
        for place in await self._bucket.list("states"):
            match = STATE_PLACE.fullmatch(place.path)
            if match is not None:
                first = max(0, int(match[1]) - STATE_ROUNDS)
        return sorted({first, 0}, reverse=True)

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
        folder = ""
        # the newest contribution may be of the round that is open
        for place in reversed(listing.contributions_of(member)):
            head = await self._statement(place, PseudoGradient)
            if head is not None and head.member == member:
                folder = place.folder
                loss = head.loss
                # JSON has no other numbers
                if loss is not None and not math.isfinite(loss):
                    loss = None
                heard_s = max(0.0, self._bucket.now() - place.modified_at)
                row = replace(
                    row, name=head.name, samples_per_s=head.samples_per_s, loss=loss, heard_s=heard_s
                )
                break
        for place in listing.farewells.values():
            if place.path.endswith(member.hex() + LEFT) and place.path > folder:
                farewell = await self._statement(place, Farewell)
                if farewell is not None and farewell.member == member:
                    return replace(row, role="away")
        return row

    async def _statement(self, place: StoredObject, kind: type[Placed]) -> Placed | None:
        """Return what a member that trains wrote there about this model; None if it is something else."""
        return await read_statement(self._bucket, place, kind, self._prefix, self._role_of)

    def _role_of(self, key: bytes, membership: bytes, at: float) -> Role:
        if self._admission is None:
            return Role.WORKER
        return self._admission.verify(key, membership, now=at)
