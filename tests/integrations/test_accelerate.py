"""accelerate's own wrapper around the swarm's optimizer."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from tests.integrations.peer import loss_of, perceptron, points
from tests.training.toy import alone


@pytest.fixture(autouse=True)
def new_accelerate() -> None:
    """All Accelerators of a process share what the first one is told, and the loaders that are being read."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_step_that_its_scaler_skips_counts_nothing() -> None:
    def train(swarm: Swarm) -> tuple[list[bool], list[int], list[float]]:
        Accelerator(cpu=True)
        net, scaler = perceptron(), torch.amp.GradScaler("cpu", init_scale=8.0)
        inner = torch.optim.AdamW(net.parameters())
        optimizer = swarm.optimizer(inner, target_batch_size=6, batch_size=3, model=net)
        wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
        skipped, steps, scales = [], [], []
        for number, batch in zip(range(4), points("alice"), strict=False):
            scaler.scale(loss_of(net, batch)).backward()
            if number == 1:
                net[0].bias.grad.fill_(torch.inf)
            wrapped.step()
            wrapped.zero_grad()
            skipped.append(wrapped.step_was_skipped)
            steps.append(optimizer.global_step)
            scales.append(scaler.get_scale())
        return skipped, steps, scales

    skipped, steps, scales = alone(train)
    assert skipped == [False, True, False, False] and steps == [0, 0, 1, 1] and scales == [8.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("seedable", [False, True])
def test_prepared_loaders_are_read_by_each_peer_in_an_order_of_its_own(
    seedable: bool, tmp_path: Path
) -> None:
    def train(swarm: Swarm) -> tuple[list[int], list[int]]:
        torch.manual_seed(42)
        options = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator, net = Accelerator(cpu=True, dataloader_config=options), perceptron()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=1000, model=net)

        def read(count: int) -> list[int]:
            rows = DataLoader(TensorDataset(torch.arange(24)), batch_size=6, shuffle=True)
            batches = swarm.batches(accelerator.prepare(rows), optimizer, max_steps=1)
            return [row for _ in range(count) for row in next(batches)[0].tolist()]

        before = read(2)
        optimizer.save(tmp_path / swarm.name)
        optimizer.load(tmp_path / swarm.name)
        return before, read(10)

    with cs.simulate(2) as simulation:
        (alices, alices_rest), (bobs, bobs_rest) = simulation.run(train).values()
    assert alices != bobs
    for before, rest in ((alices, alices_rest), (bobs, bobs_rest)):
        rows = before + rest
        passes = [rows[at : at + 24] for at in (0, 24, 48)]
        assert all(sorted(one) == list(range(24)) for one in passes) and passes[0] != passes[1]


@pytest.mark.parametrize("accumulated", [2, 3])
def test_accumulated_batches_of_the_swarm_count_together(accumulated: int) -> None:
    def train(swarm: Swarm) -> list[float]:
        accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=accumulated), perceptron()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=1000, model=net)
        model, wrapped = accelerator.prepare(net, optimizer)
        counted = []
        for batch, _ in zip(
            swarm.batches([torch.ones(4, 8)], optimizer, max_steps=1), range(6), strict=False
        ):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                wrapped.step()
                wrapped.zero_grad()
            counted.append(optimizer.rounds.share.counted)
        return counted

    assert alone(train) == [4.0 * (count // accumulated * accumulated) for count in range(1, 7)]
