from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from colab_swarm.errors import ExpertError
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.layer import RemoteExpert
from tests.moe.local import LocalCalls, LocalExperts, tanh_expert

GRID = Grid("ffn", (3,))


@pytest.fixture
def experts() -> LocalExperts:
    return LocalExperts(GRID, tanh_expert(), living=[(1,)], shape=(4,))


def test_it_computes_what_the_expert_computes_and_both_learn(experts: LocalExperts) -> None:
    local = copy.deepcopy(experts.modules["ffn.1"])
    remote, x = RemoteExpert(LocalCalls(experts), GRID, "ffn.1"), torch.randn(2, 3, 4, requires_grad=True)
    y = remote(x)
    torch.testing.assert_close(y, local(x))
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(local(x).square().sum(), x)[0])
    assert experts.backwards == ["ffn.1"]
    assert not torch.equal(experts.modules["ffn.1"](x), local(x)), "the expert has taken its step"


def test_it_learns_as_the_first_layer_too_and_keeps_the_dtype(experts: LocalExperts) -> None:
    model = nn.Sequential(RemoteExpert(LocalCalls(experts), GRID, "ffn.1"), nn.Linear(4, 1))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 4).bfloat16()).sum().backward()
    assert experts.backwards == ["ffn.1"]


def test_failures_are_raised_in_forward_and_backward(experts: LocalExperts) -> None:
    remote = RemoteExpert(LocalCalls(experts), GRID, "ffn.1")
    y = remote(torch.randn(1, 4))
    experts.dead_backward = experts.dead = {"ffn.1"}
    with pytest.raises(ExpertError, match="dead"):
        y.sum().backward()
    with pytest.raises(ExpertError, match="dead"):
        remote(torch.randn(1, 4))
    assert len(experts.failures) == 2


def test_an_expert_without_a_host_is_named(experts: LocalExperts) -> None:
    with pytest.raises(ExpertError, match=r"no peer hosts ffn\.2"):
        RemoteExpert(LocalCalls(experts), GRID, "ffn.2")(torch.randn(1, 4))


def test_invalid_names_and_inputs_are_refused(experts: LocalExperts) -> None:
    with pytest.raises(ValueError, match="not an expert of"):
        RemoteExpert(LocalCalls(experts), GRID, "gfn.1")
    remote = RemoteExpert(LocalCalls(experts), GRID, "ffn.1")
    for wrong in [torch.randn(3), torch.randn(2, 5), torch.tensor(1.0)]:
        with pytest.raises(ValueError, match="takes samples of shape"):
            remote(wrong)
    assert remote(torch.randn(0, 4)).shape == (0, 4)
    assert repr(remote) == "RemoteExpert(ffn.1)"
