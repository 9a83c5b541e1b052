"""What panels show of a peer, gathered from its services.

A snapshot is taken on the user's thread up to four times a second, so it only reads memory: no
network call, no file. Slow readings run in the background and appear a moment later.
"""

import logging
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from colab_swarm.errors import require
from colab_swarm.events import (
    Applied,
    Bottleneck,
    Contributed,
    Event,
    Notice,
    PeerLeft,
    RoundFinished,
    StepFinished,
    Waited,
)
from colab_swarm.markup import duration, plain, size
from colab_swarm.net.peers import PeerId, Peers, short
from colab_swarm.runtime import Runner
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime, SwarmSnapshot, describe
from colab_swarm.training.communication import Communication
from colab_swarm.training.progress import AssistantRecord, ProgressRecord, read_participants
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.contributions import Contribution, Contributions

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.part import TrainingPart

logger = logging.getLogger(__name__)
MAX_ROUNDS, MAX_LOSSES = 20, 1000
LOG_LINES = 8
SAME_LOSS_S = 1.0  # reports of a lost peer by several services within this time are one event
MAX_NAMES, MAX_NAME_CHARS = 1000, 40
MODEL = "model"  # the default name in `Swarm.optimizer`
T = TypeVar("T")
Records: TypeAlias = tuple[Mapping[PeerId, ProgressRecord], Mapping[PeerId, AssistantRecord]]


