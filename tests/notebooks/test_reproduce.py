"""The papers' experiments as notebooks, from top to bottom with their quick presets; tutorials are nbval's business."""

from pathlib import Path

import pytest

from tests.notebooks.cells import code_cells
from tests.notebooks.kernel import opened
from tests.notebooks.regenerate import REPRODUCED

LONG = ("albert", "elastic", "experts", "loss_per_byte", "strategy", "swav", "workunits")
HOLDS = {
    "albert": [
        "1.2 < figures['load_balancing_gain'] < figures['auxiliary_gain'] < 1.9",
        "figures['part_time_share'] > 0.65",  # coarser chunks than at full size
        "figures['scaling_high_bandwidth_64_s'] < figures['scaling_high_bandwidth_8_s'] / 7",
        "figures['whole_peers_s'] < figures['whole_peers_sequential_s']",
    ],
    "loss_per_byte": [
        "figures['sparse_4_mb'] < figures['diloco_4_mb'] / 50 and figures['overlap_hidden'] > 0.9",
        "figures['lora_round_kb'] <= 100 and figures['waits_350m_overlap'] <= 0.1",
    ],
    "strategy": [
        "figures['speedup_c'] >= 1.9 and figures['speedup_c_simulated'] >= 1.65",
        "all(figures[f'{one}_adaptive_s'] <= 1.03 * figures[f'{one}_all_reduce_s'] for one in 'ab')",
        "figures['d_adaptive_s'] <= 1.05 * figures['d_server_s']",
        "figures['d_adaptive_simulated_s'] <= 1.05 * figures['d_server_simulated_s']",
        "figures['prediction_error'] < 0.25",  # the forecast knows no window of streams, the simulation does
    ],
}
"""What the benchmark that a notebook shows has to give, as in DeDLOC's section 4.2 and Table 1, and in SparseLoCo."""


@pytest.mark.parametrize("path", REPRODUCED, ids=lambda path: path.stem)
def test_it_is_stored_with_its_quick_preset(path: Path) -> None:
    assert "QUICK = True" in "\n".join(code_cells(path)).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.ordeal] * (p.stem in LONG)) for p in REPRODUCED],
    ids=lambda path: path.stem,
)
def test_an_experiment_runs_to_its_end_and_draws_its_figure(path: Path, tmp_path: Path) -> None:
    with opened(f"reproduce/{path.stem}", tmp_path) as kernel:
        shown = kernel.run_all()
        for holds in HOLDS.get(path.stem, ()):
            kernel.execute(f"assert {holds}, figures")
    assert any("iVBORw0KGgo" in output for output in shown)  # a PNG
