"""Takes results in pieces: each is kept as it comes, the last one has the whole looked at."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from colab_swarm.errors import StoreError
from colab_swarm.net.peers import PeerId
from colab_swarm.workunits.coordination import Coordination, Refused
from colab_swarm.workunits.messages import Taken

NUMBER = "(0|[1-9][0-9]{0,17})"

RANGE = re.compile(rf"bytes={NUMBER}-{NUMBER}?")

CONTENT_RANGE = re.compile(rf"bytes {NUMBER}-{NUMBER}/{NUMBER}")


def range_of(header: str, size: int) -> tuple[int, int]:
    """Begin and end of the part of a file that a ``Range`` asks for.

    Args:
        header: its value.
        size: of the file, in bytes.

    Raises:
        ValueError: there is no such part.
    """
    found = RANGE.fullmatch(header)
    start = int(found[1]) if found else size
    end = min(int(found[2]) + 1, size) if found and found[2] else size
    if start >= end:
        raise ValueError(
            f"no such range: the file has {size:,} bytes; ask for one range such as bytes=0-1023"
        )
    return start, end


def piece_of(header: str) -> tuple[int, int, int]:
    """Where a piece of an upload begins, how long it is, and how long the whole is, by its ``Content-Range``.

    Args:
        header: its value.

    Raises:
        ValueError: it is no piece of anything.
    """
    found = CONTENT_RANGE.fullmatch(header)
    start, last, whole = (int(number) for number in found.groups()) if found else (0, 0, 0)
    if not start <= last < whole:
        raise ValueError("Content-Range is missing or garbled: send one such as bytes 0-1023/4096")
    return start, last + 1 - start, whole


class Gap(Exception):
    """A piece does not go on where the upload ends. ``received``: bytes that are here."""

    def __init__(self, received: int) -> None:
        super().__init__(f"{received:,} bytes of this upload are here: send what follows")
        self.received = received


class UploadBuffer:
    """A file per upload, in a folder of its own; each is ``size_bytes`` long when it is whole.

    A whole file lasts only while it is looked at: one that is found at the start was cut short by the death of the
    process, and is asked for again.
    """

    def __init__(self, folder: Path, *, size_bytes: int) -> None:
        self._folder, self.size_bytes = folder, size_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.stat().st_size >= size_bytes:
                file.unlink()

    def received(self, assignment: str) -> int:
        """Bytes of an upload that are here."""
        try:
            return self._file(assignment).stat().st_size
        except FileNotFoundError:
            return 0

    def add(self, assignment: str, start: int, piece: bytes) -> int:
        """Keep a piece that begins at ``start``; returns how many bytes are here now.

        Raises:
            Gap: the bytes that are here end elsewhere; nothing is changed.
            ValueError: the piece goes on beyond the end; nothing is changed.
        """
        received = self.received(assignment)
        if start != received:
            raise Gap(received)
        if start + len(piece) > self.size_bytes:
            raise ValueError(f"{start + len(piece):,} bytes: a result has {self.size_bytes:,}")
        with self._file(assignment).open("ab") as file:
            file.write(piece)
        return start + len(piece)

    def read(self, assignment: str) -> bytes:
        """What is here."""
        return self._file(assignment).read_bytes()

    def cut(self, assignment: str, received: int) -> None:
        """Forget all beyond ``received`` bytes."""
        with suppress(FileNotFoundError):  # swept meanwhile
            os.truncate(self._file(assignment), received)

    def drop(self, assignment: str) -> None:
        """Forget an upload."""
        self._file(assignment).unlink(missing_ok=True)

    def sweep(self, awaited: Callable[[str], bool]) -> None:
        """Forget all uploads but those of assignments that are ``awaited``."""
        for file in self._folder.iterdir():
            if not awaited(file.name):
                file.unlink(missing_ok=True)

    def _file(self, assignment: str) -> Path:
        if len(assignment) != 32 or not set(assignment) <= set("0123456789abcdef"):
            raise ValueError(f"{assignment!r} is no assignment")  # no text of a stranger becomes a path
        return self._folder / assignment


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
        self._spool = UploadBuffer(folder, size_bytes=self.size_bytes)
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
