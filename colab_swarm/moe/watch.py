"""Watches the experts of a grid for a panel: reads the directory in the background, so that the panel never waits.

An expert's share of the work is the growth of its announced step over the last minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from colab_swarm.moe.directory import Directory
from colab_swarm.moe.grid import ExpertInfo, Grid
from colab_swarm.moe.server import ExpertStatistics
from colab_swarm.net.peers import PeerId, Peers, short
from colab_swarm.runtime import Runner

logger = logging.getLogger(__name__)
LIST_EVERY_S = 10.0
LIST_TIMEOUT_S = 60.0
MOST_UNCACHED = 4096  # grids with up to so many places are read without the cache
SHARE_LISTINGS = 7  # listings that shares are computed from: a minute
SERVED_EVERY_S = 2.0  # between two reads of this peer's statistics; rates are means over this long
Statistics = Mapping[str, ExpertStatistics]


@dataclass(frozen=True)
class LiveExpert:
    """One expert that can be called."""

    uid: str  # its name
    host: str  # short id of its host
    mine: bool  # whether the host is this peer
    step: int  # optimizer steps in its weights, as last announced
    share: float | None  # its part of all steps of the last minute, 0 to 1; None while no expert learns


@dataclass(frozen=True)
class HostOfExperts:
    """One peer that hosts experts."""

    host: str  # its short id
    mine: bool  # whether it is this peer
    experts: int  # number of its experts
    share: float | None  # their part of all steps of the last minute; None while no expert learns
    rtt_s: float | None  # round-trip time to it; None if not measured


@dataclass(frozen=True)
class ServedExpert:
    """An expert that this peer serves. Rates are means of the last seconds."""

    uid: str  # its name
    step: int  # optimizer steps in its weights
    queued: int  # samples that wait
    batch_size: float | None  # mean samples per computed batch; None if there were none
    calls_per_s: float  # answered, forward and backward
    samples_per_s: float
    p50_s: float | None  # latency from a call's arrival to its answer; None before the first
    p99_s: float | None


@dataclass(frozen=True)
class ExpertsSnapshot:
    """The experts of one grid, as this peer knows them."""

    grid: Grid  # contains the experts
    live: tuple[LiveExpert, ...] = ()  # experts that can be called, in grid order
    hosts: tuple[HostOfExperts, ...] = ()  # their hosts, most experts first
    left_out: tuple[str, ...] = ()  # experts that failed this peer and are not called for a while
    dead: tuple[str, ...] = ()  # experts that were live since this watch started and are no longer
    listed_s: float | None = None  # age of all these in seconds; None before the first listing
    served: tuple[ServedExpert, ...] = ()  # experts of this peer
    fault: str = ""  # why the last listing failed; empty if it succeeded
    over: bool = False  # whether this peer has left


class ExpertsWatch:
    """Follows the experts of one grid; ``served`` returns the statistics of this peer's, on the event loop."""

    def __init__(
        self,
        runtime: Runner,
        peers: Peers,
        directory: Directory,
        grid: Grid,
        served: Callable[[], Statistics],
    ) -> None:
        self._runtime, self._peers, self._directory = runtime, peers, directory
        self._grid, self._served = grid, served
        self._read: Statistics = {}
        self._listings: deque[list[ExpertInfo]] = deque(maxlen=SHARE_LISTINGS)
        self._seen: set[str] = set()
        self._listed_at = self._began_at = self._served_at = float("-inf")
        self._listing: asyncio.Task[None] | None = None
        self._last, self._closed = ExpertsSnapshot(grid), False

    def snapshot(self) -> ExpertsSnapshot:
        """Return the state; for any thread but the event loop's. Waits for no peer."""
        return replace(self._last, over=True) if self._closed else self._runtime.call(self._look())

    def close(self) -> None:
        """Stop reading. Thread-safe."""
        self._closed = True

    async def _look(self) -> ExpertsSnapshot:
        now = asyncio.get_running_loop().time()
        if now - self._began_at >= LIST_EVERY_S and self._listing is None:
            self._began_at = now
            self._listing = asyncio.create_task(self._list(), name="list experts")
        if self._left_out() != self._last.left_out:
            self._update()
        if now - self._served_at >= SERVED_EVERY_S:
            read = {uid: one for uid, one in self._served().items() if self._grid.contains(uid)}
            seconds, before = now - self._served_at, self._read
            served = tuple(rated(uid, one, before.get(uid), seconds) for uid, one in sorted(read.items()))
            self._last, self._read, self._served_at = replace(self._last, served=served), read, now
        self._last = replace(self._last, listed_s=now - self._listed_at if self._listings else None)
        return self._last

    def _left_out(self) -> tuple[str, ...]:
        return tuple(sorted(self._seen & self._directory.banned()))

    async def _list(self) -> None:
        fault = ""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                found = await self._directory.live(self._grid, fresh=self._grid.size <= MOST_UNCACHED)
            own = self._served()  # newer than this peer's last announcement
            mine = {info.uid for info in found if info.host.id == self._peers.id} & own.keys()
            self._listings.append(
                [replace(info, step=own[info.uid].step) if info.uid in mine else info for info in found]
            )
            self._seen.update(info.uid for info in found)
            self._listed_at = asyncio.get_running_loop().time()
            self._update()
        except Exception as error:  # shown in the panel, and retried
            logger.info("the experts could not be listed", exc_info=True)
            fault = f"{type(error).__name__}: {error}"
        self._last, self._listing = replace(self._last, fault=fault), None

    def _update(self) -> None:
        newest = self._listings[-1] if self._listings else []
        first = {info.uid: info.step for listing in reversed(self._listings) for info in listing}
        grown = {info.uid: max(0, info.step - first[info.uid]) for info in newest}
        left_out, total = self._left_out(), sum(grown.values())
        live: list[LiveExpert] = []
        by_host: dict[PeerId, list[LiveExpert]] = defaultdict(list)
        for info in newest:
            if info.uid not in left_out:
                host, share = info.host.id, grown[info.uid] / total if total else None
                live.append(LiveExpert(info.uid, short(host), host == self._peers.id, info.step, share))
                by_host[host].append(live[-1])
        hosts = []
        for host, experts in sorted(by_host.items(), key=lambda item: -len(item[1])):
            share = sum(grown[expert.uid] for expert in experts) / total if total else None
            rtt_s = self._peers.statistics(host).rtt_s
            hosts.append(HostOfExperts(experts[0].host, experts[0].mine, len(experts), share, rtt_s))
        dead = tuple(sorted(self._seen - {expert.uid for expert in live} - {*left_out}))
        self._last = replace(self._last, live=tuple(live), hosts=tuple(hosts), left_out=left_out, dead=dead)


def rated(uid: str, now: ExpertStatistics, before: ExpertStatistics | None, seconds: float) -> ServedExpert:
    """Return an expert with its rates since it was ``before``, so many seconds ago; infinity: no rates."""
    samples, calls, batches = now.forward_samples + now.backward_samples, now.calls, now.batches
    if before is not None and before.calls <= calls:  # else the expert was removed and hosted again
        samples -= before.forward_samples + before.backward_samples
        calls, batches = calls - before.calls, batches - before.batches
    return ServedExpert(
        uid=uid,
        step=now.step,
        queued=now.queued,
        batch_size=samples / batches if batches else None,
        calls_per_s=calls / seconds,
        samples_per_s=samples / seconds,
        p50_s=now.p50_s,
        p99_s=now.p99_s,
    )
