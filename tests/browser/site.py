"""A page's server on a thread of its own, and what a browser makes of the page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")


class Server(Protocol):
    url: str

    async def close(self) -> None: ...


class Site(Generic[S]):
    """Serves ``shown``, which a test may change.

    Args:
        shown: what is shown at first.
        start: makes a server that reads what it shows by calling its argument, and starts it.
    """

    def __init__(self, shown: S, start: Callable[[Callable[[], S]], Awaitable[Server]]) -> None:
        self.shown = shown
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server: Server = self._call(start(lambda: self.shown))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._call(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
