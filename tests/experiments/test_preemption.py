"""Preemptible instances: the paper's formula for timeouts, where it holds and where not; and the money saved."""

from dataclasses import replace
from statistics import fmean

import pytest

from colab_swarm.experiments.vc_asgd import PreemptionModel, simulate_preemption

MODEL = PreemptionModel(
    volunteers=2, slots=1, units=400, unit_s=144.0, deadline_s=300.0, kill_probability=0.05, restart_s=60.0
)
"""The paper's times and probability: 2.4 and 5 minutes, 5 %."""


def extra_by_formula(model: PreemptionModel, seeds: int) -> float:
    """Extra time in simulations, as a share of n p t_o."""
    results = [simulate_preemption(model, seed) for seed in range(seeds)]
    assert all(kills > 0 for _, kills in results)
    extra_s = fmean(seconds for seconds, _ in results) - model.undisturbed_s
    return extra_s / (model.expected_s - model.undisturbed_s)


@pytest.mark.slow
def test_the_extra_time_is_the_papers_n_p_t_o_within_15_percent() -> None:
    assert extra_by_formula(MODEL, seeds=16) == pytest.approx(1.0, abs=0.15)


@pytest.mark.slow
def test_short_epochs_wait_for_lost_units_longer_than_the_formula_says() -> None:
    model = replace(MODEL, volunteers=5, slots=2, units=50, epochs=8)
    assert 2.0 < extra_by_formula(model, seeds=6) < 3.5


def test_without_kills_a_job_takes_n_t_e_and_the_same_seed_gives_the_same_job() -> None:
    model = replace(MODEL, units=40, kill_probability=0.0)
    assert simulate_preemption(model) == (pytest.approx(model.undisturbed_s, rel=0.01), 0)
    assert model.expected_s == model.undisturbed_s == 20 * 144
    model = replace(MODEL, units=60, kill_probability=0.2)
    assert simulate_preemption(model, 3) == simulate_preemption(model, 3) != simulate_preemption(model, 4)


def test_an_impossible_model_is_refused() -> None:
    for p, t_o, t_e in ((1.0, 300.0, 144.0), (-0.1, 300.0, 144.0), (0.05, 144.0, 144.0), (0.05, 300.0, 0.0)):
        with pytest.raises(ValueError, match="unit_s below deadline_s"):
            replace(MODEL, kill_probability=p, deadline_s=t_o, unit_s=t_e)
