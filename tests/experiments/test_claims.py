"""Each claim of a reproduced figure has a row and a verdict: in the package, in its notebook, and of full presets."""

import json
import re
from pathlib import Path

import pytest

from colab_swarm.experiments import claims
from colab_swarm.experiments.claims import (
    DIFFERS,
    FINDINGS,
    FITTED,
    NOT_JUDGED,
    NOT_MEASURED,
    Finding,
    claims_of,
    compare,
)
from colab_swarm.experiments.report import Report
from tests.benchmarks.__main__ import BENCHMARKS, STORED, main
from tests.benchmarks.harness import store_findings
from tests.notebooks.regenerate import REPRODUCED

NOTEBOOKS = {
    "albert": ["albert"],
    "elastic": ["elastic"],
    "experts": ["moe_throughput", "moe_transfers", "moe_convergence", "beam"],
    "groups": ["groups"],
    "loss_per_byte": ["loss_per_byte"],
    "strategy": ["strategy"],
    "swav": ["swav"],
    "workunits": ["vc_asgd", "preemption"],
}
QUICK: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("quick_figures.json").read_text())
"""Figures of the quick presets, as the notebooks show them; and of the beam search."""
VERDICTS = {claims.AGREES, DIFFERS, FITTED, NOT_JUDGED, NOT_MEASURED}


def report_of(experiment: str, *, quick: bool = True, **changed: float) -> Report:
    report = Report(experiment, quick)
    report.add_all(QUICK[experiment] | changed)
    return report


