"""Inputs of a collaboration: the peer's services, and the settings of the training."""

import functools
import inspect
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from colab_swarm.averaging.forming import MOST_TARGETS
from colab_swarm.averaging.result import RoundResult
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import RunServices
from colab_swarm.errors import StepError, require
from colab_swarm.net.node import Node
from colab_swarm.net.traffic import REMEMBERED_RATES
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.vector import HostVector, Vector
from colab_swarm.training.communication import SYNCHRONOUS, Communication
from colab_swarm.training.records import MOST_MIN_PEERS

if TYPE_CHECKING:
    from colab_swarm.averaging.round import Averager

T = TypeVar("T")


def most_state_bytes(numel: int) -> int:
    """Return how many bytes a state may take: parameters and optimizer of a model of ``numel`` values."""
    return 64 * numel + (64 << 20)


_MEASURABLE_BYTES = 1 << 18  # a round that moved less says nothing about bandwidth


class LinkBandwidth:
    """Bandwidth of a peer in both directions, as links and rounds measured it.

    Rounds are often shorter than the second over which links measure, so rounds are measured, too. The highest of the
    last measurements counts.
    """

    def __init__(self, peers: Node) -> None:
        self._peers = peers
        self._uploads_bps = deque[float](maxlen=REMEMBERED_RATES)
        self._downloads_bps = deque[float](maxlen=REMEMBERED_RATES)

    def on_round(self, result: RoundResult) -> None:
        for rates_bps, size_bytes in (
            (self._uploads_bps, result.sent_bytes),
            (self._downloads_bps, result.received_bytes),
        ):
            if size_bytes >= _MEASURABLE_BYTES and result.exchange_s > 0:
                rates_bps.append(8 * size_bytes / result.exchange_s)

    def known(self) -> tuple[float | None, float | None]:
        """Return upload and download bandwidth, bits per second; None where not measured."""
        links = self._peers.statistics()
        upload_bps = max(self._uploads_bps, default=0.0)
        download_bps = max(self._downloads_bps, default=0.0)
        return (
            max(upload_bps, links.upload_bps or 0.0) or None,
            max(download_bps, links.download_bps or 0.0) or None,
        )


@dataclass(frozen=True, kw_only=True)
class PeerServices(RunServices):
    """The services of a peer that may train.

    Attributes:
        on_wait: functions that are called with a thread's id, and with True when this thread begins to wait in a step,
            or with False when it goes on.
    """

    router: PrefixRouter
    averager: "Averager"
    mailbox: str = ""  # address of the bucket in which the run's rounds are; empty: rounds go over links
    pace: Callable[[float], float] | None = None  # a simulated peer's seconds for a number of samples
    on_wait: list[Callable[[int, bool], None]] = field(default_factory=list)


class Due(Enum):
    """The action of a call of `step()` in addition to counting."""

    NOTHING = "nothing"
    LOCAL_STEP = "a local step"
    ROUND = "a round"
    LANDING = "waiting for the round beside it"
    CATCH_UP = "catching up"


@dataclass(frozen=True)
class StepOffer:
    """A trainer's announcement of a contribution that it has not made yet."""

    weight: float  # weight in the mean
    loss: float | None = None
    unused: bytes = b""  # a bit for each tensor, set if it has no gradient
    rates: tuple[float, ...] = ()  # learning rates at this step
    changed: bool = False  # True if the parameters changed outside a step


@dataclass(frozen=True)
class RoundInput:
    """A trainer's contribution to a round; the mean overwrites ``vector``. With weight 0 it adds nothing to the mean.

    ``unused`` has a bit for each tensor, set if the tensor has no gradient, as in `Ticket`.
    """

    vector: Vector
    weight: float  # weight in the mean
    samples: float  # samples that count towards the batch
    fine: int | None = None  # number of values at the front that belong to small tensors
    loss: float | None = None
    unused: bytes = b""

    @property
    def host_memory(self) -> Floats:
        """Main memory for a mean: the vector's memory if the vector lies there, else new memory."""
        if isinstance(self.vector, HostVector):
            return self.vector.values
        return np.empty(self.vector.numel, np.float32)


