"""`doctor`: examine this machine and the swarm, and predict the training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median_high
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import PeerError, SwarmError
from colab_swarm.invite import Invite, Setting
from colab_swarm.net.metering import Speed, measure
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.notebook import checks
from colab_swarm.notebook.machine import internet, machine, versions
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

    from colab_swarm.notebook.machine import Calibration
    from colab_swarm.recipes.masked_lm import AlbertSize

VISITOR = "doctor"  # name of the peer that examines the run of an invitation
FEW = 8
TESTS = 3  # peers that are called for a speed test
SIZE_BYTES = 4 << 20
TEST_TIMEOUT_S = 15.0


class Diagnosis:
    """What the doctor found: a table of traffic lights in a notebook, text when printed.

    Attributes:
        facts: what was measured.
        checks: the judgement, one light each.
        prediction: of the training; None without a swarm, a model with batches, and a target batch size.
    """

    def __init__(self, facts: checks.DoctorFacts) -> None:
        self.facts = facts
        self.checks: tuple[checks.Check, ...] = checks.diagnose(facts)
        self.prediction: checks.Prediction | None = facts.prediction

    @property
    def ready(self) -> bool:
        """True if no light is red."""
        return all(check.light is not checks.Light.RED for check in self.checks)

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
    facts = checks.DoctorFacts(platform(), machine(), versions(), internet())
    subject = Subject(model, batches, target_batch_size, compression)
    if not isinstance(swarm, str):
        return Diagnosis(_examine(facts, swarm, subject))
    try:
        visit = join(swarm, peer_name=VISITOR, options=NetworkOptions(lan=False))
    except SwarmError as error:
        return Diagnosis(replace(_examine(facts, None, subject), refused=str(error)))
    with visit:
        return Diagnosis(_examine(facts, visit, with_settings(subject, Invite.parse(swarm).settings)))


@dataclass(frozen=True)
class Subject:
    """What is to be trained; see `doctor`."""

    model: Module | str | None
    batches: Iterable[Mapping[str, Tensor]] | None
    target_batch_size: int | None
    compression: str | None


def with_settings(subject: Subject, settings: Mapping[str, Setting]) -> Subject:
    """Fill in what the user left open from the invitation's settings."""
    target, compression = settings.get("target_batch_size"), settings.get("compression")
    if subject.target_batch_size is None and isinstance(target, int) and target > 0:
        subject = replace(subject, target_batch_size=target)
    if subject.compression is None and isinstance(compression, str):
        with contextlib.suppress(ValueError):  # no compression of this name here
            subject = replace(subject, compression=Precision(compression).name)
    return subject


def _examine(facts: checks.DoctorFacts, swarm: Swarm | None, subject: Subject) -> checks.DoctorFacts:
    calibration = _calibrate(subject, swarm)
    facts = replace(facts, needs=_needs(subject, calibration, facts.machine))
    # read the others' speeds now: a calibration on the same machine has slowed them down
    others = Trainers({}) if swarm is None else trainers(swarm)
    here = None if swarm is None else membership(swarm, others)
    facts = replace(facts, membership=here)
    target = subject.target_batch_size or others.target_batch_size
    if calibration is None or target is None:
        return facts
    numel, speeds = calibration.parameters, tuple(others.speeds.values())
    compression = Precision(subject.compression or others.compression, fine=0).at(0)
    work = checks.Workload(numel, calibration.micro_batch, target, compression.encoded_bytes(numel) / numel)
    uplink = (here.uplink if here else None) or checks.UplinkFacts()
    reduces = here is not None and bool(here.reachability.addresses)
    prediction = checks.predict(work, calibration.samples_per_s, speeds, uplink, reduces=reduces)
    return replace(facts, work=work, prediction=prediction)


def _calibrate(subject: Subject, swarm: Swarm | None) -> Calibration | None:
    model, batches = subject.model, subject.batches
    if model is None or (
        isinstance(model, str) and swarm is None
    ):  # a size is measured for a prediction only
        return None
    from colab_swarm.notebook.machine import calibrate
    from colab_swarm.recipes.masked_lm import albert

    if isinstance(model, str):
        model, batches = albert(model, swarm=swarm)
    assert batches is not None
    return calibrate(model, batches)


