"""The doctor's checks on made-up facts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from colab_swarm.net.metering import Speed
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook.checks import (
    GREEN,
    RED,
    YELLOW,
    Check,
    Light,
    Prediction,
    Subject,
    check_bandwidth,
    check_clock,
    check_compute,
    check_disk,
    check_internet,
    check_memory,
    check_platform,
    check_prediction,
    check_reachability,
    check_swarm,
    check_versions,
    numbers,
)
from colab_swarm.notebook.platforms import COLAB, KAGGLE, PLAIN

T4 = ("Tesla T4", 14_500_000_000, 15_600_000_000)
GB = 10**9
DIRECT = Reachability(ReachabilityLevel.DIRECT, addresses=("ws://203.0.113.7:4500",))
LARGE = Subject("ALBERT-large at 512 tokens", 18_105_474, 1_605_894_144.0)
PREDICTION = Prediction(4096, 4e6, 12.0, 10.0, step_s=120.0, averaging_s=15.0, gb_per_hour=2.2, share=0.25)


def test_a_healthy_peer_gets_only_green_lights() -> None:
    found = [
        check_platform(PLAIN),
        check_internet(PLAIN, True),
        check_versions({"torch": ("2.9.0+cu126", "2.9")}),
        check_compute(8, 9 * GB, T4, LARGE),
        check_memory(9 * GB),
        check_memory(None),
        check_disk(50 * GB),
        check_swarm("demo", linked=2, training=2),
        check_reachability(DIRECT),
        check_clock(0.2),
        check_bandwidth(Speed(20e6, 100e6, 0.05)),
        check_prediction(PREDICTION),
    ]
    assert {each.light for each in found} == {GREEN}


@pytest.mark.parametrize(
    ("found", "light", "fix"),
    [
        (check_platform(COLAB), YELLOW, "accept_terms=True"),
        (check_internet(PLAIN, False), YELLOW, "cs.join()"),
        (check_internet(KAGGLE, False), RED, "switch Internet on"),
        (check_versions({"torch": ("2.8.1", "2.9")}), RED, 'pip install -U "torch>=2.9"'),
        (check_versions({"torch": (None, "2.9")}), YELLOW, "colab-swarm[train]"),
        (check_compute(8, 9 * GB, None, LARGE), YELLOW, "Colab and Kaggle"),
        (check_compute(8, 9 * GB, ("Tesla T4", GB, 15 * GB), LARGE), RED, "smaller model"),
        (check_memory(10**8), RED, "restart the kernel"),
        (check_disk(10**8), YELLOW, "delete old"),
        (check_swarm("demo", 0, 0), YELLOW, "swarm.invite()"),
        (check_reachability(Reachability(ReachabilityLevel.OUTGOING)), YELLOW, "colab-swarm backbone"),
        (check_reachability(Reachability(ReachabilityLevel.UNVERIFIED)), YELLOW, "run the doctor again"),
        (check_reachability(Reachability(ReachabilityLevel.RELAYED, "3fa9c0de")), YELLOW, "nothing to do"),
        (check_clock(-90.0), YELLOW, "set-ntp"),
        (check_clock(900.0), RED, "set-ntp"),
        (check_bandwidth(None), YELLOW, "run the doctor again"),
        (check_bandwidth(Speed(1e6, 1e8, 0.1)), YELLOW, "compression='int8'"),
        (check_prediction(replace(PREDICTION, averaging_s=90.0)), YELLOW, "target_batch_size=4096"),
        (check_prediction(replace(PREDICTION, step_s=3000.0)), YELLOW, "invite more peers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_problem_is_found_and_has_its_fix(found: Check, light: Light, fix: str) -> None:
    assert found.light is light and fix in found.fix


def test_the_micro_batch_comes_with_its_arithmetic() -> None:
    text = check_compute(8, 9 * GB, T4, LARGE).text
    assert "(0.8 × 14.5 GB free − 18.1 M parameters × 16 B) / 1,605.9 MB a sample: micro-batch 4" in text


def test_reachability_says_why_it_is_not_better() -> None:
    relayed = Reachability(
        ReachabilityLevel.RELAYED,
        "3fa9c0de",
        reasons=((ReachabilityLevel.DIRECT, "nobody could dial 10.0.0.2"),),
    )
    text = check_reachability(relayed).text
    assert text == "relayed by 3fa9c0de; not direct: nobody could dial 10.0.0.2"


def test_the_prediction_is_shown_in_words() -> None:
    assert check_prediction(PREDICTION).text == (
        "first sample in 12 s; 10 samples/s here, 25% of a step; a step of 4,096 samples every 2 min, "
        "of which 15 s averaging; 2.2 GB per hour"
    )


def test_infinite_bandwidth_is_shown_in_words() -> None:
    assert "too fast to measure up" in check_bandwidth(Speed(math.inf, 1e9, 0.0)).text


def test_versions_are_compared_by_their_numbers() -> None:
    assert numbers("2.9.0+cu126") == [2, 9, 0] and numbers("3.13.0rc1") == [3, 13, 0] and numbers("") == []
    assert numbers("2.9.0+cu126") > numbers("2.9") > numbers("2.8.1")
