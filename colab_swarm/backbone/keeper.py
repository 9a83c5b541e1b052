"""The losses and checkpoints that a backbone keeps for one collaboration, also while nobody trains.

When no trainer has reached the step of the newest checkpoint, the backbone stands in: it publishes a progress record
of that step, as a peer that cannot reduce. Late joiners then download the state from the backbone. A trainer that is
further takes precedence over the backbone. A checkpoint is made from a snapshot, without torch or a model. Its file
has the format of `SwarmOptimizer.save`: a trainer loads the file, or the folder, with ``optimizer.load``.

The record of a trainer reports the mean loss of its samples since the last global step. For each step, the
curve has the median over the trainers, so a lying minority cannot move it outside the losses of honest trainers.
"""

import asyncio
import contextlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from colab_swarm.backbone.config import CollaborationFile, Forward
from colab_swarm.errors import PeerError, StateError, require
from colab_swarm.events import Fault
from colab_swarm.files import StepFiles
from colab_swarm.net.peers import PeerId, end_tasks
from colab_swarm.runtime import BackgroundTasks, loop_now
from colab_swarm.snapshot import Checkpoint, KeptModel
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import write_state
from colab_swarm.training.records import ProgressRecord, progress_key
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import check_snapshot, download_state, read_snapshot
from colab_swarm.training.view import WATCHING, Branch, SwarmView

logger = logging.getLogger(__name__)
LOOK_S = 3.0
RETRY_S = 30.0  # pause after a checkpoint that failed
PUBLISH_S = 15.0
TTL_S = 4 * PUBLISH_S
GONE_S = 0.5
SILENCE_S = 6.0  # after this silence, trainers that are not linked to this peer are treated as gone
MAX_POINTS = 2000  # with more points, every other one is left out, except in the newest quarter
MAX_LOSS = 1e9
FORWARD_S = 5.0
RESUMED_BY = {"wandb": "id", "trackio": "name"}  # the argument of ``init`` that finds a run again
HUB_FILE = "state.safetensors"
CARD = """---
tags:
- colab_swarm
- collaborative-training
---
# {repo}

Trained together by the peers of a run with colab_swarm. `{file}` holds parameters, optimizer and schedule of
**{title}**. To continue from it, build the same model and optimizer and load it:

```python
from huggingface_hub import hf_hub_download
optimizer.load(hf_hub_download("{repo}", "{file}"))
```
"""


class LossPoint(msgspec.Struct, frozen=True):
    """The loss at a global step."""

    step: int  # updates of the parameters that it was measured with
    at: float  # seconds since the epoch
    loss: float  # median over the peers
    peers: int  # how many reported a loss


class LossCurve:
    """The loss of a run, oldest point first, with a bounded number of points. Has no I/O."""

    def __init__(self, points: Iterable[LossPoint] = ()) -> None:
        self.points: list[LossPoint] = []
        self._reported: dict[int, dict[PeerId, float]] = {}  # step -> peer -> loss
        for point in points:
            self._add(point)

    def on_records(
        self, records: Mapping[PeerId, ProgressRecord], branch: Branch | None, *, at: float
    ) -> list[LossPoint]:
        """Add the trainers' records, read at ``at`` (seconds since 1970); return the points of the ended steps."""
        if branch is None:
            return []
        if self.points and branch.step < self.points[-1].step:  # the run went back to a checkpoint
            self._reported.clear()
            self.points = [point for point in self.points if point.step < branch.step]
        for peer, record in records.items():
            self._report(peer, record, branch.step)
        points = []
        for step in sorted(step for step in self._reported if step < branch.step):
            losses = self._reported.pop(step).values()
            points.append(LossPoint(step, at, median(losses), len(losses)))
            self._add(points[-1])
        return points

    def _report(self, peer: PeerId, record: ProgressRecord, now: int) -> None:
        """Add the loss of a record, if it is of the swarm's step ``now`` or the step before."""
        if record.loss is None or record.syncing:
            return
        step = record.step
        if not record.samples:
            step -= 1  # the loss belongs to the batch that has just ended
        first = max(0, now - 1)
        if self.points:
            first = max(first, self.points[-1].step + 1)
        # this is False for NaN, too
        if first <= step <= now and abs(record.loss) < MAX_LOSS:
            self._reported.setdefault(step, {})[peer] = record.loss

    def loss_at(self, step: int) -> float | None:
        """Return the loss at a step, or the last loss before it; None if there is none."""
        return next((point.loss for point in reversed(self.points) if point.step <= step), None)

    def _add(self, point: LossPoint) -> None:
        while self.points and self.points[-1].step >= point.step:
            self.points.pop()
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            old = len(self.points) * 3 // 4
            self.points = self.points[:old:2] + self.points[old:]


