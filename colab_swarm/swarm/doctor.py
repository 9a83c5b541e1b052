"""`doctor`: examine this machine and the swarm with traffic lights."""

import contextlib
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from colab_swarm.errors import PeerError, SwarmError, require
from colab_swarm.markup import bandwidth, count, plain, text
from colab_swarm.net.addresses import IP, is_local, own_ips
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.net.speed import Speed, measure
from colab_swarm.notebook import theme
from colab_swarm.notebook.explanation import install_line
from colab_swarm.notebook.platforms import Platform, platform
from colab_swarm.runtime import cores, free_ram_bytes
from colab_swarm.swarm.calibration import Subject, advice, calibrate, calibrate_step, fitting_batch
from colab_swarm.swarm.joining import join
from colab_swarm.swarm.network import NetworkOptions, internet
from colab_swarm.swarm.overview import MODEL
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.records import read_participants

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

SIZE_BYTES = 4 << 20
_TEST_S = 15.0
PACKAGES = ("torch", "transformers", "cryptography", "aiohttp", "colab-swarm")
GB = 1e9
_MAX_SKEW_S = 5.0
_MAX_COMPENSATED_SKEW_S = 600.0
_SLOW_BPS = 5e6
WIDTH = 100
_INDENT = " " * 18
MAX_CHARS = 10_000


class Light(NamedTuple):
    """The result of a check, as a traffic light."""

    hue: str
    symbol: str
    word: str


