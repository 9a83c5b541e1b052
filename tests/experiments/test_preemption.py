"""Preemptible instances: what the simulated ones cost, as a share of what the paper's formula says."""

from dataclasses import replace
from statistics import fmean

import pytest

from colab_swarm.experiments.vc_asgd import P5C5T2, PreemptionModel, simulate_preemption
from colab_swarm.workunits import dispatcher

MODEL = PreemptionModel(
    volunteers=2, slots=1, units=400, unit_s=144.0, deadline_s=300.0, kill_probability=0.05
)
"""The paper's times and probability: 2.4 and 5 minutes, 5 %."""


def extra_by_formula(model: PreemptionModel, seeds: int) -> float:
    """Extra time in simulations, as a share of n p t_o."""
    results = [simulate_preemption(model, seed) for seed in range(seeds)]
    assert all(kills > 0 for _, kills in results)
    extra_s = fmean(seconds for seconds, _ in results) - model.undisturbed_s
    return extra_s / (model.expected_s - model.undisturbed_s)


@pytest.mark.slow
def test_in_one_long_epoch_only_the_lost_work_costs_time_and_not_the_timeout() -> None:
    """A lost unit has lost half its time on average, if a new instance takes units at once."""
    lost = MODEL.unit_s / 2 / MODEL.deadline_s
    assert extra_by_formula(MODEL, seeds=6) == pytest.approx(lost, abs=0.1)
    replaced_later = replace(MODEL, restart_s=MODEL.deadline_s - MODEL.unit_s / 2)
    assert extra_by_formula(replaced_later, seeds=6) == pytest.approx(1.0, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.05, pytest.param(0.2, marks=pytest.mark.ordeal)])
def test_the_papers_epochs_cost_at_most_1_3_of_the_formula(p: float) -> None:
    model = replace(MODEL, volunteers=5, slots=2, units=50, epochs=40, kill_probability=p)
    assert extra_by_formula(model, seeds=3) < 1.3


@pytest.mark.slow
def test_without_copies_of_overdue_units_they_cost_far_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "COPIES", 0)
    model = replace(MODEL, volunteers=5, slots=2, units=50, epochs=8)
    assert extra_by_formula(model, seeds=6) > 1.5


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


@pytest.mark.parametrize(("probability", "minutes"), [(0.0, 0), (0.05, 50), (0.2, 200)])
def test_the_formula_gives_the_minutes_that_the_paper_prints(probability: float, minutes: float) -> None:
    model = replace(P5C5T2, kill_probability=probability)
    assert (model.expected_s - model.undisturbed_s) / 60 == pytest.approx(minutes)
    assert model.undisturbed_s == pytest.approx(8 * 3600)
