"""A bucket without I/O: what the members of a run wrote, and what a peer that has read all of it decides."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.chain import RoundChain
from colab_swarm.mailbox.contributions import StoredContribution, encode
from colab_swarm.mailbox.decide import ClosedRound, Decision, RoundListing, Seen, decide, standing
from colab_swarm.mailbox.objects import (
    LEFT,
    MANIFEST,
    Farewell,
    ManifestEntry,
    PseudoGradient,
    RoundManifest,
    content_digest,
    seal,
)
from colab_swarm.net.identity import Identity
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.tensors.vector import HostVector

ALICE, BOB, CAROL, DAVE = (Identity(bytes([number]) * 32) for number in range(1, 5))
NAMES = {ALICE.id: "alice", BOB.id: "bob", CAROL.id: "carol", DAVE.id: "dave"}
ROOT = bytes(32)
PACE_S = 10.0
PATIENCE_S = 5.0  # half of it


def contribution(
    who: Identity, chain: RoundChain, *, at: float = 0.0, value: float = 1.0, **fields: Any
) -> StoredContribution:
    """Return a member's contribution of four equal values."""
    content = encode(codec_of("float32"), HostVector(np.full(4, value, np.float32)))
    figures = {"weight": 1.0, "samples": 1.0, "samples_per_s": 1.0, "seconds": PACE_S, "name": ""}
    statement = PseudoGradient(
        prefix="model",
        key=who.public_key,
        membership=b"",
        content=content_digest(content),
        round=chain.round,
        base=chain.base,
        **(figures | fields),
    )
    head = statement.signed(who.sign)
    data = seal(head, content)
    place = StoredObject(f"{chain.folder}/{who.id.hex()}", len(data), at)
    return StoredContribution(place, head, memoryview(content), content_digest(data), 2.0 * abs(value))


def manifest_of(chain: RoundChain, *entries: ManifestEntry, author: Identity = ALICE) -> RoundManifest:
    return RoundManifest(
        prefix="model",
        key=author.public_key,
        membership=b"",
        round=chain.round,
        base=chain.base,
        entries=entries,
    )


@dataclass
class Board:
    """What is in the bucket at the time ``now``; all of it was read."""

    now: float = 0.0
    seen: Seen = field(default_factory=Seen)
    places: list[StoredObject] = field(default_factory=list)
    # so that a first round that closes at 0 took a usual time
    first: RoundChain = field(
        default_factory=lambda: RoundChain(0, {0: ROOT}, 0.0, PACE_S, (ALICE.id, BOB.id, CAROL.id))
    )

    def _add(self, place: StoredObject) -> None:
        self.places.append(place)
        self.seen.listing = RoundListing.of(self.places)

    def contribute(self, who: Identity, chain: RoundChain, **fields: Any) -> StoredContribution:
        written = contribution(who, chain, at=self.now, **fields)
        self._add(written.place)
        self.seen.contributions[written.place] = written
        return written

    def leave(self, who: Identity, chain: RoundChain) -> None:
        place = StoredObject(f"{chain.folder}/{who.id.hex()}{LEFT}", 1, self.now)
        self._add(place)
        farewell = Farewell(prefix="model", key=who.public_key, membership=b"", base=chain.base)
        self.seen.farewells[place] = farewell

    def close(self, chain: RoundChain, *entries: ManifestEntry, number: int = 0) -> StoredObject:
        """Write a manifest, and return its place."""
        place = StoredObject(f"{chain.folder}/{MANIFEST}{number:02d}", 1, self.now)
        self._add(place)
        manifest = manifest_of(chain, *sorted(entries, key=lambda entry: entry.member))
        self.seen.manifests[place] = manifest, content_digest(manifest.encode() + bytes([number]))
        return place

    def garbage(self, path: str) -> StoredObject:
        place = StoredObject(path, 1, self.now)
        self._add(place)
        self.seen.faults[place] = "it is cut off"
        return place

    def delete(self, contribution: StoredContribution) -> None:
        self.places.remove(contribution.place)
        del self.seen.contributions[contribution.place]
        self.seen.listing = RoundListing.of(self.places)

    def round(self, chain: RoundChain, *members: Identity, number: int = 0) -> RoundChain:
        """Let these members contribute, close the round, and return the chain after it."""
        entries = [self.contribute(who, chain).entry for who in members]
        place = self.close(chain, *entries, number=number)
        manifest, digest = self.seen.manifests[place]
        return chain.after(manifest, digest, closed_at=self.now)

    def decide(self, chain: RoundChain, who: Identity = ALICE, **options: Any) -> Decision:
        return decide(chain, self.seen, self.now, me=who.id, **({"branch": chain.folders} | options))

    def standing(self, chain: RoundChain) -> ClosedRound | None:
        return standing(chain, self.seen)


def changed(entry: ManifestEntry, **fields: Any) -> ManifestEntry:
    return msgspec.structs.replace(entry, **fields)
