"""Reaching a peer: an address at a time, the next when the last failed or takes long; the first success wins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import aiohttp

from colab_swarm.errors import PeerError, PeerUnreachable, WrongPeer
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.handshake import Greeter
from colab_swarm.net.link import Link
from colab_swarm.net.peers import Contact, short
from colab_swarm.net.websocket import WebSocket

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
    greeter: Greeter,
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
