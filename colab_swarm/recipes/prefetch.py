"""Items made ahead by a background thread, without losing the place when their state is saved."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from colab_swarm.recipes.shards import Stopped

T = TypeVar("T")
Item = TypeVar("Item", covariant=True)
CLOSE_S = 5.0
CHECK_S = 0.2
"""A consumer wakes up so often, so that an interrupt reaches it on Windows too."""


class Resumable(Protocol[Item]):
    """An iterator that can tell where it is, and go on from there."""

    def __next__(self) -> Item: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Prefetched(Generic[T]):
    """The items of ``source``, of which up to ``depth`` are made ahead.

    An error of the source is raised once the items made before it are used up. The thread begins with the first item
    and ends with `close`, or when nobody holds this object any more.

    Args:
        source: used by one thread at a time.
        depth: items ahead, at least 1.
        stop: set by `close`, so that a source that waits for something can stop waiting.
    """

    def __init__(self, source: Resumable[T], *, depth: int, stop: threading.Event) -> None:
        self._line = _Line(source, depth, stop)
        weakref.finalize(
            self, self._line.close
        )  # at exit as well: a thread killed within pyarrow takes all along

    def __iter__(self) -> Prefetched[T]:
        return self

    def __next__(self) -> T:
        if self._line.thread is None:
            self._line.thread = threading.Thread(target=self._line.produce, name="prefetch", daemon=True)
            self._line.thread.start()
        return self._line.take()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item taken. Waits until the item being made is there."""
        with self._line.making:
            return {"source": self._line.source.state_dict(), "ahead": list(self._line.ahead)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next item is the one that was next there."""
        with self._line.making, self._line.changed:
            self._line.source.load_state_dict(state["source"])
            self._line.ahead = deque(state["ahead"])
            self._line.changed.notify_all()

    def close(self) -> None:
        """Stop the thread; waits up to `CLOSE_S` for its end. Iteration ends with the items made so far."""
        self._line.close()


class _Line(Generic[T]):
    """What both sides share; the thread holds this and not the `Prefetched`, or that would never be let go."""

    def __init__(self, source: Resumable[T], depth: int, stop: threading.Event) -> None:
        self.source, self.depth, self.stop = source, depth, stop
        self.thread: threading.Thread | None = None
        self.ahead: deque[T] = deque()
        self.error: Exception | None = None
        self.changed = threading.Condition()  # guards ahead and error
        self.making = threading.Lock()  # held while the source is in use and until its item is in ahead

    def produce(self) -> None:
        while not self.stop.is_set():
            with self.changed:
                self.changed.wait_for(lambda: len(self.ahead) < self.depth or self.stop.is_set())
            with self.making:
                if self.stop.is_set() or not self._make():
                    return

    def _make(self) -> bool:
        item, error = None, None
        try:
            item = next(self.source)
        except Stopped:
            return False
        except Exception as raised:
            error = raised  # belongs to the consumer's thread
        with self.changed:
            if error is None:
                self.ahead.append(item)  # type: ignore[arg-type]
            self.error = error
            self.changed.notify_all()
        return error is None

    def take(self) -> T:
        with self.changed:
            while not self.ahead:
                if self.error is not None:
                    raise self.error
                if self.stop.is_set():
                    raise StopIteration
                self.changed.wait(CHECK_S)
            item = self.ahead.popleft()
            self.changed.notify_all()
            return item

    def close(self) -> None:
        self.stop.set()
        with self.changed:
            self.changed.notify_all()
        if self.thread not in (None, threading.current_thread()):
            self.thread.join(CLOSE_S)
