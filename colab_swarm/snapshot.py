"""Snapshots of a swarm: frozen records that `Swarm` makes and the panels draw."""

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from colab_swarm import events
from colab_swarm.markup import aligned, count, duration, facts, plain


@dataclass(frozen=True)
class PeerRow:
    """One peer, as this peer knows it."""

    name: str  # chosen by the peer; untrusted
    id: str  # short hex id
    role: str  # trainer, idle, paused, catching up, away, assistant or peer; in a simulation its state
    step: int  # its global step
    # its samples in the last rounds per second of wall time; 0 if the peer that makes the table does not train with it
    samples_per_s: float
    samples: float  # accumulated towards the next step
    reachable: bool | None  # whether others can dial it; None if unknown
    me: bool  # whether it is the peer that makes the table
    rtt_s: float | None = None  # round-trip time; None if not measured, or without a link
    connected: str = ""  # ``direct``, ``LAN``, ``iroh``, ``relayed by 1a2b3c4d``; empty without a link
    upload_bps: float | None = None  # as it reports, bits per second; None if it reports none
    download_bps: float | None = None
    loss: float | None = None  # of its last batches; None if unknown
    heard_s: float | None = (
        None  # seconds since its last sign of life; None: unknown, or it is this peer itself
    )
    compute_samples_per_s: float = 0.0  # as it reports, waiting not counted; 0 if it does not train

    @property
    def computes(self) -> bool:
        """True if the peer has a speed, which means that it trains."""
        return self.samples_per_s > 0 or self.compute_samples_per_s > 0


def speeds_of(peers: Iterable[PeerRow]) -> tuple[str, dict[str, float]]:
    """Return a heading for the speeds of the peers, and the speeds by peer id.

    If this peer trains with others, the speeds are samples per second of wall time. If not, each speed is the compute
    rate that the peer itself reports.
    """
    rows = list(peers)
    by_clock = {peer.id: peer.samples_per_s for peer in rows}
    if any(by_clock.values()):
        return "samples/s", by_clock
    return "compute rate", {peer.id: peer.compute_samples_per_s for peer in rows}


def speed_words(samples_per_s: float, compute_samples_per_s: float) -> str:
    """Return the speed of all peers together in words; empty if it is unknown."""
    if samples_per_s:
        return f"{samples_per_s:,.1f} samples/s"
    if compute_samples_per_s:
        return f"compute rate {compute_samples_per_s:,.1f} samples/s"
    return ""


class PeerTable(tuple[PeerRow, ...]):
    """The peers of a run, as this peer knows them; shown as a table by ``print`` and at the end of a cell."""

    __slots__ = ()

    def progress(self) -> dict[str, Any]:
        """Return the step, the mean loss, the speeds and the names of the peers that train now."""
        training = [peer for peer in self if peer.role == "trainer"]
        losses = [peer.loss for peer in training if peer.loss is not None]
        return {
            "step": max((peer.step for peer in training), default=0),
            "loss": statistics.fmean(losses) if losses else None,
            "samples_per_s": sum(peer.samples_per_s for peer in training),
            "compute_samples_per_s": sum(peer.compute_samples_per_s for peer in training),
            "training": [plain(peer.name, 40) for peer in training],
        }

    def line(self) -> str:
        """Return the progress of the peers that train now, in one line."""
        progress = self.progress()
        if not progress["training"]:
            return f"nobody trains; {count(len(self), 'peer')} here"
        loss = "" if progress["loss"] is None else f"loss {progress['loss']:.3f}   "
        speed = speed_words(progress["samples_per_s"], progress["compute_samples_per_s"])
        speed = f"{speed} from " if speed else ""
        return f"step {progress['step']}   {loss}{speed}{', '.join(progress['training'])}"

    def _rows(self) -> list[tuple[str, ...]]:
        title, speeds = speeds_of(self)
        rows: list[tuple[str, ...]] = [("peer", "role", "step", title, "loss", "last heard of")]
        for peer in self:
            name = plain(peer.name, 40) + (" (me)" if peer.me else "")
            speed = f"{speeds[peer.id]:,.1f}"
            loss = "" if peer.loss is None else f"{peer.loss:.4f}"
            heard = "" if peer.heard_s is None else f"{duration(peer.heard_s)} ago"
            rows.append((name, plain(peer.role), f"{peer.step:,}", speed, loss, heard))
        return rows

    def __str__(self) -> str:
        return "\n".join(aligned(self._rows()))

    def _repr_html_(self) -> str:
        titles, *rows = self._rows()
        return facts(count(len(self), "peer"), {}, titles, rows)


@dataclass(frozen=True)
class ContributionRow:
    """A row of the leaderboard: a peer's contribution, as this peer and the others saw it."""

    name: str  # of the peer; the id is short hex
    id: str
    samples: float  # in the gradients that it contributed
    reduced_bytes: float  # bytes that it averaged for others
    me: bool  # whether it is the peer that shows the leaderboard


@dataclass(frozen=True)
class SessionTime:
    """The duration of this session."""

    platform: str  # its name, for people
    elapsed_s: float  # since the start
    limit_s: float  # from the start to the latest end
    leaves_s: float  # from the start to when this peer leaves


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    step: int  # global step
    at: float  # seconds since the epoch
    size_bytes: int  # of its file


