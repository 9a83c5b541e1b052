"""Child processes of benchmarks. Parent and child exchange JSON objects, one per line.

A worker is a function, plain or async, ``work(parent, *arguments)`` at the top level of a module. `Worker` starts it
in a fresh Python:

    with Worker(work, 4) as worker:
        worker.send(batch=32)
        answer = worker.receive()
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self


def python_command(function: Callable[..., object], *arguments: object) -> list[str]:
    """Return the command that runs ``function(parent, *arguments)``; arguments must be JSON values."""
    module = function.__module__
    if module == "__main__":  # the child imports the module under its own name
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
    return [sys.executable, "-m", __name__, f"{module}:{function.__name__}", json.dumps(arguments)]


class Worker:
    """A child process that is killed at the end of its ``with`` block.

    Args:
        work: a function of a module, or the words of a command.
        arguments: of the function, or more words of the command.
        grace_s: seconds that the child gets to end by itself when its input ends.
        environment: variables to set for it.
    """

    def __init__(
        self,
        work: Callable[..., object] | list[Any],
        *arguments: object,
        grace_s: float = 0.0,
        environment: Mapping[str, str] = {},
    ) -> None:
        command = (
            [*work, *map(str, arguments)] if isinstance(work, list) else python_command(work, *arguments)
        )
        self._grace_s = grace_s
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            text=True,
        )

    def send(self, **message: object) -> None:
        """Send one message."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message. Other lines, printed by libraries, are skipped.

        Raises:
            RuntimeError: the worker ended.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                message: dict[str, Any] = json.loads(line)
                return message
        raise RuntimeError(f"a worker ended: {self.process.args!r}, exit code {self.process.wait()}")

    def call(self, **message: object) -> dict[str, Any]:
        """Send a message and return the answer."""
        self.send(**message)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(self._grace_s)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Parent:
    """The worker's view of the process that started it."""

    def __init__(self) -> None:
        self._output = sys.stdout  # a worker may redirect the standard output later

    def send(self, **message: object) -> None:
        """Send one message."""
        print(json.dumps(message), file=self._output, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EOFError: there are no more; it ends the worker quietly.
        """
        if line := sys.stdin.readline():
            message: dict[str, Any] = json.loads(line)
            return message
        raise EOFError

    async def wait(self) -> dict[str, Any]:
        """Wait for the next message without blocking the event loop; see `receive`."""
        return await asyncio.to_thread(self.receive)


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    try:
        work = getattr(importlib.import_module(module), name)(Parent(), *json.loads(sys.argv[2]))
        if inspect.iscoroutine(work):
            asyncio.run(work)
    except EOFError:
        sys.exit(0)
