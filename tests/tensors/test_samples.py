"""How many samples a batch has: by the loader that drew it, or by parts that agree."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from colab_swarm.tensors.samples import RowCounter, samples_by_parts, samples_of


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def images(count: int) -> list[Tensor]:
    return [zeros(3, 32 + at, 40) for at in range(count)]


def targets(count: int) -> tuple[dict[str, Tensor], ...]:
    return tuple({"boxes": zeros(2, 4), "labels": ids(2)} for _ in range(count))


def text(*shape: int) -> dict[str, Tensor]:
    return {"input_ids": ids(*shape), "labels": ids(*shape)}


def one_row(*lengths: int) -> dict[str, Tensor]:
    """Texts of these lengths in one row, without padding."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {**text(1, sum(lengths)), "position_ids": positions[None]}


BY_PARTS: dict[str, tuple[object, int | None]] = {
    "one tensor": (zeros(6, 2), 6),
    "one tensor in a list": ([zeros(6, 2)], 6),
    "values and classes": ([zeros(4, 8), ids(4)], 4),
    "values and values": ((zeros(4, 8), zeros(4, 2)), 4),
    "three columns of texts": ((ids(4, 128),) * 3, 4),
    "four columns of texts": ((ids(2, 128),) * 4, 2),
    "five columns or rows": ((ids(2, 128),) * 5, None),
    "texts by name": (text(4, 128), 4),
    "nested": ({"x": zeros(2, 8), "more": (zeros(2), ["text", "text"]), "temperature": torch.tensor(0.5)}, 2),
    "a dict in a tuple": (({"query": ids(5, 9)}, zeros(5)), 5),
    "images and boxes": ((tuple(images(8)), targets(8)), 8),
    "two images and boxes": ((tuple(images(2)), targets(2)), 2),
    "images and numbers": ((images(8), [0] * 8), 8),
    "images by name": ({"images": images(5), "labels": ids(5)}, 5),
    "words": (["a", "b", "c"], 3),
    "prompts": ([{"prompt": [{"role": "user", "content": "hello"}]}] * 8, 8),
    "rows of numbers": ([{"input_ids": [1, 2, 3], "label": 0}] * 4, 4),
    "packed": (pack_sequence([zeros(20, 4), zeros(9, 4), zeros(6, 4)]), 3),
    "packed and classes": ((pack_sequence([zeros(20, 4), zeros(9, 4)]), ids(2)), 2),
    "no rows": (zeros(0, 8), 0),
    # what disagrees, or says nothing, is not guessed
    "images": (images(8), None),
    "two images": (tuple(images(2)), None),
    "waveforms": ([zeros(1, 16_000 + at) for at in range(8)], None),
    "texts of one length": ([ids(128)] * 8, None),
    "a mask first": ((zeros(35, 35), zeros(16, 35)), None),
    "time first": ((ids(35, 16), ids(33, 16)), None),
    "time first and lengths": ({"src": ids(35, 16), "lengths": ids(16)}, None),
    "rows": ([(image, 1) for image in images(7)], None),
    "boxes": (targets(8), None),
    "text": ("text", None),
    "a number": (torch.tensor(1.0), None),
    "nothing": ({}, None),
    "no part": ([], None),
}


@pytest.mark.parametrize("kind", BY_PARTS)
def test_parts_that_agree_are_counted_and_others_not_guessed(kind: str) -> None:
    batch, samples = BY_PARTS[kind]
    assert samples_of(batch) == samples


def test_a_known_full_batch_decides_between_readings() -> None:
    assert samples_by_parts(images(8), 8) == 8
    assert samples_by_parts(images(8), 16) is None
    assert samples_by_parts(zeros(16, 2), 8) == 16, "a batch of pairs has two rows a sample"


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return zeros(3, 4, 4)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([zeros(3, 4, 4)] * 10)


def time_first(rows: list[Any]) -> Tensor:
    return zeros(35, len(rows))


def counted(loader: DataLoader[Any]) -> list[int | None]:
    return [samples_of(batch, loader, index) for index, batch in enumerate(loader)]


@pytest.mark.parametrize(
    "collate", [list, tuple, time_first, lambda rows: (zeros(35, 35), torch.stack(rows))]
)
def test_a_loader_with_a_sampler_knows_what_it_drew(collate: Callable[[list[Any]], Any]) -> None:
    sampler = WeightedRandomSampler([1.0] * 10, 9)
    assert counted(DataLoader(Rows(), batch_size=8, collate_fn=collate)) == [8, 2]
    drawn = DataLoader(Rows(), batch_size=4, collate_fn=collate, sampler=sampler, drop_last=True)
    assert counted(drawn) == [4, 4]


@pytest.mark.parametrize(
    ("collate", "samples"), [(None, [8, 2]), (list, [8, None]), (time_first, [None, None])]
)
def test_a_loader_of_a_stream_says_which_reading_is_a_full_batch(
    collate: Any, samples: list[int | None]
) -> None:
    assert counted(DataLoader(Stream(), batch_size=8, collate_fn=collate)) == samples


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        pytest.param((zeros(2, 9), zeros(2, 3)), 2, id="rows"),
        pytest.param({"input_ids": ids(3, 12), "labels": ids(3)}, 3, id="texts"),
        pytest.param((zeros(1, 9), zeros(1, 2)), 1, id="one row"),
        pytest.param(one_row(5, 3, 4), 8, id="texts in one row"),
        pytest.param([zeros(3, 4, 4)] * 2, None, id="two images or channels"),
        pytest.param(zeros(2, 8), None, id="time first or two rows"),
        pytest.param(text(1, 12), None, id="one text or several"),
        pytest.param((ids(5, 8), ids(7, 8)), 8, id="time first"),
        pytest.param(zeros(0, 4), 0, id="empty"),
    ],
)
def test_fewer_rows_than_were_drawn_count_as_they_are_where_that_is_clear(
    batch: object, samples: int | None
) -> None:
    loader = DataLoader(Rows(), batch_size=8, collate_fn=lambda rows: batch)
    assert samples_of(next(iter(loader)), loader, 0) == samples


@pytest.mark.parametrize(
    ("batches", "samples"),
    [
        pytest.param([text(4, 9), text(3, 9), text(1, 9)], [4, 3, 1], id="rows"),
        pytest.param([text(8, 9), text(8, 9), text(2, 9)], [4, 4, 1], id="pairs"),
        pytest.param([one_row(5, 2, 3, 3), one_row(5, 2)], [4, 2], id="texts in one row"),
        pytest.param([one_row(5, 2, 3, 3, 7, 1), one_row(9)], [4, 1], id="packed rows"),
        pytest.param([text(1, 30), text(1, 28)], [4, 4], id="one row without positions"),
        pytest.param([(zeros(1, 9), zeros(1, 2))], [1], id="one row of values"),
    ],
)
def test_micro_batches_count_examples_of_which_a_full_one_has_four(
    batches: list[Any], samples: list[float]
) -> None:
    counter = RowCounter(4)
    assert [counter.count(batch) for batch in batches] == samples
