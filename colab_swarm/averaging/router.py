"""Routes the messages that arrive at a peer to its collaborations, by the prefix that each message contains."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from colab_swarm.averaging.group import MAX_TEXT
from colab_swarm.errors import require
from colab_swarm.events import EventLog
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Refusal, Role, Stream

_Handler: TypeAlias = Callable[..., Awaitable[Any]]


class PrefixRouter:
    """Routes the messages that arrive at a peer to its collaborations, by each message's field ``prefix``."""

    def __init__(self, peers: Node, events: EventLog | None = None) -> None:
        self.peers = peers
        self.events = events or EventLog()
        self._handlers: dict[type[Message], dict[str, _Handler]] = {}
        self.assistant: tuple[Callable[[str], None], Callable[[str], None]] | None = None

    def serve(
        self,
        prefix: str,
        kind: type[Message],
        handler: Callable[[PeerId, Any], Awaitable[Message]],
        role: Role,
    ) -> None:
        """Answer calls of this ``kind`` to ``prefix``; the ``role`` of the first handler of a kind counts for all."""

        async def answer(peer: PeerId, message: Any) -> Any:
            return await self._find(kind, message.prefix)(peer, message)

        if self._register(prefix, kind, handler):
            self.peers.serve(kind, answer, role=role)

    def serve_stream(
        self, prefix: str, kind: type[Message], handler: Callable[[Any, Stream], Awaitable[None]], role: Role
    ) -> None:
        """Like `serve`, for streams that open with ``kind``."""

        async def converse(opening: Any, stream: Stream) -> None:
            await self._find(kind, opening.prefix)(opening, stream)

        if self._register(prefix, kind, handler):
            self.peers.serve_stream(kind, converse, role=role)

    def unserve(self, prefix: str, *kinds: type[Message]) -> None:
        for kind in kinds:
            handlers = self._handlers.get(kind, {})
            handlers.pop(prefix, None)
            if not handlers and self._handlers.pop(kind, None) is not None:
                self.peers.unserve(kind)

    def assist(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """Register an assistant for the collaborations that this peer does not serve itself.

        If a message for another collaboration arrives, the router calls ``enter(prefix)``; the assistant may then serve
        the collaboration. When this peer begins to serve that collaboration itself, the router calls ``leave(prefix)``.
        Raises ValueError if there is an assistant already.
        """
        require(self.assistant is None, "this peer assists already: stop() that first")
        self.assistant = enter, leave

    def _register(self, prefix: str, kind: type[Message], handler: _Handler) -> bool:
        if self.assistant is not None and prefix in self._handlers.get(kind, {}):
            self.assistant[1](prefix)
        handlers = self._handlers.setdefault(kind, {})
        text = f"prefix {prefix[:40]!r}… is over {MAX_TEXT} characters: take a shorter one"
        require(len(prefix) <= MAX_TEXT, text)
        require(prefix not in handlers, f"this peer takes part in {prefix!r} already: close that first")
        handlers[prefix] = handler
        return len(handlers) == 1

    def _find(self, kind: type[Message], prefix: str) -> _Handler:
        if self.assistant is not None and prefix not in self._handlers.get(kind, {}):
            self.assistant[0](prefix)
        if (handler := self._handlers.get(kind, {}).get(prefix)) is None:
            raise Refusal(f"this peer takes no part in {prefix[:80]!r}")
        return handler
