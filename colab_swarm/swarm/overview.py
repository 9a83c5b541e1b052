"""What panels show of a peer, gathered from its services.

A snapshot is taken on the user's thread up to four times a second, so it only looks at what is in memory: no call over
the network, no file. What takes longer is read in the background and shown a moment late.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from colab_swarm.events import Event, PeerLeft, RoundFinished, StepFinished
from colab_swarm.markup import plain
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import Runner
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime, SwarmSnapshot, describe
from colab_swarm.training.progress import (
    AssistantRecord,
    Progress,
    ProgressRecord,
    read_assistants,
    read_progress,
)
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.contributions import Contribution

if TYPE_CHECKING:
    from colab_swarm.swarm.network import NetworkSession
    from colab_swarm.training.optimizer import SwarmOptimizer

logger = logging.getLogger(__name__)
MAX_LOSSES = 1000
MAX_ROUNDS = 20
MAX_GIVEN = 20
LOG_LINES = 8
ROUTINE_LINES = 4
"""Steps, and rounds without a fault, take no more of them: quick ones would wash away at once what is rare."""
MAX_NAMES, MAX_NAME_CHARS = 1000, 40
SAME_LOSS_S = 1.0
"""Several parts of this peer may tell that another is gone; within so short a time it is one piece of news."""
LEADERBOARD_S = 30.0
MODEL = "model"
"""What `Swarm.optimizer` calls it unless told otherwise."""
TRAINERS_S = 3.0
"""How often a peer that does not train itself reads who does."""
RATE_S = 5.0
_SHORT_ID = re.compile(r"\b[0-9a-f]{8}\b")

T = TypeVar("T")
Records: TypeAlias = tuple[Mapping[PeerId, ProgressRecord], Mapping[PeerId, AssistantRecord]]


class Background(Generic[T]):
    """What takes long to read: read on a thread of its own, at most every ``every_s``, while somebody looks."""

    def __init__(self, read: Callable[[], T], *, every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._value: T | None = None
        self._began_at = float("-inf")
        self._reading = threading.Lock()

    def look(self, now: float) -> T | None:
        """What was read last; None before that. Returns at once."""
        if now - self._began_at >= self._every_s and self._reading.acquire(blocking=False):
            self._began_at = now
            threading.Thread(target=self._run, name="colab-swarm-reading", daemon=True).start()
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._read()
        except Exception:  # the peer may have left meanwhile; what was read before stays
            logger.debug("reading for the panel failed", exc_info=True)
        finally:
            self._reading.release()


class TrafficRates:
    """Bits per second, up and down, over the last seconds. Pure."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int, int]] = deque()

    def on_totals(self, sent_bytes: int, received_bytes: int, now: float) -> tuple[float, float]:
        """The totals stand at so much now; returns the rates since a reading `RATE_S` ago, or the last before that."""
        readings = self._readings
        while len(readings) > 1 and now - readings[1][0] >= RATE_S:
            readings.popleft()
        if not readings or now - readings[-1][0] >= RATE_S / 20:
            readings.append((now, sent_bytes, received_bytes))
        at, sent, received = readings[0]
        seconds = now - at
        if seconds <= 0:
            return 0.0, 0.0
        return 8 * (sent_bytes - sent) / seconds, 8 * (received_bytes - received) / seconds


