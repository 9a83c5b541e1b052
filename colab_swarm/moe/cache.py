"""A cache of what must be read from afar: reads are shared, and repeated before their result is too old."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class _Entry(Generic[V]):
    value: V
    aging_at: float
    until: float


class Cache(Generic[K, V]):
    """Values by key, each good for a while.

    Args:
        load: ``await load(key, old, anew)`` reads the value of a key and says for how many seconds it is good;
            ``old`` is the value held before, if any, ``anew`` as in `get`.

    Attributes:
        loads: reads begun so far.
    """

    def __init__(self, load: Callable[[K, V | None, bool], Awaitable[tuple[V, float]]]) -> None:
        self._load = load
        self._entries: dict[K, _Entry[V]] = {}
        self._loads: dict[K, asyncio.Task[V]] = {}
        self._loop = asyncio.get_running_loop()
        self.loads = 0

    def peek(self, key: K) -> V | None:
        """What is held, None if nothing is or it is too old; past half its life it is read anew meanwhile."""
        entry, now = self._entries.get(key), self._loop.time()
        if entry is None or entry.until <= now:
            return None
        if entry.aging_at <= now:
            self._begin(key)
        return entry.value

    async def get(self, keys: Iterable[K], *, anew: bool = False) -> dict[K, V]:
        """The values of all keys, read at once where they must be; ``anew``: by reads that begin now."""
        values: dict[K, V] = {}
        reads: dict[K, asyncio.Task[V]] = {}
        for key in keys:
            held = None if anew else self.peek(key)
            if held is None:
                reads[key] = self._begin(key, anew=anew)
            else:
                values[key] = held
        # a waiter that is cancelled must not end the read for the others
        for key, value in zip(reads, await asyncio.gather(*map(asyncio.shield, reads.values())), strict=True):
            values[key] = value
        return values

    def forget(self, key: K) -> None:
        """What is held under a key is out of date."""
        self._entries.pop(key, None)

    async def close(self) -> None:
        """End the reads that are under way."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    def _begin(self, key: K, *, anew: bool = False) -> asyncio.Task[V]:
        if anew or key not in self._loads:
            self.loads += 1
            load = self._loads[key] = self._loop.create_task(self._read(key, anew))
            load.add_done_callback(lambda done: self._ended(key, done))
        return self._loads[key]

    async def _read(self, key: K, anew: bool) -> V:
        entry = self._entries.get(key)
        value, good_s = await self._load(key, entry.value if entry else None, anew)
        now = self._loop.time()
        self._entries.pop(key, None)
        self._entries[key] = _Entry(value, now + good_s / 2, now + good_s)
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        return value

    def _ended(self, key: K, load: asyncio.Task[V]) -> None:
        if self._loads.get(key) is load:
            del self._loads[key]
