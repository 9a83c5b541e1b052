"""Collect, from a peer's services, the data that its panels show.

A snapshot is taken on the user's thread up to four times a second. So it only reads memory, and makes no network
call and reads no file. Slow values are read in the background and appear a moment later.
"""

import logging
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import msgspec

from colab_swarm.errors import require
from colab_swarm.events import (
    BatchDropped,
    Bottleneck,
    Event,
    Notice,
    PeerLeft,
    RoundFinished,
    StepFinished,
    Waited,
)
from colab_swarm.invite import Invite
from colab_swarm.markup import duration, plain, size
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, short
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.runtime import Runner, on_loop
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime, SwarmSnapshot, describe
from colab_swarm.training.communication import Communication, Plan
from colab_swarm.training.records import AssistantRecord, ProgressRecord, read_participants
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.contributions import Contribution, Contributions

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer

logger = logging.getLogger(__name__)
MAX_ROUNDS = 20
_MAX_LOSSES = 1000
_MAX_CONTRIBUTIONS = 20  # rows of the leaderboard
LOG_LINES = 8
_SAME_LOSS_S = 1.0  # reports of a lost peer by several services within this time are one event
_STEPS_BEHIND = 2  # a peer that trains is at most this far behind; a stopped peer falls further behind
_MAX_NAMES = 1000
MAX_NAME_CHARS = 40
_NEVER = float("-inf")
MODEL = "model"  # the default name in `Swarm.optimizer`
T = TypeVar("T")
Records: TypeAlias = tuple[Mapping[PeerId, ProgressRecord], Mapping[PeerId, AssistantRecord]]


