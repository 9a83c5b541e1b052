"""Error feedback in training: the part that compression cut off is added to a later gradient, even if rounds fail."""

from pathlib import Path

import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import StateError
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors import codecs
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.settings import RoundInput
from colab_swarm.training.state import load_checkpoint, save_checkpoint
from tests.training.toy import ROWS, alone, join_training, model, take


def gathered() -> tuple[torch.nn.Linear, Gradients]:
    net = torch.nn.Linear(2, 1, bias=False)
    replica = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=1.0)))
    return net, Gradients(replica, lambda values: False, error_feedback=True)


def add(net: torch.nn.Linear, gradients: Gradients, grad: list[float], samples: float) -> RoundInput:
    net.weight.grad = torch.tensor([grad])
    gradients.add(samples, samples, None)
    return gradients.contribution()


def lose(sent: RoundInput, arrived: list[float]) -> RoundInput:
    assert sent.vector.feedback is not None
    sent.vector.feedback.cut_off(0, sent.vector.values, np.array(arrived, np.float32))
    return sent


@pytest.mark.parametrize("samples", [1, 4, 1000])
def test_what_a_long_round_cut_off_is_no_more_in_a_short_one(samples: int) -> None:
    net, gradients = gathered()
    gradients.on_delivered(lose(add(net, gradients, [1.0, 2.0], samples=samples), [1.0, 0.0]))
    gradients.forget()
    again = add(net, gradients, [3.0, 3.0], samples=1)
    np.testing.assert_array_equal(again.vector.values, [3.0, 3.0 + 2.0])


@pytest.mark.parametrize(("before", "samples"), [(1, 1), (2, 8)])
def test_a_contribution_that_found_no_round_is_sent_again_with_its_feedback(
    before: int, samples: int
) -> None:
    net, gradients = gathered()
    gradients.on_delivered(lose(add(net, gradients, [1.0, 2.0], samples=before), [1.0, 0.0]))
    gradients.forget()
    sent = lose(add(net, gradients, [1.0, 1.0], samples=samples), [0.0, 3.0])
    gradients.forget()
    gradients.on_returned(sent)
    np.testing.assert_array_equal(gradients.contribution().vector.values, [1.0, 3.0])


def test_a_peer_without_samples_keeps_its_error_feedback() -> None:
    net, gradients = gathered()
    gradients.on_delivered(lose(add(net, gradients, [1.0, 2.0], samples=1), [1.0, 0.0]))
    gradients.forget()
    nothing = gradients.contribution()
    gradients.on_delivered(nothing)
    assert not nothing.vector.values.any()
    np.testing.assert_array_equal(add(net, gradients, [0.0, 0.0], samples=1).vector.values, [0.0, 2.0])


@pytest.mark.parametrize(("codec", "delayed"), [("int8", False), ("onebit", True), ("sparseloco", False)])
def test_a_checkpoint_holds_the_error_feedback(codec: str, delayed: bool, tmp_path: Path) -> None:
    def saved(swarm: Swarm, optimizer: SwarmOptimizer) -> torch.Tensor:
        optimizer.save(path := tmp_path / swarm.name)
        residual: torch.Tensor = load_checkpoint(path)["feedback"]["residual"]
        return residual

    def feedback_of(swarm: Swarm) -> float:
        options = {"compression": codec, "error_feedback": True, "overlap": delayed}
        options |= {"min_peers": 2, "target_batch_size": 3}
        optimizer = join_training(swarm, net := model(), **options)
        take(optimizer, net, 0, ROWS[swarm.name])
        if delayed:
            optimizer.wait_step()
        assert optimizer.global_step == 1
        residual = saved(swarm, optimizer)
        again = join_training(swarm, model(), name="again", **options)
        again.load(tmp_path / swarm.name)
        assert torch.equal(saved(swarm, again), residual)
        return residual.abs().sum().item()

    with cs.simulate(2, network="lan", seed=1) as sim:
        assert all(residual > 0 for residual in sim.run(feedback_of).values())


def test_error_feedback_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def load(swarm: Swarm) -> None:
        optimizer = join_training(swarm, model(), compression="int8", error_feedback=True)
        optimizer.save(path := tmp_path / "saved")
        save_checkpoint(path, {**load_checkpoint(path), "step": 3, "feedback": {"residual": torch.zeros(5)}})
        with pytest.raises(StateError, match="another model"):
            optimizer.load(path)
        assert optimizer.global_step == 0

    alone(load)


def test_means_lose_little_where_contributions_lose_much_and_an_unknown_precision_is_named() -> None:
    assert all(codecs.mean_codec_for(name) == name for name in ("float32", "int8", "adaptive"))
    for name in ("onebit", "sparseloco", "topk:0.01", "topk:0.5"):
        assert cs.Communication(name).mean_compression == codecs.mean_codec_for(name) == "float16"
        assert cs.Communication(name).error_feedback
    assert cs.Communication("onebit", mean_compression="int8").mean_compression == "int8"
    with pytest.raises(ValueError, match=r"int8, onebit, sparseloco, adaptive or topk:0\.01"):
        codecs.Precision("zip")
