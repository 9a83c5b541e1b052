"""What each member of a round did when, as one member saw it: what the panel's waterfall draws. Pure.

A few numbers per member, whatever the length of the vector: first and last time of each kind of traffic, and the first
reason why something of the member is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from colab_swarm.averaging.group import Group
from colab_swarm.events import MemberTrace
from colab_swarm.net.peers import short

MAX_REASON_CHARS = 200
_hex = lru_cache(1000)(bytes.hex)  # logs keep many rounds of the same peers: one text each


class Times:
    """From when until when something happened."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0

    def at(self, now: float) -> None:
        """It happens now."""
        if self.first is None:
            self.first = now
        self.last = now

    def since(self, began_at: float) -> tuple[float, float] | None:
        """Begin and end, counted from ``began_at``; None if it never happened."""
        return None if self.first is None else (self.first - began_at, self.last - began_at)


class Trace:
    """One round's members, by their place in the group.

    Attributes:
        sent: per member: this peer sends it its span.
        received: its contribution to this peer's own span comes.
        means: its means come; this peer's own: they are finished.
    """

    def __init__(self, group: Group, *, now: float) -> None:
        count = range(len(group.members))
        self._group, self._began_at = group, now
        self.sent, self.received, self.means = ([Times() for _ in count] for _ in range(3))
        self._dropped: dict[int, str] = {}
        self._left_out: dict[int, str] = {}

    def on_dropped(self, member: int, reason: str) -> None:
        """Something of the member is missing; the first reason is the one that tells."""
        self._dropped.setdefault(member, reason[:MAX_REASON_CHARS])

    def on_missing(self, members: Iterable[int], where: int) -> None:
        """The means of the reducer at ``where`` lack these members; why, that reducer knows."""
        reducer = short(self._group.members[where].id)
        for member in members:
            self._left_out.setdefault(member, f"left out by {reducer}, which got not all of its contribution")

    def members(self) -> tuple[MemberTrace, ...]:
        """The record, in member order."""
        total = sum(member.share for member in self._group.members) or 1.0
        return tuple(
            MemberTrace(
                peer=_hex(member.id),
                weight=member.weight,
                share=member.share / total,
                sent=self.sent[index].since(self._began_at),
                received=self.received[index].since(self._began_at),
                means=self.means[index].since(self._began_at),
                dropped=self._dropped.get(index) or self._left_out.get(index, ""),
            )
            for index, member in enumerate(self._group.members)
        )
