"""How many samples a batch has: by the loader that drew it, or by parts that agree."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (zeros(6, 2), 6),
        ([zeros(6, 2)], 6),
        ([zeros(4, 8), ids(4)], 4),
        ((zeros(4, 8), zeros(4, 2)), 4),
        ({"input_ids": ids(4, 128), "attention_mask": ids(4, 128), "labels": ids(4, 128)}, 4),
        ((ids(4, 128), ids(4, 128), ids(4, 128)), 4),
        ({"x": zeros(2, 8), "more": (zeros(2), ["text", "text"]), "temperature": torch.tensor(0.5)}, 2),
        (({"query": ids(5, 9)}, zeros(5)), 5),
        ((tuple(images(8)), targets(8)), 8),
        ((tuple(images(2)), targets(2)), 2),
        ((images(8), [0] * 8), 8),
        ({"images": images(5), "labels": ids(5)}, 5),
        (["a", "b", "c"], 3),
        ([{"prompt": [{"role": "user", "content": "hello"}]}] * 8, 8),
        ([{"input_ids": [1, 2, 3], "label": 0}] * 4, 4),
        (pack_sequence([zeros(20, 4), zeros(9, 4), zeros(6, 4)]), 3),
        ((pack_sequence([zeros(20, 4), zeros(9, 4)]), ids(2)), 2),
        (zeros(0, 8), 0),
    ],
    ids=repr,
)
def test_parts_that_agree_are_counted(batch: object, samples: int | None) -> None:
    assert samples_of(batch) == samples


@pytest.mark.parametrize(
    "batch",
    [
        images(8),
        tuple(images(2)),
        [zeros(1, 16_000 + at) for at in range(8)],
        [ids(128)] * 8,
        (zeros(35, 35), zeros(16, 35)),
        (ids(35, 16), ids(33, 16)),
        {"src": ids(35, 16), "lengths": ids(16)},
        [(image, 1) for image in images(7)],
        targets(8),
        "text",
        torch.tensor(1.0),
        {},
        [],
    ],
    ids=[
        *("images", "two images", "waveforms", "texts of one length", "a mask first", "time first"),
        *("time first and lengths", "rows", "boxes", "text", "a number", "nothing", "no part"),
    ],
)
def test_parts_that_disagree_or_say_nothing_are_not_guessed(batch: object) -> None:
    assert samples_of(batch) is None


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return zeros(3, 4, 4)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([zeros(3, 4, 4)] * 10)


@pytest.mark.parametrize(
    "collate",
    [list, tuple, lambda rows: zeros(35, len(rows)), lambda rows: (zeros(35, 35), torch.stack(rows))],
    ids=["list", "tuple", "time first", "a mask first"],
)
def test_a_loader_with_a_sampler_knows_what_it_drew(collate: Callable[[list[Any]], Any]) -> None:
    sampler = WeightedRandomSampler([1.0] * 10, 9)
    whole = DataLoader(Rows(), batch_size=8, collate_fn=collate)
    drawn = DataLoader(Rows(), batch_size=4, collate_fn=collate, sampler=sampler, drop_last=True)
    assert [samples_of(batch, whole, index) for index, batch in enumerate(whole)] == [8, 2]
    assert [samples_of(batch, drawn, index) for index, batch in enumerate(drawn)] == [4, 4]


def test_a_loader_of_a_stream_says_which_reading_is_a_full_batch() -> None:
    def counted(collate: Callable[[list[Any]], Any] | None) -> list[int | None]:
        loader = DataLoader(Stream(), batch_size=8, collate_fn=collate)
        return [samples_of(batch, loader, index) for index, batch in enumerate(loader)]

    assert counted(None) == [8, 2]
    assert counted(list) == [8, None]
    assert counted(lambda rows: zeros(35, len(rows))) == [None, None]


def test_an_empty_batch_of_a_loader_is_empty() -> None:
    loader = DataLoader(Rows(), batch_size=8, collate_fn=lambda rows: zeros(0, 4))
    assert samples_of(next(iter(loader)), loader, 0) == 0


def test_a_loader_without_automatic_batches_leaves_it_to_the_parts() -> None:
    loader = DataLoader([(zeros(5, 2), ids(5)), (zeros(3, 2), ids(3))], batch_size=None)  # type: ignore[arg-type]
    assert [samples_of(batch, loader, index) for index, batch in enumerate(loader)] == [5, 3]


def test_a_known_full_batch_decides_between_readings() -> None:
    assert samples_by_parts(images(8), 8) == 8
    assert samples_by_parts(images(8), 16) is None
    assert samples_by_parts(zeros(16, 2), 8) == 16, "a batch of pairs has two rows a sample"


@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_columns_of_different_kinds_are_counted_whatever_their_sizes(rows: int, widths: list[int]) -> None:
    columns = {f"column {at}": zeros(rows, width) for at, width in enumerate(widths)}
    assert samples_of(columns) == samples_of([*columns.values(), ids(rows)]) == rows


def one_row(*lengths: int) -> dict[str, Tensor]:
    """Texts of these lengths in one row, without padding."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": ids(1, sum(lengths)),
        "labels": ids(1, sum(lengths)),
        "position_ids": positions[None],
    }


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((zeros(2, 9), zeros(2, 3)), 2),
        ({"input_ids": ids(3, 12), "labels": ids(3)}, 3),
        ((zeros(1, 9), zeros(1, 2)), 1),
        (one_row(5, 3, 4), 8),
        ([zeros(3, 4, 4)] * 2, None),
        (zeros(2, 8), None),
        ({"input_ids": ids(1, 12), "labels": ids(1, 12)}, None),
        ((ids(5, 8), ids(7, 8)), 8),
    ],
    ids=[
        *("rows", "texts", "one row", "texts in one row", "two images or channels", "time first or two rows"),
        *("one text or several", "time first"),
    ],
)
def test_fewer_rows_than_were_drawn_count_as_they_are_where_that_is_clear(
    batch: object, samples: int | None
) -> None:
    loader = DataLoader(Rows(), batch_size=8, collate_fn=lambda rows: batch)
    assert samples_of(next(iter(loader)), loader, 0) == samples


def text(*shape: int) -> dict[str, Tensor]:
    return {"input_ids": ids(*shape), "labels": ids(*shape)}


@pytest.mark.parametrize(
    ("batches", "counted"),
    [
        ([text(4, 9), text(3, 9), text(1, 9)], [4, 3, 1]),
        ([text(8, 9), text(8, 9), text(2, 9)], [4, 4, 1]),
        ([one_row(5, 2, 3, 3), one_row(5, 2)], [4, 2]),
        ([one_row(5, 2, 3, 3, 7, 1), one_row(9)], [4, 1]),
        ([text(1, 30), text(1, 28)], [4, 4]),
        ([(zeros(1, 9), zeros(1, 2))], [1]),
    ],
    ids=[
        "rows",
        "pairs",
        "texts in one row",
        "packed rows",
        "one row without positions",
        "one row of values",
    ],
)
def test_micro_batches_count_examples_of_which_a_full_one_has_four(
    batches: list[Any], counted: list[float]
) -> None:
    counter = RowCounter(4)
    assert [counter.count(batch) for batch in batches] == counted
