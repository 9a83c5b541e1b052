"""Patience is earned: how long this peer waits for others beyond the usual, and what that has cost it.

Each *account* holds a credit, in seconds that this peer may lose by it. It begins with `BURST_S` and
earns `SHARE` of the time, but only while samples of it are counted. A wait lasts for the usual time and
as long as the account bears, and is charged for the part beyond the usual. Without credit a peer still
has the usual time, and still counts if it comes by then.

So the loss is bounded by arithmetic, whatever an attacker delays: in T seconds, A accounts cost this peer
at most A * (BURST_S + SHARE * T) seconds beyond the usual, if at most half of the accounts of each wait
are hostile. Where more than half are late at once, this peer's own line is the likely cause, and nobody
is charged. Accounts count here and not peers, of which an invitation admits any number.

Today an organizer's wait for strangers, known by a record only, is such a wait; their usual time is none.
"""

from collections.abc import Callable, Iterable, Mapping

from colab_swarm.net.peers import PeerId, remember

SHARE = 0.02  # of the time that an account may cost this peer in the long run
BURST_S = 10.0
MAX_ACCOUNTS = 4096


class Standing:
    """What each account has earned and cost; ``now`` is monotonic seconds.

    Args:
        account_of: ``account_of(peer)``: its own if it is known from rounds, else one for all of its invitation.
    """

    def __init__(self, account_of: Callable[[PeerId], bytes]) -> None:
        self._account_of = account_of
        self._credits: dict[bytes, tuple[float, float]] = {}  # seconds, and when it last earned

    def credit_s(self, peer: PeerId) -> float:
        """Return the seconds beyond the usual that this peer would still wait for ``peer``."""
        return self._credits.get(self._account_of(peer), (BURST_S, 0.0))[0]

    def earn(self, peer: PeerId, now: float) -> None:
        """Give the account of ``peer`` its share of the time: a round counted its samples."""
        account = self._account_of(peer)
        credit_s, since = self._credits.get(account, (BURST_S, now))
        earned_s = min(credit_s + SHARE * (now - since), BURST_S)
        remember(self._credits, account, (earned_s, now), MAX_ACCOUNTS)

    def settle(
        self, beyond_s: Mapping[PeerId, float], awaited: Iterable[PeerId], now: float
    ) -> dict[PeerId, float]:
        """Charge a wait for the peers ``awaited``, this one included; return who was charged, and how much.

        ``beyond_s``: seconds beyond the usual, by late peer. Leave them out where the own timer was late.
        """
        costs: dict[bytes, tuple[float, PeerId]] = {}
        for peer, seconds in beyond_s.items():
            if seconds > 0:  # peers of one account were awaited at the same time
                account = self._account_of(peer)
                costs[account] = max(costs.get(account, (0.0, peer)), (seconds, peer))
        if 2 * len(costs) > len(set(map(self._account_of, awaited))):
            return {}
        charged = {}
        for account, (seconds, peer) in costs.items():
            credit_s, since = self._credits.get(account, (BURST_S, now))
            if credit_s > 0:
                charged[peer] = min(seconds, credit_s)
                remember(self._credits, account, (credit_s - charged[peer], since), MAX_ACCOUNTS)
        return charged
