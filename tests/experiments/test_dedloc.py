import pytest

from colab_swarm.experiments import dedloc


def test_the_group_chosen_for_sixteen_falls_from_all_to_pairs() -> None:
    assert [dedloc.chosen_size(16, failing) for failing in (0.0, 0.1, 0.3)] == [16, 4, 2]


SETUPS = {name: dedloc.SETUPS[name] for name in ("heterogeneous", "load_balancing", "auxiliary")}


@pytest.mark.slow
def test_balanced_shares_and_peers_that_only_reduce_speed_steps_up_as_published() -> None:
    step_s = {name: dedloc.simulate_round(*setup, dedloc.ALBERT_LARGE, 8) for name, setup in SETUPS.items()}
    batch_s = step_s["heterogeneous"] / dedloc.SLOWDOWN  # computing, which hides a shorter averaging
    naive, balanced, assisted = (max(batch_s, step_s[name]) for name in SETUPS)
    assert 1.2 < naive / balanced < naive / assisted < 1.9
