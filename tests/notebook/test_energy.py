from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from colab_swarm.notebook.energy import EnergyMeter, GraphicsCards, Processors, ProcessTime, Source
from colab_swarm.snapshot import Energy


class NVMLError(Exception):
    pass


def nvml(*, cards: int = 2, counter: bool = True) -> SimpleNamespace:
    """In place of ``pynvml``: cards whose counters stand at ``energy_mj`` and draw ``power_mw``."""

    def energy(card: int) -> int:
        if not counter:
            raise NVMLError("not supported")
        return int(told.energy_mj)

    told = SimpleNamespace(
        NVMLError=NVMLError,
        energy_mj=1000,
        power_mw=100_000,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: cards,
        nvmlDeviceGetHandleByIndex=lambda card: card,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetPowerUsage=lambda card: told.power_mw,
    )
    return told


def test_graphics_cards_are_counted_from_the_first_reading_on() -> None:
    driver = nvml()
    meter = EnergyMeter((lambda: GraphicsCards(driver),))
    assert meter.read() == Energy(0.0, "NVML, 2 GPUs", False)
    driver.energy_mj += 2500
    assert meter.read() == Energy(5.0, "NVML, 2 GPUs", False)


def test_cards_without_a_counter_have_their_power_integrated_and_are_an_estimate() -> None:
    driver, now = nvml(cards=1, counter=False), [10.0]
    cards = GraphicsCards(driver, lambda: now[0])
    now[0], driver.power_mw = 14.0, 200_000
    assert cards.joules() == pytest.approx(4 * 150.0)
    assert cards.estimated and "power" in cards.name


def rapl(folder: Path, *counters: int) -> Path:
    """Sets counters that begin anew at 1000 microjoules; parts of a processor are not counted twice."""
    for number, counter in enumerate(counters):
        for zone in (folder / f"intel-rapl:{number}", folder / f"intel-rapl:{number}:0"):
            zone.mkdir(exist_ok=True)
            (zone / "energy_uj").write_text(f"{counter}\n")
            (zone / "max_energy_range_uj").write_text("1000\n")
    return folder


def test_processors_are_counted_even_when_their_counters_begin_anew(tmp_path: Path) -> None:
    processors = Processors(rapl(tmp_path, 900, 100))
    rapl(tmp_path, 100, 300)
    assert processors.joules() == pytest.approx(400e-6) and processors.name == "RAPL, 2 processors"


def fails() -> Source:
    raise OSError("permission denied")


class Breaks:
    """Tells 7 J, then fails."""

    name, estimated = "breaks", False

    def __init__(self) -> None:
        self._answers = [0.0, 7.0, 7.0]

    def joules(self) -> float:
        return self._answers.pop(0)


@pytest.mark.parametrize("better", [(), (fails,), (lambda: Processors(Path("/nowhere")),)])
def test_where_nothing_counts_it_is_an_estimate_that_tells_its_assumption(
    better: tuple[Callable[[], Source], ...],
) -> None:
    meter = EnergyMeter((*better, ProcessTime))
    meter.read()
    began = time.process_time()
    while time.process_time() - began < 0.02:
        pass
    told = meter.read()
    assert told is not None and told.estimated and "10 W a core" in told.source
    assert 0.2 <= told.joules < 5


def test_a_source_that_breaks_is_left_for_the_next_and_nothing_counted_is_lost() -> None:
    meter = EnergyMeter((Breaks, ProcessTime))
    readings = [meter.read() for _ in range(4)]
    assert all(one is not None for one in readings)
    joules = [one.joules for one in readings if one is not None]
    assert joules == sorted(joules) and joules[1] == 7.0 and readings[-1].source == ProcessTime.name


def test_without_any_source_there_is_no_figure() -> None:
    assert EnergyMeter((fails,)).read() is None


def test_the_meter_of_this_machine_answers() -> None:
    assert EnergyMeter().read() is not None
