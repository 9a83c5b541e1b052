"""A status of a job in which everything happens at once."""

import dataclasses
import math
from typing import Any

from colab_swarm.workunits.state import EpochEnded, JobStatus, VolunteerState

NOW = 1_800_000_000.0
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
NAMES = ("alice", "bob", "carol's notebook", "", "erin", EVIL)


def status(*, epochs: int = 6, **changes: Any) -> JobStatus:
    whole = JobStatus(
        name="digits-resnet",
        at=NOW,
        since=NOW - 7800,
        target_accuracy=0.82,
        rows=(1000,) * 50,
        numel=4_970_122,
        version=50 * epochs + 17,
        servers=2,
        server_deaths=1,
        backlog=3,
        fault="",
        epoch=epochs + 1,
        max_epochs=20,
        finished=None,
        volunteers=tuple(map(_volunteer, range(len(NAMES)))),
        epochs=tuple(map(_epoch, range(1, epochs + 1))),
        units=dict(waiting=21, training=9, queued=3, assimilated=17),
        marks=(),
        staleness=None,
        update_s=(0.021, 0.022, 0.024, 0.09),
        units_per_s=90 / 801,
        samples_per_s=90_000 / 801,
    )
    return dataclasses.replace(whole, **changes)


def _epoch(epoch: int) -> EpochEnded:
    mean, spread = 0.8 - 0.6 * math.exp(-epoch / 3), 0.12 / epoch
    return EpochEnded(at=NOW, epoch=epoch, accuracy=mean, low=mean - spread, high=mean + spread / 2)


def _volunteer(place: int) -> VolunteerState:
    return VolunteerState(
        volunteer=f"{place:x}" * 64,
        name=NAMES[place],
        error_rate=(0.01, 0.07, 0.29, 0.05, 0.7, 0.02)[place],
        accepted=(120, 88, 41, 0, 4, 12)[place],
        rejected=(0, 1, 2, 0, 9, 0)[place],
        expired=(0, 2, 9, 0, 1, 0)[place],
        in_flight=(4, 3, 1, 1, 0, 0)[place],
        banned_until=NOW + 1700 if place == 4 else -math.inf,
    )
