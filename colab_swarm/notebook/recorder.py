"""The flight recorder: everything that happened to a peer, as lines of JSON in one file, and the way back.

A line is ``{"kind": …, "told": {…}}``. ``Header`` begins each sitting at the file; ``Named`` tells what a peer calls
itself, before the first event about it; all other kinds are the classes of `colab_swarm.events`. Lines are written
one by one, on a thread of their own, so nobody waits for a disk. A process that is killed tears the last line at
most; the next sitting begins a new one.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import msgspec

from colab_swarm import events as _events
from colab_swarm.events import (
    Event,
    EventLog,
    Fault,
    PeerJoined,
    PeerLeft,
    PeerSilent,
    RoundFinished,
    StepFinished,
)
from colab_swarm.markup import count, duration, plain, size, text
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.notebook import svg, theme
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.rounds import waterfall_html, waterfall_text

logger = logging.getLogger(__name__)

FORMAT, VERSION = "colab-swarm flight", 1

MAX_BYTES = 200_000_000

MAX_LINE_BYTES = 1 << 20

CLOSE_S = 10.0

KINDS: dict[str, type[Event]] = {
    name: kind for name, kind in vars(_events).items() if isinstance(kind, type) and issubclass(kind, Event)
}

T = TypeVar("T")


@dataclass(frozen=True)
class Header:
    """Who recorded, what and when.

    Attributes:
        run, name, peer: the run, what the peer calls itself, and its hex id.
        began: wall time, seconds since the epoch.
        at: what the clock of the events showed then, seconds.
        package: version of this package.
        format, version: of the file.
    """

    run: str
    name: str
    peer: str
    began: float
    at: float
    package: str = ""
    format: str = FORMAT
    version: int = VERSION

    @classmethod
    def now(cls, *, run: str, name: str, peer: str, at: float) -> Header:
        """One that begins now; ``at`` as the events' clock shows it."""
        try:
            package = version("colab-swarm")
        except PackageNotFoundError:  # run from its sources
            package = ""
        return cls(run, name, peer, time.time(), at, package)


@dataclass(frozen=True)
class Named:
    """What ``peer`` (the first 8 hex digits of its id) calls itself."""

    peer: str
    name: str


class _Line(msgspec.Struct):
    kind: str
    told: dict[str, Any]


class Recorder:
    """Writes a peer's events to a file until it is closed, or the file is full. Never raises once it runs.

    Args:
        events: what to record.
        path: the file; an older recording is gone on with.
        header: begins this sitting.
        names: what peers call themselves, by the first 8 hex digits of their ids.
        max_bytes: of the whole file.

    Raises:
        ValueError: the file there is something else.
        OSError: it cannot be written.
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
        self._log, self._names, self._max_bytes = events, names, max_bytes
        self._named: dict[str, str] = {}
        self.count = 0
        self.stopped = ""
        torn = _check(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._write((b"\n" if torn else b"") + _encoded(header))
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="colab-swarm-recorder", daemon=True)
        self._thread.start()
        self._stop_listening = events.listen(self._queue.put)
        atexit.register(self.close)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if self.stopped:
                continue
            try:
                self._record(event)
            except Exception as error:  # a full disk, a drive that went away: training goes on
                self._give_up(f"{self.path} cannot be written ({error}): nothing more is recorded", event.at)

    def _record(self, event: Event) -> None:
        try:
            told = _encoded(event)
        except UnicodeEncodeError:  # a file's name may hold what is no text
            return
        if len(told) > MAX_LINE_BYTES:  # nobody could read the file
            return
        line = b"".join(_encoded(named) for named in self._new_names(event)) + told
        if self._size + len(line) > self._max_bytes:
            limit = f"its limit of {size(self._max_bytes)}"
            self._give_up(f"{self.path} is at {limit}: nothing more is recorded", event.at)
            return
        self._write(line)
        self.count += 1

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._size += len(line)

    def _give_up(self, why: str, at: float) -> None:
        self.stopped = why
        logger.warning("%s", why)
        self._log.emit(Fault(at, "the flight recorder", why))

    def _new_names(self, event: Event) -> Iterator[Named]:
        """What is known of those whom the event is about, and has not been written yet."""
        ids: list[str] = []
        if isinstance(event, RoundFinished):
            ids = [member.peer[:8] for member in event.members]
        elif isinstance(event, PeerJoined | PeerLeft | PeerSilent):
            ids = [event.peer[:8]]
        names = self._names() if ids else {}
        for id in ids:
            if id in names and self._named.get(id) != names[id]:
                self._named[id] = names[id]
                yield Named(id, names[id])

    def close(self) -> None:
        """Write what is left, and end. Idempotent."""
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
        return f"Recorder({self.path}, {count(self.count, 'event')}, {size(self._size)}{state})"


def _encoded(told: Header | Named | Event) -> bytes:
    return msgspec.json.encode({"kind": type(told).__name__, "told": told}) + b"\n"


def _check(path: Path) -> bool:
    """Whether the recording there, if there is one, ends in the middle of a line.

    Raises:
        ValueError: it is no recording.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES)
        try:
            _header(first)
        except ValueError as error:
            raise ValueError(
                f"{path} is there already and is no recording ({error}): choose another file"
            ) from error
        file.seek(-1, 2)
        return file.read() != b"\n"


