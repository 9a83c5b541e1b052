"""What can be set about a DHT, with the unit of each figure."""

from __future__ import annotations

from dataclasses import dataclass, field

from colab_swarm.dht.records import Limits


@dataclass(frozen=True)
class DHTSettings:
    """How a DHT behaves.

    Attributes:
        bucket_size: contacts per bucket and in a reply (Kademlia's k).
        replicas: peers that hold a record.
        read_replicas: peers a reader hears.
        parallel: queries in flight while looking up (Kademlia's alpha).
        timeout_s: of one query; a silent peer costs less, see `Lookup`.
        refresh_s: how often quiet buckets are looked up.
        retry_s: how often one of the peers that were lost is tried again.
        republish_s: how often held records are stored again at who is nearest by then.
        limits: what this peer holds for others.
    """

    bucket_size: int = 20
    replicas: int = 5
    read_replicas: int = 3
    parallel: int = 3
    timeout_s: float = 5.0
    refresh_s: float = 120.0
    retry_s: float = 30.0
    republish_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
