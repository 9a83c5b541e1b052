"""The doctor's checks: facts in, traffic lights with their fixes out. Pure functions."""

from __future__ import annotations

import enum
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colab_swarm.markup import bandwidth, count, duration, plain, text
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook import theme
from colab_swarm.notebook.platforms import Platform
from colab_swarm.notebook.theme import Document

PARAMETER_BYTES = 16  # training memory per parameter: value, gradient and two moments, in float32
STATE_BYTES = 12  # what a late joiner downloads per parameter: value and two moments, in float32
USABLE = 0.8  # share of free memory to plan with; the rest is for temporaries and fragments
ROUND_TRIPS = 2  # round trips to form and start a round
MAX_MICRO_BATCH = 512
MIN_BPS = 1.0  # lowest bandwidth in the arithmetic
GB = 1e9
MIN_FREE_RAM = 1 * GB
MIN_FREE_DISK = 2 * GB
MIN_OPEN_FILES = 512
MAX_SKEW_S = 5.0
MAX_COMPENSATED_SKEW_S = 600.0
SLOW_BPS = 5e6
LONG_STEP_S = 600.0
WIDTH = 100
INDENT = " " * 18
MAX_CHARS = 10_000


@dataclass(frozen=True)
class Gpu:
    """A graphics card and the bytes of its memory."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """The resources that this process may use."""

    cores: int  # CPU cores
    free_ram_bytes: int | None  # available main memory; None if unknown
    free_disk_bytes: int  # in the current folder
    open_files: int | None  # limit of file descriptors, sockets included; None without a limit
    gpu: Gpu | None  # the card that torch uses


@dataclass(frozen=True)
class Version:
    """A package: the installed version, or None, and the lowest version that works."""

    name: str
    found: str | None
    wanted: str

    @property
    def too_old(self) -> bool:
        """Whether the installed version is too old."""
        return self.found is not None and numbers(self.found) < numbers(self.wanted)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 9) for ``2.9.0+cu126``."""
    leading = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in leading[0].split(".")] if leading else []
    while parts and parts[-1] == 0:  # 3.0 is 3
        parts.pop()
    return tuple(parts)


@dataclass(frozen=True)
class UplinkFacts:
    """This peer's bandwidth (bits per second) and round-trip time; infinite and 0 where unknown."""

    upload_bps: float = math.inf
    download_bps: float = math.inf
    rtt_s: float = 0.0


@dataclass(frozen=True)
class MembershipFacts:
    """This peer in its swarm."""

    run: str  # the run's name
    reachability: Reachability  # how others reach this peer, and why not better
    linked: int  # number of linked peers
    trainers: tuple[float, ...]  # speeds of the training peers, samples/s
    skew_s: float  # own clock minus the swarm's, seconds
    uplink: UplinkFacts | None  # result of speed tests with peers; None if no peer took one


@dataclass(frozen=True)
class Needs:
    """The training memory of a model."""

    name: str  # for people, such as "ALBERT-large at 512 tokens"
    parameters: int  # number of trained values
    sample_bytes: float  # saved for the backward pass of one sample


@dataclass(frozen=True)
class Workload:
    """A training task."""

    parameters: int  # number of the model's trained values
    micro_batch: int  # samples of one forward and backward pass
    target_batch_size: int  # samples of all peers for one global step
    value_bytes: float  # bytes of one compressed value


@dataclass(frozen=True)
class Prediction:
    """The expected training."""

    first_sample_s: float  # from now to this peer's first counted sample
    samples_per_s: float  # this peer's speed
    swarm_samples_per_s: float  # speed of all peers while they compute
    step_s: float  # time of a global step with its averaging
    averaging_s: float  # time of the averaging
    gb_per_hour: float  # sent plus received by this peer
    share: float  # this peer's part of a step's samples, 0 to 1


@dataclass(frozen=True)
class DoctorFacts:
    """The input of all checks.

    Attributes:
        platform, machine, versions: of this process.
        work, prediction: of the training, if its speed was measured and the target batch size is known.
    """

    platform: Platform
    machine: Machine
    versions: tuple[Version, ...]
    internet: bool  # whether well-known hosts answer
    membership: MembershipFacts | None = None  # the swarm, if there is one
    refused: str = ""  # why the swarm could not be joined; empty if it was, or without a swarm
    needs: Needs | None = None  # memory of the model, if known
    work: Workload | None = None
    prediction: Prediction | None = None


# --- arithmetic -------------------------------------------------------------------------------------------------------


