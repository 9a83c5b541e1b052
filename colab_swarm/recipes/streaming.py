"""Endless batches from a mix of sources, each read shard by shard, as sahajBERT streamed them (DeDLOC, section 3.3).

A document comes from one of the sources, by probability; it is cut into passages of whole sentences; these wait in a
buffer, from which samples are drawn at random. All of it happens ahead, in a thread, and its state can be saved.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from colab_swarm.recipes.prefetch import Prefetched
from colab_swarm.recipes.pretraining import Collator, check_sizes
from colab_swarm.recipes.sentences import Passage, order_sample, passages
from colab_swarm.recipes.shards import Place, ShardReader, open_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
            reader.seek(Place(*state[reader.name][1:]))


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
