from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.experiments import elastic_consistency as elastic
from colab_swarm.experiments import learning_at_home, vc_asgd
from colab_swarm.experiments.report import Report
from colab_swarm.experiments.vc_asgd import Epoch


def drawn_reports() -> Iterator[tuple[Callable[[Report, str], None], Report]]:
    epochs, curve = [Epoch(0.5, 0.4, 0.6), Epoch(0.7, 0.6, 0.8)], [0.1, 0.5]
    yield vc_asgd.plot, Report("vc_asgd", True, curves={"0.7": [epochs], "serial": [epochs]})
    curves: dict[str, Any] = {"ffn_low": [curve], "e16_high": [curve, curve]}
    yield learning_at_home.plot_convergence, Report("moe", True, curves=curves)
    report = Report("elastic", True)
    for name in [*(f"beta_{beta:g}" for beta in elastic.BETAS), "variance"]:
        report.add_all({f"accuracy_mlp_{name}": 90.0, f"distance_mlp_{name}": 0.1})
    yield elastic.plot, report


@pytest.mark.parametrize(("plot", "report"), list(drawn_reports()))
def test_the_curves_are_drawn(tmp_path: Path, plot: Callable[[Report, str], None], report: Report) -> None:
    pytest.importorskip("matplotlib", reason="the extra [notebook] installs matplotlib")
    plot(report, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
