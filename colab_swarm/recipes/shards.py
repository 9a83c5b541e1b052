"""Text as shards: parts of a source that can be read one by one, in any order.

A shard is called for one pass over its documents and may be called again: after a lost connection, on the next
pass, or to go on where another process stopped. Nothing is read before, and no shard is held in memory.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from colab_swarm.recipes.text import open_hub, open_text, text_of

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 22
"""How much of a local file is one shard; lines stay whole."""
MANY_SHARDS = 64
DOCUMENT_CHARS = 1 << 14
"""Lines of plain text are joined into documents of about this size; longer rows are cut."""
RETRY_AFTER_S = (1.0, 5.0, 25.0)

Shard: TypeAlias = Callable[[], Iterator[str]]


class Stopped(Exception):
    """The reader was closed while it waited to try again."""


def open_shards(source: str) -> list[Shard]:
    """The shards of a source of text.

    Args:
        source: a local file or glob pattern (plain text, ``.jsonl`` or ``.parquet``); a folder or a hub name for
            `datasets` (``name:configuration`` where there are several), of which the ``train`` split is streamed;
            or ``"python-docs"``. Rows give their ``text``, or the first column of strings.

    Raises:
        ValueError: there is no such thing, or no text in it.
    """
    if source == "python-docs":
        return [functools.partial(iter, [block]) for block in open_text(source)(random.Random(0))]
    paths = [source] if Path(source).is_file() else sorted(glob.glob(source, recursive=True))
    files = [Path(path) for path in paths if Path(path).is_file()]
    if glob.has_magic(source) and not files:
        raise ValueError(f"no file matches {source!r}")
    shards = (
        [shard for file in files for shard in _shards_of_file(file)] if files else _rows(open_hub(source))
    )
    if not shards:
        raise ValueError(f"there is no text in {source!r}")
    return shards


@dataclass(frozen=True)
class Place:
    """Where a reader is.

    Attributes:
        pass_number: counted from 0.
        shard: number in the shuffled order of this pass.
        documents: already given of this shard.
        given: the same of this pass.
    """

    pass_number: int = 0
    shard: int = 0
    documents: int = 0
    given: int = 0


class ShardReader:
    """The documents of one source for ever: pass after pass, its shards in a new random order each time.

    A shard that breaks is read again from where it broke, after `RETRY_AFTER_S`; then the rest of it is skipped
    with a warning. Only a source that never gave anything raises.

    Args:
        name: of the source, for messages.
        shards: see `open_shards`.
        seed: of the order.
        wait: sleeps for so many seconds; what it returns says whether to stop instead of going on.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        *,
        seed: int,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.name, self.count = name, len(shards)
        self.place = Place()
        self._shards, self._seed, self._wait = shards, seed, wait
        self._documents: Iterator[str] | None = None

    def __iter__(self) -> ShardReader:
        return self

    def __next__(self) -> str:
        """The next document.

        Raises:
            ValueError: the first pass gave nothing.
            Stopped: ``wait`` said so.
        """
        while True:
            document = self._next_of_shard()
            if document is not None:
                place = self.place
                self.place = replace(place, documents=place.documents + 1, given=place.given + 1)
                return document
            self._documents = None
            self._next_shard()

    def seek(self, place: Place) -> None:
        """Go on from a place where a reader of the same shards and seed was."""
        self.place, self._documents = place, None

    def _next_of_shard(self) -> str | None:
        """The next document of the shard at hand; None at its end, or where it is given up."""
        for delay_s in (*RETRY_AFTER_S, None):
            try:
                if self._documents is None:
                    self._documents = islice(self._shard()(), self.place.documents, None)
                return next(self._documents, None)
            except Exception as error:
                # datasets, fsspec, aiohttp and pyarrow raise what they like for a broken file or connection.
                self._documents = None
                where = f"{self.name}: shard {self.place.shard + 1} of {self.count}"
                if delay_s is None:
                    logger.warning(
                        "%s is given up after %d documents: %s", where, self.place.documents, error
                    )
                    return None
                logger.info("%s broke, next try in %g s: %s", where, delay_s, error)
                if self._wait(delay_s):
                    raise Stopped from error
        raise AssertionError("unreachable: the last delay is None")

    def _shard(self) -> Shard:
        order = random.Random(f"{self._seed}/{self.place.pass_number}")
        return self._shards[order.sample(range(self.count), self.count)[self.place.shard]]

    def _next_shard(self) -> None:
        place = self.place
        if place.shard + 1 < self.count:
            self.place = Place(place.pass_number, place.shard + 1, 0, place.given)
            return
        if not place.given and not place.pass_number:
            raise ValueError(f"{self.name!r} gave no text: see the warnings above, or open it by hand")
        if not place.given and self._wait(RETRY_AFTER_S[-1]):
            raise Stopped
        self.place = Place(place.pass_number + 1)


def _shards_of_file(file: Path) -> list[Shard]:
    if file.suffix == ".parquet":
        from datasets import load_dataset

        return _rows(load_dataset("parquet", data_files=str(file), split="train", streaming=True))
    documents = _json_documents if file.suffix == ".jsonl" else _joined
    starts = range(0, file.stat().st_size, SHARD_BYTES)
    return [functools.partial(_documents_between, documents, file, start) for start in starts]


def _rows(data_set: Any) -> list[Shard]:
    """The shards of a streamed data set; of a few large ones many small ones, or many peers read the same at first."""
    if data_set.num_shards < MANY_SHARDS and hasattr(data_set, "reshard"):  # datasets before 4.5 has none
        data_set = data_set.reshard()
    count: int = data_set.num_shards

    def shard(number: int) -> Iterator[str]:
        return _cut(text_of(row) for row in data_set.shard(count, number))

    return [functools.partial(shard, number) for number in range(count)]


def _documents_between(
    documents: Callable[[Iterable[str]], Iterator[str]], file: Path, start: int
) -> Iterator[str]:
    return documents(_lines(file, start))


def _lines(file: Path, start: int) -> Iterator[str]:
    """The lines that begin within one shard of a file."""
    with file.open("rb") as opened:
        if start:
            opened.seek(start - 1)
            opened.readline()
        while opened.tell() < start + SHARD_BYTES and (line := opened.readline()):
            yield line.decode(errors="ignore")


def _json_documents(lines: Iterable[str]) -> Iterator[str]:
    return _cut(text_of(json.loads(line)) for line in lines if line.strip())


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines of plain text, joined to documents of about `DOCUMENT_CHARS`."""
    waiting: list[str] = []
    size = 0
    for line in _cut(lines):
        waiting.append(line)
        size += len(line)
        if size >= DOCUMENT_CHARS:
            yield "".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield "".join(waiting)


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """The texts; what is longer than a document, a book in one row say, comes in pieces."""
    for text in texts:
        yield from (text[start : start + DOCUMENT_CHARS] for start in range(0, len(text), DOCUMENT_CHARS))