def rows_of(text: str) -> list[list[str]]:
    """Return the tables' rows in a notebook's output: the cells of each."""
    tables = re.findall(r"^ +paper +ours +verdict +full preset\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    return [re.split(r" {2,}", line) for table in tables for line in table.splitlines()]


def shown_by(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n".join("".join(output.get("text", ())) for output in outputs)


@pytest.mark.parametrize("experiment", FINDINGS)
def test_each_claim_has_a_finding_or_a_reason_for_none(experiment: str) -> None:
    claimed = {claim.key: claim.not_measured for claim in claims_of(experiment)}
    findings = FINDINGS[experiment](QUICK[experiment])
    assert findings.keys() <= claimed.keys(), "a row without a claim"
    assert {key for key in claimed if key not in findings} == {key for key, why in claimed.items() if why}
    assert len(claimed) == len(claims_of(experiment)), "two claims of one key"
    for finding in findings.values():
        assert finding.ours and finding.verdict in VERDICTS - {NOT_MEASURED}
        assert bool(finding.reason) == (finding.verdict != claims.AGREES)


def test_the_list_and_the_notebooks_have_the_same_experiments() -> None:
    listed = re.findall(r"^\[\[(\w+)\]\]$", claims.CLAIMS_FILE.read_text(), re.MULTILINE)
    shown = [experiment for experiments in NOTEBOOKS.values() for experiment in experiments]
    assert set(listed) == FINDINGS.keys() == set(shown)
    assert sorted(NOTEBOOKS) == [path.stem for path in REPRODUCED] and len(STORED) == len(FINDINGS)


@pytest.mark.parametrize("path", REPRODUCED, ids=lambda path: path.stem)
def test_a_notebook_shows_each_claim_and_no_other_row(path: Path) -> None:
    rows = rows_of(shown_by(path))
    claimed = [(name, claim) for name in NOTEBOOKS[path.stem] for claim in claims_of(name)]
    assert [row[:2] for row in rows] == [[claim.text, claim.paper] for _, claim in claimed]
    for row, (experiment, claim) in zip(rows, claimed, strict=True):
        assert row[-2].startswith(NOT_MEASURED) or "quick" in row[-2]
        stored = (claims.full_run_of(experiment) or {"findings": {}})["findings"].get(claim.key)
        shown = f"{stored[0]}: {stored[1]}" if stored else NOT_MEASURED
        assert re.sub(r" \[\d+\]$", "", row[-1]) == shown, "run the notebook again: a full preset was stored"


RUNS = json.loads(claims.FULL_RUNS_FILE.read_text())


@pytest.mark.parametrize("experiment", RUNS)
def test_a_stored_verdict_belongs_to_a_claim(experiment: str) -> None:
    run = RUNS[experiment]
    assert run["findings"].keys() <= {claim.key for claim in claims_of(experiment)}
    assert {finding[1] for finding in run["findings"].values()} <= VERDICTS
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", run["date"]) and run["machine"] and 0 < run["minutes"] <= 40


@pytest.mark.parametrize("experiment", [name for name, run in RUNS.items() if "figures" in run])
def test_a_stored_verdict_follows_from_the_stored_figures(experiment: str) -> None:
    run = RUNS[experiment]
    derived = FINDINGS[experiment](run["figures"])
    assert {key: list(finding) for key, finding in derived.items()} == run["findings"]


@pytest.mark.parametrize(
    ("experiment", "key", "changed", "verdict"),
    [
        ("albert", "load_balancing", {"load_balancing_gain": 1.74}, DIFFERS),
        ("albert", "auxiliary", {"auxiliary_gain": 1.55}, DIFFERS),
        ("albert", "part_time_helps", {"part_time_share": 0.3}, DIFFERS),
        ("vc_asgd", "late", {"0.95.late": 90.0, "0.7.late": 94.0}, DIFFERS),
        ("vc_asgd", "spread", {"0.95.spread": 50.0}, DIFFERS),
        ("vc_asgd", "serial", {"serial.final": 60.0}, DIFFERS),
        (
            "moe_convergence",
            "largest",
            {"e64_high_mean_accuracy": 10.0, "e16_high_mean_accuracy": 50.0},
            DIFFERS,
        ),
        ("moe_convergence", "mixtures", {"ffn_low_mean_accuracy": 10.0}, DIFFERS),
        ("moe_convergence", "harder", {"ffn_high_mean_accuracy": 99.0}, DIFFERS),
        ("swav", "server", {"hybrid_s": 40.0}, DIFFERS),
        ("albert", "slowdown", {"heterogeneous_s": 13.0}, DIFFERS),
        ("preemption", "formula_5", {"formula_5_min": 60.0}, DIFFERS),
        ("preemption", "preemptible", {"preemptible_usd": 5.0}, DIFFERS),
        ("preemption", "saved", {"preemptible_usd": 6.0}, DIFFERS),
        ("groups", "one_process", {"one_process": 1e-3}, DIFFERS),
        ("strategy", "solve", {"solve_ms_64": 60.0}, DIFFERS),
        ("strategy", "client", {"special_client": 0.1}, DIFFERS),
        ("beam", "growth", {"cold_ms_10k": 900.0}, DIFFERS),
        ("elastic", "gamma_onebit", {"gamma_onebit": 1.1}, DIFFERS),
        ("loss_per_byte", "muon_loss", {"muon_4_loss": 4.39, "often_4_loss": 4.4318}, DIFFERS),
        ("loss_per_byte", "sparse_loss", {"sparse_4_loss": 3.15, "diloco_4_loss": 3.1741}, DIFFERS),
        ("elastic", "norm", {"bound_ratio_norm_l0_float32": float("nan")}, DIFFERS),
        ("elastic", "crash", {"bound_ratio_crash_1_float32": 1.1}, DIFFERS),
        ("elastic", "accuracy", {"accuracy_mlp_beta_0.8": 95.0}, DIFFERS),
        ("albert", "slowdown", {}, FITTED),
        ("swav", "workstation", {}, FITTED),
        ("preemption", "formula_20", {}, FITTED),
        ("vc_asgd", "early", {"0.7.early_error": 0.1, "0.95.early_error": 0.1}, claims.AGREES),
        ("vc_asgd", "early", {"0.7.early_error": 4.0, "0.95.early_error": 4.0}, NOT_JUDGED),
        ("vc_asgd", "early", {"0.7.early": 60.0, "0.95.early_error": 4.0}, DIFFERS),
        ("moe_transfers", "eight_bits", {"e16_low_int8_mean_accuracy_error": 0.1}, claims.AGREES),
        ("moe_transfers", "eight_bits", {"e16_low_int8_mean_accuracy_error": 5.0}, NOT_JUDGED),
    ],
)
def test_a_verdict_follows_from_the_figures_and_their_noise(
    experiment: str, key: str, changed: dict[str, float], verdict: str
) -> None:
    finding = claims.findings_of(report_of(experiment, quick=False, **changed))[key]
    assert finding.verdict == verdict and bool(finding.reason) == (verdict != claims.AGREES)
    (claim,) = (claim for claim in claims_of(experiment) if claim.key == key)
    quick = claims.findings_of(report_of(experiment, **changed))[key]
    assert quick.verdict == (NOT_JUDGED if claim.over_seeds else verdict), "one seed shows no noise"


def test_a_reason_is_given_only_where_the_figures_show_it() -> None:
    slow = report_of("preemption", quick=False, simulated_5_min=120.0, simulated_5_one_epoch_min=50.0)
    other = report_of("preemption", quick=False, simulated_5_min=120.0, simulated_5_one_epoch_min=110.0)
    assert "waits for its last units" in claims.findings_of(slow)["simulated_5"].reason
    assert claims.findings_of(other)["simulated_5"].reason == claims.NOT_KNOWN


@pytest.fixture
def full_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "full_runs.json"
    path.write_text("{}")
    monkeypatch.setattr(claims, "FULL_RUNS_FILE", path)
    return path


@pytest.mark.usefixtures("full_runs")
def test_a_quick_verdict_says_so_beside_the_stored_one_of_the_full_preset() -> None:
    before = rows_of(compare(report_of("albert")))
    assert before[1][3:] == ["agrees, quick", NOT_MEASURED]
    store_findings(report_of("albert", quick=False, load_balancing_gain=1.74), minutes=9.04)
    table = compare(report_of("albert"))
    assert rows_of(table)[1][3:] == ["agrees, quick", "1.74 times: differs [2]"]
    assert "\n[2] not known\n" in table
    assert re.search(r"full preset: 20.*, 9.0 processor minutes on \d+ cores, .*, version \d", table)
    full = rows_of(compare(report_of("albert", quick=False)))
    assert full[1][3] == "agrees" and not any("quick" in cell for row in full for cell in row)


def test_a_report_without_figures_shows_the_stored_verdicts_only(full_runs: Path) -> None:
    found = {"100": Finding("199", DIFFERS, claims.NOT_KNOWN)}
    run = {"date": "2026-12-01", "machine": "2 cores", "version": "0.1.0", "minutes": 2.0, "findings": found}
    full_runs.write_text(json.dumps({"beam": run}))
    first, second, *_ = rows_of(compare(Report("beam", True)))
    assert first[2:] == [NOT_MEASURED, "199: differs [1]"] and second[2:] == [NOT_MEASURED, NOT_MEASURED]


def test_only_full_presets_of_papers_are_stored() -> None:
    assert set(STORED) <= BENCHMARKS.keys()
    for line in (
        "albert --quick --store",
        "link --store",
        "all --store",
        "moe-convergence --faithful --store",
    ):
        with pytest.raises(SystemExit):
            main(line.split())
