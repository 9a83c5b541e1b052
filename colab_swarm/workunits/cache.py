"""Subsets of data on a volunteer's disk, so that each is fetched once; bounded, the least recently used goes first.

A file is named by the SHA-256 of what it holds, which is checked whenever it is read: a garbled one is as good as none.
Its time of modification tells when it was last used. Several volunteers may share the folder.
"""

from __future__ import annotations

import logging
import os
import tempfile
from hashlib import sha256
from pathlib import Path

from colab_swarm.workunits.messages import MAX_HELD

logger = logging.getLogger(__name__)
SUFFIX, PARTIAL = ".subset", ".partial"


class SubsetCache:
    """Files by their SHA-256, in hex.

    Args:
        folder: made at the first `put`.
        max_bytes: of all files together.

    Attributes:
        hits, misses: what was asked for and was here, and was not.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self.hits = self.misses = 0

    def get(self, digest: str) -> bytes | None:
        """What was put, if it is still there and sound."""
        found = self._read(digest)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def _read(self, digest: str) -> bytes | None:
        path = self._folder / (digest + SUFFIX)
        try:
            data = path.read_bytes()
            if sha256(data).hexdigest() == digest:
                os.utime(path)
                return data
            logger.warning("%s is garbled and is fetched anew", path)
            path.unlink()
        except OSError:  # it went while we looked
            return None
        return None

    def put(self, digest: str, data: bytes) -> None:
        """Keep ``data``; where the disk does not let it, only a warning tells."""
        if len(data) > self._max_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(self._max_bytes - len(data))
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=PARTIAL, delete=False) as file:
                file.write(data)
            os.replace(file.name, self._folder / (digest + SUFFIX))
        except OSError as error:
            logger.warning("cannot keep %s bytes of data in %s: %s", f"{len(data):,}", self._folder, error)

    def held(self) -> tuple[str, ...]:
        """What is here, last used first; as many as fit in a message."""
        return tuple(path.stem for _, _, path in reversed(self._files()) if path.suffix == SUFFIX)[:MAX_HELD]

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of use, size in bytes and path, oldest first; with what a killed process left half written."""
        found = []
        for path in [*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(f"*{PARTIAL}")]:
            try:
                stat = path.stat()
            except OSError:  # another volunteer made room
                continue
            found.append((stat.st_mtime, stat.st_size, path))
        return sorted(found)

    def _make_room(self, max_bytes: int) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
