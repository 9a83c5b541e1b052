"""A peer's own distance against the exact one, its moments, and its scheduler."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from colab_swarm.elastic import AdaptiveBeta, NormBounded, Synchronous, VarianceBounded
from colab_swarm.elastic.ledger import GradientLedger, Meter
from colab_swarm.elastic.schedulers import BoundedStaleness, CrashTolerant, Scheduler, substitution
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


RELAXED = [
    *map(NormBounded, (0.0, 0.6)),
    VarianceBounded(0.2),
    *(BoundedStaleness(3), BoundedStaleness(3, stand_in=True), BoundedStaleness(2, single_steps=True)),
    *(CrashTolerant(1, 0.2), CrashTolerant(1, 0.2, stand_in=True)),
]


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


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
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


@pytest.mark.parametrize(("bound", "passed"), [(None, False), (0.0, False), (1.0, True), (2.0, False)])
def test_a_distance_above_its_bound_is_noticed(bound: float | None, passed: bool) -> None:
    assert ElasticStep(0, 0.0, 0.0, inconsistency=1.5, bound=bound, lost=()).passed == passed


GRADIENT = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 50
MEAN = float(np.linalg.norm(GRADIENT))


def constant(peer: int, step: int, parameters: Floats) -> Floats:
    return GRADIENT


def alike(peer: int, step: int, parameters: Floats) -> Floats:
    """A mean of norm 366, and noise of norm 8."""
    return GRADIENT + np.random.default_rng((peer, step)).standard_normal(64).astype(np.float32)


def worst_case(
    scheduler: Scheduler, gradient: Callable[[int, int, Floats], Floats], late_s: float = 0.0, **more: object
) -> Emulation:
    scene = Scene((32, 32), lambda: scheduler, 4, 60, 0.01, delay=lambda *_: late_s, **more)  # type: ignore[arg-type]
    return Emulation(scene, np.zeros(64, np.float32), gradient).run()


@pytest.mark.parametrize("tau", [1, 3])
def test_constant_gradients_that_are_always_late_reach_the_bound(tau: int) -> None:
    largest = {}
    for single in (False, True):
        scheduler = BoundedStaleness(tau, single_steps=single)
        run = worst_case(scheduler, constant, tau - 0.01)
        bound = scheduler.bound(run.moments.facts())
        assert bound is not None
        largest[single] = max(run.distances.values())
        assert largest[single] / bound == pytest.approx(1.0, abs=1e-3)
    assert (largest[False], largest[True]) == pytest.approx(
        (0.75 * tau * MEAN, 3 * (tau + 1) * MEAN), rel=1e-4
    )


def test_late_gradients_that_are_alike_stay_under_the_bound_in_sigma() -> None:
    tau = 3
    scheduler = BoundedStaleness(tau, stand_in=True)
    run = worst_case(scheduler, alike, tau - 0.01)
    bound = scheduler.bound(run.moments.facts())
    assert bound is not None and 0.2 * bound < rms(list(run.distances.values())) < bound < 60 * tau
    without = worst_case(BoundedStaleness(tau), alike, tau - 0.01)
    assert rms(list(without.distances.values())) > 10 * bound


@pytest.mark.parametrize("reached", [(), (1, 2)])
def test_a_crash_during_a_broadcast_stays_under_the_bound_in_sigma(reached: tuple[int, ...]) -> None:
    crashes = {3: Crash(20, frozenset(reached))}
    run = worst_case(scheduler := CrashTolerant(1, 0.3, stand_in=True), alike, crashes=crashes)
    without = worst_case(CrashTolerant(1, 0.3), alike, crashes=crashes)
    assert run.fired == without.fired == [3]
    bound = scheduler.bound(run.moments.facts())
    plain = CrashTolerant(1, 0.3).bound(without.moments.facts())
    assert bound is not None and plain is not None
    for peer in {0, 1, 2} - set(reached):
        assert 1 < run.distances[peer, 60] < bound < 10 < 90 < without.distances[peer, 60] <= plain
    for peer in reached:
        assert run.distances[peer, 60] < 0.01


def test_a_stand_in_for_a_gradient_that_never_was_is_within_the_bound_after_a_loss() -> None:
    """Carol's last gradient reaches all, and they go on before they notice that she is lost."""
    scheduler = CrashTolerant(1, 0.1, stand_in=True)
    run = worst_case(
        scheduler, alike, crashes={3: Crash(20, frozenset({0, 1, 2}))}, backward_s=lambda *_: 0.2
    )
    assert run.fired == [3]
    alive, lost = (scheduler.bound(run.moments.facts(crashed=crashed)) or 0.0 for crashed in (0, 1))
    for peer in range(3):
        assert alive < 90 < run.distances[peer, 60] < lost


@pytest.mark.parametrize("peers", [3, 8])
def test_two_peers_that_differ_from_all_others_do_not_break_the_bound_in_sigma(peers: int) -> None:
    """Sigma is an average over peers: with 8, ``3 sigma / p`` is less than the distance."""

    def opposed(peer: int, step: int, parameters: Floats) -> Floats:
        return GRADIENT * {0: 1, 1: -1}.get(peer, 0)

    scheduler = CrashTolerant(1, 0.3, stand_in=True)
    scene = Scene((64,), lambda: scheduler, peers, 40, 0.01, delay=lambda sender, *_: 0.9 * (sender == 1))
    run = Emulation(scene, np.zeros(64, np.float32), opposed).run()
    distance = run.distances[0, 40]
    facts = run.moments.facts()
    assert distance == pytest.approx(2 * MEAN / peers, rel=1e-3)
    assert distance <= substitution(peers, 1, facts.sigma) * 1.001
    assert (distance > 3 * facts.sigma / peers) == (peers > 5)


LONG, SETTLED = 400, 60


def rms(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.slow
def test_the_measured_distance_stays_under_the_target_and_close_to_it() -> None:
    """Without waiting it would be 0.4."""
    target = 0.2
    run = emulate(lambda: AdaptiveBeta(target), LONG)
    for peer, member in enumerate(run.members):
        exact = [run.distances[peer, step] for step in range(SETTLED, LONG)]
        assert rms(exact) < target
        assert rms(exact) > 0.6 * target, "there was room"
        windows = [rms(exact[begin : begin + 40]) for begin in range(0, len(exact) - 40, 10)]
        assert max(windows) < 1.1 * target
        assert 0 < np.mean(member.betas[SETTLED:]) < 1


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


def test_it_does_not_stick_at_beta_1_when_there_is_room() -> None:
    run, synchronous = emulate(lambda: AdaptiveBeta(2.0), 60), emulate(lambda: NormBounded(1.0), 60)
    for member, slow in zip(run.members, synchronous.members, strict=True):
        assert member.betas[0] == 1.0 and member.betas[-1] == 0.0
        assert member.waited_s < 0.8 * slow.waited_s
