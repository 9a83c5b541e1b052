"""Units in hand, and their saves on disk, from which a killed volunteer resumes.

Each assignment has a file, written when the unit arrives and at intervals while it is trained. Never pickle.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from colab_swarm.errors import StateError
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.training.checkpoint import load_checkpoint, save_checkpoint
from colab_swarm.workunits.job import UnitTraining
from colab_swarm.workunits.messages import GivenUnit


@dataclass(frozen=True)
class UnitProgress:
    """One slot of a volunteer: its unit's name (empty: none), batches trained and in all, and last loss.

    ``phase`` is ``asking``, ``waiting``, ``downloading``, ``training`` or ``uploading``;
    ``seconds`` count from the unit's arrival.
    """

    unit: str = ""
    phase: str = "asking"
    done: int = 0
    batches: int = 0
    loss: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class VolunteerSnapshot:
    """Progress of one volunteer in a job.

    Attributes:
        state: its activity, or why it ended, for people.
        over: True once it has ended.
        fault: traceback of the job's own code, if that ended it.
        epoch, accuracy: the job's epoch, and the accuracy of the one before, as last reported.
        accepted, refused, given_back: numbers of units.
        refusal: why the last result was refused.
        samples: trained in accepted units.
        sent_bytes, received_bytes: of results, and of data and parameters.
        cache_hits, cache_misses: units whose data were on this disk, and were not.
    """

    job: str
    state: str
    over: bool
    fault: str
    epoch: int
    accuracy: float | None
    units: tuple[UnitProgress, ...]
    accepted: int
    refused: int
    given_back: int
    refusal: str
    samples: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    cache_hits: int = 0
    cache_misses: int = 0


logger = logging.getLogger(__name__)
SUFFIX = ".unit"


@dataclass(frozen=True)
class UnitInHand:
    """A unit that a volunteer works on, until ``deadline`` (seconds since the epoch).

    ``training`` is the saved state of `UnitTraining`; None before the first save.
    """

    unit: GivenUnit
    deadline: float
    training: dict[str, Any] | None = None


class UnitSaves:
    """The units in hand of one volunteer in one job.

    Args:
        folder: created if missing; used by this volunteer only.
        owner: identifies volunteer and job, among others that used the folder before.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder, self._owner = folder, owner

    def save(self, held: UnitInHand) -> None:
        """Save a unit. A failure only causes a warning."""
        state = {
            "owner": self._owner,
            "unit": msgspec.msgpack.encode(held.unit),
            "deadline": held.deadline,
            "training": held.training,
        }
        try:
            save_checkpoint(self._file(held.unit), state)
        except (StateError, OSError, TypeError, ValueError) as error:  # full disk, odd optimizer state
            logger.warning("unit %s is not saved: %s", held.unit.assignment, error)

    def drop(self, unit: GivenUnit) -> None:
        try:
            self._file(unit).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a save cannot be deleted: %s", error)

    def left_behind(self, *, now: float) -> list[UnitInHand]:
        """Return units that a killed process had in hand, before their deadlines; delete the others."""
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                owner, held = _load(path)
            except (StateError, LookupError, TypeError, *UNDECODABLE) as error:
                logger.warning("a saved unit cannot be resumed: %s", error)
                owner, held = "", None
            if held is None or held.deadline <= now:
                path.unlink(missing_ok=True)
            elif owner == self._owner:
                found.append(held)
        return found

    def _file(self, unit: GivenUnit) -> Path:
        return self._folder / (unit.assignment + SUFFIX)


def _load(path: Path) -> tuple[str, UnitInHand]:
    state = load_checkpoint(path)
    unit = msgspec.msgpack.decode(state["unit"], type=GivenUnit)
    return state["owner"], UnitInHand(unit, float(state["deadline"]), state["training"])


@dataclass
class Slot:
    """One slot and its unit, which is ``held`` from its arrival until its result is uploaded or refused."""

    phase: str = "asking"
    held: UnitInHand | None = None
    training: UnitTraining | None = None
    loss: float | None = None
    began: float = 0.0
    saved: float = 0.0

    def take(self, held: UnitInHand) -> None:
        self.held, self.training, self.loss = held, None, None
        self.began = self.saved = time.monotonic()

    def progress(self) -> UnitProgress:
        if self.held is None:
            return UnitProgress(phase=self.phase)
        unit, seconds = self.held.unit, time.monotonic() - self.began
        done, batches = (self.training.done, self.training.batches) if self.training else (0, 0)
        name = f"epoch {unit.epoch}, subset {unit.subset}"
        return UnitProgress(name, self.phase, done, batches, self.loss, seconds)
