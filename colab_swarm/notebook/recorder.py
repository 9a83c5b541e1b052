"""The flight recorder: a peer's events as lines of JSON in one file; `replay` reads and draws it.

A line is ``{"kind": …, "data": {…}}``: a `Header` starts each session, `Names` are the peers',
other kinds are of `colab_swarm.events`. A thread writes, and a kill tears at most one line.
"""

import logging
import threading
from collections.abc import Callable, Mapping
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


Item: TypeAlias = Header | Names | Event
KINDS: dict[str, type[Item]] = {kind.__name__: kind for kind in (Header, Names, *Event.__subclasses__())}


class _Line(msgspec.Struct):
    kind: str
    data: msgspec.Raw


def _encoded(item: Item) -> bytes:
    return msgspec.json.encode({"kind": type(item).__name__, "data": item}) + b"\n"


def _decoded(line: bytes) -> Item:
    require(len(line) <= MAX_LINE_BYTES, f"it is longer than {size(MAX_LINE_BYTES)}")
    try:
        found = msgspec.json.decode(line, type=_Line)
        require(found.kind in KINDS, "it is of a newer version")
        return msgspec.json.decode(found.data, type=KINDS[found.kind])
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error


class Recorder:
    """Writes a peer's events to a file until it is closed or full. Never raises once it runs.

    An older recording is continued; another file is a ValueError. ``names`` are by short id.
    """

    def __init__(
        self,
        events: EventLog,
        path: str | Path,
        header: Header,
        names: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.path, self.stopped = Path(path), ""
        self._events, self._names, self._named = events, names, dict[str, str]()
        self._file = self.path.open("a+b", buffering=0)
        if continued := self._file.tell() > 0:
            self._file.seek(0)
            try:
                if not isinstance(_decoded(self._file.readline(MAX_LINE_BYTES)), Header):
                    raise ValueError("it has no header")
            except ValueError as error:
                self._file.close()
                raise ValueError(f"{path} is no recording ({error}): choose another file") from error
        self._file.write(b"\n" * continued + _encoded(header))  # the last line may be torn
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="colab-swarm-recorder", daemon=True)
        self._thread.start()
        self._stop_listening = events.listen(self._queue.put)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                if not self.stopped:
                    self._record(event)
            except UnicodeEncodeError:  # a file name that is not valid text
                continue
            except Exception as error:  # a full disk or an unmounted drive must not end the training
                self.stopped = f"cannot write {self.path} ({error}): the recording has ended"
                logger.warning("%s", self.stopped)
                self._events.emit(Fault(event.at, "the flight recorder", self.stopped))

    def _record(self, event: Event) -> None:
        line = _encoded(event)
        if len(line) > MAX_LINE_BYTES:  # `replay` would refuse it
            return
        if new := dict(self._names().items() - self._named.items()):
            self._named |= new
            line = _encoded(Names(new)) + line
        if self._file.tell() + len(line) > MAX_BYTES:
            raise OSError(f"it has reached its limit of {size(MAX_BYTES)}")
        self._file.write(line)

    def close(self) -> None:
        self._stop_listening()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    def __repr__(self) -> str:
        return f"Recorder({self.stopped or self.path})"


class Replay:
    """A recording to look at; see `replay`."""

    def __init__(self, path: Path, live: bool) -> None:
        self.headers, self.names, self.events = list[Header](), dict[str, str](), list[Event]()
        self._live, damaged = live, list[int]()
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
                try:
                    if not line.isspace():
                        self._add(_decoded(line))
                except ValueError as error:
                    if not self.headers:
                        raise ValueError(f"{path} is not a recording: line {number}: {error}") from error
                    damaged.append(number)
        require(self.headers, f"{path} is empty: nothing was recorded")
        what = f"{count(len(damaged), 'line')} left out, torn or of a newer version; the first is line"
        self.note = f"{what} {damaged[0]}" if damaged else ""
        self.rounds = [event for event in self.events if isinstance(event, RoundFinished)]
        steps = [event for event in self.events if isinstance(event, StepFinished)]
        self.losses = sorted({one.step: one.loss for one in steps if one.loss is not None}.items())

    def _add(self, item: Item) -> None:
        if isinstance(item, Header):
            self.headers.append(item)
        elif not self.headers:
            raise ValueError("a recording starts with a header")
        elif isinstance(item, Names):
            self.names |= item.names
        else:
            self.events.append(item)

    def draw(self, chosen: int = -1) -> theme.Document:
        """Return the run, with the round at index ``chosen`` in full."""
        shown = theme.Document("recorded", self._summary(), label="a recorded run", line=self._summary())
        shown.warn(self.note)
        shown.draw(theme.curve(self.losses, width=830))
        back = 0 if chosen < 0 else max(len(self.rounds) - 1 - chosen, 0)
        draw_waterfall(shown, self.rounds, back, self.names)
        return shown

    def html(self, chosen: int = -1) -> str:
        return self.draw(chosen).html()

    def _summary(self) -> str:
        header, losses = self.headers[-1], self.losses
        figures = f"{count(len(self.rounds), 'round')}, {count(len(self.headers), 'session')}"
        loss = f"loss {losses[0][1]:.3f} to {losses[-1][1]:.3f}" if losses else "no loss"
        return f"{plain(header.run, 40)}, recorded by {plain(header.name, 40)}, {figures}, {loss}"

    def __repr__(self) -> str:
        return f"Replay({self._summary()})"

    def __str__(self) -> str:
        return self.draw().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.draw().bundle(self._widget if self._live and len(self.rounds) > 1 else None)

    @cached_property
    def _widget(self) -> Any:
        import ipywidgets

        last, view = len(self.rounds) - 1, ipywidgets.HTML(self.html())
        slider = ipywidgets.IntSlider(last, 0, last, description="round", continuous_update=False)
        slider.observe(lambda change: setattr(view, "value", self.html(change["new"])), names="value")
        return ipywidgets.VBox([slider, view])


def replay(path: str | Path, *, live: bool | None = None) -> Replay:
    """Read a run that ``swarm.record(path)`` recorded; needs no swarm.

    Its ``events``, ``rounds`` and ``losses``, as (step, loss), are lists. Lines torn by a kill are
    left out; its ``note`` says so. Another file is a ValueError. ``live=None`` detects widgets.
    """
    return Replay(Path(path), has_frontend() if live is None else live)
