"""Several collaborations at one peer: a message goes to the one whose prefix it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from colab_swarm.net.peers import Message, PeerId, Peers, Refusal, Role, Stream

Handler = Callable[..., Awaitable[Any]]


class Guest(Protocol):
    """Whoever serves collaborations that are not this peer's own."""

    def enter(self, prefix: str) -> None:
        """A message came for ``prefix``, and nobody serves it: begin to, if you like."""

    def leave(self, prefix: str) -> None:
        """Serve ``prefix`` no more, if you do."""


class Rooms:
    """Shares a peer's message types among its collaborations; messages have a ``prefix``.

    A kind of message is served as long as somebody serves it, with the role that its first server asked for.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._handlers: dict[type[Message], dict[str, Handler]] = {}
        self._guest: Guest | None = None

    def serve(
        self,
        prefix: str,
        kind: type[Message],
        handler: Callable[[PeerId, Any], Awaitable[Message]],
        role: Role,
    ) -> None:
        """Answer calls of ``kind`` to the collaboration ``prefix`` by peers of ``role`` or above.

        Raises:
            ValueError: another collaboration of this name is there.
        """

        async def answer(peer: PeerId, message: Any) -> Message:
            reply: Message = await self._find(kind, message.prefix)(peer, message)
            return reply

        if self._add(prefix, kind, handler):
            self.peers.serve(kind, answer, role=role)

    def serve_stream(
        self, prefix: str, kind: type[Message], handler: Callable[[Any, Stream], Awaitable[None]], role: Role
    ) -> None:
        """Run ``handler`` for streams to the collaboration ``prefix`` opened with ``kind``; like `serve`."""

        async def converse(opening: Any, stream: Stream) -> None:
            await self._find(kind, opening.prefix)(opening, stream)

        if self._add(prefix, kind, handler):
            self.peers.serve_stream(kind, converse, role=role)

    def unserve(self, prefix: str, kind: type[Message]) -> None:
        """Stop answering ``kind`` for ``prefix``."""
        handlers = self._handlers.get(kind, {})
        handlers.pop(prefix, None)
        if not handlers and self._handlers.pop(kind, None) is not None:
            self.peers.unserve(kind)

    def welcome(self, guest: Guest | None) -> None:
        """Let ``guest`` serve what nobody else serves.

        Raises:
            ValueError: there is one.
        """
        if guest is not None and self._guest is not None:
            raise ValueError("this peer assists already: stop() that first")
        self._guest = guest

    def make_room(self, prefix: str) -> None:
        """Ask the guest, if it serves ``prefix``, to leave that to its owner."""
        if self._guest is not None:
            self._guest.leave(prefix)

    def _add(self, prefix: str, kind: type[Message], handler: Handler) -> bool:
        """Returns whether ``kind`` is new here."""
        handlers = self._handlers.setdefault(kind, {})
        if prefix in handlers:
            raise ValueError(f"this peer takes part in {prefix!r} already: close that first")
        handlers[prefix] = handler
        return len(handlers) == 1

    def _find(self, kind: type[Message], prefix: str) -> Handler:
        handlers = self._handlers.get(kind, {})
        if prefix not in handlers and self._guest is not None:
            self._guest.enter(prefix)
        if prefix not in handlers:
            raise Refusal(f"this peer takes no part in {prefix[:80]!r}")
        return handlers[prefix]
