"""A child process must not outlive this one, however this one ends: a killed kernel runs no exit hooks."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

_WATCH = """
import os, sys
if not sys.stdin.buffer.read(1):  # the pipe closed without a word: its owner is dead
    os.kill(int(sys.argv[1]), 9)
"""


class Guardian:
    """Kills process ``pid`` when this process dies.

    It is a process of its own that waits for the end of a pipe from here, in a session of its own, so that
    what kills a notebook's process group or interrupts it does not reach it.
    """

    def __init__(self, pid: int) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Watch no more. Call it when the process has ended, before the system gives its number to another."""
        if self._watcher.returncode is None:
            with suppress(OSError):  # the watcher was killed
                self._watcher.communicate(b".")
