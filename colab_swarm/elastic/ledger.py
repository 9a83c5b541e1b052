"""Account of a group's gradients: what arrived, what is owed, and what each step applies. Free of I/O.

Step t applies, by equation 11 of "Elastic Consistency", divided by the number of peers p::

    g_i^t  +  the others' g_j^t that arrived  +  stand-ins for the rest  +  corrections

A stand-in is zero, or the peer's own values of the same bucket. A correction is the difference
between a late bucket and its stand-in. So everything that arrives is applied once. Whatever its
delays, a peer ends with the parameters of synchronous training.

Invariants: a bucket is applied once. Nothing older than the scheduler's ``max_delay`` is missing from a peer that is
not lost. Gradients are summed in peer order, so equal gradients give equal bits at all peers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colab_swarm.elastic.schedulers import Arrived, Scheduler, StepStatus
from colab_swarm.tensors.codecs import Floats


@dataclass(frozen=True)
class Late:
    """A bucket that arrived after its step was closed."""

    peer: int
    step: int
    bucket: int
    values: Floats  # the received values
    change: Floats  # correction of the sum over peers: the values less their stand-in


@dataclass(frozen=True)
class Closed:
    """A closed step."""

    step: int
    gradients: list[Floats]  # per bucket, what to apply: the mean over peers, with stand-ins and corrections
    arrived: dict[int, dict[int, Floats]]  # buckets of this step by peer, including the peer's own
    late: tuple[Late, ...]  # buckets of earlier steps that arrived during this one, corrected here
    missing: frozenset[tuple[int, int, int]]  # (peer, step, bucket) still owed by peers that are not lost


class GradientLedger:
    """One peer's account of the gradients of its group. It keeps arrays without a copy: do not change them later.

    Args:
        sizes: values of each bucket.
        peers: p, of the group at its start.
        me: this peer's number, 0 to p - 1.
        scheduler: decides how late gradients may be, and what stands in for them.

    Attributes:
        step: t, the open step.
        lost: lost peers.
        late: late buckets, corrected when the open step is closed.
        ready: whether the peer's own gradient is complete, so that the step may end.
    """

    def __init__(self, sizes: Sequence[int], peers: int, me: int, scheduler: Scheduler) -> None:
        if not 0 <= me < peers:
            raise ValueError(f"peer {me} is not in a group of {peers}")
        self.step = 0
        self.lost: set[int] = set()
        self.late: list[Late] = []
        self.ready = False
        self._sizes, self._peers, self._me, self._scheduler = tuple(sizes), peers, me, scheduler
        # By (peer, step) of open steps: buckets, and the squared norm of all of them.
        self._gradients: dict[tuple[int, int], dict[int, Floats]] = defaultdict(dict)
        self._squares: dict[tuple[int, int], float] = defaultdict(float)
        self._owed: dict[tuple[int, int], set[int]] = {}  # (peer, step) of closed steps: missing buckets
        self._stood_in: dict[int, dict[int, Floats]] = {}  # own buckets of closed steps with debts
        self._ready_since = 0.0

    def on_own(self, step: int, bucket: int, values: Floats, *, now: float) -> None:
        """Add a bucket of this peer's gradient, as the others decode it: all peers apply the same values.

        Raises:
            ValueError: the step is not open, the bucket is unknown or a duplicate, or its size is wrong.
        """
        own = self._gradients[self._me, self.step]
        if step != self.step or bucket in own or not self._fits(bucket, values):
            raise ValueError(f"bucket {bucket} with {values.size} values of step {step} in step {self.step}")
        self._add(self._me, step, bucket, values)
        if len(own) == len(self._sizes):
            self.ready, self._ready_since = True, now

    def on_received(self, peer: int, step: int, bucket: int, values: Floats) -> bool:
        """Add a bucket of another peer; return False if it is refused.

        Refused are duplicates, buckets that do not exist or belong to a lost peer, and those further ahead than an
        honest peer can be: a peer that ended step s has all of our step s - max_delay.
        """
        stranger = peer == self._me or not 0 <= peer < self._peers or peer in self.lost
        if stranger or not self._fits(bucket, values):
            return False
        if step < self.step:
            return self._on_late(peer, step, bucket, values)
        if step > self.step + self._scheduler.max_delay + 1 or bucket in self._gradients[peer, step]:
            return False
        self._add(peer, step, bucket, values)
        return True

    def _on_late(self, peer: int, step: int, bucket: int, values: Floats) -> bool:
        owed = self._owed.get((peer, step), set())
        if bucket not in owed:
            return False
        owed.remove(bucket)
        change = values - self._stood_in[step][bucket] if self._scheduler.stand_in else values
        self.late.append(Late(peer, step, bucket, values, change))
        self._forget_settled()
        return True

    def on_lost(self, peer: int) -> None:
        """Stop waiting for a lost peer; what it sent still counts."""
        self.lost.add(peer)
        self._owed = {key: buckets for key, buckets in self._owed.items() if key[0] != peer}
        self._forget_settled()

    def standing(self, now: float) -> StepStatus:
        """Return the status of the open step."""
        oldest, numel, arrived = self.step - self._scheduler.max_delay, sum(self._sizes), []
        owed = set(self._owed)
        for peer in self._others():
            key = peer, self.step
            received = sum(self._sizes[bucket] for bucket in self._gradients[key])
            complete = len(self._gradients[key]) == len(self._sizes)
            arrived.append(Arrived(math.sqrt(self._squares[key]), received, complete))
            if not complete:
                owed.add(key)
        return StepStatus(
            step=self.step,
            peers=self._peers,
            own_norm=math.sqrt(self._squares[self._me, self.step]),
            own_numel=numel,
            arrived=tuple(arrived),
            overdue=len({peer for peer, step in owed if step <= oldest}),
            owed=len(owed),
            lost=len(self.lost),
            waited_s=now - self._ready_since if self.ready else 0.0,
        )

    def close_step(self) -> Closed:
        """Close the open step and open the next.

        Raises:
            ValueError: this peer's own gradient is not complete.
        """
        if not self.ready:
            raise ValueError(f"step {self.step} cannot end: this peer's own gradient is not complete")
        own = self._gradients[self._me, self.step]
        arrived: dict[int, dict[int, Floats]] = {}
        for peer in range(self._peers):
            arrived[peer] = self._gradients.pop((peer, self.step), {})
            self._squares.pop((peer, self.step), None)
        for peer in self._others():
            if lacking := set(range(len(self._sizes))) - arrived[peer].keys():
                self._owed[peer, self.step] = lacking
        gradients = [self._sum(bucket, arrived, own) for bucket in range(len(self._sizes))]
        for late in self.late:
            gradients[late.bucket] += late.change / np.float32(self._peers)
        if self._scheduler.stand_in:
            self._stood_in[self.step] = own
        closed = Closed(self.step, gradients, arrived, tuple(self.late), self.missing)
        self.late, self.ready = [], False
        self.step += 1
        self._forget_settled()
        return closed

    def _sum(self, bucket: int, arrived: dict[int, dict[int, Floats]], own: dict[int, Floats]) -> Floats:
        total = np.zeros(self._sizes[bucket], np.float32)
        for peer in range(self._peers):
            if bucket in arrived[peer]:
                total += arrived[peer][bucket]
            elif self._scheduler.stand_in and peer not in self.lost:
                total += own[bucket]
        total /= np.float32(self._peers)
        return total

    @property
    def missing(self) -> frozenset[tuple[int, int, int]]:
        """(peer, step, bucket) owed from closed steps."""
        return frozenset((*key, bucket) for key, buckets in self._owed.items() for bucket in buckets)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._peers) if peer != self._me and peer not in self.lost]

    def _add(self, peer: int, step: int, bucket: int, values: Floats) -> None:
        self._gradients[peer, step][bucket] = values
        self._squares[peer, step] += float(np.dot(values, values))

    def _fits(self, bucket: int, values: Floats) -> bool:
        return 0 <= bucket < len(self._sizes) and values.shape == (self._sizes[bucket],)

    def _forget_settled(self) -> None:
        self._owed = {key: buckets for key, buckets in self._owed.items() if buckets}
        steps = {step for _, step in self._owed}
        self._stood_in = {step: own for step, own in self._stood_in.items() if step in steps}

    def check_invariants(self) -> None:
        """Assert what must hold between calls."""
        assert all(step >= self.step for _, step in self._gradients), "a closed step still holds gradients"
        assert all(buckets and step < self.step for (_, step), buckets in self._owed.items())
        assert not self.lost & {peer for peer, _ in self._owed}, "a lost peer owes something"
        oldest = self.step - 1 - self._scheduler.max_delay
        assert all(step > oldest for _, step in self._owed), (
            "a step ended although something too old was missing"
        )
