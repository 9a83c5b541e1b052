from pathlib import Path

import pytest
import torch
from torch import nn

from colab_swarm.bench import moe as bench
from colab_swarm.bench.harness import BenchReport
from colab_swarm.bench.moe import DIM, ConvergenceEmulation, ConvergenceScene, Experts
from colab_swarm.moe.expert import FeedForward
from colab_swarm.sim import run_virtual

TINY = ConvergenceScene((2, 3), trainers=3, delay_s=1.0, batches=6, evaluations=2)


def test_many_experts_at_a_time_compute_and_learn_as_the_block_does() -> None:
    experts, block = Experts(3), FeedForward(DIM, DIM)
    nn.utils.vector_to_parameters(experts.rows[1].detach().clone(), block.parameters())
    others = [experts.rows[other].clone() for other in (0, 2)]
    optimizer = torch.optim.Adam(block.parameters(), lr=bench.LR, amsgrad=True)
    x, chosen = torch.randn(4, DIM), torch.ones(4, 1, dtype=torch.long)
    for _ in range(3):
        optimizer.zero_grad()
        x.requires_grad_()
        y, grads = block(x), torch.randn(4, 1, DIM)
        torch.testing.assert_close(experts.forward(x, chosen.ravel()), y)
        (want,) = torch.autograd.grad(y, x, grads[:, 0], retain_graph=True)
        y.backward(grads[:, 0])
        found = experts.backward(x.detach(), chosen, grads, torch.ones(4, 1, dtype=torch.bool))
        torch.testing.assert_close(found, want)
        optimizer.step()
        x = x.detach()
    torch.testing.assert_close(experts.rows[1], nn.utils.parameters_to_vector(block.parameters()))
    assert all(torch.equal(experts.rows[at], row) for at, row in zip((0, 2), others, strict=True))


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


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = [0.1, 0.5]
    report = BenchReport("moe-convergence", True, curves={"ffn_low": [curve], "e16_high": [curve, curve]})
    bench.plot_convergence(report, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 1000
