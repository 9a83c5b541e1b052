"""Write a file whole or not at all, and find the newest of several checkpoints. Does not import torch."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from colab_swarm.errors import StateError, require

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ASIDE = ".aside"
_CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def cache_folder() -> Path:
    """Return this user's cache folder: its files can be downloaded or computed again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colab_swarm"


def write_file(
    path: Path,
    parts: Iterable[bytes | bytearray | memoryview],
    *,
    sync: bool = False,
    private: bool = False,
) -> None:
    """Write a file under another name, then rename it; make the folder if it is missing.

    Args:
        path: of the file.
        parts: its contents, one after another.
        sync: whether the file must survive a power cut.
        private: whether only the owner of the file may read it.

    Raises:
        StateError: the disk refuses the file. An earlier file stays as it is, and no partial file remains.
    """
    partial = path.with_name(path.name + ".partial")
    mode = 0o600 if private else 0o666

    def partial_opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a file that a killed process left, or a link to another file that an attacker with write access made
        partial.unlink(missing_ok=True)
        with open(partial, "xb", opener=partial_opener) as file:
            file.writelines(parts)
            if sync:
                file.flush()
                sync_through(file.fileno())
        os.replace(partial, path)
        if sync and os.name == "posix":  # Windows has no such call
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                sync_through(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}; free some space or name another folder"
        raise StateError(text) from error
    finally:
        with contextlib.suppress(
            OSError
        ):  # the file was renamed, or the disk fails and the next write reports it
            partial.unlink()


def sync_through(descriptor: int) -> None:
    """Write a file or folder through to the disk, where the file system supports that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network drives and FUSE mounts have no such call; a full or failing disk says something else.
        if error.errno not in _CANNOT_SYNC:
            raise


class StepFiles:
    """The last ``keep`` >= 1 checkpoints of one run in a folder, ``step-000000000012.safetensors`` and so on.

    They are ordered by their steps, because a copy does not keep the times of files.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        require(keep >= 1, f"keep={keep}: keep at least one checkpoint")
        self.path = Path(path)
        self.keep = keep

    def file_of(self, step: int) -> Path:
        return self.path / f"step-{step:012}.safetensors"

    def paths(self) -> list[Path]:
        """Return the existing files, newest step first, readable or not."""
        return sorted(self.path.glob(f"step-{'[0-9]' * 12}.safetensors"), reverse=True)

    def newest(self, read: Callable[[Path], T]) -> T | None:
        """Return ``read(path)`` of the newest file that it can read, or None; log a warning for each unreadable one."""
        for path in self.paths():
            try:
                return read(path)
            except (StateError, OSError) as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None

    @property
    def newest_step(self) -> int:
        """The step of the newest file; 0 if there is none."""
        return max((int(path.stem.partition("-")[2]) for path in self.paths()), default=0)

    def set_aside(self, last: Path) -> None:
        """Rename the files of steps after that of ``last``, because training went back and continues from ``last``.

        The ``keep`` latest of the renamed files stay; older ones are deleted.
        """
        later = [path for path in self.paths() if path > last]
        for path in later:
            with contextlib.suppress(FileNotFoundError):  # another process that saves here was first
                os.replace(path, path.with_name(path.name + _ASIDE))
        if later:
            logger.warning("%s is the last checkpoint now: those of later steps end in %s", last, _ASIDE)
        for path in sorted(self.path.glob(f"step-*{_ASIDE}"), reverse=True)[self.keep :]:
            path.unlink(missing_ok=True)

    def prune(self, newest: Path) -> None:
        """Delete the oldest files beyond ``keep``, never ``newest``, and the partial files of killed processes."""
        stale: Iterable[Path] = [other for other in self.paths() if other != newest][self.keep - 1 :]
        for file in [*stale, *self.path.glob("step-*.partial")]:
            file.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.paths())} of {self.keep} kept)"
