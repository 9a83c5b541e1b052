"""The swarm's optimizers are torch optimizers: hooks, modes, copies, and the kinds that they wrap."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.replica import Replica, UpdateRule
from tests.elastic.group import join_group
from tests.training import toy

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "within a list": lambda optimizer: copy.deepcopy([optimizer]),
    "of its scheduler": lambda optimizer: pickle.dumps(optimizer.scheduler),
}


@pytest.mark.parametrize("attempt", COPIES.values(), ids=COPIES)
def test_a_copy_is_refused_and_breaks_nothing(attempt: Callable[[Any], object]) -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        optimizer = toy.join_training(swarm, net := toy.model())
        for step in range(2):
            with pytest.raises(TypeError, match=r"copy optimizer.state_dict\(\) instead"):
                attempt(optimizer)
            toy.take(optimizer, net, step)
        return toy.parameters_of(net)

    torch.testing.assert_close(toy.alone(train), toy.joint_reference(2))


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"local_steps": 2}], ids=str)
def test_step_hooks_are_called_once_per_step_of_the_swarm(settings: dict[str, Any]) -> None:
    def train(swarm: Swarm) -> tuple[int, list[str]]:
        optimizer = toy.join_training(swarm, net := toy.model(), **settings)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        hook = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        toy.train_to(3, optimizer, net, slice(0, 5))
        steps = optimizer.global_step
        hook.remove()
        optimizer.close()
        return steps, seen

    steps, seen = toy.alone(train)
    assert seen == ["before", "after"] * steps and steps == 3


@pytest.mark.parametrize("delayed", [False, True])
def test_what_a_step_hook_changes_counts_for_the_swarm(delayed: bool) -> None:
    def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.1, 0.1)

    def train(swarm: Swarm) -> tuple[torch.Tensor, bytes]:
        settings = {"overlap": delayed and swarm.name == "alice"}
        optimizer = toy.join_training(swarm, net := toy.model(), **settings)
        optimizer.register_step_post_hook(clamp)
        toy.wait_for_peers(swarm, optimizer, 2)
        toy.train_to(3, optimizer, net, slice(0, 5))
        optimizer.close()
        return toy.parameters_of(net), optimizer.lineage

    with cs.simulate(2) as sim:
        results = sim.run(train)
    assert len(toy.lineages(results)) == 1
    assert torch.equal(results["alice"][0], results["bob"][0]) and results["bob"][0].abs().max() <= 0.1


def test_a_hook_that_raises_does_not_part_the_peers() -> None:
    def train(swarm: Swarm) -> tuple[torch.Tensor, bytes]:
        optimizer = toy.join_training(swarm, net := toy.model())
        failed: list[bool] = []

        def fails(*_: object) -> None:
            if optimizer.global_step == 1 and len(failed) < (3 if swarm.name == "bob" else 1):
                failed.append(True)
                raise OSError("the disk is full")

        optimizer.register_step_post_hook(fails)
        toy.wait_for_peers(swarm, optimizer, 2)
        while optimizer.global_step < 4:
            try:
                toy.take(optimizer, net, optimizer.global_step, slice(0, 5))
            except OSError:
                net.zero_grad()
        assert failed
        return toy.parameters_of(net), optimizer.lineage

    with cs.simulate(2) as sim:
        alice, bob = sim.run(train).values()
    assert torch.equal(alice[0], bob[0]) and alice[1] == bob[1]


@pytest.mark.parametrize("rule", [{}, {"delayed": True}, {"local": True}])
def test_the_lineage_shows_whether_and_where_a_step_failed(rule: dict[str, bool]) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("a GPU's memory has ended")

    mean = torch.full((178,), 0.1).numpy()
    replicas = [Replica(UpdateRule(SGD(toy.model().parameters(), lr=0.1), **rule)) for _ in range(5)]
    *failing, taken = replicas
    for replica in failing[:2]:
        replica.stepping.register_step_pre_hook(fails)
    for replica in failing[2:]:
        replica.stepping.register_step_post_hook(fails)
    for replica in [*failing, failing[-1]]:
        with pytest.raises(torch.OutOfMemoryError):
            replica.apply(toy.mean_of(mean.copy()))
    taken.apply(toy.mean_of(mean.copy()))
    before, also_before, after, after_twice, whole = (replica.lineage for replica in replicas)
    assert before == also_before
    assert len({before, after, after_twice, whole}) == 4


def test_hooks_of_the_state_are_called() -> None:
    def use(swarm: Swarm) -> list[str]:
        optimizer = toy.join_training(swarm, toy.model())
        seen: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(f"load {state.pop('more')}"))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        return seen

    assert toy.alone(use) == ["save", "load 1", "loaded"]


def test_an_elastic_optimizer_has_the_hooks_too() -> None:
    def train(swarm: Swarm) -> list[str]:
        optimizer = join_group(swarm, net := toy.model(), 2)
        seen: list[str] = []
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        with pytest.raises(TypeError, match=r"copy optimizer.state_dict\(\) instead"):
            copy.deepcopy(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(2):
            toy.loss_of(net, step).backward()
            optimizer.step()
        optimizer.close()
        return seen

    with cs.simulate(2) as sim:
        assert list(sim.run(train).values()) == [["save", "loaded", "step", "step"]] * 2


class ScheduleFree(SGD):
    """Evaluates at twice the parameters with which it trains."""

    evaluates = False

    def train(self) -> None:
        self.evaluates = False
        self._scale(0.5)

    def eval(self) -> None:
        self.evaluates = True
        self._scale(2.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not self.evaluates, "not in train mode when step is called"
        super().step(closure)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(factor)


@pytest.mark.parametrize("delayed", [False, True])
def test_the_modes_of_a_schedule_free_optimizer_reach_it_and_the_model(delayed: bool) -> None:
    def use(swarm: Swarm) -> tuple[torch.Tensor, torch.Tensor]:
        inner = ScheduleFree((net := toy.model()).parameters(), lr=0.1)
        optimizer = swarm.optimizer(inner, **toy.exchanged({"target_batch_size": 10, "overlap": delayed}))
        toy.take(optimizer, net, 0)
        assert optimizer._trainer.in_flight == delayed
        optimizer.eval()
        evaluated = toy.parameters_of(net)
        assert optimizer.global_step == 1
        optimizer.train()
        return evaluated, toy.parameters_of(net)

    evaluated, trained = toy.alone(use)
    net = toy.model()
    toy.loss_of(net, 0).backward()
    SGD(net.parameters(), lr=0.1).step()
    torch.testing.assert_close(trained, toy.parameters_of(net))
    assert torch.equal(evaluated, 2 * trained)


class Sharp(SGD):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


def adafactor(net: nn.Module) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(net.parameters())


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a model": (lambda net: net, "Sequential is no torch optimizer: pass one"),
    "a list of parameters": (lambda net: [*net.parameters()], "list is no torch optimizer: pass one"),
    "LBFGS": (lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS computes the loss again"),
    "one that needs a closure": (lambda net: Sharp(net.parameters()), "Sharp computes the loss again"),
    "SparseAdam": (lambda net: torch.optim.SparseAdam(net.parameters()), r"pass torch.optim.Adam"),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("elastic", [False, True])
def test_what_cannot_step_with_a_mean_is_refused_at_once(
    make: Callable[[nn.Module], Any], text: str, elastic: bool
) -> None:
    def attempt(swarm: Swarm) -> None:
        with pytest.raises((TypeError, ValueError), match=text):
            if elastic:
                swarm.elastic.optimizer(make(toy.model()), peers=2)
            else:
                swarm.optimizer(make(toy.model()), target_batch_size=10)

    toy.alone(attempt)


def test_a_refused_optimizer_keeps_its_parameters_and_the_swarms_own_is_not_wrapped_again() -> None:
    def attempt(swarm: Swarm) -> None:
        inner = adafactor(net := toy.model())
        with pytest.raises(ValueError, match="lr=None, which peers cannot compare"):
            swarm.optimizer(inner, target_batch_size=10)
        assert inner.param_groups[0]["params"][0] is next(net.parameters())
        optimizer = toy.join_training(swarm, net)
        with pytest.raises(TypeError, match="SwarmOptimizer is no torch optimizer"):
            swarm.optimizer(optimizer, target_batch_size=10)
        assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")
        with pytest.raises(AttributeError, match=r"wrapped Lamb is not schedule-free: it has no train\(\)"):
            optimizer.train()

    toy.alone(attempt)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("batchsize", r"Swarm.optimizer\(…\) has no option 'batchsize'; it has batch_size"),
        ("prefix", "no option 'prefix'"),
    ],
)
def test_an_unknown_option_shows_the_one_that_was_meant(option: str, text: str) -> None:
    def attempt(swarm: Swarm) -> None:
        with pytest.raises(TypeError, match=text):
            toy.join_training(swarm, toy.model(), **{option: 32})
        with pytest.raises(
            TypeError, match=r"SwarmElastic.optimizer\(…\) has no option 'shceduler'; it has sched"
        ):
            swarm.elastic.optimizer(SGD(toy.model().parameters()), peers=2, shceduler=None)

    toy.alone(attempt)


def words(sparse: bool, kind: str) -> nn.Module:
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8, sparse=sparse)
    if kind == "bag":
        embedding = nn.EmbeddingBag(20, 8, sparse=sparse)  # type: ignore[assignment]
    return nn.Sequential(embedding, nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("make", "settings", "kind"),
    [
        (SGD, {"max_grad_norm": 0.1}, "embedding"),
        (torch.optim.Adagrad, {}, "bag"),
        (Adam, {"local_steps": 2}, "bag"),
    ],
)
def test_sparse_gradients_train_as_dense_ones(make: Any, settings: dict[str, Any], kind: str) -> None:
    def train(swarm: Swarm) -> list[torch.Tensor]:
        trained = []
        for sparse in (True, False):
            net = words(sparse, kind)
            optimizer = swarm.optimizer(
                make(net.parameters(), lr=0.1),
                target_batch_size=5,
                name=f"{sparse}",
                **toy.exchanged(settings),
            )
            generator = torch.Generator().manual_seed(0)
            for _ in range(4):
                net(torch.randint(0, 20, (10, 3), generator=generator)).square().mean().backward()
                optimizer.step(samples=5)
            trained.append(toy.parameters_of(net))
        return trained

    torch.testing.assert_close(*toy.alone(train))


def test_an_elastic_group_takes_sparse_gradients() -> None:
    def train(swarm: Swarm) -> tuple[torch.Tensor, torch.Tensor]:
        net = words(True, "embedding")
        optimizer = join_group(swarm, net, 2)
        net(torch.tensor([[1, 2]])).sum().backward()
        before = toy.parameters_of(net)
        optimizer.step()
        optimizer.close()
        return before, toy.parameters_of(net)

    with cs.simulate(2) as sim:
        (before, after), (_, others) = sim.run(train).values()
    assert torch.equal(after, others) and not torch.equal(after, before)
