"""A peer's own distance against the exact one, its moments, and its scheduler."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from colab_swarm.elastic import AdaptiveBeta, NormBounded, Synchronous, VarianceBounded
from colab_swarm.elastic.ledger import GradientLedger, Meter
from colab_swarm.elastic.schedulers import BoundedStaleness, CrashTolerant, Scheduler
from colab_swarm.elastic.steps import ElasticStep
from colab_swarm.experiments.elastic_consistency import Crash, Emulation, Scene
from colab_swarm.tensors.codecs import Floats

SIZES = (30, 8, 50)
DIM, STEPS = sum(SIZES), 150
_draw = np.random.default_rng(0)
CURVATURE = np.linspace(0.1, 1, DIM, dtype=np.float32)
BEST = _draw.normal(size=DIM).astype(np.float32)


def noisy_quadratic(peer: int, step: int, parameters: Floats) -> Floats:
    noise = np.random.default_rng((peer, step)).normal(size=DIM).astype(np.float32)
    return CURVATURE * (parameters - BEST) + np.float32(0.1) * noise


def late(sender: int, receiver: int, step: int, bucket: int) -> float:
    return random.Random(f"{sender} {receiver} {step} {bucket}").expovariate(1)


def emulate(scheduler: Callable[[], Scheduler], steps: int = STEPS, **more: object) -> Emulation:
    scene = Scene(SIZES, scheduler, **{"peers": 3, "steps": steps, "delay": late, **more})  # type: ignore[arg-type]
    return Emulation(scene, np.zeros(DIM, np.float32), noisy_quadratic).run()


RELAXED = [*map(NormBounded, (0.0, 0.6)), VarianceBounded(0.2), BoundedStaleness(3), CrashTolerant(1, 0.2)]


@pytest.mark.parametrize("scheduler", RELAXED, ids=repr)
def test_a_peers_own_distance_is_exact_once_everything_has_arrived(scheduler: Scheduler) -> None:
    run = emulate(lambda: scheduler)
    for peer, member in enumerate(run.members):
        exact = [run.distances[peer, step] for step in range(1, STEPS + 1)]
        assert len(member.found) >= STEPS - 4
        assert sum(exact) > 1, "nothing was late"
        found = dict.fromkeys(np.round(member.found, 3))
        assert all(any(abs(distance - one) < 2e-3 for one in found) for distance in exact[:-4])


def test_moments_are_those_of_all_gradients() -> None:
    run = emulate(lambda: NormBounded(0.3), peers=4)
    exact = run.moments.facts()
    for member in run.members:
        facts = member.meter.facts()
        assert facts.m == pytest.approx(exact.m, rel=0.02)
        assert facts.sigma == pytest.approx(exact.sigma, rel=0.02)
    assert exact.sigma == pytest.approx(0.1 * math.sqrt(DIM), rel=0.1), "the noise that was put in"


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "onebit"])
def test_residuals_are_never_underestimated(codec: str) -> None:
    run = emulate(Synchronous, codec=codec)
    for peer, member in enumerate(run.members):
        for step in range(1, STEPS + 1):
            assert member.found[step - 1] >= run.distances[peer, step] - 1e-3
        assert member.meter.measured < 2.5 * run.measured, "nor by much overestimated"


def test_views_that_wait_for_a_lost_peer_are_settled_without_what_it_owed() -> None:
    run = emulate(lambda: NormBounded(0.0), crashes={2: Crash(60, frozenset())})
    assert run.fired == [2]
    for member in run.members[:2]:
        assert len(member.found) >= STEPS - 4 and np.isfinite(member.found).all()
    ledger, meter = GradientLedger([1, 1], 2, 0, Synchronous()), Meter(buckets=2, peers=2)
    for bucket in (0, 1):
        ledger.on_own(0, bucket, np.array([3], np.float32), now=0.0)
    ledger.on_lost(1)
    assert meter.on_closed(ledger.close_step()) == [0.0]


@pytest.mark.parametrize("steps", [3, 5, 8, 40])
def test_two_peers_that_never_wait_reach_their_bound_and_do_not_pass_it(steps: int) -> None:
    scheduler = NormBounded(0.0)
    run = emulate(lambda: scheduler, steps, peers=2, delay=lambda *_: 1.5)
    for member in run.members:
        bound = scheduler.bound(member.meter.facts())
        assert bound and 0.9 * bound < member.meter.measured <= bound * (1 + 1e-6)


def test_a_synchronous_group_measures_nothing() -> None:
    run = emulate(Synchronous)
    assert run.measured < 1e-4
    assert all(member.meter.measured == 0.0 for member in run.members)


@pytest.mark.parametrize(("bound", "passed"), [(None, False), (0.0, False), (1.0, True), (2.0, False)])
def test_a_distance_above_its_bound_is_noticed(bound: float | None, passed: bool) -> None:
    assert ElasticStep(0, 0.0, 0.0, inconsistency=1.5, bound=bound, lost=()).passed == passed


def test_a_crash_during_a_broadcast_keeps_crash_tolerant_peers_within_the_bound() -> None:
    """Carol's last gradient reaches bob and not alice: from then on alice lacks it, f M / p at most."""
    crashes = {2: Crash(step=20, reached=frozenset({1}))}
    run = emulate(lambda: CrashTolerant(1, 0.3), 50, crashes=crashes, delay=lambda *_: 0.0)
    assert run.fired == [2]
    bound = CrashTolerant(1, 0.3).bound(run.moments.facts())
    assert bound is not None and run.distances[1, 50] < 1e-4 < run.distances[0, 50] <= bound
    assert max(run.ratios) <= 1


LONG, SETTLED = 400, 60


def rms(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.1, 0.2, 0.3])
def test_the_measured_distance_stays_under_the_target_and_close_to_it(target: float) -> None:
    """Without waiting it would be 0.4."""
    run = emulate(lambda: AdaptiveBeta(target), LONG)
    for peer, member in enumerate(run.members):
        exact = [run.distances[peer, step] for step in range(SETTLED, LONG)]
        assert rms(exact) < target
        assert rms(exact) > 0.6 * target, "there was room"
        windows = [rms(exact[begin : begin + 40]) for begin in range(0, len(exact) - 40, 10)]
        assert max(windows) < 1.1 * target
        assert 0 < np.mean(member.betas[SETTLED:]) < 1


def test_it_does_not_stick_at_beta_1_when_there_is_room() -> None:
    run, synchronous = emulate(lambda: AdaptiveBeta(2.0), 60), emulate(lambda: NormBounded(1.0), 60)
    for member, slow in zip(run.members, synchronous.members, strict=True):
        assert member.betas[0] == 1.0 and member.betas[-1] == 0.0
        assert member.waited_s < 0.8 * slow.waited_s


def test_one_large_distance_is_compensated_by_many_waiting_steps() -> None:
    scheduler = AdaptiveBeta(1.0)
    for _ in range(20):
        scheduler.on_measured(0.0)
    assert scheduler.beta == pytest.approx(0.3)
    scheduler.on_measured(10.0)
    waits = 0
    while scheduler.beta == 1.0:
        scheduler.on_measured(0.0)
        waits += 1
    assert waits >= 20


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan")])
def test_a_target_that_allows_nothing_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="Synchronous"):
        AdaptiveBeta(target)
