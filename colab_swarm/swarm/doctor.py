"""`doctor`: look at this machine and at the swarm, judge, and predict the training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from colab_swarm.errors import PeerError, SwarmError
from colab_swarm.invite import Invite, Setting
from colab_swarm.net.metering import Speed, measure
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.notebook.checks import (
    Check,
    DoctorFacts,
    Light,
    Machine,
    MembershipFacts,
    Needs,
    Prediction,
    UplinkFacts,
    Workload,
    albert_needs,
    diagnose,
    micro_batch,
    predict,
    render_html,
    render_text,
    summary,
)
from colab_swarm.notebook.machine import internet, machine, versions
from colab_swarm.notebook.platforms import platform
from colab_swarm.swarm.joining import join
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.overview import MODEL
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import Precision
from colab_swarm.training.progress import ProgressRecord
from colab_swarm.training.settings import PeerServices

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from colab_swarm.notebook.machine import Calibration
    from colab_swarm.recipes.masked_lm import AlbertSize


VISITOR = "doctor"

"""The peer that an invitation is examined with."""

FEW = 8


class Diagnosis:
    """What the doctor found: a table of traffic lights in a notebook, text when printed.

    Attributes:
        facts: what the probes told.
        checks: the judgement, one light each.
    """

    def __init__(self, facts: DoctorFacts) -> None:
        self.facts = facts
        self.checks: tuple[Check, ...] = diagnose(facts)

    @property
    def ready(self) -> bool:
        """Whether no light is red."""
        return all(check.light is not Light.RED for check in self.checks)

    @property
    def prediction(self) -> Prediction | None:
        """What training will be like; None without a swarm, a model with batches, and a target batch."""
        return self.facts.prediction

    def __str__(self) -> str:
        return render_text(self.checks)

    def __repr__(self) -> str:
        return f"Diagnosis({summary(self.checks)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": render_text(self.checks), "text/html": render_html(self.checks)}


def doctor(
    swarm: Swarm | str | None = None,
    *,
    model: Module | str | None = None,
    batches: Iterable[Mapping[str, Tensor]] | None = None,
    target_batch_size: int | None = None,
    compression: str | None = None,
) -> Diagnosis:
    """Look at this machine, its way to the swarm and the model, and say with traffic lights what to mend.

    Takes about a second; with a swarm some seconds more for speed tests, with a model two for the calibration.
    Ask while the others train: on a shared machine or line, that is what the prediction is for.

    Args:
        swarm: a swarm, or an invitation, which is joined for the examination and left (that counts as a use of it);
            None looks at the machine only.
        model: what you train, or a size of `albert`: tiny, base, large, xlarge. Nothing of it is changed.
        batches: of the model; some are used up. Not needed with a size.
        target_batch_size, compression: as for `Swarm.optimizer`; known already if the swarm has one or the invitation
            suggests them. Without a target batch there is no prediction.

    Raises:
        ValueError: model, batches, target_batch_size or compression is not usable.
    """
    if compression is not None:
        Precision(compression)
    if model is not None and not isinstance(model, str) and batches is None:
        raise ValueError("a model is measured with its own data: pass batches=… as well")
    facts = DoctorFacts(platform(), machine(), versions(), internet())
    subject = Subject(model, batches, target_batch_size, compression)
    if not isinstance(swarm, str):
        return Diagnosis(_examined(facts, swarm, subject))
    try:
        visit = join(swarm, peer_name=VISITOR, options=NetworkOptions(lan=False))
    except SwarmError as error:
        return Diagnosis(replace(_examined(facts, None, subject), refused=str(error)))
    with visit:
        return Diagnosis(_examined(facts, visit, _suggested(subject, Invite.parse(swarm).settings)))


@dataclass(frozen=True)
class Subject:
    """What is to be trained; see `doctor`."""

    model: Module | str | None
    batches: Iterable[Mapping[str, Tensor]] | None
    target_batch_size: int | None
    compression: str | None


def _suggested(subject: Subject, settings: Mapping[str, Setting]) -> Subject:
    """What the user left open, as the invitation suggests it."""
    target, compression = settings.get("target_batch_size"), settings.get("compression")
    return replace(
        subject,
        target_batch_size=subject.target_batch_size
        or (target if isinstance(target, int) and target > 0 else None),
        compression=subject.compression or _known(compression),
    )


def _known(compression: Setting | None) -> str | None:
    """The compression, if there is one of this name here."""
    with contextlib.suppress(ValueError):
        return Precision(compression).name if isinstance(compression, str) else None
    return None


def _examined(facts: DoctorFacts, swarm: Swarm | None, subject: Subject) -> DoctorFacts:
    calibration = _calibrated(subject, swarm)
    facts = replace(facts, needs=_needs(subject, calibration, facts.machine))
    # the others' speeds are read now, because a calibration beside them on one machine has slowed them down
    others = Trainers({}) if swarm is None else trainers(swarm)
    if swarm is not None:
        facts = replace(facts, membership=membership(swarm, others))
    target = subject.target_batch_size or others.target_batch_size
    if calibration is None or target is None:
        return facts
    numel = calibration.parameters
    compression = Precision(subject.compression or others.compression, fine=0).at(0)
    work = Workload(numel, calibration.micro_batch, target, compression.encoded_bytes(numel) / numel)
    here = facts.membership
    uplink = here.uplink if here is not None and here.uplink is not None else UplinkFacts()
    reduces = here is not None and bool(here.reachability.addresses)
    told = predict(work, calibration.samples_per_s, tuple(others.speeds.values()), uplink, reduces=reduces)
    return replace(facts, work=work, prediction=told)


def _calibrated(subject: Subject, swarm: Swarm | None) -> Calibration | None:
    """A size alone is not worth building the model; with a swarm it is, for the prediction."""
    model, batches = subject.model, subject.batches
    if model is None or (isinstance(model, str) and swarm is None):
        return None
    from colab_swarm.notebook.machine import calibrate
    from colab_swarm.recipes.masked_lm import albert

    if isinstance(model, str):
        model, batches = albert(model, swarm=swarm)
    assert batches is not None
    return calibrate(model, batches)


def _needs(subject: Subject, calibration: Calibration | None, here: Machine) -> Needs | None:
    """Of the model; without one, of the largest ALBERT that trains here in micro-batches of a few samples."""
    if calibration is not None and not isinstance(subject.model, str):
        name = type(subject.model).__name__
        return Needs(name, calibration.parameters, calibration.sample_bytes)
    if find_spec("torch") is None:
        return None
    from colab_swarm.recipes.masked_lm import SIZES

    if isinstance(subject.model, str):
        if subject.model not in SIZES:
            raise ValueError(f"model={subject.model!r} is none of {', '.join(SIZES)}")
        return _of_size(subject.model, SIZES[subject.model])
    free_bytes = here.free_ram_bytes or 0 if here.gpu is None else here.gpu.free_bytes
    every = [_of_size(name, size) for name, size in reversed(SIZES.items())]
    return next((needs for needs in every if micro_batch(free_bytes, needs) >= FEW), every[-1])


def _of_size(name: str, size: AlbertSize) -> Needs:
    return albert_needs(
        name, layers=size.layers, hidden=size.hidden, vocabulary=size.vocabulary, length=size.sequence_length
    )


def run_doctor(invite: str | None, *, size: str | None, target_batch_size: int | None) -> bool:
    """``colab-swarm doctor``: print the diagnosis; whether no light is red."""
    diagnosis = doctor(invite, model=size, target_batch_size=target_batch_size)
    print(diagnosis)
    return diagnosis.ready


TESTS = 3

"""Peers that are asked for a speed test."""

SIZE_BYTES = 4 << 20

TEST_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Trainers:
    """Who trains in the run beside this peer, with their speeds in samples/s; and how, as far as it is known."""

    speeds: dict[PeerId, float]
    target_batch_size: int | None = None
    compression: str = "float32"


def membership(swarm: Swarm, trainers: Trainers) -> MembershipFacts:
    """This peer in its swarm; tests the speed to up to three peers, one after the other: a few seconds each."""
    peers = swarm.services.peers
    linked = peers.linked()
    asked = sorted(linked, key=lambda peer: -trainers.speeds.get(peer, 0.0))[:TESTS]
    return MembershipFacts(
        run=swarm.run,
        reachability=swarm.reachability,
        linked=len(linked),
        trainers=tuple(trainers.speeds.values()),
        skew_s=_skew_s(swarm),
        uplink=swarm.runtime.call(_line(peers, asked)),
    )


def _skew_s(swarm: Swarm) -> float:
    presence = swarm.network  # a simulated peer has none, and its wall clock is made up
    return 0.0 if presence is None else -presence.node.linker.clock.behind_s


async def _line(peers: Peers, asked: Sequence[PeerId]) -> UplinkFacts | None:
    found = []
    for peer in asked:  # in turns: together they would share the line
        try:
            found.append(await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=TEST_TIMEOUT_S))
        except PeerError:
            continue  # gone, busy, or too old for it
    return best(found)


def best(found: Sequence[Speed]) -> UplinkFacts | None:
    """This peer's own line: the fastest test each way (a slower one was slow at the other end), the middle rtt."""
    if not found:
        return None
    rtts_s = sorted(speed.rtt_s for speed in found)
    return UplinkFacts(
        max(speed.upload_bps for speed in found),
        max(speed.download_bps for speed in found),
        rtts_s[len(rtts_s) // 2],
    )


def trainers(swarm: Swarm) -> Trainers:
    """Who trains the run's model now, by their own records."""
    optimizer, target, compression = swarm.training.latest, None, Trainers.compression
    if optimizer is not None:
        with contextlib.suppress(PeerError):  # then what is known already must do
            swarm.runtime.call(optimizer.collaboration.refresh())
        records = dict(optimizer.collaboration.progress.records)
        target, compression = round(optimizer._settings.target_batch_size), optimizer._settings.compression
    else:
        records = swarm.runtime.call(_records(swarm.services, f"{swarm.run_id}/{MODEL}/progress"))
    speeds = {peer: r.samples_per_s for peer, r in records.items() if peer != swarm.id and r.samples_per_s}
    return Trainers(speeds, target, compression)


async def _records(services: PeerServices, key: str) -> dict[PeerId, ProgressRecord]:
    records: dict[PeerId, ProgressRecord] = {}
    try:
        found = await services.dht.get(key)
    except PeerError:
        return {}
    for peer, record in found.items():
        try:
            records[PeerId(peer)] = msgspec.convert(record.value, ProgressRecord, strict=False)
        except (msgspec.ValidationError, ValueError):
            continue  # not one of this version
    return records