class Background(Generic[T]):
    """Reads a slow value on a separate thread, at most every ``every_s`` seconds, and only when `look` is called."""

    def __init__(self, read: Callable[[], T], *, every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._value: T | None = None
        self._began_at = _NEVER
        self._thread = threading.Thread()

    def look(self, now: float) -> T | None:
        """Return the last value, or None; begin the next reading if it is due and no reading is running."""
        if now - self._began_at >= self._every_s and not self._thread.is_alive():
            self._began_at = now
            self._thread = threading.Thread(target=self._run, name="colab-swarm-reading", daemon=True)
            self._thread.start()
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._read()
        except Exception:
            # the peer may have left in the meantime; keep the last value
            logger.debug("reading for the panel failed", exc_info=True)


class Overview:
    """Makes snapshots of a peer. If the peer trains no model, they show the trainers of `MODEL`."""

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        name: str,
        optimizers: "dict[str, SwarmOptimizer]",
        contributions: Contributions | None,
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._name = name
        self._optimizers = optimizers
        self._losses: tuple[tuple[int, float], ...] = ()
        self._rounds: tuple[RoundFinished, ...] = ()
        self._events: tuple[
            Event, ...
        ] = ()  # the last ones, without steps and complete rounds, which figures show
        self.unsaid = deque[Event](maxlen=100)  # events that a script has not printed yet
        self._samples = defaultdict[str, float](
            float
        )  # of the rounds in which this peer took part, by hex id
        self.plan: Communication | Plan | str = ""  # of the newest optimizer
        self.silent: Waited | None = None  # names the peer that the round waits for
        self._bottlenecks = set[Bottleneck]()  # bottlenecks of rounds that were shown; each is shown once
        self._names: dict[str, str] = {}  # by short id
        self._leaderboard: Background[tuple[Contribution, ...]] | None = None
        self._trainers: Background[tuple[*Records, object]] | None = None
        self._joined_at = runtime.time()
        if contributions is not None:
            ledger = contributions
            prefix = f"{services.run_id}/{MODEL}"
            self._leaderboard = Background(lambda: runtime.call(on_loop(ledger.known)), every_s=30.0)
            self._trainers = Background(
                lambda: runtime.call(read_participants(services.dht, prefix)), every_s=3.0
            )
        services.events.listen(self._on_event)
        for event in services.events.recent(Event):
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case StepFinished(step=step, loss=loss):
                if loss is not None:
                    # keep the first loss, because the panel compares with it
                    losses = (*self._losses, (step, loss))
                    self._losses = (losses[0], *losses[1:][1 - _MAX_LOSSES :])
            case BatchDropped(told=False):
                pass
            case RoundFinished():
                self._on_round(event)
            case PeerLeft() if self._is_reported(event):
                pass
            case Waited():
                self.silent = event
                self._log(event)
            case _:
                self._log(event)

    def _is_reported(self, event: PeerLeft) -> bool:
        """Return True if another service has just reported that this peer left."""
        lost = [earlier for earlier in self._events if isinstance(earlier, PeerLeft)]
        return any(earlier.peer == event.peer and event.at - earlier.at < _SAME_LOSS_S for earlier in lost)

    def _on_round(self, event: RoundFinished) -> None:
        self.silent = None
        # read the names now, because a member may have left before the panel shows the round
        self.names()
        self._rounds = (*self._rounds[1 - MAX_ROUNDS :], event)
        for member in event.members:
            if member.peer in event.contributors:
                self._samples[member.peer] += member.samples
        if event.bottleneck and event.bottleneck not in self._bottlenecks:
            self._bottlenecks.add(event.bottleneck)
            self._show(Notice(event.at, f"round {event.step}: {event.explanation}"))
        was_complete = not (event.spans_lost or event.kept_local)
        if not was_complete or any(member.dropped for member in event.members):
            self._log(event)

    def warn(self, sentence: str) -> None:
        """Print a sentence about the user's data, and record it."""
        self._services.events.emit(Notice(self._runtime.time(), sentence, logged=True))
        print(sentence)

    def _awaited(self, now: float) -> str:
        wait = self.silent
        if wait is None:
            return ""
        name = self._names.get(wait.peer[:8], f"peer-{wait.peer[:8]}")
        return f"{name}, for {duration(wait.seconds + now - wait.at)}"

    def _log(self, event: Event) -> None:
        self._show(event)
        self.unsaid.append(event)

    def _show(self, event: Event) -> None:
        self._events = (*self._events[1 - LOG_LINES :], event)

    def snapshot(
        self, *, reached: Reachability, left: bool, session: SessionTime | None = None
    ) -> SwarmSnapshot:
        now = self._runtime.time()
        # after this peer has left, begin no new reading
        read_at = _NEVER if left else now
        names = self.names()
        trainers, assistants = self._records(read_at)
        trained = self._trained()
        speeds = {} if trained is None else trained.rounds.view.pace.by_peer(now)
        total = self._services.peers.statistics()
        sent_bytes = total.sent_bytes
        received_bytes = total.received_bytes
        for optimizer in self._optimizers.values():
            bucket_sent_bytes, bucket_received_bytes = optimizer.rounds.bucket_bytes
            sent_bytes += bucket_sent_bytes
            received_bytes += bucket_received_bytes
        rows = peer_rows(self._services.peers, self._name, trainers, assistants, now, speeds)
        if reached.level is ReachabilityLevel.UNVERIFIED:
            rows = tuple(replace(row, reachable=None) if row.me else row for row in rows)
        snapshot = SwarmSnapshot(
            run=self._services.run_id.rpartition("-")[0],
            me=self._name,
            reached=str(reached),
            state="joined",
            peers=rows,
            loss_history=self._losses,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            uptime_s=now - self._joined_at,
            names=names,
            log=tuple(describe(event, names) for event in self._events),
            silent=self._awaited(now),
            last_share=_last_share(self._rounds, self._services.peers.id.hex()),
            rounds=self._rounds,
            leaderboard=self._contributions(read_at),
            session=session,
            paused=self._services.gate.closed,
        )
        if trained is not None:
            view = trained.rounds.view
            eta_s = view.seconds_to_batch(now)
            snapshot = replace(
                snapshot,
                state="finished" if trained.global_step >= trained.hooks.max_steps else "training",
                step=view.own.step,
                samples_per_s=view.pace.samples_per_s(now),
                compute_samples_per_s=view.samples_per_s(),
                target_batch_size=view.round_samples,
                forecast=self._forecast(),
                accumulated=view.samples(now),
                own_samples_per_s=speeds.get(view.me, 0.0),
                computing=trained.times.share(now),
                eta_s=None if eta_s == float("inf") else eta_s,
            )
        return replace(snapshot, state="left") if left else snapshot

    def _forecast(self) -> str:
        """Return the median of the last rounds and the planned round, in words; empty without a plan."""
        if not isinstance(self.plan, Plan) or not self._rounds:
            return ""
        sent_bytes = statistics.median(finished.sent_bytes for finished in self._rounds)
        seconds = statistics.median(finished.seconds for finished in self._rounds)
        planned = self.plan.chosen
        forecast = f"forecast {size(planned.sent_bytes)} in {planned.round_s:.2g} s"
        return f"{size(sent_bytes)} in {seconds:.2g} s\n{forecast}"

    def _trained(self) -> "SwarmOptimizer | None":
        return next(reversed(self._optimizers.values()), None)

    def names(self) -> Mapping[str, str]:
        """Return the names of all peers seen so far, by short id."""
        trainers, assistants = self._records(_NEVER)
        names = dict(self._names) if len(self._names) < _MAX_NAMES else {}
        records: dict[PeerId, ProgressRecord | AssistantRecord] = {**assistants, **trainers}
        for peer, record in records.items():
            names[short(peer)] = plain(record.name, MAX_NAME_CHARS)
        self._names = names
        return names

    def peer_of(self, text: str) -> PeerId:
        """Return the peer with this name or these first hex digits of its id, or the key's id of this invitation.

        Raises ValueError unless exactly one peer matches.
        """
        if "." in text:
            return Invite.parse(text, now=0.0).key.id
        names = dict.fromkeys(self._services.peers.linked(), "")
        for optimizer in self._optimizers.values():
            for peer, record in optimizer.rounds.view.all.items():
                names[peer] = record.name
        start = text.lower()
        matches = [peer for peer, name in names.items() if text == name or peer.hex().startswith(start)]
        found = f": {', '.join(map(short, matches))}"
        if not matches:
            found = f"; known are {', '.join(sorted(names.values())) or 'none'}"
        require(len(matches) == 1, f"{text!r} matches {len(matches)} peers, expected exactly one{found}")
        return matches[0]

    def _records(self, now: float) -> Records:
        """Return the trainers and assistants of the model trained here; without such a model, the last ones read."""
        trained = self._trained()
        if trained is not None:
            view = trained.rounds.view
            return dict(view.all), dict(view.assistants)
        reading = None if self._trainers is None else self._trainers.look(now)
        return ({}, {}) if reading is None else reading[:2]

    def _contributions(self, now: float) -> tuple[ContributionRow, ...]:
        """Return the leaderboard's rows; until it is read, the rows have only this peer's counts of its own rounds."""
        reading = None if self._leaderboard is None else self._leaderboard.look(now)
        rows = []
        for one in self.with_own_counts(reading or ())[:_MAX_CONTRIBUTIONS]:
            me = one.peer == self._services.peers.id
            name = self._name if me else self._names.get(short(one.peer), f"peer-{short(one.peer)}")
            rows.append(ContributionRow(name, short(one.peer), one.samples, one.reduced_bytes, me))
        return tuple(rows)

    def with_own_counts(self, told: Iterable[Contribution]) -> tuple[Contribution, ...]:
        """Return the contributions that peers told, most samples first.

        Each contribution has at least the samples that this peer counted for it in the rounds of this peer.
        """
        by_peer = {one.peer: one for one in told}
        for peer_hex, samples in dict(self._samples).items():
            peer = PeerId(bytes.fromhex(peer_hex))
            known = by_peer.get(peer, Contribution(peer))
            by_peer[peer] = msgspec.structs.replace(known, samples=max(known.samples, samples))
        return tuple(sorted(by_peer.values(), key=lambda one: -one.samples))


def _last_share(rounds: Sequence[RoundFinished], me: str) -> float | None:
    if not rounds:
        return None
    last = rounds[-1]
    if not last.samples or me not in last.contributors:
        return 0.0
    own = sum(member.samples for member in last.members if member.peer == me)
    return own / last.samples


def peer_rows(
    peers: Node,
    own_name: str,
    trainers: Mapping[PeerId, ProgressRecord],
    assistants: Mapping[PeerId, AssistantRecord],
    now: float,
    speeds: Mapping[PeerId, float] = MappingProxyType({}),
) -> tuple[PeerRow, ...]:
    """Return a row for each peer: peers that train, peers that assist, this peer, and other linked peers.

    ``now`` is loop time; ``speeds`` are samples per second of wall time, if this peer trains with others.
    """
    rows: dict[PeerId, PeerRow] = {}
    step = statistics.median_high([0, *(record.step for record in trainers.values())])
    if peers.id in trainers:
        step = trainers[peers.id].step
    for peer, record in sorted(trainers.items()):
        role = _role(record, step)
        trains = not record.paused and role != "away"
        rows[peer] = replace(
            _row(peers, peer, record.name, role, bool(record.addresses), now),
            step=record.step,
            samples_per_s=speeds.get(peer, 0.0) if trains else 0.0,
            compute_samples_per_s=record.samples_per_s if trains else 0.0,
            samples=record.samples,
            upload_bps=record.upload_bps,
            download_bps=record.download_bps,
            loss=record.loss,
        )
    for peer in sorted(assistants.keys() - rows.keys()):
        rows[peer] = _row(peers, peer, assistants[peer].name, "assistant", True, now)
    if peers.id not in rows:
        rows[peers.id] = _row(peers, peers.id, own_name, "peer", bool(peers.contact.addresses), now)
    for peer in sorted(peers.linked() - rows.keys()):
        rows[peer] = _row(peers, peer, "", "peer", None, now)
    return tuple(rows.values())


def _role(record: ProgressRecord, step: int) -> str:
    if record.syncing:
        return "catching up"
    if record.paused:
        return "paused"
    return "trainer" if record.step >= step - _STEPS_BEHIND else "away"


def _row(peers: Node, peer: PeerId, name: str, role: str, reachable: bool | None, now: float) -> PeerRow:
    name = plain(name, MAX_NAME_CHARS) or f"peer-{short(peer)}"
    row = PeerRow(name, short(peer), role, 0, 0.0, 0.0, reachable, me=peer == peers.id)
    if row.me:
        return row
    heard_s = now - peers.read_at(peer)
    return replace(
        row,
        rtt_s=peers.statistics(peer).rtt_s,
        connected=peers.way_to(peer),
        heard_s=heard_s if heard_s < float("inf") else None,
    )
