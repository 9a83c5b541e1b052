"""The handshake over a carrier: from a fresh connection to `Introduced`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from colab_swarm.errors import PeerError, PeerLost
from colab_swarm.net.hello import Introduced, Introduction
from colab_swarm.net.link import Link
from colab_swarm.net.websocket import WebSocket


class Greeter:
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
