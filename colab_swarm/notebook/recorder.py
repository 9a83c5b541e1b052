"""The flight recorder: a peer's events as lines of JSON in one file, which `replay` reads and draws.

A line is ``{"kind": …, "data": {…}}``. A `Header` starts each session, `Names` has the names of peers, and the other
kinds are the events of `colab_swarm.events`. A thread writes the file, and a kill damages at most one line.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

import msgspec

from colab_swarm.errors import require
from colab_swarm.events import Event, EventLog, Fault, RoundFinished, StepFinished
from colab_swarm.markup import count, plain, size
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.notebook import theme
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.views import draw_waterfall

logger = logging.getLogger(__name__)
MAX_BYTES = 200_000_000
MAX_LINE_BYTES = 1 << 20
CLOSE_S = 10.0


@dataclass(frozen=True)
class Header:
    run: str
    name: str  # of the recording peer
    peer: str  # its hex id
    began: float  # wall time, seconds since the epoch
    at: float  # the events' clock at that time, seconds
    format: Literal["colab-swarm recording"] = "colab-swarm recording"


@dataclass(frozen=True)
class Names:
    names: dict[str, str]  # by the first 8 hex digits of the peers' ids


_Item: TypeAlias = Header | Names | Event
KINDS: dict[str, type[_Item]] = {kind.__name__: kind for kind in (Header, Names, *Event.__subclasses__())}


class _Line(msgspec.Struct):
    kind: str
    data: msgspec.Raw


def _encoded(item: _Item) -> bytes:
    return msgspec.json.encode({"kind": type(item).__name__, "data": item}) + b"\n"


def _decoded(line: bytes) -> _Item:
    require(len(line) <= MAX_LINE_BYTES, f"it is longer than {size(MAX_LINE_BYTES)}")
    try:
        decoded = msgspec.json.decode(line, type=_Line)
        require(decoded.kind in KINDS, "it is of a newer version")
        return msgspec.json.decode(decoded.data, type=KINDS[decoded.kind])
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error


class Recorder(AbstractContextManager["Recorder"]):
    """Writes a peer's events to a file until it is closed or full. After its start it never raises an error.

    If the file has an earlier recording, it is continued. Raises ValueError if the file is not a recording. ``names``
    returns the peers' names by short id.
    """

    def __init__(
        self,
        events: EventLog,
        path: str | Path,
        header: Header,
        names: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.path = Path(path)
        self.stopped = ""  # why the recording ended early
        self._events = events
        self._names = names
        self._written_names: dict[str, str] = {}
        self._file = self.path.open("a+b", buffering=0)
        if self._file.tell() > 0:
            self._check_recording()
            # a kill may have left the last line incomplete
            self._file.write(b"\n")
        self._file.write(_encoded(header))
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="colab-swarm-recorder", daemon=True)
        self._thread.start()
        self._stop_listening = events.listen(self._queue.put)

    def _check_recording(self) -> None:
        """Raise ValueError unless the file begins as a recording."""
        self._file.seek(0)
        try:
            first = _decoded(self._file.readline(MAX_LINE_BYTES))
            require(isinstance(first, Header), "it has no header")
        except ValueError as error:
            self._file.close()
            raise ValueError(f"{self.path} is no recording ({error}): choose another file") from error

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                if not self.stopped:
                    self._record(event)
            except UnicodeEncodeError:
                # skip an event with a file name that is not valid text
                continue
            except Exception as error:
                # a full disk or an unmounted drive must not end the training
                self.stopped = f"cannot write {self.path} ({error}): the recording has ended"
                logger.warning("%s", self.stopped)
                self._events.emit(Fault(event.at, "the flight recorder", self.stopped))

    def _record(self, event: Event) -> None:
        line = _encoded(event)
        # `replay` would refuse a longer line
        if len(line) > MAX_LINE_BYTES:
            return
        new_names = dict(self._names().items() - self._written_names.items())
        if new_names:
            self._written_names |= new_names
            line = _encoded(Names(new_names)) + line
        if self._file.tell() + len(line) > MAX_BYTES:
            raise OSError(f"it has reached its limit of {size(MAX_BYTES)}")
        self._file.write(line)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop_listening()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    def __repr__(self) -> str:
        return f"Recorder({self.stopped or self.path})"


class Replay:
    """A recording that `replay` has read: its events, rounds and losses, drawn for a notebook."""

    def __init__(self, path: Path) -> None:
        self.headers: list[Header] = []
        self.names: dict[str, str] = {}
        self.events: list[Event] = []
        damaged = self._read(path)
        require(self.headers, f"{path} is empty: nothing was recorded")
        self.note = ""
        if damaged:
            lines = count(len(damaged), "line")
            self.note = f"{lines} left out, torn or of a newer version; the first is line {damaged[0]}"
        self.rounds = [event for event in self.events if isinstance(event, RoundFinished)]
        # if two sessions took the same step, use the last loss
        losses: dict[int, float] = {}
        for event in self.events:
            if isinstance(event, StepFinished) and event.loss is not None:
                losses[event.step] = event.loss
        self.losses = sorted(losses.items())

    def _read(self, path: Path) -> list[int]:
        """Add the events of the file's lines; return the numbers of the lines that cannot be read."""
        damaged: list[int] = []
        with path.open("rb") as file:
            lines = iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    item = _decoded(line)
                    require(self.headers or isinstance(item, Header), "a recording starts with a header")
                except ValueError as error:
                    if not self.headers:
                        raise ValueError(f"{path} is not a recording: line {number}: {error}") from error
                    damaged.append(number)
                    continue
                if isinstance(item, Header):
                    self.headers.append(item)
                elif isinstance(item, Names):
                    self.names |= item.names
                else:
                    self.events.append(item)
        return damaged

    def draw(self, chosen: int = -1) -> theme.Document:
        """Draw the run, with details of the round at index ``chosen``."""
        header = self.headers[-1]
        sessions = count(len(self.headers), "session")
        state = f"recorded by {plain(header.name, 40)}, {count(len(self.rounds), 'round')}, {sessions}"
        if self.losses:
            state += f", loss {self.losses[0][1]:.3f} to {self.losses[-1][1]:.3f}"
        document = theme.Document(plain(header.run, 40), state, label="a recorded run")
        document.warn(self.note)
        document.curve(self.losses)
        draw_waterfall(document, self.rounds[chosen] if self.rounds else None, self.names)
        return document

    def __repr__(self) -> str:
        return f"Replay({self.draw().line})"

    def __str__(self) -> str:
        return self.draw().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        has_slider = len(self.rounds) > 1 and has_frontend()
        return self.draw().bundle(self._widget if has_slider else None)

    @cached_property
    def _widget(self) -> Any:
        import ipywidgets

        last = len(self.rounds) - 1
        view = ipywidgets.HTML(self.draw().html())
        slider = ipywidgets.IntSlider(last, 0, last, description="round", continuous_update=False)

        def show(change: Any) -> None:
            view.value = self.draw(slider.value).html()

        slider.observe(show, names="value")
        return ipywidgets.VBox([slider, view])


def replay(path: str | Path) -> Replay:
    """Read a run that ``swarm.record(path)`` recorded; this needs no swarm.

    The result has the lists ``events``, ``rounds`` and ``losses``; an item of ``losses`` is (step, loss). Incomplete
    lines and lines of a newer version are left out; then the result's ``note`` says so. Raises ValueError if the file
    is not a recording.
    """
    return Replay(Path(path))
