"""Endless batches from a mix of sources, streamed shard by shard as in sahajBERT's run (DeDLOC, section 3.3).

Each document comes from one source, drawn by probability. It is cut into passages of whole sentences. A buffer holds
the passages, and samples are drawn from it at random. A thread prepares batches ahead, and their state can be saved.

A shard is a part of a source that is read by itself: a call starts one pass over its documents. It is called again
after a lost connection, on the next pass, or to resume in another process. No shard is held in memory.
"""

from __future__ import annotations

import functools
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
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from colab_swarm.recipes.pretraining import SampledBatches
from colab_swarm.recipes.text import Passage, find_files, open_hub, open_text, order_sample, passages, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 22
"""Shard size of a local file; lines stay whole."""
MANY_SHARDS = 64
DOCUMENT_CHARS = 1 << 14
"""Lines of plain text are joined into documents of about this size; longer rows are cut."""
RETRY_AFTER_S = (1.0, 5.0, 25.0)

Shard: TypeAlias = Callable[[], Iterator[str]]


class Stopped(Exception):
    """The reader was closed while it waited to retry."""


def open_shards(source: str) -> list[Shard]:
    """Return the shards of a source of text.

    Args:
        source: a local file or glob pattern (plain text, ``.jsonl`` or ``.parquet``); a folder or a hub name for
            `datasets` (``name:configuration`` to choose one of several), of which the ``train`` split is streamed;
            or ``"python-docs"``. Rows give their ``text``, or the first column of strings.

    Raises:
        ValueError: the source does not exist or holds no text.
    """
    if source == "python-docs":
        return [functools.partial(iter, [block]) for block in open_text(source)(random.Random(0))]
    shards: list[Shard] = []
    files = find_files(source)
    for file in files:
        if file.suffix == ".parquet":
            from datasets import load_dataset

            shards += _rows(load_dataset("parquet", data_files=str(file), split="train", streaming=True))
        else:
            starts = range(0, file.stat().st_size, SHARD_BYTES)
            shards += [functools.partial(_read_shard, file, start) for start in starts]
    shards = shards if files else _rows(open_hub(source))
    if not shards:
        raise ValueError(f"there is no text in {source!r}")
    return shards


def _rows(data_set: Any) -> list[Shard]:
    if data_set.num_shards < MANY_SHARDS and hasattr(
        data_set, "reshard"
    ):  # datasets 4.5: so that peers differ
        data_set = data_set.reshard()
    count: int = data_set.num_shards

    def shard(number: int) -> Iterator[str]:
        return _cut(text_of(row) for row in data_set.shard(count, number))

    return [functools.partial(shard, number) for number in range(count)]


def _read_shard(file: Path, start: int) -> Iterator[str]:
    """Yield the documents of the lines that start within one shard of a file."""
    lines = _lines(file, start)
    if file.suffix == ".jsonl":
        yield from _cut(text_of(json.loads(line)) for line in lines if line.strip())
        return
    waiting = ""
    for line in _cut(lines):
        waiting += line
        if len(waiting) >= DOCUMENT_CHARS:
            yield waiting
            waiting = ""
    if waiting:
        yield waiting


def _lines(file: Path, start: int) -> Iterator[str]:
    with file.open("rb") as opened:
        if start:
            opened.seek(start - 1)
            opened.readline()
        while opened.tell() < start + SHARD_BYTES and (line := opened.readline()):
            yield line.decode(errors="ignore")


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (text[start : start + DOCUMENT_CHARS] for start in range(0, len(text), DOCUMENT_CHARS))


@dataclass(frozen=True)
class StreamPosition:
    """A reader's position: the pass from 0, the shard in its order, documents read of it and of the whole pass."""

    pass_number: int = 0
    shard: int = 0
    documents: int = 0
    given: int = 0


