"""What a collaboration is given: the peer's services, and how to train."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from colab_swarm.averaging.rooms import Rooms
from colab_swarm.averaging.round import Averager
from colab_swarm.dht.service import DHT
from colab_swarm.events import EventLog
from colab_swarm.net.peers import Peers


@dataclass(frozen=True)
class Services:
    """What a peer's services share; ``pace(samples)`` is the compute time a simulated peer takes, seconds."""

    peers: Peers
    rooms: Rooms
    dht: DHT
    averager: Averager
    events: EventLog
    rng: random.Random
    pace: Callable[[float], float] | None = None


@dataclass(frozen=True)
class TrainingSettings:
    """How a collaboration trains.

    Attributes:
        prefix: names the collaboration within the run; peers of one prefix train one model.
        target_batch_size: samples of all peers together for one global step.
        codec, mean_codec: on the wire, of gradients and of their means (see `colab_swarm.tensors.codecs.Precision`).
        local_steps: between two rounds, at least (DiLoCo); 1: every step is the swarm's.
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
    local_steps: int = 1
    matchmaking_s: float = 5.0
    max_matchmaking_s: float = 60.0
    round_timeout_s: float = 180.0
    max_report_s: float = 60.0
    max_replay_bytes: int = 1 << 30
