import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from colab_swarm.experiments import learning_at_home
from colab_swarm.experiments.learning_at_home import DIM, ConvergenceEmulation, ConvergenceScene, Experts
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.sim import run_virtual

TINY = ConvergenceScene((2, 3), trainers=3, delay_s=1.0, batches=6, evaluations=2)


def test_many_experts_at_a_time_compute_and_learn_as_the_block_does() -> None:
    experts = Experts(3)
    block, others = copy.deepcopy(experts.blocks[1]), copy.deepcopy(experts.blocks[::2])
    optimizer = torch.optim.Adam(block.parameters(), lr=learning_at_home.LR, amsgrad=True)
    chosen, used = torch.tensor([[1], [1], [0], [1]]), torch.tensor([[True], [True], [False], [True]])
    for _ in range(3):
        x, grads = torch.randn(4, DIM, requires_grad=True), torch.randn(4, 1, DIM)
        torch.testing.assert_close(experts.forward(x, chosen.ravel())[used[:, 0]], block(x[used[:, 0]]))
        found = experts.backward(x.detach(), chosen, grads, used)
        optimizer.zero_grad()
        block(x).backward(grads[:, 0] * used)
        torch.testing.assert_close(found, x.grad)
        optimizer.step()
    assert not experts.backward(x.detach(), chosen, grads, torch.zeros_like(used)).any()
    for one, other in zip([experts.blocks[1], *experts.blocks[::2]], [block, *others], strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_a_run_depends_on_its_seed_alone() -> None:
    first, again, other = (run_virtual(ConvergenceEmulation(TINY, seed).run()) for seed in (0, 0, 1))
    assert first == again != other and len(first) == 2


@pytest.mark.parametrize("sides", [(), (2, 3)])
@pytest.mark.parametrize("faithful", [False, True])
def test_the_published_rules_leave_the_gating_as_it_is(sides: tuple[int, ...], faithful: bool) -> None:
    emulation = ConvergenceEmulation(ConvergenceScene(sides, 2, 0.1, 0.1, 6, 1, faithful), 0)
    gates = [parameter.clone() for parameter in emulation._trunk.gates.parameters()]
    stem = emulation._trunk.stem.weight.clone()
    run_virtual(emulation.run())
    same = [torch.equal(a, b) for a, b in zip(gates, emulation._trunk.gates.parameters(), strict=True)]
    assert all(same) if faithful else not any(same)
    assert not torch.equal(stem, emulation._trunk.stem.weight)


@pytest.mark.slow
def test_many_batches_in_flight_do_not_feel_a_delay_that_stops_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"make": lambda: FeedForward(8), "sample": (8,), "blocks": 2, "in_flight": 8}
    monkeypatch.setattr(
        learning_at_home, "CHAINS", [replace(chain, **small) for chain in learning_at_home.CHAINS]
    )
    values = learning_at_home.run_throughput(quick=True).figures
    assert values["vs_model_parallel_at_200ms"] > 2 and values["retained_at_200ms"] > 0
    assert values["ffn_0ms_samples_per_s"] > values["ffn_200ms_samples_per_s"]
