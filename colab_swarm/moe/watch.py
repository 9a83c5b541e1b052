"""Watches a grid's experts for a panel: asks the swarm in the background, so that whoever looks never waits.

Who works how much is seen by the steps that hosts tell of their experts: their growth over the last minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from colab_swarm.moe.calls import ExpertInfo, ExpertServices
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.server import ExpertStatistics
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import Runner


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


logger = logging.getLogger(__name__)

LIST_EVERY_S = 10.0

LIST_TIMEOUT_S = 60.0

MOST_ANEW = 4096

"""Places of a grid of which everything is read anew each time; of a larger one, what was read is believed a while."""

SHARE_LISTINGS = 7

"""Listings that shares are taken from: a minute."""

SERVED_EVERY_S = 1.0

"""How often this peer's experts are looked at: their latencies are sorted for that."""

RATE_S = 5.0

"""Rates are means over so long, or up to twice as long."""

Statistics = Mapping[str, ExpertStatistics]


class ExpertsWatch:
    """What happens to the experts of one grid.

    Args:
        runtime: runs what reads the swarm.
        services, directory: of this peer.
        grid: whose experts.
        served: statistics of all experts at this peer; called on the event loop.
    """

    def __init__(
        self,
        runtime: Runner,
        services: ExpertServices,
        directory: Directory,
        grid: Grid,
        served: Callable[[], Statistics],
    ) -> None:
        self._runtime, self._peers, self._directory = runtime, services.peers, directory
        self._served, self._rates = served, ExpertRates()
        self._listings: deque[list[ExpertInfo]] = deque(maxlen=SHARE_LISTINGS)
        self._seen: set[str] = set()
        self._missed: set[str] = set()  # by the last listing, for they were left out
        self._listed_at = self._began_at = self._served_at = float("-inf")
        self._listing: asyncio.Task[None] | None = None
        self._last, self._closed = ExpertsSnapshot(ExpertsListing(grid)), False

    def snapshot(self) -> ExpertsSnapshot:
        """As it stands; safe from any thread but the event loop's, and waits for no peer."""
        return replace(self._last, over=True) if self._closed else self._runtime.call(self._look())

    def close(self) -> None:
        """Ask no more; on any thread."""
        self._closed = True

    async def _look(self) -> ExpertsSnapshot:
        now = asyncio.get_running_loop().time()
        if now - self._began_at >= LIST_EVERY_S and self._listing is None:
            self._began_at = now
            self._listing = asyncio.create_task(self._list(), name="list experts")
        if self._left_out() != self._last.listing.left_out:
            self._take_in()
        if now - self._served_at >= SERVED_EVERY_S:
            self._served_at, grid = now, self._last.listing.grid
            served = {uid: told for uid, told in self._served().items() if _is_of(grid, uid)}
            self._last = replace(self._last, served=self._rates.of(served, now))
        listed_s = now - self._listed_at if self._listings else None
        self._last = replace(self._last, listed_s=listed_s)
        return self._last

    def _left_out(self) -> tuple[str, ...]:
        """Those that this peer does not call now; who was missing in the listing for that stays until the next."""
        return tuple(sorted(self._seen & (self._directory.left_out() | self._missed)))

    async def _list(self) -> None:
        fault = ""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                grid = self._last.listing.grid
                found = await self._directory.live(grid, anew=grid.size <= MOST_ANEW)
            self._listings.append(list(map(self._with_own_step, found)))
            self._missed = self._directory.left_out()
            self._seen.update(info.uid for info in found)
            self._listed_at = asyncio.get_running_loop().time()
            self._take_in()
        except Exception as error:  # shown, and tried again
            logger.info("the experts could not be listed", exc_info=True)
            fault = f"{type(error).__name__}: {error}"
        self._last, self._listing = replace(self._last, fault=fault), None

    def _with_own_step(self, info: ExpertInfo) -> ExpertInfo:
        """Of an expert here this peer knows more than it told the others last."""
        own = self._served().get(info.uid) if info.peer == self._peers.id else None
        return info if own is None else replace(info, step=own.step)

    @property
    def _newest(self) -> Sequence[ExpertInfo]:
        return self._listings[-1] if self._listings else ()

    def _take_in(self) -> None:
        """Make what is shown of the newest listing anew."""
        left_out = self._left_out()
        live = tuple(expert for expert in self._live() if expert.uid not in left_out)
        dead = self._seen - {expert.uid for expert in live} - {*left_out}
        grid = self._last.listing.grid
        listing = ExpertsListing(grid, live, self._hosts(live), left_out, tuple(sorted(dead)))
        self._last = replace(self._last, listing=listing)

    def _live(self) -> list[LiveExpert]:
        shares, ttl_s = self._shares(), self._directory.settings.ttl_s
        swarm_time = self._peers.time()
        return [
            LiveExpert(
                uid=info.uid,
                host=short(info.peer),
                mine=info.peer == self._peers.id,
                step=info.step,
                told_s=max(0.0, ttl_s - (info.expires_at - swarm_time)),
                share=shares.get(info.uid),
            )
            for info in self._newest
        ]

    def _shares(self) -> dict[str, float]:
        """Each expert's part of the updates between the oldest listing that is kept and the newest."""
        first: dict[str, int] = {}
        for listing in self._listings:
            for info in listing:
                first.setdefault(info.uid, info.step)
        grown = {info.uid: max(0, info.step - first[info.uid]) for info in self._newest}
        total = sum(grown.values())
        return {uid: steps / total for uid, steps in grown.items()} if total else {}

    def _hosts(self, live: Sequence[LiveExpert]) -> tuple[HostOfExperts, ...]:
        ids: dict[str, PeerId] = {short(info.peer): info.peer for info in self._newest}
        learning = any(expert.share is not None for expert in live)
        shares: dict[str, float] = defaultdict(float)
        for expert in live:
            shares[expert.host] += expert.share or 0.0
        rows = [
            HostOfExperts(
                host,
                ids[host] == self._peers.id,
                count,
                shares[host] if learning else None,
                self._peers.statistics(ids[host]).rtt_s,
            )
            for host, count in Counter(expert.host for expert in live).most_common()
        ]
        return tuple(rows)


