"""The flight recorder: a peer's events as lines of JSON in one file; `replay` reads and draws it.

A line is ``{"kind": …, "data": {…}}``: a `Header` starts each session, `Names` are those of the peers, all other kinds
are the classes of `colab_swarm.events`. A thread of its own writes, so nothing waits for a disk. A killed process
leaves at most one torn line; the next session starts a new one.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self, TypeAlias

import msgspec

from colab_swarm.events import Event, EventLog, Fault, RoundFinished, StepFinished
from colab_swarm.markup import count, duration, plain, size
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.notebook import svg
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.rounds import draw_waterfall
from colab_swarm.notebook.theme import Document

logger = logging.getLogger(__name__)

MAX_BYTES = 200_000_000
MAX_LINE_BYTES = 1 << 20
CLOSE_S = 10.0
MAX_LOSSES = 8  # losses in the text of a replay


@dataclass(frozen=True)
class Header:
    """The start of a recording session.

    Attributes:
        run, name, peer: the run, the recording peer's name and its hex id.
        began: wall time, seconds since the epoch.
        at: the events' clock at that time, seconds.
    """

    run: str
    name: str
    peer: str
    began: float
    at: float
    format: Literal["colab-swarm recording"] = "colab-swarm recording"


@dataclass(frozen=True)
class Names:
    """The names of peers by the first 8 hex digits of their ids, as far as they are new."""

    names: dict[str, str]


Item: TypeAlias = Header | Names | Event
KINDS: dict[str, type[Item]] = {kind.__name__: kind for kind in (Header, Names, *Event.__subclasses__())}


class _Line(msgspec.Struct):
    kind: str
    data: dict[str, Any]


class Recorder:
    """Writes a peer's events to a file until it is closed or the file is full. Never raises once it runs.

    Args:
        events: what to record.
        path: the file; an older recording is continued.
        header: starts this session.
        names: returns the peers' names by the first 8 hex digits of their ids.
        max_bytes: of the whole file.

    Raises:
        ValueError: the file exists and is not a recording.
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        events: EventLog,
        path: str | Path,
        header: Header,
        *,
        names: Callable[[], Mapping[str, str]] = dict,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = Path(path)
        self._events, self._names, self._max_bytes = events, names, max_bytes
        self._named: dict[str, str] = {}
        self.count, self.stopped = 0, ""
        if continued := self.path.exists() and self.path.stat().st_size > 0:
            _check_recording(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._file.write(b"\n" * continued + _encoded(header))  # the last line may be torn
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="colab-swarm-recorder", daemon=True)
        self._thread.start()
        self._stop_listening = events.listen(self._queue.put)
        atexit.register(self.close)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                if not self.stopped:
                    self._record(event)
            except UnicodeEncodeError:  # a file name that is not valid text
                continue
            except Exception as error:  # a full disk or an unmounted drive must not end the training
                self._give_up(f"cannot write {self.path} ({error})", event.at)

    def _record(self, event: Event) -> None:
        line = _encoded(event)
        if len(line) > MAX_LINE_BYTES:  # `replay` would refuse it
            return
        new = {id: name for id, name in self._names().items() if self._named.get(id) != name}
        if new:
            self._named |= new
            line = _encoded(Names(new)) + line
        if self._file.tell() + len(line) > self._max_bytes:
            self._give_up(f"{self.path} has reached its limit of {size(self._max_bytes)}", event.at)
            return
        self._file.write(line)
        self.count += 1

    def _give_up(self, reason: str, at: float) -> None:
        self.stopped = f"{reason}: the recording has ended"
        logger.warning("%s", self.stopped)
        self._events.emit(Fault(at, "the flight recorder", self.stopped))

    def close(self) -> None:
        """Write the remaining events and close the file. Idempotent."""
        self._stop_listening()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f", {self.stopped}" if self.stopped else "" if self._thread.is_alive() else ", closed"
        return f"Recorder({self.path}, {count(self.count, 'event')}, {size(self.path.stat().st_size)}{state})"


def _encoded(item: Item) -> bytes:
    return msgspec.json.encode({"kind": type(item).__name__, "data": item}) + b"\n"


def _check_recording(path: Path) -> None:
    with path.open("rb") as file:
        try:
            _decoded(file.readline(MAX_LINE_BYTES), Header)
        except ValueError as error:
            raise ValueError(
                f"{path} exists and is not a recording ({error}): choose another file"
            ) from error


