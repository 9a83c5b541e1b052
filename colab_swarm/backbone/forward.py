"""The run's curves for Weights & Biases or trackio, in a thread of its own; volunteers need no key of either."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from colab_swarm.backbone.config import Forward
from colab_swarm.backbone.curve import LossPoint

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