class Forwarder:
    """Logs points to a tracker, whose package must be installed. Points are lost while the tracker cannot be reached.

    The first connection to the tracker may take long, so the forwarder has its own thread.
    """

    def __init__(self, settings: Forward, prefix: str) -> None:
        require(importlib.util.find_spec(settings.to), f"to forward losses: pip install {settings.to}")
        self._settings = settings
        self._run_id = prefix.replace("/", "-")
        self._waiting = queue.SimpleQueue[LossPoint | None]()
        self._thread = threading.Thread(target=self._run, name="colab-swarm-forward", daemon=True)
        self._thread.start()

    def forward(self, points: Sequence[LossPoint]) -> None:
        for point in points:
            self._waiting.put(point)

    def close(self) -> None:
        """Log the waiting points and finish, within `FORWARD_S`."""
        self._waiting.put(None)
        self._thread.join(FORWARD_S)

    def _run(self) -> None:
        tracker: Any = None
        while (point := self._waiting.get()) is not None:
            try:
                if tracker is None:
                    module = importlib.import_module(self._settings.to)
                    run = {RESUMED_BY[self._settings.to]: self._run_id}
                    module.init(project=self._settings.project, resume="allow", **run)
                    tracker = module
                tracker.log({"loss": point.loss, "trainers": float(point.peers)}, step=point.step)
            except Exception as error:  # a tracker may raise errors of any class
                logger.warning("step %d not forwarded to %s: %s", point.step, self._settings.to, error)
        if tracker is not None:
            tracker.finish()


