"""The doctor's judgement: facts in, traffic lights with their fixes out. Pure."""

from __future__ import annotations

import enum
import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook import theme
from colab_swarm.notebook.platforms import Platform


@dataclass(frozen=True)
class Gpu:
    """A graphics card; bytes of its memory."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """This machine, as this process may use it.

    Attributes:
        cores: CPU cores.
        free_ram_bytes: main memory still to be had.
        free_disk_bytes: in the current folder.
        open_files: how many file descriptors (sockets are such) this process may hold.
        gpu: the card torch uses.
    """

    cores: int
    free_ram_bytes: int | None
    free_disk_bytes: int
    open_files: int | None
    gpu: Gpu | None


@dataclass(frozen=True)
class Version:
    """A package: what is here (None if nothing) and what is wanted at least."""

    name: str
    found: str | None
    wanted: str

    @property
    def too_old(self) -> bool:
        """Whether what is here is older than wanted."""
        return self.found is not None and numbers(self.found) < numbers(self.wanted)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.9.0+cu126`` is (2, 9, 0)."""
    parts: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    while parts and parts[-1] == 0:  # 3.0 is 3
        parts.pop()
    return tuple(parts)


@dataclass(frozen=True)
class MembershipFacts:
    """This peer in its swarm.

    Attributes:
        run: the run's name.
        reachability: how others reach this peer, and why not better.
        linked: peers it has links to.
        trainers: speeds of the peers that train already, samples/s.
        skew_s: own clock minus the swarm's, seconds.
        line: what speed tests with peers gave; None if no peer took one.
    """

    run: str
    reachability: Reachability
    linked: int
    trainers: tuple[float, ...]
    skew_s: float
    line: UplinkFacts | None


@dataclass(frozen=True)
class DoctorFacts:
    """All that the doctor judges by.

    Attributes:
        platform, machine, versions: where this runs.
        internet: whether well-known hosts can be reached.
        membership: the swarm, if there is one.
        refused: why the swarm could not be joined; empty if it was, or if none was asked for.
        needs: memory of the model, if it is known.
        work, prediction: of the training, if its speed could be measured and the target batch is known.
    """

    platform: Platform
    machine: Machine
    versions: tuple[Version, ...]
    internet: bool
    membership: MembershipFacts | None = None
    refused: str = ""
    needs: Needs | None = None
    work: Workload | None = None
    prediction: Prediction | None = None


PARAMETER_BYTES = 16

"""Memory per parameter where it is trained: itself, its gradient and two moments, in float32."""

STATE_BYTES = 12

"""What a newcomer downloads per parameter: itself and two moments, in float32."""

USABLE = 0.8

"""Share of free memory to plan with; the rest is for temporaries and fragments."""

ROUND_TRIPS = 2

"""A round forms and begins within so many round trips."""

MAX_MICRO_BATCH = 512

DEAD_BPS = 1.0

