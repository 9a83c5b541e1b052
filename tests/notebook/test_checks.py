"""The doctor's checks on made-up facts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook.checks import (
    RED,
    YELLOW,
    Check,
    DoctorFacts,
    Gpu,
    Light,
    Machine,
    MembershipFacts,
    Needs,
    Prediction,
    UplinkFacts,
    Version,
    Workload,
    diagnose,
    numbers,
)
from colab_swarm.notebook.platforms import COLAB, KAGGLE, PLAIN

T4 = Gpu("Tesla T4", free_bytes=14_500_000_000, total_bytes=15_600_000_000)
LAPTOP = Machine(
    cores=8, free_ram_bytes=9_000_000_000, free_disk_bytes=50_000_000_000, open_files=4096, gpu=T4
)
TORCH = Version("torch", "2.9.0+cu126", "2.9")
SWARM = MembershipFacts(
    run="demo",
    reachability=Reachability(ReachabilityLevel.DIRECT, addresses=("ws://203.0.113.7:4500",)),
    linked=2,
    trainers=(10.0, 20.0),
    skew_s=0.2,
    uplink=UplinkFacts(20e6, 100e6, 0.05),
)
LARGE = Needs("ALBERT-large at 512 tokens", 18_105_474, 1_605_894_144.0)
WORK = Workload(18_105_474, 4, 4096, 2.0)
PREDICTION = Prediction(12.0, 10.0, 40.0, step_s=120.0, averaging_s=15.0, gb_per_hour=2.2, share=0.25)
WELL = DoctorFacts(PLAIN, LAPTOP, (TORCH,), True, SWARM, needs=LARGE, work=WORK, prediction=PREDICTION)


def check(facts: DoctorFacts, name: str) -> Check:
    (found,) = [each for each in diagnose(facts) if each.name == name]
    return found


def well(**changes: object) -> DoctorFacts:
    return replace(WELL, **changes)


def swarm(**changes: object) -> DoctorFacts:
    return well(membership=replace(SWARM, **changes))


def on(**changes: object) -> DoctorFacts:
    return well(machine=replace(LAPTOP, **changes))


def reached(level: ReachabilityLevel, by: str = "") -> DoctorFacts:
    return swarm(reachability=Reachability(level, by))


def test_a_healthy_peer_gets_only_green_lights() -> None:
    assert {each.light for each in diagnose(WELL)} == {Light.GREEN}


@pytest.mark.parametrize(
    ("facts", "name", "light", "fix"),
    [
        (well(platform=COLAB), "platform", YELLOW, "accept_terms=True"),
        (well(internet=False), "internet", YELLOW, "cs.join()"),
        (well(internet=False, platform=KAGGLE), "internet", RED, "switch Internet on"),
        (well(versions=(Version("torch", "2.8.1", "2.9"),)), "versions", RED, 'pip install -U "torch>=2.9"'),
        (well(versions=(Version("python", "3.10.2", "3.11"),)), "versions", RED, "Python 3.11 or newer"),
        (well(versions=(Version("torch", None, "2.9"),)), "versions", YELLOW, "colab-swarm[train]"),
        (on(gpu=None), "compute", YELLOW, "Colab and Kaggle"),
        (on(gpu=replace(T4, free_bytes=10**9)), "compute", RED, "smaller model"),
        (on(free_ram_bytes=10**8), "memory", RED, "restart the kernel"),
        (on(free_disk_bytes=10**8), "disk", YELLOW, "delete old"),
        (on(open_files=256), "open files", YELLOW, "ulimit -n 1024"),
        (well(membership=None, refused="expired"), "swarm", RED, "cs.doctor"),
        (swarm(linked=0), "swarm", YELLOW, "swarm.invite()"),
        (reached(ReachabilityLevel.OUTGOING), "reachability", YELLOW, "colab-swarm backbone"),
        (reached(ReachabilityLevel.UNVERIFIED), "reachability", YELLOW, "run the doctor again"),
        (reached(ReachabilityLevel.RELAYED, "3fa9c0de"), "reachability", YELLOW, "nothing to do"),
        (swarm(skew_s=-90.0), "clock", YELLOW, "set-ntp"),
        (swarm(skew_s=900.0), "clock", RED, "set-ntp"),
        (swarm(uplink=None), "bandwidth", YELLOW, "run the doctor again"),
        (swarm(uplink=UplinkFacts(1e6, 1e8, 0.1)), "bandwidth", YELLOW, "compression='int8'"),
        (
            well(prediction=replace(PREDICTION, averaging_s=90.0)),
            "prediction",
            YELLOW,
            "target_batch_size=4096",
        ),
        (well(prediction=replace(PREDICTION, step_s=3000.0)), "prediction", YELLOW, "invite more peers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_each_problem_is_found_and_has_its_fix(facts: DoctorFacts, name: str, light: Light, fix: str) -> None:
    found = check(facts, name)
    assert found.light is light and fix in found.fix
    assert all(each.fix for each in diagnose(facts) if each.light is not Light.GREEN)


def test_the_micro_batch_comes_with_its_arithmetic() -> None:
    text = check(WELL, "compute").text
    assert "(0.8 × 14.5 GB free − 18.1 M parameters × 16 B) / 1,605.9 MB a sample: micro-batch 4" in text


def test_reachability_says_why_it_is_not_better() -> None:
    relayed = Reachability(
        ReachabilityLevel.RELAYED,
        "3fa9c0de",
        reasons=((ReachabilityLevel.DIRECT, "nobody could dial 10.0.0.2"),),
    )
    text = check(swarm(reachability=relayed), "reachability").text
    assert text == "relayed by 3fa9c0de; not direct: nobody could dial 10.0.0.2"


def test_the_prediction_is_shown_in_words() -> None:
    assert check(WELL, "prediction").text == (
        "first sample in 12 s; 10 samples/s here, 25% of a step; a step of 4,096 samples every 2 min, "
        "of which 15 s averaging; 2.2 GB per hour"
    )


def test_infinite_bandwidth_is_shown_in_words() -> None:
    assert "too fast to measure up" in check(swarm(uplink=UplinkFacts(math.inf, 1e9, 0.0)), "bandwidth").text


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.9.0+cu126", (2, 9)), ("3.13.0rc1", (3, 13)), ("47", (47,)), ("1.0.dev3", (1,)), ("", ())],
)
def test_versions_are_compared_by_their_numbers(version: str, expected: tuple[int, ...]) -> None:
    assert numbers(version) == expected
