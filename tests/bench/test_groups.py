from __future__ import annotations

from pathlib import Path

import pytest

from colab_swarm.bench import groups


def test_the_group_chosen_for_sixteen_falls_from_all_to_pairs() -> None:
    assert [groups.chosen_size(16, failing) for failing in (0.0, 0.1, 0.3)] == [16, 4, 2]


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_report_has_plausible_figures_and_can_be_drawn(tmp_path: Path) -> None:
    report = groups.run(quick=True)
    figures = report.figures
    assert figures["error_16"] < 1e-6 and figures["error_13"] < 1e-6
    assert figures["error_kept_m4"] < 1
    assert 0 < figures["undisturbed_m2"] <= 1
    assert max(value for key, value in figures.items() if "slowest" in key) < 10
    groups.plot(report, str(tmp_path / "groups.png"))
    assert (tmp_path / "groups.png").read_bytes().startswith(b"\x89PNG")