def predict(
    work: Workload,
    samples_per_s: float,
    others: Sequence[float],
    uplink: UplinkFacts,
    *,
    reduces: bool = True,
) -> Prediction:
    """Predict a training with equal averaging shares (DeDLOC, sections 3.1 and 3.2).

    With n peers, S samples/s in all, a target batch of B samples and micro-batches of m::

        step      = (B + n m) / S + averaging              each peer finishes its current micro-batch
        averaging = 2 rtt + max(sent / upload, received / download)
        sent      = received = 2 (n - 1) / n * vector      reducers; others send and receive the vector once
        vector    = parameters * bytes of a value

    A lone peer averages nothing; its step takes the micro-batches that fill B.

    Args:
        work: the training task.
        samples_per_s: this peer's measured speed, > 0.
        others: speeds of the other trainers.
        uplink: of this peer; the others are assumed to be no slower.
        reduces: whether this peer takes a share of the averaging, for which others must reach it.
    """
    peers, total = 1 + len(others), samples_per_s + sum(others)
    moved_bytes = averaging_s = state_s = 0.0
    batch = float(math.ceil(work.target_batch_size / work.micro_batch) * work.micro_batch)
    if others:
        batch = work.target_batch_size + peers * work.micro_batch
        moved_bytes = work.parameters * work.value_bytes * (2 * (peers - 1) / peers if reduces else 1)
        download_bps = max(uplink.download_bps, MIN_BPS)
        slowest_bps = min(max(uplink.upload_bps, MIN_BPS), download_bps)
        averaging_s = ROUND_TRIPS * uplink.rtt_s + 8 * moved_bytes / slowest_bps
        state_s = ROUND_TRIPS * uplink.rtt_s + 8 * work.parameters * STATE_BYTES / download_bps
    step_s = batch / total + averaging_s
    return Prediction(
        first_sample_s=state_s + work.micro_batch / samples_per_s,
        samples_per_s=samples_per_s,
        swarm_samples_per_s=total,
        step_s=step_s,
        averaging_s=averaging_s,
        gb_per_hour=2 * moved_bytes * 3600 / step_s / 1e9,
        share=samples_per_s / total,
    )


