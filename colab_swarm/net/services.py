"""What a peer answers: handlers by the name of the message's class."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from colab_swarm.net.mux import Opening
from colab_swarm.net.peers import UNDECODABLE, Buffer, Message, Role
from colab_swarm.net.stream import decoder_of

Handler: TypeAlias = Callable[..., Awaitable[Any]]
_opening_decoder = msgspec.msgpack.Decoder(Opening)


@dataclass(frozen=True)
class Service:
    """A handler, the decoder of the message it takes, and the least role that it serves."""

    decoder: msgspec.msgpack.Decoder[Any]
    handler: Handler
    role: Role


class Unserved(Exception):
    """No handler can take this opening.

    Attributes:
        code: ``unknown``, ``invalid``, ``refused`` or ``busy``, as in `CallRefused`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Services:
    """Handlers by the name of the message's class."""

    def __init__(self) -> None:
        self._by_name: dict[str, Service] = {}

    def add(self, kind: type[Message], handler: Handler, role: Role) -> None:
        """Answer messages of ``kind`` by peers of ``role`` or above.

        Raises:
            ValueError: they are answered already.
        """
        if kind.__name__ in self._by_name:
            raise ValueError(f"{kind.__name__} is served already; unserve it first")
        self._by_name[kind.__name__] = Service(decoder_of(kind), handler, role)

    def remove(self, kind: type[Message]) -> None:
        """Stop answering ``kind``."""
        self._by_name.pop(kind.__name__, None)

    def find(self, encoded: memoryview, role: Role) -> tuple[Handler, Any]:
        """The handler that takes an encoded `Opening` of a peer of this role, and the decoded message in it.

        Raises:
            Unserved: nobody serves it, or not to this role, or it does not decode.
        """
        try:
            opening = _opening_decoder.decode(encoded)
        except UNDECODABLE as error:
            raise Unserved("invalid", f"undecodable message: {error}") from error
        return self.find_named(opening.name, opening.body, role)

    def find_named(self, name: str, body: Buffer, role: Role) -> tuple[Handler, Any]:
        """Like `find`, for the two parts of an opening.

        Raises:
            Unserved: see `find`.
        """
        service = self._by_name.get(name)
        if service is None:
            raise Unserved("unknown", f"{name[:100]} is not served here")
        if role < service.role:
            needed = f"{name} needs the role {service.role.name.lower()}"
            raise Unserved("refused", f"{needed}; yours is {role.name.lower()}: ask for another invitation")
        try:
            return service.handler, service.decoder.decode(body)
        except UNDECODABLE as error:
            raise Unserved("invalid", f"undecodable message: {error}") from error
