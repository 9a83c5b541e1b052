"""accelerate's own wrapper around the swarm's optimizer."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from colab_swarm.swarm.swarm import Swarm
from tests.integrations.peer import loss_of, perceptron, points
from tests.training.toy import alone


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


def test_accumulated_micro_batches_are_one_step() -> None:
    def train(swarm: Swarm) -> tuple[int, float]:
        accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), perceptron()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=100, batch_size=6, model=net)
        model, wrapped = accelerator.prepare(net, optimizer)
        for _, batch in zip(range(4), points("alice"), strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                wrapped.step()
                wrapped.zero_grad()
        return optimizer.global_step, optimizer.collaboration.progress.known.own.samples

    assert alone(train) == (0, 12.0)
