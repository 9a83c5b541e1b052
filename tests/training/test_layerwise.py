from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from colab_swarm.training.layerwise import Lamb, Lars

BOTH = pytest.mark.parametrize("kind", [Lamb, Lars])


def lamb_reference(
    weight: NDArray[Any], gradients: list[NDArray[Any]], lr: float, decay: float, clamp: float
) -> NDArray[Any]:
    """You et al. 2020, Algorithm 2, line by line, in float64; betas (0.9, 0.999), eps 1e-6."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * weight
        trust = min(np.linalg.norm(weight), clamp) / np.linalg.norm(r)
        weight = weight - lr * trust * r
    return weight


def lars_reference(
    weight: NDArray[Any], gradients: list[NDArray[Any]], lr: float, decay: float, clip: bool
) -> NDArray[Any]:
    """The algorithm line by line, in float64; momentum 0.9, trust 0.001, as apex has it before SGD."""
    m = np.zeros_like(weight)
    for g in gradients:
        norm = np.linalg.norm(weight)
        ratio = 1e-3 * norm / (np.linalg.norm(g) + decay * norm + 1e-8)
        if clip:
            ratio = min(ratio / lr, 1)
        m = 0.9 * m + ratio * (g + decay * weight)
        weight = weight - lr * m
    return weight


def run(kind: type[torch.optim.Optimizer], weight: Any, gradients: list[Any], **options: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = kind([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


def check_many_steps(kind: Any, reference: Callable[..., NDArray[Any]], **options: Any) -> None:
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=(4, 3)), list(rng.normal(size=(20, 4, 3)))
    moved = run(kind, weight, gradients, **options)
    np.testing.assert_allclose(moved.numpy(), reference(weight, gradients, *options.values()), rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clamp", [1e4, 0.5])
def test_many_steps_of_lamb_equal_the_algorithm_of_the_paper(decay: float, clamp: float) -> None:
    check_many_steps(Lamb, lamb_reference, lr=0.01, weight_decay=decay, clamp=clamp)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("lr", [4.8, 0.002, 0.0002])  # LARC clips never, at some steps, always
def test_many_steps_of_lars_equal_the_algorithm_of_the_paper(lr: float, clip: bool, decay: float) -> None:
    check_many_steps(Lars, lars_reference, lr=lr, weight_decay=decay, clip=clip)


@pytest.mark.parametrize(("kind", "options", "moved"), [(Lamb, {}, 0.9), (Lars, {"trust": 0.1}, 0.99)])
def test_groups_keep_their_own_settings(kind: Any, options: dict[str, float], moved: float) -> None:
    still, moving, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = kind([{"params": [still], "lr": 0.0}, {"params": [moving, unused]}], lr=0.1, **options)
    (still.sum() + moving.sum()).backward()
    optimizer.step()
    assert still.tolist() == unused.tolist() == [1.0, 1.0] and unused not in optimizer.state
    assert (still in optimizer.state) is (kind is Lamb)  # a frozen group of LARS gathers no momentum
    assert moving.tolist() == pytest.approx([moved, moved])


@pytest.mark.parametrize(
    ("kind", "options", "moved"),
    [(Lamb, {"eps": 0.0}, [-0.1, 0.1]), (Lars, {"weight_decay": 0.5}, [-0.2, 0.3])],
)
def test_a_zero_weight_takes_the_plain_step(kind: Any, options: dict[str, float], moved: list[float]) -> None:
    assert run(kind, [0.0, 0.0], [[2.0, -3.0]], lr=0.1, **options).tolist() == pytest.approx(moved)


@pytest.mark.parametrize(("kind", "decay"), [(Lamb, 0.0), (Lars, 0.5)])
def test_a_zero_gradient_moves_nothing(kind: Any, decay: float) -> None:
    assert run(kind, [1.0, 2.0], [[0.0, 0.0]], lr=0.1, weight_decay=decay).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("kind", "lr", "moved"), [(Lamb, 0.1, 1984.4), (Lars, 1.0, 1998.0)])
def test_a_half_precision_norm_does_not_overflow(kind: Any, lr: float, moved: float) -> None:
    weight = torch.nn.Parameter(torch.full((4096,), 2000.0, dtype=torch.float16))
    optimizer = kind([weight], lr=lr)
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # |w| = 128,000, which LAMB clamps to 10,000; |g| = 64
    assert weight.tolist() == pytest.approx([moved] * 4096, abs=1)


@BOTH
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([weight])

    def closure() -> float:
        loss = (weight * 3).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert weight.item() < 1


@BOTH
def test_a_sparse_gradient_is_refused_before_anything_moves(kind: Any) -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = kind(table.parameters())
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *(
            (Lamb, wrong)
            for wrong in ({"lr": -1.0}, {"lr": float("nan")}, {"eps": -1e-8}, {"betas": (1.0, 0.9)})
        ),
        (Lamb, {"clamp": float("inf")}),
        *((Lars, wrong) for wrong in ({"lr": -1.0}, {"lr": float("nan")}, {"momentum": 1.0})),
        (Lars, {"trust": float("inf")}),
    ],
)
def test_an_argument_out_of_range_is_named(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind([torch.nn.Parameter(torch.ones(1))], **wrong)
