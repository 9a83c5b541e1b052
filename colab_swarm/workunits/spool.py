"""Results on their way: what has come of an upload lies on disk, so a broken line costs a piece of it at most."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Gap(Exception):
    """A piece does not go on where the upload ends. ``received``: bytes that are here."""

    def __init__(self, received: int) -> None:
        super().__init__(f"{received:,} bytes of this upload are here: send what follows")
        self.received = received


class Spool:
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