class Background(Generic[T]):
    """A slow reading on a thread of its own, at most every ``every_s``, while it is looked at."""

    def __init__(self, read: Callable[[], T], *, every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._value: T | None = None
        self._began_at = float("-inf")
        self._reading = threading.Lock()

    def look(self, now: float) -> T | None:
        if now - self._began_at >= self._every_s and self._reading.acquire(blocking=False):
            self._began_at = now
            threading.Thread(target=self._run, name="colab-swarm-reading", daemon=True).start()
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._read()
        except Exception:  # the peer may have left meanwhile; the last reading stays
            logger.debug("reading for the panel failed", exc_info=True)
        finally:
            self._reading.release()


class Overview:
    """Makes snapshots of a peer; where it trains nothing, of the trainers of `MODEL`."""

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        name: str,
        optimizers: "dict[str, SwarmOptimizer]",
        contributions: Contributions | None,
    ) -> None:
        self._runtime, self._services, self._name, self._optimizers = runtime, services, name, optimizers
        self._losses: tuple[tuple[int, float], ...] = ()
        self._rounds: tuple[RoundFinished, ...] = ()
        self._events: tuple[Event, ...] = ()  # without steps and good rounds, which the figures show
        self._counted = Counter[str]()  # samples of the rounds that this peer was in, by hex id
        self.plan: Communication | str | None = None  # of the newest optimizer
        self._silent: Waited | None = None  # the round waits for it
        self._bottlenecks = set[Bottleneck]()  # of the averaging, each told once
        self._names: dict[str, str] = {}  # by short id
        self._leaderboard: Background[tuple[Contribution, ...]] | None = None
        self._trainers: Background[tuple[*Records, object]] | None = None
        self._joined_at = runtime.time()
        if contributions is not None:
            read, prefix = contributions.read, f"{services.run_id}/{MODEL}"
            self._leaderboard = Background(lambda: runtime.call(read()), every_s=30.0)
            self._trainers = Background(
                lambda: runtime.call(read_participants(services.dht, prefix)), every_s=3.0
            )
        services.events.listen(self._on_event)
        for event in services.events.recent():
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case StepFinished(step=step, loss=loss) if loss is not None:
                first, *others = *self._losses, (step, loss)
                self._losses = (first, *others[1 - MAX_LOSSES :])
            case StepFinished() | Applied() | Contributed():
                pass
            case PeerLeft(peer=peer, at=at) if any(
                isinstance(one, PeerLeft) and one.peer == peer and at - one.at < SAME_LOSS_S
                for one in self._events
            ):
                pass
            case RoundFinished():
                self._on_round(event)
            case _:
                self._silent = event if isinstance(event, Waited) else self._silent
                self._tell(event)

    def _on_round(self, event: RoundFinished) -> None:
        self._silent = None
        self.names()  # of its members: one may have left when the panel shows the round
        self._rounds = (*self._rounds[1 - MAX_ROUNDS :], event)
        self._counted.update(
            {one.peer: one.samples for one in event.members if one.peer in event.contributors}
        )
        if event.bottleneck and event.bottleneck not in self._bottlenecks:
            self._bottlenecks.add(event.bottleneck)
            self._tell(Notice(event.at, f"round {event.step}: {event.explanation}"))
        if event.spans_lost or event.kept_local or any(member.dropped for member in event.members):
            self._tell(event)

    def _awaited(self, now: float) -> str:
        if (late := self._silent) is None:
            return ""
        name = self._names.get(late.peer[:8], f"peer-{late.peer[:8]}")
        return f"{name}, for {duration(late.seconds + now - late.at)}"

    def _tell(self, event: Event) -> None:
        self._events = (*self._events[1 - LOG_LINES :], event)

    def snapshot(self, *, reached: str, left: bool, session: SessionTime | None = None) -> SwarmSnapshot:
        now, total = self._runtime.time(), self._services.peers.statistics()
        seen_at, names = float("-inf") if left else now, self.names()
        bucket = [optimizer.collaboration.bucket_bytes for optimizer in self._optimizers.values()]
        shown = SwarmSnapshot(
            run=self._services.run_id.rpartition("-")[0],
            me=self._name,
            reached=reached,
            state="left" if left else "joined",
            peers=peer_rows(self._services.peers, self._name, *self._records(seen_at)),
            step=0,
            samples_per_s=0.0,
            target_batch_size=0.0,
            accumulated=0.0,
            loss_history=self._losses,
            sent_bytes=total.sent_bytes + sum(sent for sent, _ in bucket),
            received_bytes=total.received_bytes + sum(received for _, received in bucket),
            uptime_s=now - self._joined_at,
            names=names,
            log=tuple(describe(event, names) for event in self._events),
            silent=self._awaited(now),
            last_share=_last_share(self._rounds, self._services.peers.id.hex()),
            rounds=self._rounds,
            leaderboard=self._contributions(seen_at),
            session=session,
            paused=self._services.gate.closed,
        )
        if (trained := self._trained()) is None:
            return shown
        progress = trained.progress
        eta_s = progress.seconds_to_batch(now)
        return replace(
            shown,
            state="left" if left else "training",
            step=progress.own.step,
            samples_per_s=progress.samples_per_s(),
            target_batch_size=progress.round_samples,
            forecast=self._forecast(),
            accumulated=sum(record.samples for record in progress.records.values()),
            own_samples_per_s=progress.own.samples_per_s,
            eta_s=None if eta_s == float("inf") else eta_s,
        )

    def _forecast(self) -> str:
        """Return the planned round and the usual one of the last, in words; empty without a plan."""
        if not (isinstance(self.plan, Communication) and self._rounds):
            return ""
        sent = statistics.median(one.sent_bytes for one in self._rounds)
        seconds = statistics.median(one.seconds for one in self._rounds)
        wanted = self.plan.chosen
        return (
            f"{size(sent)} in {seconds:.2g} s\nforecast {size(wanted.sent_bytes)} in {wanted.round_s:.2g} s"
        )

    def _trained(self) -> "TrainingPart | None":
        newest = next(reversed(self._optimizers.values()), None)
        return None if newest is None else newest.collaboration

    def names(self) -> Mapping[str, str]:
        names = {
            short(peer): plain(record.name, MAX_NAME_CHARS)
            for records in reversed(self._records(float("-inf")))
            for peer, record in records.items()
        }
        self._names = {**(self._names if len(self._names) < MAX_NAMES else {}), **names}
        return self._names

    def peer_of(self, text: str) -> PeerId:
        """Return the peer of this name, or of these first hex digits; ValueError unless there is exactly one."""
        names = dict.fromkeys(self._services.peers.linked(), "")
        for optimizer in self._optimizers.values():
            records = optimizer.collaboration.progress.records
            names |= {one: record.name for one, record in records.items()}
        matches = [one for one, name in names.items() if text == name or one.hex().startswith(text.lower())]
        found = f": {', '.join(map(short, matches))}" if matches else ""
        require(len(matches) == 1, f"{text!r} matches {len(matches)} peers, expected exactly one{found}")
        return matches[0]

    def _records(self, now: float) -> Records:
        if (trained := self._trained()) is not None:
            return dict(trained.progress.records), dict(trained.progress.assistants)
        found = None if self._trainers is None else self._trainers.look(now)
        return ({}, {}) if found is None else found[:2]

    def _contributions(self, now: float) -> tuple[ContributionRow, ...]:
        """Return the rows of the leaderboard; meanwhile this peer's own counts of its rounds."""
        found = None if self._leaderboard is None else self._leaderboard.look(now)
        book, counted = {one.peer.hex(): one for one in found or ()}, dict(self._counted)
        me, rows = self._services.peers.id.hex(), list[ContributionRow]()
        for peer in book.keys() | counted.keys():
            id, reduced_bytes = peer[:8], book[peer].reduced_bytes if peer in book else 0.0
            samples = max(counted.get(peer, 0.0), book[peer].samples if peer in book else 0.0)
            name = self._name if peer == me else self._names.get(id, f"peer-{id}")
            rows.append(ContributionRow(name, id, samples, reduced_bytes, peer == me))
        return tuple(sorted(rows, key=lambda row: -row.samples)[:20])


