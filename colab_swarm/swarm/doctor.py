"""`doctor`: examine this machine and the swarm, and predict the training."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median_high
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import PeerError, SwarmError
from colab_swarm.invite import Invite, Setting
from colab_swarm.net.metering import Speed, measure
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.notebook import checks, machine
from colab_swarm.notebook.checks import Check, Light, Prediction, Subject
from colab_swarm.notebook.platforms import platform
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


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found: a table of traffic lights in a notebook, text when printed.

    Attributes:
        checks: one light each, in the order in which to fix them; every light but green has a fix.
        prediction: of the training; None without a swarm, a model with batches, and a target batch size.
    """

    checks: tuple[Check, ...]
    prediction: Prediction | None = None

    @property
    def ready(self) -> bool:
        """True if no light is red."""
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
    model: Module | str | None = None,
    batches: Iterable[Mapping[str, Tensor]] | None = None,
    target_batch_size: int | None = None,
    compression: str | None = None,
) -> Diagnosis:
    """Examine this machine, its connection to the swarm and the model; report with traffic lights what to fix.

    Takes about a second, some seconds more with a swarm for speed tests, and two more with a model for calibration.
    Run it while the others train: the prediction then accounts for a shared machine or uplink.

    Args:
        swarm: a swarm, or an invitation, which is joined for the examination and left (that counts as a use of it);
            None examines the machine only.
        model: what you train, or a size of `albert`: tiny, base, large, xlarge. It is not changed.
        batches: of the model; some are used up. Not needed with a size.
        target_batch_size, compression: as for `Swarm.optimizer`; known already if the swarm trains or the invitation
            carries them. Without a target batch size there is no prediction.

    Raises:
        ValueError: model, batches, target_batch_size or compression is not usable.
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
        refused = checks.judge(
            "swarm", str(error), "fix that, join, and run cs.doctor(cs.join(…))", Light.RED
        )
        return Diagnosis((*found.checks, refused), found.prediction)
    with visit:
        target, codec = read_settings(Invite.parse(swarm).settings)
        return _examine(visit, model, batches, target_batch_size or target, compression or codec)


def read_settings(suggested: Mapping[str, Setting]) -> tuple[int | None, str | None]:
    """Return an invitation's target batch size and compression, if they are usable."""
    target, compression = suggested.get("target_batch_size"), suggested.get("compression")
    try:
        codec = Precision(compression).name if isinstance(compression, str) else None
    except ValueError:  # no compression of this name here
        codec = None
    return (target if isinstance(target, int) and target > 0 else None), codec


def _examine(
    swarm: Swarm | None,
    model: Module | str | None,
    batches: Iterable[Mapping[str, Tensor]] | None,
    target_batch_size: int | None,
    compression: str | None,
) -> Diagnosis:
    here, subject, ram_bytes = platform(), _subject(swarm, model, batches), machine.free_ram_bytes()
    found = [
        checks.check_platform(here),
        checks.check_internet(here, machine.internet()),
        checks.check_versions(machine.versions()),
        checks.check_compute(machine.cores(), ram_bytes, machine.gpu(), subject),
        checks.check_memory(ram_bytes),
        checks.check_disk(shutil.disk_usage(".").free),
    ]
    speeds: dict[PeerId, float] = {}
    uplink = prediction = None
    if swarm is not None:
        speeds, target, codec = trainers(swarm)
        target_batch_size, compression = target_batch_size or target, compression or codec
        peers = swarm.services.peers
        fastest = sorted(peers.linked(), key=lambda peer: -speeds.get(peer, 0.0))[:TESTS]
        uplink = swarm.runtime.call(_test_uplink(peers, fastest))
        found += [
            checks.check_swarm(swarm.run, len(peers.linked()), len(speeds)),
            checks.check_reachability(swarm.reachability),
        ]
        if peers.linked():
            # a simulated peer has no network, and its wall clock is simulated too
            skew_s = 0.0 if swarm.network is None else -swarm.network.node.linker.clock.behind_s
            found += [checks.check_clock(skew_s), checks.check_bandwidth(uplink)]
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
    swarm: Swarm | None, model: Module | str | None, batches: Iterable[Mapping[str, Tensor]] | None
) -> Subject | None:
    """Measure the model; without a swarm, a size is only looked up."""
    if model is None or find_spec("torch") is None:
        return None
    from colab_swarm.recipes import masked_lm

    if not isinstance(model, str):
        assert batches is not None
        return machine.calibrate(model, batches)
    if model not in masked_lm.SIZES:
        raise ValueError(f"model={model!r} is none of {', '.join(masked_lm.SIZES)}")
    size = masked_lm.SIZES[model]
    length = size.sequence_length
    sample_bytes = masked_lm.sample_bytes(size, length, checkpointing=False)
    name = f"ALBERT-{model} at {length} tokens"
    known = Subject(name, masked_lm.parameter_count(size), sample_bytes)
    if swarm is None:
        return known
    measured = machine.calibrate(*masked_lm.albert(model, swarm=swarm))
    return replace(known, micro_batch=measured.micro_batch, samples_per_s=measured.samples_per_s)


async def _test_uplink(peers: Peers, testers: Sequence[PeerId]) -> Speed | None:
    found = []
    for peer in testers:  # one after the other: together they would share the uplink
        with contextlib.suppress(PeerError):  # gone, busy, or too old for it
            found.append(await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=TEST_TIMEOUT_S))
    return best(found)


def best(found: Sequence[Speed]) -> Speed | None:
    """Return this peer's own uplink: the fastest test each way (slower ones were slow at the other end), median rtt."""
    if not found:
        return None
    upload_bps = max(speed.upload_bps for speed in found)
    download_bps = max(speed.download_bps for speed in found)
    return Speed(upload_bps, download_bps, median_high(speed.rtt_s for speed in found))


def trainers(swarm: Swarm) -> tuple[dict[PeerId, float], int | None, str | None]:
    """Return the speeds of the other trainers by their own records, and our target batch size and compression."""
    optimizer, services, target, codec = swarm.training.latest, swarm.services, None, None
    records: Mapping[PeerId, ProgressRecord] = {}
    with contextlib.suppress(PeerError):  # then use what is known already
        if optimizer is not None:
            swarm.runtime.call(optimizer.collaboration.refresh())
        else:
            records, _ = swarm.runtime.call(read_participants(services.dht, f"{swarm.run_id}/{MODEL}"))
    if optimizer is not None:
        records = dict(optimizer.collaboration.progress.records)
        target, codec = round(optimizer._settings.target_batch_size), optimizer._settings.compression
    speeds = {peer: r.samples_per_s for peer, r in records.items() if peer != swarm.id and r.samples_per_s}
    return speeds, target, codec