GREEN = Light("green", "✔", "good")
YELLOW = Light("amber", "▲", "warning")
RED = Light("red", "✖", "problem")
_REACH_FIXES = {
    ReachabilityLevel.UNVERIFIED: "run the doctor again when another peer has joined: it tries to dial this one",
    ReachabilityLevel.RELAYED: "nothing to do; a port forwarded at the router and announce=… make it faster",
    ReachabilityLevel.OUTGOING: "if no peer can be dialled, run on any machine: colab-swarm create my-run",
}

ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")
_OTHER_GPU = (
    "take another GPU (on Kaggle: Session options, Accelerator, GPU T4 x2), or a build of torch for this one: "
    "torch.cuda.get_arch_list() shows what a build is for"
)
_FLOAT16 = (
    "use float16: torch.autocast('cuda', torch.float16) with a torch.amp.GradScaler. Trainer and TRL: fp16=True, "
    "bf16=False. QLoRA: also bnb_4bit_compute_dtype=torch.float16 and, after the trainer is made, for p in "
    "model.parameters(): p.data = p.data.float() if p.requires_grad else p.data"
)
HOST = (
    "put the training into train.py, with cs.host_optimizer(swarm if rank == 0 else None, …) for swarm.optimizer(…), "
    "and run: torchrun --nproc_per_node={count} train.py (the notebook two_gpus shows it)"
)


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, all of one kind."""

    name: str
    count: int
    free_bytes: int  # free memory of the first GPU
    total_bytes: int
    capability: tuple[int, int]  # the compute capability, such as (7, 5) for a T4
    architectures: Sequence[
        str
    ]  # those that torch was built for, as ``sm_75``, ``compute_90``; empty if unknown
    bfloat16: bool  # whether the hardware computes in bfloat16; every GPU can emulate it


@dataclass(frozen=True)
class Check:
    name: str  # of the check, such as ``internet``
    light: Light  # the result
    text: str  # the facts
    fix: str = ""  # what to do; empty only for a green light


@dataclass(frozen=True)
class Diagnosis:
    """The checks of the doctor: a table of traffic lights in a notebook, text when printed."""

    checks: tuple[Check, ...]  # in the order in which to fix them; each check that is not green has a fix

    @property
    def ready(self) -> bool:
        return all(check.light is not RED for check in self.checks)

    def __str__(self) -> str:
        return self._document().text()

    def __repr__(self) -> str:
        return f"Diagnosis({self._document().line})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._document().bundle()

    def _summary(self) -> tuple[str, str]:
        numbers = Counter(check.light for check in self.checks)
        verdict = "ready to train"
        if numbers[RED]:
            verdict = "fix the problems before you train"
        elif numbers[YELLOW]:
            verdict = "ready to train, with warnings"
        seen = [light for light in (GREEN, YELLOW, RED) if numbers[light]]
        lights = ", ".join(f"{numbers[light]} {light.symbol} {light.word}" for light in seen)
        return verdict, lights

    def _document(self) -> theme.Document:
        document = theme.Document(*self._summary(), label="report of the doctor")
        rows = [_cells(check) for check in self.checks]
        lines = [line for check in self.checks for line in _text_lines(check)]
        document.draw(theme.table(("check", "", "facts, and what to do"), rows, label="checks"), *lines)
        return document


def _cells(check: Check) -> tuple[str, str, str]:
    name = f'<b style="white-space:nowrap">{text(check.name)}</b>'
    facts = text(check.text, MAX_CHARS)
    if check.fix:
        facts += f"<br>→ <b>{text(check.fix, MAX_CHARS)}</b>"
    return name, theme.mark(*check.light)[1], facts


def _text_lines(check: Check) -> list[str]:
    first = f" {check.light.symbol} {plain(check.name):<15}{plain(check.text, MAX_CHARS)}"
    lines = textwrap.wrap(first, WIDTH, subsequent_indent=_INDENT)
    if check.fix:
        fix = f"{_INDENT}→ {plain(check.fix, MAX_CHARS)}"
        # a command in the text must not be broken at a hyphen
        lines += textwrap.wrap(fix, WIDTH, subsequent_indent=_INDENT + "  ", break_on_hyphens=False)
    return lines


def doctor(
    swarm: Swarm | str | None = None,
    *,
    model: "Module | str | None" = None,
    batches: "Iterable[Mapping[str, Tensor]] | None" = None,
    step: Callable[[], object] | None = None,
) -> Diagnosis:
    """Examine this machine, its connection and the model; show with traffic lights what to fix.

    Takes some seconds. Raises ValueError if an argument is not usable.

    Args:
        swarm: a swarm, or an invitation. The doctor joins the run of an invitation, and leaves it at the end.
        model: the model that you train, or a size of `albert`: tiny, base, large, xlarge. It is not changed.
        batches: batches for the model; some are used up. Not needed with a size.
        step: a function that does what your loop does before ``optimizer.step()``. The doctor measures its time and
            compares it with the time of your loop.
    """
    has_data = model is None or isinstance(model, str) or batches is not None
    require(has_data, "a model is measured with its own data: pass batches=… as well")
    if isinstance(swarm, str):
        try:
            visit = join(swarm, peer_name="doctor", options=NetworkOptions(lan=False))
        except SwarmError as error:
            fix = "fix that, join, and run cs.doctor(cs.join(…))"
            failed = judge("swarm", str(error), fix, RED)
            return Diagnosis((*doctor(model=model, batches=batches).checks, failed))
        with visit:
            return doctor(visit, model=model, batches=batches, step=step)
    gpus = gpus_here()
    # torchrun sets the rank
    of_gpus = [] if gpus is None else check_gpus(gpus, is_rank="RANK" in os.environ)
    # the model cannot run on a GPU that torch was not built for
    if any(check.light is RED for check in of_gpus):
        model = None
    subject = _subject(swarm, model, batches)
    here = platform()
    checks = [
        check_platform(here),
        check_internet(here, internet()),
        check_versions(versions()),
        check_compute(cores(), free_ram_bytes(), gpus, subject),
        *of_gpus,
    ]
    if swarm is None:
        checks.append(check_addresses(here, own_ips()))
    else:
        checks += _swarm_checks(swarm)
    if step is not None:
        checks += _step_checks(swarm, step)
    return Diagnosis(tuple(checks))


def _swarm_checks(swarm: Swarm) -> list[Check]:
    speeds = _trainers(swarm)
    training = sum(speed > 0 for speed in speeds.values())
    peers = sorted(swarm.services.peers.linked(), key=lambda peer: -speeds.get(peer, 0.0))
    checks = [check_swarm(swarm.run, len(peers), training), check_reachability(swarm.reachability)]
    if not peers:
        return checks
    # a simulated peer has no network, and its wall clock is simulated too
    behind_s = 0.0 if swarm.network is None else swarm.network.node.clock.behind_s
    uplink = swarm.runtime.call(_test_uplink(swarm.services.peers, peers[:3]))
    return [*checks, check_clock(-behind_s), check_bandwidth(uplink)]


def _step_checks(swarm: Swarm | None, step: Callable[[], object]) -> list[Check]:
    trained = list(swarm.optimizers.values()) if swarm else []
    if swarm is None or swarm.services.pace or not (trained and trained[-1].times.turns):
        raise ValueError("step=… is compared with your loop: train first, then cs.doctor(swarm, step=…)")
    optimizer = trained[-1]
    alone_s = calibrate_step(optimizer, step)
    checks = [judge(*fact) for fact in advice(alone_s, list(optimizer.times.turns), optimizer.settings)]
    return [*checks, judge("vectors", f"the swarm's vectors lie {optimizer.vectors_at}", "")]


def _subject(
    swarm: Swarm | None, model: "Module | str | None", batches: "Iterable[Mapping[str, Tensor]] | None"
) -> Subject | None:
    if model is None or find_spec("torch") is None:
        return None
    from colab_swarm.recipes import masked_lm

    if not isinstance(model, str):
        assert batches is not None
        return calibrate(model, batches)
    require(model in masked_lm.SIZES, f"model={model!r} is none of {', '.join(masked_lm.SIZES)}")
    size = masked_lm.SIZES[model]
    length = size.sequence_length
    sample_bytes = masked_lm.sample_bytes(size, length, checkpointing=False)
    subject = Subject(f"ALBERT-{model} at {length} tokens", masked_lm.parameter_count(size), sample_bytes)
    if swarm is None:
        return subject
    measured = calibrate(*masked_lm.albert(model, swarm=swarm))
    return replace(subject, samples_per_s=measured.samples_per_s)


async def _test_uplink(peers: Node, testers: Sequence[PeerId]) -> Speed | None:
    for peer in testers:
        # the peer may have left, be busy, or run a version without this test
        with contextlib.suppress(PeerError):
            return await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=_TEST_S)
    return None


def _trainers(swarm: Swarm) -> dict[PeerId, float]:
    """Return the speeds of the other trainers in samples/s; empty if their records cannot be read."""
    prefix = f"{swarm.run_id}/{MODEL}"
    for optimizer in swarm.optimizers.values():
        prefix = optimizer.settings.prefix
    try:
        records, *_ = swarm.runtime.call(read_participants(swarm.services.dht, prefix))
    except PeerError:
        return {}
    return {peer: record.samples_per_s for peer, record in records.items() if peer != swarm.id}


def gpus_here() -> Gpus | None:
    if find_spec("torch") is None:
        return None
    from torch import cuda

    if not cuda.is_available():
        return None
    return Gpus(
        cuda.get_device_name(),
        cuda.device_count(),
        *cuda.mem_get_info(),
        cuda.get_device_capability(),
        cuda.get_arch_list(),
        cuda.is_bf16_supported(including_emulation=False),
    )


def versions() -> dict[str, str]:
    """Return the versions of `PACKAGES`; empty for a package that is not installed."""
    installed = dict.fromkeys(PACKAGES, "")
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def judge(name: str, words: str, fix: str = "", light: Light = YELLOW) -> Check:
    """Return a check: green if there is no fix, otherwise with ``light``."""
    return Check(name, light if fix else GREEN, words, fix)


def check_platform(here: Platform) -> Check:
    words = here.name
    if here.limits:
        words += f": {here.limits}"
    if here.terms:
        words += f". {here.terms}"
    fix = ""
    if here.must_agree:
        fix = "read the terms; if they allow it: accept_terms=True. cs.simulate(…) needs no permission"
    return judge("platform", words, fix)


def check_internet(here: Platform, up: bool) -> Check:
    if up:
        return judge("internet", "well-known hosts answer")
    if here.internet_help:
        return judge("internet", "it is off for this notebook", here.internet_help, RED)
    fix = "check the network and its proxy; a swarm in the local network needs no internet: cs.join()"
    return judge("internet", "no well-known host answers", fix)


def check_versions(installed: Mapping[str, str]) -> Check:
    words = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    missing = [name for name, version in installed.items() if not version]
    if not missing:
        return judge("versions", words)
    verb = "is" if len(missing) == 1 else "are"
    words = f"{' and '.join(missing)} {verb} missing, so this peer can relay but not train; {words}"
    light = RED if "torch" in missing else YELLOW
    return judge("versions", words, install_line(missing[0]), light)


def check_compute(
    cores: int, free_ram_bytes: int | None, gpus: Gpus | None, subject: Subject | None
) -> Check:
    """Judge the cores, or the GPU, and the memory for the model."""
    if gpus is None:
        free_bytes = free_ram_bytes
        words = f"no GPU, {count(cores, 'core')}"
        fix = "training works, but slowly; Colab and Kaggle offer GPUs in their settings"
    else:
        free_bytes = gpus.free_bytes
        words = f"{gpus.name}, {free_bytes / GB:.1f} of {gpus.total_bytes / GB:.1f} GB free"
        fix = ""
    if subject is None or free_bytes is None:
        return judge("compute", words, fix)
    micro_batch = fitting_batch(free_bytes, subject)
    words += f"; largest micro-batch of {subject.name}: {micro_batch:,}"
    if subject.samples_per_s:
        words += f", measured speed: {subject.samples_per_s:,.3g} samples/s"
    if micro_batch:
        return judge("compute", words, fix)
    fix = "take a smaller model or shorter samples, or free memory: restart the kernel"
    return judge("compute", words, fix, RED)


def check_gpus(gpus: Gpus, *, is_rank: bool = False) -> list[Check]:
    """Judge whether torch was built for the GPUs, whether they compute in bfloat16, and whether all are used.

    ``is_rank``: this process shares the GPUs with other processes of one `torch.distributed` job.
    """
    if not runs_on(gpus.capability, gpus.architectures):
        own = "sm_{}{}".format(*gpus.capability)
        words = f"this torch was built for {', '.join(gpus.architectures)}, not for {gpus.name} ({own})"
        return [judge("GPU", words, _OTHER_GPU, RED)]
    checks = []
    if not gpus.bfloat16:
        words = f"{gpus.name} has no bfloat16: it is emulated, and slow"
        checks.append(judge("precision", words, _FLOAT16))
    if gpus.count > 1 and not is_rank:
        words = f"{gpus.count} × {gpus.name}, and this process trains on one"
        checks.append(judge("GPUs", words, HOST.format(count=gpus.count)))
    return checks


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code for one of the architectures runs on a GPU, by the rules of CUDA.

    Binary code (``sm_75``) runs on the same and later minor versions of its major version. PTX (``compute_75``) runs
    on the same and all later versions.
    """
    matches = [match for match in map(ARCHITECTURE.match, architectures) if match]
    for match in matches:
        kind, major, minor = match.groups()
        is_later = (int(major), int(minor)) <= capability
        if is_later and (kind == "compute" or int(major) == capability[0]):
            return True
    # if no architecture is known, assume that code runs on this GPU
    return not matches


