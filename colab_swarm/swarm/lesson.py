"""`Simulation.play`: a simulated swarm that runs in the background while you watch it and interfere.

    lesson = cs.simulate(4).play(train)              # shown under the cell, with sliders and a kill button
    lesson.inject("crash", "bob")                    # the same from code
    lesson.wait()

Time passes in slices of `SLICE_S` virtual seconds. Actions take effect between two slices and are recorded with their
virtual time. So ``simulation.play(train, actions=lesson.actions)``, on a simulation of the same seed, repeats the run,
whatever its speed and pauses were. The run's own thread advances the time; the user's thread injects and looks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from colab_swarm.errors import JoinError
from colab_swarm.events import Event, RoundFinished
from colab_swarm.notebook import lessons
from colab_swarm.notebook.panel import WRAPPING, Panel, make_button, update_button
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.runtime import POLL_S

if TYPE_CHECKING:
    from colab_swarm.swarm.simulation import Simulation
    from colab_swarm.swarm.swarm import Swarm

SLICE_S = 0.5  # virtual time between two looks at the injected actions
STEP_S = 1.0  # virtual time that the step button advances
MIN_SPEED = 0.01  # virtual seconds per second, even if `InteractiveRun.speed` is lower
LOOK_S = 0.25  # real time between two snapshots
MAX_LINES = 1000  # lines of the story; the oldest are dropped
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)
SPEEDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # slider values of slower connections and of the playback
LOSSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
SLIDER_PEERS = 16
SLIDER = {
    "style": {"description_width": "initial"},
    "layout": {"width": "310px"},
    "continuous_update": False,
}


class InteractiveRun:
    """A running simulation. One runs at a time: a new one stops the former. Make it by `Simulation.play`.

    Attributes:
        speed: virtual seconds per second, above 0; change it at any time.
        actions: those that took effect, with their times; ``simulation.play(train, actions=…)`` repeats them.

    Raises:
        ValueError: ``speed`` or ``seconds`` is not above 0.
    """

    _running: ClassVar[InteractiveRun | None] = None

    def __init__(
        self,
        simulation: Simulation,
        train: Callable[[Swarm], object],
        *,
        seconds: float | None = None,
        speed: float = 10.0,
        actions: Sequence[lessons.Action] = (),
        live: bool | None = None,
    ) -> None:
        if not speed > 0 or not (seconds is None or seconds > 0):
            raise ValueError(f"speed={speed}, seconds={seconds}: both must be above 0")
        if InteractiveRun._running is not None:
            InteractiveRun._running.stop()
        self._simulation, self.speed = simulation, speed
        self._until = math.inf if seconds is None else simulation.time + seconds
        self._scripted = deque(sorted(actions, key=lambda action: action.at))
        self._injected: deque[lessons.Action] = deque()
        self.actions: tuple[lessons.Action, ...] = ()
        self._events: list[tuple[Event, str]] = []
        self._known: dict[str, Swarm] = {}
        self._finished: set[str] = set()
        self._rounds: set[int] = set()  # those in the story
        self._faults = len(simulation.network.fired)
        self._story: deque[str] = deque(maxlen=MAX_LINES)
        self._deserted = False  # no peer is left, so no time passes until one joins
        self._state, self._single_steps, self._stopping = "playing", 0, False
        self._error: BaseException | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._live = has_frontend() if live is None else live
        simulation.begin(train)
        self._listen(late=False)
        self._look()
        self._panel = self._make_panel() if self._live else None
        InteractiveRun._running = self
        if self._live:
            threading.Thread(target=self._run, name="colab-swarm-lesson", daemon=True).start()
        else:
            self._run()

    def _make_panel(self) -> Panel[lessons.LessonSnapshot]:
        controls = LessonControls(self, loss=self._simulation.network.loss)
        peers = self._seen[0].peers
        return Panel(
            lambda: controls.update(self.snapshot()),
            self.stop,
            views=lessons.LESSON,
            pause=lambda paused: self.pause() if paused else self.resume(),
            controls=lambda: controls.make(peers),
            live=True,
        )

    # --- for the user ---------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._over.is_set()

    def inject(self, verb: lessons.Verb, *arguments: str | float) -> None:
        """Change the simulation, such as ``inject("crash", "bob")``; see `Action`. Thread-safe."""
        self._injected.append(lessons.Action(self._simulation.time, verb, arguments))
        self._wake.set()

    def pause(self) -> None:
        """Stop the virtual time."""
        self._change("paused")

    def resume(self) -> None:
        """Continue after `pause`."""
        self._change("playing")

    def step(self) -> None:
        """While paused, advance `STEP_S` virtual seconds."""
        self._single_steps += round(STEP_S / SLICE_S)
        self._wake.set()

    def _change(self, state: str) -> None:
        if not self._over.is_set():
            self._state = state
            self._wake.set()

    def stop(self) -> None:
        """End the run; the peers keep their state. Idempotent."""
        self._stopping = True
        self._wake.set()
        while not self._over.wait(POLL_S):
            pass

    def wait(self) -> dict[str, object]:
        """Wait for the end and keep the view live; an interrupt ends only the waiting.

        Returns:
            The return value of ``train`` by name of peer, for those that finished.

        Raises:
            Exception: raised by a peer's ``train``.
        """
        self.resume()
        over = False
        while not over:
            over = self._over.wait(LOOK_S)
            if self._panel is not None:
                self._panel.refresh()
        if self._error is not None:
            raise self._error
        return dict(self._simulation.results)

    def snapshot(self) -> lessons.LessonSnapshot:
        """Return what the panel shows. Thread-safe."""
        simulation, story = self._seen
        error = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return lessons.LessonSnapshot(simulation, self._state, self.speed, story, error)

    def __repr__(self) -> str:
        return f"Lesson({lessons.summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return lessons.draw_lesson(self.snapshot()).html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self._panel is not None:
            return self._panel._repr_mimebundle_()
        return lessons.draw_lesson(self.snapshot()).bundle()

    # --- the passing of time --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._state = self._pass_slices()
        except Exception as error:  # a door: the user's own code; shown in the panel, raised by `wait`
            self._error, self._state = error, "failed"
            if not self._live:
                raise
        finally:
            try:
                self._simulation.end()
                self._look()
            finally:
                self._over.set()

    def _pass_slices(self) -> str:
        """Advance slice by slice, at the chosen speed if live; return the final state."""
        while not self._stopping:
            began = time.monotonic()
            self._apply_due()
            if self._is_idle() and not self._live:
                return "finished"
            if self._is_idle() or (self._state == "paused" and not self._single_steps):
                self._look()
                self._wake.wait()
                self._wake.clear()
                continue
            self._single_steps = max(0, self._single_steps - 1)
            if self._pass_slice():
                return "finished"
            if began - self._looked_at > LOOK_S:
                self._look()
            if self._live:
                rest_s = SLICE_S / max(self.speed, MIN_SPEED) - (time.monotonic() - began)
                self._wake.wait(max(0.0, rest_s))
                self._wake.clear()
        return "stopped"

    def _is_idle(self) -> bool:
        return self._deserted and not self._injected and not self._scripted

    def _look(self) -> None:
        """Take a snapshot; only while no time passes."""
        self._looked_at = time.monotonic()
        self._seen = self._simulation.snapshot(), tuple(self._story)

    def _pass_slice(self) -> bool:
        """Apply due actions and advance one slice; return True at the end of the run."""
        simulation = self._simulation
        self._apply_due()
        try:
            idle = simulation.advance(min(SLICE_S, self._until - simulation.time))
        except JoinError as error:
            idle = False
            self._write(simulation.time, f"a late joiner could not join: {error}")
        self._listen()
        self._write_events()
        self._deserted = idle and not simulation.swarms
        timed_out = simulation.time > self._until - 1e-6
        return timed_out or (idle and not self._scripted and not self._deserted)

    # --- actions --------------------------------------------------------------------------------------------------

    def _apply_due(self) -> None:
        """Apply due actions. If no peer is left, time stands still, and the next scripted action is due."""
        while self._scripted and (self._deserted or self._scripted[0].at < self._simulation.time + 1e-6):
            self._apply(self._scripted.popleft())
        while self._injected:
            self._apply(self._injected.popleft())

    def _apply(self, action: lessons.Action) -> None:
        now, self._deserted = self._simulation.time, False
        try:
            self._do(action.verb, *action.arguments)
        except (ValueError, KeyError, TypeError) as error:
            shown = f"{action.verb} {' '.join(map(str, action.arguments))}"
            self._write(now, f"{shown}: not possible, {error}")
        else:
            self.actions += (replace(action, at=now),)

    def _do(self, verb: lessons.Verb, *arguments: Any) -> None:
        simulation = self._simulation
        match verb, *arguments:
            case "peers", int(wanted) if 0 < wanted <= lessons.MAX_PEERS:
                simulation.resize(wanted)
            case "join", str(name):
                simulation.join(name, at=simulation.time)
            case "speed", str(name), float() | int() as samples_per_s if 0 < samples_per_s < math.inf:
                simulation.change_speed(name, samples_per_s)
                self._write(simulation.time, f"{name} now trains {samples_per_s:g} samples/s")
            case (("crash" | "slow"), str(name), *_) if name not in simulation.swarms:
                raise ValueError(f"{name} is not online")
            case "crash", str(name):
                simulation.fire(verb, name)
            case "slow", str(name), float() | int() as factor if 0 < factor < math.inf:
                simulation.fire(verb, name, factor)
            case (("latency" | "bandwidth"), float() | int() as factor) if 0 < factor < math.inf:
                simulation.fire(verb, factor)
            case "lose", float() | int() as rate if 0 <= rate < 1:
                simulation.fire(verb, rate)
            case _:
                raise ValueError("no such action")

    # --- the story ------------------------------------------------------------------------------------------------

    def _listen(self, *, late: bool = True) -> None:
        for name, swarm in self._simulation.swarms.items():
            if self._known.get(name) is not swarm:
                self._known[name] = swarm
                swarm.events.listen(partial(self._on_event, name))
                if late:
                    self._write(self._simulation.time, f"{name} has joined")

    def _on_event(self, name: str, event: Event) -> None:
        self._events.append((event, name))

    def _write_events(self) -> None:
        simulation = self._simulation
        fired, self._faults = simulation.network.fired[self._faults :], len(simulation.network.fired)
        happened = [(fault.at, lessons.describe_fault(fault.name, fault.arguments)) for fault in fired]
        events, self._events = self._events, []
        for event, name in sorted(events, key=lambda one: (one[0].at, one[1])):
            if isinstance(event, RoundFinished):
                if event.step in self._rounds:  # another peer has reported it
                    continue
                self._rounds.add(event.step)
            happened.append((event.at, lessons.describe_event(name, event)))
        for at, words in sorted(happened, key=lambda one: one[0]):
            if words:
                self._write(at, words)
        for name in [name for name in simulation.results if name not in self._finished]:
            self._finished.add(name)
            self._write(simulation.time, f"{name} has finished")

    def _write(self, at: float, words: str) -> None:
        line = f"{at:6.1f} s  {words}"
        self._story.append(line)
        if not self._live:
            print(line, flush=True)


class LessonControls:
    """Sliders and buttons of a run; `update` shows its present state in them.

    Args:
        lesson: the run.
        loss: share of lost messages at first.
    """

    def __init__(self, lesson: InteractiveRun, *, loss: float) -> None:
        self._lesson, self._loss = lesson, loss
        self._updating = False
        self._rows: list[Any] = []
        self._alive: set[str] = set()

    def make(self, peers: Sequence[lessons.SimulatedPeer]) -> list[Any]:
        """Return the widgets, in rows."""
        import ipywidgets

        self._new_slider, lesson = ipywidgets.SelectionSlider, self._lesson
        number = ipywidgets.IntSlider(len(peers), 1, SLIDER_PEERS, description="peers", **SLIDER)
        number.observe(partial(self._on_change, partial(lesson.inject, "peers")), names="value")
        network = [
            number,
            self._slider("latency", FACTORS, 1.0, partial(lesson.inject, "latency"), "× {:g}"),
            self._slider("bandwidth", FACTORS, 1.0, partial(lesson.inject, "bandwidth"), "× {:g}"),
            self._slider("lost messages", LOSSES, self._loss, partial(lesson.inject, "lose"), "{:.1%}"),
        ]
        # as wide as a slider, for a box that has no margin of its own at the right
        layout = {"width": "300px", "margin": "2px 12px 2px 2px"}
        self._who = ipywidgets.Dropdown(description="this peer:", style=SLIDER["style"], layout=layout)
        self._who.observe(lambda change: self._enable_buttons(), names="value")
        speeds = [round(peers[0].samples_per_s * factor, 3) for factor in FACTORS]
        kill = "Kill this peer: end its process without a farewell"
        back = "Bring it back: start a new process of the same name"
        self._kill = make_button("Kill this peer", "bolt", kill, partial(self._inject, "crash"))
        self._back = make_button("Bring it back", "undo", back, partial(self._inject, "join"))
        one = [
            self._who,
            self._slider("samples/s", speeds, speeds[4], partial(self._inject, "speed"), "{:g}"),
            self._slider("slower connection", SPEEDS, 1.0, partial(self._inject, "slow"), "× {:g}"),
            self._kill,
            self._back,
        ]
        step = "Step: while paused, advance one second of virtual time"
        playback = [
            self._slider("playback", SPEEDS, lesson.speed, partial(setattr, lesson, "speed"), "× {:g}"),
            make_button("Step 1 s", "step-forward", step, lesson.step),
        ]
        self._rows = [ipywidgets.HBox(row, layout=WRAPPING) for row in (network, one, playback)]
        self._offer(peers)
        return self._rows

    def update(self, snapshot: lessons.LessonSnapshot) -> lessons.LessonSnapshot:
        """Offer the present peers; disable everything after the end. Returns the snapshot."""
        if self._rows:
            self._updating = True
            self._offer(snapshot.simulation.peers)
            self._updating = False
            if snapshot.state in lessons.OVER:
                for widget in (child for row in self._rows for child in row.children):
                    widget.disabled = True
        return snapshot

    def _offer(self, peers: Sequence[lessons.SimulatedPeer]) -> None:
        names = tuple(peer.name for peer in peers)
        if self._who.options != names:
            chosen = self._who.value
            self._who.options = names
            self._who.value = chosen if chosen in names else names[0]
        self._alive = {peer.name for peer in peers if peer.state != "crashed"}
        self._enable_buttons()

    def _enable_buttons(self) -> None:
        alive = self._who.value in self._alive
        update_button(self._kill, disabled=not alive)
        update_button(self._back, disabled=alive)

    def _inject(self, verb: lessons.Verb, *arguments: float) -> None:
        self._lesson.inject(verb, self._who.value, *arguments)

    def _on_change(self, act: Callable[[Any], None], change: Any) -> None:
        if not self._updating:
            act(change["new"])

    def _slider(
        self, name: str, values: Sequence[float], value: float, act: Callable[[float], None], shown: str
    ) -> Any:
        options = [(shown.format(one), one) for one in sorted({*values, value})]
        slider = self._new_slider(options=options, value=value, description=name, **SLIDER)
        slider.observe(partial(self._on_change, act), names="value")
        return slider
