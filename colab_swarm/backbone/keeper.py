"""Keeps one collaboration's state: checkpoints while there are trainers, and the newest of them when there are none.

When nobody trains who is as far as the newest checkpoint, the backbone tells a progress record of that step, as a peer
that cannot reduce: it is outvoted by any trainer that is further, and newcomers fetch the state from it.

The checkpoints of one collaboration on the backbone's disk, made of snapshots; no torch, no model.

A file is what `SwarmOptimizer.save` writes: a trainer loads it, or the folder, with ``optimizer.load``. Beside the
files lies ``history.jsonl``, a line for each checkpoint there ever was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from colab_swarm.backbone.config import CollaborationFile
from colab_swarm.backbone.observer import Journal, Observer
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import Fault
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.statedict import StepFiles, read_tensors, write_tensors
from colab_swarm.training.progress import Branch, ProgressRecord, progress_key
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import Snapshot, download_state, snapshot_of, tensors_of

logger = logging.getLogger(__name__)

MAX_HISTORY = 200

"""Entries held and shown."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was saved.

    Attributes:
        step: global step.
        loss: of the swarm at that step, if anybody told.
        at: seconds since the epoch.
        size_bytes: of its tensors.
        file: name in the folder; gone when newer ones took its place.
    """

    step: int
    loss: float | None
    at: float
    size_bytes: int
    file: str

    def __str__(self) -> str:
        return f"Step {self.step}" + ("" if self.loss is None else f", loss {self.loss:.3f}")


class Vault(StepFiles):
    """The last checkpoints and the history of all.

    Args:
        path: the folder; made at the first save.
        keep: how many files to keep.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        super().__init__(path, keep=keep)
        self._journal = Journal(self.path / "history.jsonl", Checkpoint)
        self.history: deque[Checkpoint] = deque(self._journal.read(), MAX_HISTORY)

    def save(self, snapshot: Snapshot, *, loss: float | None, at: float) -> Checkpoint:
        """Write a snapshot, whole or not at all, and delete what is beyond ``keep``.

        Raises:
            StateError: it is not sound, or the disk is full; older checkpoints are untouched.
        """
        step = snapshot.manifest.step
        path = self.file_of(step)
        write_tensors(path, *tensors_of(snapshot))
        self.prune(path)
        saved = Checkpoint(step, loss, at, snapshot.manifest.size_bytes, path.name)
        self._journal.append(saved)
        self.history.append(saved)
        return saved

    def latest(self) -> Snapshot | None:
        """The newest checkpoint that can be read, else None; skips the others with a warning."""
        for path in self.paths():
            try:
                return snapshot_of(*read_tensors(path))
            except (StateError, OSError) as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None


LOOK_S = 3.0

RETRY_S = 30.0

"""After a checkpoint that failed."""

TELL_S = 15.0

TTL_S = 4 * TELL_S

GONE_S = 0.5


class Keeper:
    """Looks after one collaboration until it is stopped.

    Args:
        prefix: of the collaboration.
        name: this peer's, for people.
        settings: when to save.
        observer: what is known of the peers.
        vault: where checkpoints are.
        on_saved: hears of each checkpoint and its file.
        on_standing_in: called before newcomers get a checkpoint: the steps after it are going to be made again.
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
        on_saved: Callable[[Checkpoint, Path], None],
        on_standing_in: Callable[[], None],
    ) -> None:
        self._services = services
        self._prefix = prefix
        self._name = name
        self.settings = settings
        self.observer = observer
        self.vault = vault
        self._on_saved = on_saved
        self._on_standing_in = on_standing_in
        self._saved_step, self._saved_at = vault.newest_step, time.time()
        self._standing_in: Snapshot | None = None
        self._told_at = float("-inf")
        self._failed_at = float("-inf")
        self._saving: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def standing_in(self) -> int | None:
        """The step of the checkpoint that is given to newcomers, while nobody trains."""
        return None if self._standing_in is None else self._standing_in.manifest.step

    async def stored(self) -> Snapshot | None:
        """The checkpoint for newcomers, while nobody trains."""
        return self._standing_in

    def start(self) -> None:
        """Begin to look after it."""
        self._task = asyncio.create_task(self._keep(), name=f"keep {self._prefix}")

    async def stop(self) -> None:
        """Look after it no more, and say so."""
        for task in (self._task, self._saving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.observer.close()
        if self._standing_in is not None:
            with contextlib.suppress(PeerError):
                await self._tell(self._standing_in, GONE_S)

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
        """Read what peers tell, and do what is due."""
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
            logger.warning("no checkpoint at step %d: %s; tried again in %g s", branch.step, error, RETRY_S)
            self._services.events.emit(Fault(_now(), f"checkpoint of step {branch.step}", str(error)))
            self._failed_at = _now()
        else:
            self._saved_step, self._saved_at = saved.step, saved.at
            self._on_saved(saved, self.vault.path / saved.file)

    async def _download(self, branch: Branch) -> Snapshot:
        donors = sorted(branch.peers)
        self._services.rng.shuffle(donors)
        try:
            return await download_state(self._services.peers, self._prefix, donors)
        except StateError:
            others = self._others(self._services.rng)
            if not others:
                raise
            return await download_state(self._services.peers, self._prefix, others)

    def _others(self, rng: random.Random) -> list[PeerId]:
        """Assistants that may reach trainers which this peer cannot."""
        me = self._services.peers.id
        others = sorted(peer for peer in self.observer.assistants.records if peer != me)
        rng.shuffle(others)
        return others

    # --- when nobody trains -------------------------------------------------------------------------------------

    async def _stand_in(self, branch: Branch | None) -> None:
        newest = self._saved_step
        if newest and (branch is None or branch.step < newest or not self.observer.alive):
            if self._standing_in is None:
                self._on_standing_in()
                found = self._standing_in = await asyncio.to_thread(self.vault.latest)
                self._saved_step = 0 if found is None else found.manifest.step  # files may be damaged
                self._told_at = float("-inf")
            if self._standing_in is not None and _now() - self._told_at >= TELL_S:
                await self._tell(self._standing_in, TTL_S)
        elif self._standing_in is not None:
            gone, self._standing_in = self._standing_in, None
            await self._tell(gone, GONE_S)

    async def _tell(self, snapshot: Snapshot, ttl_s: float) -> None:
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
        self._told_at = _now()
        key = progress_key(self._prefix)
        await self._services.dht.store(key, record, subkey=peers.id, ttl_s=ttl_s, signed=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
