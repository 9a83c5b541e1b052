"""An expert's saves among the peers: here and at ``copies`` others, named by a signed record in the DHT.

Saving. The chunks go to disk and to the holders, those first that held the expert before; a holder that fails is
replaced by the next. Then the record is told; when enough holders have the save, all are told that they may drop the
one before, until when the record names both. So after the loss of the host and all holders but one nothing is missing
but the steps since the last save.

Finding. Whoever may write in the DHT may claim a save of any step, so a claim is worth what it leads to: claims are
tried from the highest step down, chunks count only if they match their hashes, and a save that cannot be had whole, or
that does not fit the expert, is passed over for the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from colab_swarm.dht.service import is_sound
from colab_swarm.errors import CallRefused, PeerError, StateError
from colab_swarm.moe.calls import ExpertServices
from colab_swarm.moe.grid import Grid, Index
from colab_swarm.moe.holders import (
    FETCHED_AT_ONCE,
    HolderRecord,
    ReplicaService,
    SaveKept,
    SettleSave,
    fetch_pieces,
    give_save,
)
from colab_swarm.moe.saves import DIGEST_BYTES, MAX_STEP, SAVES_OF_ONE, SavedExpert, SaveManifest, cut_digests
from colab_swarm.net.peers import Contact, Message, PeerId, short

logger = logging.getLogger(__name__)
MAX_HOLDERS = 8
RENEWALS = 24
"""A save that is unchanged is renewed so many times in its life."""
PATIENCE_S = 60.0
"""A holder that could not be reached is not asked again for so long."""
PROBE_S = 10.0
"""A holder that does not answer within it gives nothing back."""


class SavePlace(Message, frozen=True):
    """A save and where it is.

    Attributes:
        step: updates in its weights.
        manifest: digest of the chunk to begin with.
        holders: who has it.
    """

    step: int
    manifest: bytes
    holders: tuple[Contact, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.step < MAX_STEP or len(self.manifest) != DIGEST_BYTES:
            raise ValueError("record of a save out of range")
        if len(self.holders) > MAX_HOLDERS + 1 or not all(map(is_sound, self.holders)):
            raise ValueError("record of a save with too many holders, or holders that cannot be")


class SaveRecord(Message, frozen=True):
    """An expert's newest save and, until enough peers have that, the one before; signed, under its owner's subkey."""

    saves: tuple[SavePlace, ...]

    def __post_init__(self) -> None:
        if len(self.saves) > SAVES_OF_ONE:
            raise ValueError("record of too many saves")


class SavedIndices(Message, frozen=True):
    """Which experts of a grid a peer has saved; signed, under its own subkey."""

    indices: tuple[Index, ...]


@dataclass(frozen=True)
class Claim:
    """Somebody's word that there is a save of an expert: whose, of which step, and who holds it."""

    owner: PeerId
    step: int
    manifest: bytes
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class Kept:
    """What became of a save.

    Attributes:
        step: updates in its weights.
        holders: other peers that have it.
        sent_bytes: that the holders lacked.
        at: swarm time, seconds.
        fault: why it is not on this peer's disk, or not told; None if all is well.
    """

    step: int
    holders: frozenset[PeerId]
    sent_bytes: int
    at: float
    fault: str | None = None


