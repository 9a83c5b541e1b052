"""What training costs in energy: counted where the machine counts it, otherwise estimated, and it says which.

The first of these that answers is used: the graphics processors' own counters (NVML, by the package ``nvidia-ml-py``),
the processors' (RAPL, where the system lets us read it), the time that this process computed.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from colab_swarm.markup import count
from colab_swarm.snapshot import Energy

logger = logging.getLogger(__name__)
POWERCAP = Path("/sys/class/powercap")
WATTS_PER_CORE = 10.0
"""Of a busy core, as servers are built: 150 to 350 W for 16 to 48 cores, without memory, fans and power supply."""


class Source(Protocol):
    """Something that tells energy.

    Attributes:
        name: for people, with the assumptions of an estimate.
        estimated: whether it is one.
    """

    name: str
    estimated: bool

    def joules(self) -> float:
        """So much was used; counted from any time, and never less than before.

        Raises:
            Exception: what a foreign library or file raises that has gone.
        """


class GraphicsCards:
    """NVML: the energy that the cards have counted since their driver was loaded, or their power, integrated.

    Args:
        nvml: the module ``pynvml``.

    Raises:
        Exception: no driver, no card, or none that tells.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        nvml.nvmlInit()
        self._cards = [nvml.nvmlDeviceGetHandleByIndex(card) for card in range(nvml.nvmlDeviceGetCount())]
        if not self._cards:
            raise ValueError("no card")
        self._joules, self._read_at = 0.0, clock()
        cards = count(len(self._cards), "GPU")
        try:
            self._counted()
            self.name, self.estimated = f"NVML, {cards}", False
        except nvml.NVMLError:  # cards before Volta have no counter
            self._watts = self._power()
            self.name, self.estimated = f"estimate: power of {cards} now and then, by NVML", True

    def joules(self) -> float:
        """See `Source`."""
        if not self.estimated:
            return self._counted()
        now, watts = self._clock(), self._power()
        self._joules += (self._watts + watts) / 2 * (now - self._read_at)
        self._watts, self._read_at = watts, now
        return self._joules

    def _counted(self) -> float:
        return float(sum(map(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._cards))) / 1e3

    def _power(self) -> float:
        return float(sum(map(self._nvml.nvmlDeviceGetPowerUsage, self._cards))) / 1e3


class Processors:
    """RAPL: the counters of whole processors, in microjoules, which begin anew now and then.

    Raises:
        OSError, ValueError: there are none, or they must not be read: since 2020 only root may.
    """

    estimated = False

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._zones = sorted(folder.glob("intel-rapl:?"))
        if not self._zones:
            raise ValueError("no counter")
        self._most = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
        self._last, self._joules = self._read(), 0.0
        self.name = f"RAPL, {count(len(self._zones), 'processor')}"

    def joules(self) -> float:
        """See `Source`; has to be asked before a counter has begun anew twice, which takes minutes."""
        counters = self._read()
        for last, new, most in zip(self._last, counters, self._most, strict=True):
            self._joules += (new - last if new >= last else new + most - last) / 1e6
        self._last = counters
        return self._joules

    def _read(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone in self._zones]


class ProcessTime:
    """The time that this process has computed, at an assumed power."""

    estimated = True
    name = f"estimate: processor time of this process at {WATTS_PER_CORE:g} W a core"

    def joules(self) -> float:
        """See `Source`."""
        return time.process_time() * WATTS_PER_CORE


def _graphics_cards() -> Source:
    return GraphicsCards(importlib.import_module("pynvml"))


class EnergyMeter:
    """Counts energy from now on. Never raises: a source that fails is left for the next.

    Args:
        ladder: functions that open a source, the best first.
    """

    def __init__(
        self, ladder: tuple[Callable[[], Source], ...] = (_graphics_cards, Processors, ProcessTime)
    ) -> None:
        self._ladder = list(ladder)
        self._source: Source | None = None
        self._began = self._before = 0.0

    def read(self) -> Energy | None:
        """What was used since the first reading; None if nothing tells. Takes milliseconds with a graphics card."""
        while self._ladder:
            try:
                return self._read()
            except Exception as error:  # foreign libraries and files raise what they like
                logger.debug("no energy from %s: %s", self._ladder[0], error)
                self._ladder.pop(0)
                self._source = None
        return None

    def _read(self) -> Energy:
        if self._source is None:
            self._source = self._ladder[0]()
            self._began = self._source.joules() - self._before
        self._before = self._source.joules() - self._began
        return Energy(self._before, self._source.name, self._source.estimated)
