"""What an elastic optimizer tells of itself, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from colab_swarm.elastic.settings import ElasticStep


@dataclass(frozen=True)
class ElasticSnapshot:
    """One member of a group and how far it is off.

    Attributes:
        scheduler: that decides when it goes on, with its settings.
        member, members: its number, and the group's size at its start.
        steps: the latest, oldest first.
        left: whether it has left the group.
    """

    scheduler: str
    member: int
    members: int
    steps: tuple[ElasticStep, ...]
    left: bool

    @property
    def passed(self) -> bool:
        """Whether the last measured inconsistency is above its bound; see `ElasticStep.passed`."""
        return bool(self.steps) and self.steps[-1].passed
