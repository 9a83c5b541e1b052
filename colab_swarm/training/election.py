"""Who speaks for the swarm: the branch that the records elect, and whose records have a vote. Pure.

- Equal *lineages*, digests of the first parameters and of every mean since as it was encoded, mean equal parameters,
  but for rounding (`sketch`).
- The *branch* of the swarm is the highest step that at least half of the training peers have
  reached, and on that step the lineage that most of them hold (ties: that of the smallest peer id).
  The others catch up. So one liar, one clock or one lucky minority never moves the swarm.
- Without a vote: peers that cannot be dialled while others can (no round would form, no state be given)
  unless they have averaged with this one, or there are assistants; silent ones (frozen or cut off)
  from which nothing came since, those at a step that the swarm cannot have reached yet, those that
  could not give their state (for `DISTRUST_S`, then twice as long), and paused or idle ones.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.training.known import KnownRecords
from colab_swarm.training.records import PLAUSIBLE, ProgressRecord, Rates, differing
from colab_swarm.training.sketch import StateSketch

DISTRUST_S = 300.0  # at first
_MAX_DISTRUST_S = 6 * 3600.0  # of peers that fail again and again
_KNOWN_ROUNDS = 3  # common rounds that give a peer its vote
_SEEN_S = 6 * 3600.0  # after the last common round it loses the vote
FEW_STEPS = 4  # lead of the others that is always believed
RECENT_S = 600.0  # a peer with a vote and no common round in this time has left
_TIE = 0.01  # weight of all votes that decide ties only

_VOTE_DIGITS = 6  # sums of votes differ by rounding
_RATE_TOLERANCE = 1e-6  # of learning rates, relative

C = TypeVar("C")


def most_voted(choices: Iterable[tuple[C, float]], default: C) -> C:
    """Return the choice with most votes, of equals the first; ``default`` without any."""
    votes: dict[C, float] = {}
    for choice, vote in choices:
        votes[choice] = votes.get(choice, 0.0) + vote
    return max(votes, key=lambda choice: votes[choice], default=default)


def _median_step(steps: Iterable[tuple[int, float]]) -> int:
    """Return the highest step that at least half of the votes have reached."""
    ahead = sorted(steps, key=lambda entry: -entry[0])
    half = sum(vote for _, vote in ahead) / 2
    reached = 0.0
    for step, vote in ahead:
        reached += vote
        if reached >= half > 0:
            return step
    return ahead[-1][0]  # the votes weigh nothing, or their sums differ by rounding


def equal_rates(rates: Rates, others: Rates) -> bool:
    return len(rates) == len(others) and all(
        math.isclose(rate, other, rel_tol=_RATE_TOLERANCE) for rate, other in zip(rates, others, strict=True)
    )


@dataclass(frozen=True)
class Branch:
    """The swarm's step and lineage; ``peers`` train there now."""

    step: int
    lineage: bytes
    peers: frozenset[PeerId]


