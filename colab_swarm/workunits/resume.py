"""Units in hand, on disk: whoever is killed goes on with them.

A file per assignment, written when it is given and again every so often while it is trained. Never pickle.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from colab_swarm.errors import StateError
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.tensors.statedict import decode_skeleton, encode_skeleton, flatten, unflatten
from colab_swarm.tensors.tensorfile import TensorBytes, read_tensors, write_tensors
from colab_swarm.workunits.messages import GivenUnit

logger = logging.getLogger(__name__)
SUFFIX = ".unit"


@dataclass(frozen=True)
class UnitInHand:
    """A unit that somebody was given.

    Attributes:
        unit: as the coordinator gave it.
        deadline: seconds since the epoch.
        training: state of `UnitTraining`; None before it was first saved.
    """

    unit: GivenUnit
    deadline: float
    training: dict[str, Any] | None = None


class UnitSaves:
    """The units in hand of one volunteer in one job.

    Args:
        folder: made if need be; nobody else works in it.
        owner: tells volunteer and job from those that worked there before.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder, self._owner = folder, owner

    def save(self, held: UnitInHand) -> None:
        """Keep a unit; where that fails, only a warning tells."""
        state = {
            "owner": self._owner,
            "unit": msgspec.msgpack.encode(held.unit),
            "deadline": held.deadline,
            "training": held.training,
        }
        try:
            tensors, skeleton = flatten(state)
            write_tensors(
                self._file(held.unit),
                {name: _bytes(tensor) for name, tensor in tensors.items()},
                encode_skeleton(skeleton).decode(),
            )
        except (
            StateError,
            OSError,
            TypeError,
            ValueError,
        ) as error:  # a full disk, or an optimizer's odd state
            logger.warning("unit %s is not saved: %s", held.unit.assignment, error)

    def drop(self, unit: GivenUnit) -> None:
        """Forget a unit."""
        try:
            self._file(unit).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a unit that is done cannot be deleted: %s", error)

    def left_behind(self, *, now: float) -> list[UnitInHand]:
        """Units that a killed process had in hand and that are still awaited; the others are forgotten."""
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                owner, held = _load(path)
            except (StateError, LookupError, TypeError, *UNDECODABLE) as error:
                logger.warning("a saved unit cannot be gone on with: %s", error)
                owner, held = "", None
            if held is None or held.deadline <= now:
                path.unlink(missing_ok=True)
            elif owner == self._owner:
                found.append(held)
        return found

    def _file(self, unit: GivenUnit) -> Path:
        return self._folder / (unit.assignment + SUFFIX)


def _load(path: Path) -> tuple[str, UnitInHand]:
    parts, skeleton = read_tensors(path)
    tensors = {name: _tensor(part) for name, part in parts.items()}
    state = unflatten(tensors, decode_skeleton(skeleton.encode()))
    unit = msgspec.msgpack.decode(state["unit"], type=GivenUnit)
    return state["owner"], UnitInHand(unit, float(state["deadline"]), state["training"])


def _bytes(tensor: torch.Tensor) -> TensorBytes:
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorBytes(kind, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().data)


def _tensor(part: TensorBytes) -> torch.Tensor:
    kind = getattr(torch, part.kind)
    if not part.data.nbytes:
        return torch.empty(part.shape, dtype=kind)
    return torch.frombuffer(bytearray(part.data), dtype=kind).reshape(part.shape)