def read_losses(path: Path) -> Iterator[LossPoint]:
    """Yield the readable records of a ``losses.jsonl``, oldest first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=LossPoint)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the line is empty or cut off


class Vault(StepFiles):
    """The last ``keep`` checkpoints in a folder; the first save makes the folder."""

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        super().__init__(path, keep=keep)
        self.checkpoints = self._on_disk()

    def _on_disk(self) -> tuple[Checkpoint, ...]:
        checkpoints: list[Checkpoint] = []
        for path in self.paths():
            with contextlib.suppress(OSError):  # the file was deleted in the meantime
                file = path.stat()
                step = int(path.stem.partition("-")[2])
                checkpoints.append(Checkpoint(step, file.st_mtime, file.st_size))
        return tuple(sorted(checkpoints, key=lambda checkpoint: (checkpoint.at, checkpoint.step)))

    def save(self, snapshot: Snapshot) -> Path:
        """Write a whole snapshot, or nothing. Raises StateError if it is damaged, or the disk is full."""
        check_snapshot(snapshot)
        path = self.file_of(snapshot.manifest.step)
        write_state(path, [snapshot.blob.data])
        self.prune(path)
        self.checkpoints = self._on_disk()
        return path

    def latest(self) -> Snapshot | None:
        """Return the newest readable checkpoint, or None; log a warning for each unreadable one."""
        return self.newest(read_snapshot)


class HubPush:
    """Pushes the newest checkpoint of a collaboration to the Hub, on a thread. Its errors never end the run.

    `newest` is a path and a title. When it changes, the file is pushed, but at most once in ``push_every_minutes``,
    also after a failure. ``token`` must allow writing; None uses the login of this machine. ``endpoint`` None is the
    usual Hub. ``state`` describes the last push in words. Raises ValueError if huggingface_hub is not installed.
    """

    def __init__(
        self, settings: CollaborationFile, *, token: str | None = None, endpoint: str | None = None
    ) -> None:
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError as error:
            raise ValueError(f"to push to {settings.repo}: pip install huggingface_hub") from error
        disable_progress_bars()
        self._api = HfApi(endpoint=endpoint, token=token)
        self._settings = settings
        self.newest: tuple[Path, str] | None = None
        self._closed = threading.Event()
        self.state = f"{settings.repo}: nothing pushed yet"
        self.failures = 0
        threading.Thread(target=self._run, name="colab-swarm-hub", daemon=True).start()

    def close(self) -> None:
        """Stop pushing; a running push is not finished."""
        self._closed.set()

    def _run(self) -> None:
        every_s = 60 * self._settings.push_every_minutes
        pushed = None
        while not self._closed.wait(min(1.0, every_s)):
            newest = self.newest
            if newest is None or newest is pushed:
                continue
            path, title = newest
            try:
                self._push(path, title)
                pushed = newest
                self.state = f"{self._settings.repo}: {title} pushed"
            except Exception as error:  # the Hub and the network raise many kinds of errors; all are retried
                self.failures += 1
                again = f"again in {self._settings.push_every_minutes:g} min"
                self.state = f"{self._settings.repo}: {title} not pushed ({type(error).__name__}), {again}"
                logger.warning("%s not pushed to %s, %s: %s", title, self._settings.repo, again, error)
            self._closed.wait(every_s)

    def _push(self, path: Path, title: str) -> None:
        from huggingface_hub import CommitOperationAdd

        # a hard link, because the checkpoint may be deleted during the push
        repo = self._settings.repo
        link = path.with_name("pushing")
        link.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            link.hardlink_to(path)
        self._api.create_repo(repo, private=self._settings.private, exist_ok=True)
        card = CARD.format(repo=repo, file=HUB_FILE, title=title).encode()
        # not an open file, because Xet uploads only paths
        if link.exists():
            state = link
        else:
            state = path
        added = [CommitOperationAdd(HUB_FILE, state), CommitOperationAdd("README.md", card)]
        self._api.create_commit(repo, added, commit_message=title)
        link.unlink(missing_ok=True)


class Keeper:
    """Keeps the checkpoints of one collaboration until it is stopped; all files are in ``folder``.

    ``on_standing_in`` is called before this peer offers a checkpoint to late joiners, because the steps after that
    checkpoint will be repeated.
    """

    def __init__(
        self,
        services: PeerServices,
        prefix: str,
        *,
        name: str,
        settings: CollaborationFile,
        folder: Path,
        hub: HubPush | None,
        on_standing_in: Callable[[str], object],
        forward: Forward | None = None,
    ) -> None:
        self._services = services
        self._prefix = prefix
        self._name = name
        self.settings = settings
        self._hub = hub
        self._on_standing_in = on_standing_in
        self._forwarder = None
        if forward is not None:
            self._forwarder = Forwarder(forward, prefix)
        self._losses = folder / "losses.jsonl"
        self.curve = LossCurve(read_losses(self._losses))  # continues after a restart
        self.view = SwarmView(services.peers.id, WATCHING, prefix)
        self.branch: Branch | None = None  # the branch that the swarm trains; None while nobody trains
        self._heard_at = float("-inf")
        self._stop_listening = services.peers.on_lost(self._on_lost)
        self.vault = Vault(folder, keep=settings.keep)
        self._saved_step = self.vault.newest_step
        self._saved_at = time.time()
        self.stored: Snapshot | None = None  # the checkpoint for late joiners, while there are no trainers
        self._published_at = float("-inf")
        self._failed_at = float("-inf")
        self._tasks = BackgroundTasks(f"keeping {prefix}", services.events, services.rng)
        self._saving: asyncio.Task[None] | None = None

    @property
    def standing_in(self) -> int | None:
        """The step of the checkpoint for late joiners, or None while there are trainers."""
        return None if self.stored is None else self.stored.manifest.step

    def kept(self) -> KeptModel:
        if self._hub is None:
            return KeptModel(self.vault.checkpoints, self.standing_in)
        return KeptModel(self.vault.checkpoints, self.standing_in, self._hub.state, self._hub.failures)

    def start(self) -> None:
        self._tasks.every(LOOK_S, self.look)

    async def stop(self) -> None:
        await end_tasks(*self._tasks.cancel())
        self._stop_listening()
        if self._forwarder is not None:
            await asyncio.to_thread(self._forwarder.close)  # it waits for the tracker
        if self._hub is not None:
            self._hub.close()
        if self.stored is not None:
            with contextlib.suppress(PeerError):
                await self._publish(self.stored, GONE_S)

    async def look(self) -> None:
        """Read the peers' records and collect losses; if due, stand in for absent trainers, or save a checkpoint."""
        services = self._services
        await self.view.refresh(services.dht, services.peers)
        branch = self.view.branch()
        now_on = branch if branch.peers else None
        linked = now_on is not None and now_on.peers & services.peers.linked()
        if linked or now_on != self.branch:
            self._heard_at = loop_now()
        self.branch = now_on
        points = self.curve.on_records(self.view.others, self.branch, at=time.time())
        if points:
            self._append(points)
        await self._stand_in()
        is_saving = self._saving is not None and not self._saving.done()
        if self.branch is not None and not is_saving and self._due(self.branch.step):
            self._saving = self._tasks.spawn(self._save(self.branch))

    def _append(self, points: Sequence[LossPoint]) -> None:
        """Append to the file, beginning with a newline, because the last record may be cut off."""
        if self._forwarder is not None:
            self._forwarder.forward(points)
        try:
            self._losses.parent.mkdir(parents=True, exist_ok=True)
            with self._losses.open("ab") as file:
                file.write(b"".join(b"\n" + msgspec.json.encode(point) for point in points))
        except OSError as error:
            logger.warning("%s could not be written: %s", self._losses, error)

    def _on_lost(self, peer: PeerId) -> None:
        self.view.on_lost(peer, swarm_now=self._services.peers.time())

    def _due(self, step: int) -> bool:
        ahead = step - self._saved_step
        old_s = time.time() - self._saved_at
        every_steps = self.settings.every_steps
        every_s = 60 * self.settings.every_minutes
        if ahead <= 0 or loop_now() - self._failed_at < RETRY_S:
            return False
        return 0 < every_steps <= ahead or 0 < every_s <= old_s

    async def _save(self, branch: Branch) -> None:
        peers = self._services.peers
        rng = self._services.rng
        donors = sorted(branch.peers)
        others = sorted(self.view.assistants.keys() - {peers.id})
        rng.shuffle(donors)
        rng.shuffle(others)
        try:
            try:
                snapshot = await download_state(peers, self._prefix, donors)
            except StateError:  # assistants may reach trainers that this peer cannot reach
                snapshot = await download_state(peers, self._prefix, others or donors)
            path = await asyncio.to_thread(self.vault.save, snapshot)
        except (StateError, PeerError) as error:
            logger.warning("no checkpoint at step %d: %s; next try in %g s", branch.step, error, RETRY_S)
            self._services.events.emit(Fault(loop_now(), f"checkpoint of step {branch.step}", str(error)))
            self._failed_at = loop_now()
            return
        step = snapshot.manifest.step
        self._saved_step = step
        self._saved_at = time.time()
        title = f"Step {step}"
        loss = self.curve.loss_at(step)
        if loss is not None:
            title += f", loss {loss:.3f}"
        logger.info("%s: %s saved", self._prefix, title)
        if self._hub is not None:
            self._hub.newest = path, title

    async def _stand_in(self) -> None:
        # records exist for some time after their peers have left
        silent = loop_now() - self._heard_at >= SILENCE_S
        newest = self._saved_step
        is_ahead = silent or self.branch is None or self.branch.step < newest
        if newest and is_ahead:
            if self.stored is None:
                self._on_standing_in(self._prefix)
                self.stored = await asyncio.to_thread(self.vault.latest)
                # None if all files are damaged
                self._saved_step = self.standing_in or 0
                self._published_at = float("-inf")
            if self.stored is not None and loop_now() - self._published_at >= PUBLISH_S:
                await self._publish(self.stored, TTL_S)
        elif self.stored is not None:
            stored = self.stored
            self.stored = None
            await self._publish(stored, GONE_S)

    async def _publish(self, snapshot: Snapshot, ttl_s: float) -> None:
        record = ProgressRecord(
            step=snapshot.manifest.step,
            lineage=snapshot.manifest.subject,
            samples=0.0,
            samples_per_s=0.0,
            syncing=False,
            name=f"{self._name} (checkpoint)",
            addresses=self._services.peers.contact.addresses,
        )
        self._published_at = loop_now()
        await self._services.dht.publish(progress_key(self._prefix), record, ttl_s=ttl_s)
