"""Two peers that train by a framework's own trainer equal one process with the joined batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import colab_swarm as cs
from tests.integrations import peer
from tests.integrations.peer import CLIP, LR, SCENARIOS, STEPS, Batch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, peer.Result]]:
    """What two peers have trained, in all scenarios."""
    folder = tmp_path_factory.mktemp("together")
    with cs.simulate(2) as simulation:
        return [*simulation.run(partial(peer.train_all, folder=folder)).values()]


def results(
    trained: list[dict[str, peer.Result]], scenario: str
) -> tuple[dict[str, torch.Tensor], list[list[Batch]]]:
    """What the peers have, which is equal, and the micro-batches of each step of both together."""
    (state, given, lineage), (other, more, same) = (results[scenario] for results in trained)
    assert lineage == same and all(torch.equal(state[key], other[key]) for key in state)
    assert all([*given[:STEPS], *more[:STEPS]]) and len(given) == len(more) == STEPS + 1
    return state, [[*mine, *theirs] for mine, theirs in zip(given[:STEPS], more, strict=False)]


def by_one_process(
    net: Any,
    steps: list[list[Batch]],
    loss_of: Callable[[Any, Batch], tuple[torch.Tensor, int]],
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train on each step's joined batch; ``loss_of`` gives the sum of a micro-batch and of how many it is."""
    trained = [one for one in net.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, LR, **options)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for batches in steps:
        parts = [loss_of(net, batch) for batch in batches]
        (sum(total for total, _ in parts) / sum(of for _, of in parts)).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if options:
            rates.step()
    return {key: one.detach() for key, one in net.state_dict().items()}


def of_targets(net: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    logits = net(input_ids=batch["input_ids"], attention_mask=batch["labels"].ne(-100)).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
    )
    counted = targets if int(transformers.__version__.partition(".")[0]) >= 5 else batch["labels"]
    return total, int(counted.ne(-100).sum())  # as the Trainer counts them


def of_rows(net: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return peer.loss_of(net, batch) * len(batch["x"]), len(batch["x"])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("trainer", "trl")])
def test_plain_trainers_equal_one_process_on_the_joined_batches(
    trained: list[dict[str, peer.Result]], scenario: str
) -> None:
    state, steps = results(trained, scenario)
    want = by_one_process(peer.perceptron(), steps, of_rows)
    torch.testing.assert_close(state, want, rtol=0.0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["trainer", "trl"])
def test_ragged_texts_equal_one_process_on_the_joined_batches(
    trained: list[dict[str, peer.Result]], scenario: str
) -> None:
    state, steps = results(trained, scenario)
    net = peer.language_model() if scenario == "trainer" else peer.adapted_model()
    first = {key: one.detach().clone() for key, one in net.state_dict().items()}
    want = by_one_process(net, steps, of_targets, weight_decay=0.0)
    torch.testing.assert_close(state, want, rtol=0.0, atol=1e-5)
    assert len({int(batch["labels"].ne(-100).sum()) for batches in steps for batch in batches}) > 5
    frozen = [key for key in state if scenario == "trl" and "lora" not in key]
    assert all(torch.equal(state[key], first[key]) for key in frozen) and any(
        not torch.equal(state[key], first[key]) for key in state
    )
