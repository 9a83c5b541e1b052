"""Trying a peer's addresses: the next starts when the last failed or takes long; the first success wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from colab_swarm.errors import PeerError, PeerUnreachable, WrongPeer

STAGGER_S = 0.25
T = TypeVar("T")


async def dial_any(addresses: Sequence[str], dial: Callable[[str], Awaitable[T]]) -> T:
    """What ``dial`` returns for the first address that answers.

    Raises:
        PeerError: none did; the text has each address's failure. `WrongPeer` if somebody else answered.
    """
    waiting = list(addresses)
    running: set[asyncio.Future[T]] = set()
    failures: list[PeerError] = []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(dial(waiting.pop(0))))
            done, running = await asyncio.wait(
                running, timeout=STAGGER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                error = attempt.exception()
                if error is None:
                    return attempt.result()
                if not isinstance(error, PeerError):
                    raise error
                failures.append(error)
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    kind = next((type(error) for error in failures if isinstance(error, WrongPeer)), PeerUnreachable)
    raise kind("; ".join(map(str, failures)))
