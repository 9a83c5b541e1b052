"""A bucket without I/O: what the members of a run wrote, and how a peer that looks at it decides."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import msgspec

from colab_swarm.mailbox.branches import Branches, ObjectRejected, ObjectsUnread, Readings
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.contributions import ClosedRound, ReadContribution, entries_of
from colab_swarm.mailbox.rounds import (
    LEFT,
    MANIFEST,
    WINDOW,
    Farewell,
    ManifestEntry,
    PseudoGradient,
    RoundChain,
    RoundListing,
    RoundManifest,
    content_digest,
    numbered,
)
from colab_swarm.mailbox.view import Decision, LoadState, RoundView, SeekState
from colab_swarm.net.identity import Identity

T = TypeVar("T")
Entries: TypeAlias = tuple[ManifestEntry, ...]
Content: TypeAlias = ReadContribution | RoundManifest | str | None
ALICE, BOB, CAROL, MALLORY = (Identity(bytes([number]) * 32) for number in range(1, 5))
MEMBERS = [ALICE, BOB, CAROL]
FAREWELL = Farewell(prefix="model", key=ALICE.public_key, membership=b"", base=bytes(32))
PACE_S = 10.0
PATIENCE_S = 5.0  # of a peer with each member beyond the usual
MISSING_S = RoundChain.begin(0, bytes(32), now=0.0).missing_s  # of short rounds


def contribution_of(who: Identity, chain: RoundChain, samples: float = 1.0) -> ReadContribution:
    head = PseudoGradient(
        prefix="model",
        key=who.public_key,
        membership=b"",
        round=chain.round,
        base=chain.base,
        weight=samples,
        samples=samples,
        samples_per_s=1.0,
        seconds=PACE_S,
        name="",
    )
    return ReadContribution(head, memoryview(b""), content_digest(head.encode()), norm=1.0)


def lying(entries: Entries) -> Entries:
    return tuple(msgspec.structs.replace(entry, samples=entry.samples + 1) for entry in entries)


class Board:
    """Objects by their place; a text is the fault of one that does not count. Time is ``now``."""

    def __init__(self) -> None:
        self.places: dict[str, StoredObject] = {}
        self.objects: dict[StoredObject, Content] = {}
        # so that a first round that closes now took a usual time
        self.first = RoundChain.begin(0, bytes(32), now=-PACE_S)
        self.now = 0.0

    def write(self, path: str, content: Content) -> StoredObject:
        """Write an object unless there is one; return its place."""
        place = self.places.setdefault(path, StoredObject(path, 1, self.now))
        self.objects.setdefault(place, content)
        return place

    def contribute(
        self, who: Identity, chain: RoundChain, *, samples: float = 1.0, fault: str = ""
    ) -> ReadContribution:
        contribution = contribution_of(who, chain, samples)
        self.write(f"{chain.folder}/{who.id.hex()}", fault or contribution)
        return contribution

    def take_place(self, who: Identity, chain: RoundChain, attempt: int = 0) -> StoredObject:
        """Write garbage where a member would contribute."""
        return self.write(numbered(f"{chain.folder}/{who.id.hex()}", attempt), "garbage")

    def leave(self, who: Identity, chain: RoundChain, *, fault: str = "") -> None:
        self.write(f"{chain.folder}/{who.id.hex()}{LEFT}", fault or None)

    def close(
        self,
        chain: RoundChain,
        contributions: Sequence[ReadContribution],
        attempt: int = 0,
        *,
        change: Callable[[Entries], Entries] = tuple,
        fault: str = "",
        author: Identity = ALICE,
    ) -> ClosedRound:
        """Write a manifest, and return what it makes of the round."""
        path = f"{chain.folder}/{MANIFEST}{attempt:02d}"
        entries = entries_of(chain, [contribution.offer for contribution in contributions])
        return self.write_manifest(path, chain, change(entries), fault, author)

    def write_manifest(
        self,
        path: str,
        chain: RoundChain,
        entries: tuple[ManifestEntry, ...],
        fault: str = "",
        author: Identity = ALICE,
    ) -> ClosedRound:
        manifest = RoundManifest(
            prefix="model",
            key=author.public_key,
            membership=path.encode(),  # so that no two are equal
            round=chain.round,
            base=chain.base,
            entries=entries,
        )
        place = self.write(path, fault or manifest)
        digest = content_digest(manifest.encode())
        return ClosedRound(chain, place, manifest, chain.after(manifest, digest, closed_at=place.modified_at))

    def open_contributions(
        self, chain: RoundChain, left_out: Collection[Identity] = ()
    ) -> list[ReadContribution]:
        """Return what the next round may list, but of some members."""
        members = {who.id for who in left_out}
        contributions = []
        for place, content in self.objects.items():
            if not isinstance(content, ReadContribution) or place.folder not in chain.folders.values():
                continue
            head = content.head
            if chain.may_count(head.member, head.round) and head.member not in members:
                contributions.append(content)
        return contributions

    def round(self, chain: RoundChain, *members: Identity, attempt: int = 0) -> ClosedRound:
        """Let these members contribute, and close the round."""
        contributions = [self.contribute(who, chain) for who in members]
        return self.close(chain, contributions, attempt)


class Peer:
    """A peer that looks at a board, and knows what it has read of it."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.chain = board.first
        self.last: ClosedRound | None = None
        self.readings = Readings()
        self.read: list[StoredObject] = []

    def look(self) -> Branches:
        first = max(self.chain.round - 1 - WINDOW, 0)
        places = sorted(self.board.objects, key=lambda place: place.path)
        seen = [place for place in places if place.path > f"rounds/{first:08d}"]
        return Branches(RoundListing.of(seen), self.readings)

    def answer(self, question: Callable[[], T]) -> T:
        while True:
            try:
                return question()
            except ObjectsUnread as step:
                for place in step.places:
                    self._read(place)
            except ObjectRejected as step:
                assert step.place not in self.readings.faults
                self.readings.reject(step.place, step.fault, may_stand=step.may_stand)

    def _read(self, place: StoredObject) -> None:
        self.read.append(place)
        content = self.board.objects[place]
        if isinstance(content, str):
            self.readings.reject(place, content)
        elif isinstance(content, RoundManifest):
            self.readings.manifests[place] = content, content_digest(content.encode())
        elif isinstance(content, ReadContribution):
            self.readings.hold(place, content)
        else:
            self.readings.farewells[place] = FAREWELL

    def decide(self, now: float, *, own: StoredObject | None = None, later_state: bool = False) -> Decision:
        view = RoundView(self.chain, self.look(), self.last, own, patience_s=lambda member: PATIENCE_S)
        decision = self.answer(lambda: view.next_action(now))
        if not isinstance(decision, SeekState):
            return decision
        return LoadState() if later_state else self.answer(lambda: view.next_action(now, may_leave=False))

    def follow(self, closed: ClosedRound) -> None:
        self.chain = closed.after
        self.last = closed
        self.readings.forget(closed)

    def catch_up(self) -> list[ClosedRound]:
        """Follow all rounds that are over, as a late joiner does."""
        branches = self.look()
        rounds: list[ClosedRound] = []
        while True:
            chain = self.chain
            closed = self.answer(lambda: branches.closed(chain))  # noqa: B023
            if closed is None:
                return rounds
            rounds.append(replace(closed, contributions={}))
            self.chain = closed.after
            self.last = closed
