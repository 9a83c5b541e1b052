"""Patience is earned: how long this peer waits for others beyond the usual, and what that has cost it.

Each *account* holds a credit: seconds that this peer may lose by it. It begins with a burst, `BURST_S` or the
longest usual wait, and earns `SHARE` of the time, but only while samples of it are counted. A wait lasts for the
usual time and, beyond it, for one `PART` of the credit, and is charged for the lost time. A promise to come is
believed as far as the credit goes. Without credit a peer
still has the usual time, and still counts if it comes by then. So the loss is bounded by arithmetic, whatever
an attacker delays and at whatever wait: in T seconds, A accounts cost this peer at most A * (burst + SHARE * T)
seconds beyond the usual, if at most half of the accounts of each wait are hostile.

A late peer may tell for whom it waits itself. A claim about a third peer is worth nothing by itself. But if that one
has kept this peer waiting too, it is charged, and the teller for a `TELLERS` part only: else honest peers would soon
have no credit at each other.

Where more than half are late at once, this peer's own line is the likely cause, and nobody is charged. Accounts
count here and not peers, of which an invitation admits any number.

A peer that was charged for a wait in which nothing came of it, and since, is *suspected*: frozen, or cut off.
Nobody waits for it.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping

from colab_swarm.events import EventLog, Waited
from colab_swarm.net.peers import PeerId, remember

SHARE = 0.01  # of the time that an account may cost this peer in the long run
BURST_S = 5.0
PART = 2  # a single wait may take half of the credit: 2.5 s at first, then less and less
CHAINED = 2.0  # an organizer or a reducer may wait for another peer itself: twice the patience
TELLERS = 0.25
AWAKE_S = 1.0  # a timer of a running process is not so late
_SILENT_S = 1.0  # least silence of a suspect
SUSPECTED_S = 60.0  # how long it is one at most
_MAX_ACCOUNTS = 4096


class Standing:
    """What each account has earned and cost; ``now`` is monotonic seconds.

    Args:
        me: this peer, which is not charged.
        account_of: ``account_of(peer)``: its own if it is known from rounds, else one for all of its invitation.
        heard_at: ``heard_at(peer)``: when its last bytes came.
        events: gets a `Waited` for each charge.
        longest_s: ``longest_s()``: the longest wait for what a peer has promised.
    """

    def __init__(
        self,
        me: PeerId,
        account_of: Callable[[PeerId], bytes] = bytes,
        heard_at: Callable[[PeerId], float] = lambda peer: math.inf,
        events: EventLog | None = None,
        longest_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._me = me
        self._account_of = account_of
        self._heard_at = heard_at
        self.events = events or EventLog()
        self._longest_s = longest_s
        self._spent: dict[bytes, tuple[float, float]] = {}  # seconds, and when the account last earned
        self._silent_at: dict[PeerId, float] = {}  # when last charged

    def credit_s(self, peer: PeerId) -> float:
        """Return the seconds beyond the usual that ``peer`` may still cost."""
        spent_s, _ = self._spent.get(self._account_of(peer), (0.0, 0.0))
        return max(0.0, max(BURST_S, self._longest_s()) - spent_s)

    def patience_s(self, peer: PeerId, now: float) -> float:
        """Return how long to wait for a silent ``peer`` beyond the usual."""
        return 0.0 if self.suspected(peer, now) else min(self.credit_s(peer), BURST_S) / PART

    def suspected(self, peer: PeerId, now: float) -> bool:
        since = self._silent_at.get(peer, -math.inf)
        return self._heard_at(peer) < since and now < since + SUSPECTED_S

    def suspects(self, now: float) -> set[PeerId]:
        return {peer for peer in self._silent_at if self.suspected(peer, now)}

    def trusted(self, peers: Collection[PeerId], now: float) -> set[PeerId]:
        """Return those that may organize a round: not suspected, with half of the median credit at least.

        The median, as a busy machine makes all peers late.
        """
        alive = [peer for peer in peers if not self.suspected(peer, now)]
        credits_s = {self._account_of(peer): self.credit_s(peer) for peer in alive}
        enough_s = statistics.median(credits_s.values()) / 2 if credits_s else 0.0
        return {peer for peer in alive if self.credit_s(peer) >= enough_s}

    def earn(self, peer: PeerId, now: float) -> None:
        """Give the account of ``peer`` its share of the time: a round counted its samples."""
        account = self._account_of(peer)
        spent_s, since = self._spent.get(account, (0.0, now))
        remember(self._spent, account, (max(0.0, spent_s - SHARE * (now - since)), now), _MAX_ACCOUNTS)

    def settle(
        self,
        what: str,
        beyond_s: Mapping[PeerId, float],
        awaited: Collection[PeerId],
        now: float,
        blamed: Mapping[PeerId, PeerId | None] | None = None,
    ) -> dict[PeerId, float]:
        """Charge a wait for the peers ``awaited``, this one included; return who was charged, and how much.

        ``beyond_s``: seconds beyond the usual, by late peer. Leave them out where the own timer was late.
        ``blamed``: the peer for which a late one waits itself, by its own account.
        """
        late = {peer: seconds for peer, seconds in beyond_s.items() if seconds > 0}
        tellers: dict[PeerId, float] = {}
        if 2 * len(set(map(self._account_of, late))) > len(set(map(self._account_of, awaited))):
            return {}
        for peer, other in (blamed or {}).items():
            if peer not in late or other is None or other in (peer, self._me) or other not in awaited:
                continue
            if other in beyond_s:
                tellers[peer] = TELLERS * late[peer]
                late[other] = max(late.get(other, 0.0), late.pop(peer))
        costs: dict[bytes, tuple[float, PeerId]] = {}
        for peer, seconds in (*late.items(), *tellers.items()):  # those of one account were awaited together
            account = self._account_of(peer)
            costs[account] = max(costs.get(account, (0.0, peer)), (seconds, peer))
        for peer, seconds in late.items():
            if seconds >= _SILENT_S and self._heard_at(peer) < now - seconds:
                remember(self._silent_at, peer, now, _MAX_ACCOUNTS)
        charged = {}
        for account, (seconds, peer) in costs.items():
            if (cost_s := min(seconds, self.credit_s(peer))) > 0:
                spent_s, since = self._spent.get(account, (0.0, now))
                remember(self._spent, account, (spent_s + cost_s, since), _MAX_ACCOUNTS)
                self.events.emit(Waited(now, peer.hex(), what, cost_s))
                charged[peer] = cost_s
        return charged
