"""Accepts links: an HTTP server that upgrades every request to a WebSocket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import ClientError, web

from colab_swarm.errors import PeerError
from colab_swarm.net.handshake import Greeter
from colab_swarm.net.websocket import WebSocket, accept

CONNECTING_S = 1.0
TICKET = b"colab_swarm circuit "
"""How a connection to a relay begins that is half of a circuit."""
NO_BROWSER = "This is a peer of a colab_swarm run; it speaks WebSocket to other peers.\n"


class _Refused(asyncio.Protocol):
    """Hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class Listener:
    """Listens until `close`.

    Args:
        greet: makes the greeter of a new connection; raises `PeerError` to refuse it.
        scratch: memory to receive into.
        timeout_s: for a connection to become a link; it is aborted afterwards.
        max_fresh: connections that have not become a link; more are refused.

    Attributes:
        on_ticket: takes connections whose first message begins with `TICKET`; None where nothing is relayed.
    """

    def __init__(
        self,
        greet: Callable[[web.BaseRequest], Greeter],
        *,
        scratch: memoryview,
        timeout_s: float,
        max_fresh: int,
    ) -> None:
        self._greet, self._scratch, self._timeout_s, self._max_fresh = greet, scratch, timeout_s, max_fresh
        self._loop = asyncio.get_running_loop()
        self._http = web.Server(self._upgrade, access_log=None)
        self._server: asyncio.Server | None = None
        self._fresh: dict[Any, float] = {}
        self._greeting = 0
        self.on_ticket: Callable[[bytes, WebSocket], None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, for an empty host on every interface; returns the port.

        Raises:
            OSError: the port is taken.
        """
        if host == "" and socket.has_dualstack_ipv6():
            both = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            self._server = await self._loop.create_server(self._on_connection, sock=both)
        else:
            self._server = await self._loop.create_server(self._on_connection, host or "0.0.0.0", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, drop connections that have not become links."""
        if self._server is not None:
            self._server.close()
        for connection in self._fresh:
            self._hang_up(connection)
        await self._http.shutdown(timeout=1.0)

    def _on_connection(self) -> asyncio.BaseProtocol:
        now = self._loop.time()
        self._fresh = {one: at for one, at in self._fresh.items() if self._is_fresh(one, at, now)}
        if len(self._fresh) >= self._max_fresh:
            return _Refused()
        connection = self._http()
        self._fresh[connection] = now
        self._loop.call_later(self._timeout_s, self._hang_up, connection)
        return connection

    def _is_fresh(self, connection: Any, since: float, now: float) -> bool:
        """Whether it is still aiohttp's; one without a transport is about to connect, or gone."""
        if connection.transport is None:
            return now - since < CONNECTING_S
        return connection.transport.get_protocol() is connection

    def _hang_up(self, connection: Any) -> None:
        """Abort a connection that sent no full request in time."""
        if connection.transport is not None and connection.transport.get_protocol() is connection:
            connection.transport.abort()

    async def _upgrade(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return web.Response(text=NO_BROWSER, status=426)
        try:
            greeter = self._greet(request)
        except PeerError as error:
            return web.Response(status=503, reason=str(error))
        try:
            async with asyncio.timeout(self._timeout_s):
                websocket, first, response = await accept(request, scratch=self._scratch, receiver=greeter)
        except (PeerError, TimeoutError, ClientError):  # ClientError: it hung up again
            raise web.HTTPBadRequest(text=NO_BROWSER) from None
        if self.on_ticket is not None and first.startswith(TICKET):
            self.on_ticket(first, websocket)  # at once: what comes next is not for the greeter
        else:
            await self._shake_hands(greeter, websocket, first)
        await websocket.wait_closed()
        return response

    async def _shake_hands(self, greeter: Greeter, websocket: WebSocket, first: bytes) -> None:
        if self._greeting >= self._max_fresh:
            websocket.close("too many handshakes at once")
            return
        self._greeting += 1
        greeter.use(websocket, start=False)
        greeter.on_message(memoryview(first))
        try:
            async with asyncio.timeout(self._timeout_s):
                await greeter.link
        except (PeerError, TimeoutError) as error:
            websocket.close(str(error) or "the handshake stalled")
        finally:
            self._greeting -= 1
