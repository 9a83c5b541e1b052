"""Patience is earned: how long this peer waits for each other peer, and what their waits have cost it.

Each *account* holds a credit, in seconds that this peer may lose by it. A peer has an account of its own once it took
part in `KNOWN_ROUNDS` counted rounds; until then all peers of its voucher (invitation) share one. An account begins
with ``burst_s`` and earns `SHARE` of the time, but only while samples of it are counted. Every wait for a peer lasts
for the usual time and as long as its account bears, and is charged for the part beyond the usual. A peer without credit
still has the usual time, and still counts if it comes by then.

So the loss is bounded by arithmetic, whatever an attacker delays: in T seconds, A accounts cost this peer at most
A * (burst_s + SHARE * T) seconds beyond the usual, if at most half of the peers of each wait are hostile. Where more
than half are late at once, this peer's own line is the likely cause, and nobody is charged.
"""

import math
from collections.abc import Callable, Mapping

from colab_swarm.net.peers import PeerId, remember

SHARE = 0.02  # of the time that an account may cost this peer in the long run
BURST_S = 10.0
KNOWN_ROUNDS = 3
MAX_ACCOUNTS = 4096


class Standing:
    """What each peer has earned and cost; ``now`` is monotonic seconds.

    Args:
        voucher_of: the voucher of a peer: the key of its invitation, or its own id where it has none.
    """

    def __init__(self, voucher_of: Callable[[PeerId], bytes]) -> None:
        self._voucher_of = voucher_of
        self._counted: dict[PeerId, int] = {}  # rounds
        self._credits: dict[bytes, tuple[float, float]] = {}  # seconds, and when it last earned
        self.burst_s = BURST_S  # a few usual rounds, where these are long

    def credit_s(self, peer: PeerId) -> float:
        """Return the seconds beyond the usual that this peer would still wait for ``peer``."""
        return self._credits.get(self._account(peer), (self.burst_s, 0.0))[0]

    def patience_s(self, peer: PeerId, usual_s: float) -> float:
        """Return how long to wait for ``peer`` where others take ``usual_s``."""
        return usual_s + self.credit_s(peer)

    def earn(self, peer: PeerId, now: float) -> None:
        """Count a round that holds samples of ``peer``."""
        remember(self._counted, peer, self._counted.get(peer, 0) + 1, MAX_ACCOUNTS)
        credit_s, since = self._credits.get(self._account(peer), (self.burst_s, now))
        self._set(self._account(peer), min(credit_s + SHARE * (now - since), self.burst_s), now)

    def settle(self, beyond_s: Mapping[PeerId, float], awaited: int, now: float) -> dict[PeerId, float]:
        """Charge a wait for ``awaited`` peers, this one included; return who was charged for how many seconds.

        ``beyond_s``: seconds beyond the usual, by late peer. Leave them out where this peer's own timer was late.
        """
        late = {peer: seconds for peer, seconds in beyond_s.items() if seconds > 0}
        if 2 * len(late) > awaited:
            return {}
        charged = {}
        for account in {self._account(peer) for peer in late}:
            ours = {peer: seconds for peer, seconds in late.items() if self._account(peer) == account}
            peer, seconds = max(ours.items(), key=lambda one: one[1])  # they were awaited at the same time
            credit_s, since = self._credits.get(account, (self.burst_s, now))
            if credit_s > 0:
                charged[peer] = min(seconds, credit_s)
            self._set(account, max(0.0, credit_s - seconds), since)
        return charged

    def _account(self, peer: PeerId) -> bytes:
        return peer if self._counted.get(peer, 0) >= KNOWN_ROUNDS else b"voucher " + self._voucher_of(peer)

    def _set(self, account: bytes, credit_s: float, since: float) -> None:
        assert math.isfinite(credit_s)
        remember(self._credits, account, (credit_s, since), MAX_ACCOUNTS)
