"""The handshake over a carrier: from a fresh connection to `Introduced`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
from aiohttp import ClientError, web

from colab_swarm.errors import PeerError, PeerLost, PeerUnreachable, WrongPeer
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.hello import Introduced, Introduction
from colab_swarm.net.link import Link
from colab_swarm.net.peers import Contact, short
from colab_swarm.net.websocket import WebSocket, accept


class HandshakeProtocol:
    """Receives for a connection until the peer is introduced; then ``make_link`` makes what receives.

    The link has to be there before the next message, which may lie in the same buffer as the last of the
    handshake; so all this happens within `on_message`.

    Args:
        introduction: this end of the handshake.
        wall_clock: seconds since the epoch.
        make_link: called with the carrier, what the peer said and the measured round trip (seconds); sends
            nothing yet. If it raises a `PeerError`, the other end learns no more.
    """

    def __init__(
        self,
        introduction: Introduction,
        *,
        wall_clock: Callable[[], float],
        make_link: Callable[[WebSocket, Introduced, float], Link],
    ) -> None:
        self._introduction, self._wall_clock, self._make_link = introduction, wall_clock, make_link
        self._loop = asyncio.get_running_loop()
        self._spoke_at = self._loop.time()
        self._carrier: WebSocket | None = None
        self.link: asyncio.Future[Link] = self._loop.create_future()

    def use(self, carrier: WebSocket, *, start: bool) -> None:
        """Speak over this carrier; ``start`` for the end that dialled."""
        self._carrier = carrier
        if start:
            self._say(self._introduction.start())

    def on_message(self, data: memoryview) -> None:
        """The other end's next message."""
        if self.link.done() or self._carrier is None:
            return
        rtt_s = self._loop.time() - self._spoke_at
        try:
            answer = self._introduction.on_message(bytes(data), wall_time=self._wall_clock())
            if self._introduction.result is not None:
                link = self._make_link(self._carrier, self._introduction.result, rtt_s)
                self._carrier.receiver = link
                self.link.set_result(link)
            if answer is not None:
                self._say(answer)
        except PeerError as error:
            self._fail(error)

    def on_writable(self, writable: bool) -> None:
        """Handshakes are short."""

    def on_lost(self, reason: str) -> None:
        """The connection is gone."""
        if not self.link.done():
            self._fail(PeerLost(reason))

    def _fail(self, error: PeerError) -> None:
        self.link.set_exception(error)
        self.link.exception()  # there may be no waiter: the connection was refused, or is a circuit's

    def _say(self, message: bytes) -> None:
        assert self._carrier is not None
        self._spoke_at = self._loop.time()
        self._carrier.send_bytes(message)


logger = logging.getLogger(__name__)

STAGGER_S = 0.25
DETOUR_AFTER_S = 1.5
"""How long addresses may take before detours are looked for, and looked for again if there are none."""
T = TypeVar("T")


async def dial_any(
    addresses: Sequence[str],
    dial: Callable[[str], Awaitable[T]],
    detours: Callable[[], Sequence[str]] = lambda: (),
) -> T:
    """What ``dial`` returns for the first address that answers; ``detours()`` are tried where these do not.

    Raises:
        PeerError: none did; the text has each address's failure. `WrongPeer` if somebody else answered.
    """
    waiting, detoured = list(addresses), False
    running: set[asyncio.Future[T]] = set()
    done: set[asyncio.Future[T]] = set()
    failures: list[PeerError] = []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(dial(waiting.pop(0))))
            done, running = await asyncio.wait(
                running, timeout=STAGGER_S if waiting else DETOUR_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                error = attempt.exception()
                if error is None:
                    return attempt.result()
                if not isinstance(error, PeerError):
                    raise error
                failures.append(error)
            if not (waiting or detoured or (done and running)):
                waiting = list(detours())
                detoured = bool(waiting)
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, *done, return_exceptions=True)  # some may have failed as one succeeded
    kind = next((type(error) for error in failures if isinstance(error, WrongPeer)), PeerUnreachable)
    raise kind("; ".join(map(str, failures)))


async def try_to_dial(
    contact: Contact,
    dial: Callable[[str], Awaitable[object]],
    detours: Callable[[], Sequence[str]],
    events: EventLog,
) -> PeerError | None:
    """Dial a peer as `dial_any` does; returns why no link came of it, if none did.

    A failure that nobody foresaw is logged and a `Fault` besides, for those who wait want an answer all the same.
    """
    try:
        if not contact.addresses:
            return PeerUnreachable(f"no address of {short(contact.id)} is known")
        await dial_any(contact.addresses, dial, detours)
    except PeerError as error:
        return error
    except Exception as error:
        fault = Fault.of(asyncio.get_running_loop().time(), f"dialling {short(contact.id)}", error)
        logger.exception("%s failed", fault.where)
        events.emit(fault)
        return PeerUnreachable(f"{fault.where} failed: {fault.text}")
    return None


async def introduce(
    connect: Callable[[], Awaitable[WebSocket]],
    greeter: HandshakeProtocol,
    *,
    timeout_s: float,
    name: str,
    start: bool = True,
) -> Link:
    """Connect and shake hands; ``start`` for the end that begins, ``name`` tells the way in error texts.

    Raises:
        PeerUnreachable: nobody answers there, or not in time.
        PeerLost: refused; the text says why.
        WrongPeer, NotAdmitted, ProtocolError: somebody else answers, or a stranger, or garbage.
    """
    websocket: WebSocket | None = None
    try:
        async with asyncio.timeout(timeout_s):
            websocket = await connect()
            greeter.use(websocket, start=start)
            return await greeter.link
    except TimeoutError:
        raise PeerUnreachable(f"{name} did not answer in {timeout_s:.3g} s") from None
    except PeerError:
        raise
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise PeerUnreachable(f"{name}: {error}") from error
    finally:
        if websocket is not None and (not greeter.link.done() or greeter.link.exception() is not None):
            websocket.abort("the handshake failed")


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
        greet: Callable[[web.BaseRequest], HandshakeProtocol],
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

    async def _shake_hands(self, greeter: HandshakeProtocol, websocket: WebSocket, first: bytes) -> None:
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
