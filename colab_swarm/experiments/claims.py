"""The claims of the papers, compared with the results of the experiments.

`claims.toml` has each claim of the figures and tables that are reproduced. For each experiment, a function turns the
figures of a run into findings: our figure, a verdict, and the reason of the verdict. `full_runs.json` has the findings
of the last runs of the full presets. In a copy of the repository, `python -m tests.benchmarks NAME --store` writes this
file.

| verdict | meaning |
|---|---|
| agrees | our figure is within the tolerance that the notebook states |
| differs | our figure is outside this tolerance; the reason is one that the figures of the run show, or "not known" |
| fitted | one of our constants was taken from the paper's result, so our figure had to agree |
| not judged | our figure is not exact enough: its noise over seeds, two standard errors, allows both answers |
| not measured | no run here can judge the claim, or no run has measured it |
"""

import json
import math
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from colab_swarm.experiments.dedloc import SIZES, STRATEGIES, TABLE
from colab_swarm.experiments.elastic_consistency import BETAS, STRESS
from colab_swarm.experiments.report import Report

CLAIMS_FILE = Path(__file__).with_name("claims.toml")
FULL_RUNS_FILE = Path(__file__).with_name("full_runs.json")
AGREES = "agrees"
DIFFERS = "differs"
FITTED = "fitted"
NOT_JUDGED = "not judged"
NOT_MEASURED = "not measured"
NOT_KNOWN = "not known"
ONE_SEED = "one seed does not show the noise"
Figures: TypeAlias = Mapping[str, float]


class Claim(NamedTuple):
    """A claim of a paper, and the paper's figure. ``not_measured`` says why no run here can judge the claim.

    A figure ``over_seeds`` has only one seed in the quick preset, which is not enough to judge it.
    """

    key: str
    text: str
    source: str
    paper: str
    not_measured: str = ""
    over_seeds: bool = False


class Finding(NamedTuple):
    """Our figure for a claim. ``reason`` says why it differs, what was fitted, or why there is no figure."""

    ours: str
    verdict: str
    reason: str = ""


Findings: TypeAlias = dict[str, Finding]


@cache
def claims_of(experiment: str) -> tuple[Claim, ...]:
    """Return the claims of the experiment with this name of its report, in the order of the table."""
    tables = tomllib.loads(CLAIMS_FILE.read_text())
    return tuple(Claim(**claim) for claim in tables[experiment])


def full_run_of(experiment: str) -> dict[str, Any] | None:
    """Return the stored findings of the full preset with date, machine, version and minutes, or None."""
    runs: dict[str, dict[str, Any]] = json.loads(FULL_RUNS_FILE.read_text())
    return runs.get(experiment)


def findings_of(report: Report) -> Findings:
    """Return a finding for each claim of the report's experiment; without figures, no claim was measured."""
    measured: Findings = {}
    if report.rows:
        measured = FINDINGS[report.name](report.figures)
    findings = {}
    for claim in claims_of(report.name):
        finding = measured.get(claim.key, Finding("", NOT_MEASURED, claim.not_measured))
        if report.quick and claim.over_seeds and finding.ours:
            finding = Finding(finding.ours, NOT_JUDGED, ONE_SEED)
        findings[claim.key] = finding
    return findings


