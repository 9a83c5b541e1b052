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


@pytest.mark.parametrize("codec", ["int8", "float16", "topk:0.1"])
def test_what_experts_and_trainers_send_each_other_is_compressed_in_both_passes(codec: str) -> None:
    torch.manual_seed(0)
    whole, compressed = Experts(3), Experts(3, codec)
    compressed.blocks = copy.deepcopy(whole.blocks)
    chosen = torch.tensor([[0, 1], [0, 2], [1, 2], [0, 1]])
    x, grads = torch.randn(4, DIM), torch.randn(4, 2, DIM)
    calls = []
    for experts in (whole, compressed):
        outputs = experts.forward(x.repeat_interleave(2, 0), chosen.ravel())
        changes = experts.backward(x, chosen, grads, torch.ones_like(chosen, dtype=torch.bool))
        calls.append((outputs, changes))
    # inputs and outputs; inputs, gradients and changes
    assert whole.sent_bytes == 5 * 8 * DIM * 4
    assert compressed.sent_bytes < 0.6 * whole.sent_bytes
    for exact, arrived in zip(*calls, strict=True):
        assert not torch.equal(exact, arrived)
        assert torch.cosine_similarity(exact.ravel(), arrived.ravel(), dim=0) > 0.3


def test_a_run_with_int8_sends_a_quarter_of_the_bytes() -> None:
    sent = {}
    for codec in ("float32", "int8"):
        emulation = ConvergenceEmulation(replace(TINY, codec=codec), 0)
        assert len(run_virtual(emulation.run())) == 2
        sent[codec] = sum(layer.sent_bytes for layer in emulation.layers)
    assert 0.2 < sent["int8"] / sent["float32"] < 0.3


@pytest.mark.slow
def test_many_batches_in_flight_do_not_feel_a_delay_that_stops_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"make": lambda: FeedForward(8), "sample": (8,), "blocks": 2, "in_flight": 8}
    small |= {"seconds": 0.5}
    monkeypatch.setattr(
        learning_at_home, "CHAINS", [replace(chain, **small) for chain in learning_at_home.CHAINS]
    )
    values = learning_at_home.run_throughput(quick=True).figures
    assert values["vs_model_parallel_at_200ms"] > 2 and values["retained_at_200ms"] > 0
    assert values["ffn_0ms_samples_per_s"] > values["ffn_200ms_samples_per_s"]
    # 8 batches in flight with checkpointing, 2 without
    assert values["checkpointing_factor_room_2"] > 2
