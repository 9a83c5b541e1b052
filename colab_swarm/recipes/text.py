"""Text to train on, as consecutive blocks in an order of each peer's own.

Every source becomes a `BlockSource`: called with a random generator it gives one pass over the text. Blocks
are a few pages long, so that a passage and what follows it are found in one block; peers that shuffle them
differently read different text from the start, however large the source. Files are never loaded whole.
"""

from __future__ import annotations

import glob
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

BLOCK_CHARS = 1 << 14
HUB_SHUFFLE_ROWS = 10_000

TextSource: TypeAlias = str | Path | Iterable[str | Path]
BlockSource: TypeAlias = Callable[[random.Random], Iterator[str]]


def open_text(text: TextSource) -> BlockSource:
    """A source of text blocks.

    Args:
        text: ``"python-docs"`` (the language reference that CPython carries); a file or a glob pattern; a
            list of `Path`; an iterable of strings, read again for each pass; or a folder or hub name for
            `datasets.load_dataset` (``name:configuration`` where there are several), of which the ``train``
            split and the ``text`` column are streamed.

    Raises:
        ValueError: the pattern or the list holds no file and no text.
    """
    if isinstance(text, str | Path):
        return _open_named(str(text))
    if not isinstance(text, Sequence):
        return lambda rng: pack(map(str, text))
    if not text:
        raise ValueError("text is an empty list: give some files or some strings")
    if all(isinstance(item, Path) for item in text):
        return _open_files([Path(item) for item in text])
    return _shuffled(list(pack(map(str, text))))


def pack(texts: Iterable[str], block_chars: int = BLOCK_CHARS) -> Iterator[str]:
    """Join consecutive texts, and cut long ones, into blocks of ``block_chars``; the last may be shorter."""
    waiting = ""
    for text in texts:
        waiting += text + "\n"
        whole = len(waiting) - len(waiting) % block_chars
        yield from (waiting[start : start + block_chars] for start in range(0, whole, block_chars))
        waiting = waiting[whole:]
    if waiting.strip():
        yield waiting


def _open_named(name: str) -> BlockSource:
    if name == "python-docs":
        from pydoc_data.topics import topics

        return _shuffled(list(pack(topics[key] for key in sorted(topics))))
    if Path(name).is_file():
        return _open_files([Path(name)])
    if glob.has_magic(name):
        files = sorted(Path(found) for found in glob.glob(name, recursive=True) if Path(found).is_file())
        if not files:
            raise ValueError(f"no file matches {name!r}")
        return _open_files(files)
    return _open_dataset(name)


def _shuffled(blocks: list[str]) -> BlockSource:
    return lambda rng: iter(rng.sample(blocks, len(blocks)))


def _open_files(files: list[Path]) -> BlockSource:
    places = [(file, start) for file in files for start in range(0, file.stat().st_size, BLOCK_CHARS)]
    if not places:
        raise ValueError(f"there is no text in {', '.join(map(str, files))}")
    return lambda rng: (_read_block(*place) for place in rng.sample(places, len(places)))


def _read_block(file: Path, start: int) -> str:
    """One block of bytes; a character cut in two at either end is left out."""
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(BLOCK_CHARS).decode(errors="ignore")


def open_hub(name: str) -> Any:
    """The ``train`` split of a folder or hub name (``name:configuration``) as a stream of `datasets`.

    Raises:
        ValueError: there is no such data set.
    """
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    try:
        return load_dataset(path, configuration or None, split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is no file here and cannot be loaded as a data set: {error}") from error


def text_of(row: dict[str, Any]) -> str:
    """The text of a row: its ``text``, or its first column of strings.

    Raises:
        ValueError: it has none.
    """
    if "text" in row:
        return str(row["text"])
    columns = [column for column, value in row.items() if isinstance(value, str)]
    if not columns:
        raise ValueError(f"the data set has no column of text, only {', '.join(row)}")
    return str(row[columns[0]])


def _open_dataset(name: str) -> BlockSource:
    rows = open_hub(name)

    def blocks(rng: random.Random) -> Iterator[str]:
        shuffled = rows.shuffle(seed=rng.getrandbits(32), buffer_size=HUB_SHUFFLE_ROWS)
        return pack(text_of(row) for row in shuffled)

    return blocks
