"""Who may link, and as what: checked once per link in the handshake, offline, and again while it stands."""

from __future__ import annotations

from typing import Protocol

from colab_swarm.errors import NotAdmitted
from colab_swarm.net.peers import Role

__all__ = ["Admission", "NotAdmitted", "OpenAdmission"]


class Admission(Protocol):
    """What this peer shows of itself, and what it asks of others."""

    @property
    def membership(self) -> bytes:
        """What this peer shows in its handshakes; empty if it has nothing to show."""

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """The role of a peer with this Ed25519 key that shows ``membership``; ``now`` is swarm time.

        Asked at each handshake and every few seconds for each link, so it remembers what it has verified.

        Raises:
            NotAdmitted: it may not link, or no longer.
        """


class OpenAdmission:
    """Everybody who knows the run is a worker."""

    membership = b""

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """A worker."""
        return Role.WORKER
