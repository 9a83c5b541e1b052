"""What a lesson plays on: slices of virtual time, wishes between them, and the story. No thread of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import JoinError
from colab_swarm.events import Event, RoundFinished
from colab_swarm.widgets.lesson import MAX_PEERS, Verb, Wish, event_words, fault_words

if TYPE_CHECKING:
    from colab_swarm.simulation import Simulation
    from colab_swarm.swarm import Swarm

SLICE_S = 0.5
"""Virtual time between two looks at what is asked for."""
MAX_LINES = 1000
"""Of the story; the oldest are forgotten."""


@dataclass(frozen=True)
class LessonPlan:
    """How a lesson goes if nobody interferes.

    Attributes:
        seconds: virtual time after which it ends; None: when everyone has finished.
        speed: virtual seconds per second.
        wishes: what to ask for, and when.
    """

    seconds: float | None = None
    speed: float = 10.0
    wishes: tuple[Wish, ...] = ()

    def __post_init__(self) -> None:
        if not self.speed > 0 or not (self.seconds is None or self.seconds > 0):
            raise ValueError(f"speed={self.speed}, seconds={self.seconds}: both must be above 0")


class Stage:
    """The lesson without its thread: lets slices of time pass, grants wishes, writes down the story.

    Attributes:
        wishes: those that were granted, with their times.
        story: what happened, as lines.
        deserted: nobody is left, so no time passes until somebody joins.
    """

    def __init__(self, simulation: Simulation, train: Callable[[Swarm], object], plan: LessonPlan) -> None:
        self._simulation = simulation
        self._until = None if plan.seconds is None else simulation.time + plan.seconds
        self._scripted = deque(sorted(plan.wishes, key=lambda wish: wish.at))
        self._asked: deque[tuple[Verb, tuple[str | float, ...]]] = deque()
        self._events: list[tuple[Event, str]] = []
        self._met: dict[str, Swarm] = {}
        self._finished: set[str] = set()
        self._steps: set[int] = set()
        self._faults = len(simulation.network.fired)
        self.wishes: list[Wish] = []
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
            self.wishes.append(Wish(now, verb, arguments))

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
        """Let newcomers join, or the last ones vanish, until so many are there."""
        from colab_swarm.simulation import nth_name

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
