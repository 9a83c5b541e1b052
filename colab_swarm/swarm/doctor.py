"""`doctor`: examine this machine and the swarm with traffic lights."""

import contextlib
import enum
import os
import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import PeerError, SwarmError, require
from colab_swarm.markup import bandwidth, count, plain, text
from colab_swarm.net.carrier import Speed, measure
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook import theme
from colab_swarm.notebook.explanation import install_line
from colab_swarm.notebook.platforms import Platform, platform
from colab_swarm.runtime import free_ram_bytes
from colab_swarm.swarm.joining import join
from colab_swarm.swarm.network import NetworkOptions, internet
from colab_swarm.swarm.overview import MODEL
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.progress import ProgressRecord, read_participants

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

SIZE_BYTES = 4 << 20
CALIBRATION_S = 2.0
PACKAGES = ("torch", "transformers", "cryptography", "aiohttp", "colab-swarm")
PARAMETER_BYTES = 16  # training memory per parameter: value, gradient and two moments, in float32
USABLE = 0.8  # share of free memory to plan with; the rest is for temporaries and fragments
MAX_MICRO_BATCH = 512
GB = 1e9
MAX_SKEW_S, MAX_COMPENSATED_SKEW_S = 5.0, 600.0
SLOW_BPS = 5e6
WIDTH = 100
INDENT = " " * 18
MAX_CHARS = 10_000


@dataclass(frozen=True)
class Subject:
    name: str  # for people, such as "ALBERT-large at 512 tokens"
    parameters: int  # number of trained values
    sample_bytes: float  # saved for the backward pass of one sample
    samples_per_s: float = 0.0  # measured speed, with the loading of batches; 0 if unknown


class Light(enum.Enum):  # hue, symbol and word of a result
    GREEN = ("green", "✔", "good")
    YELLOW = ("amber", "▲", "warning")
    RED = ("red", "✖", "problem")


GREEN, YELLOW, RED = Light.GREEN, Light.YELLOW, Light.RED
REACH_FIXES = {
    ReachabilityLevel.UNVERIFIED: "run the doctor again when another peer has joined: it tries to dial this one",
    ReachabilityLevel.RELAYED: "nothing to do; a port forwarded at the router and announce=… make it faster",
    ReachabilityLevel.OUTGOING: "if no peer can be dialled, run on any machine: colab-swarm create my-run",
}

ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")
OTHER_GPU = (
    "take another GPU (on Kaggle: Session options, Accelerator, GPU T4 x2), or a build of torch for this one: "
    "torch.cuda.get_arch_list() shows what a build is for"
)
FLOAT16 = (
    "use float16: torch.autocast('cuda', torch.float16) with a torch.amp.GradScaler. Trainer and TRL: fp16=True, "
    "bf16=False. QLoRA: also bnb_4bit_compute_dtype=torch.float16 and, after the trainer is made, for p in "
    "model.parameters(): p.data = p.data.float() if p.requires_grad else p.data"
)
HOST = (
    "put the training into train.py, with cs.host_optimizer(swarm if rank == 0 else None, …) for swarm.optimizer(…), "
    "and run: torchrun --nproc_per_node={count} train.py (the notebook two_gpus shows it)"
)


