"""Labelled examples from files, folders and the hub."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

SPLITS = ("train", "validation", "test")
HELD_OUT = 0.1
"""Share of the training examples that validates where no file does."""
TAG = re.compile(r"O|[BIESLU]-\S+")
TEXT_COLUMNS = ("tokens", "text", "sentence", "content", "headline", "news", "review")
LABEL_COLUMNS = ("ner_tags", "tags", "labels", "label", "category", "class", "sentiment")


@dataclass(frozen=True)
class Example:
    """A text with its label, or its words with a tag for each."""

    text: str | tuple[str, ...]
    label: str | tuple[str, ...]


@dataclass(frozen=True)
class Columns:
    """Where rows keep text and label; None: the first of the usual names that is there."""

    text: str | None = None
    label: str | None = None


Splits: TypeAlias = dict[str, list[Example]]


def load_examples(source: str | Path, columns: Columns | None = None, *, seed: int = 0) -> Splits:
    """Examples for ``"train"``, ``"validation"`` and, if there are any, ``"test"``.

    Args:
        source: a file (``.jsonl``; ``.csv`` or ``.tsv`` with a header; else CoNLL: a word and, last in the line, its
            tag; an empty line between sentences), of which a tenth validates; a folder with such files, named after
            the splits; or a hub name (``name:configuration`` where there are several).
        columns: where rows keep text and label; CoNLL needs none.
        seed: of the choice of the tenth.

    Raises:
        ValueError: something in it is not understood; the text says what and where.
    """
    path, columns = Path(source), columns or Columns()
    if path.is_dir():
        splits = {
            split: read_examples(found, columns) for split in SPLITS for found in path.glob(f"{split}.*")
        }
    elif path.is_file():
        splits = {"train": read_examples(path, columns)}
    else:
        splits = _from_hub(str(source), columns)
    if not splits.get("train"):
        raise ValueError(
            f"{source} has no examples to train on: a folder needs a file train.jsonl, .csv or .conll"
        )
    if not splits.get("validation"):
        mixed = random.Random(seed).sample(splits["train"], len(splits["train"]))
        held_out = max(1, int(len(mixed) * HELD_OUT))
        splits |= {"train": mixed[held_out:], "validation": mixed[:held_out]}
    return splits


def read_examples(path: Path, columns: Columns) -> list[Example]:
    """The examples of one file, see `load_examples`.

    Raises:
        ValueError: it is not understood.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            return [_example(json.loads(line), columns) for line in file if line.strip()]
        if path.suffix in {".csv", ".tsv"}:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            return [_example(row, columns) for row in rows]
        return _read_conll(file, path)


def _read_conll(lines: Iterable[str], path: Path) -> list[Example]:
    found: list[Example] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        fields = line.split()
        if line.startswith("-DOCSTART-"):
            continue
        if len(fields) > 1 and TAG.fullmatch(fields[-1]):
            words.append(fields[0])
            tags.append(fields[-1])
        elif not fields and words:
            found.append(Example(tuple(words), tuple(tags)))
            words, tags = [], []
        elif fields and not line.startswith("#"):
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} does not end in a tag such as O or B-PER"
            )
    return found


def _from_hub(name: str, columns: Columns) -> Splits:
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    try:
        loaded = load_dataset(path, configuration or None)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no file or folder here and cannot be loaded from the hub: {error}"
        ) from error
    return {split: _from_rows(loaded[split], columns) for split in SPLITS if split in loaded}


def _from_rows(rows: Any, columns: Columns) -> list[Example]:
    """Rows of `datasets`, whose labels may be numbers of named classes."""
    first = next(iter(rows), None)
    if first is None:
        return []
    feature = rows.features[_column(first, columns.label, LABEL_COLUMNS, "label")]
    classes = getattr(feature, "feature", feature)
    name_of: Callable[[Any], str] = getattr(classes, "int2str", str)
    return [_example(row, columns, name_of) for row in rows]


def _example(row: dict[str, Any], columns: Columns, name_of: Callable[[Any], str] = str) -> Example:
    text = row[_column(row, columns.text, TEXT_COLUMNS, "text")]
    label = row[_column(row, columns.label, LABEL_COLUMNS, "label")]
    if not isinstance(text, list):
        return Example(str(text), name_of(label))
    if not isinstance(label, list) or len(text) != len(label):
        raise ValueError(f"words and tags differ in number: {text} and {label}")
    return Example(tuple(map(str, text)), tuple(map(name_of, label)))


def _column(row: dict[str, Any], wanted: str | None, usual: Sequence[str], what: str) -> str:
    for name in (wanted,) if wanted else usual:
        if name in row:
            return name
    raise ValueError(
        f"none of the columns {', '.join(map(str, row))} is the {what}: name it with --{what}-column"
    )