class ShardReader:
    """An endless iterator over the documents of one source; each pass shuffles its shards again.

    A shard that breaks is read again from where it broke, after `RETRY_AFTER_S`; then the rest of it is skipped
    with a warning.

    Args:
        name: of the source, for messages.
        shards: see `open_shards`.
        seed: of the order.
        wait: waits so many seconds before a retry; returns True to stop instead.

    Raises:
        ValueError: the first pass gave no document.
        Stopped: ``wait`` returned True.
    """

    def __init__(
        self, name: str, shards: Sequence[Shard], *, seed: int, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self.name, self.count = name, len(shards)
        self.position = StreamPosition()
        self._shards, self._seed, self._wait = shards, seed, wait
        self._documents: Iterator[str] | None = None

    def __iter__(self) -> ShardReader:
        return self

    def __next__(self) -> str:
        while (document := self._next_of_shard()) is None:
            self._documents = None
            self._next_shard()
        at = self.position
        self.position = replace(at, documents=at.documents + 1, given=at.given + 1)
        return document

    def seek(self, position: StreamPosition) -> None:
        """Continue from a position of a reader with the same shards and seed."""
        self.position, self._documents = position, None

    def _next_of_shard(self) -> str | None:
        """Return the next document of the current shard; None at its end, or after the last retry."""
        for delay_s in (*RETRY_AFTER_S, None):
            at = self.position
            try:
                if self._documents is None:
                    rng = random.Random(f"{self._seed}/{at.pass_number}")
                    order = rng.sample(range(self.count), self.count)
                    self._documents = islice(self._shards[order[at.shard]](), at.documents, None)
                return next(self._documents, None)
            except Exception as error:  # datasets, fsspec, aiohttp and pyarrow raise many kinds
                self._documents = None
                where = f"{self.name}: shard {at.shard + 1} of {self.count}"
                if delay_s is None:
                    logger.warning("%s is given up after %d documents: %s", where, at.documents, error)
                    return None
                logger.info("%s broke, retry in %g s: %s", where, delay_s, error)
                if self._wait(delay_s):
                    raise Stopped from error
        raise AssertionError("unreachable: the last delay is None")

    def _next_shard(self) -> None:
        at = self.position
        if at.shard + 1 < self.count:
            self.position = StreamPosition(at.pass_number, at.shard + 1, 0, at.given)
            return
        if not at.given and not at.pass_number:
            raise ValueError(f"{self.name!r} gave no text: see the warnings above, or open it by hand")
        if not at.given and self._wait(RETRY_AFTER_S[-1]):
            raise Stopped
        self.position = StreamPosition(at.pass_number + 1)


T = TypeVar("T")

CLOSE_S = 5.0
CHECK_S = 0.2
"""A consumer wakes up this often, so that an interrupt reaches it on Windows too."""


class Prefetched(Generic[T]):
    """An iterator that prepares up to ``depth`` items of ``source`` ahead, in a thread.

    An error of the source is raised after the items made before it. The thread starts with the first item and ends with
    `close`, or when this object is collected.

    Args:
        source: an iterator with ``state_dict`` and ``load_state_dict``; used by one thread at a time.
        depth: items ahead, at least 1.
        stop: set by `close`, so that a waiting source can stop.
    """

    def __init__(self, source: Any, *, depth: int, stop: threading.Event) -> None:
        self._producer: _Producer[T] = _Producer(source, depth, stop)
        # also at exit: a thread killed within pyarrow would crash the process
        weakref.finalize(self, self._producer.close)

    def __iter__(self) -> Prefetched[T]:
        return self

    def __next__(self) -> T:
        return self._producer.take()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item taken. Waits for the item being made."""
        with self._producer.making:
            return {"source": self._producer.source.state_dict(), "ahead": list(self._producer.ahead)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state with the item that was next there."""
        with self._producer.making, self._producer.changed:
            self._producer.source.load_state_dict(state["source"])
            self._producer.ahead = deque(state["ahead"])
            self._producer.changed.notify_all()

    def close(self) -> None:
        """Stop the thread, waiting up to `CLOSE_S`. Iteration ends with the items made so far."""
        self._producer.close()


class _Producer(Generic[T]):
    """State of both sides. The thread holds this and not the `Prefetched`, which could else never be collected."""

    def __init__(self, source: Any, depth: int, stop: threading.Event) -> None:
        self.source, self._depth, self._stop = source, depth, stop
        self._thread: threading.Thread | None = None
        self.ahead: deque[T] = deque()
        self._error: Exception | None = None
        self.changed = threading.Condition()  # guards ahead and error
        self.making = threading.Lock()  # held while the source is in use and until its item is in ahead

    def _run(self) -> None:
        while not self._stop.is_set():
            with self.changed:
                self.changed.wait_for(lambda: len(self.ahead) < self._depth or self._stop.is_set())
            with self.making:
                if self._stop.is_set():
                    return
                try:
                    items = [next(self.source)]
                except Stopped:
                    return
                except Exception as error:  # raised on the consumer's thread
                    items, self._error = [], error
                with self.changed:
                    self.ahead.extend(items)
                    self.changed.notify_all()
                if self._error is not None:
                    return

    def take(self) -> T:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
        with self.changed:
            while not self.ahead:
                if self._error is not None:
                    raise self._error
                if self._stop.is_set():
                    raise StopIteration
                self.changed.wait(CHECK_S)
            item = self.ahead.popleft()
            self.changed.notify_all()
            return item

    def close(self) -> None:
        self._stop.set()
        with self.changed:
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)


SHUFFLE_PASSAGES = 10_000
FIRST_PASSAGES = 256
"""Passages before the first sample; then two are added for each one drawn, until the buffer is full."""
BATCHES_AHEAD = 8
PATIENCE_DOCUMENTS = 10_000
"""After so many documents without a passage, the text is useless for sentence-order prediction."""


