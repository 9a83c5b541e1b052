"""Scripted faults: what goes wrong, when, and the record that it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from colab_swarm.net.peers import Message


@dataclass(frozen=True)
class FiredFault:
    """A scripted fault happened at ``at`` (virtual seconds): ``name`` is the method of `Faults`."""

    at: float
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class ComingFault:
    """A fault is to happen at ``at`` (virtual seconds)."""

    at: float
    name: str
    arguments: tuple[Any, ...]


Schedule: TypeAlias = Callable[[str, tuple[Any, ...], Callable[[], None]], object]
"""Called with a fault's name, its arguments, and what lets it happen."""


class Faults(Protocol):
    """What can go wrong in a simulated network."""

    def fire(self, name: str, *arguments: Any) -> None:
        """Let the fault ``name`` happen now and record it."""


class Script:
    """The faults, each to be fired later: ``schedule`` decides when."""

    def __init__(self, faults: Faults, schedule: Schedule) -> None:
        self._faults, self._schedule = faults, schedule

    def _later(self, name: str, *arguments: Any) -> None:
        self._schedule(name, arguments, lambda: self._faults.fire(name, *arguments))

    def crash(self, peer: str) -> None:
        """The peer's process dies: its links break, which others learn after a moment; nobody can dial it."""
        self._later("crash", peer)

    def restart(self, peer: str) -> None:
        """The crashed peer can be dialled again, with the handlers it had and no link."""
        self._later("restart", peer)

    def partition(self, *groups: set[str]) -> None:
        """Nothing passes between peers of different groups; peers in no group reach everybody."""
        self._later("partition", *groups)

    def heal(self) -> None:
        """The partition ends."""
        self._later("heal")

    def slow(self, peer: str, factor: float) -> None:
        """The peer's connection gets ``factor`` times slower than its profile, in rate and latency."""
        self._later("slow", peer, factor)

    def skew(self, peer: str, seconds: float) -> None:
        """The peer's wall clock is ``seconds`` ahead."""
        self._later("skew", peer, seconds)

    def lose(self, rate: float) -> None:
        """This share of all messages needs a retransmission."""
        self._later("lose", rate)

    def latency(self, factor: float) -> None:
        """Every message travels ``factor`` times as long as the network's profile says."""
        self._later("latency", factor)

    def bandwidth(self, factor: float) -> None:
        """Every connection carries ``factor`` times what the network's profile says."""
        self._later("bandwidth", factor)


@dataclass
class Trap:
    """A fault waiting for its ``nth`` matching message."""

    predicate: Callable[[Message], bool]
    sender: str | None
    receiver: str | None
    nth: int
    fire: Callable[[], None]

    def matches(self, message: Message, sender: str, receiver: str) -> bool:
        """Whether this message is the one waited for; counts it if it is of the kind."""
        if self.sender not in (None, sender) or self.receiver not in (None, receiver):
            return False
        if not self.predicate(message):
            return False
        self.nth -= 1
        return self.nth == 0
