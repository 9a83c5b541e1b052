import gc
import json
import random
import threading
import weakref
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast as Words

from colab_swarm.recipes import batches
from colab_swarm.recipes.batches import MixedBatches, StreamedBatches, TextMix
from colab_swarm.recipes.text import Stopped
from colab_swarm.training.state import load_checkpoint, save_checkpoint
from tests.recipes.test_pretraining import original

SOURCES = {"python-docs": 1.0}
SMALL = {"batch_size": 8, "sequence_length": 64, "seed": 1}


@pytest.fixture
def two_sources(tmp_path: Path) -> dict[str, float]:
    """Two sources of three shards each, whose documents name their source."""
    for name in ("wiki", "oscar"):
        for part in range(3):
            rows = [{"text": f"{name} says {n}. And then it says {n + 1}."} for n in range(200)]
            (tmp_path / f"{name}{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {str(tmp_path / "wiki*.jsonl"): 0.23, str(tmp_path / "oscar*.jsonl"): 0.77}


def mixed(tokenizer: Words, sources: dict[str, float] = SOURCES, **options: Any) -> MixedBatches:
    settings = {"buffer": 300} | SMALL | options
    return MixedBatches(TextMix(sources, seed=settings["seed"]), tokenizer, **settings)


def streamed(tokenizer: Words) -> StreamedBatches:
    return StreamedBatches(mixed(tokenizer), threading.Event())


def test_sources_are_drawn_by_their_probability(two_sources: dict[str, float]) -> None:
    mix, rng = TextMix(two_sources, seed=0), random.Random(0)
    drawn = Counter(mix.draw(rng).split()[0] for _ in range(3000))
    assert drawn["wiki"] / 3000 == pytest.approx(0.23, abs=0.03)
    assert set(drawn) == {"wiki", "oscar"}


def test_a_tokenizer_sees_all_of_every_source(two_sources: dict[str, float]) -> None:
    text = "".join(TextMix(two_sources, seed=0).until_read(random.Random(0)))
    assert len(set(text.splitlines())) == 400


def test_a_batch_is_made_of_neighbouring_sentences(tokenizer: Words, two_sources: dict[str, float]) -> None:
    for batch in islice(mixed(tokenizer, two_sources), 5):
        rows = original(batch), batch["token_type_ids"], batch["sentence_order_label"]
        for row, types, swapped in zip(*rows, strict=True):
            end = int(batch["attention_mask"].sum(dim=1).max())
            first, second = (
                tokenizer.decode(row[:end][types[:end] == part], skip_special_tokens=True) for part in (0, 1)
            )
            assert first.startswith("and then" if swapped else ("wiki", "oscar"))
            assert second.startswith("and then") is not bool(swapped)


def test_drawing_starts_while_the_buffer_still_grows(tokenizer: Words, two_sources: dict[str, float]) -> None:
    most = batches.FIRST_PASSAGES
    made = mixed(tokenizer, two_sources, batch_size=1, buffer=most + 20)
    held = []
    for _ in range(40):
        next(made)
        held.append(len(made.state_dict()["token_counts"]))
    assert held == [most - 1 + min(drawn, 20) for drawn in range(40)]


@pytest.mark.slow
def test_a_restarted_peer_resumes_with_exactly_the_next_batch(tokenizer: Words, tmp_path: Path) -> None:
    alice = streamed(tokenizer)
    for _ in range(5):
        next(alice)
    save_checkpoint(tmp_path / "state", alice.state_dict())
    expected = list(islice(alice, 20))
    alice.close()
    again = streamed(tokenizer)
    again.load_state_dict(load_checkpoint(tmp_path / "state"))
    for batch, wanted in zip(islice(again, 20), expected, strict=True):
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
    again.close()
    assert not threads()


def test_text_without_a_second_sentence_is_reported(
    tokenizer: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "PATIENCE_DOCUMENTS", 20)
    (tmp_path / "lone.jsonl").write_text('{"text": "one sentence"}\n' * 3)
    with pytest.raises(ValueError, match=r"join the rows of .*lone"):
        next(mixed(tokenizer, {str(tmp_path / "lone.jsonl"): 1.0}))


@pytest.mark.parametrize("sources", [{}, {"python-docs": 0.0}, {"python-docs": -1.0}])
def test_a_mix_needs_sources_with_positive_weights(sources: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive weights"):
        TextMix(sources, seed=0)


def test_a_state_of_other_batches_is_refused(tokenizer: Words, two_sources: dict[str, float]) -> None:
    state = mixed(tokenizer).state_dict()
    with pytest.raises(ValueError, match="sequence_length=64 does not fit sequence_length=32"):
        mixed(tokenizer, sequence_length=32).load_state_dict(state)
    state["mix"]["python-docs"] = (7, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="python-docs had 7 shards and has"):
        mixed(tokenizer).load_state_dict(state)
    with pytest.raises(ValueError, match="a state of python-docs does not fit sources"):
        mixed(tokenizer, two_sources).load_state_dict(state)


TIMEOUT_S = 20


class Numbers:
    """Counts from 0 instead of batches; raises at ``fail_at``; waits at ``hold_at`` until it is stopped."""

    def __init__(self, *, fail_at: int = -1, hold_at: int = -1) -> None:
        self.next, self.fail_at, self.hold_at = 0, fail_at, hold_at
        self.tokenizer = None
        self.stop = threading.Event()

    def __next__(self) -> int:
        if self.next == self.fail_at:
            raise OSError("no more numbers")
        if self.next == self.hold_at and self.stop.wait(TIMEOUT_S):
            raise Stopped
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def ahead(source: Numbers) -> StreamedBatches:
    return StreamedBatches(source, source.stop)  # type: ignore[arg-type]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_batches_come_in_order_and_a_state_is_that_of_the_consumer_not_of_the_thread() -> None:
    items, again = ahead(Numbers()), ahead(Numbers())
    assert list(islice(items, 10)) == list(range(10))
    state = items.state_dict()
    assert state["source"] == {"next": 10 + batches.AHEAD}, "as many are made ahead, and no more"
    again.load_state_dict(state)
    assert list(islice(again, 20)) == list(islice(items, 20)) == list(range(10, 30))
    for each in (items, again):
        each.close()


def test_an_error_comes_after_the_batches_made_before_it_and_does_not_prevent_a_save() -> None:
    items = ahead(Numbers(fail_at=3))
    assert next(items) == 0
    assert items.state_dict() == {"source": {"next": 3}, "ahead": [1, 2]}
    assert list(islice(items, 2)) == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="no more numbers"):
            next(items)
    items.close()


def test_closing_ends_the_thread_even_while_the_source_waits() -> None:
    items = ahead(Numbers(hold_at=2))
    assert list(islice(items, 2)) == [0, 1]
    items.close()
    assert list(items) == [] and not threads()


def test_collecting_the_iterator_ends_the_thread() -> None:
    items = ahead(Numbers())
    next(items)
    (thread,) = threads()
    gone = weakref.ref(items)
    del items
    gc.collect()
    thread.join(TIMEOUT_S)
    assert gone() is None and not thread.is_alive()
