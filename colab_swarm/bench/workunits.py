"""Figure 3 of the VC-ASGD paper: time per epoch by parameter servers, volunteers and units at a time (PnCnTn).

Real processes on this machine: a coordinator, its parameter servers, the volunteers. As in the paper, the volunteers
limit an epoch at first, and with more of their units at a time the parameter servers do. Each of these measures the
accuracy after every result, here of a small ResNetV2 on 11,504 images. That takes far longer than to train a unit of 30
images, so one server is too slow. ``--data`` takes an ``.npz`` of 32 x 32 colour images instead.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path

from colab_swarm.bench.report import BenchReport
from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.state import Assigned, EpochEnded
from colab_swarm.workunits.volunteering import volunteer

CODE = """
from dataclasses import replace
import colab_swarm as cs
import numpy as np
from colab_swarm.recipes.classify import classification_job

plan = cs.workunits.WorkPlan(
    subsets={subsets}, max_epochs={epochs}, alpha=0.95, batch_size=16, validation_samples={validation}
)
learned = classification_job({data!r}, shape={shape}, model="resnet", plan=plan)
job = replace(learned, validation=lambda: [np.concatenate([part] * 8) for part in learned.data()])
"""
GRID = tuple(product((1, 3, 5), (3, 5), (2, 4, 8)))
QUICK = ((1, 3, 8), (3, 3, 8))
"""Parameter servers, volunteers, units at a time of each."""
SUBSETS, EPOCHS = 48, 3
TIME_LIMIT_S = 300.0
PRELOADED = ["colab_swarm.workunits.volunteering", "colab_swarm.recipes.classify"]


def run(*, quick: bool, data: str = "digits") -> BenchReport:
    """Measure seconds per epoch of each arrangement, and the ratio between one and three parameter servers."""
    report = BenchReport("workunits", quick)
    seconds = {}
    for servers, volunteers, units in QUICK if quick else GRID:
        with tempfile.TemporaryDirectory() as folder:
            took_s = epoch_seconds(Path(folder), servers, volunteers, units, data=data, quick=quick)
        seconds[servers, volunteers, units] = took_s
        key = f"workunits.p{servers}c{volunteers}t{units}_epoch_s"
        report.add(key, took_s, "s", f"{SUBSETS} units")
    ratio = seconds[1, 3, 8] / seconds[3, 3, 8]
    report.add("workunits.p1c3t8_vs_p3c3t8", ratio, "x", "the paper: over 1, assimilation is the bottleneck")
    return report


def epoch_seconds(
    folder: Path, servers: int, volunteers: int, units: int, *, data: str = "digits", quick: bool = False
) -> float:
    """Return the median time of an epoch except the first, from its first assignment to its last measured result."""
    shape, validation = ((1, 8, 8), 12_000) if data == "digits" else ((3, 32, 32), 1500)
    where = data if data == "digits" else str(Path(data).resolve())
    file, epochs = folder / "job.py", 2 if quick else EPOCHS
    code = CODE.format(subsets=SUBSETS, epochs=epochs, data=where, shape=shape, validation=validation)
    file.write_text(code)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    coordinator = coordinate(file, folder=folder / "work", host="127.0.0.1", servers=servers)
    helping: list[BaseProcess] = []
    try:
        for number in range(volunteers):
            arguments = (str(coordinator.link), folder / "volunteers", f"volunteer-{number}", units)
            helping.append(processes.Process(target=_volunteer, args=arguments, daemon=True))
            helping[-1].start()
        if not coordinator.wait(TIME_LIMIT_S):
            raise TimeoutError(f"no {epochs} epochs in {TIME_LIMIT_S:.0f} s: {coordinator!r}")
        begun: dict[int, float] = {}
        took_s = []
        for entry in coordinator.log():
            if isinstance(entry, Assigned):
                begun.setdefault(entry.unit.epoch, entry.at)
            elif isinstance(entry, EpochEnded):
                took_s.append(entry.at - begun[entry.epoch])
        return statistics.median(took_s[1:])
    finally:
        coordinator.stop()
        for process in helping:
            process.kill()
            process.join()


def _volunteer(link: str, folder: Path, name: str, units: int) -> None:
    import torch

    torch.set_num_threads(1)
    volunteer(link, trust_code=True, name=name, folder=folder, units=units).wait()
    os._exit(0)