@dataclass(frozen=True)
class TrainingSettings:
    """How a collaboration trains: the options of `Swarm.optimizer`.

    Attributes:
        prefix: name of the collaboration within the run; the peers of one prefix train one model.
        batch_size: number of samples in each batch that `Swarm.batches` or a framework gives, else in each ``step()``.
            ``step(samples=…)`` overrides this number. Once a batch had ``batch_size`` rows, a batch with fewer rows
            counts its rows instead.
        weight_unit: unit of ``step(weight=…)``, such as "target tokens". Set it if the mean is not weighted by
            samples.
        communication: how the peers exchange what they compute.
        device_memory: maximum of GPU memory, in bytes, that the swarm may use in addition to your own loop. None allows
            all free memory. With 0, gradients are summed in main memory, and each gradient is copied there.
        min_peers: the first ``step()`` waits until this many peers train, this peer included. Later steps do not wait
            for a number of peers. None takes the number of the run's authority, else of the first peer; 1 by default.
            If peers ask for different numbers, the lowest counts.
    """

    prefix: str
    target_batch_size: float  # samples of all peers together for one global step
    batch_size: float | None = None
    weight_unit: str = "samples"
    communication: Communication = SYNCHRONOUS
    min_peers: int | None = None
    device_memory: float | None = None

    def __post_init__(self) -> None:
        size = self.target_batch_size
        text = f"target_batch_size={size!r}: pass the samples per global step, such as 4096"
        require(isinstance(size, Real) and size > 0, text)
        object.__setattr__(self, "target_batch_size", float(size))
        memory = self.device_memory
        text = f"device_memory={memory!r}: pass bytes, such as 2e9, or 0"
        require(memory is None or (isinstance(memory, int | float) and memory >= 0), text)
        least = self.min_peers
        text = f"min_peers={least!r}: pass how many peers must train before the first step, 1 to {MOST_MIN_PEERS}"
        require(least is None or (isinstance(least, int) and 1 <= least <= MOST_MIN_PEERS), text)

    def counted(self, samples: float | None, weight: float | None) -> tuple[float, float]:
        """Return the samples of a micro-batch and the weight of its gradient.

        Raises StepError if ``samples`` or ``weight`` is not usable.
        """
        if not (isinstance(samples, int | float) and math.isfinite(samples) and samples > 0):
            raise StepError(
                f"samples={samples!r:.60}: pass the size of the batch, as in optimizer.step(samples=len(input_ids)), "
                "or once and for all as batch_size=… to swarm.optimizer(…)"
            )
        require(
            samples <= MOST_TARGETS * self.target_batch_size,
            f"samples={samples:g} is over {MOST_TARGETS:g} times target_batch_size={self.target_batch_size:g}: both "
            "count the same thing, such as sentences or tokens, and step() follows each batch",
            StepError,
        )
        if self.weight_unit == "samples":
            require(
                weight is None,
                f"weight={weight!r:.60} counts no samples: name its unit, the same at all peers, as in "
                'swarm.optimizer(…, weight_unit="target tokens")',
                StepError,
            )
            weight = samples
        if not (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
            raise StepError(
                f"weight={weight!r:.60}: this swarm weighs by {self.weight_unit}, so pass how many the loss is a mean "
                "of, as in optimizer.step(samples=…, weight=…)"
            )
        return float(samples), float(weight)


def spell_out(settings: Callable[..., Any]) -> Callable[[T], T]:
    """Let the signature of a method show the options of ``settings`` in place of its ``**options``."""

    def spelled(method: Any) -> Any:
        *parameters, _ = inspect.signature(method).parameters.values()
        named = [parameter.name for parameter in parameters]
        for option in inspect.signature(settings).parameters.values():
            if option.default is not option.empty and option.name not in named:
                parameters.append(option.replace(kind=option.KEYWORD_ONLY))

        @functools.wraps(method)
        def call(self: Any, first: Any, *unnamed: Any, **options: Any) -> Any:
            text = (
                f"swarm.{method.__name__}(…, {', '.join(f'{value!r:.40}' for value in unnamed)}): name what you pass, "
                "as in target_batch_size=256, model=model"
            )
            require(not unnamed, text, TypeError)
            return method(self, first, **options)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return spelled


def settings_for(call: Callable[..., Any], settings: Callable[..., T], *values: Any, **options: Any) -> T:
    """Return ``settings(*values, **options)``; raise TypeError if the user's ``call`` has no such option."""
    known = [*inspect.signature(settings).parameters][len(values) :]
    for option in options.keys() - set(known):
        require(
            "communication" not in known or option not in inspect.signature(Communication).parameters,
            f"{option}= is part of communication=: pass communication=cs.Communication({option}={options[option]!r})",
            TypeError,
        )
        similar = get_close_matches(option, [*known, *inspect.signature(call).parameters], n=1)
        raise TypeError(
            f"{call.__qualname__}(…) has no option '{option}'; it has {', '.join(similar or known)}"
        )
    return settings(*values, **options)