# --- the way back ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flight:
    """What a file of the recorder holds.

    Attributes:
        path: the file.
        headers: of its sittings.
        names: what peers call themselves, by the first 8 hex digits of their ids.
        events: all of them, in order.
        notes: what could not be read, in words.
    """

    path: Path
    headers: tuple[Header, ...]
    names: Mapping[str, str]
    events: tuple[Event, ...]
    notes: tuple[str, ...]


def read(path: str | Path) -> Flight:
    """Read what a `Recorder` wrote.

    Lines that a killed process left torn are left out, and so are kinds of a newer version; `Flight.notes` says so.

    Raises:
        ValueError: the file is no recording, or damaged; names the line.
        OSError: it cannot be read.
    """
    headers: list[Header] = []
    names: dict[str, str] = {}
    events: list[Event] = []
    notes: list[str] = []
    unknown = 0
    for number, told in _records(Path(path), notes):
        if isinstance(told, Header):
            headers.append(told)
        elif isinstance(told, Named):
            names[told.peer] = told.name
        elif told is None:
            unknown += 1
        else:
            events.append(told)
        if not headers:
            raise ValueError(f"{path}, line {number}: a recording begins with its header")
    if not headers:
        raise ValueError(f"{path} is empty: nothing was recorded")
    if unknown:
        notes.append(f"{count(unknown, 'event')} of a newer version left out: update colab-swarm")
    return Flight(Path(path), tuple(headers), names, tuple(events), tuple(notes))


def _records(path: Path, notes: list[str]) -> Iterator[tuple[int, Header | Named | Event | None]]:
    """The lines; what cannot be read is an error, unless it is a line that a killed process left: then a note."""
    torn: ValueError | None = None
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
            try:
                told = _decoded(line)
            except ValueError as error:
                if torn is not None:
                    raise _damaged(path, number - 1, torn) from torn
                if number == 1:
                    raise _damaged(path, number, error) from error
                torn = error
                continue
            if torn is not None:
                if not isinstance(told, Header):
                    raise _damaged(path, number - 1, torn)
                notes.append(f"line {number - 1} is torn: its process was killed; it is left out")
                torn = None
            yield number, told
    if torn is not None:
        notes.append("the last line is torn: the process was killed; it is left out")


def _damaged(path: Path, number: int, error: ValueError) -> ValueError:
    return ValueError(f"{path}, line {number} is no line of a recording: {error}")


