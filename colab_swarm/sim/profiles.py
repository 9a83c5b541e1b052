"""Network profiles (latency, bandwidth, loss) by name, and churn profiles."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

MEGABIT = 1e6
GIGABIT = 1e9


@dataclass(frozen=True)
class HostProfile:
    """Bandwidth of one peer's connection, in bits per second; infinite if not given."""

    upload_bps: float = math.inf
    download_bps: float = math.inf


@dataclass(frozen=True)
class NetworkProfile:
    """A kind of network.

    Attributes:
        name: name for people.
        latency_s: mean one-way delay over all pairs of peers.
        spread: relative spread of the pairs' delays around this mean (sigma of a log-normal distribution).
        jitter_s: mean of a random exponential part of the delay, drawn for each message; included in ``latency_s``.
        loss: fraction of messages that need a retransmission, because TCP turns loss into delay.
        hosts: bandwidths of the peers, in the order in which peers are made; the list is repeated.
    """

    name: str
    latency_s: float
    spread: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    hosts: tuple[HostProfile, ...] = (HostProfile(),)

    def pair_latency_s(self, one: str, other: str, *, seed: int) -> float:
        """Return the one-way delay of a pair of peers without jitter. The delay does not depend on other peers."""
        mean_s = self.latency_s - self.jitter_s
        if not self.spread:
            return mean_s
        first, second = sorted((one, other))
        rng = random.Random(f"{seed} {first} {second}")
        return mean_s * rng.lognormvariate(-(self.spread**2) / 2, self.spread)


def _symmetric(megabits: float) -> HostProfile:
    return HostProfile(megabits * MEGABIT, megabits * MEGABIT)


LAN = NetworkProfile("lan", 0.0003, jitter_s=0.0001, hosts=(HostProfile(GIGABIT, GIGABIT),))
HOME = NetworkProfile(
    "home", 0.03, spread=0.5, jitter_s=0.005, loss=0.005, hosts=(HostProfile(20 * MEGABIT, 100 * MEGABIT),)
)
# the heterogeneous collaboration of DeDLOC's ALBERT experiment: 4 x 200, 8 x 100, 4 x 50 Mb/s
DEDLOC16 = NetworkProfile(
    "dedloc16",
    0.03,
    spread=0.3,
    jitter_s=0.003,
    hosts=(_symmetric(200),) * 4 + (_symmetric(100),) * 8 + (_symmetric(50),) * 4,
)
# the cloud of the decentralized mixture-of-experts paper: mean latency 92.5 ms
PAPER_CLOUD = NetworkProfile("paper_cloud", 0.0925, spread=0.3, jitter_s=0.01, hosts=(_symmetric(100),))

PROFILES = {profile.name: profile for profile in (LAN, HOME, DEDLOC16, PAPER_CLOUD)}


@dataclass(frozen=True)
class ChurnEvent:
    """At ``at`` seconds, ``peer`` comes online or, if ``online`` is False, vanishes."""

    at: float
    peer: str
    online: bool


@dataclass(frozen=True)
class ChurnProfile:
    """Peers stay online, and stay away, for exponentially distributed times with these means."""

    mean_session_s: float
    mean_absence_s: float

    def events(self, peers: Iterable[str], *, until_s: float, rng: random.Random) -> list[ChurnEvent]:
        """Return all arrivals and departures before ``until_s``, in order of time; every peer starts online."""
        events: list[ChurnEvent] = []
        for peer in peers:
            at = 0.0
            online = True
            while True:
                at += rng.expovariate(1 / (self.mean_session_s if online else self.mean_absence_s))
                if at >= until_s:
                    break
                online = not online
                events.append(ChurnEvent(at, peer, online))
        return sorted(events, key=lambda event: event.at)