def _needs(subject: Subject, calibration: Calibration | None, here: checks.Machine) -> checks.Needs | None:
    """Memory for the model; without one, for the largest ALBERT that trains here in micro-batches of `FEW`."""
    if calibration is not None and not isinstance(subject.model, str):
        name = type(subject.model).__name__
        return checks.Needs(name, calibration.parameters, calibration.sample_bytes)
    if find_spec("torch") is None:
        return None
    from colab_swarm.recipes.masked_lm import SIZES

    if isinstance(subject.model, str):
        if subject.model not in SIZES:
            raise ValueError(f"model={subject.model!r} is none of {', '.join(SIZES)}")
        return _needs_of(subject.model, SIZES[subject.model])
    free_bytes = here.free_ram_bytes or 0 if here.gpu is None else here.gpu.free_bytes
    every = [_needs_of(name, size) for name, size in reversed(SIZES.items())]
    return next((needs for needs in every if checks.micro_batch(free_bytes, needs) >= FEW), every[-1])


def _needs_of(name: str, size: AlbertSize) -> checks.Needs:
    return checks.albert_needs(
        name, layers=size.layers, hidden=size.hidden, vocabulary=size.vocabulary, length=size.sequence_length
    )


@dataclass(frozen=True)
class Trainers:
    """The other trainers' speeds, samples/s, and their settings as far as they are known."""

    speeds: dict[PeerId, float]
    target_batch_size: int | None = None
    compression: str = "float32"


def membership(swarm: Swarm, trainers: Trainers) -> checks.MembershipFacts:
    """Describe this peer in its swarm; tests the speed to up to three peers, a few seconds each."""
    peers, network = swarm.services.peers, swarm.network
    linked = peers.linked()
    fastest = sorted(linked, key=lambda peer: -trainers.speeds.get(peer, 0.0))[:TESTS]
    return checks.MembershipFacts(
        run=swarm.run,
        reachability=swarm.reachability,
        linked=len(linked),
        trainers=tuple(trainers.speeds.values()),
        # a simulated peer has no network, and its wall clock is simulated too
        skew_s=0.0 if network is None else -network.node.linker.clock.behind_s,
        uplink=swarm.runtime.call(_test_uplink(peers, fastest)),
    )


async def _test_uplink(peers: Peers, testers: Sequence[PeerId]) -> checks.UplinkFacts | None:
    found = []
    for peer in testers:  # one after the other: together they would share the uplink
        with contextlib.suppress(PeerError):  # gone, busy, or too old for it
            found.append(await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=TEST_TIMEOUT_S))
    return best(found)


def best(found: Sequence[Speed]) -> checks.UplinkFacts | None:
    """Return this peer's own uplink: the fastest test each way (slower ones were slow at the other end), median rtt."""
    if not found:
        return None
    upload_bps = max(speed.upload_bps for speed in found)
    download_bps = max(speed.download_bps for speed in found)
    return checks.UplinkFacts(upload_bps, download_bps, median_high(speed.rtt_s for speed in found))


def trainers(swarm: Swarm) -> Trainers:
    """Return the peers that train the run's model now, by their own records."""
    optimizer, services = swarm.training.latest, swarm.services
    target, compression = None, Trainers.compression
    records: dict[PeerId, ProgressRecord] = {}
    with contextlib.suppress(PeerError):  # then use what is known already
        if optimizer is not None:
            swarm.runtime.call(optimizer.collaboration.refresh())
        else:
            records, _ = swarm.runtime.call(read_participants(services.dht, f"{swarm.run_id}/{MODEL}"))
    if optimizer is not None:
        records = dict(optimizer.collaboration.progress.records)
        target, compression = round(optimizer._settings.target_batch_size), optimizer._settings.compression
    speeds = {peer: r.samples_per_s for peer, r in records.items() if peer != swarm.id and r.samples_per_s}
    return Trainers(speeds, target, compression)