@dataclass(frozen=True)
class KeptModel:
    """A model whose checkpoints this peer keeps, as a backbone does."""

    checkpoints: tuple[Checkpoint, ...]  # on disk, the last saved one last
    standing_in: int | None = None  # step of the checkpoint that late joiners get; None while others train
    hub: str = ""  # state of the pushes to the Hugging Face Hub, in words; empty without pushes
    hub_failures: int = 0  # how many tries to push failed


@dataclass(frozen=True)
class SwarmSnapshot:
    """The swarm as this peer knows it."""

    run: str  # its name
    me: str  # this peer's name
    reached: str  # how others reach this peer, in words
    state: str  # of this peer, in one word; ``left`` is the last one
    peers: tuple[PeerRow, ...]  # this peer and the others
    step: int = 0  # global step
    # of all peers in the last rounds, per second of wall time; 0 before two rounds, or without training
    samples_per_s: float = 0.0
    target_batch_size: float = 0.0  # samples needed for a global step; 0 if this peer does not train
    accumulated: float = 0.0  # samples towards the next global step so far
    loss_history: tuple[tuple[int, float], ...] = ()  # (step, loss), oldest first
    sent_bytes: int = 0  # at this peer, since it joined
    received_bytes: int = 0
    uptime_s: float = 0.0  # seconds since it joined
    log: tuple[str, ...] = ()  # the last events as lines, oldest first
    own_samples_per_s: float = 0.0  # of this peer, as ``samples_per_s``
    compute_samples_per_s: float = 0.0  # of all peers together, waiting not counted
    computing: float = 0.0  # part of the last minute that this peer spent outside `step()`; 0 if unknown
    eta_s: float | None = None  # until the next global step at this speed; None if no peer trains
    last_share: float | None = (
        None  # this peer's part of the last global step's samples; None before the first
    )
    rounds: tuple[events.RoundFinished, ...] = ()  # the last averaging rounds, oldest first
    leaderboard: tuple[ContributionRow, ...] = ()  # most samples first; this peer's row is up to date
    forecast: str = ""  # bytes and seconds of a round, measured and planned; empty without a plan
    silent: str = ""  # the peer that the round waits for, in words; empty if there is none
    session: SessionTime | None = None  # None if its limit is unknown
    paused: bool = False  # whether the user has paused this peer's work
    names: Mapping[str, str] = field(default_factory=dict)  # of all peers by short id, also those that left
    model: str = ""  # the model that this peer follows without training it; empty if there is none
    kept: KeptModel | None = None  # the model whose checkpoints this peer keeps; None if it keeps none
    at: float = 0.0  # when the snapshot was taken, seconds since the epoch; 0 if unknown

    @property
    def over(self) -> bool:
        """True after this peer has left; nothing changes any more."""
        return self.state == "left"


def _round(event: events.RoundFinished) -> str:
    text = f"round {event.step}: {count(event.group_size, 'peer')}, {event.seconds:.2f} s"
    if event.spans_lost:
        text += f", {count(event.spans_lost, 'span')} lost"
    for member in event.members:
        if member.dropped:
            text += f"; {member.peer[:8]}: {member.dropped}"
    return text


_SHORT_ID = re.compile(r"\b(?:peer-)?([0-9a-f]{8})\b")
LINES: Mapping[type[events.Event], str] = {
    events.PeerJoined: "{peer} is linked",
    events.PeerLeft: "{peer} is gone: {0.reason}",
    events.Waited: "waited {0.seconds:.1f} s for {peer}: {0.what}",
    events.PeerRefused: "refused {0.what} of {peer}: {0.why}",
    events.ReachabilityChanged: "peers connect to you: {0.how}",
    events.StepFinished: "step {0.step}: {0.samples:g} samples",
    events.BatchDropped: "batch dropped: {0.reason}",
    events.Notice: "{0.text}",
    events.ExpertHosted: "hosting {0.uid}",
    events.ExpertBanned: "{0.uid} failed and is left out for {0.seconds:.0f} s: {0.reason}",
    events.Fault: "fault in {0.where}: {0.text}",
}


def describe(event: events.Event, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the event as a line of the log; ``names`` are the peers' names, by the short ids in the event."""
    return _SHORT_ID.sub(lambda match: names.get(match[1], match[0]), _line(event))


def _line(event: events.Event) -> str:
    match event:
        case events.RoundFinished():
            return _round(event)
        case events.StateReceived(step=step, size_bytes=size, donors=donors):
            return f"state of step {step}: {size / 1e6:.1f} MB from {count(len(donors), 'donor')}"
        case events.StepFinished(step=step, samples=samples, loss=float(loss)):
            return f"step {step}: loss {loss:.4f}, {samples:g} samples"
        case events.ExpertHosted(uid=uid, step=step, taken_over=True):
            return f"hosting {uid}, taken over at step {step}"
    line = LINES.get(type(event), type(event).__name__)
    return line.format(event, peer=getattr(event, "peer", "")[:8])
