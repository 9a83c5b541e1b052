"""What arrived of whose gradient, what is owed, and what is applied of it at each step. Pure.

Step t applies, by equation 11 of "Elastic Consistency", divided by the number of peers p::

    g_i^t  +  what arrived of the others' g_j^t  +  stand-ins for the rest  +  corrections

A stand-in is nothing, or one's own values of the same bucket. A correction is what a bucket that was missing at an
earlier step, and arrived since, differs from its stand-in. So all that arrives in the end has been applied once, and
whatever its delays, a peer's parameters are then those of synchronous training.

Invariants: a bucket is applied once; nothing older than the scheduler's ``max_delay`` is missing of a peer that is not
lost; peers add up in the order of their numbers, so that equal gradients give equal bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from colab_swarm.elastic.schedulers import Arrived, Scheduler, StepStatus
from colab_swarm.tensors.codecs import Floats


@dataclass(frozen=True)
class Late:
    """A bucket that arrived after its step was closed.

    Attributes:
        values: what arrived.
        stand_in: what was applied in its place, if anything.
    """

    peer: int
    step: int
    bucket: int
    values: Floats
    stand_in: Floats | None

    @property
    def change(self) -> Floats:
        """What corrects the sum over peers."""
        return self.values if self.stand_in is None else self.values - self.stand_in


@dataclass(frozen=True)
class Closed:
    """A step that ended.

    Attributes:
        gradients: per bucket, what to apply: the mean over peers, with stand-ins and corrections.
        arrived: per peer and bucket what was there of this step; one's own too.
        late: buckets of earlier steps that arrived during this one, corrected here.
        missing: (peer, step, bucket) of all that is owed now, and not lost.
    """

    step: int
    gradients: list[Floats]
    arrived: dict[int, dict[int, Floats]]
    late: tuple[Late, ...]
    missing: frozenset[tuple[int, int, int]]


@dataclass
class _Gradient:
    """The buckets of one peer's gradient of one step that arrived."""

    buckets: dict[int, Floats] = field(default_factory=dict)
    squares: float = 0.0

    def add(self, bucket: int, values: Floats) -> None:
        self.buckets[bucket] = values
        self.squares += float(np.dot(values, values))


