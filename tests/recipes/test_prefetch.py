from __future__ import annotations

import gc
import threading
import weakref
from itertools import islice
from typing import Any

import pytest

from colab_swarm.recipes.streaming import Prefetched, Stopped

TIMEOUT_S = 20


class Counter:
    """Numbers from 0; raises at ``fail_at``; holds at ``hold_at`` until it is stopped."""

    def __init__(self, *, fail_at: int = -1, hold_at: int = -1, stop: threading.Event | None = None) -> None:
        self.next, self.fail_at, self.hold_at, self.stop = 0, fail_at, hold_at, stop
        self.made = threading.Condition()

    def __next__(self) -> int:
        if self.next == self.fail_at:
            raise OSError("no more numbers")
        if self.next == self.hold_at and self.stop is not None and self.stop.wait(TIMEOUT_S):
            raise Stopped
        with self.made:
            self.next += 1
            self.made.notify_all()
        return self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def wait_made(self, count: int) -> bool:
        with self.made:
            return self.made.wait_for(lambda: self.next >= count, TIMEOUT_S)


def ahead(source: Counter, depth: int = 4) -> Prefetched[int]:
    return Prefetched(source, depth=depth, stop=source.stop or threading.Event())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_items_come_in_order_and_at_most_depth_are_made_ahead() -> None:
    source = Counter()
    items = ahead(source, depth=3)
    assert list(islice(items, 50)) == list(range(50))
    assert source.wait_made(53)
    items.close()
    assert source.next <= 54


def test_a_state_is_that_of_the_consumer_not_of_the_thread() -> None:
    source = Counter()
    items = ahead(source)
    assert list(islice(items, 10)) == list(range(10))
    assert source.wait_made(13)
    state = items.state_dict()
    again = ahead(Counter())
    again.load_state_dict(state)
    assert list(islice(again, 20)) == list(islice(items, 20)) == list(range(10, 30))
    for each in (items, again):
        each.close()


def test_an_error_comes_after_the_items_made_before_it() -> None:
    items = ahead(Counter(fail_at=3))
    assert list(islice(items, 3)) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="no more numbers"):
            next(items)


def test_closing_ends_the_thread_even_while_the_source_waits() -> None:
    source = Counter(hold_at=2, stop=threading.Event())
    items = ahead(source)
    assert list(islice(items, 2)) == [0, 1]
    items.close()
    assert list(items) == []
    assert not threads()


def test_collecting_the_iterator_ends_the_thread() -> None:
    items = ahead(Counter())
    next(items)
    (thread,) = threads()
    gone = weakref.ref(items)
    del items
    gc.collect()
    thread.join(TIMEOUT_S)
    assert gone() is None
    assert not thread.is_alive()
