import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.elastic import BoundedStaleness, CrashTolerant, NormBounded, Synchronous, VarianceBounded
from colab_swarm.elastic.ledger import GradientLedger
from colab_swarm.elastic.schedulers import Scheduler
from colab_swarm.tensors.codecs import Floats

ALICE, BOB, CAROL = range(3)


def of(*values: float) -> Floats:
    return np.array(values, np.float32)


def alice(scheduler: Scheduler, peers: int = 2) -> GradientLedger:
    """Her ledger; buckets of 2 values and of 1, her gradient of step 0 is (1, 2), (3)."""
    ledger = GradientLedger([2, 1], peers, ALICE, scheduler)
    ledger.on_own(0, 0, of(1, 2), now=0.0)
    ledger.on_own(0, 1, of(3), now=1.0)
    return ledger


def test_a_step_applies_the_mean_of_all_gradients() -> None:
    ledger = alice(Synchronous())
    assert ledger.standing(1.0).overdue == 1
    assert ledger.on_received(BOB, 0, 0, of(3, 4)) and ledger.on_received(BOB, 0, 1, of(5))
    standing = ledger.standing(3.5)
    assert (standing.overdue, standing.owed, standing.waited_s) == (0, 0, 2.5)
    assert standing.numels == (3,) and standing.norms == (pytest.approx(50**0.5),)
    closed = ledger.close_step()
    assert [list(bucket) for bucket in closed.updates[0]] == [[2, 3], [4]]
    assert not closed.missing and ledger.step == 1


def test_single_steps_apply_each_gradient_in_full_in_the_order_of_peers() -> None:
    ledger = alice(BoundedStaleness(1, single_steps=True), peers=3)
    ledger.on_received(CAROL, 0, 0, of(7, 8))
    ledger.on_received(CAROL, 0, 1, of(9))
    closed = ledger.close_step()
    assert [[list(bucket) for bucket in update] for update in closed.updates] == [
        [[1, 2], [3]],
        [[7, 8], [9]],
    ]
    ledger.on_received(CAROL, 1, 0, of(4, 4))
    for bucket, size in enumerate((2, 1)):
        ledger.on_received(BOB, 0, bucket, np.full(size, 5, np.float32))
        ledger.on_own(1, bucket, np.ones(size, np.float32), now=2.0)
    closed = ledger.close_step()
    late, own, part = [[list(bucket) for bucket in update] for update in closed.updates]
    assert (late, own, part) == ([[5, 5], [5]], [[1, 1], [1]], [[4, 4], [0]])


@pytest.mark.parametrize(
    ("scheduler", "furthest"), [(Synchronous(), 1), (NormBounded(0.5), 2), (BoundedStaleness(4), 5)]
)
def test_a_bucket_that_is_not_due_is_refused_and_one_counts_once(scheduler: Scheduler, furthest: int) -> None:
    ledger = alice(scheduler)
    assert ledger.on_received(BOB, furthest, 1, of(5))
    for peer, step, bucket in (
        *((BOB, furthest, 1), (BOB, furthest + 1, 1), (BOB, -1, 1)),
        *((ALICE, 0, 1), (2, 0, 1), (-1, 0, 1), (BOB, 0, 2), (BOB, 0, -1)),
    ):
        assert not ledger.on_received(peer, step, bucket, of(5))
    assert not ledger.on_received(BOB, 0, 1, of(5, 5)), "the wrong size"
    for step, bucket, values in ((0, 1, of(3)), (1, 1, of(3)), (0, 7, of(3))):
        with pytest.raises(ValueError, match="bucket"):
            ledger.on_own(step, bucket, values, now=2.0)


def test_a_lost_peers_values_count_and_its_missing_ones_are_not_waited_for() -> None:
    ledger = alice(Synchronous(), peers=3)
    ledger.on_received(BOB, 0, 0, of(3, 4))
    ledger.on_received(CAROL, 0, 0, of(2, 3))
    ledger.on_received(CAROL, 0, 1, of(6))
    assert ledger.standing(1.0).overdue == 1
    ledger.on_lost(BOB)
    standing = ledger.standing(1.0)
    assert (standing.overdue, standing.lost, len(standing.numels)) == (0, 1, 1)
    assert not ledger.on_received(BOB, 0, 1, of(5))
    assert [list(bucket) for bucket in ledger.close_step().updates[0]] == [[2, 3], [3]], "divided by 3"
    ledger.check_invariants()
    alone = alice(VarianceBounded(0.0))
    alone.on_lost(BOB)
    assert [list(bucket) for bucket in alone.close_step().updates[0]] == [[0.5, 1], [1.5]], "no stand-in"
    owed = alice(CrashTolerant(1, 0.0))
    assert owed.close_step().missing
    owed.on_lost(BOB)
    assert not owed.missing, "its debts are dropped"
    owed.check_invariants()


def test_a_step_does_not_end_before_the_own_gradient_is_complete() -> None:
    ledger = GradientLedger([2, 1], 2, ALICE, NormBounded(0.0))
    ledger.on_own(0, 1, of(3), now=0.0)
    assert not ledger.ready and ledger.standing(9.0).waited_s == 0.0
    with pytest.raises(ValueError, match="not complete"):
        ledger.close_step()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    peers=st.integers(2, 5),
    scheduler=st.sampled_from(
        [
            *(Synchronous(), NormBounded(0.3), VarianceBounded(0.0)),
            *(BoundedStaleness(3), BoundedStaleness(3, stand_in=True)),
        ]
    ),
)
def test_every_value_is_applied_once_in_any_order(seed: int, peers: int, scheduler: Scheduler) -> None:
    """Values arrive in any order that the scheduler allows; after the last the sum is that of synchronous steps."""
    rng, steps, sizes = random.Random(seed), 6, [3, 1, 2]
    gradients = np.random.default_rng(seed).normal(size=(steps, peers, len(sizes), 3)).astype(np.float32)
    ledger, applied = GradientLedger(sizes, peers, ALICE, scheduler), np.zeros((len(sizes), 3), np.float32)
    coming = [(peer, step, bucket) for step, peer, bucket in product(range(steps), range(1, peers), range(3))]

    def value(peer: int, step: int, bucket: int) -> Floats:
        return np.ascontiguousarray(gradients[step, peer, bucket, : sizes[bucket]])

    def close() -> None:
        for bucket, gradient in enumerate(ledger.close_step().updates[0]):
            applied[bucket, : sizes[bucket]] += gradient
        ledger.check_invariants()

    for step in range(steps):
        for bucket in range(3):
            ledger.on_own(step, bucket, value(ALICE, step, bucket), now=0.0)
        while not scheduler.may_go_on(ledger.standing(0.0)) or (coming and rng.random() < 0.5):
            piece = coming.pop(rng.randrange(min(len(coming), 5)))
            if not ledger.on_received(*piece, value(*piece)):
                coming.append(piece)  # too far ahead
        close()
    for piece in coming:
        assert ledger.on_received(*piece, value(*piece))
    for bucket, size in enumerate(sizes):
        ledger.on_own(steps, bucket, np.zeros(size, np.float32), now=0.0)
    for bucket, gradient in enumerate(ledger.close_step().updates[0]):  # stand-ins of this step are of zeros
        applied[bucket, : sizes[bucket]] += gradient
    for bucket, size in enumerate(sizes):
        whole = gradients[:, :, bucket, :size].sum((0, 1)) / peers
        np.testing.assert_allclose(applied[bucket, :size], whole, atol=1e-5)