class GradientLedger:
    """The gradients of one peer's group; free of I/O.

    Arrays are kept, not copied: who hands them over must not change them.

    Args:
        sizes: values of each bucket, in the order of their numbers.
        peers: p, of the group at its start.
        me: this peer's number, 0 to p - 1.
        scheduler: says how late gradients may be, and what stands in for them.

    Attributes:
        step: t, the one that is open.
        lost: peers that are gone.
    """

    def __init__(self, sizes: Sequence[int], peers: int, me: int, scheduler: Scheduler) -> None:
        if not 0 <= me < peers:
            raise ValueError(f"peer {me} is not in a group of {peers}")
        self.step = 0
        self.lost: set[int] = set()
        self._sizes, self._peers, self._me, self._scheduler = tuple(sizes), peers, me, scheduler
        self._gradients: dict[tuple[int, int], _Gradient] = {}  # (peer, step) of open steps
        self._owed: dict[tuple[int, int], set[int]] = {}  # (peer, step) of closed steps: buckets
        self._stood_in: dict[
            int, dict[int, Floats]
        ] = {}  # closed steps of which something is owed: one's own
        self._late: list[Late] = []
        self._own_since: float | None = None

    def on_own(self, step: int, bucket: int, values: Floats, *, now: float) -> None:
        """One's own gradient, as the others decode it: all are to apply the same.

        Raises:
            ValueError: the step is not open, the bucket is unknown or there already, or its size is wrong.
        """
        own = self._gradient(self._me, self.step)
        if step != self.step or bucket in own.buckets or not self._fits(bucket, values):
            raise ValueError(f"bucket {bucket} with {values.size} values of step {step} in step {self.step}")
        own.add(bucket, values)
        if len(own.buckets) == len(self._sizes):
            self._own_since = now

    def on_received(self, peer: int, step: int, bucket: int, values: Floats) -> bool:
        """A bucket of another peer; false: it is not wanted.

        That is one which is there already, or does not exist, or of a lost peer, or further ahead than an honest
        peer can be: who has ended step s has all of our step s - max_delay.
        """
        if (
            peer == self._me
            or not 0 <= peer < self._peers
            or peer in self.lost
            or not self._fits(bucket, values)
        ):
            return False
        if step < self.step:
            return self._on_late(peer, step, bucket, values)
        gradient = self._gradient(peer, step)
        if step > self.step + self._scheduler.max_delay + 1 or bucket in gradient.buckets:
            return False
        gradient.add(bucket, values)
        return True

    def _on_late(self, peer: int, step: int, bucket: int, values: Floats) -> bool:
        owed = self._owed.get((peer, step), set())
        if bucket not in owed:
            return False
        owed.remove(bucket)
        stand_in = self._stood_in[step][bucket] if self._scheduler.stand_in else None
        self._late.append(Late(peer, step, bucket, values, stand_in))
        self._forget_settled()
        return True

    def on_lost(self, peer: int) -> None:
        """A peer is gone: what came of it counts, what is missing is no longer waited for."""
        self.lost.add(peer)
        for key in [key for key in self._owed if key[0] == peer]:
            del self._owed[key]
        self._forget_settled()

    @property
    def ready(self) -> bool:
        """Whether one's own gradient is whole, so that the step may end."""
        return self._own_since is not None

    def standing(self, now: float) -> StepStatus:
        """How the open step stands."""
        own, oldest = self._gradient(self._me, self.step), self.step - self._scheduler.max_delay
        incomplete = {(peer, self.step) for peer in self._others if not self._complete(peer)}
        owed = incomplete | self._owed.keys()
        return StepStatus(
            step=self.step,
            peers=self._peers,
            own_norm=math.sqrt(own.squares),
            own_numel=sum(self._sizes),
            arrived=tuple(self._arrived(peer) for peer in self._others),
            overdue=len({peer for peer, step in owed if step <= oldest}),
            owed=len(owed),
            lost=len(self.lost),
            waited_s=0.0 if self._own_since is None else now - self._own_since,
        )

    def close_step(self) -> Closed:
        """End the open step, and open the next.

        Raises:
            ValueError: one's own gradient is not whole.
        """
        if self._own_since is None:
            raise ValueError(f"step {self.step} cannot end: this peer's own gradient is not whole")
        own = self._gradient(self._me, self.step).buckets
        there = {
            peer: self._gradients.pop((peer, self.step), _Gradient()).buckets for peer in range(self._peers)
        }
        for peer in self._others:
            if lacking := set(range(len(self._sizes))) - there[peer].keys():
                self._owed[peer, self.step] = lacking
        gradients = [self._sum(bucket, there, own) for bucket in range(len(self._sizes))]
        for late in self._late:
            gradients[late.bucket] += late.change / np.float32(self._peers)
        if self._scheduler.stand_in:
            self._stood_in[self.step] = own
        closed = Closed(self.step, gradients, there, tuple(self._late), self.missing)
        self._late, self._own_since = [], None
        self.step += 1
        self._forget_settled()
        return closed

    def _sum(self, bucket: int, there: dict[int, dict[int, Floats]], own: dict[int, Floats]) -> Floats:
        total = np.zeros(self._sizes[bucket], np.float32)
        for peer in range(self._peers):
            if bucket in there[peer]:
                total += there[peer][bucket]
            elif self._scheduler.stand_in and peer not in self.lost:
                total += own[bucket]
        total /= np.float32(self._peers)
        return total

    @property
    def late(self) -> tuple[Late, ...]:
        """What arrived late and is corrected when the open step ends."""
        return tuple(self._late)

    @property
    def missing(self) -> frozenset[tuple[int, int, int]]:
        """(peer, step, bucket) of what is owed of closed steps."""
        return frozenset((*key, bucket) for key, buckets in self._owed.items() for bucket in buckets)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(self._peers) if peer != self._me and peer not in self.lost]

    def _gradient(self, peer: int, step: int) -> _Gradient:
        return self._gradients.setdefault((peer, step), _Gradient())

    def _fits(self, bucket: int, values: Floats) -> bool:
        return 0 <= bucket < len(self._sizes) and values.shape == (self._sizes[bucket],)

    def _complete(self, peer: int) -> bool:
        return len(self._gradient(peer, self.step).buckets) == len(self._sizes)

    def _arrived(self, peer: int) -> Arrived:
        gradient = self._gradient(peer, self.step)
        numel = sum(self._sizes[bucket] for bucket in gradient.buckets)
        return Arrived(math.sqrt(gradient.squares), numel, self._complete(peer))

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
            "a step ended while something too old was missing"
        )
