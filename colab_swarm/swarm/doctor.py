"""`doctor`: examine this machine and the swarm, and predict the training."""

import contextlib
import copy
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import PeerError, SwarmError
from colab_swarm.invite import Invite, Setting
from colab_swarm.net.metering import Speed, measure
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.notebook import checks
from colab_swarm.notebook.checks import Check, Light, Prediction, Subject
from colab_swarm.notebook.platforms import platform
from colab_swarm.runtime import free_ram_bytes
from colab_swarm.swarm.joining import join
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.overview import MODEL
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import Precision
from colab_swarm.training.progress import ProgressRecord, read_participants

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

VISITOR = "doctor"  # name of the peer that examines the run of an invitation
TESTS = 3  # peers that are called for a speed test
SIZE_BYTES = 4 << 20
TEST_TIMEOUT_S = 15.0
HOSTS = (("pypi.org", 443), ("huggingface.co", 443))  # which installing and loading a data set contact anyway
CONNECT_TIMEOUT_S = 3.0
PACKAGES = ("torch", "transformers", "cryptography", "aiohttp", "colab-swarm")
CALIBRATION_S = 2.0
MIN_PASSES = 3


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found: a table of traffic lights in a notebook, text when printed."""

    checks: tuple[Check, ...]  # in the order in which to fix them; every light but green has a fix
    prediction: Prediction | None = None  # needs a model with batches, and a target batch size

    @property
    def ready(self) -> bool:
        return all(check.light is not Light.RED for check in self.checks)

    def __str__(self) -> str:
        return checks.draw(self.checks).text()

    def __repr__(self) -> str:
        return f"Diagnosis({checks.summary(self.checks)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return checks.draw(self.checks).bundle()


def doctor(
    swarm: Swarm | str | None = None,
    *,
    model: "Module | str | None" = None,
    batches: "Iterable[Mapping[str, Tensor]] | None" = None,
    target_batch_size: int | None = None,
    compression: str | None = None,
) -> Diagnosis:
    """Examine this machine, its connection and the model; show with traffic lights what to fix.

    Takes about a second, some seconds more with a swarm or a model. Run it while the others train:
    the prediction then accounts for a shared machine or uplink. Raises ValueError if an argument is
    not usable.

    Args:
        swarm: a swarm, or an invitation, which is joined for the examination and left.
        model: what you train, or a size of `albert`: tiny, base, large, xlarge. It is not changed.
        batches: of the model; some are used up. Not needed with a size.
        target_batch_size, compression: as for `Swarm.optimizer`; known if the swarm trains or the
            invitation carries them.
    """
    if compression is not None:
        Precision(compression)
    if model is not None and not isinstance(model, str) and batches is None:
        raise ValueError("a model is measured with its own data: pass batches=… as well")
    if not isinstance(swarm, str):
        return _examine(swarm, model, batches, target_batch_size, compression)
    try:
        visit = join(swarm, peer_name=VISITOR, options=NetworkOptions(lan=False))
    except SwarmError as error:
        found = _examine(None, model, batches, target_batch_size, compression)
        fix = "fix that, join, and run cs.doctor(cs.join(…))"
        return replace(found, checks=(*found.checks, checks.judge("swarm", str(error), fix, Light.RED)))
    with visit:
        target, codec = read_settings(Invite.parse(swarm).settings)
        return _examine(visit, model, batches, target_batch_size or target, compression or codec)


def read_settings(suggested: Mapping[str, Setting]) -> tuple[int | None, str | None]:
    target, compression = suggested.get("target_batch_size"), suggested.get("compression")
    try:
        codec = Precision(compression).name if isinstance(compression, str) else None
    except ValueError:  # no compression of this name here
        codec = None
    return (target if isinstance(target, int) and target > 0 else None), codec


def _examine(
    swarm: Swarm | None,
    model: "Module | str | None",
    batches: "Iterable[Mapping[str, Tensor]] | None",
    target_batch_size: int | None,
    compression: str | None,
) -> Diagnosis:
    here, subject, ram_bytes = platform(), _subject(swarm, model, batches), free_ram_bytes()
    found = [
        checks.check_platform(here),
        checks.check_internet(here, internet()),
        checks.check_versions(PACKAGES, versions()),
        checks.check_compute(cores(), ram_bytes, gpu(), subject),
        checks.check_memory(ram_bytes),
        checks.check_disk(shutil.disk_usage(".").free),
    ]
    speeds: dict[PeerId, float] = {}
    uplink = prediction = None
    if swarm is not None:
        speeds, target, codec = trainers(swarm)
        target_batch_size, compression = target_batch_size or target, compression or codec
        peers = sorted(swarm.services.peers.linked(), key=lambda peer: -speeds.get(peer, 0.0))
        tests = swarm.runtime.call(_test_uplink(swarm.services.peers, peers[:TESTS]))
        uplink = max(
            tests, key=lambda speed: speed.upload_bps, default=None
        )  # others were slow at the other end
        found.append(checks.check_swarm(swarm.run, len(peers), len(speeds)))
        found.append(checks.check_reachability(swarm.reachability))
        if peers:
            # a simulated peer has no network, and its wall clock is simulated too
            behind_s = 0.0 if swarm.network is None else swarm.network.node.linker.clock.behind_s
            found += [checks.check_clock(-behind_s), checks.check_bandwidth(uplink)]
    if subject is not None and subject.samples_per_s and target_batch_size:
        prediction = checks.predict(
            subject,
            target_batch_size,
            Precision(compression or "float32", fine=0).at(0).encoded_bytes(subject.parameters),
            tuple(speeds.values()),
            uplink or checks.UNKNOWN,
            reduces=swarm is not None and bool(swarm.reachability.addresses),
        )
        found.append(checks.check_prediction(prediction))
    return Diagnosis(tuple(found), prediction)


def _subject(
    swarm: Swarm | None, model: "Module | str | None", batches: "Iterable[Mapping[str, Tensor]] | None"
) -> Subject | None:
    if model is None or find_spec("torch") is None:
        return None
    from colab_swarm.recipes import masked_lm

    if not isinstance(model, str):
        assert batches is not None
        return calibrate(model, batches)
    if model not in masked_lm.SIZES:
        raise ValueError(f"model={model!r} is none of {', '.join(masked_lm.SIZES)}")
    size = masked_lm.SIZES[model]
    length = size.sequence_length
    sample_bytes = masked_lm.sample_bytes(size, length, checkpointing=False)
    known = Subject(f"ALBERT-{model} at {length} tokens", masked_lm.parameter_count(size), sample_bytes)
    if swarm is None:
        return known
    measured = calibrate(*masked_lm.albert(model, swarm=swarm))
    return replace(known, micro_batch=measured.micro_batch, samples_per_s=measured.samples_per_s)


async def _test_uplink(peers: Peers, testers: Sequence[PeerId]) -> list[Speed]:
    found = []
    for peer in testers:  # one after the other: together they would share the uplink
        with contextlib.suppress(PeerError):  # gone, busy, or too old for it
            found.append(await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=TEST_TIMEOUT_S))
    return found


def trainers(swarm: Swarm) -> tuple[dict[PeerId, float], int | None, str | None]:
    """Return the other trainers' speeds, and our target batch size and compression."""
    newest, records = next(reversed(swarm.optimizers.values()), None), dict[PeerId, ProgressRecord]()
    own = None if newest is None else newest._settings
    prefix = f"{swarm.run_id}/{MODEL}" if own is None else own.prefix
    with contextlib.suppress(PeerError):  # then only those are known to train who were read before
        if newest is None:
            records, _ = swarm.runtime.call(read_participants(swarm.services.dht, prefix))
        else:
            swarm.runtime.call(newest.collaboration.refresh())
    if newest is not None:
        records = dict(newest.collaboration.progress.records)
    speeds = {peer: r.samples_per_s for peer, r in records.items() if peer != swarm.id and r.samples_per_s}
    return (speeds, None, None) if own is None else (speeds, round(own.target_batch_size), own.compression)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> tuple[str, int, int] | None:
    if find_spec("torch") is None:
        return None
    import torch

    return (torch.cuda.get_device_name(), *torch.cuda.mem_get_info()) if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def internet() -> bool:
    up = threading.Event()

    def try_host(host: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(host, CONNECT_TIMEOUT_S).close()
            up.set()

    for host in HOSTS:  # in threads, because a name lookup has no timeout
        threading.Thread(target=try_host, args=(host,), daemon=True).start()
    return up.wait(CONNECT_TIMEOUT_S)


def calibrate(
    model: "Module", batches: "Iterable[Mapping[str, Tensor]]", *, seconds: float = CALIBRATION_S
) -> Subject:
    """Run ``model(**batch).loss.backward()`` for about ``seconds`` after a short warm-up.

    A copy is trained, and torch's random state is as before; the used batches are gone. Raises
    ValueError if there are not enough.
    """
    import torch

    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    name, model = type(model).__name__, copy.deepcopy(model).train()
    model.zero_grad(set_to_none=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        passes = _train(model, batches)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro_batch = next(passes)
        _measure(passes, seconds / 4, 1)  # the first passes are slow
        samples_per_s = _measure(passes, seconds, MIN_PASSES)
    return Subject(name, numel, sum(saved.values()) / micro_batch, micro_batch, samples_per_s)


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
