"""`Simulation.play`: a simulated swarm that lives in the background while you look at it and interfere.

lesson = cs.simulate(4).play(train)              # shown under the cell, with sliders and a kill button
lesson.wish("crash", "bob")                      # the same from code
lesson.wait()

Time passes in slices of `SLICE_S` virtual seconds. What is asked for is done between two slices and recorded with its
virtual time, so that ``simulation.play(train, wishes=lesson.wishes)`` on a simulation of the same seed repeats the
run, whatever the speed and the pauses were. Threads: the lesson's own lets the time pass; the user's asks and looks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from colab_swarm.errors import JoinError
from colab_swarm.events import Event, RoundFinished
from colab_swarm.notebook.lessons import (
    LESSON,
    MAX_PEERS,
    Action,
    LessonControls,
    LessonSnapshot,
    Verb,
    event_words,
    fault_words,
    lesson_html,
    lesson_text,
    summary,
)
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.runtime import POLL_S

if TYPE_CHECKING:
    from colab_swarm.swarm.simulation import Simulation
    from colab_swarm.swarm.swarm import Swarm


SLICE_S = 0.5

"""Virtual time between two looks at what is asked for."""

MAX_LINES = 1000

"""Of the story; the oldest are forgotten."""


@dataclass(frozen=True)
class RunPlan:
    """How a lesson goes if nobody interferes.

    Attributes:
        seconds: virtual time after which it ends; None: when everyone has finished.
        speed: virtual seconds per second.
        wishes: what to ask for, and when.
    """

    seconds: float | None = None
    speed: float = 10.0
    wishes: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if not self.speed > 0 or not (self.seconds is None or self.seconds > 0):
            raise ValueError(f"speed={self.speed}, seconds={self.seconds}: both must be above 0")


class SteppedSimulation:
    """The lesson without its thread: lets slices of time pass, grants wishes, writes down the story.

    Attributes:
        wishes: those that were granted, with their times.
        story: what happened, as lines.
        deserted: nobody is left, so no time passes until somebody joins.
    """

    def __init__(self, simulation: Simulation, train: Callable[[Swarm], object], plan: RunPlan) -> None:
        self._simulation = simulation
        self._until = None if plan.seconds is None else simulation.time + plan.seconds
        self._scripted = deque(sorted(plan.wishes, key=lambda wish: wish.at))
        self._asked: deque[tuple[Verb, tuple[str | float, ...]]] = deque()
        self._events: list[tuple[Event, str]] = []
        self._met: dict[str, Swarm] = {}
        self._finished: set[str] = set()
        self._steps: set[int] = set()
        self._faults = len(simulation.network.fired)
        self.wishes: list[Action] = []
        self.story: deque[str] = deque(maxlen=MAX_LINES)
        self._news: list[str] = []
        self.deserted = False
        simulation.begin(train)
        self._listen(newcomers=False)

    def ask(self, verb: Verb, *arguments: str | float) -> None:
        """Wish for something; granted between two slices. Any thread may."""
        self._asked.append((verb, arguments))

    def pass_slice(self) -> bool:
        """Grant what was asked for and let a slice pass; returns whether everyone has finished, or the time is over.

        Raises:
            Exception: whatever a peer's ``train`` raised.
        """
        simulation = self._simulation
        self.grant()
        left = SLICE_S if self._until is None else min(SLICE_S, self._until - simulation.time)
        try:
            idle = simulation.advance(left)
        except JoinError as error:
            idle = False
            self._write(simulation.time, f"a newcomer could not join: {error}")
        self._listen()
        self._write_events()
        self.deserted = idle and not simulation.swarms
        timed_out = self._until is not None and simulation.time > self._until - 1e-6
        return timed_out or (idle and not self._scripted and not self.deserted)

    # --- wishes ---------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something is asked for that was not granted yet."""
        return bool(self._asked or self._scripted)

    def grant(self) -> None:
        """Grant what is due. If nobody is left, time stands still, and the script's next wish is due."""
        while self._scripted and (self.deserted or self._scripted[0].at < self._simulation.time + 1e-6):
            self.deserted = False
            wish = self._scripted.popleft()
            self._grant(wish.verb, wish.arguments)
        while self._asked:
            self.deserted = False
            self._grant(*self._asked.popleft())

    def _grant(self, verb: Verb, arguments: tuple[str | float, ...]) -> None:
        now = self._simulation.time
        try:
            self._do(verb, *arguments)
        except (ValueError, KeyError, TypeError) as error:
            self._write(now, f"{verb} {' '.join(map(str, arguments))}: not possible, {error}")
        else:
            self.wishes.append(Action(now, verb, arguments))

    def _do(self, verb: Verb, *arguments: Any) -> None:
        simulation = self._simulation
        match verb, *arguments:
            case "peers", int(wanted) if 0 < wanted <= MAX_PEERS:
                self._be(wanted)
            case "join", str(name):
                simulation.join(name, at=simulation.time)
            case "speed", str(name), float() | int() as samples_per_s if 0 < samples_per_s < math.inf:
                simulation.change_speed(name, samples_per_s)
                self._write(simulation.time, f"{name} trains {samples_per_s:g} samples/s from now on")
            case (("crash" | "slow"), str(name), *_) if name not in simulation.swarms:
                raise ValueError(f"{name} is not there")
            case "crash", str(name):
                simulation.fire(verb, name)
            case "slow", str(name), float() | int() as factor if 0 < factor < math.inf:
                simulation.fire(verb, name, factor)
            case (("latency" | "bandwidth"), float() | int() as factor) if 0 < factor < math.inf:
                simulation.fire(verb, factor)
            case "lose", float() | int() as rate if 0 <= rate < 1:
                simulation.fire(verb, rate)
            case _:
                raise ValueError("no such wish")

    def _be(self, wanted: int) -> None:
        """Let newcomers join, or the last ones kill, until so many are there."""
        from colab_swarm.swarm.simulation import nth_name

        simulation = self._simulation
        for name in [*simulation.swarms, *simulation.arriving][wanted:]:
            if name in simulation.swarms:
                simulation.fire("crash", name)
            else:
                simulation.call_off(name)
        for name in map(nth_name, range(wanted)):
            if name not in simulation.swarms and name not in simulation.arriving:
                simulation.join(name, at=simulation.time)

    # --- the story ------------------------------------------------------------------------------------------------

    def _listen(self, *, newcomers: bool = True) -> None:
        for name, swarm in self._simulation.swarms.items():
            if self._met.get(name) is swarm:
                continue
            self._met[name] = swarm
            swarm.events.listen(partial(self._hear, name))
            if newcomers:
                self._write(self._simulation.time, f"{name} has joined")

    def _hear(self, name: str, event: Event) -> None:
        self._events.append((event, name))

    def _write_events(self) -> None:
        simulation = self._simulation
        fired, self._faults = simulation.network.fired[self._faults :], len(simulation.network.fired)
        happened = [(fault.at, fault_words(fault.name, fault.arguments)) for fault in fired]
        events, self._events = self._events, []
        for event, name in sorted(events, key=lambda one: (one[0].at, one[1])):
            if isinstance(event, RoundFinished):
                if event.step in self._steps:  # another peer has told of it
                    continue
                self._steps.add(event.step)
            happened.append((event.at, event_words(name, event)))
        for at, words in sorted(happened, key=lambda one: one[0]):
            if words:
                self._write(at, words)
        for name in [name for name in simulation.results if name not in self._finished]:
            self._finished.add(name)
            self._write(simulation.time, f"{name} has finished")

    def news(self) -> list[str]:
        """The lines of the story since this was called before."""
        news, self._news = self._news, []
        return news

    def _write(self, at: float, words: str) -> None:
        line = f"{at:6.1f} s  {words}"
        self.story.append(line)
        self._news.append(line)


