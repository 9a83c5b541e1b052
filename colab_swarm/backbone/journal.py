"""Records on disk, one JSON object a line. A process killed while writing costs the last line at most."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=msgspec.Struct)


class Journal(Generic[S]):
    """The records of one file."""

    def __init__(self, path: Path, kind: type[S]) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)

    def append(self, *records: S) -> None:
        """Write records at the end; if the disk is full they are lost, with a warning."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                if file.tell() and not self._ends_with_a_line():
                    lines = b"\n" + lines
                file.write(lines)
        except OSError as error:
            logger.warning("%s could not be written: %s", self.path, error)

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"

    def read(self) -> Iterator[S]:
        """The records that can be read, oldest first."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    yield self._decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    logger.info("a line of %s is cut off", self.path)
