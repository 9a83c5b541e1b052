"""`Simulation.play`: a simulated swarm that lives in the background while you look at it and interfere.

lesson = cs.simulate(4).play(train)              # shown under the cell, with sliders and a kill button
lesson.wish("crash", "bob")                      # the same from code
lesson.wait()

Time passes in slices of `SLICE_S` virtual seconds. What is asked for is done between two slices and recorded with its
virtual time, so that ``simulation.play(train, wishes=lesson.wishes)`` on a simulation of the same seed repeats the
run, whatever the speed and the pauses were. Threads: the lesson's own lets the time pass; the user's asks and looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from colab_swarm.lesson.stage import SLICE_S, LessonPlan, Stage
from colab_swarm.runtime import POLL_S
from colab_swarm.widgets.environment import has_frontend
from colab_swarm.widgets.lesson import LESSON, LessonSnapshot, Wish, lesson_html, lesson_text, summary
from colab_swarm.widgets.lesson_controls import LessonControls
from colab_swarm.widgets.panel import Panel

if TYPE_CHECKING:
    from colab_swarm.simulation import Simulation
    from colab_swarm.swarm import Swarm
    from colab_swarm.widgets.lesson import Verb

STEP_S = 1.0
"""Virtual time that passes at a press of the step button."""
SLOWEST = 0.01
"""Virtual seconds per second, whatever `Lesson.speed` says."""
LOOK_S = 0.25
"""Real time between two snapshots."""


class Lesson:
    """A simulation that is played. One plays at a time: a new one stops the former.

    Attributes:
        speed: virtual seconds per second, above 0; change it as you like.
    """

    _playing: ClassVar[Lesson | None] = None

    def __init__(
        self,
        simulation: Simulation,
        train: Callable[[Swarm], object],
        plan: LessonPlan,
        *,
        live: bool | None = None,
    ) -> None:
        """Use `Simulation.play`."""
        if Lesson._playing is not None:
            Lesson._playing.stop()
        self._simulation, self.speed = simulation, plan.speed
        self._stage = Stage(simulation, train, plan)
        self._state, self._single_steps = "playing", 0
        self._stopping = False
        self._error: BaseException | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._look()
        self._panel = self._make_panel(live)
        Lesson._playing = self
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
    def wishes(self) -> tuple[Wish, ...]:
        """What was asked for so far; ``simulation.play(train, wishes=…)`` repeats it."""
        return tuple(self._stage.wishes)

    def wish(self, verb: Verb, *arguments: str | float) -> None:
        """Ask for something, such as ``wish("crash", "bob")``; see `Wish`."""
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