STEP_S = 1.0

"""Virtual time that passes at a press of the step button."""

SLOWEST = 0.01

"""Virtual seconds per second, whatever `InteractiveRun.speed` says."""

LOOK_S = 0.25

"""Real time between two snapshots."""


class InteractiveRun:
    """A simulation that is played. One plays at a time: a new one stops the former.

    Attributes:
        speed: virtual seconds per second, above 0; change it as you like.
    """

    _playing: ClassVar[InteractiveRun | None] = None

    def __init__(
        self,
        simulation: Simulation,
        train: Callable[[Swarm], object],
        plan: RunPlan,
        *,
        live: bool | None = None,
    ) -> None:
        """Use `Simulation.play`."""
        if InteractiveRun._playing is not None:
            InteractiveRun._playing.stop()
        self._simulation, self.speed = simulation, plan.speed
        self._stage = SteppedSimulation(simulation, train, plan)
        self._state, self._single_steps = "playing", 0
        self._stopping = False
        self._error: BaseException | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._look()
        self._panel = self._make_panel(live)
        InteractiveRun._playing = self
        if self._panel is None:
            self._tell()
        else:
            threading.Thread(target=self._play, name="colab-swarm-lesson", daemon=True).start()

    def _make_panel(self, live: bool | None) -> Panel[LessonSnapshot] | None:
        """Its play button asks for a refresh each second; `wait` refreshes it too."""
        if not (has_frontend() if live is None else live):
            return None
        controls = LessonControls(self, loss=self._simulation.network.loss)
        peers = self._seen[0].peers
        return Panel(
            lambda: controls.settle(self.snapshot()),
            self.stop,
            views=LESSON,
            pause=lambda wanted: self.pause() if wanted else self.go_on(),
            controls=lambda: controls.make(peers),
            live=True,
        )

    @property
    def over(self) -> bool:
        """Whether nothing will happen any more."""
        return self._over.is_set()

    @property
    def wishes(self) -> tuple[Action, ...]:
        """What was asked for so far; ``simulation.play(train, wishes=…)`` repeats it."""
        return tuple(self._stage.wishes)

    def wish(self, verb: Verb, *arguments: str | float) -> None:
        """Ask for something, such as ``wish("crash", "bob")``; see `Action`."""
        self._stage.ask(verb, *arguments)
        self._wake.set()

    def pause(self) -> None:
        """Let time stand still."""
        self._change("paused")

    def go_on(self) -> None:
        """Let time pass again."""
        self._change("playing")

    def step(self) -> None:
        """While paused: let `STEP_S` virtual seconds pass."""
        self._single_steps += round(STEP_S / SLICE_S)
        self._wake.set()

    def _change(self, state: str) -> None:
        if not self._over.is_set():
            self._state = state
            self._wake.set()

    def stop(self) -> None:
        """End it now; the peers stay as they are. Idempotent."""
        self._stopping = True
        self._wake.set()
        while not self._over.wait(POLL_S):
            pass

    def wait(self) -> dict[str, object]:
        """Wait until it is over, showing what happens; an interrupt ends the waiting only.

        Returns:
            What ``train`` returned, by name of peer, for those that came to its end.

        Raises:
            Exception: whatever a peer's ``train`` raised.
        """
        self.go_on()
        while not self._over.wait(LOOK_S):
            if self._panel is not None:
                self._panel.refresh()
        if self._panel is not None:
            self._panel.refresh()
        if self._error is not None:
            raise self._error
        return dict(self._simulation.results)

    def snapshot(self) -> LessonSnapshot:
        """What there is to see; safe from any thread."""
        simulation, story = self._seen
        error = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return LessonSnapshot(simulation, self._state, self.speed, story, error)

    def _look(self) -> None:
        """On the thread that lets time pass, while it stands."""
        self._looked_at = time.monotonic()
        self._seen = self._simulation.snapshot(), tuple(self._stage.story)

    def __repr__(self) -> str:
        return f"Lesson({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return lesson_html(self.snapshot())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self._panel is not None:
            return self._panel._repr_mimebundle_()
        return {"text/plain": lesson_text(self.snapshot()), "text/html": self._repr_html_()}

    # --- without a front-end --------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Play to the end at once and print the story."""
        stage, over = self._stage, False
        self._state = "stopped"
        try:
            while not over:
                over = stage.pass_slice() or (stage.deserted and not stage.pending)
                for line in stage.news():
                    print(line, flush=True)
            self._state = "finished"
        finally:
            self._end()

    # --- in the background ----------------------------------------------------------------------------------------

    def _play(self) -> None:
        try:
            self._state = self._play_on()
        except Exception as error:  # a door: the user's own code; told in the panel, raised by `wait`
            self._error, self._state = error, "failed"
        finally:
            self._end()

    def _play_on(self) -> str:
        """Slice by slice, as fast as is wanted; returns how it ended."""
        stage = self._stage
        while not self._stopping:
            began = time.monotonic()
            stage.grant()
            if (stage.deserted and not stage.pending) or (self._state == "paused" and not self._single_steps):
                self._look()
                self._rest(None)
                continue
            self._single_steps = max(0, self._single_steps - 1)
            if stage.pass_slice():
                return "finished"
            if began - self._looked_at > LOOK_S:
                self._look()
            self._rest(SLICE_S / max(self.speed, SLOWEST) - (time.monotonic() - began))
        return "stopped"

    def _rest(self, seconds: float | None) -> None:
        if seconds is None or seconds > 0:
            self._wake.wait(seconds)
        self._wake.clear()

    def _end(self) -> None:
        try:
            self._simulation.end()
            self._look()
        finally:
            self._over.set()
