"""Endless batches for masked language modelling with sentence-order prediction (ALBERT, Lan et al. 2020).

Axes: B samples of a batch, L positions of a sample. A sample is ``[CLS] first [SEP] second [SEP]``:
two neighbouring pieces of text, swapped with probability one half.

Sources are streamed by shards, as in sahajBERT's run (DeDLOC, section 3.3). For each document, a source is drawn
with a probability. The passages of documents go into a buffer, from which samples are drawn at random.
"""

import hashlib
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from colab_swarm.recipes.text import Passage, Shard, Stopped, TextSource, open_text, ordered, pack, passages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
MIN_WINDOW = 8
IGNORED = -100  # a label that the loss of `transformers` ignores
Batch: TypeAlias = dict[str, Tensor]
Sample: TypeAlias = "tuple[Sequence[int], Sequence[int], bool]"
"""The tokens of two pieces, without special tokens, and whether they are swapped."""


def peer_seed(seed: int, peer: bytes) -> int:
    """Return a seed for one peer that, unlike ``hash()``, is the same in every process."""
    salt = seed.to_bytes(16, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(peer, digest_size=7, salt=salt).digest())


def check_sizes(batch_size: int, sequence_length: int) -> None:
    if batch_size < 1 or sequence_length < MIN_WINDOW + 3:
        raise ValueError(f"{batch_size=}, {sequence_length=}: at least 1 and {MIN_WINDOW + 3}")


class Collator:
    """Turns samples of at most L - 3 tokens into batches: adds special tokens, padding, and masks by ``seed``."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", sequence_length: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._specials = torch.tensor(tokenizer.all_special_ids)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        cls = self._tokenizer.cls_token_id
        sep = self._tokenizer.sep_token_id
        input_ids = torch.full((len(samples), self._length), self._tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        token_type_ids = torch.zeros_like(input_ids)
        for row, (first, second, _) in enumerate(samples):
            tokens = [cls, *first, sep, *second, sep]
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
            attention_mask[row, : len(tokens)] = 1
            token_type_ids[row, len(first) + 2 : len(tokens)] = 1
        masked, labels = self.mask(input_ids)
        return {
            "input_ids": masked,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "labels": labels,
            "sentence_order_label": torch.tensor([swapped for *_, swapped in samples], dtype=torch.int64),
        }

    def mask(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hide 15 % of each sample's tokens, at least one: 80 % masked, 10 % replaced, 10 % unchanged.

        Returns input and labels, both (B, L); labels are `IGNORED` where no token is predicted.
        """
        chance = torch.rand(input_ids.shape, generator=self.generator)
        chance[torch.isin(input_ids, self._specials)] = 2.0
        count = (0.15 * (chance < 2).sum(dim=1)).round().clamp(min=1)
        hidden = chance.argsort(dim=1).argsort(dim=1) < count[:, None]
        labels = input_ids.where(hidden, IGNORED)
        fate = torch.rand(input_ids.shape, generator=self.generator)
        noise = torch.randint(len(self._tokenizer), input_ids.shape, generator=self.generator)
        masked = input_ids.where(~(hidden & (fate < 0.8)), self._tokenizer.mask_token_id)
        return masked.where(~(hidden & (fate >= 0.9)), noise), labels


EMPTY_S = 25.0  # pause after a pass in which a source gave no document
CLOSE_S = 5.0
AHEAD = 8
CHECK_S = 0.2  # a consumer that waits wakes up this often, so that an interrupt also reaches it on Windows
FIRST_PASSAGES = (
    256  # passages read before the first sample; then two for each sample, until the buffer is full
)
PATIENCE_DOCUMENTS = (
    10_000  # if so many documents have no passage, the text cannot be used for sentence order
)


@dataclass(frozen=True)
class StreamPosition:
    """A reader's position in an endless stream."""

    pass_number: int = 0
    shard: int = 0  # number of the shard in the order of this pass
    documents: int = 0  # documents read from the shard
    given: int = 0  # documents read in the whole pass


