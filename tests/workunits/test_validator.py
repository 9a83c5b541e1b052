"""Invalid results are refused, with figures."""

from __future__ import annotations

import numpy as np
import pytest

from colab_swarm.workunits.assimilation import KNOWN, Validator, moved
from colab_swarm.workunits.job import WorkPlan

BASE = np.zeros(5418, np.float32)


def test_values_that_are_not_finite_are_counted() -> None:
    values = BASE.copy()
    values[[3, 4, 5000]] = np.nan, np.inf, -np.inf
    assert (Validator(WorkPlan()).judge(values, BASE) or "").startswith("3 of 5,418 values are not finite")


def test_another_number_of_values_is_refused() -> None:
    assert Validator(WorkPlan()).judge(BASE[:5000], BASE) == "5,000 values, 5,418 expected"


def test_a_result_that_moved_much_farther_than_usual_is_refused_after_the_first_ones() -> None:
    validator, values = Validator(WorkPlan(max_change=10)), BASE.copy()
    values[0] = 31.0
    for _ in range(KNOWN):
        assert validator.judge(values, BASE) is None
        validator.learn(3.0)
    assert validator.judge(values, BASE) == (
        "training moved the parameters by 31, usually it is 3 and 10 times as much is allowed (max_change)"
    )
    values[0] = 29.0
    assert validator.judge(values, BASE) is None


def test_the_largest_floats_do_not_overflow() -> None:
    huge = np.full(200_000, np.finfo(np.float32).max)
    assert moved(huge, -huge) == pytest.approx(2 * float(huge[0]) * 200_000**0.5)


def test_even_the_first_results_cannot_ruin_the_parameters() -> None:
    validator, base = Validator(WorkPlan()), np.full(100, 0.1, np.float32)
    assert validator.judge(base + 1, base) is None
    assert "usually" not in (validator.judge(base + np.float32(1e6), base) or "usually")
    for _ in range(10):
        validator.learn(1e30)
    assert "beyond" in (validator.judge(base + np.float32(1e25), base) or "")
