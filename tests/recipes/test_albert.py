from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AlbertForPreTraining, PreTrainedTokenizerFast

from colab_swarm.recipes.masked_lm import (
    SETTINGS,
    SIZES,
    AlbertSettings,
    MicroBatch,
    albert,
    albert_config,
    albert_optimizer,
    mean_loss,
    parameter_groups,
)
from colab_swarm.recipes.streaming import StreamedBatches
from colab_swarm.training.layerwise import Lamb


@dataclass(frozen=True)
class Peer:
    id: bytes


@pytest.mark.parametrize(("size", "parameters"), [("large", 18_105_474), ("tiny", 572_370)])
def test_sizes_have_their_published_number_of_parameters(
    tokenizer: PreTrainedTokenizerFast, size: str, parameters: int
) -> None:
    config = albert_config(SIZES[size], tokenizer)
    config.vocab_size = SIZES[size].vocabulary
    with torch.device("meta"):
        model = AlbertForPreTraining(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.slow
def test_peers_start_equal_and_read_differently() -> None:
    (alice, hers), (bob, his) = albert(swarm=Peer(b"alice")), albert(swarm=Peer(b"bob"))
    state = bob.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in alice.state_dict().items())
    assert hers.tokenizer.get_vocab() == his.tokenizer.get_vocab()
    assert not torch.equal(next(hers)["input_ids"], next(his)["input_ids"])


@pytest.mark.slow
def test_another_seed_gives_another_model_and_other_randomness_is_untouched(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = (albert(tokenizer=tokenizer, seed=seed)[0] for seed in (0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert not torch.equal(first.predictions.dense.weight, second.predictions.dense.weight)


@pytest.mark.slow
@pytest.mark.ordeal
def test_tiny_albert_learns_the_python_documentation(tokenizer: PreTrainedTokenizerFast) -> None:
    model, batches = albert("tiny", tokenizer=tokenizer, batch_size=32)
    optimizer = Lamb(parameter_groups(model), lr=1e-2)
    before = mean_loss(model, batches, count=2)
    for _ in range(40):
        model(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before == pytest.approx(8.3, abs=0.3)  # ln 2000 for the words, ln 2 for the order
    assert mean_loss(model, batches, count=2) < before - 1.2


@pytest.mark.slow
def test_mean_loss_changes_neither_the_model_nor_its_mode(tokenizer: PreTrainedTokenizerFast) -> None:
    model, batches = albert(tokenizer=tokenizer, batch_size=2)
    mean_loss(model, batches, count=1)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_only_matrices_decay(tokenizer: PreTrainedTokenizerFast) -> None:
    model, _ = albert(tokenizer=tokenizer)
    decaying, plain = parameter_groups(model, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    for group, wanted in ((plain, True), (decaying, False)):
        found = [names[id(p)].lower().replace("_", "") for p in group["params"]]
        assert {"bias" in name or "norm" in name for name in found} == {wanted}
    assert len(decaying["params"]) + len(plain["params"]) == len(names)


def test_settings_are_the_published_ones() -> None:
    settings = AlbertSettings()
    assert (settings.lr, settings.weight_decay, settings.clamp) == (1.76e-3, 0.01, 1e4)
    assert (settings.warmup_steps, settings.total_steps, settings.target_batch_size) == (5_000, 125_000, 4096)
    assert settings == SETTINGS["large"]
    assert SETTINGS.keys() == SIZES.keys()


def test_the_learning_rate_rises_for_5000_steps_and_falls_to_zero_at_125000() -> None:
    optimizer, scheduler = albert_optimizer(torch.nn.Linear(2, 2), "large")
    rate = scheduler.lr_lambdas[0]
    assert rate(0) == pytest.approx(1 / 5000)
    assert rate(4_999) == rate(5_000) == 1
    assert rate(65_000) == pytest.approx(0.5)
    assert rate(125_000) == rate(200_000) == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.76e-3 / 5000)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[0]["clamp"] == 1e4


@pytest.mark.slow
def test_a_mix_of_sources_is_trained_on_with_a_batch_that_fits_the_machine(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "colab_swarm.recipes.masked_lm._fit_this_machine", lambda *_: MicroBatch(2, checkpointing=True)
    )
    model, batches = albert(text={"python-docs": 1.0}, tokenizer=tokenizer, batch_size=None)
    assert isinstance(batches, StreamedBatches)
    batch = next(batches)
    batches.close()
    assert batch["input_ids"].shape == (2, 64)
    model(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_a_tokenizer_trained_on_a_mix_is_the_same_for_all_peers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "\n".join(f"{n} apples and pears fell. {n + 1} did not." for n in range(500))
    )
    (tmp_path / "b.txt").write_text("\n".join(f"{n} bears slept: they did." for n in range(500)))
    mix = {str(tmp_path / "a.txt"): 1.0, str(tmp_path / "b.txt"): 3.0}
    (_, hers), (_, his) = (albert(text=mix, language="bn", swarm=Peer(name)) for name in (b"alice", b"bob"))
    assert hers.tokenizer.get_vocab() == his.tokenizer.get_vocab()
    assert hers.tokenizer.unk_token_id not in hers.tokenizer("apples and bears")["input_ids"]
    assert not torch.equal(next(hers)["input_ids"], next(his)["input_ids"])


def test_a_wrong_size_or_length_is_refused() -> None:
    with pytest.raises(ValueError, match="'huge' is none of tiny, base, large, xlarge"):
        albert("huge")
    with pytest.raises(ValueError, match="512 positions"):
        albert(sequence_length=513)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["masked_lm", "image_features"])
def test_importing_the_recipe_imports_no_large_library(module: str) -> None:
    large = "{'transformers', 'datasets', 'tokenizers', 'sklearn', 'PIL'}"
    program = f"import sys, colab_swarm.recipes.{module}; print(*{large} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