"""What a line carries at least, for the arithmetic."""


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        parameters: count of the model's trained values.
        micro_batch: samples of one forward and backward pass.
        target_batch_size: samples of all peers together for one global step.
        value_bytes: bytes of one value on the wire, by the codec.
    """

    parameters: int
    micro_batch: int
    target_batch_size: int
    value_bytes: float


@dataclass(frozen=True)
class UplinkFacts:
    """This peer's way to the others: bits per second and seconds; infinite and 0 where nothing is known."""

    upload_bps: float = math.inf
    download_bps: float = math.inf
    rtt_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What will happen.

    Attributes:
        first_sample_s: from now to this peer's first counted sample.
        samples_per_s: this peer's speed.
        swarm_samples_per_s: all peers' speed while they compute.
        step_s: time of a global step, the averaging included.
        averaging_s: the averaging's part of it.
        gb_per_hour: sent and received by this peer together.
        share: this peer's part of a step's samples, 0 to 1.
    """

    first_sample_s: float
    samples_per_s: float
    swarm_samples_per_s: float
    step_s: float
    averaging_s: float
    gb_per_hour: float
    share: float


def predict(
    work: Workload, samples_per_s: float, others: Sequence[float], line: UplinkFacts, *, reduces: bool = True
) -> Prediction:
    """Predict a training with equal averaging shares (DeDLOC, section 3.1 and 3.2).

    With n peers, S samples/s of all together, a target batch of B samples and micro-batches of m::

        step      = (B + n m) / S + averaging              each peer finishes the micro-batch it is at
        averaging = 2 rtt + max(sent / upload, received / download)
        sent      = received = 2 (n - 1) / n * vector      reducers; others send and receive the vector once
        vector    = parameters * bytes of a value

    A peer alone averages nothing, and its step takes the micro-batches that fill B.

    Args:
        work: what is trained.
        samples_per_s: this peer's measured speed, > 0.
        others: speeds of the other trainers.
        line: this peer's way to them; the others' lines are taken to be no slower.
        reduces: whether this peer takes a share of the averaging, for which others must be able to reach it.
    """
    peers, total = 1 + len(others), samples_per_s + sum(others)
    moved_bytes = averaging_s = state_s = 0.0
    batch = float(math.ceil(work.target_batch_size / work.micro_batch) * work.micro_batch)
    if others:
        batch = work.target_batch_size + peers * work.micro_batch
        moved_bytes = work.parameters * work.value_bytes * (2 * (peers - 1) / peers if reduces else 1)
        download_bps = max(line.download_bps, DEAD_BPS)
        slowest_bps = min(max(line.upload_bps, DEAD_BPS), download_bps)
        averaging_s = ROUND_TRIPS * line.rtt_s + 8 * moved_bytes / slowest_bps
        state_s = ROUND_TRIPS * line.rtt_s + 8 * work.parameters * STATE_BYTES / download_bps
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


@dataclass(frozen=True)
class Needs:
    """Memory that a model wants: per parameter and, kept for the backward pass, per sample.

    Attributes:
        name: for people, such as "ALBERT-large at 512 tokens".
        parameters: count of its trained values.
        sample_bytes: kept for the backward pass of one sample.
    """

    name: str
    parameters: int
    sample_bytes: float


def micro_batch(free_bytes: float, needs: Needs) -> int:
    """The largest power of two (at most 512) whose training fits into ``free_bytes``; 0 if no sample does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * needs.parameters
    fitting = min(int(room_bytes / needs.sample_bytes), MAX_MICRO_BATCH)
    return 1 << (fitting.bit_length() - 1) if fitting > 0 else 0


def albert_needs(name: str, *, layers: int, hidden: int, vocabulary: int, length: int) -> Needs:
    """What an ALBERT in float32 wants; layers share their parameters, embeddings have 128 axes.

    Kept for the backward pass: 28 values per token, layer and hidden unit (counted with torch's saved-tensor hooks:
    16 of them in the four times wider feed-forward part), and 3 per token and word of the vocabulary.
    """
    embedding = 128
    embeddings = embedding * (vocabulary + 512 + 2 + 2) + embedding * hidden + hidden
    layer = 12 * hidden**2 + 13 * hidden
    heads = hidden**2 + hidden + hidden * embedding + 3 * embedding + vocabulary + 2 * hidden + 2
    sample_bytes = 4 * length * (28 * hidden * layers + 3 * vocabulary)
    return Needs(f"ALBERT-{name} at {length} tokens", embeddings + layer + heads, sample_bytes)


WIDTH = 100

INDENT = " " * 18


class Light(enum.Enum):
    """How good it is: symbol, word and hue."""

    GREEN = ("✔", "good", "green")
    YELLOW = ("▲", "look", "amber")
    RED = ("✖", "stop", "red")

    @property
    def symbol(self) -> str:
        """One character."""
        return self.value[0]

    @property
    def word(self) -> str:
        """For those who cannot see the symbol."""
        return self.value[1]

    @property
    def hue(self) -> str:
        """Of the theme."""
        return self.value[2]