class ShardReader(Iterator[str]):
    """An endless iterator over the documents of one source; each pass shuffles its shards again.

    If reading a shard fails, its remaining documents are skipped with a warning. Before that, `datasets` has tried to
    restore a lost connection for 100 s. After a pass without a document, ``wait(EMPTY_S)`` is called. It waits, or
    returns True; then `Stopped` is raised. Without ``wait``, errors are raised immediately. Raises `ValueError` if the
    first pass gave no document.
    """

    def __init__(
        self, name: str, shards: Sequence[Shard], *, seed: int, wait: Callable[[float], object] | None = None
    ) -> None:
        self.name = name
        self.count = len(shards)
        self.position = StreamPosition()
        self._shards = shards
        self._seed = seed
        self._wait = wait
        self._stream = self._passes()

    def __next__(self) -> str:
        return next(self._stream)

    def seek(self, position: StreamPosition) -> None:
        """Continue from a position of a reader with the same shards and seed."""
        self.position = position
        self._stream = self._passes()

    def _passes(self) -> Iterator[str]:
        while True:
            number = self.position.pass_number
            order = random.Random(f"{self._seed}/{number}").sample(range(self.count), self.count)
            for place in range(self.position.shard, self.count):
                yield from self._read(self._shards[order[place]])
                self.position = StreamPosition(number, place + 1, 0, self.position.given)
            if not self.position.given:
                if self._wait is None or number == 0:
                    raise ValueError(
                        f"{self.name!r} gave no text: see the warnings above, or open it by hand"
                    )
                if self._wait(EMPTY_S):
                    raise Stopped
            self.position = StreamPosition(number + 1)

    def _read(self, shard: Shard) -> Iterator[str]:
        try:
            for document in islice(shard(), self.position.documents, None):
                at = self.position
                self.position = replace(at, documents=at.documents + 1, given=at.given + 1)
                yield document
        except Stopped:
            raise
        except Exception as error:  # datasets, fsspec, aiohttp and pyarrow raise many kinds of errors
            if self._wait is None:
                raise
            at = self.position
            where = f"{self.name}: shard {at.shard + 1} of {self.count}"
            logger.warning("%s is given up after %d documents: %s", where, at.documents, error)


def _joined(shard: Shard) -> Iterator[str]:
    return pack(shard())


