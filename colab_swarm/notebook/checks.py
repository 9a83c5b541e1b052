"""The doctor's checks: traffic lights with fixes, and the prediction of a training. Pure functions."""

import enum
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colab_swarm.markup import bandwidth, count, duration, plain, text
from colab_swarm.net.metering import Speed
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook import theme
from colab_swarm.notebook.platforms import Platform

PARAMETER_BYTES = 16  # training memory per parameter: value, gradient and two moments, in float32
STATE_BYTES = 12  # what a late joiner downloads per parameter: value and two moments, in float32
USABLE = 0.8  # share of free memory to plan with; the rest is for temporaries and fragments
ROUND_TRIPS = 2  # round trips to form and start a round
MAX_MICRO_BATCH = 512
MIN_BPS = 1.0  # lowest bandwidth in the arithmetic
GB = 1e9
MIN_FREE_RAM = 1 * GB
MIN_FREE_DISK = 2 * GB
MAX_SKEW_S = 5.0
MAX_COMPENSATED_SKEW_S = 600.0
SLOW_BPS = 5e6
LONG_STEP_S = 600.0
WIDTH = 100
INDENT = " " * 18
MAX_CHARS = 10_000
UNKNOWN = Speed(math.inf, math.inf, 0.0)  # of a connection that was not measured


@dataclass(frozen=True)
class Subject:
    """A model that is to be trained here."""

    name: str  # for people, such as "ALBERT-large at 512 tokens"
    parameters: int  # number of trained values
    sample_bytes: float  # saved for the backward pass of one sample
    micro_batch: int = 0  # samples of one forward and backward pass; 0 if unknown
    samples_per_s: float = 0.0  # measured speed, with the loading of batches; 0 if unknown


@dataclass(frozen=True)
class Prediction:
    target_batch_size: int  # samples of all peers for one global step
    vector_bytes: float  # compressed size of the averaged gradients
    first_sample_s: float  # from now to this peer's first counted sample
    samples_per_s: float  # this peer's speed
    step_s: float  # time of a global step with its averaging
    averaging_s: float  # time of the averaging
    gb_per_hour: float  # sent plus received by this peer
    share: float  # this peer's part of a step's samples, 0 to 1


def predict(
    subject: Subject,
    target_batch_size: int,
    vector_bytes: float,
    others: Sequence[float] = (),
    uplink: Speed = UNKNOWN,
    *,
    reduces: bool = True,
) -> Prediction:
    """Predict a training with equal averaging shares (DeDLOC, sections 3.1 and 3.2).

    n peers of S samples/s in all, a target batch of B samples, micro-batches of m::

        step      = (B + n m) / S + averaging              each peer finishes its current micro-batch
        averaging = 2 rtt + max(sent / upload, received / download)
        sent      = received = 2 (n - 1) / n * vector      reducers; others send and receive the vector once

    A lone peer averages nothing. ``others`` are the speeds of the other trainers, whose uplinks are
    assumed to be no slower. ``reduces``: others can reach this peer, so it takes a share of the
    averaging.
    """
    peers, total, micro_batch = 1 + len(others), subject.samples_per_s + sum(others), subject.micro_batch
    moved_bytes = averaging_s = state_s = 0.0
    batch = float(math.ceil(target_batch_size / micro_batch) * micro_batch)
    if others:
        batch = target_batch_size + peers * micro_batch
        moved_bytes = vector_bytes * (2 * (peers - 1) / peers if reduces else 1)
        download_bps = max(uplink.download_bps, MIN_BPS)
        slowest_bps = min(max(uplink.upload_bps, MIN_BPS), download_bps)
        averaging_s = ROUND_TRIPS * uplink.rtt_s + 8 * moved_bytes / slowest_bps
        state_s = ROUND_TRIPS * uplink.rtt_s + 8 * subject.parameters * STATE_BYTES / download_bps
    step_s = batch / total + averaging_s
    return Prediction(
        target_batch_size,
        vector_bytes,
        first_sample_s=state_s + micro_batch / subject.samples_per_s,
        samples_per_s=subject.samples_per_s,
        step_s=step_s,
        averaging_s=averaging_s,
        gb_per_hour=2 * moved_bytes * 3600 / step_s / 1e9,
        share=subject.samples_per_s / total,
    )


