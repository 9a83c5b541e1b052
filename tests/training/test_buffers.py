"""The model's buffers and the swarm's copies of them: statistics are averaged, the rest each peer keeps."""

import numpy as np
import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.buffers import Buffers

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
        self.register_buffer("begun", torch.zeros((), dtype=torch.uint8))

    def write(self, values: torch.Tensor) -> None:
        at = int(self.position)
        self.negatives[at : at + len(values)] = values
        self.position.fill_((at + len(values)) % 24)
        self.begun.fill_(1)


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
        "1.begun": False,
    }
    assert buffers.numel == 5
    assert Buffers(None).numel == 0 and not Buffers(None).live


def test_changes_since_the_last_mean_are_written_and_a_mean_is_added_to_the_shared_values() -> None:
    norm = norm_of([1.0, 2.0])
    buffers = Buffers(norm)
    norm.running_mean += torch.tensor([0.5, float("nan")])
    norm.num_batches_tracked += 3
    change = np.empty(5, np.float32)
    buffers.write_change(change)
    assert change.tolist() == [0.5, 0.0, 0.0, 0.0, 3.0], "0 where it is not finite"
    norm.running_mean.fill_(7.0)
    buffers.show()
    assert norm.running_mean.tolist() == [7.0, 7.0], "its own, without a new mean"
    buffers.add(np.array([0.5, 0.0, 0.0, 0.0, 2.6], np.float32))
    assert norm.running_mean.tolist() == [7.0, 7.0]
    buffers.show()
    assert norm.running_mean.tolist() == [1.5, 2.0]
    assert norm.num_batches_tracked == 3, "a count stays whole"


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


def test_each_peer_keeps_its_queue_and_a_late_joiner_takes_it_whole() -> None:
    def train(swarm: Swarm) -> list[tuple[int, float, bool]]:
        rows = 8 if swarm.name == "alice" else 4
        net = nn.Sequential(nn.Linear(8, 2), Queue())
        inner = torch.optim.SGD(net[0].parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=32, model=net)
        seen = []
        while optimizer.global_step < 12:
            seen.append((int(net[1].position), float(net[1].negatives.sum()), bool(net[1].begun)))
            net[0](torch.ones(rows, 8)).square().mean().backward()
            net[1].write(torch.full((rows,), float(rows)))
            optimizer.step(samples=rows)
        return seen

    with cs.simulate(1, samples_per_s=8.0) as simulation:
        simulation.join("bob", at=10.0)
        seen = simulation.run(train)
    assert [position for position, _, _ in seen["alice"][:4]] == [0, 8, 16, 0]
    _, total, begun = seen["bob"][0]
    assert seen["bob"][0] in seen["alice"] and total > 0 and begun, "as alice had written it"
    assert all(position % 4 == 0 for position, _, _ in seen["bob"])
