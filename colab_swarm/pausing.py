"""A gate before the work that goes on in the background: closed while the user wants the machine for something else.

There are two ways to close it: for a block of code (``with swarm.paused():``), which nests, and until further notice,
as a panel's button does. It is open when no block is under way and nobody holds it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_S = 0.2
"""How often who waits at the gate looks whether it is open."""


class Gate:
    """Any thread may close it, open it, or ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: Counter[int] = Counter()  # by thread
        self._held = False

    @property
    def closed(self) -> bool:
        """Whether background work is to stand still."""
        return self._held or bool(self._blocks)

    @property
    def closed_by_this_thread(self) -> bool:
        """Whether the calling thread is inside a block: waiting for the end of it would never end."""
        return threading.get_ident() in self._blocks

    def hold(self) -> None:
        """Close it until `release`. Idempotent."""
        self._held = True

    def release(self) -> None:
        """Take a `hold` back; blocks that are under way keep it closed. Idempotent."""
        self._held = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Closed inside the block; blocks may be nested."""
        thread = threading.get_ident()
        with self._lock:
            self._blocks[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks[thread] -= 1
                self._blocks += Counter()  # drops what is zero

    async def wait_open(self) -> None:
        """Return as soon as it is open."""
        while self.closed:
            await asyncio.sleep(LOOK_S)

    def __repr__(self) -> str:
        return f"Gate({'closed' if self.closed else 'open'})"