def _decoded(line: bytes) -> Header | Named | Event | None:
    """One line; None for a kind that is not known here.

    Raises:
        ValueError: it is none.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {size(MAX_LINE_BYTES)}")
    found = _as(_Line, _parsed(line))
    if found.kind == "Header":
        return _header(line)
    if found.kind == "Named":
        return _as(Named, found.told)
    kind = KINDS.get(found.kind)
    if kind is None:
        return None
    try:
        return _as(kind, found.told)
    except ValueError:  # JSON has no word for a number that is none, so it was written as null
        return _as(kind, {key: math.nan if value is None else value for key, value in found.told.items()})


def _header(line: bytes) -> Header:
    found = _as(_Line, _parsed(line))
    if found.kind != "Header" or found.told.get("format") != FORMAT:
        raise ValueError("no header of a recording")
    header = _as(Header, found.told)
    if header.version > VERSION:
        raise ValueError(
            f"it was made by version {header.package} of colab-swarm: update this one to read it"
        )
    return header


def _parsed(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error


def _as(kind: type[T], told: Any) -> T:
    try:
        return msgspec.convert(told, kind)
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error


class Replay:
    """A flight, to look at: as the last value of a cell it shows itself, ``print`` shows it as text.

    Args:
        flight: the recording.
        live: whether to use widgets; None to find out.
    """

    def __init__(self, flight: Flight, *, live: bool | None = None) -> None:
        self.flight = flight
        self._live = has_frontend() if live is None else live

    @property
    def events(self) -> tuple[Event, ...]:
        """All of them, in order."""
        return self.flight.events

    @cached_property
    def rounds(self) -> tuple[RoundFinished, ...]:
        """The averaging rounds, in order."""
        return tuple(event for event in self.events if isinstance(event, RoundFinished))

    @cached_property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) by step; where a step was taken again, the last one."""
        told = (event for event in self.events if isinstance(event, StepFinished))
        by_step = {one.step: one.loss for one in told if one.loss is not None and math.isfinite(one.loss)}
        return tuple(sorted(by_step.items()))

    def __len__(self) -> int:
        """How many events there are."""
        return len(self.events)

    # --- how it looks -------------------------------------------------------------------------------------------

    def html(self, chosen: int = -1) -> str:
        """All of it, with the round at ``chosen`` in full; the last one by default."""
        notes = "".join(f'<p class="warn">{text(note)}</p>' for note in self.flight.notes)
        loss = svg.curve(self.losses)
        drawn = f"<h4>loss</h4>{loss}" if loss else ""
        rounds = waterfall_html(self.rounds, self._back(chosen), self.flight.names)
        inside = theme.heading("recorded", text(self._summary(), 400)) + notes + drawn + rounds
        return theme.wrap(inside, "a recorded run")

    def text(self, chosen: int = -1) -> str:
        """The same as lines."""
        lines = [self._summary(), *self.flight.notes]
        if self.losses:
            lines.append("  ".join(f"step {step}: {loss:.3f}" for step, loss in _few(self.losses)))
        return "\n".join([*lines, waterfall_text(self.rounds, self._back(chosen), self.flight.names)])

    def _back(self, chosen: int) -> int:
        """So many rounds before the last one."""
        return 0 if chosen < 0 else max(len(self.rounds) - 1 - chosen, 0)

    def _summary(self) -> str:
        header = self.flight.headers[-1]
        spans = [event.at for event in self.events if math.isfinite(event.at)]
        facts = [
            f"{plain(header.run, 40)}, seen by {plain(header.name, 40)}",
            count(len(self.rounds), "round"),
        ]
        if len(self.flight.headers) > 1:
            facts.append(count(len(self.flight.headers), "sitting"))
        elif spans:
            facts.append(duration(max(spans) - min(spans)))
        if self.losses:
            facts.append(f"loss {self.losses[0][1]:.3f} to {self.losses[-1][1]:.3f}")
        return ", ".join(facts)

    def __repr__(self) -> str:
        return f"Replay({self.flight.path.name}: {self._summary()})"

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text(), "text/html": self.html()}
        if self._live and len(self.rounds) > 1:
            view = {"model_id": self._widget.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle

    @cached_property
    def _widget(self) -> Any:
        import ipywidgets

        last = len(self.rounds) - 1
        view = ipywidgets.HTML(self.html())
        slider = ipywidgets.IntSlider(last, 0, last, description="round", continuous_update=False)
        slider.tooltip = "choose the round that is shown in full"  # no trait in ipywidgets 7

        def choose(change: Any) -> None:
            view.value = self.html(change["new"])

        slider.observe(choose, names="value")
        return ipywidgets.VBox([slider, view])


def _few(losses: tuple[tuple[int, float], ...], most: int = 8) -> list[tuple[int, float]]:
    """Some of them, the last among them."""
    return [*losses[: -1 : math.ceil(len(losses) / most)], losses[-1]]


def replay(path: str | Path) -> Replay:
    """Look at a run that ``swarm.record(path)`` recorded; needs no swarm.

    Raises:
        ValueError: the file is no recording, or damaged; names the line.
        OSError: it cannot be read.
    """
    return Replay(read(path))