class Copies:
    """Saves this peer's experts and finds saves of any."""

    def __init__(self, services: ExpertServices, holders: ReplicaService, *, copies: int) -> None:
        """``copies``: at so many other peers, if there are as many; at most `MAX_HOLDERS`."""
        self.kept: dict[str, Kept] = {}
        self._safe: dict[str, SavePlace] = {}  # the last save that was
        self._failed_at: dict[PeerId, float] = {}  # swarm time
        self._services, self._peers = services, services.peers
        self._holders, self._shelf = holders, holders.shelf
        self._copies = copies

    @property
    def _timeout_s(self) -> float:
        return self._holders.settings.timeout_s

    def due(self, uid: str, step: int, others: Mapping[PeerId, HolderRecord]) -> bool:
        """Whether a save would add anything: steps, copies or life."""
        last = self.kept.get(uid)
        if last is None or last.step != step or last.fault:
            return True
        lacking = len(last.holders) < min(self._copies, len(others))
        age_s = self._peers.time() - last.at
        return (
            lacking or not last.holders <= others.keys() or age_s > self._holders.settings.kept_s / RENEWALS
        )

    async def save(self, saved: SavedExpert, others: Mapping[PeerId, HolderRecord]) -> Kept:
        """Keep a save here and at holders among ``others``, and tell the DHT; a fault is part of the result."""
        uid = saved.manifest.uid
        fault = await self.write(saved)
        holders, sent_bytes = await self._spread(saved, others)
        kept = Kept(saved.manifest.step, frozenset(holders), sent_bytes, self._peers.time(), fault)
        place, former = self._place(saved, kept), self._safe.get(uid)
        before = sum(holder.id != self._peers.id for holder in former.holders) if former else 0
        safe = len(holders) >= min(self._copies, max(len(others), before))  # those of before may be back soon
        saves = (place,) if safe or former is None or former.manifest == place.manifest else (place, former)
        if not (place.holders and await self._store(self._key(uid), SaveRecord(saves))):
            return replace(kept, fault=fault or f"no peer took the record of the save of {uid}")
        self.kept[uid] = kept
        if safe or (holders and former is None):
            self._safe[uid] = place
        if safe:
            await self._settle(uid, place)
        return kept

    def adopt(self, uid: str, claim: Claim) -> None:
        """Go on from a save that this peer made before: it is told of until a newer one is safe."""
        contacts = tuple(map(self._peers.contact_of, claim.holders))
        self._safe[uid] = SavePlace(claim.step, claim.manifest, contacts)

    async def write(self, saved: SavedExpert) -> str | None:
        """Keep it on this disk; returns what went wrong."""
        save = saved.save_of(self._peers.id, at=self._peers.time())
        try:
            with self._shelf.receiving(save):
                await asyncio.to_thread(lambda: [*map(self._shelf.chunks.put, saved.pieces.values())])
                self._shelf.add(save)
        except StateError as error:
            logger.warning("%s at step %d is not on disk: %s", save.uid, save.step, error)
            return str(error)
        return None

    async def _spread(
        self, saved: SavedExpert, others: Mapping[PeerId, HolderRecord]
    ) -> tuple[list[PeerId], int]:
        """Give it to holders until enough have it; who they are, and what they lacked."""
        holders: list[PeerId] = []
        total_bytes = 0
        for holder in self._candidates(saved, others):
            if len(holders) == self._copies:
                break
            try:
                total_bytes += await give_save(self._peers, holder, saved, timeout_s=self._timeout_s)
                holders.append(holder)
            except PeerError as error:
                logger.info("%s does not keep %s: %s", short(holder), saved.manifest.uid, error)
                if not isinstance(error, CallRefused):  # the other experts need not wait for it too
                    self._failed_at[holder] = self._peers.time()
        return holders, total_bytes

    def _candidates(self, saved: SavedExpert, others: Mapping[PeerId, HolderRecord]) -> list[PeerId]:
        """Who holds it already, then the others, in an order of the expert's own: so all are burdened alike."""
        last = self.kept.get(saved.manifest.uid)
        known = last.holders if last else frozenset()
        uid, size_bytes = saved.manifest.uid.encode(), saved.manifest.size_bytes
        since = self._peers.time() - PATIENCE_S
        able = (
            peer
            for peer, record in others.items()
            if (peer in known or record.room_bytes >= size_bytes)
            and self._failed_at.get(peer, since) <= since
        )
        return sorted(able, key=lambda peer: (peer not in known, blake3(uid + peer).digest()))

    def _place(self, saved: SavedExpert, kept: Kept) -> SavePlace:
        here = [] if kept.fault else [self._peers.contact]
        manifest, *_ = saved.pieces
        return SavePlace(kept.step, manifest, (*here, *map(self._peers.contact_of, sorted(kept.holders))))

    async def _settle(self, uid: str, place: SavePlace) -> None:
        """It is safe: let everybody drop the one before."""
        self._shelf.settle(self._peers.id, uid, place.manifest)
        message = SettleSave(uid, place.manifest)
        calls = (
            self._peers.call(holder.id, message, SaveKept, timeout_s=self._timeout_s)
            for holder in place.holders
            if holder.id != self._peers.id
        )
        await asyncio.gather(*calls, return_exceptions=True)

    # -- which experts there are saves of

    async def tell_saved(self, grid: Grid, uids: Iterable[str]) -> None:
        """Tell the run of which experts of a grid this peer has saves, so that somebody takes them over."""
        await self._store(self._grid_key(grid), SavedIndices(tuple(sorted(map(grid.index, uids)))))

    async def saved(self, grid: Grid) -> set[str]:
        """The experts of a grid that somebody has saves of."""
        uids: set[str] = set()
        for entry in (await self._services.dht.get(self._grid_key(grid))).values():
            try:
                told = msgspec.convert(entry.value, SavedIndices).indices
                uids |= {uid for index in told if grid.index(uid := grid.uid(index)) == index}
            except (msgspec.ValidationError, ValueError) as error:
                logger.info("a record of saved experts was ignored: %s", error)
        return uids

    async def claims(self, uid: str) -> list[Claim]:
        """All saves of an expert that the DHT or this disk know of; the highest step first."""
        claims: dict[bytes, Claim] = {}
        for save in self._shelf.saves(uid):
            claims[save.manifest] = Claim(PeerId(save.owner), save.step, save.manifest, ())
        for subkey, entry in (await self._services.dht.get(self._key(uid))).items():
            try:
                places = msgspec.convert(entry.value, SaveRecord, strict=False).saves
            except (msgspec.ValidationError, ValueError) as error:
                logger.info("record of a save of %s ignored: %s", uid, error)
                continue
            for place in places:
                for contact in place.holders:
                    self._peers.learn(contact)
                holders = tuple(contact.id for contact in place.holders if contact.id != self._peers.id)
                claims[place.manifest] = Claim(PeerId(subkey), place.step, place.manifest, holders)
        return sorted(claims.values(), key=lambda claim: claim.step, reverse=True)

    # -- getting a save back

    async def fetch(self, uid: str, claim: Claim, *, limit_bytes: int) -> SavedExpert:
        """A save, from this disk and from its holders, several at once; every chunk matches its hash.

        Raises:
            StateError: it is not what the claim says, larger than ``limit_bytes``, or cannot be had whole.
        """
        head, holders = await self._probe(uid, claim)
        manifest = SaveManifest.decode(head)
        if (manifest.uid, manifest.step) != (uid, claim.step) or manifest.size_bytes > limit_bytes:
            raise StateError(f"a save of {uid} is of another expert or step, or larger than the expert")
        fetch = _Fetch(manifest)
        await asyncio.to_thread(fetch.take, fetch.next_batch(len(fetch.queue)), self._shelf.chunks.get)
        while fetch.queue and holders:  # what a lost holder owed goes to those that are left
            alive = await asyncio.gather(*(self._work(fetch, holder) for holder in holders))
            holders = [holder for holder, kept in zip(holders, alive, strict=True) if kept]
        if fetch.queue:
            raise StateError(f"{len(fetch.queue)} chunks of {uid} at step {claim.step} cannot be had")
        return SavedExpert(manifest, fetch.blob)

    async def _probe(self, uid: str, claim: Claim) -> tuple[bytes, list[PeerId]]:
        """The manifest's chunk, and who else has it: all are asked at once, for the dead do not answer."""
        here = await asyncio.to_thread(self._shelf.chunks.get, claim.manifest)
        asked = (
            fetch_pieces(self._peers, holder, [claim.manifest], timeout_s=PROBE_S) for holder in claim.holders
        )
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = {
            holder: answer[claim.manifest]
            for holder, answer in zip(claim.holders, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        for head in (here, *found.values()):
            if head is not None:
                return head, [*found]
        raise StateError(f"none of {len(claim.holders)} holders has {uid} at step {claim.step}")

    async def _work(self, fetch: _Fetch, holder: PeerId) -> bool:
        """Fetch until nothing is left; False if the holder failed: what it did not give is back in the queue."""
        while batch := fetch.next_batch(FETCHED_AT_ONCE):
            try:
                found = await fetch_pieces(self._peers, holder, batch, timeout_s=self._timeout_s)
            except PeerError as error:
                logger.info("%s", error)
                found = {}
            fetch.take(batch, found.get)
            if len(found) < len(batch):
                return False
        return True

    async def _store(self, key: str, record: Message) -> bool:
        """Whether anybody took it."""
        dht, kept_s = self._services.dht, self._holders.settings.kept_s
        return await dht.store(key, record, subkey=self._peers.id, ttl_s=kept_s, signed=True) > 0

    def _key(self, uid: str) -> str:
        return f"{self._services.run_id}/experts/{uid}/save"

    def _grid_key(self, grid: Grid) -> str:
        return f"{self._services.run_id}/experts/{grid.prefix}/saves"


class _Fetch:
    """Chunks still to come; ``queue`` are those that nobody is asked for."""

    def __init__(self, manifest: SaveManifest) -> None:
        self.blob: NDArray[np.uint8] = np.zeros(manifest.size_bytes, np.uint8)
        self._spans: dict[bytes, list[slice]] = {}
        for chunk, digest in enumerate(cut_digests(manifest.digests)):
            self._spans.setdefault(digest, []).append(manifest.span(chunk))
        self.queue = list(self._spans)

    def next_batch(self, count: int) -> list[bytes]:
        """The next chunks to look for in one place."""
        batch, self.queue = self.queue[:count], self.queue[count:]
        return batch

    def take(self, batch: Sequence[bytes], get: Callable[[bytes], bytes | None]) -> None:
        """Put in those that ``get`` has, which match their hashes; the rest goes back to the queue.

        Raises:
            StateError: a chunk is not as long as it has to be, so the manifest is wrong.
        """
        for digest in batch:
            piece = get(digest)
            if piece is None:
                self.queue.append(digest)
                continue
            for span in self._spans[digest]:
                if len(piece) != span.stop - span.start:
                    raise StateError("a saved expert's manifest is wrong about the length of a chunk")
                self.blob[span] = np.frombuffer(piece, np.uint8)
