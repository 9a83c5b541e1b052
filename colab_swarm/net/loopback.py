"""A link to oneself: both ends in one process, nothing sealed, so that a peer is served like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from colab_swarm.net.carrier import Receiver
from colab_swarm.net.link import Link


class NoCipher:
    """Seals nothing."""

    overhead_bytes = 0

    def seal_into(self, plaintext: bytes, out: memoryview) -> None:
        """The same bytes."""
        out[:] = plaintext

    def open(self, ciphertext: memoryview) -> bytes:
        """The same bytes, in memory of their own."""
        return bytes(ciphertext)


class Loopback:
    """One end of a carrier in memory."""

    backlog_bytes = 0

    def __init__(self) -> None:
        self.receiver: Receiver
        self.other: Loopback
        self._loop = asyncio.get_running_loop()
        self._open = True

    def send(self, size: int, fill: Callable[[memoryview], None]) -> int:
        """Deliver in the next turn of the event loop."""
        message = memoryview(bytearray(size))
        fill(message)
        self._loop.call_soon(self.other._deliver, message)
        return size

    def close(self, reason: str = "") -> None:
        """Tell the other end after what was sent before."""
        if self._open:
            self._open = False
            self._loop.call_soon(self.other._lose, reason)

    def abort(self, reason: str = "") -> None:
        """The same as `close`."""
        self.close(reason)

    def pause_reading(self) -> None:
        """Nothing to pause: budgets do not apply to oneself."""

    def resume_reading(self) -> None:
        """Nothing to resume."""

    async def wait_closed(self) -> None:
        """Closed at once."""

    def _deliver(self, message: memoryview) -> None:
        if self._open:
            self.receiver.on_message(message)

    def _lose(self, reason: str) -> None:
        if self._open:
            self._open = False
            self.receiver.on_lost(reason)


def link_to_self(make_link: Callable[[Loopback, bool], Link]) -> tuple[Link, Link]:
    """Both ends of a link in memory; ``make_link(carrier, dialled)`` makes each, the dialled one first."""
    near, far = Loopback(), Loopback()
    near.other, far.other = far, near
    near.receiver, far.receiver = links = make_link(near, True), make_link(far, False)
    return links
