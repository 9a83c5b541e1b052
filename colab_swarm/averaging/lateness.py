"""Which members of a round are late: each member has a limit for the time since it last sent something. Pure."""

from collections.abc import Collection, Mapping
from typing import TypeAlias

from colab_swarm.averaging.group import Group
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId

Key: TypeAlias = tuple[str, PeerId]  # key of a `Patience`: the prefix of a collaboration, and a member


class Lateness:
    """Tells how long a round waits for each of its members; ``now`` is monotonic seconds.

    A member on a slow line is not late, because its limit counts from the time at which its last data arrived.

    Attributes:
        since: when the round began; it is moved forward if this process was stopped meanwhile.
        heard_at: when the last data of each member arrived.
        left_out: members for which this peer does not wait, because they were late a short time ago.
    """

    def __init__(self, group: Group, me: int, patience: Patience[Key], *, now: float) -> None:
        self._keys = [(group.terms.prefix, member.id) for member in group.members]
        self._others = [member for member in range(len(self._keys)) if member != me]
        self._patience = patience
        self._slept = False
        self._late_s: dict[int, float] = {}  # how long the round waited for each late member
        self.since = now
        self.heard_at = [now] * len(self._keys)
        self.left_out = {m for m in self._others if not patience.is_awaited(self._keys[m], now)}

    def on_slept(self, slept_s: float, now: float) -> None:
        """Give all members more time, and count none of them as late, because this process was stopped."""
        self._slept = True
        self.since += slept_s
        self.heard_at = [now] * len(self._keys)

    def on_late(self, member: int, now: float) -> None:
        """Note that a member is late, and that the round waits for it no longer."""
        self._late_s.setdefault(member, now - self.since)

    def limit_s(self, member: int) -> float:
        return self._patience.limit_s(self._keys[member])

    def longest_s(self) -> float:
        """Return the longest limit of all other members."""
        return max(map(self.limit_s, self._others), default=0.0)

    def settle(self, took_s: Mapping[int, float], counted: Collection[int], now: float) -> dict[int, float]:
        """Learn from a finished round; return the members left out from now on, each with the seconds of the wait.

        ``took_s`` maps a member to the time at which its part had arrived, in seconds since the round began.
        ``counted`` are the members whose contributions count.
        """
        for member in self._others:
            key = self._keys[member]
            if member in took_s:
                self._patience.learn(key, took_s[member])
            if member in counted:
                self._patience.on_counted(key)
        if self._slept:
            return {}
        late = [self._keys[member] for member in self._late_s]
        awaited = [key for member, key in enumerate(self._keys) if member not in self.left_out]
        left_out = self._patience.on_late(late, awaited, now)
        return {member: seconds for member, seconds in self._late_s.items() if self._keys[member] in left_out}
