"""One process at a time in a peer's folder: two peers with one key would push each other out of the swarm.

The folder may lie on a network drive, where file locks mean nothing to other machines. So a file says which process of
which machine has it, and when it last gave a sign of life. A process that was killed leaves the file behind: on its
own machine that is seen at once, elsewhere once the signs have stopped for a while.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from colab_swarm.errors import StateError

STALE_S = 180.0
"""Three missed signs of life."""
SETTLE_S = 0.1
"""How long several processes that find the folder left behind at the same moment may take to settle who has it."""


class Occupant(msgspec.Struct, frozen=True):
    """A process that has the folder.

    Attributes:
        host, pid: which one.
        began: when, in the machine's own count; tells it from a later process with its number.
        at: its last sign of life, seconds since the epoch.
    """

    host: str
    pid: int
    began: str
    at: float

    @classmethod
    def here(cls) -> Occupant:
        """This process, now."""
        return cls(socket.gethostname(), os.getpid(), _began(os.getpid()), time.time())

    def holds_against(self, other: Occupant) -> bool:
        """Whether it lives and is not ``other``, as far as can be told from where ``other`` runs."""
        if (self.host, self.pid, self.began) == (other.host, other.pid, other.began):
            return False
        if self.host == other.host and self.began:
            return _began(self.pid) == self.began
        return other.at - self.at < STALE_S


class FolderLock:
    """Taken by `take`, until `release`; `refresh` gives a sign of life."""

    _here: ClassVar[set[Path]] = set()  # those of this process

    def __init__(self, folder: Path) -> None:
        self._path = folder / "in-use.json"

    def take(self) -> None:
        """Have the folder for this process.

        Raises:
            StateError: another process has it.
        """
        if self._path in self._here:
            raise StateError(f"{self._path.parent} is in use by a swarm of this process: leave it first")
        while not self._create():
            self._require_free()
            self._path.unlink(missing_ok=True)
        time.sleep(
            SETTLE_S
        )  # others may have found it left behind too, and taken this one's away: the last one stands
        self._require_free()
        self._here.add(self._path)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(Occupant.here()))
        return True

    def refresh(self) -> None:
        """Give a sign of life.

        Raises:
            StateError: another process took the folder, for this one gave none for too long.
        """
        self._require_free()
        write_aside(self._path, msgspec.json.encode(Occupant.here()))

    def release(self) -> None:
        """Leave the folder to others. Idempotent."""
        self._here.discard(self._path)
        with contextlib.suppress(OSError, StateError):
            self._require_free()
            self._path.unlink(missing_ok=True)

    def _require_free(self) -> None:
        try:
            other = msgspec.json.decode(self._path.read_bytes(), type=Occupant)
        except (FileNotFoundError, msgspec.MsgspecError):  # garbled: killed while it wrote
            return
        here = Occupant.here()
        if other.holds_against(here):
            raise StateError(
                f"{self._path.parent} is in use by process {other.pid} on {other.host}, whose last sign of life is "
                f"{max(0.0, here.at - other.at):.0f} s old: leave the swarm there, or shut that kernel down. If it is "
                f"gone already, try again in {STALE_S / 60:.0f} minutes, or delete {self._path.name} there"
            )


def write_aside(path: Path, data: bytes) -> None:
    """Write a file for its owner's eyes, whole or not at all."""
    aside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _began(pid: int) -> str:
    """When a living process of this machine began, or that it lives at all; empty if not, or no telling (Windows)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        if os.name != "posix" or Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)  # macOS: asks whether it is there
    except ProcessLookupError:
        return ""
    except PermissionError:  # it is, and somebody else's
        pass
    return "lives"
