"""What the parts of a mixture of experts share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from colab_swarm.dht.service import DHT
from colab_swarm.events import EventLog
from colab_swarm.net.peers import Contact, PeerId, Peers
from colab_swarm.pausing import Gate


@dataclass(frozen=True)
class ExpertServices:
    """This peer's services; ``run_id`` is part of all keys in the DHT, ``gate`` is closed while experts are to rest."""

    peers: Peers
    dht: DHT
    events: EventLog
    rng: random.Random
    run_id: str
    gate: Gate = field(default_factory=Gate)


@dataclass(frozen=True)
class ExpertInfo:
    """What the swarm knows of one live expert.

    Attributes:
        uid: its name, ``prefix.u_0.….u_(d-1)``.
        host: where it runs.
        shape: of one sample, input and output alike; -1: any length.
        step: updates in its weights when its host told last.
        expires_at: swarm time until which the host's word holds, seconds.
    """

    uid: str
    host: Contact
    shape: tuple[int, ...]
    step: int
    expires_at: float

    @property
    def peer(self) -> PeerId:
        """The host's id."""
        return self.host.id
