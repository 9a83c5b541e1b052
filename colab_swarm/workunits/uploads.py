"""Takes results in pieces: each is kept as it comes, the last one has the whole looked at."""

from __future__ import annotations

import asyncio
from pathlib import Path

from colab_swarm.errors import StoreError
from colab_swarm.net.peers import PeerId
from colab_swarm.workunits.coordination import Coordination, Refused
from colab_swarm.workunits.messages import Taken
from colab_swarm.workunits.spool import Spool

LOOKED_AT = 4
"""Whole results in memory at once."""


class Uploads:
    """Uploads to one coordination; what has come of them lies in ``folder``.

    Attributes:
        size_bytes: of every result.
    """

    def __init__(self, coordination: Coordination, folder: Path) -> None:
        schema = coordination.schema
        self.size_bytes = len(schema.head()) + 4 * schema.numel
        self._coordination = coordination
        self._spool = Spool(folder, size_bytes=self.size_bytes)
        self._writing, self._looking = asyncio.Lock(), asyncio.Semaphore(LOOKED_AT)
        self._taking: set[str] = set()  # whole, and looked at just now

    def check(self, volunteer: PeerId, assignment: str) -> None:
        """Raise Refused if nothing of this result is wanted from the volunteer now."""
        if assignment in self._taking:
            raise Refused("busy", "this result is here and is being looked at: ask again in a second")
        self._coordination.check(volunteer, assignment)

    def received(self, volunteer: PeerId, assignment: str) -> int:
        """Bytes of a result that are here.

        Raises:
            Refused: it is not wanted.
        """
        self.check(volunteer, assignment)
        return self._spool.received(assignment)

    async def add(self, volunteer: PeerId, assignment: str, start: int, piece: bytes) -> Taken:
        """Take the piece of a result that begins at ``start``.

        Raises:
            Refused: the result is not wanted, or no use; the latter forgets all of it.
            Gap: another piece is missing before it.
            ValueError: the result would be too long.
            StoreError: the result cannot be kept now; the last piece may be sent again.
        """
        async with self._writing:
            self.check(volunteer, assignment)
            if not start:
                self._spool.sweep(self._coordination.awaits)
            received = await asyncio.to_thread(self._spool.add, assignment, start, piece)
            if received < self.size_bytes:
                return Taken(received)
            self._taking.add(assignment)
        try:
            async with self._looking:
                data = await asyncio.to_thread(self._spool.read, assignment)
                await self._coordination.take(volunteer, assignment, data)
        except (StoreError, asyncio.CancelledError):
            self._spool.cut(assignment, start)
            raise
        except BaseException:
            self._spool.drop(assignment)
            raise
        else:
            self._spool.drop(assignment)
        finally:
            self._taking.discard(assignment)
        return Taken(received, accepted=True)
