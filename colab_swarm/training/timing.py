"""Measures how a trainer's time divides between the user's loop and `step()`. Nothing here waits for a device."""

from collections import deque
from dataclasses import dataclass, replace

import torch

from colab_swarm.tensors.device import DeviceTimestamp, copied
from colab_swarm.training.settings import Due


@dataclass(frozen=True)
class Turn:
    """One iteration of the user's loop; it ends with `step()`."""

    at: float  # when the turn ended
    due: Due  # the action of `step()`
    copied_bytes: int  # bytes that this process has copied between devices and main memory until then
    own_s: float = 0.0  # time before `step()`
    step_s: float = 0.0  # time in `step()`


class StepTimes:
    """The last ``turns`` of a loop that trains on ``device``. A turn is added once the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: DeviceTimestamp | None = None  # the end of the last `step()`
        self._began: DeviceTimestamp | None = None  # the begin of the present `step()`, until it ends
        self._coming: deque[tuple[Turn, DeviceTimestamp, DeviceTimestamp, DeviceTimestamp]] = deque()
        self.turns: deque[Turn] = deque(maxlen=4096)

    def begin(self, now: float) -> None:
        """Note that a call of `step()` begins; without a call of `end`, this turn does not count."""
        # Other devices compute asynchronously, too, and the host's time does not show for how long.
        if self._began is not None or self._device.type not in ("cpu", "cuda"):
            self._before = None
        self._began = DeviceTimestamp(self._device, now)

    def end(self, now: float, due: Due) -> None:
        ended = DeviceTimestamp(self._device, now)
        if self._before is not None and self._began is not None:
            turn = Turn(now, due, copied.out_bytes + copied.in_bytes)
            self._coming.append((turn, self._before, self._began, ended))
        self._before = ended
        self._began = None
        while self._coming and all(moment.passed for moment in self._coming[0][1:]):
            turn, before, began, ended = self._coming.popleft()
            self.turns.append(replace(turn, own_s=began.since(before), step_s=ended.since(began)))

    def share(self, now: float) -> float:
        """Return the part of the last minute that the user's loop took; 0 if not known. Thread-safe."""
        own_s = 0.0
        step_s = 0.0
        for turn in list(self.turns):
            if turn.at > now - 60.0:
                own_s += turn.own_s
                step_s += turn.step_s
        return own_s / (own_s + step_s or 1.0)
