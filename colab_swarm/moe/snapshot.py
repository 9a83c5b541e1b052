"""What a panel shows of a grid's experts at one moment: frozen records."""

from __future__ import annotations

from dataclasses import dataclass

from colab_swarm.moe.grid import Grid


@dataclass(frozen=True)
class LiveExpert:
    """One expert that can be called.

    Attributes:
        uid: its name.
        host: short id of the peer where it runs.
        mine: whether that is this peer.
        step: updates in its weights, as its host told last.
        told_s: seconds since then, at the time of the listing.
        share: its part of all updates of the last minute, 0 to 1; None while nobody learns.
    """

    uid: str
    host: str
    mine: bool
    step: int
    told_s: float
    share: float | None


@dataclass(frozen=True)
class HostOfExperts:
    """One peer that hosts experts.

    Attributes:
        host: its short id.
        mine: whether it is this peer.
        experts: how many are there.
        share: their part of all updates of the last minute; None while nobody learns.
        rtt_s: round-trip time to it; None if not measured.
    """

    host: str
    mine: bool
    experts: int
    share: float | None
    rtt_s: float | None


@dataclass(frozen=True)
class ServedExpert:
    """An expert of this peer at work. Rates are those of the last seconds.

    Attributes:
        uid: its name.
        step: updates in its weights.
        queued: samples that wait.
        batch_size: samples that were computed together, in the mean; None if there were none.
        calls_per_s, samples_per_s: answered, forward and backward.
        p50_s, p99_s: from a call's arrival to its answer; None before the first.
    """

    uid: str
    step: int
    queued: int
    batch_size: float | None
    calls_per_s: float
    samples_per_s: float
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, eq=False)
class ExpertsListing:
    """What the swarm told last of a grid. Two are equal if they are one, so that what is drawn of it can be kept.

    Attributes:
        grid: where experts have their places.
        live: that can be called, in the order of the grid.
        hosts: of these, those of the most experts first.
        left_out: that failed this peer, and are not asked for a while.
        dead: that lived since this peer began to look, and do no more.
    """

    grid: Grid
    live: tuple[LiveExpert, ...] = ()
    hosts: tuple[HostOfExperts, ...] = ()
    left_out: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertsSnapshot:
    """The experts of one grid, as this peer knows them.

    Attributes:
        listing: what the swarm told last.
        listed_s: seconds since it was asked; None: its first answer is awaited.
        served: experts of this peer.
        fault: why the last look failed; empty if it did not.
        over: whether this peer has left.
    """

    listing: ExpertsListing
    listed_s: float | None = None
    served: tuple[ServedExpert, ...] = ()
    fault: str = ""
    over: bool = False
