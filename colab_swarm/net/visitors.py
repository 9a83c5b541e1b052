"""Limits the connections of strangers to a server, so that no network can take all of them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from colab_swarm.net.addresses import network_of

# A new connection gets its transport within this time; a connection without one after that is gone.
_CONNECT_S = 1.0


class ConnectionRoom:
    """Limits a server to about ``most`` connections.

    If there are more, the IP network that has the most connections loses one: its oldest idle connection, or its
    oldest connection if none is idle.

    Args:
        most: maximum number of connections. It may be exceeded for a moment, because the system accepts several queued
            connections together.
        counts: returns True if a connection, which has a transport, still counts towards ``most``.
    """

    def __init__(self, most: int, counts: Callable[[Any], bool] = lambda connection: True) -> None:
        self._most = most
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        # The connections, which are aiohttp's protocols, with the time of their start, the oldest first.
        self._began: dict[Any, float] = {}
        self._busy: Counter[Any] = Counter()

    @property
    def open(self) -> list[Any]:
        """The connections that have a transport, the oldest first."""
        return [connection for connection in self._began if connection.transport is not None]

    def enter(self, connection: Any) -> None:
        """Make room for a connection that is about to open."""
        now = self._loop.time()
        self._began = {
            earlier: began_at
            for earlier, began_at in self._began.items()
            if self._stays(earlier, began_at, now)
        }
        self._make_room()
        self._began[connection] = now

    @contextmanager
    def busy(self, connection: Any) -> Iterator[None]:
        """Count the connection as busy within the ``with`` block, so that idle ones are closed before it."""
        self._busy[connection] += 1
        try:
            yield
        finally:
            self._busy[connection] -= 1
            # removes entries that are 0
            self._busy += Counter()

    def _stays(self, connection: Any, began_at: float, now: float) -> bool:
        if connection.transport is None:
            return now - began_at < _CONNECT_S
        return self._counts(connection)

    def _make_room(self) -> None:
        networks: dict[Any, str] = {}
        for connection in self.open:
            end = connection.transport.get_extra_info("peername")
            if end:
                networks[connection] = network_of(end[0])
        # More than one connection may be too many, because several may have opened since the last count.
        while len(networks) >= self._most:
            fullest, _ = Counter(networks.values()).most_common(1)[0]
            candidates = [connection for connection, network in networks.items() if network == fullest]
            idle = [connection for connection in candidates if connection not in self._busy]
            loser = (idle or candidates)[0]
            loser.transport.abort()
            del self._began[loser]
            del networks[loser]
