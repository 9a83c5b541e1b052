"""Measured samples per second: the samples of the last rounds, divided by the time between these rounds. Pure."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from colab_swarm.net.peers import PeerId

_WINDOW_S = 30.0
_MOST_ROUNDS = 1024


class _Round(NamedTuple):
    at: float
    samples: Mapping[PeerId, float]  # samples in its mean, by contributor
    total: float  # samples of all rounds up to this one


class SwarmPace:
    """Measures how many samples the swarm trains on in a second, including the time of waiting and of rounds.

    The speed in the peers' records, by contrast, is the speed of computing alone. This class counts the rounds of the
    last half minute, and at least the last two rounds. All speeds are 0 before the second round.
    """

    def __init__(self) -> None:
        self._rounds: deque[_Round] = deque(maxlen=_MOST_ROUNDS)

    def on_round(self, samples: Mapping[PeerId, float], *, now: float) -> None:
        rounds = self._rounds
        total = sum(samples.values())
        if rounds:
            total += rounds[-1].total
        rounds.append(_Round(now, samples, total))
        # The first round only tells when the time of the second round began, so it may be older.
        while len(rounds) > 2 and rounds[1].at <= now - _WINDOW_S:
            rounds.popleft()

    def begin_again(self) -> None:
        """Forget all rounds, because this peer has missed some."""
        self._rounds = deque(maxlen=_MOST_ROUNDS)

    def since_round_s(self, now: float) -> float:
        """Return the time since the last round; 0 before the first. Thread-safe."""
        rounds = list(self._rounds)
        return now - rounds[-1].at if rounds else 0.0

    def samples_per_s(self, now: float) -> float:
        """Return the samples per second of all peers together. Thread-safe."""
        rounds = list(self._rounds)
        if len(rounds) < 2:
            return 0.0
        return (rounds[-1].total - rounds[0].total) / _seconds(rounds, now)

    def by_peer(self, now: float) -> dict[PeerId, float]:
        """Return the samples per second of each contributor. Thread-safe."""
        rounds = list(self._rounds)
        if len(rounds) < 2:
            return {}
        seconds = _seconds(rounds, now)
        speeds: dict[PeerId, float] = {}
        for finished in rounds[1:]:
            for peer, samples in finished.samples.items():
                speeds[peer] = speeds.get(peer, 0.0) + samples / seconds
        return speeds


def _seconds(rounds: list[_Round], now: float) -> float:
    """Return the time of the rounds, in seconds.

    If the next round is overdue, this includes the time by which it is overdue. So the speed of a waiting swarm falls.
    """
    seconds = rounds[-1].at - rounds[0].at
    usual_s = seconds / (len(rounds) - 1)
    overdue_s = max(0.0, now - rounds[-1].at - usual_s)
    return max(seconds + overdue_s, 1e-6)
