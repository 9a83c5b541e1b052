"""How a trainer's time divides between the user's loop and `step()`. Nothing here waits for a device."""

from collections import deque
from dataclasses import dataclass, replace

import torch

from colab_swarm.tensors.device import DeviceTimestamp, copied
from colab_swarm.training.settings import Due


@dataclass(frozen=True)
class Turn:
    """One turn of the user's loop, which `step()` ends."""

    at: float  # when it ended
    due: Due  # what `step()` did
    copied_bytes: int  # between devices and main memory, by this process until then
    own_s: float = 0.0  # before `step()`
    step_s: float = 0.0  # in it


class StepTimes:
    """The last ``turns`` of a loop that trains on ``device``, as far as the device has done them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: DeviceTimestamp | None = None  # the end of the last `step()`
        self._began: DeviceTimestamp | None = None  # the begin of this one, until it ends
        self._coming: deque[tuple[Turn, DeviceTimestamp, DeviceTimestamp, DeviceTimestamp]] = deque()
        self.turns: deque[Turn] = deque(maxlen=4096)

    def begin(self, now: float) -> None:
        """A call of `step()` begins. Without an end, its turn does not count."""
        # Other devices compute beside the host too, and the time says nothing of it.
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
        """Return the part of the last minute's turns that was the user's loop's; 0 if unknown. Thread-safe."""
        own_s = 0.0
        step_s = 0.0
        for turn in list(self.turns):
            if turn.at > now - 60.0:
                own_s += turn.own_s
                step_s += turn.step_s
        return own_s / (own_s + step_s or 1.0)
