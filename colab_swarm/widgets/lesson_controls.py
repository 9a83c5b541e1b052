"""Sliders and buttons of a lesson. They only ask: the lesson does it, between two slices of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from colab_swarm.widgets import buttons
from colab_swarm.widgets.lesson import MAX_PEERS, OVER, LessonSnapshot, SimulatedPeer

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
        """Ask for something, see `Wish`."""

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
        self._kill = buttons.make(
            "Kill this peer", "bolt", "Kill this peer: its process ends without a word", self._of_one("crash")
        )
        self._back = buttons.make(
            "Bring it back", "undo", "Bring it back: as a new process of the same name", self._of_one("join")
        )
        playback = self._slider("playback", PLAYBACK, self._lesson.speed, self._play_at, "× {:g}")
        step = buttons.make(
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
        buttons.say(self._kill, disabled=not alive)
        buttons.say(self._back, disabled=alive)

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