class Overview:
    """Makes snapshots of the peer ``name`` in the run ``run``.

    Args:
        runtime: runs this peer.
        presence: its place in the network; None in a simulation, which has no leaderboard.
        optimizer: what it trains, if anything; called on any thread.

    Who trains nothing, as an organizer, sees those who train `MODEL`.
    """

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        presence: NetworkSession | None,
        optimizer: Callable[[], SwarmOptimizer | None],
        *,
        run: str,
        name: str,
    ) -> None:
        self._services, self._run, self._name = services, run, name
        self._optimizer = optimizer
        self._clock = runtime.time
        self._losses: tuple[tuple[int, float], ...] = ()
        self._rounds: tuple[RoundFinished, ...] = ()
        self._rare: tuple[Event, ...] = ()
        self._routine: tuple[Event, ...] = ()
        self._names: dict[str, str] = {}  # by short id, of those that told one
        self._rates = TrafficRates()
        self._one_at_a_time = threading.Lock()
        self._leaderboard: Background[tuple[Contribution, ...]] | None = None
        self._onlooker: Background[Records] | None = None
        if presence is not None:
            prefix = f"{presence.entrance.run_id}/{MODEL}"
            self._onlooker = Background(lambda: runtime.call(_read(services, prefix)), every_s=TRAINERS_S)
            contributions = presence.trust.contributions
            self._leaderboard = Background(lambda: runtime.call(contributions.read()), every_s=LEADERBOARD_S)
        self._joined_at = self._clock()
        services.events.listen(self._note)
        for event in services.events.recent():
            self._note(event)

    def _note(self, event: Event) -> None:
        if _is_routine(event):
            self._routine = (*self._routine[1 - ROUTINE_LINES :], event)
        else:
            self._rare = (*self._rare[1 - 2 * LOG_LINES :], event)
        if isinstance(event, StepFinished) and event.loss is not None:
            kept = self._losses if len(self._losses) < MAX_LOSSES else (self._losses[0], *self._losses[2:])
            self._losses = (*kept, (event.step, event.loss))
        elif isinstance(event, RoundFinished):
            self.names()  # of its members, one of whom may be gone when somebody looks
            self._rounds = (*self._rounds[1 - MAX_ROUNDS :], event)

    def snapshot(self, *, reached: str, left: bool, session: SessionTime | None = None) -> SwarmSnapshot:
        """One frozen record; safe from any thread, and quick: nothing is waited for."""
        now, peers = self._clock(), self._services.peers
        total = peers.statistics()
        with self._one_at_a_time:
            sent_bps, received_bps = self._rates.on_totals(total.sent_bytes, total.received_bytes, now)
        optimizer = self._optimizer()
        progress = None if optimizer is None else optimizer.collaboration.progress
        records = self._records(optimizer, float("-inf") if left else now)
        names = self.names()
        return SwarmSnapshot(
            run=self._run,
            me=self._name,
            reached=reached,
            state="left" if left else "joined" if progress is None else "training",
            peers=self._rows(*records),
            step=progress.own.step if progress else 0,
            samples_per_s=progress.samples_per_s() if progress else 0.0,
            target_batch_size=progress.round_samples if progress else 0.0,
            accumulated=sum(r.samples for r in progress.records.values()) if progress else 0.0,
            loss_history=self._losses,
            sent_bytes=total.sent_bytes,
            received_bytes=total.received_bytes,
            uptime_s=now - self._joined_at,
            log=tuple(self._log()),
            own_samples_per_s=progress.own.samples_per_s if progress else 0.0,
            eta_s=_eta_s(progress, now),
            last_share=self._last_share(),
            rounds=self._rounds,
            leaderboard=self._given(now, left),
            sent_bps=sent_bps,
            received_bps=received_bps,
            session=session,
            paused=self._services.gate.closed,
            names=names,
        )

    def names(self) -> Mapping[str, str]:
        """What peers call themselves, by short id; those that are gone among them."""
        told = {
            short(peer): plain(record.name, MAX_NAME_CHARS)
            for records in reversed(self._records(self._optimizer(), float("-inf")))
            for peer, record in records.items()
        }
        self._names = {**(self._names if len(self._names) < MAX_NAMES else {}), **told}
        return self._names

    # --- who is there -------------------------------------------------------------------------------------------

    def _records(self, optimizer: SwarmOptimizer | None, now: float) -> Records:
        """Of trainers and assistants."""
        if optimizer is not None:
            collaboration = optimizer.collaboration
            return dict(collaboration.progress.records), dict(collaboration.assistants.records)
        seen = None if self._onlooker is None else self._onlooker.look(now)
        return seen or ({}, {})

    def _rows(
        self, trainers: Mapping[PeerId, ProgressRecord], helpers: Mapping[PeerId, AssistantRecord]
    ) -> tuple[PeerRow, ...]:
        """Trainers, assistants, and this peer and those it is linked to where they are neither."""
        peers = self._services.peers
        rows = [self._trainer(peer, record) for peer, record in sorted(trainers.items())]
        rows += [
            self._row(peer, record.name, "assistant", reachable=True)
            for peer, record in sorted(helpers.items())
            if peer not in trainers
        ]
        if peers.id not in {*trainers, *helpers}:
            rows.append(self._row(peers.id, self._name, "peer", reachable=bool(peers.contact.addresses)))
        others = sorted(peers.linked() - trainers.keys() - helpers.keys())
        rows += [self._row(peer, f"peer-{short(peer)}", "peer", reachable=None) for peer in others]
        return tuple(rows)

    def _trainer(self, peer: PeerId, record: ProgressRecord) -> PeerRow:
        return self._row(
            peer,
            record.name,
            "catching up" if record.syncing else "paused" if record.paused else "trainer",
            reachable=bool(record.addresses),
            record=record,
        )

    def _row(
        self,
        peer: PeerId,
        name: str,
        role: str,
        *,
        reachable: bool | None,
        record: ProgressRecord | None = None,
    ) -> PeerRow:
        peers, me = self._services.peers, peer == self._services.peers.id
        return PeerRow(
            name=name,
            id=short(peer),
            role=role,
            step=record.step if record else 0,
            samples_per_s=record.samples_per_s if record else 0.0,
            samples=record.samples if record else 0.0,
            reachable=reachable,
            me=me,
            rtt_s=None if me else peers.statistics(peer).rtt_s,
            connected="" if me else peers.way_to(peer),
            upload_bps=record.upload_bps if record else None,
            download_bps=record.download_bps if record else None,
        )

    # --- what came of it ----------------------------------------------------------------------------------------

    def _last_share(self) -> float | None:
        if not self._rounds:
            return None
        last, me = self._rounds[-1], self._services.peers.id.hex()
        own = sum(member.weight for member in last.members if member.peer == me and me in last.contributors)
        return own / last.samples if last.samples else 0.0

    def _given(self, now: float, left: bool) -> tuple[ContributionRow, ...]:
        if self._leaderboard is None:
            return ()
        found = self._leaderboard.look(float("-inf") if left else now) or ()
        me = self._services.peers.id
        return tuple(
            ContributionRow(
                name=self._name
                if one.peer == me
                else self._names.get(short(one.peer), f"peer-{short(one.peer)}"),
                id=short(one.peer),
                samples=one.samples,
                reduced_bytes=one.reduced_bytes,
                me=one.peer == me,
            )
            for one in found[:MAX_GIVEN]
        )

    def _log(self) -> Iterable[str]:
        """The last events as lines, with names where they are known."""
        lines = []
        events = sorted([*_news(self._rare), *self._routine], key=lambda event: event.at)
        for event in events[-LOG_LINES:]:
            # in one pass: peers choose their names, and one may choose another's id
            lines.append(_SHORT_ID.sub(lambda id: self._names.get(id[0], id[0]), describe(event)))
        return lines


async def _read(services: PeerServices, prefix: str) -> Records:
    """What trainers and assistants of a collaboration tell of themselves."""
    dht, peers = services.dht, services.peers
    return await asyncio.gather(read_progress(dht, peers, prefix), read_assistants(dht, peers, prefix))


def _news(events: Iterable[Event]) -> list[Event]:
    """Without what is told twice."""
    news: list[Event] = []
    gone: dict[str, float] = {}
    for event in events:
        if isinstance(event, PeerLeft):
            if event.at - gone.get(event.peer, float("-inf")) < SAME_LOSS_S:
                continue
            gone[event.peer] = event.at
        news.append(event)
    return news


def _is_routine(event: Event) -> bool:
    if isinstance(event, RoundFinished):
        failed = event.spans_lost or event.kept_local or any(member.dropped for member in event.members)
        return not failed
    return isinstance(event, StepFinished)


def _eta_s(progress: Progress | None, now: float) -> float | None:
    eta_s = float("inf") if progress is None else progress.seconds_to_batch(now)
    return None if eta_s == float("inf") else eta_s
