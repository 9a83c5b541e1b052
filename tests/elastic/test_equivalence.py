"""A group of elastic peers against one process with the joined batch."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from colab_swarm.bench.elastic_consistency import Crash, Emulation, Scene
from colab_swarm.elastic.schedulers import CrashTolerant, NormBounded, Scheduler, Synchronous, VarianceBounded
from colab_swarm.tensors.codecs import Floats

STEPS = 50


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3), nn.LogSoftmax(1), nn.Flatten())


def batch(peer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + peer)
    return torch.randn(8, 12, generator=rng), torch.randint(0, 3, (8,), generator=rng)


def gradient_of(model: nn.Module) -> Callable[[int, int, Floats], Floats]:
    def gradient(peer: int, step: int, parameters: Floats) -> Floats:
        vector_to_parameters(torch.from_numpy(parameters), model.parameters())
        inputs, labels = batch(peer, step)
        grads = torch.autograd.grad(nn.functional.nll_loss(model(inputs), labels), list(model.parameters()))
        return torch.cat([grad.flatten() for grad in grads]).numpy()

    return gradient


def large_batch(peers: int, momentum: float = 0.0) -> Floats:
    """Torch's SGD in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for step in range(STEPS):
        batches = [batch(peer, step) for peer in range(peers)]
        optimizer.zero_grad()
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.nll_loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach().numpy()


def elastic(scheduler: Callable[[], Scheduler], **more: object) -> Emulation:
    model = net()
    start = parameters_to_vector(model.parameters()).detach().numpy()
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    scene = Scene(sizes, scheduler, steps=STEPS, **more)  # type: ignore[arg-type]
    return Emulation(scene, start, gradient_of(model)).run()


def jitter(sender: int, receiver: int, step: int, bucket: int) -> float:
    return (7 * sender + 5 * receiver + 3 * step + bucket) % 9 / 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("peers", [2, 4])
def test_beta_1_equals_one_process_with_the_joined_batch(peers: int, momentum: float) -> None:
    run = elastic(lambda: NormBounded(1.0), peers=peers, momentum=momentum, delay=jitter)
    for member in run.members:
        np.testing.assert_allclose(member.parameters, large_batch(peers, momentum), atol=1e-5)
        assert (member.parameters == run.members[0].parameters).all(), "peers differ in a bit"


@pytest.mark.parametrize("stand_in", [False, True])
def test_a_corrected_gradient_leaves_the_synchronous_parameters_one_step_later(stand_in: bool) -> None:
    """By hand: alpha 0.5, both start at 10; alice's gradients are 4, 2, 2 and bob's 8, 6, 2, whatever the view.

    Synchronous: 10 - 0.5 (4 + 8)/2 = 7, - 0.5 (2 + 6)/2 = 5, - 0.5 (2 + 2)/2 = 4. Bob's first comes a step late:
    alice has 10 - 0.5 * 4/2 = 9, or with her own 4 in its place 10 - 0.5 (4 + 4)/2 = 8, and then 5 either way.
    """
    gradients = {0: (4, 2, 2), 1: (8, 6, 2)}
    schedulers = iter([VarianceBounded(0.1) if stand_in else NormBounded(0.0), Synchronous()])

    def delay(sender: int, receiver: int, step: int, bucket: int) -> float:
        return 0.5 if (sender, step) == (1, 0) else 0.0

    def backward_s(peer: int, step: int) -> float:
        return 1.1 if peer == 0 and step > 0 else 1.0  # bob's later gradients are there in time

    scene = Scene((1,), lambda: next(schedulers), steps=3, alpha=0.5, delay=delay, backward_s=backward_s)
    start = np.array([10], np.float32)
    run = Emulation(scene, start, lambda peer, step, _: np.array([gradients[peer][step]], np.float32)).run()
    alice, bob = ([float(view[0]) for view in member.history] for member in run.members)
    assert alice == pytest.approx([10, 8 if stand_in else 9, 5, 4], abs=1e-5)
    assert bob == pytest.approx([10, 7, 5, 4], abs=1e-5)
    assert run.distances[0, 1] == pytest.approx(2 if stand_in else 4)


def test_a_crash_during_a_broadcast_keeps_crash_tolerant_peers_within_the_bound() -> None:
    """Carol's last gradient reaches bob and not alice: from then on alice lacks it, f M / p at most."""
    crashes = {2: Crash(step=20, reached=frozenset({1}))}
    run = elastic(lambda: CrashTolerant(1, 0.3), peers=3, crashes=crashes)
    assert run.fired == [2]
    bound = CrashTolerant(1, 0.3).bound(run.moments.facts())
    assert bound is not None and math.isfinite(bound)
    assert run.distances[1, STEPS] < 1e-4 < run.distances[0, STEPS]
    assert run.distances[0, STEPS] <= bound
    assert max(run.ratios) <= 1
