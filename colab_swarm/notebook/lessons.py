"""A simulated swarm and an interactive run of it: frozen records, drawn as HTML and as text.

Everything that the controls of a run do is an `Action`, a record with a virtual time. The same seed and the same
actions give the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from colab_swarm.events import BatchDropped, Event, Fault, RoundFinished, StateReceived
from colab_swarm.markup import count, plain, size, text
from colab_swarm.notebook import rounds, swarm_map, theme
from colab_swarm.notebook.panel import Page, Views
from colab_swarm.notebook.theme import Cell, Document
from colab_swarm.snapshot import SwarmSnapshot

MAX_PEERS = 32
MAX_LINES = 12
FAULTS = {
    "crash": "{} crashes",
    "restart": "{} can be dialled again",
    "heal": "the network is whole again",
    "slow": "{}'s connection becomes {:g} times slower than at first",
    "skew": "{}'s clock is {:g} s ahead",
    "lose": "{:.1%} of all messages are lost once",
    "latency": "latency becomes {:g} times that at first",
    "bandwidth": "bandwidth becomes {:g} times that at first",
}
OVER = ("finished", "stopped", "failed")  # final states of a run
COLUMNS = ("peer", "state", "step", "samples", "samples/s", "loss")
SYMBOLS = {
    "training": ("green", "▶"),
    "finished": ("blue", "✓"),
    "catching up": ("amber", "↻"),
    "joining": ("amber", "…"),
    "crashed": ("red", "✗"),
    "left": ("soft", "○"),
}

Verb: TypeAlias = Literal["peers", "join", "crash", "speed", "slow", "latency", "bandwidth", "lose"]


@dataclass(frozen=True)
class Action:
    """A change to a running simulation.

    Attributes:
        at: virtual seconds since the simulation started.
        verb: ``peers`` (how many), ``join``, ``crash`` (a peer), ``speed`` (a peer, samples per second), ``slow`` (a
            peer, how many times slower its connection), ``latency``, ``bandwidth`` (factor), ``lose`` (share of
            messages).
        arguments: of the verb.
    """

    at: float
    verb: Verb
    arguments: tuple[str | float, ...]


@dataclass(frozen=True)
class SimulatedPeer:
    """One peer of a simulation.

    Attributes:
        state: ``training``, ``catching up``, ``joined``, ``finished``, ``joining``, ``crashed`` or ``left``.
    """

    name: str  # as faults use it
    state: str
    step: int  # global step of its parameters
    samples: float  # accumulated towards the next step
    samples_per_s: float  # training speed
    loss: float | None  # at its last step; None before the first


@dataclass(frozen=True)
class SimulationSnapshot:
    """A simulated swarm at one moment.

    Attributes:
        fired, coming: past and future faults, in words, with their times; oldest first.
    """

    at: float  # virtual seconds since it started
    network: str  # name and description
    peers: tuple[SimulatedPeer, ...]  # in the order in which they joined
    target_batch_size: float  # samples of a global step; 0 while no peer trains
    fired: tuple[str, ...]
    coming: tuple[str, ...]
    seen: SwarmSnapshot | None  # the swarm as one of the peers sees it; None without peers


@dataclass(frozen=True)
class LessonSnapshot:
    """An interactive run at one moment."""

    simulation: SimulationSnapshot  # its swarm
    state: str  # ``playing``, ``paused``, ``finished``, ``stopped`` or ``failed``
    speed: float  # virtual seconds per second
    story: tuple[str, ...]  # what happened, one line each, oldest first
    error: str = ""  # raised by a peer's code; empty if none


def describe_fault(name: str, arguments: Sequence[object]) -> str:
    """Return a fault in words, such as ``carol crashes``."""
    if name == "partition":
        parts = (", ".join(sorted(group)) for group in arguments if isinstance(group, set))
        return f"the network is partitioned: {' | '.join(parts)}"
    if name in FAULTS:
        return FAULTS[name].format(*arguments)
    return f"{name} {', '.join(map(str, arguments))}".strip()


def describe_event(name: str, event: Event) -> str:
    """Return an event of the peer ``name`` in words; empty for events that the story leaves out."""
    match event:
        case RoundFinished(step=step, group_size=members, samples=samples):
            seconds = event.averaging_s or event.seconds  # without forming the group
            words = f"step {step + 1}: {samples:.0f} samples of {count(members, 'peer')}, averaged in {seconds:.1f} s"
            missing = members - len(event.contributors)
            return f"{words}; {missing} of them missing" if missing > 0 else words
        case StateReceived(step=step, size_bytes=size_bytes, donors=donors):
            return (
                f"{name} got the state of step {step}, {size(size_bytes)} from {count(len(donors), 'peer')}"
            )
        case BatchDropped(reason=reason):
            return f"{name} drops a batch: {reason}"
        case Fault(where=where, text=text):
            return f"{name}: fault in {where}: {text}"
    return ""


# --- drawing ----------------------------------------------------------------------------------------------------------


def summary(snapshot: LessonSnapshot) -> str:
    """Return the run in one line."""
    return f"{snapshot.state} at {snapshot.simulation.at:.1f} s: {_peers(snapshot.simulation)}"


def draw_simulation(snapshot: SimulationSnapshot) -> Document:
    """Return the simulation: its peers and faults."""
    shown = Document(*_head(snapshot), label="simulated swarm")
    _draw_peers(shown, snapshot)
    shown.note(*_faults(snapshot, snapshot.fired), title="Faults")
    return shown


def draw_lesson(snapshot: LessonSnapshot) -> Document:
    """Return the run: its time, the peers and the story."""
    simulation = snapshot.simulation
    shown = Document(*_head(simulation), label="run of a simulated swarm", line=summary(snapshot))
    shown.figures(
        {
            "virtual time": f"{simulation.at:,.0f} s",
            "run": f"{snapshot.speed:g} s a second" if snapshot.state == "playing" else snapshot.state,
        }
    )
    shown.warn(f"A peer's code raised {snapshot.error}" if snapshot.error else "")
    _draw_peers(shown, simulation)
    shown.note(*_faults(simulation, snapshot.story), title="What happened")
    return shown


def _draw_peers(shown: Document, snapshot: SimulationSnapshot) -> None:
    cells = partial(_cells, target_batch_size=snapshot.target_batch_size)
    shown.table(COLUMNS, snapshot.peers, cells, numbers=(2, 3, 4, 5), what="peers")


def _cells(peer: SimulatedPeer, target_batch_size: float) -> tuple[Cell, ...]:
    loss = "" if peer.loss is None or not math.isfinite(peer.loss) else f"{peer.loss:.3f}"
    state, (hue, symbol) = plain(peer.state, 40), SYMBOLS.get(peer.state, ("soft", "•"))
    samples = drawn = f"{peer.samples:,.0f}"
    if target_batch_size > 0 and peer.samples > 0:
        label = f"{samples} of the {target_batch_size:,.0f} samples of a step"
        drawn += theme.bar(peer.samples / target_batch_size, label)
    mark = theme.mark(hue, symbol, text(state))
    speed = f"{peer.samples_per_s:,.1f}"
    return plain(peer.name, 40), (state, mark), str(peer.step), (samples, drawn), speed, loss


def _head(snapshot: SimulationSnapshot) -> tuple[str, str]:
    return _peers(snapshot), f"after {snapshot.at:.1f} s on {snapshot.network}"


def _faults(snapshot: SimulationSnapshot, past: Sequence[str]) -> list[str]:
    return [*past[-MAX_LINES:], *(f"to come: {line}" for line in snapshot.coming[:MAX_LINES])]


def _peers(snapshot: SimulationSnapshot) -> str:
    alive = [peer for peer in snapshot.peers if peer.state not in ("crashed", "left")]
    step = max((peer.step for peer in alive), default=0)
    return f"{count(len(alive), 'peer')} at step {step}"


def _draw_seen(draw: Callable[..., Document], snapshot: LessonSnapshot, *chosen: int) -> Document:
    seen = snapshot.simulation.seen
    if seen is not None:
        return draw(seen, *chosen)
    shown = Document("", label="empty")
    shown.note("No peer is online.")
    return shown


LESSON: Views[LessonSnapshot] = Views(
    draw_lesson,
    summary,
    lambda snapshot: snapshot.state in OVER,
    who="run",
    leave=("End run", "Ended"),
    first="peers",
    pages={
        "rounds": Page(partial(_draw_seen, rounds.draw), slider=("rounds back", rounds.RECENT - 1)),
        "map": Page(partial(_draw_seen, swarm_map.draw)),
    },
    paused=lambda snapshot: snapshot.state == "paused",
)