def check_swarm(run: str, linked: int, training: int) -> Check:
    if linked:
        return judge("swarm", f"{run}: {count(linked, 'peer')} connected, {training or 'none'} training")
    return judge("swarm", f"{run}: no linked peer", "invite others: print(swarm.invite())")


def check_reachability(reached: Reachability) -> Check:
    words = str(reached)
    for level, reason in reached.reasons:
        words += f"; not {level.value}: {reason}"
    return judge("reachability", words, _REACH_FIXES.get(reached.level, ""))


def check_addresses(here: Platform, ips: Iterable[IP]) -> Check:
    """Judge by the addresses of this machine whether others could reach it; only another peer's attempt is proof."""
    public = sorted(str(ip) for ip in ips if not is_local(str(ip)))
    fix = "with an invitation, cs.doctor('swarm://…'), a peer of the run tries to dial this machine"
    if public and not here.alone:
        return judge("reachability", f"others reach {public[0]}, unless a firewall blocks it", fix)
    words = (
        "no public address: peers outside this network reach it only by a relay, a tunnel or a forwarded port"
    )
    start = "to join a run it needs none; to start one, pass options=cs.NetworkOptions(iroh='public')"
    return judge("reachability", words, f"{start}; {fix}")


def check_clock(skew_s: float) -> Check:
    """Judge ``skew_s``, this peer's clock minus the swarm's."""
    direction = "ahead of" if skew_s > 0 else "behind"
    words = f"{abs(skew_s):,.1f} s {direction} the swarm's"
    fix = "let the system set its clock: sudo timedatectl set-ntp true"
    if abs(skew_s) < _MAX_SKEW_S:
        return judge("clock", words)
    if abs(skew_s) <= _MAX_COMPENSATED_SKEW_S:
        return judge("clock", f"{words}; compensated", fix)
    words += f"; at most {_MAX_COMPENSATED_SKEW_S / 60:g} minutes are compensated"
    return judge("clock", words, fix, RED)


def check_bandwidth(uplink: Speed | None) -> Check:
    if uplink is None:
        return judge("bandwidth", "no peer was free for a speed test", "run the doctor again in 10 s")
    upload = bandwidth(uplink.upload_bps)
    download = bandwidth(uplink.download_bps)
    words = f"{upload} up, {download} down, round trip {uplink.rtt_s * 1e3:.0f} ms"
    if min(uplink.upload_bps, uplink.download_bps) >= _SLOW_BPS:
        return judge("bandwidth", words)
    fix = "use a cable, end other transfers, and swarm.optimizer(…, communication='int8')"
    return judge("bandwidth", f"{words}: slow", fix)
