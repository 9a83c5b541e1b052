"""Results that arrive in pieces: the headers that name a piece, and the pieces on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NUMBER = "(0|[1-9][0-9]{0,17})"
RANGE = re.compile(rf"bytes={NUMBER}-{NUMBER}?")
CONTENT_RANGE = re.compile(rf"bytes {NUMBER}-{NUMBER}/{NUMBER}")


def range_of(header: str, size: int) -> tuple[int, int]:
    """Return start and end of the part that a ``Range`` header selects of a file of ``size`` bytes.

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
    """Return start, length and total length of an upload's piece by its ``Content-Range`` header.

    Raises:
        ValueError: the header names no piece.
    """
    found = CONTENT_RANGE.fullmatch(header)
    start, last, whole = (int(number) for number in found.groups()) if found else (0, 0, 0)
    if not start <= last < whole:
        raise ValueError("Content-Range is missing or garbled: send one such as bytes 0-1023/4096")
    return start, last + 1 - start, whole


class Gap(Exception):
    """A piece does not continue the upload. ``received``: bytes of the upload so far."""

    def __init__(self, received: int) -> None:
        super().__init__(f"{received:,} bytes of this upload are here: send what follows")
        self.received = received


class UploadBuffer:
    """One file per upload in ``folder``; a complete one has ``size_bytes``.

    A complete file exists only while its result is checked. One found at the start was cut short by the death of the
    process and is deleted, so the volunteer sends it again.
    """

    def __init__(self, folder: Path, *, size_bytes: int) -> None:
        self._folder, self.size_bytes = folder, size_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.stat().st_size >= size_bytes:
                file.unlink()

    def received(self, assignment: str) -> int:
        """Return the bytes of an upload received so far."""
        try:
            return self._file(assignment).stat().st_size
        except FileNotFoundError:
            return 0

    def add(self, assignment: str, start: int, piece: bytes) -> int:
        """Append a piece that starts at ``start`` and return the bytes received so far.

        Raises:
            Gap: the upload ends elsewhere; nothing is changed.
            ValueError: the piece continues beyond the end; nothing is changed.
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
        """Return the bytes of an upload."""
        return self._file(assignment).read_bytes()

    def cut(self, assignment: str, received: int) -> None:
        """Delete all beyond ``received`` bytes."""
        with suppress(FileNotFoundError):  # swept meanwhile
            os.truncate(self._file(assignment), received)

    def drop(self, assignment: str) -> None:
        """Delete an upload."""
        self._file(assignment).unlink(missing_ok=True)

    def sweep(self, awaited: Callable[[str], bool]) -> None:
        """Delete all uploads but those of assignments that are ``awaited``."""
        for file in self._folder.iterdir():
            if not awaited(file.name):
                file.unlink(missing_ok=True)

    def _file(self, assignment: str) -> Path:
        if len(assignment) != 32 or not set(assignment) <= set("0123456789abcdef"):
            raise ValueError(f"{assignment!r} is no assignment")  # no text of a stranger becomes a path
        return self._folder / assignment