@dataclass(frozen=True)
class Check:
    name: str  # of the check, such as ``internet``
    light: Light  # the result
    text: str  # the facts
    fix: str = ""  # what to do; empty only for a green light


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found: a table of traffic lights in a notebook, text when printed."""

    checks: tuple[Check, ...]  # in the order in which to fix them; every light but green has a fix

    @property
    def ready(self) -> bool:
        return all(check.light is not Light.RED for check in self.checks)

    def __str__(self) -> str:
        return self._drawn().text()

    def __repr__(self) -> str:
        return f"Diagnosis({self._summary()})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._drawn().bundle()

    def _summary(self) -> str:
        number = {light: sum(check.light is light for check in self.checks) for light in Light}
        ready = "ready to train, with warnings" if number[YELLOW] else "ready to train"
        verdict = "fix the problems before you train" if number[RED] else ready
        lights = ", ".join(f"{n} {' '.join(light.value[1:])}" for light, n in number.items() if n)
        return f"{verdict}: {lights}"

    def _drawn(self) -> theme.Document:
        shown = theme.Document("doctor", self._summary(), label="report of the doctor", line=self._summary())
        rows, lines = [], []
        for check in self.checks:
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


def doctor(
    swarm: Swarm | str | None = None,
    *,
    model: "Module | str | None" = None,
    batches: "Iterable[Mapping[str, Tensor]] | None" = None,
) -> Diagnosis:
    """Examine this machine, its connection and the model; show with traffic lights what to fix.

    Takes some seconds. Raises ValueError if an argument is not usable.

    Args:
        swarm: a swarm, or an invitation, which is joined for the examination and left.
        model: what you train, or a size of `albert`: tiny, base, large, xlarge. It is not changed.
        batches: of the model; some are used up. Not needed with a size.
    """
    require(
        model is None or isinstance(model, str) or batches is not None,
        "a model is measured with its own data: pass batches=… as well",
    )
    if not isinstance(swarm, str):
        return _examine(swarm, model, batches)
    try:
        visit = join(swarm, peer_name="doctor", options=NetworkOptions(lan=False))
    except SwarmError as error:
        found = _examine(None, model, batches)
        fix = "fix that, join, and run cs.doctor(cs.join(…))"
        return replace(found, checks=(*found.checks, judge("swarm", str(error), fix, Light.RED)))
    with visit:
        return _examine(visit, model, batches)


def _examine(
    swarm: Swarm | None,
    model: "Module | str | None",
    batches: "Iterable[Mapping[str, Tensor]] | None",
) -> Diagnosis:
    here, gpus = platform(), gpu_checks()
    usable = all(check.light is not RED for check in gpus)
    subject, ram_bytes = _subject(swarm, model if usable else None, batches), free_ram_bytes()
    found = [
        check_platform(here),
        check_internet(here, internet()),
        check_versions(PACKAGES, versions()),
        check_compute(cores(), ram_bytes, gpu(), subject),
        *gpus,
    ]
    if swarm is not None:
        speeds = trainers(swarm)
        peers = sorted(swarm.services.peers.linked(), key=lambda peer: -speeds.get(peer, 0.0))
        uplink = swarm.runtime.call(_test_uplink(swarm.services.peers, peers[:3]))
        found.append(check_swarm(swarm.run, len(peers), len(speeds)))
        found.append(check_reachability(swarm.reachability))
        if peers:
            # a simulated peer has no network, and its wall clock is simulated too
            behind_s = 0.0 if swarm.network is None else swarm.network.node.linker.clock.behind_s
            found += [check_clock(-behind_s), check_bandwidth(uplink)]
    return Diagnosis(tuple(found))


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
    known = Subject(f"ALBERT-{model} at {length} tokens", masked_lm.parameter_count(size), sample_bytes)
    if swarm is None:
        return known
    measured = calibrate(*masked_lm.albert(model, swarm=swarm))
    return replace(known, samples_per_s=measured.samples_per_s)


async def _test_uplink(peers: Peers, testers: Sequence[PeerId]) -> Speed | None:
    for peer in testers:
        with contextlib.suppress(PeerError):  # gone, busy, or too old for it
            return await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=15.0)
    return None


def trainers(swarm: Swarm) -> dict[PeerId, float]:
    """Return the other trainers' speeds in samples/s; without an answer those of the trainers known so far."""
    newest = next(reversed(swarm.optimizers.values()), None)
    records: Mapping[PeerId, ProgressRecord] = {}
    with contextlib.suppress(PeerError):
        if newest is None:
            records, *_ = swarm.runtime.call(read_participants(swarm.services.dht, f"{swarm.run_id}/{MODEL}"))
        else:
            swarm.runtime.call(newest.collaboration.refresh())
    if newest is not None:
        records = newest.collaboration.progress.records
    return {
        peer: record.samples_per_s
        for peer, record in records.items()
        if peer != swarm.id and record.samples_per_s
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> tuple[str, int, int] | None:
    if find_spec("torch") is None:
        return None
    import torch

    return (torch.cuda.get_device_name(), *torch.cuda.mem_get_info()) if torch.cuda.is_available() else None


def gpu_checks() -> list[Check]:
    if gpu() is None:
        return []
    from torch import cuda

    return check_gpus(
        cuda.get_device_name(),
        cuda.get_device_capability(),
        cuda.get_arch_list(),
        cuda.device_count(),
        bfloat16=cuda.is_bf16_supported(including_emulation=False),
        is_rank="RANK" in os.environ,  # of torchrun
    )


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def calibrate(
    model: "Module", batches: "Iterable[Mapping[str, Tensor]]", *, seconds: float = CALIBRATION_S
) -> Subject:
    """Run ``model(**batch).loss.backward()`` for about ``seconds`` after a short warm-up.

    Afterwards the model and torch's random state are as before. A ValueError if the batches run out.
    """
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    with _restored(model, trained):
        passes = _train(model, batches)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro_batch = next(passes)
        _measure(passes, seconds / 4, 1)  # the first passes are slow
        samples_per_s = _measure(passes, seconds, 3)
    numel = sum(parameter.numel() for parameter in trained)
    sample_bytes = sum(saved.values()) / micro_batch
    return Subject(type(model).__name__, numel, sample_bytes, samples_per_s)


@contextlib.contextmanager
def _restored(model: "Module", trained: "list[Parameter]") -> Iterator[None]:
    import torch

    gradients = [parameter.grad for parameter in trained]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            model.train()
            model.zero_grad(set_to_none=True)
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _train(model: "Module", batches: "Iterable[Mapping[str, Tensor]]") -> Iterator[int]:
    device = next(model.parameters()).device
    for batch in batches:
        model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.backward()
        model.zero_grad(set_to_none=True)
        yield len(next(iter(batch.values())))
    raise ValueError("the batches ran out during the calibration: pass an endless iterable, or more of them")


def _measure(passes: Iterator[int], seconds: float, least: int) -> float:
    import torch

    samples, began_at = 0, time.perf_counter()
    while least > 0 or time.perf_counter() - began_at < seconds:
        samples, least = samples + next(passes), least - 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels run asynchronously
    return samples / (time.perf_counter() - began_at)


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
    if missing := [name for name in wanted if name not in installed]:
        verb = "are" if len(missing) > 1 else "is"
        words = f"{' and '.join(missing)} {verb} missing, so this peer can relay but not train; {words}"
        light = RED if "torch" in missing else YELLOW
        return judge("versions", words, install_line(missing[0]), light)
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
    words += f"; largest micro-batch of {subject.name}: {size:,}"
    if subject.samples_per_s:
        words += f", measured speed: {subject.samples_per_s:,.3g} samples/s"
    if size:
        return judge("compute", words, fix)
    fix = "take a smaller model or shorter samples, or free memory: restart the kernel"
    return judge("compute", words, fix, RED)


def check_gpus(
    name: str,
    capability: tuple[int, int],
    architectures: Sequence[str],
    count: int,
    *,
    bfloat16: bool,
    is_rank: bool,
) -> list[Check]:
    """Judge GPUs of one kind: whether torch was built for them, computes in bfloat16, and uses them all.

    Args:
        capability: of the GPUs, such as (7, 5) of a T4.
        architectures: that torch was built for, such as ``sm_75`` and ``compute_90``; empty if unknown.
        count: of the GPUs in this machine.
        bfloat16: whether they compute in it themselves: in emulation all do.
        is_rank: whether this process shares the GPUs with others of one `torch.distributed` job.
    """
    if not runs_on(capability, architectures):
        own = "sm_{}{}".format(*capability)
        words = f"this torch was built for {', '.join(architectures)}, not for {name} ({own})"
        return [judge("GPU", words, OTHER_GPU, RED)]
    found = []
    if not bfloat16:
        found.append(judge("precision", f"{name} has no bfloat16: it is emulated, and slow", FLOAT16))
    if count > 1 and not is_rank:
        fix = HOST.format(count=count)
        found.append(judge("GPUs", f"{count} × {name}, and this process trains on one", fix))
    return found


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code for one of the architectures runs on a GPU, as CUDA has it.

    Binary code (``sm_75``) runs on later minor versions of its major version, PTX (``compute_75``) on all later ones.
    """
    built = [match for one in architectures if (match := ARCHITECTURE.match(one))]
    return not built or any(
        (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0])
        for kind, major, minor in (match.groups() for match in built)
    )


def check_swarm(run: str, linked: int, training: int) -> Check:
    if linked:
        return judge("swarm", f"{run}: {count(linked, 'peer')} connected, {training or 'none'} training")
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
    words += f"; at most {MAX_COMPENSATED_SKEW_S / 60:g} minutes are compensated"
    return judge("clock", words, fix, RED)


def check_bandwidth(uplink: Speed | None) -> Check:
    if uplink is None:
        return judge("bandwidth", "no peer was free for a speed test", "run the doctor again in 10 s")
    up, down = bandwidth(uplink.upload_bps), bandwidth(uplink.download_bps)
    words = f"{up} up, {down} down, round trip {uplink.rtt_s * 1e3:.0f} ms"
    slow = min(uplink.upload_bps, uplink.download_bps) < SLOW_BPS
    fix = "use a cable, end other transfers, and swarm.optimizer(…, compression='int8')" if slow else ""
    return judge("bandwidth", words + ": slow" * slow, fix)


def fitting_batch(free_bytes: float, subject: Subject) -> int:
    """Return the largest power of two, at most 512, that fits into ``free_bytes``; 0 if none does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * subject.parameters
    fitting = min(int(room_bytes / subject.sample_bytes), MAX_MICRO_BATCH)
    return 1 << (fitting.bit_length() - 1) if fitting > 0 else 0
