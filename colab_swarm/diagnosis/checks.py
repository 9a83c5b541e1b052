"""The doctor's judgement: facts in, traffic lights with their fixes out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from colab_swarm.diagnosis.facts import Facts, Gpu, Machine, Membership, Version
from colab_swarm.diagnosis.predict import PARAMETER_BYTES, USABLE, Needs, Prediction, Workload, micro_batch
from colab_swarm.net.ladder import Reachability, Rung
from colab_swarm.widgets.doctor import Check, Light

GB = 1e9
LEAST_FREE_RAM = 1 * GB
LEAST_FREE_DISK = 2 * GB
LEAST_OPEN_FILES = 512
SKEW_TOLD_S = 5.0
SKEW_COMPENSATED_S = 600.0
SLOW_LINE_BPS = 5e6
LONG_STEP_S = 600.0
REACH_FIXES = {
    Rung.UNVERIFIED: "ask again when another peer has joined: it tries to dial this one",
    Rung.RELAYED: "nothing to do for training; a port forwarded at the router and announce=… make it faster",
    Rung.OUTGOING: "nothing to do while some peer can be dialled; else, on any machine: colab-swarm backbone RUN",
}
GREEN, YELLOW, RED = Light.GREEN, Light.YELLOW, Light.RED


def diagnose(facts: Facts) -> tuple[Check, ...]:
    """Judge the facts, in the order in which a person would mend them: every light but green has its fix."""
    return tuple(_checks(facts))


def _checks(facts: Facts) -> Iterator[Check]:
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


def _platform(facts: Facts) -> Check:
    here = facts.platform
    text = here.name + (f": {here.limits}" if here.limits else "")
    if here.must_agree:
        fix = "read the terms; if they allow it: i_have_read_the_terms=True. cs.simulate(…) needs none"
        return Check("platform", YELLOW, f"{text}. {here.terms}", fix)
    return Check("platform", GREEN, f"{text}. {here.terms}" if here.terms else text)


def _internet(facts: Facts) -> Check:
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


def _swarm(swarm: Membership) -> Iterator[Check]:
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
    text = "; ".join((str(reached), *(f"not {rung.value}: {why}" for rung, why in reached.reasons)))
    fix = REACH_FIXES.get(reached.rung)
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


def _speed(swarm: Membership) -> Check:
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
