"""`Communication`: how peers exchange gradients or parameters. `plan_communication`: a forecast of several ways. Pure.

A forecast assumes that all peers are like this peer. It takes the time of a round from the linear program that divides
a round's work among the reducers (`plan_round`). `colab_swarm.experiments.loss_per_byte` measured how many steps of
synchronous training a step of each way is worth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colab_swarm.averaging.group import RoundTerms, Ticket
from colab_swarm.averaging.strategy import encoded_bytes, mean_bytes, plan_round
from colab_swarm.errors import require
from colab_swarm.markup import settings
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import Precision, mean_codec_for
from colab_swarm.tensors.sparse import Sparse
from colab_swarm.training.records import Agreement, ProgressRecord

if TYPE_CHECKING:
    from torch import nn

_OFTEN = 3
LOCAL_STEPS = 30  # as in SparseLoCo, and the shortest interval of DiLoCo
# Time of a round over home lines in addition to the time of its bytes, because messages travel. The round's group forms
# while peers compute the last micro-batches, so this takes no further time.
_ROUND_S = 0.15
_BUCKET_S = 1.0  # the same for a round in a bucket: time until the other peers look
_MOST_WAITS = 0.5  # part of the time; a peer that waits longer gets advice
ENOUGH = 0.95  # part of the best progress; the first way that reaches this part is chosen
HOME_BPS = 20e6, 100e6  # upload and download that are assumed without measurements

MOST_LOCAL_STEPS = 1000


@dataclass(frozen=True)
class Communication:
    """How the peers of a run exchange gradients or parameters: the argument ``communication=`` of `Swarm.optimizer`.

    All peers that train one model must use equal values, except ``overlap``. `PRESETS` names common choices.

    Attributes:
        compression: codec of the gradients that peers send: float32, float16, bfloat16, int8, adaptive (int8, and
            float16 for small tensors), onebit, sparseloco (2 bits for each of the largest 1 in 64 values), or topk
            with the fraction of values to send, as in topk:0.01.
        mean_compression: codec of the averaged gradients. By default it equals ``compression``. For onebit, sparseloco
            and topk the default is float16 instead, because a mean has no error feedback. With sparseloco and topk the
            mean's zeros are not sent where this saves bytes.
        error_feedback: add the part of a gradient that compression cut off to the next gradient; costs the memory of
            two vectors. None turns it on for onebit, sparseloco and topk, where the model would be worse without it.
        overlap: the round, and the optimizer's step on copies of the parameters, run while this peer computes on.
            Updates come exactly one round late (DeDLOC, section 3.2; ZeRO-Offload). With local steps, the model
            takes the round's result as soon as it arrives, and keeps the local steps since the round began.
        local_steps: number of steps between two rounds. Every peer takes these steps alone, then the swarm averages the
            resulting parameters (DiLoCo). ``target_batch_size`` is divided among the peers: it is the number of
            samples in one local step of all peers together. Local steps divide the traffic by
            ``local_steps``. Between two rounds the models of the peers differ; `Swarm.leave` puts the parameters of the
            last round into the model. Local steps with sparseloco or topk are SparseLoCo (arXiv 2508.15706): the error
            feedback decays and replaces the outer momentum. A contribution with sparseloco has 146 times fewer bytes
            than float32.

    Raises:
        ValueError: a value is not usable, or two values do not go together.
    """

    compression: str = "float32"
    mean_compression: str = ""
    error_feedback: bool | None = None
    overlap: bool = False
    local_steps: int = 1

    def __post_init__(self) -> None:
        if not self.mean_compression:
            object.__setattr__(self, "mean_compression", mean_codec_for(self.compression))
        # Raises ValueError for an unknown codec.
        Precision(self.mean_compression)
        steps = self.local_steps
        text = f"local_steps={steps!r}: pass 1 to {MOST_LOCAL_STEPS}"
        require(isinstance(steps, int) and 1 <= steps <= MOST_LOCAL_STEPS, text)
        is_biased = mean_codec_for(self.compression) != self.compression
        if self.error_feedback is None:
            object.__setattr__(self, "error_feedback", is_biased)
        text = f"compression={self.compression!r} trains a worse model without error_feedback: leave it out"
        require(self.error_feedback or not is_biased, text)
        text = "error_feedback=True: float32 cuts nothing off, so it would only cost memory"
        require(not (self.error_feedback and self.compression == "float32"), text)

    @classmethod
    def of(cls, choice: "Communication | Plan | str") -> "Communication":
        """Return the communication for a user's choice: a `Communication` as it is, a plan's choice, or a preset."""
        if isinstance(choice, Plan):
            return choice.chosen.communication
        if isinstance(choice, cls):
            return choice
        names = ", ".join(repr(name) for name in PRESETS)
        text = (
            f"communication={choice!r:.40}: pass 'auto', one of {names}, cs.Communication(…), or "
            "swarm.plan(model, step_s=…)"
        )
        if not isinstance(choice, str) or choice not in PRESETS:
            raise ValueError(text)
        return PRESETS[choice]

    @property
    def is_sparse_local(self) -> bool:
        """True for SparseLoCo: error feedback with decay in place of an outer momentum (arXiv 2508.15706)."""
        return self.local_steps != 1 and isinstance(Precision(self.compression).widest, Sparse)

    def __repr__(self) -> str:
        return settings(self)


SYNCHRONOUS = Communication()
PRESETS = {
    "synchronous": SYNCHRONOUS,
    "float16": Communication("float16"),
    "int8": Communication("int8"),
    "diloco": Communication(local_steps=LOCAL_STEPS, overlap=True),
    "sparseloco": Communication("sparseloco", local_steps=LOCAL_STEPS, overlap=True),
}
"""The first three presets have a round at each step of the swarm. In the others each peer takes 30 steps alone."""
WAYS = {
    "each step, float32": SYNCHRONOUS,
    "each step, float16": PRESETS["float16"],
    "each step, int8": PRESETS["int8"],
    f"each {_OFTEN} steps, sparseloco": Communication("sparseloco", local_steps=_OFTEN, overlap=True),
    f"each {LOCAL_STEPS} steps, sparseloco": PRESETS["sparseloco"],
    f"each {LOCAL_STEPS} steps, int8": Communication(
        "int8", error_feedback=True, local_steps=LOCAL_STEPS, overlap=True
    ),
}
_WORTH = dict(zip(WAYS, (1.0, 1.0, 1.0, 0.85, 0.5, 0.3), strict=True))
"""How many synchronous float32 steps give the same loss as one step of each way; after 600 steps of a small model."""


@dataclass(frozen=True)
class Forecast:
    """Expected cost and progress of one way to communicate."""

    name: str
    communication: Communication
    round_s: float
    sent_bytes: float  # bytes that a peer sends in a round
    waits: float  # part of the time in which a peer does not compute
    steps_per_hour: float  # steps of ``target_batch_size`` samples
    worth_per_hour: float  # synchronous steps that give about the same loss

    @property
    def mb_per_hour(self) -> float:
        """Megabytes that a peer sends in an hour; over links it receives about as much."""
        return self.sent_bytes * self.steps_per_hour / self.communication.local_steps / 1e6


@dataclass(frozen=True)
class Plan:
    """All forecasts, the ``chosen`` one, and ``why``.

    Pass a plan as ``communication=`` to `Swarm.optimizer`, at all peers.
    """

    forecasts: tuple[Forecast, ...]
    chosen: Forecast
    why: str

    def __repr__(self) -> str:
        rows = [("a round", "seconds", "MB an hour", "waits", "steps an hour", "worth")]
        for forecast in self.forecasts:
            mark = "  "
            if forecast == self.chosen:
                mark = "> "
            rows.append(
                (
                    mark + forecast.name,
                    f"{forecast.round_s:.3g}",
                    f"{forecast.mb_per_hour:,.3g}",
                    f"{forecast.waits:.0%}",
                    f"{forecast.steps_per_hour:,.0f}",
                    f"{forecast.worth_per_hour:,.0f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            figures = " ".join(map(str.rjust, row[1:], widths[1:]))
            lines.append(f"{row[0]:<{widths[0]}} {figures}")
        lines.append(self.why)
        return "\n".join(lines)


def plan_communication(
    model: "nn.Module | int",
    step_s: float,
    peers: int,
    line_bps: tuple[float | None, float | None],
    *,
    in_bucket: bool = False,
    gb_per_hour: float | None = None,
) -> Plan:
    """Forecast several ways to communicate, and choose the one with the most progress per hour.

    Args:
        model: the model, or its number of trained values.
        step_s: seconds in which all peers together compute a step of ``target_batch_size`` samples.
        line_bps: upload and download of each peer, bits per second; None assumes a home's line.
        gb_per_hour: maximum that a peer may send in an hour, in units of 10^9 bytes; None for no limit.
        in_bucket: True if rounds are objects in a bucket, where each peer reads all contributions.
    """
    if isinstance(model, int):
        numel = model
    else:
        numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    require(numel > 0 and step_s > 0, f"{numel} trained values, step_s={step_s}: both must be above 0")
    require(gb_per_hour is None or gb_per_hour > 0, f"gb_per_hour={gb_per_hour}: pass a number above 0")
    most_mb = math.inf if gb_per_hour is None else 1000 * gb_per_hour
    line = (line_bps[0] or HOME_BPS[0], line_bps[1] or HOME_BPS[1])
    forecasts: list[Forecast] = []
    for name, way in WAYS.items():
        codec = way.compression
        if not in_bucket:
            round_s, sent_bytes = _over_links(codec, numel, peers, line)
        elif way.local_steps > 1:
            sent_bytes = float(encoded_bytes(codec, numel))
            round_s = _BUCKET_S + 8 * sent_bytes / line[0] + 8 * peers * sent_bytes / line[1]
        else:
            # A bucket is too slow for a round at each step.
            continue
        forecasts.append(_forecast(name, way, step_s, round_s, sent_bytes))
    allowed = [forecast for forecast in forecasts if forecast.mb_per_hour <= most_mb]
    if allowed:
        enough = ENOUGH * max(forecast.worth_per_hour for forecast in allowed)
        chosen = next(forecast for forecast in allowed if forecast.worth_per_hour >= enough)
    else:
        chosen = min(forecasts, key=lambda forecast: forecast.mb_per_hour)
    return Plan(tuple(forecasts), chosen, _why(forecasts, chosen, most_mb))


def elected_agreement(records: Mapping[PeerId, ProgressRecord]) -> Agreement:
    """Return the agreement (the shared settings) of most of the training peers; empty if no peer trains."""
    agreements = []
    for record in records.values():
        if record.agreement and not record.syncing:
            agreements.append(record.agreement)
    return max(sorted(set(agreements)), key=agreements.count, default=())


def communication_by(agreement: Agreement) -> Communication:
    """Return how the peers have agreed to communicate."""
    agreed = dict(agreement)
    compression = agreed.get("compression", "float32")
    mean_compression = agreed.get("mean_compression", "")
    local_steps = agreed.get("local_steps", "")
    if not local_steps.isdecimal():
        return Communication(compression, mean_compression)
    is_exact = compression in ("float32", "float16", "bfloat16")
    return Communication(compression, mean_compression, not is_exact, True, int(local_steps))


def _over_links(codec: str, numel: int, peers: int, line: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a round, and the bytes that a peer sends."""
    terms = RoundTerms("", 0, b"", numel, codec=codec, mean_codec=mean_codec_for(codec))
    round_s = 0.0
    if peers > 1:
        tickets = [Ticket(terms, 1.0, upload_bps=line[0], download_bps=line[1])] * peers
        round_s = _ROUND_S + plan_round(tickets, [1.0] * peers).averaging_s
    others = (peers - 1) / peers
    return round_s, others * (encoded_bytes(codec, numel) + mean_bytes(terms, peers))