class TextMix:
    """Documents from several sources; each one is drawn from a source by probability.

    Args:
        sources: name (see `open_shards`) to weight, such as ``{"wiki": 0.23, "oscar": 0.77}``; weights need not sum
            to 1.
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
        """Return the next document."""
        (reader,) = rng.choices(self._readers, weights=list(self.sources.values()))
        return next(reader)

    def until_read(self, rng: random.Random) -> Iterator[str]:
        """Yield documents until each source has been read to its end at least once."""
        while not all(reader.position.pass_number for reader in self._readers):
            yield self.draw(rng)

    def state_dict(self) -> dict[str, Any]:
        return {reader.name: (reader.count, *astuple(reader.position)) for reader in self._readers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: it is of other sources, or they have changed.
        """
        if set(state) != set(self.sources):
            raise ValueError(f"a state of {', '.join(state)} does not fit sources {', '.join(self.sources)}")
        for reader in self._readers:
            if (count := state[reader.name][0]) != reader.count:
                shards = f"{reader.name} had {count} shards and has {reader.count}"
                raise ValueError(f"{shards}: start without the state")
        for reader in self._readers:
            reader.seek(StreamPosition(*state[reader.name][1:]))


class ShuffleBuffer:
    """Up to ``size`` passages, drawn at random (DeDLOC, section 3.3)."""

    def __init__(self, size: int) -> None:
        self._size, self._drawn = size, 0
        self._held: list[Passage] = []

    @property
    def hungry(self) -> bool:
        """Return True if passages must be added before the next one is drawn."""
        return len(self._held) < min(self._size, FIRST_PASSAGES + self._drawn)

    def extend(self, found: Sequence[Passage]) -> None:
        self._held.extend(found)

    def draw(self, rng: random.Random) -> Passage:
        place = rng.randrange(len(self._held))
        self._held[place], self._held[-1] = self._held[-1], self._held[place]
        self._drawn += 1
        return self._held.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return all passages in four tensors: one tensor for each would be slow to save."""
        state: dict[str, Any] = {"drawn": self._drawn}
        for name in ("tokens", "borders"):
            arrays = [np.array(getattr(passage, name), dtype=np.int32) for passage in self._held]
            state[name] = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *arrays]))
            state[f"{name[:-1]}_counts"] = torch.tensor([len(array) for array in arrays], dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        tokens = state["tokens"].split(state["token_counts"].tolist())
        borders = state["borders"].split(state["border_counts"].tolist())
        pairs = zip(tokens, borders, strict=True)
        self._held = [Passage(t.numpy().copy(), tuple(b.tolist())) for t, b in pairs]


class MixedBatches(SampledBatches):
    """Batches like those of `PretrainingBatches`, from whole sentences of a mix; can be resumed exactly.

    Args:
        mix: the source of documents.
        tokenizer: with pad, cls, sep and mask tokens.
        batch_size, sequence_length: B and L.
        seed: of the choice of sources, the buffer, the swaps and the masks; see `peer_seed`.
        buffer: passages to shuffle among.

    Raises:
        ValueError: a size is too small.
    """

    def __init__(
        self,
        mix: TextMix,
        tokenizer: PreTrainedTokenizerFast,
        *,
        buffer: int = SHUFFLE_PASSAGES,
        **sizes: int,
    ) -> None:
        super().__init__(tokenizer, **sizes)
        self._mix, self._buffer = mix, ShuffleBuffer(buffer)

    def __next__(self) -> dict[str, Tensor]:
        samples = []
        for _ in range(self.batch_size):
            self._fill()
            passage = self._buffer.draw(self._rng)
            first, second, swapped = order_sample(passage, self.sequence_length - 3, self._rng)
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
        """Continue from a state.

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
            found = list(passages(self._mix.draw(self._rng), self.tokenizer, self.sequence_length - 3))
            self._buffer.extend(found)
            fruitless = 0 if found else fruitless + 1
            if fruitless > PATIENCE_DOCUMENTS:
                raise ValueError(
                    f"{fruitless:,} documents in a row have one sentence or none: sentence-order prediction needs "
                    f"several; join the rows of {', '.join(self._mix.sources)} to longer texts"
                )


class StreamedBatches(Prefetched[dict[str, Tensor]]):
    """`MixedBatches` prepared ahead in a thread; `albert` returns them for a mix of sources.

    Save ``state_dict()`` in this peer's checkpoint. A peer with the same sources, tokenizer and seed resumes with
    exactly the next batch.

    Args:
        sources: see `TextMix`.
        tokenizer, batch_size, sequence_length, seed: see `MixedBatches`.

    Raises:
        ValueError: an argument is out of range or a source cannot be opened.
    """

    def __init__(
        self, sources: Mapping[str, float], tokenizer: PreTrainedTokenizerFast, *, seed: int, **sizes: int
    ) -> None:
        stop = threading.Event()
        mix = TextMix(sources, seed=seed, wait=stop.wait)
        made = MixedBatches(mix, tokenizer, seed=seed, **sizes)
        self.tokenizer, self.batch_size, self.sequence_length = (
            tokenizer,
            made.batch_size,
            made.sequence_length,
        )
        super().__init__(made, depth=BATCHES_AHEAD, stop=stop)

    def __repr__(self) -> str:
        size = f"{self.batch_size} x {self.sequence_length} of {len(self.tokenizer)} tokens"
        return f"StreamedBatches({size})"
