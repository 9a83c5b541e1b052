"""The checkpoints of one collaboration: saved while there are trainers, given to peers when there are none.

When no trainer is as far as the newest checkpoint, the backbone publishes a progress record of that step, as a peer
that cannot reduce. Any trainer that is further outvotes it, and late joiners download the state from it.

A checkpoint is made of a snapshot, without torch or a model. Its file equals that of `SwarmOptimizer.save`: a trainer
loads it, or the folder, with ``optimizer.load``. ``history.jsonl`` beside the files lists all checkpoints ever saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from colab_swarm.backbone.config import CollaborationFile
from colab_swarm.backbone.observer import Observer, append_records, read_records
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import Fault
from colab_swarm.tensors.statedict import StepFiles, read_tensors, write_tensors
from colab_swarm.training.progress import Branch, ProgressRecord, progress_key
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import Snapshot, download_state, snapshot_of, tensors_of

logger = logging.getLogger(__name__)

MAX_HISTORY = 200  # Entries in memory and on the page
LOOK_S = 3.0
RETRY_S = 30.0  # After a checkpoint that failed
PUBLISH_S = 15.0
TTL_S, GONE_S = 4 * PUBLISH_S, 0.5


class Checkpoint(msgspec.Struct, frozen=True):
    """A saved checkpoint."""

    step: int  # global step
    loss: float | None  # of the swarm at that step, if a trainer reported one
    at: float  # seconds since the epoch
    size_bytes: int  # of its tensors
    file: str  # name in the folder; deleted when newer ones replace it

    def __str__(self) -> str:
        return f"Step {self.step}" + ("" if self.loss is None else f", loss {self.loss:.3f}")


class Vault(StepFiles):
    """The last checkpoints and the history of all.

    Args:
        path: the folder; made at the first save.
        keep: number of files.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        super().__init__(path, keep=keep)
        self._records = self.path / "history.jsonl"
        self.history: deque[Checkpoint] = deque(read_records(self._records, Checkpoint), MAX_HISTORY)

    def save(self, snapshot: Snapshot, *, loss: float | None, at: float) -> Checkpoint:
        """Write a snapshot, whole or not at all, and delete the files beyond ``keep``.

        Raises:
            StateError: it is not sound, or the disk is full; older checkpoints are untouched.
        """
        step = snapshot.manifest.step
        path = self.file_of(step)
        write_tensors(path, *tensors_of(snapshot))
        self.prune(path)
        saved = Checkpoint(step, loss, at, snapshot.manifest.size_bytes, path.name)
        append_records(self._records, saved)
        self.history.append(saved)
        return saved

    def latest(self) -> Snapshot | None:
        """Return the newest readable checkpoint, or None; skips the others with a warning."""
        for path in self.paths():
            try:
                return snapshot_of(*read_tensors(path))
            except (StateError, OSError) as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None


