"""Several collaborations at one peer: a message goes to the one whose prefix it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from colab_swarm.net.peers import Message, PeerId, Peers, Refusal, Role, Stream

Handler = Callable[..., Awaitable[Any]]


class Rooms:
    """Shares a peer's message types among its collaborations; messages have a ``prefix``.

    A kind of message is served as long as somebody serves it, with the role that its first server asked for.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._handlers: dict[type[Message], dict[str, Handler]] = {}
        self._welcome: Callable[[str], object] | None = None

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

    def welcome(self, guest: Callable[[str], object] | None) -> None:
        """Call ``guest(prefix)``, which may begin to serve, when a prefix is named that nobody serves."""
        self._welcome = guest

    def _add(self, prefix: str, kind: type[Message], handler: Handler) -> bool:
        """Returns whether ``kind`` is new here."""
        handlers = self._handlers.setdefault(kind, {})
        if prefix in handlers:
            raise ValueError(f"this peer takes part in {prefix!r} already: close that first")
        handlers[prefix] = handler
        return len(handlers) == 1

    def _find(self, kind: type[Message], prefix: str) -> Handler:
        handlers = self._handlers.get(kind, {})
        if prefix not in handlers and self._welcome is not None:
            self._welcome(prefix)
        if prefix not in handlers:
            raise Refusal(f"this peer takes no part in {prefix[:80]!r}")
        return handlers[prefix]
