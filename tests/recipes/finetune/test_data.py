from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.recipes.finetune.data import Columns, Example, load_examples, read_examples

CONLL = """-DOCSTART- -X- O

# id 7 domain=bn
আমি PRON O
ঢাকায় PROPN B-LOC

মা NOUN O
"""
ALICE = Example(("alice", "sleeps"), ("B-PER", "O"))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_conll_sentences_end_at_empty_lines(tmp_path: Path) -> None:
    assert read_examples(written(tmp_path / "a.conll", CONLL), Columns()) == [
        Example(("আমি", "ঢাকায়"), ("O", "B-LOC")),
        Example(("মা",), ("O",)),
    ]


def test_a_line_without_a_tag_is_reported_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.conll, line 2: 'bob' does not end in a tag"):
        read_examples(written(tmp_path / "a.conll", "alice B-PER\nbob\n"), Columns())


@given(st.text(max_size=60))
def test_whatever_a_conll_file_holds_words_and_tags_match_or_it_is_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.conll"
    path.write_bytes(text.encode("utf-8", errors="replace"))
    try:
        found = read_examples(path, Columns())
    except ValueError:
        return
    assert all(len(example.text) == len(example.label) > 0 for example in found)


def test_rows_of_json_and_csv_are_examples(tmp_path: Path) -> None:
    rows = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
    expected = [Example("good", "1"), Example("bad", "0")]
    lines = "\n".join(map(json.dumps, rows))
    assert read_examples(written(tmp_path / "a.jsonl", lines), Columns()) == expected
    assert read_examples(written(tmp_path / "a.csv", "label,text\n1,good\n0,bad\n"), Columns()) == expected
    tagged = json.dumps({"tokens": ALICE.text, "ner_tags": ALICE.label})
    assert read_examples(written(tmp_path / "b.jsonl", tagged), Columns()) == [ALICE]


def test_columns_of_other_names_have_to_be_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.tsv", "body\tverdict\nfine\tyes\n")
    assert read_examples(file, Columns("body", "verdict")) == [Example("fine", "yes")]
    with pytest.raises(
        ValueError, match="none of the columns body, verdict is the text: name it with --text-column"
    ):
        read_examples(file, Columns())


def test_words_and_tags_that_differ_in_number_are_refused(tmp_path: Path) -> None:
    row = json.dumps({"tokens": ["a", "b"], "tags": ["O"]})
    with pytest.raises(ValueError, match="differ in number"):
        read_examples(written(tmp_path / "a.jsonl", row), Columns())


def test_a_tenth_validates_where_no_file_does(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": f"text {n}", "label": str(n % 2)}) for n in range(50))
    file = written(tmp_path / "train.jsonl", lines)
    splits = load_examples(file, seed=1)
    assert {name: len(examples) for name, examples in splits.items()} == {"train": 45, "validation": 5}
    assert {example.text for examples in splits.values() for example in examples} == {
        f"text {n}" for n in range(50)
    }
    assert splits == load_examples(file, seed=1) != load_examples(file, seed=2)


def test_a_folder_holds_a_file_for_each_split(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.conll", f"{split} B-PER\n")
    splits = load_examples(tmp_path)
    assert {name: example.text for name, (example,) in splits.items()} == {
        name: (name,) for name in ("train", "validation", "test")
    }
    (tmp_path / "train.conll").unlink()
    with pytest.raises(ValueError, match="needs a file train"):
        load_examples(tmp_path)


@pytest.mark.slow
def test_labels_of_a_data_set_that_are_numbers_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    tags = datasets.ClassLabel(names=["O", "B-PER"])
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(tags)}
    )
    rows = {"tokens": [list(ALICE.text)], "ner_tags": [[1, 0]]}
    stored = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, configuration: {"wikiann:bn": stored}[f"{name}:{configuration}"],
    )
    assert load_examples("wikiann:bn")["validation"] == [ALICE]


@pytest.mark.slow
def test_a_name_that_is_nothing_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'no/such/thing' is no file or folder here and cannot be loaded"):
        load_examples("no/such/thing")
