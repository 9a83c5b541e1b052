"""Pushes of checkpoints to the Hugging Face Hub and of losses to a tracker.

Each has its own thread; whatever goes wrong there, the run continues.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from colab_swarm.backbone.config import CollaborationFile, Forward
from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
_RESUMES = {"wandb": "id", "trackio": "name"}
"""The argument of ``init`` by which each tracker finds a run again after a restart."""
FIRST_RETRY_S, MAX_RETRY_S = 60.0, 3600.0
CARD_ROWS = 30
FILE = "state.safetensors"
CARD = """---
tags:
- colab_swarm
- collaborative-training
---
# {run}

Trained together by the peers of the run `{run}` with colab_swarm. `{file}` holds parameters, optimizer and schedule of
**{newest}**. To continue from it, build the same model and optimizer and load it:

```python
from huggingface_hub import hf_hub_download
optimizer.load(hf_hub_download("{repo}", "{file}"))
```

| step | loss | saved (UTC) |
|---|---|---|
{rows}
"""


class Forwarder:
    """Logs points to a tracker. If the tracker cannot be reached, points are lost.

    Raises:
        ValueError: the tracker's package is not installed.
    """

    def __init__(self, settings: Forward, collaboration: str) -> None:
        if importlib.util.find_spec(settings.to) is None:
            raise ValueError(f"to forward to {settings.to}: pip install {settings.to}")
        self._settings = settings
        self._collaboration = collaboration
        self._waiting: queue.Queue[LossPoint | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="colab-swarm-forward", daemon=True)
        self._thread.start()

    def forward(self, points: Sequence[LossPoint]) -> None:
        """Log these points soon; returns at once."""
        for point in points:
            try:
                self._waiting.put_nowait(point)
            except queue.Full:
                logger.warning("%s is too slow: a point is lost", self._settings.to)

    def close(self, wait_s: float = 5.0) -> None:
        """Log the waiting points and finish, in ``wait_s`` seconds at most."""
        try:
            self._waiting.put(None, timeout=wait_s)
            self._thread.join(wait_s)
        except queue.Full:
            logger.warning("%s does not answer: %d points are lost", self._settings.to, MAX_WAITING)

    def _run(self) -> None:
        tracker: Any = None
        while (point := self._waiting.get()) is not None:
            values = {
                "loss": point.loss,
                "trainers": float(point.peers),
                "samples_per_s": point.samples_per_s,
            }
            try:
                tracker = tracker or self._begin()
                tracker.log(values, step=point.step)
            except Exception as error:  # a tracker's errors are its own
                logger.warning("step %d not forwarded to %s: %s", point.step, self._settings.to, error)
        if tracker is not None:
            tracker.finish()

    def _begin(self) -> Any:
        tracker = importlib.import_module(self._settings.to)
        run = {_RESUMES[self._settings.to]: self._collaboration.replace("/", "-")}
        tracker.init(project=self._settings.project, resume="allow", **run)
        return tracker


_Parcel = tuple[Checkpoint, Path, tuple[Checkpoint, ...]]
"""A checkpoint, its file, and the history up to it."""


class HubPush:
    """Pushes the newest checkpoint of a collaboration.

    Args:
        settings: the repository, whether it is private, and the least time between pushes.
        run: the run's name, for people.
        token: one that may write; None for the login of this machine.
        endpoint: the Hub; None for the usual one.
        first_retry_s: seconds after the first failure; doubled with each.

    Raises:
        ValueError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        settings: CollaborationFile,
        run: str,
        *,
        token: str | None = None,
        endpoint: str | None = None,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError as error:
            raise ValueError(f"to push to {settings.repo}: pip install huggingface_hub") from error
        disable_progress_bars()
        self._api = HfApi(endpoint=endpoint, token=token)
        self._settings, self._run_name, self._first_retry_s = settings, run, first_retry_s
        self._changed = threading.Condition()
        self._next: _Parcel | None = None
        self._closed = False
        self._state = "nothing pushed yet"
        self.failures = 0
        threading.Thread(target=self._run, name="colab-swarm-hub", daemon=True).start()

    @property
    def state(self) -> str:
        """Describe the last push and its success. Thread-safe."""
        return f"{self._settings.repo}: {self._state}"

    def push(self, saved: Checkpoint, path: Path, history: Sequence[Checkpoint]) -> None:
        """Push a checkpoint when its time has come, unless a newer one replaces it; returns at once."""
        link = path.with_name(f"push-{saved.step}")  # the checkpoint itself may be deleted earlier
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            os.link(path, link)
        self._offer((saved, link if link.exists() else path, tuple(history)))

    def close(self) -> None:
        """Stop pushing; a push under way is not finished."""
        self._closed = True
        self._offer(None)

    def _offer(self, parcel: _Parcel | None, *, again: bool = False) -> None:
        with self._changed:
            if again and (self._closed or self._next is not None):
                _discard(parcel)
            else:
                _discard(self._next)
                self._next = parcel
                self._changed.notify()

    def _run(self) -> None:
        every_s, retry_s = 60 * self._settings.push_every_minutes, self._first_retry_s
        not_before = float("-inf")
        while (parcel := self._take(not_before)) is not None:
            saved = parcel[0]
            try:
                self._push(*parcel)
            except Exception as error:  # the Hub's and the network's errors are many: all are retried
                self.failures += 1
                self._state = f"{saved} not pushed ({type(error).__name__}), again in {retry_s:.0f} s"
                logger.warning("%s not pushed to %s: %s", saved, self._settings.repo, error)
                self._offer(parcel, again=True)
                not_before = time.monotonic() + retry_s
                retry_s = min(2 * retry_s, MAX_RETRY_S)
            else:
                self._state = f"{saved} pushed"
                not_before, retry_s = time.monotonic() + every_s, self._first_retry_s
                _discard(parcel)

    def _take(self, not_before: float) -> _Parcel | None:
        with self._changed:
            while not self._closed:
                wait_s = not_before - time.monotonic()
                if self._next is not None and wait_s <= 0:
                    parcel, self._next = self._next, None
                    return parcel
                self._changed.wait(None if self._next is None else wait_s)
        return None

    def _push(self, saved: Checkpoint, path: Path, history: Sequence[Checkpoint]) -> None:
        from huggingface_hub import CommitOperationAdd

        repo = self._settings.repo
        self._api.create_repo(repo, private=self._settings.private, exist_ok=True)
        rows = (
            f"| {one.step} | {'' if one.loss is None else f'{one.loss:.3f}'} | "
            f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(one.at))} |"
            for one in history[: -CARD_ROWS - 1 : -1]
        )
        card = CARD.format(run=self._run_name, repo=repo, file=FILE, newest=saved, rows="\n".join(rows))
        files: dict[str, bytes | Path] = {
            FILE: path,
            "history.jsonl": b"".join(msgspec.json.encode(one) + b"\n" for one in history),
            "README.md": card.encode(),
        }
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        self._api.create_commit(repo, added, commit_message=str(saved))


def _discard(parcel: _Parcel | None) -> None:
    if parcel is not None and parcel[1].name.startswith("push-"):
        with contextlib.suppress(OSError):
            parcel[1].unlink(missing_ok=True)
