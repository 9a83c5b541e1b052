import pytest

from colab_swarm.experiments import vc_asgd
from colab_swarm.experiments.vc_asgd import train_by_volunteers
from colab_swarm.workunits.job import Job
from tests.workunits.digits import digits_job


def small_job(alpha: float) -> Job:
    return digits_job(rows=160, subsets=8, max_epochs=3, alpha=alpha, local_epochs=4, batch_size=8)


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_larger_alpha_learns_later_and_spreads_less() -> None:
    """And a run depends on its seeds alone."""
    runs = [(0.5, 0), (0.5, 0), (0.5, 1), (0.95, 0)]
    small, again, other, large = (train_by_volunteers(small_job(alpha), seed=seed) for alpha, seed in runs)
    assert small == again != other and small[-1].mean > max(small[0].mean, large[-1].mean)
    assert all(one.low <= one.mean <= one.high for one in small)
    assert vc_asgd.spread(small) > vc_asgd.spread(large)
