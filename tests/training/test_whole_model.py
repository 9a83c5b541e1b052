"""The whole model trains together: bare steps, closures, buffers, frozen bases."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.errors import StepError
from colab_swarm.events import StepFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.state import load_checkpoint
from tests.training import toy


class Observer(nn.Module):
    """Keeps the least and the most that it has seen, as quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor(float("inf")))
        self.register_buffer("most", torch.tensor(float("-inf")))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        self.least.copy_(torch.minimum(self.least, x_BI.min()))
        self.most.copy_(torch.maximum(self.most, x_BI.max()))
        return x_BI


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=chance) * 3 + 1, torch.randn(rows, 2, generator=chance)


def test_a_bare_step_counts_the_batch_size_and_a_closure_its_loss() -> None:
    def train(swarm: Swarm) -> tuple[torch.Tensor, float | None]:
        net = toy.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, target_batch_size=toy.BATCH, batch_size=toy.BATCH // 2, model=net)

        def closure() -> torch.Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = toy.loss_of(net, optimizer.global_step)
            loss.backward()
            return loss

        assert optimizer.step(closure) is None and optimizer.step(closure) is not None
        optimizer.zero_grad()
        with pytest.raises(StepError, match="no parameter has a gradient"):
            optimizer.step()
        return toy.parameters_of(net), optimizer.rounds.view.own.loss

    parameters, loss = toy.alone(train)
    net = toy.model()
    first = toy.loss_of(net, 0)
    first.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    torch.testing.assert_close(parameters, toy.parameters_of(net))
    assert loss == pytest.approx(first.item())


def test_a_state_of_the_optimizer_loads_and_another_sends_the_peer_for_the_swarms() -> None:
    def train(swarm: Swarm) -> list[bytes]:
        net = toy.model()
        optimizer = toy.join_training(swarm, net)
        toy.train_to(3, optimizer, net, slice(0, 2))
        before = optimizer.lineage
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as accelerate does
        assert optimizer.lineage == before
        if swarm.name == "bob":
            other = copy.deepcopy(optimizer.state_dict())
            other["state"][0]["exp_avg"] += 1.0
            optimizer.load_state_dict(other)
            assert optimizer.lineage != before
            with pytest.raises(ValueError, match="group"):
                optimizer.load_state_dict({**other, "param_groups": []})
        toy.train_to(12, optimizer, net, slice(0, 2))
        return [optimizer.lineage]

    with cs.simulate(3, seed=1, samples_per_s=10.0) as simulation:
        results = simulation.run(train)
    assert len({lineages[0] for lineages in results.values()}) == 1


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"local_steps": 2}], ids=["plain", "overlap", "local"]
)
def test_buffers_are_averaged_and_equal_at_all_peers_also_at_one_that_comes_late(
    options: dict[str, object], tmp_path: Path
) -> None:
    def train(swarm: Swarm) -> tuple[bytes, torch.Tensor, list[torch.Tensor]]:
        net = nn.Sequential(*images(), Observer())
        optimizer = swarm.optimizer(
            torch.optim.SGD(net.parameters(), lr=0.05),
            target_batch_size=32,
            batch_size=8,
            model=net,
            **toy.exchanged(options),
        )
        seed = swarm.id[0]
        while optimizer.global_step < 10:
            seed += 1
            x_BI, y_BO = batch(seed)
            nn.functional.mse_loss(net(x_BI), y_BO).backward()
            optimizer.step()
        net.eval()
        optimizer.save(path := tmp_path / swarm.name)
        return optimizer.lineage, net(batch(0)[0]).detach(), [*load_checkpoint(path)["buffers"].values()]

    with cs.simulate(2, seed=1, samples_per_s=20.0) as simulation:
        simulation.join("carol", at=6.0)
        results = simulation.run(train)
    lineages, outputs, buffers = zip(*results.values(), strict=True)
    assert len(set(lineages)) == 1
    for theirs in buffers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(buffers[0], theirs, strict=True))
    mean, _, batches, least, most = buffers[0]
    assert batches > 0 and not torch.equal(mean, torch.zeros(16)) and -20 < least < most < 20
    if not options:
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_round_averages_the_buffers_by_samples() -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = images()
        mine = 8 if swarm.name == "alice" else 24
        optimizer = swarm.optimizer(
            torch.optim.SGD(net.parameters(), lr=0.05),
            target_batch_size=32,
            batch_size=mine,
            model=net,
        )
        toy.wait_for_peers(swarm, optimizer, 2)
        x_BI, y_BO = batch(mine, mine)
        nn.functional.mse_loss(net(x_BI), y_BO).backward()
        optimizer.step() or optimizer.wait_step()
        return net[1].running_mean.clone()

    with cs.simulate(2, seed=1) as simulation:
        results = simulation.run(train)
    want = torch.zeros(16)
    for mine in (8, 24):
        net = images()
        net(batch(mine, mine)[0])
        want += mine / 32 * net[1].running_mean
    torch.testing.assert_close(results["alice"], want)
    assert torch.equal(results["alice"], results["bob"])


