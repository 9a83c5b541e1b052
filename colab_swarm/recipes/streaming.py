"""Endless batches from a mix of sources, each read shard by shard, as sahajBERT streamed them (DeDLOC, section 3.3).

A document comes from one of the sources, by probability; it is cut into passages of whole sentences; these wait in a
buffer, from which samples are drawn at random. All of it happens ahead, in a thread, and its state can be saved.

Text as shards: parts of a source that can be read one by one, in any order.

A shard is called for one pass over its documents and may be called again: after a lost connection, on the next
pass, or to go on where another process stopped. Nothing is read before, and no shard is held in memory.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from colab_swarm.recipes.pretraining import Collator, check_sizes
from colab_swarm.recipes.text import Passage, open_hub, open_text, order_sample, passages, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
class StreamPosition:
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
        self.place = StreamPosition()
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

    def seek(self, place: StreamPosition) -> None:
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
            self.place = StreamPosition(place.pass_number, place.shard + 1, 0, place.given)
            return
        if not place.given and not place.pass_number:
            raise ValueError(f"{self.name!r} gave no text: see the warnings above, or open it by hand")
        if not place.given and self._wait(RETRY_AFTER_S[-1]):
            raise Stopped
        self.place = StreamPosition(place.pass_number + 1)


def _shards_of_file(file: Path) -> list[Shard]:
    if file.suffix == ".parquet":
        from datasets import load_dataset

        return _rows(load_dataset("parquet", data_files=str(file), split="train", streaming=True))
    documents = _json_documents if file.suffix == ".jsonl" else _join_pieces
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


def _join_pieces(lines: Iterable[str]) -> Iterator[str]:
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


T = TypeVar("T")

Item = TypeVar("Item", covariant=True)

CLOSE_S = 5.0

CHECK_S = 0.2

"""A consumer wakes up so often, so that an interrupt reaches it on Windows too."""


class Resumable(Protocol[Item]):
    """An iterator that can tell where it is, and go on from there."""

    def __next__(self) -> Item: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Prefetched(Generic[T]):
    """The items of ``source``, of which up to ``depth`` are made ahead.

    An error of the source is raised once the items made before it are used up. The thread begins with the first item
    and ends with `close`, or when nobody holds this object any more.

    Args:
        source: used by one thread at a time.
        depth: items ahead, at least 1.
        stop: set by `close`, so that a source that waits for something can stop waiting.
    """

    def __init__(self, source: Resumable[T], *, depth: int, stop: threading.Event) -> None:
        self._line = _Line(source, depth, stop)
        weakref.finalize(
            self, self._line.close
        )  # at exit as well: a thread killed within pyarrow takes all along

    def __iter__(self) -> Prefetched[T]:
        return self

    def __next__(self) -> T:
        if self._line.thread is None:
            self._line.thread = threading.Thread(target=self._line.produce, name="prefetch", daemon=True)
            self._line.thread.start()
        return self._line.take()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item taken. Waits until the item being made is there."""
        with self._line.making:
            return {"source": self._line.source.state_dict(), "ahead": list(self._line.ahead)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next item is the one that was next there."""
        with self._line.making, self._line.changed:
            self._line.source.load_state_dict(state["source"])
            self._line.ahead = deque(state["ahead"])
            self._line.changed.notify_all()

    def close(self) -> None:
        """Stop the thread; waits up to `CLOSE_S` for its end. Iteration ends with the items made so far."""
        self._line.close()


class _Line(Generic[T]):
    """What both sides share; the thread holds this and not the `Prefetched`, or that would never be let go."""

    def __init__(self, source: Resumable[T], depth: int, stop: threading.Event) -> None:
        self.source, self.depth, self.stop = source, depth, stop
        self.thread: threading.Thread | None = None
        self.ahead: deque[T] = deque()
        self.error: Exception | None = None
        self.changed = threading.Condition()  # guards ahead and error
        self.making = threading.Lock()  # held while the source is in use and until its item is in ahead

    def produce(self) -> None:
        while not self.stop.is_set():
            with self.changed:
                self.changed.wait_for(lambda: len(self.ahead) < self.depth or self.stop.is_set())
            with self.making:
                if self.stop.is_set() or not self._make():
                    return

    def _make(self) -> bool:
        item, error = None, None
        try:
            item = next(self.source)
        except Stopped:
            return False
        except Exception as raised:
            error = raised  # belongs to the consumer's thread
        with self.changed:
            if error is None:
                self.ahead.append(item)  # type: ignore[arg-type]
            self.error = error
            self.changed.notify_all()
        return error is None

    def take(self) -> T:
        with self.changed:
            while not self.ahead:
                if self.error is not None:
                    raise self.error
                if self.stop.is_set():
                    raise StopIteration
                self.changed.wait(CHECK_S)
            item = self.ahead.popleft()
            self.changed.notify_all()
            return item

    def close(self) -> None:
        self.stop.set()
        with self.changed:
            self.changed.notify_all()
        if self.thread not in (None, threading.current_thread()):
            self.thread.join(CLOSE_S)


SHUFFLE_PASSAGES = 10_000

FIRST_PASSAGES = 256

"""The first sample is drawn from so many passages; then two come in for one that goes, until the buffer is full."""

BATCHES_AHEAD = 8

PATIENCE_DOCUMENTS = 10_000

"""So many documents in a row without a passage are no text for sentence-order prediction."""


class TextMix:
    """Documents from several sources, each next one from a source drawn by probability.

    Args:
        sources: name (see `open_shards`) to weight, such as ``{"wiki": 0.23, "oscar": 0.77}``; the weights need not
            add up to 1.
        seed: of the order of the shards.
        wait: see `ShardReader`.

    Raises:
        ValueError: a weight is not positive, or a source cannot be opened.
    """

    def __init__(
        self, sources: Mapping[str, float], *, seed: int, wait: Callable[[float], object] = time.sleep
    ) -> None:
        if not sources or not all(weight > 0 for weight in sources.values()):
            raise ValueError(f"sources={dict(sources)}: give at least one, with positive weights")
        self.sources = dict(sources)
        self._readers = [ShardReader(name, open_shards(name), seed=seed, wait=wait) for name in sources]

    def draw(self, rng: random.Random) -> str:
        """The next document."""
        (reader,) = rng.choices(self._readers, weights=list(self.sources.values()))
        return next(reader)

    def until_read(self, rng: random.Random) -> Iterator[str]:
        """Documents until each of the sources has been read to its end at least once."""
        while not all(reader.place.pass_number for reader in self._readers):
            yield self.draw(rng)

    def state_dict(self) -> dict[str, Any]:
        return {reader.name: (reader.count, *astuple(reader.place)) for reader in self._readers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of other sources, or they have changed.
        """
        if set(state) != set(self.sources):
            raise ValueError(f"a state of {', '.join(state)} does not fit sources {', '.join(self.sources)}")
        for reader in self._readers:
            count = state[reader.name][0]
            if count != reader.count:
                raise ValueError(
                    f"{reader.name} had {count} shards and has {reader.count}: begin without the state"
                )
        for reader in self._readers:
            reader.seek(StreamPosition(*state[reader.name][1:]))


class ShuffleBuffer:
    """Passages in waiting, up to ``size``, from which any may be drawn (DeDLOC, section 3.3)."""

    def __init__(self, size: int) -> None:
        self._size, self._drawn = size, 0
        self._held: list[Passage] = []

    @property
    def hungry(self) -> bool:
        return len(self._held) < min(self._size, FIRST_PASSAGES + self._drawn)

    def extend(self, found: Sequence[Passage]) -> None:
        self._held.extend(found)

    def draw(self, rng: random.Random) -> Passage:
        place = rng.randrange(len(self._held))
        self._held[place], self._held[-1] = self._held[-1], self._held[place]
        self._drawn += 1
        return self._held.pop()

    def state_dict(self) -> dict[str, Any]:
        """All passages in four tensors: one tensor for each would be slow to save."""
        return {
            "drawn": self._drawn,
            "tokens": _joined([passage.tokens for passage in self._held]),
            "token_counts": torch.tensor([len(passage.tokens) for passage in self._held], dtype=torch.int64),
            "borders": _joined([np.array(passage.borders, dtype=np.int32) for passage in self._held]),
            "border_counts": torch.tensor(
                [len(passage.borders) for passage in self._held], dtype=torch.int64
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        tokens = state["tokens"].split(state["token_counts"].tolist())
        borders = state["borders"].split(state["border_counts"].tolist())
        self._held = [
            Passage(t.numpy().copy(), tuple(b.tolist())) for t, b in zip(tokens, borders, strict=True)
        ]


class MixedBatches:
    """Batches as `PretrainingBatches` gives them, of samples from whole sentences; can be resumed exactly.

    Args:
        mix: where documents come from.
        tokenizer: with pad, cls, sep and mask tokens.
        batch_size, sequence_length: B and L.
        seed: for the choice of sources, the buffer, the swaps and the masks; see `peer_seed`.
        buffer: passages to shuffle among.

    Raises:
        ValueError: a size is too small.
    """

    def __init__(
        self,
        mix: TextMix,
        tokenizer: PreTrainedTokenizerFast,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        buffer: int = SHUFFLE_PASSAGES,
    ) -> None:
        check_sizes(batch_size, sequence_length)
        self.tokenizer, self.batch_size, self.sequence_length = tokenizer, batch_size, sequence_length
        self._mix = mix
        self._buffer = ShuffleBuffer(buffer)
        self._rng = random.Random(seed)
        self._collate = Collator(tokenizer, sequence_length, seed)

    def __next__(self) -> dict[str, Tensor]:
        samples = []
        for _ in range(self.batch_size):
            self._fill()
            first, second, swapped = order_sample(
                self._buffer.draw(self._rng), self.sequence_length - 3, self._rng
            )
            samples.append((first.tolist(), second.tolist(), swapped))
        return self._collate(samples)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sequence_length": self.sequence_length,
            "vocabulary": len(self.tokenizer),
            "mix": self._mix.state_dict(),
            "buffer": self._buffer.state_dict(),
            "rng": self._rng.getstate(),
            "masks": self._collate.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of other sources, another tokenizer or another length.
        """
        for name, mine in (("sequence_length", self.sequence_length), ("vocabulary", len(self.tokenizer))):
            if state[name] != mine:
                raise ValueError(f"a state with {name}={state[name]} does not fit {name}={mine}")
        self._mix.load_state_dict(state["mix"])
        self._buffer.load_state_dict(state["buffer"])
        self._rng.setstate(state["rng"])
        self._collate.generator.set_state(state["masks"])

    def _fill(self) -> None:
        fruitless = 0
        while self._buffer.hungry:
            found = passages(self._mix.draw(self._rng), self.tokenizer, self.sequence_length - 3)
            self._buffer.extend(found)
            fruitless = 0 if found else fruitless + 1
            if fruitless > PATIENCE_DOCUMENTS:
                raise ValueError(
                    f"{fruitless:,} documents in a row have one sentence or none: sentence-order prediction needs "
                    f"texts of several; join the rows of {', '.join(self._mix.sources)} to longer ones"
                )


class StreamedBatches(Prefetched[dict[str, Tensor]]):
    """`MixedBatches` made ahead in a thread: what `albert` gives for a mix of sources.

    ``state_dict()`` goes into a checkpoint of this peer; a peer with the same sources, tokenizer and seed goes on from
    it with the very next batch.

    Args:
        sources: see `TextMix`.
        tokenizer, batch_size, sequence_length, seed: see `MixedBatches`.

    Raises:
        ValueError: an argument is out of range or a source cannot be opened.
    """

    def __init__(
        self,
        sources: Mapping[str, float],
        tokenizer: PreTrainedTokenizerFast,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
    ) -> None:
        stop = threading.Event()
        self.tokenizer, self.batch_size, self.sequence_length = tokenizer, batch_size, sequence_length
        mixed = MixedBatches(
            TextMix(sources, seed=seed, wait=stop.wait),
            tokenizer,
            batch_size=batch_size,
            sequence_length=sequence_length,
            seed=seed,
        )
        super().__init__(mixed, depth=BATCHES_AHEAD, stop=stop)

    def __repr__(self) -> str:
        size = f"{self.batch_size} x {self.sequence_length} of {len(self.tokenizer)} tokens"
        return f"StreamedBatches({size})"


def _joined(arrays: Sequence[np.ndarray[Any, np.dtype[np.int32]]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *arrays]))