class Election:
    """Elects the swarm's branch by the ``known`` records, and says which peers have a vote."""

    def __init__(self, known: KnownRecords) -> None:
        self._known = known
        # Of each contributor to this peer's rounds: the rounds that count for its vote, and when the last was.
        self._seen: dict[PeerId, tuple[int, float]] = {}
        self._distrusted = LeftOut[PeerId](DISTRUST_S, _MAX_DISTRUST_S)
        # Suspects, and those too far ahead, at the last reading.
        self._doubted: frozenset[PeerId] = frozenset()
        self._no_vote: Set[PeerId] = frozenset()  # doubted or distrusted peers

    def forget_old(self, now: float) -> None:
        """Forget the peers that have not averaged with this one for `_SEEN_S`."""
        self._seen = {peer: entry for peer, entry in self._seen.items() if now - entry[1] < _SEEN_S}

    def on_records(self, suspects: Iterable[PeerId], *, step_s: float, now: float) -> None:
        """Judge the records just read; a step of the whole swarm takes ``step_s``.

        ``suspects`` have no vote, unless this peer is at step 0: it waits for anybody's state.
        """
        doubted = self._far_ahead(step_s, now)
        if self._known.own.step:
            doubted |= set(suspects)
        self._doubted = frozenset(doubted)
        self._no_vote = self._doubted | self._distrusted.ends(now).keys()

    def _far_ahead(self, step_s: float, now: float) -> set[PeerId]:
        """Return the peers at a step that the swarm cannot have reached since this peer's last round."""
        credible = self._known.own.step + FEW_STEPS
        _, last_round_at = self._seen.get(self._known.me, (0, -math.inf))
        most_s = PLAUSIBLE * (now - last_round_at)
        trainers = {peer: record.step for peer, record in self._known.others.items() if not record.syncing}
        far = {peer for peer, step in trainers.items() if (step - credible) * step_s > most_s}
        if len(far) == len(trainers):  # it is this process that slept
            return set()
        return far

    def on_round(self, contributors: Iterable[PeerId], *, now: float) -> None:
        """Count a round of this peer for the votes of its ``contributors``.

        Rounds of a minority earn no votes; otherwise a fork would confirm itself and never heal.
        """
        contributors = list(contributors)
        recent = {peer for peer in self._voters(self._seen) if now - self._seen[peer][1] < RECENT_S}
        trainers = {peer for peer, record in self._known.others.items() if record.computes}
        votes = self._votes(sorted({self._known.me, *recent, *trainers}))
        here = sum(votes.get(peer, 0.0) for peer in sorted({self._known.me, *contributors}))
        majority = 2 * here > sum(votes.values())
        for peer in contributors:
            rounds, _ = self._seen.get(peer, (0, now))
            if majority:
                rounds += 1
            self._seen[peer] = rounds, now

    def on_leap_back(self) -> None:
        """Believe the others far ahead: this peer has loaded an older checkpoint."""
        self._seen.pop(self._known.me, None)

    def distrust(self, peers: Iterable[PeerId], *, now: float) -> None:
        """Suspend the votes of peers that failed to deliver their claimed state, each time twice as long."""
        for peer in peers:
            self._distrusted.fail(peer, now)
        self._no_vote = self._doubted | self._distrusted.ends(now).keys()

    def distrusts(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer's vote is suspended, as it failed to deliver its state."""
        return self._distrusted.holds(peer, now)

    def trust_all(self) -> None:
        """Give the distrusted peers their votes back."""
        self._distrusted = LeftOut[PeerId](DISTRUST_S, _MAX_DISTRUST_S)
        self._no_vote = self._doubted

    def branch(self) -> Branch:
        """Return the branch that the records elect, or the own while no other peer trains."""
        own = self._known.own
        records = sorted(self._known.all.items())
        trainers = {
            peer: record for peer, record in records if not record.syncing and peer not in self._no_vote
        }
        if not trainers:
            return Branch(own.step, own.lineage, frozenset())
        active = {peer: record for peer, record in trainers.items() if not record.absent} or trainers
        voters = self._reachable(active)
        votes = self._votes(voters)
        step = _median_step((record.step, votes[peer]) for peer, record in voters.items())
        lineages = ((record.lineage, votes[peer]) for peer, record in voters.items() if record.step == step)
        lineage = most_voted(lineages, own.lineage)
        members = frozenset(
            peer for peer, record in trainers.items() if (record.step, record.lineage) == (step, lineage)
        )
        return Branch(step, lineage, members)

    def _reachable(self, active: dict[PeerId, ProgressRecord]) -> dict[PeerId, ProgressRecord]:
        """Return those that can take part in a round with this peer: all where there are assistants, or no others.

        A single peer that can be dialled does not speak for those with whom this one has averaged.
        """
        comrades = self._voters(active)
        if comrades:
            comrades.add(self._known.me)
        voters = {peer: record for peer, record in active.items() if record.reduces or peer in comrades}
        if self._known.assistants or not voters:
            return active
        return voters

    @property
    def behind(self) -> bool:
        """True if this peer is neither on the branch nor one step ahead as it ended a round first."""
        own = self._known.own
        branch = self.branch()
        if own.step == branch.step:
            return own.lineage != branch.lineage
        # A peer that is further ahead took steps without the branch: no other peer would follow.
        return own.step != branch.step + 1 or self._known.before not in (branch.lineage, None)

    def stands(self, step: int, lineage: bytes) -> bool:
        """Return True if the swarm follows, or may still follow, the group that this peer had at a step.

        False if this peer took that step but the branch did not: its group was a minority.
        """
        branch = self.branch()
        return self._known.own.step <= step or (branch.step, branch.lineage) != (step, lineage)

    def disagreement(self) -> str:
        """Return the settings in which this peer differs from most peers on the branch, or nothing.

        The authority outvotes all others, or one member could send the founder of a run away. Once it
        has averaged with others, no stranger's record can tell it that it is wrong.
        """
        own = self._known.own
        if self._seen.keys() - {self._known.me} or not own.agreement:
            return ""
        records = self._known.all
        votes = self._weights(sorted(self.branch().peers))
        agreements = ((records[peer].agreement, vote) for peer, vote in votes.items())
        elected = most_voted((choice for choice in agreements if choice[0]), ())
        return differing(elected, own.agreement) if elected else ""

    def rates(self) -> dict[PeerId, Rates]:
        """Return the learning rates of the trainers at this peer's step and lineage, its own included."""
        own = self._known.own
        rates: dict[PeerId, Rates] = {}
        for peer, record in self._known.all.items():
            here = (record.step, record.lineage) == (own.step, own.lineage)
            if here and record.rates and record.computes and peer not in self._no_vote:
                rates[peer] = record.rates
        return rates

    def sketches(self, own: StateSketch) -> tuple[dict[PeerId, StateSketch], dict[PeerId, float]]:
        """Return the other trainers' sketches of the own one's step, and the votes of all other trainers.

        The authority outvotes all others.
        """
        sketches: dict[PeerId, StateSketch] = {}
        voters = self._trainers() - {self._known.me}
        for peer, record in self._known.others.items():
            sketch = record.sketch
            if sketch and sketch.is_of_step(own) and peer not in self._no_vote:
                sketches[peer] = sketch
        return sketches, self._weights(sorted(voters | sketches.keys()))

    def _trainers(self) -> set[PeerId]:
        """Return the peers that compute on the branch."""
        records = self._known.all
        return {peer for peer in self.branch().peers if records[peer].computes}

    def _weights(self, voters: Iterable[PeerId]) -> dict[PeerId, float]:
        """Return the `_votes`, but those of the run's authority are more than all others."""
        votes = self._votes(voters)
        for peer in votes:
            author = self._known.found.get(peer)
            if author is not None and author.role >= Role.AUTHORITY:
                votes[peer] += len(votes)
        return votes

    def senior(self, views: Mapping[PeerId, C], agree: Callable[[C, C], bool]) -> PeerId | None:
        """Return a peer whose view most votes share; None if not more than half of the trainers' votes are known.

        While some are not known, half of all must share it: a minority may be most of those that say something. Of
        equal votes, those of a peer win that changed nothing by its own account, then those of the first to join.
        """
        records = self._known.all
        votes = self._weights(sorted(self._trainers() | views.keys()))
        total = sum(votes.values())
        if 2 * sum(votes[peer] for peer in views) <= total:
            return None

        # Most peers have equal views: each pair of different ones is compared once.
        weights: dict[C, float] = {}
        for peer in sorted(views):
            weights[views[peer]] = weights.get(views[peer], 0.0) + votes[peer]
        shared: dict[C, float] = {}
        for view in weights:
            shared[view] = sum(weight for other, weight in weights.items() if agree(view, other))

        def standing(peer: PeerId) -> tuple[float, bool, float, PeerId]:
            record = records[peer]
            return -round(shared[views[peer]], _VOTE_DIGITS), record.changed, record.joined_at, peer

        first = min(views, key=standing)
        shares_half = round(2 * shared[views[first]], _VOTE_DIGITS) >= round(total, _VOTE_DIGITS)
        if len(views) < len(votes) and not shares_half:
            return None
        return first

    def account_of(self, peer: PeerId) -> bytes:
        """Return the account that bears the waits for a peer: its own once it has a vote, else its voucher's.

        Those without a record have one account: an organizer may list members that do not exist.
        """
        if peer == self._known.me or self._voters([peer]):
            return peer
        if peer not in self._known.found:
            return b"unknown"
        return b"voucher " + self._voucher_of(peer)

    def _voucher_of(self, peer: PeerId) -> bytes:
        return self._known.found[peer].voucher if peer in self._known.found else peer

    def _votes(self, voters: Iterable[PeerId]) -> dict[PeerId, float]:
        """Return the weight of each vote.

        Each peer that has averaged with this one has a full vote; so has this peer, if there is such a one. Votes are
        equal, so that after a partition the larger side counts, and not each side to itself. The others decide ties
        only. All for whom one invitation vouches share a vote there, because one member may claim to be many.
        """
        full = self._voters(voters)
        if full:
            full.add(self._known.me)
        vouchers = {peer: self._voucher_of(peer) for peer in voters}
        sizes = Counter(vouchers.values())
        votes = {}
        for peer, voucher in vouchers.items():
            vote = 1.0 if peer in full else 0.0
            votes[peer] = vote + _TIE / sizes[voucher] / len(sizes)
        return votes

    def _voters(self, peers: Iterable[PeerId]) -> set[PeerId]:
        """Return those of the peers that have averaged with this one often enough for a full vote."""
        seen = {peer for peer in peers if self._seen.get(peer, (0, 0.0))[0] >= _KNOWN_ROUNDS}
        return seen - {self._known.me}
