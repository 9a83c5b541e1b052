"""What a collaboration is given: the peer's services, and how to train."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from colab_swarm.averaging.rooms import Rooms
from colab_swarm.averaging.round import Averager
from colab_swarm.dht.service import DHT
from colab_swarm.events import EventLog
from colab_swarm.net.peers import Peers
from colab_swarm.pausing import Gate
from colab_swarm.tensors.codecs import Precision, mean_codec_for
from colab_swarm.training.progress import MAX_LOCAL_STEPS
from colab_swarm.training.thrift import Budget


@dataclass(frozen=True)
class Services:
    """What a peer's services share.

    Attributes:
        pace: ``pace(samples)`` is the compute time that a simulated peer takes, seconds.
        gate: closed while this peer's background work is to stand still.
    """

    peers: Peers
    rooms: Rooms
    dht: DHT
    averager: Averager
    events: EventLog
    rng: random.Random
    pace: Callable[[float], float] | None = None
    gate: Gate = field(default_factory=Gate)


class AveragingOptions(TypedDict, total=False):
    """How peers average; what `Swarm.optimizer` takes besides.

    Attributes:
        codec: gradients on the wire: float32, float16, bfloat16, int8, adaptive (int8; small tensors float16), onebit,
            or topk and a share, as in topk:0.01. Warning: onebit and topk are biased without ``error_feedback``, and
            train a worse model.
        mean_codec: the same of their means; as ``codec`` if it is not given, but float16 beside onebit and topk: what
            they would cut off a mean is fed back by nobody.
        error_feedback: what compression cut off a gradient is added to the next; costs two vectors of memory.
        delayed: updates come exactly one round late (DeDLOC, section 3.2; ZeRO-Offload): averaging and the optimizer's
            step, on copies in main memory, run while this peer computes on.
        local_steps: of ``target_batch_size`` samples each, that every peer takes alone before the swarm averages where
            they led (DiLoCo): so many times less traffic; "auto": as many as the peers' budgets need.
        matchmaking_s: how long a round waits for peers that are slow to come.
    """

    codec: str
    mean_codec: str
    error_feedback: bool
    delayed: bool
    local_steps: int | Literal["auto"]
    matchmaking_s: float


@dataclass(frozen=True)
class TrainingSettings:
    """How a collaboration trains.

    Attributes:
        prefix: names the collaboration within the run; peers of one prefix train one model.
        target_batch_size: samples of all peers together for one global step.
        codec, mean_codec: on the wire, of gradients and of their means (see `colab_swarm.tensors.codecs.Precision`).
        local_steps: between two rounds, at least (DiLoCo); 1: every step is the swarm's; "auto": as the budget needs.
        budget: for this peer's traffic.
        error_feedback: what compression cut off a gradient is added to the next.
        matchmaking_s: how long a round waits for peers that do not answer at all.
        max_matchmaking_s: how long it waits for peers that said they are finishing a batch.
        round_timeout_s: bound on matchmaking and averaging of one round together.
        max_report_s: longest time between two progress records of a peer; one that vanished without its links
            breaking is forgotten after four times as long.
        max_replay_bytes: memory for the means a newcomer keeps while it downloads the state.
    """

    prefix: str
    target_batch_size: float
    codec: str = "float32"
    mean_codec: str = "float32"
    error_feedback: bool = False
    local_steps: int | Literal["auto"] = 1
    budget: Budget | None = None
    matchmaking_s: float = 5.0
    max_matchmaking_s: float = 60.0
    round_timeout_s: float = 180.0
    max_report_s: float = 60.0
    max_replay_bytes: int = 1 << 30

    @classmethod
    def of(
        cls, prefix: str, target_batch_size: float, budget: Budget | None, options: AveragingOptions
    ) -> TrainingSettings:
        """From what a user gives.

        Raises:
            ValueError, TypeError: a setting is not usable, or is none.
        """
        given = {"mean_codec": mean_codec_for(options.get("codec", "float32")), **options}
        delayed = given.pop("delayed", False)
        settings = cls(prefix, target_batch_size, budget=budget, **given)  # type: ignore[arg-type]
        if settings.local_steps != 1 and (delayed or settings.error_feedback):
            raise ValueError("local_steps go neither with delayed nor with error_feedback: choose one")
        return settings

    def __post_init__(self) -> None:
        size, steps = self.target_batch_size, self.local_steps
        if not size > 0:
            raise ValueError(f"target_batch_size={size}: pass the samples per global step, such as 4096")
        Precision(self.codec), Precision(self.mean_codec)
        if steps != "auto" and not (isinstance(steps, int) and 1 <= steps <= MAX_LOCAL_STEPS):
            raise ValueError(f"local_steps={steps!r}: pass 1 to {MAX_LOCAL_STEPS}, or 'auto'")

    @property
    def auto_steps(self) -> bool:
        """Whether the number of local steps follows the budget."""
        return self.local_steps == "auto"