def _forecast(name: str, way: Communication, step_s: float, round_s: float, sent: float) -> Forecast:
    computed_s = step_s * way.local_steps
    period_s = computed_s + round_s
    if way.overlap:
        period_s = max(computed_s, round_s)
    steps_per_hour = 3600 * way.local_steps / period_s
    waits = 1 - computed_s / period_s
    return Forecast(name, way, round_s, sent, waits, steps_per_hour, _WORTH[name] * steps_per_hour)


def _why(forecasts: Sequence[Forecast], chosen: Forecast, most_mb: float) -> str:
    if chosen.mb_per_hour > most_mb:
        return f"{chosen.name}, which sends least, and still more than {most_mb:,.3g} MB an hour."
    if chosen == forecasts[0]:
        return f"{chosen.name}, because a peer waits only {chosen.waits:.0%} of the time."
    best = max(forecasts, key=lambda forecast: forecast.worth_per_hour)
    if best.mb_per_hour > most_mb:
        return f"{chosen.name}, because {best.name} would send {best.mb_per_hour:,.3g} MB an hour."
    before = forecasts[forecasts.index(chosen) - 1]
    part = before.worth_per_hour / chosen.worth_per_hour
    why = f"{chosen.name}, because {before.name} would make {part:.0%} of its progress."
    if chosen.waits <= _MOST_WAITS:
        return why
    return f"{why} A peer waits {chosen.waits:.0%} of the time: take a smaller model, or LoRA."
