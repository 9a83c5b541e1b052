"""The model's buffers and the swarm's copies of them: statistics are averaged, the rest each peer keeps."""

import numpy as np
import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.buffers import Buffers
from tests.training import toy

INFINITE = float("inf")


def norm_of(mean: list[float]) -> torch.nn.BatchNorm1d:
    norm = torch.nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.ones(2), persistent=False)
    norm.running_mean = torch.tensor(mean)
    return norm


class Queue(nn.Module):
    """Negatives with a place to write, as MoCo has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("negatives", torch.zeros(24))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def write(self, values: torch.Tensor) -> None:
        at = int(self.position)
        self.negatives[at : at + len(values)] = values
        self.position.fill_((at + len(values)) % 24)


def test_statistics_are_averaged_and_what_lies_beside_integers_and_flags_is_not() -> None:
    net = nn.Sequential(norm_of([0.0, 0.0]), Queue())
    net.register_buffer("ready", torch.tensor(False))
    buffers = Buffers(net)
    assert buffers.averaged == {
        "ready": False,
        "0.running_mean": True,
        "0.running_var": True,
        "0.num_batches_tracked": True,
        "1.negatives": False,
        "1.position": False,
    }
    assert buffers.numel == 5
    assert Buffers(None).numel == 0 and not Buffers(None).live


def test_a_change_is_written_since_the_last_mean_and_0_where_it_is_not_finite() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    norm.running_mean += torch.tensor([0.5, float("nan")])
    norm.num_batches_tracked += 3
    change = np.empty(5, np.float32)
    buffers.write_change(change)
    assert change.tolist() == [0.5, 0.0, 0.0, 0.0, 3.0]


def test_a_mean_changes_the_shared_buffers_and_the_model_only_when_it_is_shown() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    buffers.add(np.array([0.5, 0.0, 0.0, 0.0, 2.6], np.float32))
    assert norm.running_mean.tolist() == [1.0, 2.0]
    buffers.show()
    assert norm.running_mean.tolist() == [1.5, 2.0]
    assert norm.num_batches_tracked == 3, "a count stays whole"


def test_without_a_new_mean_the_model_keeps_its_own_buffers() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    norm.running_mean += 1.0
    buffers.show()
    assert norm.running_mean.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("size", [4, 6])
def test_a_vector_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="flat vector of 5 values"):
        Buffers(norm_of([0.0, 0.0])).add(np.zeros(size, np.float32))


def test_a_statistic_that_begins_at_infinity_takes_the_mean_of_the_values() -> None:
    observer = nn.Module()
    observer.register_buffer("least", torch.full((2,), INFINITE))
    observer.register_buffer("mask", torch.full((2,), -INFINITE))
    buffers = Buffers(observer)
    observer.least.copy_(torch.tensor([-1.0, INFINITE]))
    change = np.empty(4, np.float32)
    buffers.write_change(change)
    assert change.tolist() == [-1.0, 0.0, 0.0, 0.0]
    buffers.add(np.array([-2.0, 0.0, 0.0, 0.0], np.float32))
    buffers.show()
    assert observer.least.tolist() == [-2.0, INFINITE]
    assert observer.mask.tolist() == [-INFINITE, -INFINITE]
    observer.least[0] = -2.5
    buffers.write_change(change)
    assert change.tolist() == [-0.5, 0.0, 0.0, 0.0], "a change, from then on"


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("least", torch.tensor(INFINITE))
        self.register_buffer("most", torch.tensor(-INFINITE))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        self.least.copy_(torch.minimum(self.least, x_BI.min()))
        self.most.copy_(torch.maximum(self.most, x_BI.max()))
        return self.layer(x_BI)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"local_steps": 2}], ids=str)
def test_observers_see_the_data_and_are_equal_at_all_peers(options: dict[str, object]) -> None:
    def train(swarm: Swarm) -> tuple[float, float]:
        net = Observed()
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=16, model=net, **toy.exchanged(options))
        while optimizer.global_step < 6:
            chance = torch.Generator().manual_seed(optimizer.global_step)
            net(torch.randn(8, 8, generator=chance)).square().mean().backward()
            optimizer.step(samples=8)
        return float(net.least), float(net.most)

    with cs.simulate(2) as simulation:
        seen = simulation.run(train)
    for least, most in seen.values():
        assert -10 < least < 0 < most < 10


def test_each_peer_keeps_its_queue_and_a_late_joiner_takes_it_whole() -> None:
    def train(swarm: Swarm) -> list[tuple[int, float]]:
        rows = 8 if swarm.name == "alice" else 4
        net = nn.Sequential(nn.Linear(8, 2), Queue())
        inner = torch.optim.SGD(net[0].parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=32, model=net)
        seen = []
        while optimizer.global_step < 12:
            seen.append((int(net[1].position), float(net[1].negatives.sum())))
            net[0](torch.ones(rows, 8)).square().mean().backward()
            net[1].write(torch.full((rows,), float(rows)))
            optimizer.step(samples=rows)
        return seen

    with cs.simulate(1, samples_per_s=8.0) as simulation:
        simulation.join("bob", at=10.0)
        seen = simulation.run(train)
    assert [position for position, _ in seen["alice"][:4]] == [0, 8, 16, 0]
    first, total = seen["bob"][0]
    assert (first, total) in seen["alice"] and total > 0, "as alice had written it"
    assert all(position % 4 == 0 for position, _ in seen["bob"])


class ActNorm(nn.Module):
    """Initialises itself from its first batch."""

    def __init__(self, flag: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("ready", flag)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.scale.data.copy_(1 / x_BI.std(0))
            self.ready.fill_(1)
        return x_BI * self.scale


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64])
def test_a_late_joiner_does_not_initialise_again(kind: torch.dtype) -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = nn.Sequential(ActNorm(torch.zeros((), dtype=kind)), nn.Linear(8, 2))
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=16, model=net)
        chance = torch.Generator().manual_seed(len(swarm.name))
        while optimizer.global_step < 24:
            x_BI = torch.randn(8, 8, generator=chance) * len(swarm.name)
            net(x_BI).square().mean().backward()
            optimizer.step(samples=8)
        return net[0].scale.detach().clone()

    with cs.simulate(1, samples_per_s=8.0) as simulation:
        simulation.join("bob", at=8.0)
        scales = simulation.run(train)
    assert torch.equal(scales["alice"], scales["bob"])
