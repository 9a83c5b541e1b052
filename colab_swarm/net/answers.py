"""A link's handlers: the calls and streams the peer began, each in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from colab_swarm.errors import PeerError
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.peers import MAX_MESSAGE_BYTES, Refusal, short
from colab_swarm.net.services import Handler, Services, Unserved
from colab_swarm.net.stream import LinkStream

if TYPE_CHECKING:
    from colab_swarm.net.link import Link

logger = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
MAX_TASKS = 2048


class Answers:
    """Runs handlers for one link. A lost link cancels call handlers; stream handlers see `PeerLost` instead.

    Args:
        link: where answers go.
        services: those for calls and those for streams.
        events: gets a `Fault` when a handler fails.
    """

    def __init__(self, link: Link, services: tuple[Services, Services], events: EventLog) -> None:
        self._link, self._events = link, events
        self._call_services, self._stream_services = services
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def on_call(self, id: int, opening: memoryview) -> None:
        """The peer calls."""
        try:
            self._require_room()
            handler, message = self._call_services.find(opening, self._link.remote.role)
        except Unserved as error:
            self._link.mux.fail(id, error.code, str(error))
        else:
            self._calls[id] = self._start(self._answer(id, handler, message))

    def on_open(self, stream: LinkStream, opening: memoryview) -> None:
        """The peer opens a stream."""
        try:
            self._require_room()
            handler, message = self._stream_services.find(opening, self._link.remote.role)
        except Unserved as error:
            self._link.mux.reset(stream.id, error.code, str(error))
        else:
            self._link.add_stream(stream)
            self._start(self._converse(stream, handler, message))

    def cancel(self, id: int) -> None:
        """The peer no longer wants the answer."""
        self._calls.pop(id).cancel()

    def on_lost(self) -> None:
        """There is nobody left to answer."""
        for task in self._calls.values():
            task.cancel()

    def _require_room(self) -> None:
        """What the peer gave up it may begin anew, while the handler of the old still runs."""
        if len(self.tasks) >= MAX_TASKS:
            raise Unserved("busy", f"{len(self.tasks)} handlers still run for this link")

    def _start(self, handling: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._link.touch()
        task = asyncio.get_running_loop().create_task(handling)
        self.tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._link.flush_soon()
        self._link.close_if_done()

    async def _answer(self, id: int, handler: Handler, message: Any) -> None:
        mux, peer = self._link.mux, self._link.peer
        try:
            body = _encoder.encode(await handler(peer, message))
            if len(body) > MAX_MESSAGE_BYTES:
                raise ValueError(f"a reply of {len(body)} bytes is over {MAX_MESSAGE_BYTES}")
            mux.reply(id, body)
        except Refusal as error:
            mux.fail(id, "refused", str(error))
        except asyncio.CancelledError:
            mux.fail(id, "failed", "the handler was cancelled")
            raise
        except Exception as error:
            self._report("call handler", error)
            mux.fail(id, "failed", f"{type(error).__name__}: {error}")
        finally:
            self._calls.pop(id, None)

    async def _converse(self, stream: LinkStream, handler: Handler, message: Any) -> None:
        try:
            await handler(message, stream)
            stream.leave()
        except Refusal as error:
            self._link.reset_stream(stream.id, "refused", str(error))
        except asyncio.CancelledError:
            stream.reset("the handler was cancelled")
            raise
        except PeerError as error:
            logger.debug("stream with %s ended early: %s", short(stream.peer), error)
            stream.reset(str(error))
        except Exception as error:
            self._report("stream handler", error)
            self._link.reset_stream(stream.id, "failed", f"{type(error).__name__}: {error}")

    def _report(self, where: str, error: Exception) -> None:
        logger.exception("%s failed, serving %s", where, short(self._link.peer))
        at = asyncio.get_running_loop().time()
        self._events.emit(Fault(at, where, f"{type(error).__name__}: {error}"))