def micro_batch(free_bytes: float, needs: Needs) -> int:
    """Return the largest power of two, at most 512, whose training fits into ``free_bytes``; 0 if none does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * needs.parameters
    fitting = min(int(room_bytes / needs.sample_bytes), MAX_MICRO_BATCH)
    return 1 << (fitting.bit_length() - 1) if fitting > 0 else 0


def albert_needs(name: str, *, layers: int, hidden: int, vocabulary: int, length: int) -> Needs:
    """Return the needs of an ALBERT in float32; layers share parameters, embeddings have 128 axes.

    Saved for the backward pass: 28 values per token, layer and hidden unit (counted with torch's saved-tensor hooks;
    16 of them in the feed-forward part), and 3 per token and word of the vocabulary.
    """
    embedding = 128
    embeddings = embedding * (vocabulary + 512 + 2 + 2) + embedding * hidden + hidden
    layer = 12 * hidden**2 + 13 * hidden
    heads = hidden**2 + hidden + hidden * embedding + 3 * embedding + vocabulary + 2 * hidden + 2
    sample_bytes = 4 * length * (28 * hidden * layers + 3 * vocabulary)
    return Needs(f"ALBERT-{name} at {length} tokens", embeddings + layer + heads, sample_bytes)


# --- views ------------------------------------------------------------------------------------------------------------


class Light(enum.Enum):
    """A result: symbol, word and hue."""

    GREEN = ("✔", "good", "green")
    YELLOW = ("▲", "warning", "amber")
    RED = ("✖", "problem", "red")

    def __init__(self, symbol: str, word: str, hue: str) -> None:
        self.symbol, self.word, self.hue = symbol, word, hue


GREEN, YELLOW, RED = Light.GREEN, Light.YELLOW, Light.RED
REACH_FIXES = {
    ReachabilityLevel.UNVERIFIED: "run the doctor again when another peer has joined: it tries to dial this one",
    ReachabilityLevel.RELAYED: "nothing to do; a port forwarded at the router and announce=… make it faster",
    ReachabilityLevel.OUTGOING: "if no peer can be dialled, run on any machine: colab-swarm backbone RUN",
}


@dataclass(frozen=True)
class Check:
    """One result."""

    name: str  # what was checked
    light: Light  # the result
    text: str  # the facts
    fix: str = ""  # what to do; empty only for a green light


def summary(checks: Sequence[Check]) -> str:
    """Return the verdict and the number of each light in one line."""
    number = {light: sum(check.light is light for check in checks) for light in Light}
    verdict = "ready to train" + (", with warnings" if number[YELLOW] else "")
    if number[RED]:
        verdict = "fix the problems before you train"
    lights = ", ".join(f"{many} {light.symbol} {light.word}" for light, many in number.items() if many)
    return f"{verdict}: {lights}"


def draw(checks: Sequence[Check]) -> Document:
    """Return a table of the checks; in the text each is a line or more, with its fix below."""
    shown = Document("doctor", summary(checks), label="report of the doctor", line=summary(checks))
    rows, lines = [], []
    for check in checks:
        fix = f"<br>→ <b>{text(check.fix, MAX_CHARS)}</b>" if check.fix else ""
        name = f'<b style="white-space:nowrap">{text(check.name)}</b>'
        mark = theme.mark(check.light.hue, check.light.symbol, check.light.word)
        rows.append((name, mark, text(check.text, MAX_CHARS) + fix))
        first = f" {check.light.symbol} {plain(check.name):<15}{plain(check.text, MAX_CHARS)}"
        lines += textwrap.wrap(first, WIDTH, subsequent_indent=INDENT)
        if check.fix:
            arrow = f"{INDENT}→ {plain(check.fix, MAX_CHARS)}"
            lines += textwrap.wrap(arrow, WIDTH, subsequent_indent=INDENT + "  ", break_on_hyphens=False)
    shown.draw(theme.table(("check", "", "facts, and what to do"), rows, label="checks"), *lines)
    return shown


# --- checks -----------------------------------------------------------------------------------------------------------


def diagnose(facts: DoctorFacts) -> tuple[Check, ...]:
    """Return the checks in the order in which to fix them: every light but green has a fix."""
    return tuple(_checks(facts))


def _checks(facts: DoctorFacts) -> Iterator[Check]:
    yield _platform(facts.platform)
    yield _internet(facts)
    yield _versions(facts.versions)
    yield _compute(facts.machine, facts.needs)
    yield from _limits(facts.machine)
    if facts.refused:
        yield Check("swarm", RED, facts.refused, "fix that, join, and run cs.doctor(cs.join(…))")
    if facts.membership is not None:
        yield from _swarm(facts.membership)
    if facts.prediction is not None and facts.work is not None:
        yield _prediction(facts.work, facts.prediction)


def _check(name: str, words: str, fix: str = "", light: Light = YELLOW) -> Check:
    return Check(name, light if fix else GREEN, words, fix)


def _platform(here: Platform) -> Check:
    words = ". ".join(filter(None, (": ".join(filter(None, (here.name, here.limits))), here.terms)))
    fix = "read the terms; if they allow it: accept_terms=True. cs.simulate(…) needs no permission"
    return _check("platform", words, fix if here.must_agree else "")


def _internet(facts: DoctorFacts) -> Check:
    if facts.internet:
        return _check("internet", "well-known hosts answer")
    if facts.platform.internet_help:
        return Check("internet", RED, "it is off for this notebook", facts.platform.internet_help)
    fix = "check the network and its proxy; a swarm in the local network needs no internet: cs.join()"
    return _check("internet", "no well-known host answers", fix)


def _versions(versions: tuple[Version, ...]) -> Check:
    found = ", ".join(f"{each.name} {each.found}" for each in versions if each.found)
    if old := [each for each in versions if each.too_old]:
        wrong = ", ".join(f"{each.name} {each.found} is older than {each.wanted}" for each in old)
        packages = " ".join(f'"{each.name}>={each.wanted}"' for each in old)
        fix = f"pip install -U {packages}, then restart the kernel"
        if python := [each for each in old if each.name == "python"]:
            fix = f"start a kernel with Python {python[0].wanted} or newer"
        return Check("versions", RED, wrong, fix)
    if missing := ", ".join(each.name for each in versions if each.found is None):
        words = f"{found}; without {missing} this peer can be a backbone or a relay but not train"
        return _check("versions", words, 'pip install "colab-swarm[train]"')
    return _check("versions", found)


def _compute(machine: Machine, needs: Needs | None) -> Check:
    gpu, free_bytes, words = machine.gpu, machine.free_ram_bytes, f"no GPU, {count(machine.cores, 'core')}"
    fix = "training works, but slowly; Colab and Kaggle offer GPUs in their settings"
    if gpu is not None:
        free_bytes, fix = gpu.free_bytes, ""
        words = f"{gpu.name}, {free_bytes / GB:.1f} of {gpu.total_bytes / GB:.1f} GB free"
    if needs is None or free_bytes is None:
        return _check("compute", words, fix)
    size = micro_batch(free_bytes, needs)
    words += (
        f". For {needs.name}: ({USABLE:g} × {free_bytes / GB:.1f} GB free − {needs.parameters / 1e6:.1f} M "
        f"parameters × {PARAMETER_BYTES} B) / {needs.sample_bytes / 1e6:,.1f} MB a sample: micro-batch {size}"
    )
    if size:
        return _check("compute", words, fix)
    fix = "take a smaller model or shorter samples, or free memory: restart the kernel"
    return Check("compute", RED, words, fix)


def _limits(machine: Machine) -> Iterator[Check]:
    ram_bytes, disk_bytes, files = machine.free_ram_bytes, machine.free_disk_bytes, machine.open_files
    if ram_bytes is None:
        yield _check("memory", "this system does not report its free memory")
    else:
        fix = "restart the kernel, and close others" if ram_bytes < MIN_FREE_RAM else ""
        yield _check("memory", f"{ram_bytes / GB:.1f} GB of main memory free", fix, RED)
    fix = "checkpoints and data sets need space: delete old ones" if disk_bytes < MIN_FREE_DISK else ""
    yield _check("disk", f"{disk_bytes / GB:.1f} GB free here", fix)
    if files is not None:
        few = files < MIN_OPEN_FILES
        fix = f"in the shell that starts Python: ulimit -n {2 * MIN_OPEN_FILES}" if few else ""
        words = f"{files:,} files and sockets may be open at once"
        yield _check("open files", words + "; a busy peer has 300 links" * few, fix)


def _swarm(swarm: MembershipFacts) -> Iterator[Check]:
    if swarm.linked:
        words = f"linked to {count(swarm.linked, 'peer')}, {len(swarm.trainers)} of the run train"
        yield _check("swarm", f"{swarm.run}: {words}")
    else:
        yield _check("swarm", f"{swarm.run}: no linked peer", "invite others: print(swarm.invite())")
    reached = swarm.reachability
    words = "; ".join((str(reached), *(f"not {level.value}: {why}" for level, why in reached.reasons)))
    yield _check("reachability", words, REACH_FIXES.get(reached.level, ""))
    if swarm.linked:
        yield _clock(swarm.skew_s)
        yield _bandwidth(swarm.uplink)


def _clock(skew_s: float) -> Check:
    words = f"{abs(skew_s):,.1f} s {'ahead of' if skew_s > 0 else 'behind'} the swarm's"
    fix = "let the system set its clock: sudo timedatectl set-ntp true"
    if abs(skew_s) < MAX_SKEW_S:
        return _check("clock", words)
    if abs(skew_s) <= MAX_COMPENSATED_SKEW_S:
        return _check("clock", f"{words}; compensated", fix)
    limit = f"only {MAX_COMPENSATED_SKEW_S / 60:g} minutes are compensated"
    return Check("clock", RED, f"{words}; {limit}", fix)


def _bandwidth(uplink: UplinkFacts | None) -> Check:
    if uplink is None:
        return _check("bandwidth", "no peer was free for a speed test", "run the doctor again in 10 s")
    up, down = bandwidth(uplink.upload_bps), bandwidth(uplink.download_bps)
    words = f"{up} up, {down} down, round trip {uplink.rtt_s * 1e3:.0f} ms"
    slow = min(uplink.upload_bps, uplink.download_bps) < SLOW_BPS
    fix = "use a cable, end other transfers, and swarm.optimizer(…, compression='int8')" if slow else ""
    return _check("bandwidth", words + ": slow" * slow, fix)


def _prediction(work: Workload, found: Prediction) -> Check:
    words = (
        f"first sample in {_time(found.first_sample_s)}; {found.samples_per_s:,.3g} samples/s here, "
        f"{found.share:.0%} of a step; a step of {work.target_batch_size:,} samples every {_time(found.step_s)}, "
        f"of which {_time(found.averaging_s)} averaging; {found.gb_per_hour:.2g} GB per hour"
    )
    if found.averaging_s > found.step_s / 2:
        enough = 2 ** math.ceil(math.log2(found.averaging_s * found.swarm_samples_per_s))
        fix = f"target_batch_size={enough} or more for all peers, or compression='int8'"
        return _check("prediction", f"{words}. Most of a step is averaging", fix)
    fix = "invite more peers, or agree on a smaller target_batch_size" if found.step_s > LONG_STEP_S else ""
    return _check("prediction", words, fix)


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else duration(seconds)
