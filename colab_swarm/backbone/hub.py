"""Pushing checkpoints to the Hugging Face Hub, in a thread of its own: whatever goes wrong there, the run goes on."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from colab_swarm.backbone.config import Forward
from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint

logger = logging.getLogger(__name__)

MAX_WAITING = 1000

_RESUMES = {"wandb": "id", "trackio": "name"}

"""The argument of ``init`` by which each finds a run again after a restart."""


class Forwarder:
    """Logs points to the tracker; one that cannot be reached costs points, never the run.

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
                logger.warning("%s does not keep up: a point is lost", self._settings.to)

    def close(self, wait_s: float = 5.0) -> None:
        """Log what waits and finish, in ``wait_s`` at most."""
        try:
            self._waiting.put(None, timeout=wait_s)
            self._thread.join(wait_s)
        except queue.Full:
            logger.warning("%s does not answer: %d points are lost", self._settings.to, MAX_WAITING)

    def _run(self) -> None:
        tracker: Any = None
        while (point := self._waiting.get()) is not None:
            try:
                tracker = tracker or self._begin()
                tracker.log(_values(point), step=point.step)
            except Exception as error:  # a tracker's errors are its own
                logger.warning("step %d not forwarded to %s: %s", point.step, self._settings.to, error)
        if tracker is not None:
            tracker.finish()

    def _begin(self) -> Any:
        tracker = importlib.import_module(self._settings.to)
        run = {_RESUMES[self._settings.to]: self._collaboration.replace("/", "-")}
        tracker.init(project=self._settings.project, resume="allow", **run)
        return tracker


def _values(point: LossPoint) -> dict[str, float]:
    return {"loss": point.loss, "trainers": float(point.peers), "samples_per_s": point.samples_per_s}


FIRST_RETRY_S = 60.0

MAX_RETRY_S = 3600.0

CARD_ROWS = 30

FILE = "state.safetensors"

CARD = """---
tags:
- colab_swarm
- collaborative-training
---
# {run}

Trained together by the peers of the run `{run}` with colab_swarm. `{file}` holds parameters, optimizer and schedule of
**{newest}**; to go on from it, build the same model and optimizer and load it:

```python
from huggingface_hub import hf_hub_download
optimizer.load(hf_hub_download("{repo}", "{file}"))
```

| step | loss | saved (UTC) |
|---|---|---|
{rows}
"""


@dataclass(frozen=True)
class HubSettings:
    """Where and how to push.

    Attributes:
        repo: ``user/model``; made if need be.
        run: its name, for people.
        private: make it a private one.
        every_s: push no more often; what came in between is left out.
        token: that may write; None for the one that is logged in on this machine.
        endpoint: the Hub; None for the usual one.
        first_retry_s: after a failure; doubled with each.
    """

    repo: str
    run: str
    private: bool = False
    every_s: float = 1800.0
    token: str | None = None
    endpoint: str | None = None
    first_retry_s: float = FIRST_RETRY_S

    def __repr__(self) -> str:
        return f"HubSettings({self.repo})"


@dataclass(frozen=True)
class _Parcel:
    saved: Checkpoint
    path: Path
    history: tuple[Checkpoint, ...]


class HubPush:
    """Pushes the newest checkpoint that it was given.

    Raises:
        ValueError: huggingface_hub is not installed.
    """

    def __init__(self, settings: HubSettings) -> None:
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError as error:
            raise ValueError(f"to push to {settings.repo}: pip install huggingface_hub") from error
        disable_progress_bars()
        self._api = HfApi(endpoint=settings.endpoint, token=settings.token)
        self._settings = settings
        self._changed = threading.Condition()
        self._next: _Parcel | None = None
        self._closed = False
        self._state = "nothing pushed yet"
        self.failures = 0
        threading.Thread(target=self._run, name="colab-swarm-hub", daemon=True).start()

    @property
    def state(self) -> str:
        """What was pushed last, and whether it works, in words; any thread."""
        return f"{self._settings.repo}: {self._state}"

    def push(self, saved: Checkpoint, path: Path, history: Sequence[Checkpoint]) -> None:
        """Push a checkpoint when its time has come; returns at once. A newer one takes its place."""
        link = path.with_name(f"push-{saved.step}")  # the checkpoint itself may be deleted before its turn
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            os.link(path, link)
        with self._changed:
            _discard(self._next)
            self._next = _Parcel(saved, link if link.exists() else path, tuple(history))
            self._changed.notify()

    def close(self) -> None:
        """Push no more; what is being pushed is let go."""
        with self._changed:
            self._closed = True
            _discard(self._next)
            self._next = None
            self._changed.notify()

    def _run(self) -> None:
        pushed_at, retry_s = float("-inf"), self._settings.first_retry_s
        while (parcel := self._take(pushed_at + self._settings.every_s)) is not None:
            try:
                self._push(parcel)
            except Exception as error:  # the Hub's and the network's errors are many: all are tried again
                self.failures += 1
                self._state = f"{parcel.saved} not pushed ({type(error).__name__}), again in {retry_s:.0f} s"
                logger.warning("%s not pushed to %s: %s", parcel.saved, self._settings.repo, error)
                self._put_back(parcel)
                pushed_at = time.monotonic() + retry_s - self._settings.every_s
                retry_s = min(2 * retry_s, MAX_RETRY_S)
            else:
                self._state = f"{parcel.saved} pushed"
                pushed_at, retry_s = time.monotonic(), self._settings.first_retry_s
                _discard(parcel)

    def _take(self, not_before: float) -> _Parcel | None:
        """Wait for something to push, and for its time; None when closed."""
        with self._changed:
            while not self._closed:
                wait_s = not_before - time.monotonic()
                if self._next is not None and wait_s <= 0:
                    parcel, self._next = self._next, None
                    return parcel
                self._changed.wait(None if self._next is None else wait_s)
        return None

    def _put_back(self, parcel: _Parcel) -> None:
        with self._changed:
            if self._next is None and not self._closed:
                self._next = parcel
            else:
                _discard(parcel)

    def _push(self, parcel: _Parcel) -> None:
        from huggingface_hub import CommitOperationAdd

        settings = self._settings
        self._api.create_repo(settings.repo, private=settings.private, exist_ok=True)
        lines = b"".join(msgspec.json.encode(one) + b"\n" for one in parcel.history)
        files: dict[str, bytes | Path] = {
            FILE: parcel.path,
            "history.jsonl": lines,
            "README.md": model_card(settings, parcel.history).encode(),
        }
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        self._api.create_commit(settings.repo, added, commit_message=str(parcel.saved))


def model_card(settings: HubSettings, history: Sequence[Checkpoint]) -> str:
    """The repository's README: what it is, how to go on from it, and the run's history."""
    rows = (
        f"| {one.step} | {'' if one.loss is None else f'{one.loss:.3f}'} | "
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(one.at))} |"
        for one in history[: -CARD_ROWS - 1 : -1]
    )
    return CARD.format(
        run=settings.run, repo=settings.repo, file=FILE, newest=history[-1], rows="\n".join(rows)
    )


def _discard(parcel: _Parcel | None) -> None:
    """Delete the link to a checkpoint that need not be pushed any more."""
    if parcel is not None and parcel.path.name.startswith("push-"):
        with contextlib.suppress(OSError):
            parcel.path.unlink(missing_ok=True)