class TextMix:
    """The documents of one text, or of a mix of sources with weights, such as ``{"wiki": 0.23}``; see `open_text`.

    The short rows of one text are joined, and its errors are raised immediately. The sources of a mix may be on
    the network: each row is a document, and shards that cannot be read are skipped; see `ShardReader`.
    """

    def __init__(
        self,
        text: TextSource | Mapping[str, float],
        *,
        seed: int,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if isinstance(text, Mapping):
            self.sources = dict(text)
        else:
            self.sources = {"the text": 1.0}
        if not self.sources or not all(weight > 0 for weight in self.sources.values()):
            raise ValueError(f"sources={self.sources}: give at least one, with positive weights")
        if isinstance(text, Mapping):
            self._readers = []
            for name in self.sources:
                self._readers.append(ShardReader(name, open_text(name), seed=seed, wait=wait))
        else:
            joined = [partial(_joined, shard) for shard in open_text(text)]
            self._readers = [ShardReader("the text", joined, seed=seed)]

    def draw(self, rng: random.Random) -> str:
        (reader,) = rng.choices(self._readers, weights=list(self.sources.values()))
        return next(reader)

    def until_read(self, rng: random.Random) -> Iterator[str]:
        """Yield blocks of documents until each source has been read to its end at least once."""
        left = iter(lambda: all(reader.position.pass_number for reader in self._readers), True)
        return pack(self.draw(rng) for _ in left)

    def state_dict(self) -> dict[str, Any]:
        return {reader.name: (reader.count, *astuple(reader.position)) for reader in self._readers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError if it belongs to other sources, or if the sources have changed."""
        if set(state) != set(self.sources):
            raise ValueError(f"a state of {', '.join(state)} does not fit sources {', '.join(self.sources)}")
        for reader in self._readers:
            count = state[reader.name][0]
            if count != reader.count:
                raise ValueError(f"{reader.name} had {count} shards and has {reader.count}: start again")
        for reader in self._readers:
            reader.seek(StreamPosition(*state[reader.name][1:]))


class MixedBatches(Iterator[Batch]):
    """An endless iterator of batches for ``model(**batch)``; it can be resumed exactly.

    A batch consists of int64 CPU tensors: ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels``
    of shape (B, L), and ``sentence_order_label`` (B,), which is 1 if the pieces were swapped. The pieces are
    whole sentences if these fit. The tokenizer must have pad, cls, sep and mask tokens. The seed
    (`peer_seed`) determines the order, the swaps and the masks. Raises `ValueError` if a size is too small.
    """

    def __init__(
        self,
        mix: TextMix,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        buffer: int = 10_000,
    ) -> None:
        check_sizes(batch_size, sequence_length)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._rng = random.Random(seed)
        self._collate = Collator(tokenizer, sequence_length, seed)
        self._mix = mix
        self._buffer = buffer
        self._drawn = 0
        self._held: list[Passage] = []

    def __repr__(self) -> str:
        size = f"{self.batch_size} x {self.sequence_length} of {len(self.tokenizer)} tokens"
        return f"{type(self).__name__}({size})"

    def __next__(self) -> Batch:
        samples: list[Sample] = []
        for _ in range(self.batch_size):
            first, second, swapped = ordered(self._draw(), self.sequence_length - 3, self._rng)
            samples.append((first.tolist(), second.tolist(), swapped))
        return self._collate(samples)

    def _draw(self) -> Passage:
        fruitless = 0
        while len(self._held) < min(self._buffer, FIRST_PASSAGES + self._drawn):
            held = len(self._held)
            self._held += passages(self._mix.draw(self._rng), self.tokenizer, self.sequence_length - 3)
            if len(self._held) == held:
                fruitless += 1
            else:
                fruitless = 0
            if fruitless > PATIENCE_DOCUMENTS:
                raise ValueError(
                    f"{fruitless:,} documents in a row have one sentence or none: sentence-order prediction needs "
                    f"several; join the rows of {', '.join(self._mix.sources)} to longer texts"
                )
        place = self._rng.randrange(len(self._held))
        self._held[place], self._held[-1] = self._held[-1], self._held[place]
        self._drawn += 1
        return self._held.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state. All passages are in four tensors, because a tensor for each would be slow to save."""
        state = {
            "sequence_length": self.sequence_length,
            "vocabulary": len(self.tokenizer),
            "mix": self._mix.state_dict(),
            "drawn": self._drawn,
            "rng": self._rng.getstate(),
            "masks": self._collate.generator.get_state(),
        }
        for name in ("tokens", "borders"):
            arrays = [np.array(getattr(passage, name), dtype=np.int32) for passage in self._held]
            state[name] = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *arrays]))
            state[f"{name[:-1]}_counts"] = torch.tensor([len(array) for array in arrays], dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError if its sources, tokenizer or length are different."""
        for name, own in (("sequence_length", self.sequence_length), ("vocabulary", len(self.tokenizer))):
            if state[name] != own:
                raise ValueError(f"a state with {name}={state[name]} does not fit {name}={own}")
        self._mix.load_state_dict(state["mix"])
        self._drawn = state["drawn"]
        tokens = state["tokens"].split(state["token_counts"].tolist())
        borders = state["borders"].split(state["border_counts"].tolist())
        self._held = []
        for of_passage, starts in zip(tokens, borders, strict=True):
            self._held.append(Passage(of_passage.numpy().copy(), tuple(starts.tolist())))
        self._rng.setstate(state["rng"])
        self._collate.generator.set_state(state["masks"])


class StreamedBatches(Iterator[Batch]):
    """Batches that a thread prepares, `AHEAD` batches ahead of their use; `albert` returns them for a mix of sources.

    Save ``state_dict()`` in this peer's checkpoint. A peer with the same sources, tokenizer and seed
    resumes with exactly the next batch. An error of the source is raised after the batches made before it.

    The thread starts with the first batch. It ends with ``close()``, or when this object is garbage-collected. In both
    cases ``stop`` is set, so that a waiting source can stop, and the thread has at most `CLOSE_S` to end. Then the
    iteration ends.
    """

    def __init__(self, source: MixedBatches, stop: threading.Event) -> None:
        self.tokenizer = source.tokenizer
        self._source = source
        self._stop = stop
        self._ahead: deque[Future[Batch]] = deque()
        self._orders: SimpleQueue[Future[Batch] | None] = SimpleQueue()
        work = (source, self._orders, stop)
        self._thread = threading.Thread(target=_make, args=work, name="prefetch", daemon=True)
        # called also at exit, because a thread that is killed inside pyarrow would crash the process
        self.close = weakref.finalize(self, _close, stop, self._orders, self._thread)

    def __repr__(self) -> str:
        return f"StreamedBatches({self._source})"

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        while len(self._ahead) <= AHEAD:
            order = Future[Batch]()
            self._ahead.append(order)
            self._orders.put(order)
        while not self._ahead[0].done():
            wait([self._ahead[0]], CHECK_S)
        batch = self._ahead[0].result()  # an error stays in the queue, so it is raised again
        self._ahead.popleft()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was taken. Waits for the batches that are being made."""
        wait(self._ahead)
        made = [order.result() for order in self._ahead if order.exception() is None]
        return {"source": self._source.state_dict(), "ahead": made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wait(self._ahead)
        self._source.load_state_dict(state["source"])
        self._ahead.clear()
        for batch in state["ahead"]:
            self._ahead.append(Future())
            self._ahead[-1].set_result(batch)


def _make(source: MixedBatches, orders: "SimpleQueue[Future[Batch] | None]", stop: threading.Event) -> None:
    while (order := orders.get()) is not None:
        try:
            if stop.is_set():
                raise Stopped
            order.set_result(next(source))
        except Exception as error:  # the error is raised on the consumer's thread
            order.set_exception(error)


def _close(stop: threading.Event, orders: "SimpleQueue[Any]", thread: threading.Thread) -> None:
    stop.set()
    orders.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(CLOSE_S)
