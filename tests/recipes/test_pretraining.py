import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast as Words

from colab_swarm.recipes.batches import IGNORED, MixedBatches, TextMix, peer_seed
from colab_swarm.recipes.text import TextSource


def batches(tokenizer: Words, text: TextSource = "python-docs", **options: Any) -> MixedBatches:
    settings = {"batch_size": 16, "sequence_length": 64, "seed": 0} | options
    return MixedBatches(TextMix(text, seed=settings["seed"]), tokenizer, **settings)


def original(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["input_ids"].where(batch["labels"] == IGNORED, batch["labels"])


def test_a_batch_is_ready_for_the_model_and_every_sample_has_something_to_predict(tokenizer: Words) -> None:
    batch, again, bobs = (
        next(batches(tokenizer, seed=seed, batch_size=3, sequence_length=32)) for seed in (1, 1, 2)
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    assert shapes.pop("sentence_order_label") == (3,)
    assert shapes == dict.fromkeys(["input_ids", "attention_mask", "token_type_ids", "labels"], (3, 32))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["input_ids"], bobs["input_ids"])
    source = batches(tokenizer, ["a short line of text with a few words"], batch_size=1, sequence_length=11)
    assert all((batch["labels"] != IGNORED).any() for batch in itertools.islice(source, 400))
    assert next(batches(tokenizer, [f"This is sentence {n}." for n in range(500)])), "short rows are joined"


def test_samples_are_two_pieces_between_special_tokens(tokenizer: Words) -> None:
    batch = next(batches(tokenizer))
    tokens, used = original(batch), batch["attention_mask"].bool()
    assert (tokens[:, 0] == tokenizer.cls_token_id).all()
    assert ((tokens == tokenizer.sep_token_id).sum(dim=1) == 2).all()
    assert ((tokens == tokenizer.pad_token_id) == ~used).all()
    assert (tokens.gather(1, used.sum(dim=1, keepdim=True) - 1) == tokenizer.sep_token_id).all()
    first_piece_ends = (tokens == tokenizer.sep_token_id).int().argmax(dim=1)
    first_piece = (batch["token_type_ids"] == 0) & used
    assert first_piece.sum(dim=1).tolist() == (first_piece_ends + 1).tolist()


@pytest.mark.slow
def test_fifteen_percent_are_hidden_in_the_published_proportions(tokenizer: Words) -> None:
    seen = list(itertools.islice(batches(tokenizer), 60))
    shown = torch.cat([batch["input_ids"] for batch in seen])
    labels = torch.cat([batch["labels"] for batch in seen])
    tokens = torch.cat([original(batch) for batch in seen])
    special = torch.isin(tokens, torch.tensor(tokenizer.all_special_ids))
    hidden = labels != IGNORED
    assert hidden.sum().item() / (~special).sum().item() == pytest.approx(0.15, abs=0.005)
    assert not (hidden & special).any()
    masked = (shown[hidden] == tokenizer.mask_token_id).float().mean().item()
    same = (shown[hidden] == labels[hidden]).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.02) and same == pytest.approx(0.1, abs=0.02)
    assert (shown[~hidden] != tokenizer.mask_token_id).all()


def test_a_peers_seed_is_the_same_in_every_process() -> None:
    by_hand = hashlib.blake2b(b"alice", digest_size=7, salt=(5).to_bytes(16, "big")).digest()
    assert peer_seed(5, b"alice") == int.from_bytes(by_hand, "big")
    assert len({peer_seed(seed, peer) for seed in (0, 1, -1) for peer in (b"alice", b"bob")}) == 6


def test_an_exhausted_iterator_is_reported(tokenizer: Words) -> None:
    source = batches(tokenizer, iter(["Only a few words. And only once."]))
    with pytest.raises(ValueError, match="exhausted"):
        next(source)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"sequence_length": 10}])
def test_sizes_too_small_are_refused(tokenizer: Words, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        batches(tokenizer, **wrong)


def test_an_error_of_the_users_own_text_is_raised_at_once(tokenizer: Words) -> None:
    class Texts:
        def __iter__(self) -> Iterator[str]:
            yield "one sentence. another one. " * 50
            raise RuntimeError("a bug of the user")

    with pytest.raises(RuntimeError, match="a bug of the user"):
        next(batches(tokenizer, Texts()))
