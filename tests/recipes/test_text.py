import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Words

from colab_swarm.recipes import text as recipe_text
from colab_swarm.recipes.text import SHARD_BYTES, Passage, TextSource, open_text, ordered, pack, passages


def read(text: TextSource) -> list[str]:
    return [document for shard in open_text(text) for document in shard()]


@settings(max_examples=100)
@given(st.lists(st.text(max_size=50), max_size=20), st.integers(1, 40))
def test_packing_keeps_all_text_in_order_in_blocks_of_one_size(texts: list[str], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_text, "DOCUMENT_CHARS", size)
        blocks = list(pack(texts))
    assert all(len(block) == size for block in blocks[:-1])
    whole = "".join(text + "\n" for text in texts)
    assert whole.startswith("".join(blocks)) and not whole.removeprefix("".join(blocks)).strip()


def test_the_python_documentation_is_there_without_a_download() -> None:
    shards = open_text("python-docs")  # many: each peer reads them in another order
    assert len(shards) > 20
    documents = [document for shard in shards for document in shard()]
    assert sum(map(len, documents)) > 300_000
    assert any("compound statement" in document for document in documents)


@pytest.mark.slow
def test_a_source_is_a_path_a_pattern_a_list_or_a_folder_of_text_jsonl_or_parquet(tmp_path: Path) -> None:
    from datasets import Dataset

    texts = [f"row {n}" for n in range(5)]
    rows = Dataset.from_dict({"id": list(range(5)), "text": texts})
    for part in "ab":
        rows.to_json(tmp_path / f"{part}.jsonl")
        with (tmp_path / f"{part}.jsonl").open("a") as opened:
            opened.write("\n\n")
        rows.to_parquet(tmp_path / f"{part}.parquet")
        (tmp_path / f"{part}.txt").write_text(f"{part} " * 9000)
    for ending in ("jsonl", "parquet"):
        assert sorted(read(tmp_path / f"*.{ending}")) == sorted(2 * texts)
    both = read(str(tmp_path / "*.txt"))
    (tmp_path / "empty.txt").touch()
    assert sum(map(len, both)) == 36_000 and read(tmp_path / "a.txt") == both[:2]
    assert read([tmp_path / "a.txt", tmp_path / "empty.txt", tmp_path / "b.txt"]) == both
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "folder" / "train.jsonl")
    assert read(tmp_path / "folder") == texts


@pytest.mark.slow
def test_a_source_without_text_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty.txt").touch()
    sources: dict[TextSource, str] = {
        "no/such/thing": "'no/such/thing' is neither a local file nor a Hub data set",
        "*.none": "no file matches",
        (): "no text",
        tmp_path / "empty.txt": "no text",
        (tmp_path / "empty.txt", tmp_path / "gone.txt"): r"there is no file .*gone",
    }
    for source, reason in sources.items():
        with pytest.raises(ValueError, match=reason):
            read(source)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("আমি যাই।তুমি এসো| সে ৫.৩ কি.মি. দূরে", ["আমি যাই।", "তুমি এসো|", "সে ৫.৩ কি.মি. দূরে"]),
        ("Go! It is 3.5 km.\nNo full stop\n\nWhy? ", ["Go!", "It is 3.5 km.", "No full stop", "Why?"]),
        ("এক । দুই ॥ তিন | চার", ["এক ।", "দুই ॥", "তিন |", "চার"]),
        ("ড. শহীদুল্লাহ এলেন। মো. করিম গেলেন! সে?", ["ড. শহীদুল্লাহ এলেন।", "মো. করিম গেলেন!", "সে?"]),
        ("এটি IBM. তারপর", ["এটি IBM.", "তারপর"]),
        (" \n ", []),
    ],
)
def test_sentences_end_at_punctuation_and_line_breaks(text: str, sentences: list[str]) -> None:
    assert recipe_text.split_sentences(text) == sentences


@settings(max_examples=200)
@given(st.text(alphabet="ab .!?ক।|\n", max_size=80))
def test_splitting_loses_nothing_but_space(text: str) -> None:
    assert "".join("".join(recipe_text.split_sentences(text)).split()) == "".join(text.split())


def test_passages_hold_the_document_in_order(tokenizer: Words) -> None:
    text = ". ".join(f"number {n} is larger than number {n - 1}" for n in range(100, 200))
    found = list(passages(text, tokenizer, 61))
    together = np.concatenate([passage.tokens for passage in found])
    assert tokenizer.decode(together).startswith(text[:3000])
    assert all(61 <= len(passage.tokens) <= 61 + 30 for passage in found[:-1])
    for passage in found:
        assert tokenizer.decode(passage.tokens[passage.borders[0] :]).startswith("number")


def test_a_very_long_sentence_is_cut_and_a_lone_one_is_dropped(tokenizer: Words) -> None:
    (passage, *_) = passages("word " * 500, tokenizer, 61)
    assert passage.borders[:2] == (30, 60)
    assert not list(passages("only one sentence.", tokenizer, 61))
    assert not list(passages(" \n", tokenizer, 61))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(2, 60), st.integers(0, 99))
def test_a_sample_is_two_neighbouring_pieces_that_fit(lengths: list[int], room: int, seed: int) -> None:
    tokens = np.arange(sum(lengths), dtype=np.int32)
    borders = tuple(np.cumsum(lengths)[:-1].tolist())
    first, second, swapped = ordered(Passage(tokens, borders), room, random.Random(seed))
    before, after = (second, first) if swapped else (first, second)
    assert before[0] == 0 and after[0] in borders
    assert min(len(first), len(second)) >= 1 and len(first) + len(second) == min(room, len(tokens))
    border, left = int(after[0]), len(tokens) - int(after[0])
    shorter_is_whole = len(before) == border <= len(after) or len(after) == left <= len(before)
    assert shorter_is_whole or abs(len(before) - len(after)) <= 1


def test_half_of_the_samples_are_swapped() -> None:
    passage = Passage(np.arange(9, dtype=np.int32), (3, 6))
    rng = random.Random(0)
    samples = [ordered(passage, 99, rng) for _ in range(400)]
    assert 150 < sum(swapped for *_, swapped in samples) < 250
    starts = {(int(first[0]), int(second[0])) for first, second, _ in samples}
    assert starts == {(0, 3), (0, 6), (3, 0), (6, 0)}


def test_a_text_without_line_breaks_is_read_once_in_shards(tmp_path: Path) -> None:
    (tmp_path / "text8.txt").write_bytes(b"ab" * SHARD_BYTES)
    shards = [sum(map(len, shard())) for shard in open_text(tmp_path / "text8.txt")]
    assert shards == [SHARD_BYTES, SHARD_BYTES]
