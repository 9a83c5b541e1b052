from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AlbertForPreTraining
from transformers import PreTrainedTokenizerFast as Words

import colab_swarm as cs
from colab_swarm.recipes import masked_lm
from colab_swarm.recipes.batches import StreamedBatches
from colab_swarm.recipes.masked_lm import SIZES, AlbertSize, albert, fit_memory, parameter_count
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb


@pytest.mark.parametrize(("size", "published"), [("large", 18_105_474), ("tiny", 572_370)])
def test_sizes_have_their_published_number_of_parameters(tokenizer: Words, size: str, published: int) -> None:
    config = masked_lm.albert_config(SIZES[size], tokenizer)
    config.vocab_size = SIZES[size].vocabulary
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in AlbertForPreTraining(config).parameters())
    assert parameter_count(SIZES[size]) == counted == published


def mean_loss(model: torch.nn.Module, batches: Iterator[dict[str, torch.Tensor]]) -> float:
    return sum(float(masked_lm.call(model, None, **next(batches)).loss) for _ in range(2)) / 2


@pytest.mark.slow
@pytest.mark.ordeal
def test_tiny_albert_learns_the_python_documentation(tokenizer: Words) -> None:
    model, batches = albert("tiny", tokenizer=tokenizer, batch_size=32)
    optimizer = Lamb(masked_lm.parameter_groups(model), lr=1e-2)
    before = mean_loss(model, batches)
    for _ in range(40):
        model(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before == pytest.approx(8.3, abs=0.3)  # ln 2000 for the words, ln 2 for the order
    assert mean_loss(model, batches) < before - 1.2


@pytest.mark.slow
def test_only_matrices_decay(tokenizer: Words) -> None:
    model, _ = albert(tokenizer=tokenizer)
    decaying, plain = masked_lm.parameter_groups(model, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    for group, wanted in ((plain, True), (decaying, False)):
        found = [names[id(p)].lower().replace("_", "") for p in group["params"]]
        assert {"bias" in name or "norm" in name for name in found} == {wanted}
    assert len(decaying["params"]) + len(plain["params"]) == len(names)


def test_the_learning_rate_rises_for_5000_steps_and_falls_to_zero_at_125000() -> None:
    optimizer, scheduler = masked_lm.albert_optimizer(torch.nn.Linear(2, 2), "large")
    rate = scheduler.lr_lambdas[0]
    assert rate(0) == pytest.approx(1 / 5000) and rate(4_999) == rate(5_000) == 1
    assert rate(65_000) == pytest.approx(0.5) and rate(125_000) == rate(200_000) == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.76e-3 / 5000)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[0]["clamp"] == 1e4


@pytest.mark.slow
def test_peers_start_equal_by_their_seed_and_read_a_mix_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_lm, "_fit_this_machine", lambda *_: (2, True))
    one, two = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_text("\n".join(f"{n} apples and pears fell. {n + 1} did not." for n in range(500)))
    two.write_text("\n".join(f"{n} bears slept: they did." for n in range(500)))
    mix = {str(one): 1.0, str(two): 3.0}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    (alice, hers), (bob, his) = (
        albert(text=mix, language="bn", swarm=SimpleNamespace(id=name), batch_size=None)
        for name in (b"alice", b"bob")
    )
    other, _ = albert(text="python-docs", tokenizer=hers.tokenizer, seed=1)
    assert torch.equal(torch.rand(1), expected), "the user's random numbers are untouched"
    assert not torch.equal(other.predictions.dense.weight, alice.predictions.dense.weight)
    state = bob.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in alice.state_dict().items())
    assert hers.tokenizer.get_vocab() == his.tokenizer.get_vocab()
    assert hers.tokenizer.unk_token_id not in hers.tokenizer("apples and bears")["input_ids"]
    batch, other_batch = next(hers), next(his)
    assert not torch.equal(batch["input_ids"], other_batch["input_ids"])
    assert batch["input_ids"].shape == (2, 64), "what fits the machine"
    alice(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in alice.parameters())
    for each in (hers, his):
        assert isinstance(each, StreamedBatches)
        each.close()


def test_a_wrong_size_or_length_and_a_gpu_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="'huge' is none of tiny, base, large, xlarge"):
        albert("huge")
    with pytest.raises(ValueError, match="512 positions"):
        albert(sequence_length=513)
    with pytest.raises(ValueError, match=r"2\.0 GiB cannot train .*layers=24"):
        fit_memory(SIZES["xlarge"], 2 << 30)


GIB = 1 << 30
LENGTH = 32
HIDDEN = 128


def model(tokenizer: Words, layers: int = 3) -> AlbertForPreTraining:
    torch.manual_seed(0)
    return AlbertForPreTraining(masked_lm.albert_config(AlbertSize(layers, HIDDEN, heads=2), tokenizer))


