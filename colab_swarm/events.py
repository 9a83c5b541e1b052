"""Events of a peer, as frozen records. Dashboards, panels and tests read these; log lines are for people."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

logger = logging.getLogger(__name__)
Bottleneck: TypeAlias = Literal["", "none", "upload", "download", "upload and download"]
"""The slowest transfers of a round: ``none`` if all finish together, empty if it is not known."""


@dataclass(frozen=True)
class Event:
    """Base of all events; ``at`` is the emitting peer's monotonic clock, seconds."""

    at: float


@dataclass(frozen=True)
class PeerJoined(Event):
    """A link to ``peer`` (hex id) is up."""

    peer: str


@dataclass(frozen=True)
class PeerLeft(Event):
    """The last link to ``peer`` is gone."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Waited(Event):
    """This peer waited ``seconds`` for ``peer`` to do ``what``."""

    peer: str
    what: str
    seconds: float


@dataclass(frozen=True)
class PeerRefused(Event):
    """This peer refused ``what`` that ``peer`` (hex id) sent; one event for each peer and cause while it lasts."""

    peer: str
    what: str  # with its article: "a state", "a group"
    why: str


@dataclass(frozen=True)
class ReachabilityChanged(Event):
    """The way others reach this peer changed: ``direct``, ``relayed by …`` and so on."""

    how: str


@dataclass(frozen=True, slots=True)
class MemberTrace:
    """One member of a round, as this peer saw it. Times are seconds since the averaging began; None: never."""

    peer: str  # hex id
    samples: float
    share: float  # part of the vector assigned to it as reducer, 0 to 1
    sent: tuple[float, float] | None = None  # when this peer began and ended sending to the member
    received: tuple[float, float] | None = None  # when it received the member's contribution to its own span
    means: tuple[float, float] | None = None  # when it received the average that the member computed
    dropped: str = ""  # why the member's contribution or average is missing; empty if both arrived


@dataclass(frozen=True)
class RoundFinished(Event):
    """An averaging round ended, for this peer."""

    step: int  # global step the round belongs to
    group_size: int  # members at the start of the round
    contributors: tuple[str, ...]  # hex ids whose values are in this peer's result
    samples: float  # of all contributors together
    spans_lost: int  # spans whose reducer vanished, including those that another peer then reduced
    kept_local: int  # number of values for which no average arrived
    sent_bytes: int  # payload of this round at this peer
    received_bytes: int
    seconds: float  # wall seconds from begin to result
    averaging_s: float = 0.0  # the part of ``seconds`` after the group was formed
    predicted_s: float | None = None  # ``averaging_s`` as predicted; None if no bandwidth was known
    explanation: str = ""  # a sentence why the members reduce these parts of the vector; empty if unknown
    members: tuple[MemberTrace, ...] = ()  # one trace for each member, this peer included
    bottleneck: Bottleneck = ""  # the slowest transfers, which ``explanation`` names


@dataclass(frozen=True)
class StepFinished(Event):
    """The swarm's global step advanced to ``step`` at this peer; ``loss`` is this peer's mean loss, None if unknown."""

    step: int
    samples: float
    loss: float | None


@dataclass(frozen=True)
class StateReceived(Event):
    """This peer caught up to ``step`` by downloading ``size_bytes`` from ``donors`` (hex ids)."""

    step: int
    donors: tuple[str, ...]
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class BatchDropped(Event):
    """A micro-batch or contribution was left out for ``reason``, for example a NaN gradient.

    ``told``: whether the user sees a line about it. Of many such events in a row, the user sees only a few.
    """

    reason: str
    told: bool = True


@dataclass(frozen=True)
class Notice(Event):
    """A sentence for people: on the tunnel, the membership, the clock, the session's end and the like."""

    text: str
    logged: bool = False  # whether it was also logged as a warning, which a script shows anyway


@dataclass(frozen=True)
class ExpertHosted(Event):
    """This peer now hosts expert ``uid`` at ``step``; ``taken_over``: from a checkpoint of a former host that died."""

    uid: str
    step: int
    taken_over: bool


@dataclass(frozen=True)
class ExpertBanned(Event):
    """An expert failed, and this trainer leaves it out for ``seconds``."""

    uid: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Fault(Event):
    """A fault in our own code was contained: ``where`` names the task, ``text`` the error."""

    where: str
    text: str

    @classmethod
    def of(cls, at: float, where: str, error: BaseException) -> "Fault":
        return cls(at, where, f"{type(error).__name__}: {error}")


E = TypeVar("E", bound=Event)


class EventLog:
    """The last events of one peer, and the listeners for new ones. Thread-safe."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=1000)
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Record ``event`` and call the listeners; a listener's fault is logged and contained."""
        with self._lock:
            self._events.append(event)
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("event listener failed on %s", event)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener(event)`` for each new event, on the emitting thread; return a function that stops this."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop

    def recent(self, kind: type[E] = Event) -> list[E]:  # type: ignore[assignment]
        with self._lock:
            return [event for event in self._events if isinstance(event, kind)]
