"""The other members of a bucket's last round: their figures, and what they are believed to compute since."""

import math
import statistics
import time
from dataclasses import replace
from typing import TypeVar

from colab_swarm.errors import JoinError, PeerError, ProtocolError, require
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.reader import existing
from colab_swarm.mailbox.rounds import (
    HEADER_BYTES,
    LEFT,
    MANIFEST_BYTES,
    STATE_PLACE,
    STATE_ROUNDS,
    ClosedRound,
    Farewell,
    PseudoGradient,
    RoundListing,
    RoundManifest,
    folder_of,
    round_of,
    unseal_start,
)
from colab_swarm.markup import plain
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.snapshot import PeerRow
from colab_swarm.training.known import KnownRecords
from colab_swarm.training.records import PLAUSIBLE, ProgressRecord

Placed = TypeVar("Placed", RoundManifest, PseudoGradient, Farewell)


class LastMembers:
    """What the other members of the last round said of themselves with their contributions.

    ``known`` has this peer's own record. `on_round` replaces all figures.
    """

    def __init__(self, known: KnownRecords) -> None:
        self._known = known
        self._heads: dict[PeerId, PseudoGradient] = {}

    def on_round(self, closed: ClosedRound) -> None:
        """Take the figures of a round that this peer follows."""
        self._heads = {}
        for contribution in closed.contributions.values():
            head = contribution.head
            if head.member != self._known.me:
                self._heads[head.member] = head

    def name_of(self, member: PeerId) -> str:
        """Return a member's name for people; its short id if none is known."""
        head = self._heads.get(member)
        if head is None or not head.name:
            return short(member)
        return plain(head.name)

    def speeds(self) -> dict[PeerId, float]:
        """Return the members' samples per second, as far as they are believed."""
        claims = {member: head.samples_per_s for member, head in self._heads.items()}
        most = PLAUSIBLE * statistics.median_low([self._known.own.samples_per_s, *claims.values()])
        return {member: min(claim, most) for member, claim in claims.items()}

    def samples(self) -> float:
        """Return the samples of all members since the last round, as if they compute as long as this peer."""
        own = self._known.own
        all_per_s = own.samples_per_s + sum(self.speeds().values())
        return own.samples * all_per_s / (own.samples_per_s or math.inf)

    def records(self) -> dict[PeerId, ProgressRecord]:
        """Return a record for each member, for people: nobody hears of a member between two rounds."""
        own = self._known.own
        seconds = own.samples / (own.samples_per_s or math.inf)
        records = {}
        for member, speed in self.speeds().items():
            head = self._heads[member]
            records[member] = ProgressRecord(
                own.step,
                own.lineage,
                samples=seconds * speed,
                samples_per_s=speed,
                syncing=False,
                reduces=False,
                name=head.name,
                loss=head.loss,
                sketch=head.sketch,
            )
        return records


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
        for place in reversed(listing.contributions.values()):
            if place.member != member:
                continue
            head = await self._statement(place, PseudoGradient)
            if head is not None and head.member == member:
                folder = place.folder
                loss = head.loss
                # JSON has no other numbers
                if loss is not None and not math.isfinite(loss):
                    loss = None
                heard_s = max(0.0, time.time() - place.modified_at)
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
        most_bytes = HEADER_BYTES
        if kind is RoundManifest:
            most_bytes = MANIFEST_BYTES
        try:
            require(place.size_bytes > 0, "it is empty", ProtocolError)
            data = existing(await self._bucket.read(place.path, min(place.size_bytes, most_bytes)))
            statement, _ = unseal_start(data, kind)
            require(statement.prefix == self._prefix, "it is of another model", ProtocolError)
            folder = folder_of(round_of(place.path), statement.base)
            require(place.folder == folder, "it is of another round", ProtocolError)
            if self._admission is not None:
                role = self._admission.verify(statement.key, statement.membership, now=place.modified_at)
                require(role >= Role.WORKER, "its writer is no member that trains", ProtocolError)
        except (PeerError, ValueError):
            return None
        return statement