@dataclass(frozen=True)
class Check:
    """One thing the doctor looked at.

    Attributes:
        name: of the thing.
        light: how good it is.
        text: what was found.
        fix: exactly what to do; empty only if the light is green.
    """

    name: str
    light: Light
    text: str
    fix: str = ""


def summary(checks: Sequence[Check]) -> str:
    """How many are good, to look at, and stopping, in one line."""
    count = {light: sum(check.light is light for check in checks) for light in Light}
    if count[Light.RED]:
        verdict = "this has to be mended before you train"
    else:
        verdict = (
            "ready to train" if not count[Light.YELLOW] else "ready to train, with a thing or two to know"
        )
    lights = ", ".join(f"{number} {light.symbol} {light.word}" for light, number in count.items() if number)
    return f"{verdict}: {lights}"


def render_text(checks: Sequence[Check]) -> str:
    """A line or more per check, and under it what to do."""
    lines = [summary(checks)]
    for check in checks:
        first = f" {check.light.symbol} {_plain(check.name):<15}"
        lines += textwrap.wrap(f"{first}{_plain(check.text)}", WIDTH, subsequent_indent=INDENT)
        if check.fix:
            arrow = f"{INDENT}→ {_plain(check.fix)}"
            lines += textwrap.wrap(arrow, WIDTH, subsequent_indent=INDENT + "  ", break_on_hyphens=False)
    return "\n".join(lines)


def render_html(checks: Sequence[Check]) -> str:
    """The same as a table."""
    return theme.wrap(
        theme.heading("doctor", html.escape(summary(checks)))
        + theme.table(("check", "", "found, and what to do"), map(_row, checks), label="checks"),
        "what the doctor found",
    )


def _row(check: Check) -> tuple[str, str, str]:
    light, fix = check.light, f"<br>→ <b>{html.escape(_plain(check.fix))}</b>" if check.fix else ""
    return (
        f'<b style="white-space:nowrap">{html.escape(_plain(check.name))}</b>',  # ours, and never long
        theme.mark(light.hue, light.symbol, light.word),
        html.escape(_plain(check.text)) + fix,
    )


