"""The flight recorder: a peer's events as lines of JSON in one file; `replay` reads and draws it.

A line is ``{"kind": …, "data": {…}}``. A ``Header`` starts each session; ``Named`` gives a peer's name before the first
event about it; all other kinds are the classes of `colab_swarm.events`. A thread of its own writes line by line, so
nothing waits for a disk. A killed process leaves at most one torn line; the next session starts a new one.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import msgspec

from colab_swarm import events as _events
from colab_swarm.events import Event, EventLog, Fault, RoundFinished, StepFinished
from colab_swarm.markup import count, duration, plain, size
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.notebook import svg
from colab_swarm.notebook.machine import installed_version
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.rounds import draw_waterfall
from colab_swarm.notebook.theme import Document

logger = logging.getLogger(__name__)

FORMAT, VERSION = "colab-swarm recording", 1
MAX_BYTES = 200_000_000
MAX_LINE_BYTES = 1 << 20
CLOSE_S = 10.0
MAX_LOSSES = 8  # losses in the text of a replay


@dataclass(frozen=True)
class Header:
    """The start of a recording session.

    Attributes:
        run, name, peer: the run, the recording peer's name and its hex id.
        format, version: of the file.
    """

    run: str
    name: str
    peer: str
    began: float  # wall time, seconds since the epoch
    at: float  # the events' clock at that time, seconds
    package: str = ""  # version of this package
    format: str = FORMAT
    version: int = VERSION

    @classmethod
    def now(cls, *, run: str, name: str, peer: str, at: float) -> Header:
        """Return a header for a session that starts now; ``at`` by the events' clock."""
        return cls(run, name, peer, time.time(), at, installed_version("colab-swarm") or "")


@dataclass(frozen=True)
class Named:
    """The name of ``peer``, which is given by the first 8 hex digits of its id."""

    peer: str
    name: str


