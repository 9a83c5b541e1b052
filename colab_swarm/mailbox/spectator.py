"""The peers that train a model in a bucket, for a peer that only watches."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from colab_swarm.errors import JoinError
from colab_swarm.mailbox.bucket import Bucket, StoredObject
from colab_swarm.mailbox.decide import RoundListing
from colab_swarm.mailbox.journal import Statements
from colab_swarm.mailbox.objects import Farewell, H, PseudoGradient, RoundManifest
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.snapshot import PeerRow


async def last_members(bucket: Bucket, prefix: str, admission: MembershipAdmission | None) -> list[PeerRow]:
    """Return the members of the newest closed round; raise `JoinError` if no round is closed.

    This function reads only the statements of objects, not their values, and writes nothing. ``admission`` checks who
    belongs to the run; it is None in an open run.
    """

    def role_of(key: bytes, membership: bytes, at: float) -> Role:
        if admission is None:
            return Role.WORKER
        return admission.verify(key, membership, now=at)

    statements = Statements(bucket, prefix, role_of)

    async def first_of(places: Iterable[StoredObject], kind: type[H]) -> tuple[StoredObject, H] | None:
        """Return the first object with a member's statement of this kind, and the statement."""
        for place in places:
            statement = await statements.head(place, kind)
            if statement is not None:
                return place, statement
        return None

    async def row_of(member: PeerId, step: int) -> PeerRow:
        row = PeerRow(short(member), short(member), "trainer", step, 0.0, 0.0, reachable=None, me=False)
        # the newest contribution may belong to the round that is still open
        every = itertools.chain(*listing.contributions.values())
        contributions = [place for place in every if place.member == member]
        newest = await first_of(reversed(contributions), PseudoGradient)
        folder = ""
        if newest is not None:
            place, head = newest
            folder = place.folder
            loss = head.loss
            # JSON has only finite numbers
            if loss is not None and not math.isfinite(loss):
                loss = None
            heard_s = max(0.0, bucket.now() - place.modified_at)
            row = replace(
                row, name=head.name, compute_samples_per_s=head.samples_per_s, loss=loss, heard_s=heard_s
            )
        farewells = [place for place in listing.farewells.values() if place.member == member]
        left = await first_of(reversed(farewells), Farewell)
        if left is not None and left[0].folder >= folder:
            row = replace(row, role="away")
        return row

    listing = RoundListing.of(await bucket.list("rounds"))
    for folder in sorted(listing.manifests, reverse=True):
        newest = await first_of(listing.manifests[folder], RoundManifest)
        if newest is not None:
            _, manifest = newest
            return [await row_of(entry.member, manifest.round + 1) for entry in manifest.entries]
    raise JoinError(f"no round is over yet in {bucket.address}: nobody has trained this model there")
