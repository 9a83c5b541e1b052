"""What the coordinator's page shows, and the figures for programs."""

from __future__ import annotations

import dataclasses
import math

import msgspec

from colab_swarm.notebook.units_view import status_page
from colab_swarm.workunits.state import EpochEnded, JobStatus
from tests.workunits.statuses import NOW, status

PAGE = status_page(status)
NEW = status(
    epochs=0,
    volunteers=(),
    units_per_s=0.0,
    update_s=(),
    units={"waiting": 50, "training": 0, "queued": 0, "assimilated": 0},
    backlog=0,
    servers=0,
)


def live(shown: JobStatus, path: str = "/live") -> str:
    return str(PAGE.render(shown, path)[1])


def test_the_page_says_where_the_job_is() -> None:
    for text in (
        "4,970,122 numbers", "50,000 samples", "epoch 7 of 20, 17 of 50 units", "71.9%", "target 82.0%",
        "2, 3 results wait", "alice", "high (99%)", "fair (71%)", "new", "banned for 28 min", "up for 2.2 h",
        "cs.workunits.volunteer(link)",
    ):  # fmt: skip
        assert text in live(status()), text


def test_a_job_that_has_just_begun_and_one_that_is_over_have_a_page_too() -> None:
    assert "drawn after the second epoch" in live(NEW) and "0 volunteers" in live(NEW)
    over = live(status(finished="accuracy 0.823 reached the target 0.82"))
    assert "finished: accuracy 0.823" in over and "cs.workunits.volunteer" not in over


def test_an_unreachable_store_and_servers_that_die_repeatedly_show_on_the_page() -> None:
    assert "the store does not answer: redis is away" in live(status(fault="redis is away"))
    assert "parameter servers end" not in live(status())
    assert "parameter servers end again and again" in live(status(servers=0, server_deaths=3))


def test_the_curve_stays_small_over_thousands_of_epochs() -> None:
    epochs = [EpochEnded(at=NOW, epoch=i + 1, accuracy=i / 5000, low=0.0, high=1.0) for i in range(5000)]
    broken = EpochEnded(at=NOW, epoch=5001, accuracy=math.nan, low=math.nan, high=math.nan)
    shown = status()
    drawn = live(dataclasses.replace(shown, epochs=(*epochs, broken)))
    assert "<polygon" in drawn and len(drawn) < 60_000
    assert "nan" not in drawn[drawn.index("<svg") : drawn.index("</svg>")]


def test_programs_get_the_same_figures() -> None:
    decoded = msgspec.json.decode(PAGE.render(status(), "/status.json")[1])
    assert decoded["units"]["queued"] == 3 and decoded["epochs"][5]["epoch"] == 6
    text = live(status(name='we"ird'), "/metrics")
    assert 'colab_swarm_job_units{job="we\\"ird",state="training"} 9.0\n' in text
    assert 'quantile="0.95"} 0.09' in text and "colab_swarm_job_assimilated_units_total" in text
    assert "job_accuracy{" not in live(NEW, "/metrics")