def batch(samples: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.arange(samples * LENGTH).reshape(samples, LENGTH) % 100
    present = torch.ones_like(tokens)
    present[0, -4:] = 0  # padding, as in real batches: attention is computed another way without it
    return {
        "input_ids": tokens,
        "attention_mask": present,
        "labels": tokens,
        "sentence_order_label": torch.zeros(samples, dtype=torch.int64),
    }


def kept_values_per_token(trained: AlbertForPreTraining) -> float:
    """What autograd holds between forward and backward pass, each memory counted once, less the parameters."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trained(**batch()).loss
    own = {parameter.data_ptr() for parameter in trained.parameters()}
    assert loss.requires_grad
    return sum(s.nbytes() for place, s in storages.items() if place not in own) / 4 / (2 * LENGTH)


@pytest.mark.slow
def test_a_layer_keeps_as_many_values_as_the_arithmetic_says(tokenizer: Words) -> None:
    more, fewer = (kept_values_per_token(model(tokenizer, layers)) for layers in (5, 3))
    assert (more - fewer) / 2 / HIDDEN == pytest.approx(masked_lm.LAYER_VALUES, abs=0.5)


@pytest.mark.slow
def test_checkpointing_gives_the_same_gradients_from_less_memory(tokenizer: Words) -> None:
    plain, saving = model(tokenizer), model(tokenizer)
    masked_lm.checkpoint_layers(saving)
    assert kept_values_per_token(saving) < kept_values_per_token(plain) - 2 * masked_lm.LAYER_VALUES * HIDDEN
    for each in (plain, saving):
        each(**batch()).loss.backward()
    gradients = dict(saving.named_parameters())
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)


@pytest.mark.parametrize(
    ("device", "gpu", "dtype"),
    [
        ("cuda", (7, 0), torch.float16),  # a V100
        ("cuda", (7, 5), torch.float16),  # a T4, as of sahajBERT's volunteers
        ("cuda", (8, 0), torch.bfloat16),  # an A100
        ("cpu", None, torch.float32),
    ],
)
def test_a_gpu_up_to_the_t4_calculates_in_float16_a_newer_one_in_bfloat16_and_a_cpu_in_float32(
    device: str, gpu: tuple[int, int] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"is_available": True, "get_device_capability": gpu, "is_bf16_supported": True}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    autocast, scaler = masked_lm.half_precision(device)
    assert autocast.device == device
    if device == "cpu":
        with autocast:
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    else:
        assert autocast.fast_dtype == dtype
    assert scaler.is_enabled() == (dtype is torch.float16)


def test_the_micro_batch_follows_the_memory() -> None:
    """On a T4, of 15 GiB, sahajBERT's volunteers took 4 as well."""
    machines = ("large", 6), ("large", 15), ("xlarge", 15)
    chosen = [fit_memory(SIZES[size], gib * GIB) for size, gib in machines]
    assert chosen == [(8, True), (4, False), (16, True)]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_chosen_fits_and_more_memory_never_gives_less_speed(size: str) -> None:
    shape, chosen = SIZES[size], []
    for gib in range(6, 200, 2):
        batch_size, checkpointing = fit_memory(shape, gib * GIB)
        sample_bytes = masked_lm.sample_bytes(shape, shape.sequence_length, checkpointing=checkpointing)
        needed = batch_size * sample_bytes
        assert needed + 24 * parameter_count(shape) < gib * GIB
        chosen.append((not checkpointing, batch_size))
        assert checkpointing or batch_size >= masked_lm.ENOUGH
    assert chosen == sorted(chosen)


@pytest.mark.slow
def test_an_update_in_half_precision_is_nearly_that_of_float32(tokenizer: Words) -> None:
    """The loop of sahajBERT's notebook, on a CPU; two peers, whose updates come one step late."""

    def train(swarm: Swarm, dtype: torch.dtype) -> torch.Tensor:
        trained = model(tokenizer)
        lamb, schedule = masked_lm.albert_optimizer(trained, "tiny")
        optimizer = swarm.optimizer(
            lamb, scheduler=schedule, target_batch_size=8, communication=cs.Communication(overlap=True)
        )
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        while optimizer.global_step < 2:
            with autocast:
                loss = trained(**batch()).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer, samples=2, loss=loss.detach())
            scaler.update()
        optimizer.close()
        return torch.nn.utils.parameters_to_vector(trained.parameters()).detach()

    ends = []
    for kind in (torch.float32, torch.float16):
        with cs.simulate(peers=2) as sim:
            ends.append(list(sim.run(partial(train, dtype=kind)).values()))
    (single, _), (half, other) = ends
    begun = torch.nn.utils.parameters_to_vector(model(tokenizer).parameters()).detach()
    assert torch.equal(half, other)
    assert (half - single).norm() < 0.1 * (single - begun).norm()