def test_frozen_parameters_without_a_model_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def train(swarm: Swarm) -> None:
        net = images()
        net[0].weight.requires_grad_(False)
        for model in (None, net):
            inner = torch.optim.SGD(net.parameters(), lr=0.05)
            swarm.optimizer(inner, target_batch_size=32, model=model, name=str(model is None))

    toy.alone(train)
    assert sum("model=" in one.message for one in caplog.records) == 1


def test_weights_weigh_the_mean_and_samples_fill_the_batch() -> None:
    weights = {"alice": 6.0, "bob": 2.0, "carol": 0.0}

    def train(swarm: Swarm) -> tuple[torch.Tensor, float]:
        net = toy.model()
        optimizer = swarm.optimizer(
            torch.optim.SGD(net.parameters(), lr=1.0),
            target_batch_size=30,
            weight_unit="target tokens",
        )
        toy.wait_for_peers(swarm, optimizer, 3)
        with pytest.raises(ValueError, match="this swarm weighs by target tokens"):
            optimizer.step(samples=10)
        toy.loss_of(net, 0, toy.ROWS[swarm.name]).backward()
        optimizer.step(samples=10, weight=weights[swarm.name]) or optimizer.wait_step()
        (finished,) = swarm.events.recent(StepFinished)
        assert isinstance(finished, StepFinished)
        return toy.parameters_of(net), finished.samples

    with cs.simulate(3, seed=1) as simulation:
        results = simulation.run(train)
    net = toy.model()
    for name, weight in weights.items():
        (toy.loss_of(net, 0, toy.ROWS[name]) * weight / 8).backward()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    for parameters, samples in results.values():
        torch.testing.assert_close(parameters, toy.parameters_of(net))
        assert samples == 20.0  # carol's weigh nothing