def _plain(text: str) -> str:
    """Without control characters, which could steer a terminal: some of it comes from peers."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


GB = 1e9

LEAST_FREE_RAM = 1 * GB

LEAST_FREE_DISK = 2 * GB

LEAST_OPEN_FILES = 512

SKEW_TOLD_S = 5.0

SKEW_COMPENSATED_S = 600.0

SLOW_LINE_BPS = 5e6

LONG_STEP_S = 600.0

REACH_FIXES = {
    ReachabilityLevel.UNVERIFIED: "ask again when another peer has joined: it tries to dial this one",
    ReachabilityLevel.RELAYED: "nothing to do; a port forwarded at the router and announce=… make it faster",
    ReachabilityLevel.OUTGOING: "if no peer can be dialled, run on any machine: colab-swarm backbone RUN",
}

GREEN, YELLOW, RED = Light.GREEN, Light.YELLOW, Light.RED


def diagnose(facts: DoctorFacts) -> tuple[Check, ...]:
    """Judge the facts, in the order in which a person would mend them: every light but green has its fix."""
    return tuple(_checks(facts))


def _checks(facts: DoctorFacts) -> Iterator[Check]:
    yield _platform(facts)
    yield _internet(facts)
    yield _versions(facts.versions)
    yield _compute(facts.machine, facts.needs)
    yield _memory(facts.machine)
    yield _disk(facts.machine)
    if facts.machine.open_files is not None:
        yield _open_files(facts.machine.open_files)
    if facts.refused:
        yield Check("swarm", RED, facts.refused, "mend that, join, and ask again: cs.doctor(cs.join(…))")
    if facts.membership is not None:
        yield from _swarm(facts.membership)
    if facts.prediction is not None and facts.work is not None:
        yield _prediction(facts.work, facts.prediction)


# --- the machine ------------------------------------------------------------------------------------------------------


def _platform(facts: DoctorFacts) -> Check:
    here = facts.platform
    text = here.name + (f": {here.limits}" if here.limits else "")
    if here.must_agree:
        fix = "read the terms; if they allow it: accept_terms=True. cs.simulate(…) needs none"
        return Check("platform", YELLOW, f"{text}. {here.terms}", fix)
    return Check("platform", GREEN, f"{text}. {here.terms}" if here.terms else text)


def _internet(facts: DoctorFacts) -> Check:
    if facts.internet:
        return Check("internet", GREEN, "well-known hosts can be reached")
    if facts.platform.internet_help:
        return Check("internet", RED, "it is switched off for this notebook", facts.platform.internet_help)
    fix = "check the network and its proxy; a swarm in the local network needs no internet: cs.join()"
    return Check("internet", YELLOW, "no well-known host can be reached", fix)


def _versions(versions: tuple[Version, ...]) -> Check:
    found = ", ".join(f"{each.name} {each.found}" for each in versions if each.found)
    if old := [each for each in versions if each.too_old]:
        wrong = ", ".join(f"{each.name} {each.found} is older than {each.wanted}" for each in old)
        if python := [each for each in old if each.name == "python"]:
            return Check("versions", RED, wrong, f"start a kernel with Python {python[0].wanted} or newer")
        packages = " ".join(f'"{each.name}>={each.wanted}"' for each in old)
        return Check("versions", RED, wrong, f"pip install -U {packages}, then restart the kernel")
    if missing := [each.name for each in versions if each.found is None]:
        text = f"{found}; {', '.join(missing)} is missing: enough for a backbone or a relay, not to train"
        return Check("versions", YELLOW, text, 'pip install "colab-swarm[train]"')
    return Check("versions", GREEN, found)


def _compute(machine: Machine, needs: Needs | None) -> Check:
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    gpu = machine.gpu
    free_bytes = machine.free_ram_bytes if gpu is None else gpu.free_bytes
    where = f"no GPU, {cores}" if gpu is None else _card(gpu)
    if needs is None or free_bytes is None:
        size = None
    else:
        size = micro_batch(free_bytes, needs)
        where += f". {_arithmetic(free_bytes, needs)}: micro-batch {size}"
    if size == 0:
        fix = "take a smaller model or shorter samples, or free memory: restart the kernel"
        return Check("compute", RED, where, fix)
    if gpu is None:
        return Check(
            "compute", YELLOW, where, "training works, slowly; Colab and Kaggle lend GPUs in their settings"
        )
    return Check("compute", GREEN, where)


def _card(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.free_bytes / GB:.1f} of {gpu.total_bytes / GB:.1f} GB free"


def _arithmetic(free_bytes: float, needs: Needs) -> str:
    return (
        f"For {needs.name}: ({USABLE:g} × {free_bytes / GB:.1f} GB free − {needs.parameters / 1e6:.1f} M parameters "
        f"× {PARAMETER_BYTES} B) / {needs.sample_bytes / 1e6:,.1f} MB a sample"
    )


def _memory(machine: Machine) -> Check:
    free_bytes = machine.free_ram_bytes
    if free_bytes is None:
        return Check("memory", GREEN, "this system does not tell how much is free")
    text = f"{free_bytes / GB:.1f} GB of main memory free"
    if free_bytes < LEAST_FREE_RAM:
        return Check("memory", RED, text, "restart the kernel, and close others")
    return Check("memory", GREEN, text)


def _disk(machine: Machine) -> Check:
    text = f"{machine.free_disk_bytes / GB:.1f} GB free here"
    if machine.free_disk_bytes < LEAST_FREE_DISK:
        return Check("disk", YELLOW, text, "checkpoints and data sets want room: delete old ones")
    return Check("disk", GREEN, text)


def _open_files(limit: int) -> Check:
    text = f"{limit:,} files and sockets may be open at once"
    if limit >= LEAST_OPEN_FILES:
        return Check("open files", GREEN, text)
    fix = f"in the shell that starts Python: ulimit -n {2 * LEAST_OPEN_FILES}"
    return Check("open files", YELLOW, f"{text}; a busy peer holds 300 links", fix)


# --- the swarm --------------------------------------------------------------------------------------------------------


def _swarm(swarm: MembershipFacts) -> Iterator[Check]:
    if swarm.linked:
        peers = "1 peer" if swarm.linked == 1 else f"{swarm.linked} peers"
        yield Check("swarm", GREEN, f"{swarm.run}: linked to {peers}, {len(swarm.trainers)} of the run train")
    else:
        yield Check(
            "swarm", YELLOW, f"{swarm.run}: no peer is linked", "invite others: print(swarm.invite())"
        )
    yield _reachability(swarm.reachability)
    if swarm.linked:
        yield _clock(swarm.skew_s)
        yield _speed(swarm)


def _reachability(reached: Reachability) -> Check:
    text = "; ".join((str(reached), *(f"not {level.value}: {why}" for level, why in reached.reasons)))
    fix = REACH_FIXES.get(reached.level)
    return Check("reachability", GREEN, text) if fix is None else Check("reachability", YELLOW, text, fix)


def _clock(skew_s: float) -> Check:
    way = "ahead of" if skew_s > 0 else "behind"
    text = f"{abs(skew_s):,.1f} s {way} the swarm's"
    if abs(skew_s) < SKEW_TOLD_S:
        return Check("clock", GREEN, text)
    light = YELLOW if abs(skew_s) <= SKEW_COMPENSATED_S else RED
    text += (
        "; compensated" if light is YELLOW else f"; only {SKEW_COMPENSATED_S / 60:g} minutes are compensated"
    )
    return Check("clock", light, text, "let the system set its clock: sudo timedatectl set-ntp true")


def _speed(swarm: MembershipFacts) -> Check:
    line = swarm.line
    if line is None:
        return Check("line", YELLOW, "no peer took a speed test now", "ask again in 10 seconds")
    text = (
        f"{_rate(line.upload_bps)} up, {_rate(line.download_bps)} down, round trip {line.rtt_s * 1e3:.0f} ms"
    )
    if min(line.upload_bps, line.download_bps) < SLOW_LINE_BPS:
        fix = "use a cable, end other transfers, and swarm.optimizer(…, codec='int8')"
        return Check("line", YELLOW, f"{text}: slow", fix)
    return Check("line", GREEN, text)


def _rate(bps: float) -> str:
    return (
        "beyond measure"
        if math.isinf(bps)
        else f"{bps / 1e6:,.3g} Mbit/s"
        if bps < 1e9
        else f"{bps / 1e9:,.1f} Gbit/s"
    )


# --- the training -----------------------------------------------------------------------------------------------------


def _prediction(work: Workload, told: Prediction) -> Check:
    text = (
        f"first sample in {_time(told.first_sample_s)}; {told.samples_per_s:,.3g} samples/s here, "
        f"{told.share:.0%} of a step; a step of {work.target_batch_size:,} samples every {_time(told.step_s)}, "
        f"of which {_time(told.averaging_s)} averaging; {told.gb_per_hour:.2g} GB per hour"
    )
    if told.averaging_s > told.step_s / 2:
        enough = 2 ** math.ceil(math.log2(told.averaging_s * told.swarm_samples_per_s))
        fix = f"target_batch_size={enough} or more for all peers, or codec='int8'"
        return Check("prediction", YELLOW, f"{text}. Most of a step is averaging", fix)
    if told.step_s > LONG_STEP_S:
        return Check("prediction", YELLOW, text, "invite more peers, or agree on a smaller target_batch_size")
    return Check("prediction", GREEN, text)


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    return (
        f"{seconds:.2g} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