KINDS: dict[str, type[Named | Event]] = {
    name: kind
    for name, kind in {"Named": Named, **vars(_events)}.items()
    if isinstance(kind, type) and issubclass(kind, Named | Event)
}
"""The kinds of lines after the header."""


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
        torn = _is_torn(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._file.write((b"\n" if torn else b"") + _encoded(header))
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
            except Exception as error:  # a full disk or an unmounted drive must not end the training
                self._give_up(f"cannot write {self.path} ({error})", event.at)

    def _record(self, event: Event) -> None:
        try:
            data = _encoded(event)
        except UnicodeEncodeError:  # a file name that is not valid text
            return
        if len(data) > MAX_LINE_BYTES:  # `replay` would refuse the file
            return
        line = self._new_names(event) + data
        if self._file.tell() + len(line) > self._max_bytes:
            self._give_up(f"{self.path} has reached its limit of {size(self._max_bytes)}", event.at)
            return
        self._file.write(line)
        self.count += 1

    def _give_up(self, reason: str, at: float) -> None:
        self.stopped = f"{reason}: the recording has ended"
        logger.warning("%s", self.stopped)
        self._events.emit(Fault(at, "the flight recorder", self.stopped))

    def _new_names(self, event: Event) -> bytes:
        peers = [one.peer for one in event.members] if isinstance(event, RoundFinished) else []
        ids = {peer[:8] for peer in [*peers, getattr(event, "peer", "")] if peer}
        known = self._names() if ids else {}
        new = {id: known[id] for id in sorted(ids & known.keys()) if self._named.get(id) != known[id]}
        self._named |= new
        return b"".join(_encoded(Named(*named)) for named in new.items())

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


def _encoded(item: Header | Named | Event) -> bytes:
    return msgspec.json.encode({"kind": type(item).__name__, "data": item}) + b"\n"


def _is_torn(path: Path) -> bool:
    """Return True if a recording is there whose last line is incomplete."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        try:
            first = _decoded(file.readline(MAX_LINE_BYTES))
        except ValueError as error:
            raise ValueError(
                f"{path} exists and is not a recording ({error}): choose another file"
            ) from error
        if not isinstance(first, Header):
            raise ValueError(f"{path} exists and does not start with a header: choose another file")
        file.seek(-1, 2)
        return file.read() != b"\n"


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
        notes: what could not be read, in words.
    """

    path: Path
    live: bool = False
    headers: list[Header] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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

    def html(self, chosen: int = -1) -> str:
        """Draw the run as HTML, with the round at index ``chosen`` in full."""
        return self.draw(chosen).html()

    def text(self, chosen: int = -1) -> str:
        """Return the same as lines of text."""
        return self.draw(chosen).text()

    def _summary(self) -> str:
        header = self.headers[-1]
        times = [event.at for event in self.events if math.isfinite(event.at)]
        facts = [
            f"{plain(header.run, 40)}, recorded by {plain(header.name, 40)}",
            count(len(self.rounds), "round"),
        ]
        if len(self.headers) > 1:
            facts.append(count(len(self.headers), "session"))
        elif times:
            facts.append(duration(max(times) - min(times)))
        if self.losses:
            facts.append(f"loss {self.losses[0][1]:.3f} to {self.losses[-1][1]:.3f}")
        return ", ".join(facts)

    def __repr__(self) -> str:
        return f"Replay({self.path.name}: {self._summary()})"

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        widget = self._widget if self.live and len(self.rounds) > 1 else None
        return self.draw().bundle(widget)

    @cached_property
    def _widget(self) -> Any:
        import ipywidgets

        last = len(self.rounds) - 1
        self._view = ipywidgets.HTML(self.html())
        slider = ipywidgets.IntSlider(last, 0, last, description="round", continuous_update=False)
        slider.tooltip = "choose the round to show in full"  # no trait in ipywidgets 7
        slider.observe(self._on_slider, names="value")
        return ipywidgets.VBox([slider, self._view])

    def _on_slider(self, change: Any) -> None:
        self._view.value = self.html(change["new"])


def replay(path: str | Path, *, live: bool | None = None) -> Replay:
    """Read a run that ``swarm.record(path)`` recorded; needs no swarm.

    Torn lines of killed processes and kinds of a newer version are left out; `Replay.notes` says so.

    Args:
        path: the file.
        live: whether to use widgets; None to detect a front-end.

    Raises:
        ValueError: the file is not a recording, or is damaged; names the line.
        OSError: the file cannot be read.
    """
    found = Replay(Path(path), has_frontend() if live is None else live)
    unknown = 0
    for item in _items(found):
        match item:
            case Header():
                found.headers.append(item)
            case Named():
                found.names[item.peer] = item.name
            case None:
                unknown += 1
            case _:
                found.events.append(item)
    if not found.headers:
        raise ValueError(f"{path} is empty: nothing was recorded")
    if unknown:
        found.notes.append(f"{count(unknown, 'event')} of a newer version left out: update colab-swarm")
    return found


def _items(found: Replay) -> Iterator[Header | Named | Event | None]:
    """Yield the lines. An unreadable one is an error, unless a killed process tore it: then a note."""
    torn: ValueError | None = None
    with found.path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
            try:
                item = _decoded(line)
            except ValueError as error:
                damaged = ValueError(f"{found.path}, line {number} is not a line of a recording: {error}")
                if torn or number == 1:
                    raise torn or damaged from error
                torn = damaged
                found.notes.append(f"line {number} is torn because its process was killed; it is left out")
                continue
            if torn and not isinstance(item, Header):
                raise torn
            if number == 1 and not isinstance(item, Header):
                raise ValueError(f"{found.path}, line 1: a recording starts with a header")
            torn = None
            yield item


def _decoded(line: bytes) -> Header | Named | Event | None:
    """Return the content of a line; None for an unknown kind. Raises ValueError for anything else."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {size(MAX_LINE_BYTES)}")
    try:
        found = msgspec.json.decode(line, type=_Line)
        if found.kind == "Header" and found.data.get("format") == FORMAT:
            header = msgspec.convert(found.data, Header)
            if header.version > VERSION:
                raise ValueError(
                    f"version {header.package} of colab-swarm wrote it: update colab-swarm to read it"
                )
            return header
        return _item(found.data, KINDS[found.kind]) if found.kind in KINDS else None
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error


def _item(data: dict[str, Any], kind: type[Named | Event]) -> Named | Event:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:  # JSON writes NaN as null
        with_nan = {key: math.nan if value is None else value for key, value in data.items()}
        return msgspec.convert(with_nan, kind)
