"""How late the members of a round are, and how long this peer waits for each. Pure: ``now`` is an argument."""

import math

from colab_swarm.averaging.member import RoundMember
from colab_swarm.averaging.standing import AWAKE_S, CHAINED
from colab_swarm.averaging.strategy import encoded_bytes
from colab_swarm.net.patience import allowance_s

TICK_S = 0.1  # longest time between two looks for late members
SHORTEST_S = TICK_S / 10


class Lateness:
    """Knows how long the round has waited for each member beyond the usual.

    What the members say of slow lines counts as far as bytes come: who is silent has the time that was measured.

    ``late_s`` is the longest such wait, by member; a recovery adds to it. ``_since`` is the begin of the round, later
    if this process was stopped.
    """

    def __init__(self, own: RoundMember, *, now: float) -> None:
        self._own = own
        self._since = now
        self.late_s: dict[int, float] = {}
        # Received of each member before the round.
        self._bytes_before = [self._received_bytes(member) for member in range(len(own.group.members))]

    def on_slept(self, slept_s: float, now: float) -> None:
        """Excuse all members if this process was stopped, and took much longer for a tick."""
        if slept_s > TICK_S + AWAKE_S:
            self._since += slept_s
            self._own.heard_at = dict.fromkeys(self._own.heard_at, now)

    def on_late(self, member: int, seconds: float) -> None:
        """Add a wait of a recovery."""
        self.late_s[member] = self.late_s.get(member, 0.0) + seconds

    def is_silent(self, member: int, now: float) -> bool:
        """Return True if no slow line explains that nothing comes of a member: it does not reduce either."""
        return member not in self._own.streaming or self._line_silence_s(member, now) > 0

    def left_s(self, member: int, now: float) -> float:
        """Return how long the round still waits for a member's contribution: not at all if it is gone."""
        terms = self._own.group.terms
        numel = self._own.group.spans()[self._own.me].numel
        usual_s = self._usual_s(member, encoded_bytes(terms.codec, numel))
        late_s = self._beyond_s(member, now, self._since, usual_s)
        if self._is_gone(member, now):
            return 0.0
        return _left_s(self._patience_s(member, now), late_s)

    def reducer_left_s(self, reducer: int, averaged_at: float, now: float) -> float:
        """Return how long the round still waits for a reducer's means.

        The reducer may wait for the same contributor as this peer. So its time begins when the own span is averaged.
        A peer without a span does not know for whom a reducer waits, and believes what the members say.
        """
        spans = self._own.group.spans()
        usual_s = max(self._own.usual.claimed_s, self._own.usual.round_s)
        if spans[self._own.me].numel:
            terms = self._own.group.terms
            usual_s = self._usual_s(reducer, encoded_bytes(terms.mean_codec, spans[reducer].numel))
        patience_s = CHAINED * self._patience_s(reducer, now)
        late_s = 0.0
        if averaged_at <= now:
            late_s = self._beyond_s(reducer, now, averaged_at, usual_s)
        return _left_s(patience_s, late_s)

    def recovery_s(self, member: int, now: float) -> float:
        """Return how long to wait for what a member gives in a recovery: once in a round beyond the usual."""
        usual_s = min(self._own.usual.round_s, self._own.settings.patience_s)
        slow_s = allowance_s(self._own.peers, self._own.member(member).id)
        left_s = max(0.0, self._patience_s(member, now) - self.late_s.get(member, 0.0))
        return usual_s + slow_s + CHAINED * left_s

    def _is_gone(self, member: int, now: float) -> bool:
        own = self._own
        peer = own.member(member).id
        is_lost = member in own.lost and member not in own.streaming
        return (is_lost and peer not in own.peers.linked()) or own.usual.standing.suspected(peer, now)

    def _patience_s(self, member: int, now: float) -> float:
        """Return how long to wait for a member beyond the usual."""
        return self._own.usual.standing.patience_s(self._own.member(member).id, now)

    def _received_bytes(self, member: int) -> int:
        return self._own.peers.statistics(self._own.member(member).id).received_bytes

    def _usual_s(self, member: int, size_bytes: int) -> float:
        """Return until when what a member sends, of this size, has usually come: by its line, as far as it came."""
        usual = self._own.usual
        came_bytes = self._received_bytes(member) - self._bytes_before[member]
        share = min(1.0, came_bytes / max(1, size_bytes))
        return usual.round_s + share * max(0.0, usual.claimed_s - usual.round_s)

    def _beyond_s(self, member: int, now: float, since: float, usual_s: float) -> float:
        """Return, and note, for how long the round has waited for a member beyond the usual."""
        round_s = now - max(since, self._since + usual_s)
        if usual_s == math.inf:
            round_s = now - max(since, self._own.heard_at[member]) - self._own.settings.patience_s
        silent_s = min(self._line_silence_s(member, now), now - since)
        late_s = max(round_s, silent_s, 0.0)
        self.late_s[member] = max(self.late_s.get(member, 0.0), late_s)
        return late_s

    def _line_silence_s(self, member: int, now: float) -> float:
        """Return how much longer than a slow line explains nothing came of a member.

        One that did not begin has more time: the group may come to it over anybody's slow line.
        """
        own = self._own
        on_the_way = [member] if member in own.streaming else range(len(own.group.members))
        slow_s = max(allowance_s(own.peers, own.member(index).id) for index in on_the_way)
        read_at = own.peers.read_at(own.member(member).id)
        return now - max(self._own.heard_at[member], read_at) - (own.settings.silence_s + slow_s)


def _left_s(patience_s: float, late_s: float) -> float:
    """Return what is left of the patience; somebody without any still has the usual time."""
    if late_s:
        return patience_s - late_s
    return max(patience_s, SHORTEST_S)
