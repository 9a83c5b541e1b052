"""Figure 4 of the VC-ASGD paper, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench import vc_asgd
from colab_swarm.bench.harness import BenchReport
from colab_swarm.bench.vc_asgd import Epoch, plot, train_by_volunteers
from tests.workunits.digits import digits_job


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_run_depends_on_its_seeds_alone_and_learns() -> None:
    job = digits_job(rows=160, subsets=8, max_epochs=3, alpha=0.5, local_epochs=4, batch_size=8)
    first, again, other = (train_by_volunteers(job, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first[-1].mean > first[0].mean
    assert all(one.low <= one.mean <= one.high for one in first)


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_larger_alpha_learns_later_and_spreads_less() -> None:
    runs = {
        alpha: train_by_volunteers(
            digits_job(rows=160, subsets=8, max_epochs=3, alpha=alpha, local_epochs=4, batch_size=8), seed=0
        )
        for alpha in (0.5, 0.95)
    }
    assert runs[0.5][-1].mean > runs[0.95][-1].mean
    assert vc_asgd.spread([runs[0.5]]) > vc_asgd.spread([runs[0.95]])


@pytest.mark.ordeal
def test_the_curves_are_drawn(tmp_path: Path) -> None:
    epochs = [Epoch(0.5, 0.4, 0.6, 1.0), Epoch(0.7, 0.6, 0.8, 2.0)]
    plot(BenchReport("vc-asgd", True, curves={"0.7": [epochs], "serial": [epochs]}), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