def _last_share(rounds: Sequence[RoundFinished], me: str) -> float | None:
    if not rounds:
        return None
    last = rounds[-1]
    own = sum(member.samples for member in last.members if member.peer == me and me in last.contributors)
    return own / last.samples if last.samples else 0.0


def peer_rows(
    peers: Peers,
    own_name: str,
    trainers: Mapping[PeerId, ProgressRecord],
    assistants: Mapping[PeerId, AssistantRecord],
) -> tuple[PeerRow, ...]:
    """Return a row per peer: those that train, those that assist, this one, others linked."""
    rows: dict[PeerId, PeerRow] = {}
    for peer, record in sorted(trainers.items()):
        role = "catching up" if record.syncing else "paused" if record.paused else "trainer"
        role = "idle" if record.idle and not record.paused else role
        rows[peer] = replace(
            _row(peers, peer, record.name, role, bool(record.addresses)),
            step=record.step,
            samples_per_s=0.0 if record.absent else record.samples_per_s,
            samples=record.samples,
            upload_bps=record.upload_bps,
            download_bps=record.download_bps,
        )
    rows |= {
        peer: _row(peers, peer, assistants[peer].name, "assistant", True)
        for peer in sorted(assistants.keys() - rows.keys())
    }
    if peers.id not in rows:
        rows[peers.id] = _row(peers, peers.id, own_name, "peer", bool(peers.contact.addresses))
    rows |= {peer: _row(peers, peer, "", "peer", None) for peer in sorted(peers.linked() - rows.keys())}
    return tuple(rows.values())


def _row(peers: Peers, peer: PeerId, name: str, role: str, reachable: bool | None) -> PeerRow:
    me = peer == peers.id
    rtt_s, connected = (None, "") if me else (peers.statistics(peer).rtt_s, peers.way_to(peer))
    name = plain(name, MAX_NAME_CHARS) or f"peer-{short(peer)}"
    return PeerRow(name, short(peer), role, 0, 0.0, 0.0, reachable, me, rtt_s, connected)