class Keeper:
    """Keeps the checkpoints of one collaboration until it is stopped.

    Args:
        prefix: of the collaboration.
        name: this peer's, for people.
        settings: when to save.
        observer: what is known of the peers.
        vault: where checkpoints are.
        push: called with each checkpoint, its file, and all checkpoints.
        on_standing_in: called before peers get a checkpoint: the steps after it will be repeated.
    """

    def __init__(
        self,
        services: PeerServices,
        prefix: str,
        *,
        name: str,
        settings: CollaborationFile,
        observer: Observer,
        vault: Vault,
        push: Callable[[Checkpoint, Path, Sequence[Checkpoint]], None] | None,
        on_standing_in: Callable[[], None],
    ) -> None:
        self._services, self._prefix, self._name = services, prefix, name
        self.settings, self.observer, self.vault = settings, observer, vault
        self._push, self._on_standing_in = push, on_standing_in
        self._saved_step, self._saved_at = vault.newest_step, time.time()
        self.stored: Snapshot | None = None  # for late joiners, while nobody trains
        self._published_at = self._failed_at = float("-inf")
        self._saving: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def standing_in(self) -> int | None:
        """Return the step of the checkpoint for late joiners, or None while there are trainers."""
        return None if self.stored is None else self.stored.manifest.step

    def start(self) -> None:
        """Start to watch and save."""
        self._task = asyncio.create_task(self._keep(), name=f"keep {self._prefix}")

    async def stop(self) -> None:
        """Stop, and withdraw the progress record."""
        for task in (self._task, self._saving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.observer.close()
        if self.stored is not None:
            with contextlib.suppress(PeerError):
                await self._publish(self.stored, GONE_S)

    async def _keep(self) -> None:
        while True:
            try:
                await self.look()
            except PeerError as error:
                logger.info("records of %s not read: %s", self._prefix, error)
            except Exception as error:  # the others' run must not end by our fault
                logger.exception("keeping %s failed", self._prefix)
                self._services.events.emit(Fault(_now(), f"keeping {self._prefix}", str(error)))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Read the peers' records; stand in or save a checkpoint if due."""
        await self.observer.refresh()
        branch = self.observer.branch
        await self._stand_in(branch)
        idle = self._saving is None or self._saving.done()
        if branch is not None and idle and self._due(branch.step):
            self._saving = asyncio.create_task(self._save(branch), name=f"checkpoint {branch.step}")

    def _due(self, step: int) -> bool:
        ahead, old_s = step - self._saved_step, time.time() - self._saved_at
        every_steps, every_s = self.settings.every_steps, 60 * self.settings.every_minutes
        enough = (every_steps and ahead >= every_steps) or (every_s and old_s >= every_s)
        return ahead > 0 and bool(enough) and _now() - self._failed_at >= RETRY_S

    async def _save(self, branch: Branch) -> None:
        try:
            snapshot = await self._download(branch)
            loss = self.observer.curve.loss_at(snapshot.manifest.step)
            saved = await asyncio.to_thread(self.vault.save, snapshot, loss=loss, at=time.time())
        except (StateError, PeerError) as error:
            logger.warning("no checkpoint at step %d: %s; next try in %g s", branch.step, error, RETRY_S)
            self._services.events.emit(Fault(_now(), f"checkpoint of step {branch.step}", str(error)))
            self._failed_at = _now()
        else:
            self._saved_step, self._saved_at = saved.step, saved.at
            logger.info("%s: %s saved", self._prefix, saved)
            if self._push is not None:
                self._push(saved, self.vault.path / saved.file, tuple(self.vault.history))

    async def _download(self, branch: Branch) -> Snapshot:
        """Download from a trainer, or from an assistant that may reach trainers which this peer cannot."""
        peers, rng = self._services.peers, self._services.rng
        donors = sorted(branch.peers)
        rng.shuffle(donors)
        try:
            return await download_state(peers, self._prefix, donors)
        except StateError:
            assistants = sorted(peer for peer in self.observer.assistants.records if peer != peers.id)
            if not assistants:
                raise
            rng.shuffle(assistants)
            return await download_state(peers, self._prefix, assistants)

    async def _stand_in(self, branch: Branch | None) -> None:
        newest = self._saved_step
        if newest and (branch is None or branch.step < newest or not self.observer.alive):
            if self.stored is None:
                self._on_standing_in()
                found = self.stored = await asyncio.to_thread(self.vault.latest)
                self._saved_step = 0 if found is None else found.manifest.step  # files may be damaged
                self._published_at = float("-inf")
            if self.stored is not None and _now() - self._published_at >= PUBLISH_S:
                await self._publish(self.stored, TTL_S)
        elif self.stored is not None:
            gone, self.stored = self.stored, None
            await self._publish(gone, GONE_S)

    async def _publish(self, snapshot: Snapshot, ttl_s: float) -> None:
        """Publish a progress record of the snapshot's step."""
        peers = self._services.peers
        record = ProgressRecord(
            step=snapshot.manifest.step,
            lineage=snapshot.manifest.lineage,
            samples=0.0,
            samples_per_s=0.0,
            syncing=False,
            reduces=False,
            name=f"{self._name} (checkpoint)",
            addresses=peers.contact.addresses,
        )
        self._published_at = _now()
        key = progress_key(self._prefix)
        await self._services.dht.store(key, record, subkey=peers.id, ttl_s=ttl_s, signed=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
