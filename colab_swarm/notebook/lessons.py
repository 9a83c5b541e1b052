"""The display of a simulated swarm and its interactive run: frozen records, their views and the controls."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from colab_swarm.markup import count, plain
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import WRAPPING, Views, make_button, update_button
from colab_swarm.snapshot import PeerRow

_MAX_LINES = 6
_FAULTS = {
    "crash": "{} crashes",
    "restart": "{} restarts",
    "freeze": "{} freezes for {:.0f} s",
    "cut": "{} is cut off for {:.0f} s",
    "slow": "{}'s connection becomes {:g} times slower than at first",
    "lose": "{:.1%} of all messages are lost once",
    "latency": "latency becomes {:g} times that at first",
    "bandwidth": "bandwidth becomes {:g} times that at first",
}
OVER = ("finished", "stopped", "failed")  # final states of a run
COLUMNS = ("peer", "state", "step", "samples", "samples/s", "loss")
_SYMBOLS = {
    "training": ("green", "▶"),
    "finished": ("blue", "✓"),
    "catching up": ("amber", "↻"),
    "joining": ("amber", "…"),
    "crashed": ("red", "✗"),
    "left": ("soft", "○"),
}
# the sliders' values, for slower connections and for the speed of the playback
SPEEDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_NAMED = {"description_width": "initial"}
Verb: TypeAlias = Literal["join", "crash", "speed", "slow", "latency", "bandwidth", "lose"]


@dataclass(frozen=True)
class SimulationSnapshot:
    at: float  # virtual seconds since it started
    network: str  # name and description
    peers: tuple[
        PeerRow, ...
    ]  # in the order in which they joined; here a row's role is the peer's simulated state
    story: tuple[str, ...]  # the log: one line for each event, oldest first
    coming: tuple[str, ...]  # scripted faults that have not happened yet, in words with their times
    state: str = "idle"  # of the run: ``playing``, ``paused``, ``finished``, ``stopped`` or ``failed``
    speed: float = 0.0  # virtual seconds per second
    error: str = ""  # raised by a peer's code; empty if none

    @property
    def over(self) -> bool:
        """True after the run has ended."""
        return self.state in OVER

    @property
    def paused(self) -> bool:
        return self.state == "paused"


def describe_fault(name: str, arguments: Sequence[object]) -> str:
    if name == "partition":
        groups = [", ".join(sorted(group)) for group in arguments if isinstance(group, set)]
        return f"the network is partitioned: {' | '.join(groups)}"
    if name in _FAULTS:
        return _FAULTS[name].format(*arguments)
    return f"{name} {', '.join(map(str, arguments))}".strip()


def draw(snapshot: SimulationSnapshot) -> theme.Document:
    alive = [peer for peer in snapshot.peers if peer.role not in ("crashed", "left")]
    step = max((peer.step for peer in alive), default=0)
    title = f"{count(len(alive), 'peer')} at step {step}"
    state = f"{snapshot.state} after {snapshot.at:.1f} s on {snapshot.network}"
    document = theme.Document(title, state, label="simulated swarm")
    run = snapshot.state
    if run == "playing":
        run = f"{snapshot.speed:g}× real time"
    document.figures({"virtual time": f"{snapshot.at:,.0f} s", "run": run})
    if snapshot.error:
        document.warn(f"A peer's code raised {snapshot.error}")
    document.table(COLUMNS, snapshot.peers, _cells, numbers=(2, 3, 4, 5), what="peers")
    coming = [f"to come: {line}" for line in snapshot.coming[:_MAX_LINES]]
    document.note(*snapshot.story[-_MAX_LINES:], *coming, title="What happened")
    return document


def _cells(peer: PeerRow) -> tuple[theme.Cell, ...]:
    hue, symbol = _SYMBOLS.get(peer.role, ("soft", "•"))
    loss = ""
    if peer.loss is not None and math.isfinite(peer.loss):
        loss = f"{peer.loss:.3f}"
    return (
        plain(peer.name, 40),
        theme.mark(hue, symbol, plain(peer.role, 40)),
        str(peer.step),
        f"{peer.samples:,.0f}",
        f"{peer.samples_per_s:,.1f}",
        loss,
    )


LESSON: Views[SimulationSnapshot] = Views(draw, who="run", leave=("End run", "Ended"))


class LessonControls:
    """Sliders and buttons of a run, in ``rows``. They call ``inject`` with a verb and its arguments."""

    def __init__(
        self,
        snapshot: SimulationSnapshot,
        inject: Callable[..., None],
        step: Callable[[], None],
        choose_speed: Callable[[float], None],
    ) -> None:
        import ipywidgets

        self._new_slider = ipywidgets.SelectionSlider
        self._alive: set[str] = set()
        # as wide as a slider
        width = {"width": "300px", "margin": "2px 12px 2px 2px"}
        self._peer = ipywidgets.Dropdown(description="this peer:", style=_NAMED, layout=width)
        self._peer.observe(lambda change: self._enable_buttons(), names="value")

        def inject_at_peer(verb: Verb) -> Callable[..., None]:
            return lambda *arguments: inject(verb, self._peer.value, *arguments)

        own_speed = snapshot.peers[0].compute_samples_per_s
        speeds = [round(own_speed * 2**power, 3) for power in range(-4, 5)]
        speed = self._slider("samples/s", speeds, own_speed, "{:g}", inject_at_peer("speed"))
        slow = self._slider("slower connection", SPEEDS, 1.0, "× {:g}", inject_at_peer("slow"))
        tooltip = "Kill this peer: end its process without a farewell"
        self._kill = make_button("Kill this peer", "bolt", tooltip, inject_at_peer("crash"))
        tooltip = "Bring it back: start a new process of the same name"
        self._revive = make_button("Bring it back", "undo", tooltip, inject_at_peer("join"))
        playback = self._slider("playback", SPEEDS, snapshot.speed, "× {:g}", choose_speed)
        tooltip = "Step: while paused, advance one second of virtual time"
        step_button = make_button("Step 1 s", "step-forward", tooltip, step)
        tooltip = "Add a peer: start one with a new name"
        add_button = make_button("Add a peer", "plus", tooltip, partial(inject, "join"))
        peer_row = [self._peer, speed, slow, self._kill, self._revive]
        run_row = [playback, step_button, add_button]
        self.rows = [ipywidgets.HBox(row, layout=WRAPPING) for row in (peer_row, run_row)]
        self.update(snapshot)

    def update(self, snapshot: SimulationSnapshot) -> SimulationSnapshot:
        """Offer the present peers in the controls; after the end, disable all controls. Returns the snapshot."""
        names = tuple(peer.name for peer in snapshot.peers)
        if self._peer.options != names:
            chosen = self._peer.value
            self._peer.options = names
            self._peer.value = chosen if chosen in names else names[0]
        self._alive = {peer.name for peer in snapshot.peers if peer.role != "crashed"}
        self._enable_buttons()
        if snapshot.over:
            for row in self.rows:
                for widget in row.children:
                    widget.disabled = True
        return snapshot

    def _enable_buttons(self) -> None:
        alive = self._peer.value in self._alive
        update_button(self._kill, disabled=not alive)
        update_button(self._revive, disabled=alive)

    def _slider(
        self, name: str, values: Sequence[float], value: float, label: str, act: Callable[[float], None]
    ) -> Any:
        """Return a slider of ``values`` that starts at ``value``.

        ``label`` formats each value, and ``act`` is called with the chosen one.
        """
        steps = sorted({*values, value})
        slider = self._new_slider(
            options=[(label.format(step), step) for step in steps],
            value=value,
            description=name,
            style=_NAMED,
            layout={"width": "310px"},
            continuous_update=False,
        )
        slider.observe(lambda change: act(change["new"]), names="value")
        return slider
