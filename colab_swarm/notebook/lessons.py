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
from colab_swarm.markup import aligned, count, plain, size, text
from colab_swarm.notebook import rounds, swarm_map, theme
from colab_swarm.notebook.panel import Page, Views
from colab_swarm.snapshot import SwarmSnapshot

MAX_PEERS = 32
MAX_LINES = 12
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
        name: as faults use it.
        state: ``training``, ``catching up``, ``joined``, ``finished``, ``joining``, ``crashed`` or ``left``.
        step: global step of its parameters.
        samples: accumulated towards the next step.
        samples_per_s: training speed.
        loss: at its last step; None before the first.
    """

    name: str
    state: str
    step: int
    samples: float
    samples_per_s: float
    loss: float | None


@dataclass(frozen=True)
class SimulationSnapshot:
    """A simulated swarm at one moment.

    Attributes:
        at: virtual seconds since it started.
        network: name and description.
        peers: in the order in which they joined.
        target_batch_size: samples of a global step; 0 while no peer trains.
        fired, coming: past and future faults, in words, with their times; oldest first.
        seen: the swarm as one of the peers sees it; None without peers.
    """

    at: float
    network: str
    peers: tuple[SimulatedPeer, ...]
    target_batch_size: float
    fired: tuple[str, ...]
    coming: tuple[str, ...]
    seen: SwarmSnapshot | None


@dataclass(frozen=True)
class LessonSnapshot:
    """An interactive run at one moment.

    Attributes:
        simulation: its swarm.
        state: ``playing``, ``paused``, ``finished``, ``stopped`` or ``failed``.
        speed: virtual seconds per second.
        story: what happened, one line each, oldest first.
        error: raised by a peer's code; empty if none.
    """

    simulation: SimulationSnapshot
    state: str
    speed: float
    story: tuple[str, ...]
    error: str = ""


def describe_fault(name: str, arguments: Sequence[object]) -> str:
    """Return a fault in words, such as ``carol crashes``."""
    match name, *arguments:
        case ("crash", who):
            return f"{who} crashes"
        case ("restart", who):
            return f"{who} can be dialled again"
        case ("partition", *groups):
            parts = (", ".join(sorted(group)) for group in groups if isinstance(group, set))
            return f"the network is partitioned: {' | '.join(parts)}"
        case ("heal",):
            return "the network is whole again"
        case ("slow", who, float() | int() as factor):
            return f"{who}'s connection becomes {factor:g} times slower than at first"
        case ("skew", who, float() | int() as seconds):
            return f"{who}'s clock is {seconds:g} s ahead"
        case ("lose", float() | int() as rate):
            return f"{rate:.1%} of all messages are lost once"
        case ("latency", float() | int() as factor):
            return f"latency becomes {factor:g} times that at first"
        case ("bandwidth", float() | int() as factor):
            return f"bandwidth becomes {factor:g} times that at first"
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


def simulation_text(snapshot: SimulationSnapshot) -> str:
    """Draw the simulation as aligned lines."""
    head = f"{_peers(snapshot)} after {snapshot.at:.1f} s on {snapshot.network}"
    rows = [COLUMNS, *map(_cells, snapshot.peers[:MAX_PEERS])]
    return "\n".join([head, *aligned(rows), *(f"  {line}" for line in _faults(snapshot, snapshot.fired))])


def simulation_html(snapshot: SimulationSnapshot) -> str:
    """Draw the simulation as one ``div``."""
    return theme.wrap(
        _table(snapshot) + _lines("Faults", _faults(snapshot, snapshot.fired)), "simulated swarm"
    )


def lesson_text(snapshot: LessonSnapshot) -> str:
    """Draw the run as lines: peers, faults and an error."""
    error = [f"A peer's code raised {plain(snapshot.error, 500)}"] if snapshot.error else []
    return "\n".join([summary(snapshot), simulation_text(snapshot.simulation), *error])


def lesson_html(snapshot: LessonSnapshot) -> str:
    """Draw the run as one ``div``: its time, the peers and the story."""
    error = f'<p class="warn">A peer\'s code raised {text(snapshot.error, 500)}</p>' if snapshot.error else ""
    figures = {
        "virtual time": f"{snapshot.simulation.at:,.0f} s",
        "run": f"{snapshot.speed:g} s a second" if snapshot.state == "playing" else snapshot.state,
    }
    story = _lines("What happened", _faults(snapshot.simulation, snapshot.story))
    return theme.wrap(
        theme.cards(figures) + error + _table(snapshot.simulation) + story, "run of a simulated swarm"
    )


def _table(snapshot: SimulationSnapshot) -> str:
    rows = []
    for peer in snapshot.peers[:MAX_PEERS]:
        name, state, step, samples, *rest = map(text, _cells(peer))
        if snapshot.target_batch_size > 0 and peer.samples > 0:
            label = f"{samples} of the {snapshot.target_batch_size:,.0f} samples of a step"
            samples += theme.bar(peer.samples / snapshot.target_batch_size, label)
        hue, symbol = SYMBOLS.get(peer.state, ("soft", "•"))
        rows.append((name, theme.mark(hue, symbol, state), step, samples, *rest))
    head = theme.heading(_peers(snapshot), f"after {snapshot.at:.1f} s on {text(snapshot.network)}")
    return head + theme.table(COLUMNS, rows, numbers=(2, 3, 4, 5), label="peers")


def _lines(title: str, lines: Sequence[str]) -> str:
    return f"<h4>{title}</h4><p>{'<br>'.join(map(text, lines))}</p>" if lines else ""


def _cells(peer: SimulatedPeer) -> tuple[str, ...]:
    loss = "" if peer.loss is None or not math.isfinite(peer.loss) else f"{peer.loss:.3f}"
    speeds = (f"{peer.samples:,.0f}", f"{peer.samples_per_s:,.1f}")
    return (plain(peer.name, 40), plain(peer.state, 40), str(peer.step), *speeds, loss)


def _faults(snapshot: SimulationSnapshot, past: Sequence[str]) -> list[str]:
    return [*past[-MAX_LINES:], *(f"to come: {line}" for line in snapshot.coming[:MAX_LINES])]


def _peers(snapshot: SimulationSnapshot) -> str:
    alive = [peer for peer in snapshot.peers if peer.state not in ("crashed", "left")]
    step = max((peer.step for peer in alive), default=0)
    return f"{count(len(alive), 'peer')} at step {step}"


def _seen_page(
    draw: Callable[..., str], empty: Callable[[str], str], snapshot: LessonSnapshot, *chosen: int
) -> str:
    """Draw the swarm as one of the peers sees it."""
    seen = snapshot.simulation.seen
    return empty("No peer is online.") if seen is None else draw(seen, *chosen)


LESSON: Views[LessonSnapshot] = Views(
    lesson_html,
    lesson_text,
    summary,
    lambda snapshot: snapshot.state in OVER,
    who="run",
    leave=("End run", "Ended"),
    first="peers",
    pages={
        "rounds": Page(
            partial(_seen_page, rounds.render_html, partial(theme.wrap, label="empty")),
            partial(_seen_page, rounds.render_text, str),
            slider=("rounds back", rounds.RECENT - 1),
        ),
        "map": Page(
            partial(_seen_page, swarm_map.render_html, partial(theme.wrap, label="empty")),
            partial(_seen_page, swarm_map.render_text, str),
        ),
    },
    paused=lambda snapshot: snapshot.state == "paused",
)
