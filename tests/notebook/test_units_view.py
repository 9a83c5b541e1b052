"""The views of a coordinator, its page, and those of a volunteer."""

from dataclasses import replace
from typing import Any

import msgspec

from colab_swarm.notebook.units_view import draw_job, draw_volunteer, figures, status_page
from colab_swarm.workunits.client import UnitProgress, VolunteerSnapshot
from colab_swarm.workunits.state import MAX_MARKS, JobStatus
from tests.workunits.statuses import status

MARKS = ("assimilated", "queued", "training", "late", "rejected", "waiting")
UNITS = (
    UnitProgress("epoch 3, subset 7", "training", done=5, batches=20, loss=0.4321, seconds=12.0),
    UnitProgress("epoch 3, subset 8", "downloading", seconds=0.5),
)
SAID = {"job": "digits", "state": "training", "over": False, "fault": ""}
DONE = {"accepted": 12, "refused": 1, "given_back": 0, "refusal": "its deadline passed <b>"}
MOVED = {"samples": 4800, "sent_bytes": 1_200_000, "received_bytes": 3_400_000, "seconds": 600.0}
SNAPSHOT = VolunteerSnapshot(**SAID, **DONE, **MOVED, epoch=3, accuracy=0.875, units=UNITS)


def test_units_of_the_epoch_have_a_character_each_and_words() -> None:
    shown = draw_job(status(marks=MARKS))
    assert "  #=>!x." in shown.text().splitlines()
    words = ("# done", "= to assimilate", "> training", "! late", "x rejected", ". waits")
    assert [one for one in words if one not in shown.text()] == []


def test_figures_have_only_known_values() -> None:
    assert figures(status(staleness=2.0)) == {
        "accuracy, target 82.0%": "71.9%",
        "epoch done in": "5 min",
        "samples/s": "112",
        "staleness": "2.0 updates",
        "parameter servers": "2, 3 results wait",
    }
    assert figures(status(finished="done", epochs=0, units_per_s=0.0)) == {}
    assert "epoch done in" not in figures(status(units_per_s=0.0))


def test_many_units_are_cut_and_counted() -> None:
    crowd = draw_job(status(marks=MARKS[:1] * MAX_MARKS, rows=(10,) * (MAX_MARKS + 9)))
    assert all("and 9 more units" in shown for shown in (crowd.text(), crowd.html()))
    assert len(crowd.html()) < 80_000


def test_a_finished_job_shows_its_reason_and_no_units() -> None:
    done = draw_job(status(finished="accuracy reached", marks=MARKS, fault="disk full")).text()
    assert "finished: accuracy reached" in done and "disk full" in done and "#=>" not in done


def test_a_volunteer_has_a_line_a_bar_per_unit_in_hand_and_the_whole_contribution() -> None:
    assert draw_volunteer(SNAPSHOT).text().splitlines() == [
        "digits: training; epoch 3, accuracy 0.875 after the last; 12 units accepted, 1 refused",
        "  [#####...............] epoch 3, subset 7: training 5 of 20 batches, loss 0.432, 12 s",
        "  [....................] epoch 3, subset 8: downloading, 0 s",
        "  contributed: 4,800 samples in 10 min; downloaded: 3.4 MB; uploaded: 1.2 MB",
        "  ⚠ last refusal: its deadline passed <b>",
    ]


def test_a_fault_of_the_job_is_shown_at_its_end() -> None:
    fault = "x" * 9000 + "\nZeroDivisionError: division by zero"
    shown = draw_volunteer(replace(SNAPSHOT, over=True, fault=fault)).text()
    assert shown.endswith("\n  ZeroDivisionError: division by zero") and len(shown) < 5000


PAGE = status_page(status)
UNITS_OF_A_NEW_JOB = {"waiting": 50, "training": 0, "queued": 0, "assimilated": 0}
NONE: dict[str, Any] = {"epochs": 0, "volunteers": (), "units_per_s": 0.0, "update_s": (), "backlog": 0}
NEW = status(units=UNITS_OF_A_NEW_JOB, servers=0, **NONE)


def live(shown: JobStatus, path: str = "/live") -> str:
    return str(PAGE.render(shown, path)[1])


def test_the_page_says_where_the_job_is() -> None:
    for text in (
        "4,970,122 numbers", "50,000 samples", "epoch 7 of 20, 17 of 50 units", "71.9%", "target 82.0%",
        "2, 3 results wait", "alice", "99%", "71%", "new", "banned for 28 min", "up for 2.2 h",
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


def test_programs_get_the_same_figures() -> None:
    decoded = msgspec.json.decode(PAGE.render(status(), "/status.json")[1])
    assert decoded["units"]["queued"] == 3 and decoded["epochs"][5]["epoch"] == 6
    text = live(status(name='we"ird'), "/metrics")
    assert 'colab_swarm_job_units{job="we\\"ird",state="training"} 9.0\n' in text
    assert 'quantile="0.95"} 0.09' in text and "colab_swarm_job_assimilated_units_total" in text
    assert "job_accuracy{" not in live(NEW, "/metrics")
