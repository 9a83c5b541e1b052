"""A ResNet-18 with BatchNorm: three peers, one of them late, against one process with the joined batches."""

import statistics
from typing import Any

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm

BATCH, PEERS = 32, 3


def resnet(seed: int, width: int) -> Any:
    chance = torch.random.get_rng_state()
    torch.manual_seed(seed)
    sizes = [width, 2 * width, 4 * width, 8 * width]
    shape = {"embedding_size": width, "hidden_sizes": sizes, "depths": [2] * 4, "layer_type": "basic"}
    net = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **shape))
    torch.random.set_rng_state(chance)
    return net


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels)[order]


IMAGES, LABELS = digits()
TRAINED = 1400  # the rest is to test


def batch(seed: int, size: int = BATCH) -> dict[str, torch.Tensor]:
    rows = torch.randint(TRAINED, (size,), generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": IMAGES[rows], "labels": LABELS[rows]}


def adam(net: Any, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


@torch.no_grad()
def outputs(net: Any) -> torch.Tensor:
    return net.eval()(IMAGES[TRAINED:]).logits


def accuracy(logits: torch.Tensor) -> float:
    return (logits.argmax(dim=1) == LABELS[TRAINED:]).float().mean().item()


def together(seed: int, steps: int, width: int) -> list[torch.Tensor]:
    """What each peer's model answers in the end."""

    def train(swarm: Swarm) -> torch.Tensor:
        net = resnet(seed, width) if swarm.name != "carol" else resnet(seed + 99, width)
        inner, rates = adam(net, steps)
        optimizer = swarm.optimizer(
            inner, scheduler=rates, target_batch_size=PEERS * BATCH, batch_size=BATCH, model=net
        )
        number = 1000 * swarm.id[0]
        while optimizer.global_step < steps:
            number += 1
            net.train()(**batch(number)).loss.backward()
            optimizer.step()
        return outputs(net)

    with cs.simulate(2, network="lan", seed=seed, samples_per_s=BATCH) as simulation:
        simulation.join("carol", at=6.0)
        return list(simulation.run(train).values())


def by_one_process(seed: int, steps: int, width: int) -> torch.Tensor:
    net = resnet(seed, width)
    optimizer, rates = adam(net, steps)
    for step in range(steps):
        optimizer.zero_grad()
        net.train()(**batch(step, PEERS * BATCH)).loss.backward()
        optimizer.step()
        rates.step()
    return outputs(net)


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_resnet_is_as_accurate_as_one_process() -> None:
    seeds, size = range(3), {"steps": 200, "width": 32}
    mine = [accuracy(together(seed, **size)[0]) for seed in seeds]
    alone = [accuracy(by_one_process(seed, **size)) for seed in seeds]
    print(f"together {mine}, one process {alone}")
    assert abs(statistics.mean(mine) - statistics.mean(alone)) <= 0.01
    assert min(*mine, *alone) > 0.9