def _decoded(line: bytes, *kinds: type[Item]) -> Item | None:
    """Return the content of a line; None for an unknown kind. Raises ValueError for anything else."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {size(MAX_LINE_BYTES)}")
    try:
        found = msgspec.json.decode(line, type=_Line)
        kind = KINDS.get(found.kind)
        if kinds and kind not in kinds:
            raise ValueError("a recording starts with a header")
        if kind is None:
            return None
        try:
            return msgspec.convert(found.data, kind)
        except msgspec.ValidationError:  # JSON writes NaN as null
            with_nan = {key: math.nan if value is None else value for key, value in found.data.items()}
            return msgspec.convert(with_nan, kind)
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error


# --- replay -----------------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class Replay:
    """A recording to look at: a cell draws it, ``print`` shows it as text.

    Attributes:
        path: the file.
        live: whether to use widgets.
        headers: of its sessions.
        names: of peers, by the first 8 hex digits of their ids.
        events: all of them, in order.
        unknown: number of lines of kinds that this version does not know.
        notes: what could not be read, in words.
    """

    path: Path
    live: bool = False
    headers: list[Header] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    unknown: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, line: bytes) -> None:
        """Add what a line of the file holds; raises ValueError if it is damaged."""
        item = _decoded(line, *([] if self.headers else [Header])) if line.strip() else Names({})
        if isinstance(item, Header):
            self.headers.append(item)
        elif isinstance(item, Names):
            self.names |= item.names
        elif item is None:
            self.unknown += 1
        else:
            self.events.append(item)

    @cached_property
    def rounds(self) -> tuple[RoundFinished, ...]:
        """The averaging rounds, in order."""
        return tuple(event for event in self.events if isinstance(event, RoundFinished))

    @cached_property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) by step; the last loss of a step that was repeated."""
        steps = (event for event in self.events if isinstance(event, StepFinished))
        by_step = {one.step: one.loss for one in steps if one.loss is not None and math.isfinite(one.loss)}
        return tuple(sorted(by_step.items()))

    def draw(self, chosen: int = -1) -> Document:
        """Return the run, with the round at index ``chosen`` in full."""
        shown = Document("recorded", self._summary(), label="a recorded run", line=self._summary())
        for note in self.notes:
            shown.warn(note)
        losses = "  ".join(f"step {step}: {loss:.3f}" for step, loss in svg.thinned(self.losses, MAX_LOSSES))
        shown.draw(svg.curve(self.losses), *([losses] if losses else []))
        back = 0 if chosen < 0 else max(len(self.rounds) - 1 - chosen, 0)
        draw_waterfall(shown, self.rounds, back, self.names)
        return shown

    def _summary(self) -> str:
        header, losses = self.headers[-1], self.losses
        times = [event.at for event in self.events if math.isfinite(event.at)] or [0.0]
        sessions, seconds = count(len(self.headers), "session"), duration(max(times) - min(times))
        facts = [
            f"{plain(header.run, 40)}, recorded by {plain(header.name, 40)}",
            count(len(self.rounds), "round"),
            sessions if len(self.headers) > 1 else seconds,
            f"loss {losses[0][1]:.3f} to {losses[-1][1]:.3f}" if losses else "no loss",
        ]
        return ", ".join(facts)

    def __repr__(self) -> str:
        return f"Replay({self.path.name}: {self._summary()})"

    def __str__(self) -> str:
        return self.draw().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        widget = self._widget if self.live and len(self.rounds) > 1 else None
        return self.draw().bundle(widget)

    @cached_property
    def _widget(self) -> Any:
        import ipywidgets

        last = len(self.rounds) - 1
        self._view = ipywidgets.HTML(self.draw().html())
        slider = ipywidgets.IntSlider(last, 0, last, description="round", continuous_update=False)
        slider.tooltip = "choose the round to show in full"  # no trait in ipywidgets 7
        slider.observe(self._on_slider, names="value")
        return ipywidgets.VBox([slider, self._view])

    def _on_slider(self, change: Any) -> None:
        self._view.value = self.draw(change["new"]).html()


def replay(path: str | Path, *, live: bool | None = None) -> Replay:
    """Read a run that ``swarm.record(path)`` recorded; needs no swarm.

    Damaged lines, such as torn ones of killed processes, and kinds of a newer version are left out; `Replay.notes`
    says so.

    Args:
        path: the file.
        live: whether to use widgets; None to detect a front-end.

    Raises:
        ValueError: the file is not a recording.
        OSError: the file cannot be read.
    """
    found, damaged = Replay(Path(path), has_frontend() if live is None else live), list[int]()
    with found.path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
            try:
                found.add(line)
            except ValueError as error:
                if not found.headers:
                    raise ValueError(f"{path} is not a recording: line {number}: {error}") from error
                damaged.append(number)
    if not found.headers:
        raise ValueError(f"{path} is empty: nothing was recorded")
    if damaged:
        first = f"line {damaged[0]} is the first; a killed process may have torn it"
        found.notes.append(f"{count(len(damaged), 'damaged line')} left out: {first}")
    if found.unknown:
        found.notes.append(f"{count(found.unknown, 'event')} of a newer version left out: update colab-swarm")
    return found
