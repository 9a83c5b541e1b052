from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.recipes.text import BLOCK_CHARS, TextSource, open_text, pack


def read(text: TextSource, seed: int = 0) -> list[str]:
    return list(open_text(text)(random.Random(seed)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=50), max_size=20), st.integers(1, 40))
def test_packing_keeps_all_text_in_order_in_blocks_of_one_size(texts: list[str], size: int) -> None:
    blocks = list(pack(texts, size))
    assert all(len(block) == size for block in blocks[:-1])
    whole = "".join(text + "\n" for text in texts)
    assert whole.startswith("".join(blocks))
    assert not whole.removeprefix("".join(blocks)).strip()


def test_the_python_documentation_is_there_without_a_download() -> None:
    blocks = read("python-docs")
    assert sum(map(len, blocks)) > 300_000
    assert any("compound statement" in block for block in blocks)


def test_peers_read_the_same_blocks_in_different_orders() -> None:
    alice, bob = read("python-docs", 1), read("python-docs", 2)
    assert alice != bob
    assert sorted(alice) == sorted(bob)
    assert alice == read("python-docs", 1)


def test_files_are_found_by_path_by_pattern_and_by_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha " * 4000)
    (tmp_path / "b.txt").write_text("beta")
    both = sorted(read(str(tmp_path / "*.txt")))
    assert sum(map(len, both)) == 24_004
    assert sorted(read([tmp_path / "a.txt", tmp_path / "b.txt"])) == both
    assert sorted(read(tmp_path / "a.txt")) == both[:2]


def test_a_letter_cut_by_a_block_border_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "bengali.txt"
    # three bytes each: every border but one cuts a letter
    file.write_text("ক" * BLOCK_CHARS, encoding="utf-8")
    letters = "".join(read(file))
    assert set(letters) == {"ক"}
    assert BLOCK_CHARS - 2 <= len(letters) < BLOCK_CHARS


def test_strings_and_generators_of_strings_are_text() -> None:
    assert read(["one", "two"]) == ["one\ntwo\n"]
    assert read(word for word in ("one", "two")) == ["one\ntwo\n"]


@pytest.mark.slow
def test_a_folder_is_read_as_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": 1, "body": "first"}\n{"id": 2, "body": "second"}\n')
    assert sorted("".join(read(tmp_path)).split()) == ["first", "second"]


@pytest.mark.slow
def test_a_name_that_is_nothing_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'no/such/thing' is no file here and cannot be loaded"):
        read("no/such/thing")


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    sources = {"*.none": "no file matches", (): "empty list", tmp_path / "empty.txt": "no text"}
    for source, reason in sources.items():
        with pytest.raises(ValueError, match=reason):
            read(source)