def compare(report: Report) -> str:
    """Return a table of the paper's claims: its figure, ours, the verdict, and the full preset's figure and verdict.

    Below the table are the numbered reasons, and the date and machine of the full preset.
    """
    run = full_run_of(report.name)
    full: Findings = {}
    ran = NOT_MEASURED
    if run is not None:
        full = {key: Finding(*finding) for key, finding in run["findings"].items()}
        ran = (
            f"{run['date']}, {run['minutes']} processor minutes on {run['machine']}, version {run['version']}"
        )
    table = [("", "paper", "ours", "verdict", "full preset")]
    reasons = dict[str, str]()

    def with_reason(verdict: str, reason: str) -> str:
        if not reason:
            return verdict
        return f"{verdict} {reasons.setdefault(reason, f'[{len(reasons) + 1}]')}"

    findings = findings_of(report)
    for claim in claims_of(report.name):
        finding = findings[claim.key]
        verdict = finding.verdict
        if report.quick and verdict != NOT_MEASURED:
            verdict += ", quick"
        stored = full.get(claim.key, Finding("", NOT_MEASURED))
        full_verdict = stored.verdict
        if stored.ours:
            full_verdict = f"{stored.ours}: {stored.verdict}"
        verdict = with_reason(verdict, finding.reason)
        table.append(
            (claim.text, claim.paper, finding.ours, verdict, with_reason(full_verdict, stored.reason))
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    notes = [f"{number} {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes, f"full preset: {ran}"])


def _judge(agrees: bool, ours: str, reason: str = NOT_KNOWN) -> Finding:
    if agrees:
        return Finding(ours, AGREES)
    return Finding(ours, DIFFERS, reason)


def _fit(fits: bool, ours: str, constant: str) -> Finding:
    """Judge a figure that follows from a ``constant`` of the paper, so that it must agree."""
    if fits:
        return Finding(ours, FITTED, constant)
    return Finding(ours, DIFFERS, NOT_KNOWN)


def _within(tolerance: float, value: float, published: float) -> bool:
    return abs(value / published - 1) <= tolerance


class Seeds(NamedTuple):
    """The mean of a figure over seeds, and two of its standard errors."""

    value: float
    noise: float

    @classmethod
    def of(cls, figures: Figures, key: str) -> "Seeds":
        return cls(figures[key], 2 * figures.get(f"{key}_error", 0.0))

    def minus(self, other: "Seeds") -> "Seeds":
        return Seeds(self.value - other.value, math.hypot(self.noise, other.noise))

    def is_above(self, limit: float, ours: str) -> Finding:
        """Judge a figure that is above ``limit`` in the paper."""
        if abs(self.value - limit) <= self.noise:
            reason = f"the noise over seeds is {self.noise:.2g} to each side"
            return Finding(ours, NOT_JUDGED, reason)
        return _judge(self.value > limit, ours)

    def is_below(self, limit: float, ours: str) -> Finding:
        return Seeds(-self.value, self.noise).is_above(-limit, ours)


def _leads(figures: Figures, leading: Iterable[str], behind: Iterable[str]) -> Finding:
    """Judge an order that the paper found: each figure in ``leading`` is above each figure in ``behind``."""
    leads = [
        Seeds.of(figures, one).minus(Seeds.of(figures, other)) for one, other in product(leading, behind)
    ]
    least = min(leads)
    return least.is_above(0.0, f"{least.value:.1f}")


def _albert(figures: Figures) -> Findings:
    high_s = figures["high_bandwidth_s"]
    slowdown = figures["heterogeneous_s"] / high_s
    load = figures["load_balancing_gain"]
    whole = figures["whole_peers_gain"]
    auxiliary = figures["auxiliary_gain"]
    part_time = figures["part_time_share"]
    without = high_s / figures["auxiliary_s"]
    helps = part_time > 1.03 * without
    bottleneck = NOT_KNOWN
    # with 24 trainers instead of 16, computing takes two thirds of the time
    if figures["part_time_on_s"] > high_s * 2 / 3:
        bottleneck = "averaging takes longer than computing, so more trainers save no time"
    findings = {
        "slowdown": _fit(
            _within(0.1, slowdown, 2.5), f"{slowdown:.2f} times", "the time to compute was chosen so"
        ),
        "load_balancing": _judge(_within(0.1, load, 1.47), f"{load:.2f} times"),
        "whole_peers": _judge(_within(0.1, whole, 1.47), f"{whole:.2f} times"),
        "auxiliary": _judge(auxiliary > 1.6, f"{auxiliary:.2f} times"),
        "time_varying": _judge(_within(0.1, part_time, 0.74), f"{part_time:.0%}"),
        "part_time_helps": _judge(helps, f"{without:.0%} to {part_time:.0%}", bottleneck),
    }
    for name in ("high_bandwidth", "load_balancing"):
        crowd_s = figures[f"scaling_{name}_64_s"]
        faster = figures[f"scaling_{name}_8_s"] / crowd_s
        reason = NOT_KNOWN
        if crowd_s > 1.03 * high_s / 4:
            reason = "averaging takes longer than computing there"
        findings[f"scaling_{name}"] = _judge(faster >= 4, f"{faster:.1f} times", reason)
    return findings


def _groups(figures: Figures) -> Findings:
    error = figures["error_16"]
    undisturbed = [figures[f"undisturbed_m{size}"] for size in SIZES]
    *small_groups, one_group = undisturbed
    parts = ", ".join(f"{part:.0%}" for part in undisturbed)
    calm = figures["size_16_q0"]
    failing = figures["size_16_q50"]
    beside = figures["one_process"]
    spread = figures["spread_of_trainers"]
    return {
        "one_process": _judge(beside < 1e-6, f"{beside:.0e}"),
        "deviation": _judge(spread == 0, f"{spread:.0e}"),
        "exact": _judge(error < 1e-6, f"{error:.0e}"),
        "failure_is_local": _judge(min(small_groups) > one_group, parts),
        "all_reduce": _judge(calm == 16, f"{calm:.0f}"),
        "pairs": _judge(failing == 2, f"{failing:.0f}"),
    }


def _strategy(figures: Figures) -> Findings:
    findings = {}
    for name, (_, published) in TABLE.items():
        ours = [figures[f"{name}_{kind}_simulated_s"] for kind in STRATEGIES]
        for kind, seconds, paper in zip(STRATEGIES, ours, published, strict=True):
            reason = NOT_KNOWN
            least = figures[f"{name}_{kind}_s"]
            if least > paper:
                reason = f"25.6 million float32 values take at least {least:.2f} s over these lines"
            findings[f"{name}_{kind}_s"] = _judge(_within(0.12, seconds, paper), f"{seconds:.2f} s", reason)
        for index, kind in enumerate(("all_reduce", "server")):
            ratio = ours[index] / ours[2]
            agrees = _within(0.12, ratio, published[index] / published[2])
            findings[f"{name}_{kind}_ratio"] = _judge(agrees, f"{ratio:.2f}")
    solve_ms = figures["solve_ms_64"]
    findings["solve"] = _judge(solve_ms < 50, f"{solve_ms:.1f}")
    for name, paper in (("all_reduce", 0.25), ("server", 1.0), ("byteps", 1 / 3), ("client", 0.0)):
        share = figures[f"special_{name}"]
        findings[name] = _judge(abs(share - paper) < 0.01, f"{share:.2f}")
    return findings


def _swav(figures: Figures) -> Findings:
    constant = "the 1080 Ti's speed was read off the paper's curves"
    findings = {}
    for name, paper in (("server", 0.40), ("workstation", 0.52)):
        saved = 1 - figures["hybrid_s"] / figures[f"{name}_s"]
        findings[name] = _fit(abs(saved - paper) <= 0.06, f"{saved:.0%}", constant)
    speed = figures["server_s"] / figures["workstation_s"]
    findings["old_hardware"] = Finding(
        f"{speed:.0%}", NOT_JUDGED, "the paper gives no figure for 'reasonable'"
    )
    return findings


def _vc_asgd(figures: Figures) -> Findings:
    variable = "e_over_e+1"
    faster = ("0.7", "0.95", variable)
    behind = figures["serial.final"] - figures[f"{variable}.final"]
    early = Seeds.of(figures, "serial.early").minus(Seeds.of(figures, f"{variable}.early"))
    end = Seeds.of(figures, "serial.final").minus(Seeds.of(figures, f"{variable}.final"))
    gap = early.minus(end)
    reason = NOT_KNOWN
    # a lead of 9 points is possible only if training with units has an accuracy of at most 91
    if figures[f"{variable}.final"] > 91:
        reason = f"these images are easier: e/(e+1) reaches {figures[f'{variable}.final']:.0f} %"

    def leads(kind: str, leading: Iterable[str], behind: Iterable[str]) -> Finding:
        return _leads(
            figures, [f"{alpha}.{kind}" for alpha in leading], [f"{alpha}.{kind}" for alpha in behind]
        )

    return {
        "early": leads("early", ["0.7"], ["0.95"]),
        "late": leads("late", ["0.95"], ["0.7"]),
        "spread": leads("spread", ["0.7"], ["0.95"]),
        "slowest": leads("early", faster, ["0.999"]),
        "slowest_spread": leads("spread", faster, ["0.999"]),
        "variable": leads("early", [variable], ["0.95"]),
        "variable_spread": leads("late_spread", ["0.7", "0.95"], [variable]),
        "serial": _judge(abs(behind - 9) <= 3, f"{behind:.1f}", reason),
        "gap": gap.is_above(0.0, f"{gap.value:.1f}"),
        "smooth": leads("change", ["serial"], [variable]),
    }


def _preemption(figures: Figures) -> Findings:
    constants = "times, probabilities and prices are the paper's: only its arithmetic is checked"
    findings = {}
    for percent, paper in ((5, 50), (20, 200)):
        formula = figures[f"formula_{percent}_min"]
        simulated = figures[f"simulated_{percent}_min"]
        one_epoch = figures[f"simulated_{percent}_one_epoch_min"]
        reason = NOT_KNOWN
        if simulated > 1.3 * one_epoch:
            reason = (
                f"each epoch waits for its last units: {one_epoch:.0f} minutes if all units were one epoch"
            )
        fits = _within(0.01, formula, paper)
        findings[f"formula_{percent}"] = _fit(fits, f"{formula:.0f}", constants)
        findings[f"simulated_{percent}"] = _judge(_within(0.3, simulated, paper), f"{simulated:.0f}", reason)
    standard = figures["standard_usd"]
    preemptible = figures["preemptible_usd"]
    saved = 1 - preemptible / standard
    findings["standard"] = _fit(_within(0.01, standard, 13.4), f"${standard:.2f}", constants)
    findings["preemptible"] = _fit(_within(0.01, preemptible, 4), f"${preemptible:.2f}", constants)
    findings["saved"] = _fit(_within(0.01, saved, 0.7), f"{saved:.0%}", constants)
    return findings


def _moe_throughput(figures: Figures) -> Findings:
    findings = {}
    for kind in ("ffn", "transformer"):
        kept = Seeds.of(figures, f"{kind}_retained_at_200ms")
        passed_on = Seeds.of(figures, f"{kind}_model_parallel_retained_at_200ms")
        ratio = figures[f"{kind}_vs_model_parallel_at_200ms"]
        reason = "model-parallel only waits here, so the ratio is the speed of our processor and blocks"
        findings[f"{kind}_kept"] = kept.is_above(0.9, f"{kept.value:.0%}")
        findings[f"{kind}_degrades"] = passed_on.is_below(0.1, f"{passed_on.value:.1%}")
        findings[f"{kind}_ratio"] = Finding(f"{ratio:.0f}", NOT_JUDGED, reason)
    few, some = (figures[f"checkpointing_factor_room_{room}"] for room in (2, 4))
    reason = "the paper says 'a few' batches; that these are 2 and 4 is ours"
    findings["checkpointing"] = Finding(f"{few:.1f}, {some:.1f} times", NOT_JUDGED, reason)
    return findings


def _moe_transfers(figures: Figures) -> Findings:
    whole = Seeds.of(figures, "e16_low_float32_mean_accuracy")
    lost = whole.minus(Seeds.of(figures, "e16_low_int8_mean_accuracy"))
    return {"eight_bits": lost.is_below(1.0, f"{lost.value:.1f}")}


def _moe_convergence(figures: Figures) -> Findings:
    lost = {}
    for model in ("ffn", "e16", "e64", "e1024"):
        # the quick preset has no run with 1,024 experts
        if f"{model}_low_mean_accuracy" in figures:
            low = Seeds.of(figures, f"{model}_low_mean_accuracy")
            lost[model] = low.minus(Seeds.of(figures, f"{model}_high_mean_accuracy"))
    losses = [f"{points.value:.0f}" for points in lost.values()]
    ffn, *mixtures = lost.values()
    *smaller, largest = mixtures
    calm = Seeds.of(figures, "e64_low_mean_accuracy")
    failing = calm.minus(Seeds.of(figures, "e64_failures_mean_accuracy"))
    return {
        "harder": min(lost.values()).is_above(0.0, ", ".join(losses)),
        "mixtures": ffn.minus(max(mixtures)).is_above(0.0, ", ".join(losses)),
        "largest": min(smaller).minus(largest).is_above(0.0, ", ".join(losses[1:])),
        "failures": failing.is_below(5.0, f"{failing.value:.1f}"),
    }


def _beam(figures: Figures) -> Findings:
    findings = {}
    for name, paper in (("100", 317), ("1k", 528), ("10k", 764)):
        ms = figures[f"cold_ms_{name}"]
        findings[name] = _judge(_within(0.25, ms, paper), f"{ms:.0f}")
    growth = figures["cold_ms_10k"] / figures["cold_ms_100"]
    findings["growth"] = _judge(growth <= 2 * 1.25, f"{growth:.1f} times")
    return findings


def _elastic(figures: Figures) -> Findings:
    schedulers = {
        "stale": ("stale_3_float32",),
        "stale_own": ("stale_3_own_float32",),
        "single_steps": ("stale_3_single_float32",),
        "compression": ("synchronous_int8", "synchronous_topk:0.01", "synchronous_onebit"),
        "crash": ("crash_1_float32",),
        "crash_own": ("crash_1_own_float32",),
        "variance": ("variance_float32",),
        "norm": ("norm_l2_float32", "norm_l0_float32"),
    }
    findings = {}
    for row, cases in schedulers.items():
        # np.max returns NaN if a run diverged
        ratio = float(np.max([figures[f"bound_ratio_{case}"] for case in cases]))
        findings[row] = _judge(ratio <= 1, f"{ratio:.2g}")
    accuracies = [figures[f"accuracy_mlp_beta_{beta:g}"] for beta in BETAS]
    distances = [figures[f"distance_mlp_beta_{beta:g}"] for beta in BETAS]
    correlation = 0.0
    if len(set(accuracies)) > 1 and len(set(distances)) > 1:
        correlation = statistics.correlation(accuracies, distances)
    drops = []
    # the quick preset has only one model
    for model in STRESS:
        if f"accuracy_{model}_beta_1" in figures:
            whole = Seeds.of(figures, f"accuracy_{model}_beta_1")
            drops.append(whole.minus(Seeds.of(figures, f"accuracy_{model}_beta_0.8")))
    lost = max(drops)
    consistent = Seeds.of(figures, "accuracy_mlp_beta_1")
    late = consistent.minus(Seeds.of(figures, "accuracy_mlp_variance"))
    helps = Seeds.of(figures, "topk_alone_drop").minus(Seeds.of(figures, "topk_feedback_drop"))
    points = f"{figures['topk_feedback_drop']:.1f}, {figures['topk_alone_drop']:.1f}"
    # only the benchmark measures this
    if "step_ms_l0_0.8" in figures:
        faster = figures["step_ms_synchronous"] / figures["step_ms_l0_0.8"]
        reason = "one run, beside our own synchronous steps instead of BytePS"
        findings["speed"] = Finding(f"{faster:.2f} times", NOT_JUDGED, reason)
    constant = "rates are so high that accuracy depends on consistency; at usual ones all end equal"
    for name in ("onebit", "topk:0.01"):
        gamma = figures[f"gamma_{name}"]
        findings[f"gamma_{name}"] = _judge(gamma <= figures[f"gamma_bound_{name}"], f"{gamma:.3f}")
    findings["correlation"] = _fit(correlation < -0.7, f"{correlation:.2f}", constant)
    findings["accuracy"] = lost.is_below(1.0, f"{lost.value:.1f}")
    findings["variance_accuracy"] = late.is_below(1.0, f"{late.value:.1f}")
    findings["feedback"] = helps.is_above(0.0, points)
    return findings


def _loss_per_byte(figures: Figures) -> Findings:
    fewer = figures["float32_4_mb"] / figures["diloco_4_mb"]
    steps = f"a round comes each {fewer:.0f} steps here, not each 500"
    loss = figures["diloco_4_loss"] / figures["float32_4_loss"]
    smaller = figures["sparse_contribution_smaller"]
    sparse = figures["sparse_4_loss"] / figures["diloco_4_loss"]
    muon = figures["muon_4_loss"] / figures["often_4_loss"]
    # losses that differ by less than 2 % are treated as equal, so a lower loss is below this ratio
    lower = 0.98
    return {
        "diloco_bytes": _judge(_within(0.1, fewer, 500), f"{fewer:.0f} times", steps),
        "diloco_loss": _judge(loss <= 1.02, f"{loss:.2f}"),
        "sparse_bytes": _fit(
            _within(0.1, smaller, 146), f"{smaller:.0f} times", "the codec's format is the paper's"
        ),
        "sparse_loss": _judge(sparse < lower, f"{sparse:.2f}"),
        "muon_loss": _judge(muon < lower, f"{muon:.2f}"),
    }


FINDINGS: dict[str, Callable[[Figures], Findings]] = {
    "albert": _albert,
    "groups": _groups,
    "strategy": _strategy,
    "swav": _swav,
    "vc_asgd": _vc_asgd,
    "preemption": _preemption,
    "moe_throughput": _moe_throughput,
    "moe_transfers": _moe_transfers,
    "moe_convergence": _moe_convergence,
    "beam": _beam,
    "elastic": _elastic,
    "loss_per_byte": _loss_per_byte,
}
"""For each experiment, by the name of its report, the function that turns its figures into findings."""
