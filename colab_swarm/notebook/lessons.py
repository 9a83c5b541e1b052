"""A simulated swarm as people see it, and a lesson that plays it: records, HTML and text.

Everything that the controls of a lesson ask for is a `Action`, a record with a virtual time: same seed, same wishes,
same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from colab_swarm.events import BatchDropped, Event, Fault, RoundFinished, StateReceived
from colab_swarm.markup import count, plain, size, text
from colab_swarm.notebook import rounds, swarm_map, theme
from colab_swarm.notebook.panel import Page, Views, make_button, update_button
from colab_swarm.snapshot import SwarmSnapshot

MAX_PEERS = 32

MAX_LINES = 12

OVER = ("finished", "stopped", "failed")

"""States of a lesson after which nothing happens."""

Verb: TypeAlias = Literal["peers", "join", "crash", "speed", "slow", "latency", "bandwidth", "lose"]


@dataclass(frozen=True)
class Action:
    """What somebody asks a simulation for.

    Attributes:
        at: virtual seconds since the simulation began.
        verb: ``peers`` (how many), ``join``, ``crash`` (who), ``speed`` (who, samples per second), ``slow`` (who, how
            many times slower a line), ``latency``, ``bandwidth`` (times the network's own), ``lose`` (share).
        arguments: of the verb.
    """

    at: float
    verb: Verb
    arguments: tuple[str | float, ...]


@dataclass(frozen=True)
class SimulatedPeer:
    """One peer of a simulation.

    Attributes:
        name: what faults call it.
        state: ``training``, ``catching up``, ``joined``, ``finished``, ``joining``, ``crashed`` or ``left``.
        step: global step of its parameters.
        samples: that it holds towards the next step.
        samples_per_s: how fast it trains.
        loss: at its last step; None if it has told none.
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
        at: virtual seconds since it began.
        network: its name and what it is like, in words.
        peers: in the order in which they came.
        target_batch_size: samples that make a global step; 0 while nobody trains.
        fired, coming: faults, in words, with their times; the oldest first.
        seen: what one of the peers sees; None if nobody is there.
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
    """A lesson at one moment.

    Attributes:
        simulation: what is shown.
        state: ``playing``, ``paused``, ``finished``, ``stopped`` or ``failed``.
        speed: virtual seconds per second.
        story: what happened, as lines, the oldest first.
        error: what a peer's code raised; empty if nothing.
    """

    simulation: SimulationSnapshot
    state: str
    speed: float
    story: tuple[str, ...]
    error: str = ""


def fault_words(name: str, arguments: Sequence[object]) -> str:
    """A fault as people say it: ``carol crashes``."""
    match name, *arguments:
        case ("crash", who):
            return f"{who} crashes"
        case ("restart", who):
            return f"{who} can be dialled again"
        case ("partition", *groups):
            return "the network falls apart: " + " | ".join(
                ", ".join(sorted(group)) for group in groups if isinstance(group, set)
            )
        case ("heal",):
            return "the network is whole again"
        case ("slow", who, float() | int() as factor):
            return f"{who}'s line gets {factor:g} times slower than it was at first"
        case ("skew", who, float() | int() as seconds):
            return f"{who}'s clock is {seconds:g} s ahead"
        case ("lose", float() | int() as rate):
            return f"{rate:.1%} of all messages are lost once"
        case ("latency", float() | int() as factor):
            return f"messages travel {factor:g} times as long as at first"
        case ("bandwidth", float() | int() as factor):
            return f"lines carry {factor:g} times as much as at first"
    return f"{name} {', '.join(map(str, arguments))}".strip()


def event_words(name: str, event: Event) -> str:
    """What the peer ``name`` tells of an event; empty if it is not worth a line."""
    match event:
        case RoundFinished(step=step, group_size=members, samples=samples):
            seconds = event.averaging_s or event.seconds  # without the waiting for the group
            text = f"step {step + 1}: {samples:.0f} samples of {count(members, 'peer')}, averaged in {seconds:.1f} s"
            missing = members - len(event.contributors)
            return f"{text}; {missing} of them missing" if missing > 0 else text
        case StateReceived(step=step, size_bytes=size_bytes, donors=donors):
            return (
                f"{name} got the state of step {step}, {size(size_bytes)} from {count(len(donors), 'peer')}"
            )
        case BatchDropped(reason=reason):
            return f"{name} drops a batch: {reason}"
        case Fault(where=where, text=text):
            return f"{name}: fault in {where}: {text}"
    return ""


# --- a simulation -----------------------------------------------------------------------------------------------------


def summary(snapshot: LessonSnapshot) -> str:
    """The lesson in one line."""
    return f"{snapshot.state} at {_at(snapshot)}: {_peers(snapshot.simulation)}"


def simulation_text(snapshot: SimulationSnapshot) -> str:
    """The simulation as aligned lines."""
    rows = [COLUMNS, *(_cells(peer) for peer in snapshot.peers[:MAX_PEERS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    faults = [f"  {line}" for line in (*snapshot.fired[-MAX_LINES:], *_coming(snapshot))]
    head = f"{_peers(snapshot)} after {snapshot.at:.1f} s on {snapshot.network}"
    return "\n".join([head, *(f"  {line.rstrip()}" for line in table), *faults])


def simulation_html(snapshot: SimulationSnapshot) -> str:
    """The simulation as a view."""
    faults = [*snapshot.fired[-MAX_LINES:], *_coming(snapshot)]
    return theme.wrap(_simulation(snapshot) + _lines("Faults", faults), "simulated swarm")


COLUMNS = ("peer", "state", "step", "samples", "samples/s", "loss")

SYMBOLS = {
    "training": ("green", "▶"),
    "finished": ("blue", "✓"),
    "catching up": ("amber", "↻"),
    "joining": ("amber", "…"),
    "crashed": ("red", "✗"),
    "left": ("soft", "○"),
}


def _simulation(snapshot: SimulationSnapshot) -> str:
    rows = [_row(peer, snapshot.target_batch_size) for peer in snapshot.peers[:MAX_PEERS]]
    return theme.heading(
        _peers(snapshot), f"after {snapshot.at:.1f} s on {text(snapshot.network)}"
    ) + theme.table(COLUMNS, rows, numbers=(2, 3, 4, 5), label="peers")


def _lines(title: str, lines: Sequence[str]) -> str:
    return f"<h4>{title}</h4><p>{'<br>'.join(map(text, lines))}</p>" if lines else ""


def _row(peer: SimulatedPeer, target: float) -> tuple[str, ...]:
    name, state, step, samples, *rest = _cells(peer)
    hue, symbol = SYMBOLS.get(peer.state, ("soft", "•"))
    if target > 0 and peer.samples > 0:
        samples += theme.bar(peer.samples / target, f"{samples} of the {target:,.0f} samples of a step")
    return (text(name), theme.mark(hue, symbol, text(state)), step, samples, *rest)


def _cells(peer: SimulatedPeer) -> tuple[str, ...]:
    loss = "" if peer.loss is None or not math.isfinite(peer.loss) else f"{peer.loss:.3f}"
    return (
        plain(peer.name, 40),
        plain(peer.state, 40),
        str(peer.step),
        f"{peer.samples:,.0f}",
        f"{peer.samples_per_s:,.1f}",
        loss,
    )


def _coming(snapshot: SimulationSnapshot) -> list[str]:
    return [f"to come: {line}" for line in snapshot.coming[:MAX_LINES]]


def _peers(snapshot: SimulationSnapshot) -> str:
    alive = [peer for peer in snapshot.peers if peer.state not in ("crashed", "left")]
    step = max((peer.step for peer in alive), default=0)
    return f"{count(len(alive), 'peer')} at step {step}"


def _at(snapshot: LessonSnapshot) -> str:
    return f"{snapshot.simulation.at:.1f} s"


# --- a lesson ---------------------------------------------------------------------------------------------------------


def lesson_text(snapshot: LessonSnapshot) -> str:
    """The lesson as lines: peers, faults, and what went wrong."""
    error = [f"A peer's code raised {plain(snapshot.error, 500)}"] if snapshot.error else []
    return "\n".join([summary(snapshot), simulation_text(snapshot.simulation), *error])


def lesson_html(snapshot: LessonSnapshot) -> str:
    """The lesson as a view: its time, the peers, the story."""
    told = (*snapshot.story[-MAX_LINES:], *_coming(snapshot.simulation))
    error = f'<p class="warn">A peer\'s code raised {text(snapshot.error, 500)}</p>' if snapshot.error else ""
    figures = {
        "virtual time": f"{snapshot.simulation.at:,.0f} s",
        "lesson": f"{snapshot.speed:g} s a second" if snapshot.state == "playing" else snapshot.state,
    }
    view = theme.cards(figures) + error + _simulation(snapshot.simulation) + _lines("What happened", told)
    return theme.wrap(view, "lesson: a simulated swarm")


def _seen_html(draw: Callable[..., str]) -> Callable[..., str]:
    """A page of what one of the peers sees."""

    def page(snapshot: LessonSnapshot, *chosen: int) -> str:
        seen = snapshot.simulation.seen
        return theme.wrap("<p>Nobody is there.</p>", "empty") if seen is None else draw(seen, *chosen)

    return page


def _seen_text(draw: Callable[..., str]) -> Callable[..., str]:
    def page(snapshot: LessonSnapshot, *chosen: int) -> str:
        seen = snapshot.simulation.seen
        return "Nobody is there." if seen is None else draw(seen, *chosen)

    return page


LESSON: Views[LessonSnapshot] = Views(
    lesson_html,
    lesson_text,
    summary,
    lambda snapshot: snapshot.state in OVER,
    who="lesson",
    leave=("End", "Ended"),
    first="peers",
    pages={
        "rounds": Page(
            _seen_html(rounds.render_html),
            _seen_text(rounds.render_text),
            slider=("rounds back", rounds.RECENT - 1),
        ),
        "map": Page(_seen_html(swarm_map.render_html), _seen_text(swarm_map.render_text)),
    },
    paused=lambda snapshot: snapshot.state == "paused",
)

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)

"""Of latency and bandwidth."""

SLOWNESS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

LOSSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)

PLAYBACK = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

SLIDER_PEERS = min(16, MAX_PEERS)

DESCRIBED = {"description_width": "initial"}

WIDE = {"width": "310px"}

BESIDE = {"width": "300px", "margin": "2px 12px 2px 2px"}

"""As wide in all, for a box that has no margin of its own at the right."""


class Playable(Protocol):
    """What the controls want of a lesson; all of it returns at once."""

    speed: float

    def wish(self, verb: Any, *arguments: str | float) -> None:
        """Ask for something, see `Action`."""

    def step(self) -> None:
        """Let a moment pass while time stands still."""


class LessonControls:
    """Made where there is a front-end; `settle` brings them level with what is the case.

    Args:
        lesson: whom to ask.
        loss: share of messages that are lost at first.
    """

    def __init__(self, lesson: Playable, *, loss: float) -> None:
        self._lesson, self._loss = lesson, loss
        self._settling = False
        self._rows: list[Any] = []

    def make(self, peers: Sequence[SimulatedPeer]) -> list[Any]:
        """The widgets, in rows."""
        import ipywidgets

        wish = self._lesson.wish
        self._count = ipywidgets.IntSlider(
            len(peers),
            1,
            SLIDER_PEERS,
            description="peers",
            continuous_update=False,
            style=DESCRIBED,
            layout=WIDE,
        )
        self._count.observe(self._change(lambda count: wish("peers", count)), names="value")
        losses = sorted({*LOSSES, self._loss})
        network = [
            self._count,
            self._slider("latency", FACTORS, 1.0, lambda factor: wish("latency", factor), "× {:g}"),
            self._slider("bandwidth", FACTORS, 1.0, lambda factor: wish("bandwidth", factor), "× {:g}"),
            self._slider("lost messages", losses, self._loss, lambda rate: wish("lose", rate), "{:.1%}"),
        ]
        self._who = ipywidgets.Dropdown(description="this peer:", style=DESCRIBED, layout=BESIDE)
        speeds = [round(peers[0].samples_per_s * factor, 3) for factor in FACTORS]
        one = [
            self._who,
            self._slider("samples/s", speeds, speeds[4], self._of_one("speed"), "{:g}"),
            self._slider("line slower", SLOWNESS, 1.0, self._of_one("slow"), "× {:g}"),
        ]
        self._kill = make_button(
            "Kill this peer", "bolt", "Kill this peer: its process ends without a word", self._of_one("crash")
        )
        self._back = make_button(
            "Bring it back", "undo", "Bring it back: as a new process of the same name", self._of_one("join")
        )
        playback = self._slider("playback", PLAYBACK, self._lesson.speed, self._play_at, "× {:g}")
        step = make_button(
            "Step", "step-forward", "Step: while paused, let a second of virtual time pass", self._lesson.step
        )
        wrapping = {"flex_flow": "row wrap"}
        self._rows = [
            ipywidgets.HBox(row, layout=wrapping)
            for row in (network, [*one, self._kill, self._back], [playback, step])
        ]
        self._who.observe(lambda change: self._light(), names="value")
        self._alive: set[str] = set()
        self._offer(peers)
        return self._rows

    def settle(self, snapshot: LessonSnapshot) -> LessonSnapshot:
        """Offer the peers that there are; nothing can be asked for when it is over."""
        if self._rows:
            self._settling = True
            self._offer(snapshot.simulation.peers)
            self._settling = False
            over = snapshot.state in OVER
            for widget in (child for row in self._rows for child in row.children if over):
                widget.disabled = True
        return snapshot

    def _offer(self, peers: Sequence[SimulatedPeer]) -> None:
        names = tuple(peer.name for peer in peers)
        if self._who.options != names:
            chosen = self._who.value
            self._who.options = names
            self._who.value = chosen if chosen in names else names[0]
        self._alive = {peer.name for peer in peers if peer.state != "crashed"}
        self._light()

    def _light(self) -> None:
        alive = self._who.value in self._alive
        update_button(self._kill, disabled=not alive)
        update_button(self._back, disabled=alive)

    def _of_one(self, verb: str) -> Callable[..., None]:
        return lambda *arguments: self._lesson.wish(verb, self._who.value, *arguments)

    def _play_at(self, speed: float) -> None:
        self._lesson.speed = speed

    def _change(self, wanted: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda change: None if self._settling else wanted(change["new"])

    def _slider(
        self, name: str, values: Sequence[float], value: float, wanted: Callable[[float], None], shown: str
    ) -> Any:
        import ipywidgets

        options = [(shown.format(one), one) for one in sorted({*values, value})]
        slider = ipywidgets.SelectionSlider(
            options=options,
            value=value,
            description=name,
            continuous_update=False,
            style=DESCRIBED,
            layout=WIDE,
        )
        slider.observe(self._change(wanted), names="value")
        return slider
