"""The status page, and the figures for programs."""

from __future__ import annotations

import dataclasses
import math
import re

import msgspec
import pytest

from colab_swarm.notebook.coordinator_view import render_live, render_page
from colab_swarm.workunits.state import EpochEnded, JobStatus, render_prometheus
from tests.backbone.test_page import Tags
from tests.workunits.statuses import EVIL, NOW, status

NEW = status(
    epochs=0,
    volunteers=(),
    assimilated_at=(),
    update_s=(),
    units={"waiting": 50, "training": 0, "queued": 0, "assimilated": 0},
    backlog=0,
    servers=0,
)


@pytest.mark.parametrize("shown", [status(), NEW, status(name=EVIL, fault=EVIL, finished=EVIL)])
def test_the_page_is_well_formed_and_texts_of_others_are_only_text(shown: JobStatus) -> None:
    tags = Tags(render_page(shown))
    assert tags.seen.count("script") == 1 and "img" not in tags.seen
    assert not any(name.startswith("on") for name in tags.attributes)
    assert EVIL not in render_page(shown)


def test_the_page_says_where_the_job_is() -> None:
    live = render_live(status())
    for text in (
        "4,970,122 numbers", "50,000 samples", "epoch 7 of 20, 17 of 50 units", "71.9%", "target 82.0%",
        "2, 3 results wait", "alice", "high (99%)", "fair (71%)", "new", "banned for 28 min", "up for 2.2 h",
        "cs.workunits.volunteer(link)",
    ):  # fmt: skip
        assert text in live, text


def test_a_job_that_has_just_begun_and_one_that_is_over_have_a_page_too() -> None:
    assert "drawn after the second epoch" in render_live(NEW) and "0 volunteers" in render_live(NEW)
    over = render_live(status(finished="accuracy 0.823 reached the target 0.82"))
    assert "finished: accuracy 0.823" in over and "cs.workunits.volunteer" not in over


def test_an_unreachable_store_shows_on_the_page() -> None:
    assert "the store does not answer: redis is away" in render_live(status(fault="redis is away"))


def test_servers_that_die_repeatedly_show_on_the_page() -> None:
    assert "parameter servers end" not in render_live(status())
    assert "parameter servers end again and again" in render_live(status(servers=0, server_deaths=3))


def test_the_curve_stays_small_over_thousands_of_epochs() -> None:
    epochs = [EpochEnded(at=NOW, epoch=i + 1, accuracy=i / 5000, low=0.0, high=1.0) for i in range(5000)]
    broken = EpochEnded(at=NOW, epoch=5001, accuracy=math.nan, low=math.nan, high=math.nan)
    shown = status()
    long = dataclasses.replace(shown.overview, epochs=(*epochs, broken))
    drawn = render_live(dataclasses.replace(shown, overview=long))
    assert (
        "<polygon" in drawn
        and len(drawn) < 60_000
        and "nan" not in drawn[drawn.index("<svg") : drawn.index("</svg>")]
    )


def test_programs_get_the_same_figures() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(status()))
    assert decoded["overview"]["units"]["queued"] == 3 and decoded["overview"]["epochs"][5]["epoch"] == 6
    text = render_prometheus(status(name='we"ird'))
    assert re.search(r'^colab_swarm_job_units\{job="we\\"ird",state="training"\} 9\.0$', text, re.MULTILINE)
    assert 'quantile="0.95"} 0.09' in text and "colab_swarm_job_assimilated_units_total" in text
    line = re.compile(
        r'# TYPE \w+ (gauge|counter)|colab_swarm_\w+\{(\w+="([^"\\\n]|\\["\\n])*",?)+\} [-+0-9.e]+'
    )
    assert all(line.fullmatch(one) for one in text.splitlines())
    assert "job_accuracy{" not in render_prometheus(NEW)