def fitting_batch(free_bytes: float, subject: Subject) -> int:
    """Return the largest power of two, at most 512, that fits into ``free_bytes``; 0 if none does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * subject.parameters
    fitting = min(int(room_bytes / subject.sample_bytes), MAX_MICRO_BATCH)
    return 1 << (fitting.bit_length() - 1) if fitting > 0 else 0


class Light(enum.Enum):
    """A result: hue, symbol and word."""

    GREEN = ("green", "✔", "good")
    YELLOW = ("amber", "▲", "warning")
    RED = ("red", "✖", "problem")


GREEN, YELLOW, RED = Light.GREEN, Light.YELLOW, Light.RED
REACH_FIXES = {
    ReachabilityLevel.UNVERIFIED: "run the doctor again when another peer has joined: it tries to dial this one",
    ReachabilityLevel.RELAYED: "nothing to do; a port forwarded at the router and announce=… make it faster",
    ReachabilityLevel.OUTGOING: "if no peer can be dialled, run on any machine: colab-swarm backbone RUN",
}


@dataclass(frozen=True)
class Check:
    name: str  # what was checked
    light: Light  # the result
    text: str  # the facts
    fix: str = ""  # what to do; empty only for a green light


def summary(checks: Sequence[Check]) -> str:
    number = {light: sum(check.light is light for check in checks) for light in Light}
    verdict = "ready to train" + (", with warnings" if number[YELLOW] else "")
    if number[RED]:
        verdict = "fix the problems before you train"
    lights = ", ".join(f"{many} {light.value[1]} {light.value[2]}" for light, many in number.items() if many)
    return f"{verdict}: {lights}"


def draw(checks: Sequence[Check]) -> theme.Document:
    shown = theme.Document("doctor", summary(checks), label="report of the doctor", line=summary(checks))
    rows, lines = [], []
    for check in checks:
        fix = f"<br>→ <b>{text(check.fix, MAX_CHARS)}</b>" if check.fix else ""
        name = f'<b style="white-space:nowrap">{text(check.name)}</b>'
        rows.append((name, theme.mark(*check.light.value), text(check.text, MAX_CHARS) + fix))
        first = f" {check.light.value[1]} {plain(check.name):<15}{plain(check.text, MAX_CHARS)}"
        lines += textwrap.wrap(first, WIDTH, subsequent_indent=INDENT)
        if check.fix:
            arrow = f"{INDENT}→ {plain(check.fix, MAX_CHARS)}"
            lines += textwrap.wrap(arrow, WIDTH, subsequent_indent=INDENT + "  ", break_on_hyphens=False)
    shown.draw(theme.table(("check", "", "facts, and what to do"), rows, label="checks"), *lines)
    return shown


def judge(name: str, words: str, fix: str = "", light: Light = YELLOW) -> Check:
    """Return a check: green without a fix, else ``light``."""
    return Check(name, light if fix else GREEN, words, fix)


def check_platform(here: Platform) -> Check:
    words = ". ".join(filter(None, (": ".join(filter(None, (here.name, here.limits))), here.terms)))
    fix = "read the terms; if they allow it: accept_terms=True. cs.simulate(…) needs no permission"
    return judge("platform", words, fix if here.must_agree else "")


def check_internet(here: Platform, up: bool) -> Check:
    if up:
        return judge("internet", "well-known hosts answer")
    if here.internet_help:
        return judge("internet", "it is off for this notebook", here.internet_help, RED)
    fix = "check the network and its proxy; a swarm in the local network needs no internet: cs.join()"
    return judge("internet", "no well-known host answers", fix)


def check_versions(wanted: Sequence[str], installed: Mapping[str, str]) -> Check:
    words = ", ".join(f"{name} {version}" for name, version in installed.items())
    if missing := ", ".join(name for name in wanted if name not in installed):
        words += f"; without {missing} this peer can be a backbone or a relay but not train"
        return judge("versions", words, 'pip install "colab-swarm[train]"')
    return judge("versions", words)


def check_compute(
    cores: int, free_ram_bytes: int | None, gpu: tuple[str, int, int] | None, subject: Subject | None
) -> Check:
    """Judge the cores, or the GPU (name, free and total bytes), and the memory for the model."""
    free_bytes, words = free_ram_bytes, f"no GPU, {count(cores, 'core')}"
    fix = "training works, but slowly; Colab and Kaggle offer GPUs in their settings"
    if gpu is not None:
        (name, free_bytes, total_bytes), fix = gpu, ""
        words = f"{name}, {free_bytes / GB:.1f} of {total_bytes / GB:.1f} GB free"
    if subject is None or free_bytes is None:
        return judge("compute", words, fix)
    size = fitting_batch(free_bytes, subject)
    words += (
        f". For {subject.name}: ({USABLE:g} × {free_bytes / GB:.1f} GB free − {subject.parameters / 1e6:.1f} M "
        f"parameters × {PARAMETER_BYTES} B) / {subject.sample_bytes / 1e6:,.1f} MB a sample: micro-batch {size}"
    )
    if size:
        return judge("compute", words, fix)
    fix = "take a smaller model or shorter samples, or free memory: restart the kernel"
    return judge("compute", words, fix, RED)


def check_memory(free_bytes: int | None) -> Check:
    if free_bytes is None:
        return judge("memory", "this system does not report its free memory")
    fix = "restart the kernel, and close others" if free_bytes < MIN_FREE_RAM else ""
    return judge("memory", f"{free_bytes / GB:.1f} GB of main memory free", fix, RED)


def check_disk(free_bytes: int) -> Check:
    fix = "checkpoints and data sets need space: delete old ones" if free_bytes < MIN_FREE_DISK else ""
    return judge("disk", f"{free_bytes / GB:.1f} GB free here", fix)


def check_swarm(run: str, linked: int, training: int) -> Check:
    if linked:
        return judge("swarm", f"{run}: linked to {count(linked, 'peer')}, {training} of the run train")
    return judge("swarm", f"{run}: no linked peer", "invite others: print(swarm.invite())")


def check_reachability(reached: Reachability) -> Check:
    words = "; ".join((str(reached), *(f"not {level.value}: {why}" for level, why in reached.reasons)))
    return judge("reachability", words, REACH_FIXES.get(reached.level, ""))


def check_clock(skew_s: float) -> Check:
    """Judge this peer's clock minus the swarm's."""
    words = f"{abs(skew_s):,.1f} s {'ahead of' if skew_s > 0 else 'behind'} the swarm's"
    fix = "let the system set its clock: sudo timedatectl set-ntp true"
    if abs(skew_s) < MAX_SKEW_S:
        return judge("clock", words)
    if abs(skew_s) <= MAX_COMPENSATED_SKEW_S:
        return judge("clock", f"{words}; compensated", fix)
    return judge(
        "clock", f"{words}; at most {MAX_COMPENSATED_SKEW_S / 60:g} minutes are compensated", fix, RED
    )


def check_bandwidth(uplink: Speed | None) -> Check:
    if uplink is None:
        return judge("bandwidth", "no peer was free for a speed test", "run the doctor again in 10 s")
    up, down = bandwidth(uplink.upload_bps), bandwidth(uplink.download_bps)
    words = f"{up} up, {down} down, round trip {uplink.rtt_s * 1e3:.0f} ms"
    slow = min(uplink.upload_bps, uplink.download_bps) < SLOW_BPS
    fix = "use a cable, end other transfers, and swarm.optimizer(…, compression='int8')" if slow else ""
    return judge("bandwidth", words + ": slow" * slow, fix)


def check_prediction(found: Prediction) -> Check:
    words = (
        f"first sample in {_time(found.first_sample_s)}; {found.samples_per_s:,.3g} samples/s here, "
        f"{found.share:.0%} of a step; a step of {found.target_batch_size:,} samples every {_time(found.step_s)}, "
        f"of which {_time(found.averaging_s)} averaging; {found.gb_per_hour:.2g} GB per hour"
    )
    if found.averaging_s > found.step_s / 2:
        enough = 2 ** math.ceil(math.log2(found.averaging_s * found.samples_per_s / found.share))
        fix = f"target_batch_size={enough} or more for all peers, or compression='int8'"
        return judge("prediction", f"{words}. Most of a step is averaging", fix)
    fix = "invite more peers, or agree on a smaller target_batch_size" if found.step_s > LONG_STEP_S else ""
    return judge("prediction", words, fix)


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else duration(seconds)