def test_a_weight_needs_a_unit_and_a_step_its_numbers() -> None:
    def train(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = swarm.optimizer(torch.optim.SGD(net.parameters(), lr=1.0), target_batch_size=30)
        with pytest.raises(ValueError, match=r"name its unit.*weight_unit"):
            optimizer.step(samples=10, weight=3)
        with pytest.raises(ValueError, match=r"pass the size of the batch.*batch_size=…"):
            optimizer.step()
        with pytest.raises(StepError, match=r"call loss.backward\(\)"):
            optimizer.step(samples=10)

    toy.alone(train)


def randn(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=dtype)


class Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.data.copy_(randn(0, 5, 4))

    def loss(self, step: int, rows: slice) -> torch.Tensor:
        tokens_B = (torch.arange(8) + step)[rows] % 5
        return nn.functional.cross_entropy(self.head(self.embed(tokens_B)), (tokens_B + 1) % 5)


class Tasks(nn.Module):
    """Two heads that are used by turns, at first these by each half of a batch, and one that nobody uses."""

    def __init__(self, first: tuple[int, int]) -> None:
        super().__init__()
        self.first = first
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(3)])
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(0.3 * randn(number, *parameter.shape))

    def loss(self, step: int, rows: slice) -> torch.Tensor:
        head = self.first[rows.start // 4]
        if step > 1:
            head = (head + step) % 2
        outputs_BO = self.heads[head](self.body(randn(step, 8, 8)[rows]).tanh())
        loss: torch.Tensor = (outputs_BO - randn(step, 8, 2)[rows]).square().mean()
        return loss


class Spectral(nn.Module):
    """Complex, of an odd number of real values in front."""

    def __init__(self, kind: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(0, 8, 2, dtype=kind))
        self.scale = nn.Parameter(torch.ones(1))

    def loss(self, step: int, rows: slice) -> torch.Tensor:
        x_BI = randn(step, 8, 8, dtype=torch.complex64)[rows]
        y_BO = randn(step + 1, 8, 2, dtype=torch.complex64)[rows]
        loss: torch.Tensor = (self.scale * (x_BI @ self.weight) - y_BO).abs().square().mean()
        return loss


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    reals = [torch.view_as_real(one) if one.is_complex() else one for one in parameters]
    return torch.cat([one.detach().flatten() for one in reals])


ODD: dict[str, Callable[[], Any]] = {
    "tied weights": Tied,
    "one task": partial(Tasks, (0, 0)),
    "a task each": partial(Tasks, (0, 1)),
    "complex parameters": Spectral,
}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((make, {}) for make in ODD.values()),
        (ODD["a task each"], {"overlap": True}),
        (ODD["complex parameters"], {"local_steps": 2, "max_grad_norm": 0.1}),
    ],
)
def test_odd_models_train_as_in_one_process_or_with_one_that_comes_late(
    make: Callable[[], Any], settings: dict[str, Any]
) -> None:
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)  # by step: a late joiner may pass the last one
    halves = slice(0, 4), slice(4, 8)
    begun = flat(make().parameters())

    def adamw(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)

    def train(swarm: Swarm) -> torch.Tensor:
        net = make()
        rows = dict(zip(("alice", "bob", "carol"), (*halves, slice(0, 2)), strict=True))[swarm.name]
        target = 10 if settings else 8
        optimizer = swarm.optimizer(
            adamw(net), target_batch_size=target, model=net, min_peers=2, **toy.exchanged(settings)
        )
        while optimizer.global_step < 12:
            net.loss(optimizer.global_step, rows).backward()
            result = optimizer.step(samples=rows.stop - rows.start)
            if result is None and not settings:
                # One micro-batch a step, so that both weigh the same.
                optimizer.wait_step()
            assert result is None or result.group.terms.numel == len(begun)
            values = flat(optimizer._replica.parameters)
            seen[optimizer.global_step].append(values)
        assert not isinstance(net, Tied) or net.head.weight is net.embed.weight
        return values

    with cs.simulate(2, network="lan", seed=0, samples_per_s=2.0) as sim:
        if settings:
            sim.join("carol", at=8.0)
        parameters = sim.run(train)
    assert max(len(of_step) for of_step in seen.values()) >= len(parameters) == (3 if settings else 2)
    assert all(torch.equal(values, of_step[0]) for of_step in seen.values() for values in of_step)
    assert not torch.equal(parameters["alice"], begun)
    if isinstance(make(), Tasks):
        assert torch.equal(parameters["alice"][-18:], begun[-18:]), (
            "the third head, of 16 weights and 2 biases"
        )
    if not settings:
        plain = make()
        inner = adamw(plain)
        for step in range(12):
            inner.zero_grad()
            for rows in halves:
                plain.loss(step, rows).div(2).backward()
            inner.step()
        torch.testing.assert_close(parameters["alice"], flat(plain.parameters()), rtol=0.0, atol=1e-5)


def test_complex_parameters_of_twice_the_size_are_refused() -> None:
    net = Spectral(torch.complex128)
    with pytest.raises(ValueError, match="complex64"):
        Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1)))


def alone_with_head(swarm: Swarm, net: torch.nn.Sequential) -> list[Any]:
    return [swarm.optimizer(torch.optim.SGD(net[0].parameters(), lr=0.1), target_batch_size=10, model=net)]


def frozen_head(swarm: Swarm, net: torch.nn.Sequential) -> list[Any]:
    net[2].requires_grad_(False)
    return alone_with_head(swarm, net)


def muon_and_adamw(swarm: Swarm, net: torch.nn.Sequential) -> list[Any]:
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    pair = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)
    return [swarm.optimizer(one, target_batch_size=10, model=net, name=type(one).__name__) for one in pair]


def own_head(swarm: Swarm, net: torch.nn.Sequential) -> list[Any]:
    """A head of this peer's own, which the swarm does not train."""
    private = torch.optim.SGD(net[2].parameters(), lr=0.1)
    private.step = partial(lambda step, samples: step(), private.step)  # type: ignore[method-assign, assignment]
    return [*alone_with_head(swarm, net), private]


@pytest.mark.parametrize(
    ("make", "told"),
    [(alone_with_head, 1), (frozen_head, 0), (muon_and_adamw, 0), (own_head, 0)],
)
def test_parameters_that_get_gradients_but_are_in_no_optimizer_are_named_once(
    make: Callable[..., list[Any]], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train(swarm: Swarm) -> None:
        net: Any = toy.model()
        optimizers = make(swarm, net)
        for step in range(13):
            toy.loss_of(net, step).backward()
            for optimizer in optimizers:
                optimizer.step(samples=10)
        assert optimizers[0].global_step == 13

    toy.alone(train)
    texts = [record.getMessage() for record in caplog.records if "no optimizer trains" in record.getMessage()]
    assert len(texts) == told
    assert not told or texts[0].startswith("no optimizer trains 2.weight of model=… (2 in all)")
