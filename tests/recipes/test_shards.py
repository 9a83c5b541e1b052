import json
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.recipes import text
from colab_swarm.recipes.batches import ShardReader
from colab_swarm.recipes.text import DOCUMENT_CHARS, Stopped, open_text
from tests.recipes.test_text import read


def numbered(count: int, documents: int = 3) -> list[Callable[[], Iterator[str]]]:
    """Shards whose documents name their shard."""

    def shard(number: int) -> Callable[[], Iterator[str]]:
        return lambda: (f"{number}.{document}" for document in range(documents))

    return [shard(number) for number in range(count)]


def test_every_pass_reads_all_shards_once_in_a_different_order() -> None:
    reader = ShardReader("numbers", numbered(20), seed=1)
    first, second = (list(islice(reader, 60)) for _ in range(2))
    assert sorted(first) == sorted(second) and first != second
    assert [document.split(".")[1] for document in first] == ["0", "1", "2"] * 20
    assert first == list(islice(ShardReader("numbers", numbered(20), seed=1), 60))
    assert first != list(islice(ShardReader("numbers", numbered(20), seed=2), 60))


@settings(max_examples=50)
@given(st.integers(0, 100))
def test_a_reader_resumes_from_any_position(taken: int) -> None:
    reader = ShardReader("numbers", numbered(7), seed=3)
    for _ in range(taken):
        next(reader)
    again = ShardReader("numbers", numbered(7), seed=3)
    again.seek(reader.position)
    assert list(islice(reader, 30)) == list(islice(again, 30))


def broken_shard() -> Iterator[str]:
    yield from ("broken 0", "broken 1")
    raise ConnectionError("connection lost")


def test_a_broken_shard_is_skipped_with_a_warning_until_the_next_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = ShardReader("web", [broken_shard, *numbered(1)], seed=0, wait=lambda seconds: None)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert sorted(islice(reader, 5)) == ["0.0", "0.1", "0.2", "broken 0", "broken 1"]
    assert caplog.messages[0].endswith("of 2 is given up after 2 documents: connection lost")


def test_a_source_that_never_gave_anything_raises_and_one_that_becomes_empty_later_is_retried() -> None:
    with pytest.raises(ValueError, match="'nothing' gave no text"):
        next(ShardReader("nothing", numbered(3, documents=0), seed=0, wait=lambda seconds: None))
    full = [True]
    shards = [lambda: iter(["here"] if full else [])]
    reader = ShardReader("web", shards, seed=0, wait=lambda seconds: full.append(True))
    assert next(reader) == "here"
    full.clear()
    assert next(reader) == "here" and full


def test_waiting_ends_when_the_reader_is_closed() -> None:
    full = [True]
    shards = [lambda: iter(["here"] if full else [])]
    reader = ShardReader("web", shards, seed=0, wait=lambda seconds: True)
    assert next(reader) == "here"
    full.clear()
    with pytest.raises(Stopped):
        next(reader)


@settings(max_examples=50)
@given(st.lists(st.text(alphabet="aক\n é", max_size=40), max_size=30), st.integers(1, 50))
def test_lines_are_read_once_and_whole_for_every_shard_size(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], shard_bytes: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "text.txt"
    file.write_bytes("\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "SHARD_BYTES", shard_bytes)
        found = "".join(read(file)) if file.stat().st_size else ""
    assert found == "\n".join(lines)


def test_plain_lines_become_documents_and_long_rows_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word\n" * 10_000)
    assert {len(document) for document in read(tmp_path / "a.txt")[:-1]} == {-(-DOCUMENT_CHARS // 5) * 5}
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * (DOCUMENT_CHARS + 1)}))
    assert [len(document) for document in read(tmp_path / "b.jsonl")] == [DOCUMENT_CHARS, 1]


@pytest.mark.slow
def test_a_large_parquet_file_is_many_shards_or_by_old_datasets_one_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    file = tmp_path / "all.parquet"
    documents = [f"row {n}" for n in range(50)]
    datasets.Dataset.from_dict({"text": documents}).to_parquet(file, batch_size=10)
    assert [list(shard()) for shard in open_text(file)] == [
        documents[at : at + 10] for at in range(0, 50, 10)
    ]
    monkeypatch.delattr(datasets.IterableDataset, "reshard")
    with caplog.at_level(logging.WARNING):
        (shard,) = open_text(file)
    assert list(shard()) == documents
    assert "install 'datasets>=5'" in caplog.text


def test_a_garbled_row_ends_its_shard_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "good.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "three"}\n{"text": \n{"text": "four"}\n')
    reader = ShardReader("both", open_text(str(tmp_path / "*.jsonl")), seed=0, wait=lambda seconds: None)
    with caplog.at_level(logging.WARNING):
        assert sorted(islice(reader, 3)) == ["one", "three", "two"]
        next(reader)
    assert "given up after 1 documents" in caplog.text