def _is_of(grid: Grid, uid: str) -> bool:
    try:
        grid.index(uid)
    except ValueError:
        return False
    return True


@dataclass
class _Reading:
    at: float
    told: Statistics


class ExpertRates:
    """Turns counters into rates. Pure; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=2)

    def of(self, told: Statistics, now: float) -> tuple[ServedExpert, ...]:
        """What experts do, by what their counters say now and said `RATE_S` ago or earlier."""
        if not self._readings or now - self._readings[-1].at >= RATE_S:
            self._readings.append(_Reading(now, told))
        before = self._readings[0]
        seconds = now - before.at
        return tuple(_rated(uid, one, before.told.get(uid), seconds) for uid, one in sorted(told.items()))


def _rated(uid: str, now: ExpertStatistics, before: ExpertStatistics | None, seconds: float) -> ServedExpert:
    samples, calls, batches = _samples(now), now.calls, now.batches
    if before is not None and before.calls <= calls:  # else it was taken up anew
        samples, calls, batches = samples - _samples(before), calls - before.calls, batches - before.batches
    return ServedExpert(
        uid=uid,
        step=now.step,
        queued=now.queued,
        batch_size=samples / batches if batches else None,
        calls_per_s=calls / seconds if seconds > 0 else 0.0,
        samples_per_s=samples / seconds if seconds > 0 else 0.0,
        p50_s=now.p50_s,
        p99_s=now.p99_s,
    )


def _samples(told: ExpertStatistics) -> int:
    return told.forward_samples + told.backward_samples
