"""Scripted faults: what fails, when, and the record that it did."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colab_swarm.net.peers import Message


@dataclass(frozen=True)
class ScriptedFault:
    """A fault that happened, or is scheduled, at ``at`` (virtual seconds). ``name`` is a method of `Script`."""

    at: float
    name: str
    arguments: tuple[Any, ...]


class Script:
    """The faults that can be scripted; ``schedule(name, *arguments)`` decides when each one happens."""

    def __init__(self, schedule: Callable[..., object]) -> None:
        self._schedule = schedule

    def crash(self, peer: str) -> None:
        """Kill the peer's process: its links break, other peers notice after a moment, and nobody can dial it."""
        self._schedule("crash", peer)

    def restart(self, peer: str) -> None:
        """Make a crashed peer dialable again, with the handlers it had and no link."""
        self._schedule("restart", peer)

    def partition(self, *groups: set[str]) -> None:
        """Let nothing pass between peers of different groups; peers in no group reach everyone."""
        self._schedule("partition", *groups)

    def heal(self) -> None:
        """End the partition."""
        self._schedule("heal")

    def slow(self, peer: str, factor: float) -> None:
        """Make the peer's connection ``factor`` times slower than its profile, in rate and latency."""
        self._schedule("slow", peer, factor)

    def skew(self, peer: str, seconds: float) -> None:
        """Set the peer's wall clock ``seconds`` ahead."""
        self._schedule("skew", peer, seconds)

    def lose(self, rate: float) -> None:
        """Let this share of all messages need a retransmission."""
        self._schedule("lose", rate)

    def latency(self, factor: float) -> None:
        """Multiply the latency of the network's profile."""
        self._schedule("latency", factor)

    def bandwidth(self, factor: float) -> None:
        """Multiply the bandwidths of the network's profile."""
        self._schedule("bandwidth", factor)


@dataclass
class Trap:
    """A fault that waits for its ``nth`` matching message."""

    predicate: Callable[[Message], bool]
    sender: str | None
    receiver: str | None
    nth: int
    fire: Callable[[], None]

    def matches(self, message: Message, sender: str, receiver: str) -> bool:
        """Count the message if it matches; return True if it is the ``nth``."""
        if self.sender not in (None, sender) or self.receiver not in (None, receiver):
            return False
        if not self.predicate(message):
            return False
        self.nth -= 1
        return self.nth == 0
