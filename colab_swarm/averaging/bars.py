"""Which organizers are passed over for a while, because they would stop the swarm: they rank the same each time."""

from __future__ import annotations

from colab_swarm.net.peers import PeerId

REFUSALS_S = 60.0
"""An honest refusal (the round runs without us) is over after a round; a step refused for longer is kept up."""
BARRED_S = 1800.0


class Bars:
    """What organizers did to this peer."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}
        self._refused: dict[PeerId, tuple[int, float]] = {}  # which step, since when

    def bar(self, peer: PeerId, *, now: float) -> None:
        """Pass the peer over for `BARRED_S`: it sent nonsense."""
        self._until[peer] = now + BARRED_S

    def barred(self, peer: PeerId, *, now: float) -> bool:
        """Whether to pass the peer over."""
        return self._until.get(peer, now) > now

    def on_refusal(self, peer: PeerId, step: int, *, now: float) -> bool:
        """The peer refused this peer a part in ``step``; True if it has done so for too long and is barred."""
        if self._refused.get(peer, (None, now))[0] != step:
            self._refused[peer] = (step, now)
        if now - self._refused[peer][1] < REFUSALS_S:
            return False
        del self._refused[peer]
        self.bar(peer, now=now)
        return True
