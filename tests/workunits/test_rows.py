"""Data as rows, and the files of a job's subsets."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from colab_swarm.workunits.job import Rows, lay_out, rows_of
from tests.workunits.local import tiny_job

IMAGES, LABELS = np.arange(24, dtype=np.float32).reshape(6, 2, 2), np.arange(6)


class Named(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"image": torch.from_numpy(IMAGES[place]), "label": int(LABELS[place])}


@pytest.mark.parametrize(
    "data",
    [
        (IMAGES, LABELS),
        (torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
        TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
        {"image": IMAGES, "label": LABELS},
        Named(),
        datasets.Dataset.from_dict({"image": IMAGES.tolist(), "label": LABELS}),
        lambda: (IMAGES, LABELS),
    ],
    ids=["arrays", "tensors", "dataset", "columns", "named", "hub", "loader"],
)
def test_every_kind_of_data_becomes_the_same_rows(data: Any) -> None:
    rows = rows_of(data)
    assert len(rows) == 6
    images, labels = rows.columns.values()
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(labels, LABELS)
    batch = rows.batch(np.array([2, 0]), torch.device("cpu"))
    tensors = batch.values() if isinstance(batch, dict) else batch
    assert [tuple(tensor.shape) for tensor in tensors] == [(2, 2, 2), (2,)]
    assert list(rows.columns) == (["image", "label"] if rows.named else ["0", "1"])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((IMAGES, LABELS[:5]), ValueError, "differ in length"),
        ((np.zeros((0, 2)), np.zeros(0)), ValueError, "no sample"),
        ({}, ValueError, "no column"),
        ({"text": np.array(["a", "b"])}, ValueError, "text holds"),
        ((np.float32(3), np.zeros(1)), ValueError, "differ in length"),
        (TensorDataset(torch.zeros(0, 2)), ValueError, "no sample"),
        (iter([1, 2]), TypeError, "no rows"),
    ],
)
def test_data_without_rows_are_refused_with_a_reason(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rows_of(data)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_subsets_hold_each_sample_once_and_are_equally_large(rows: int, subsets: int, seed: int) -> None:
    parts = rows_of((np.arange(rows),)).cut(min(subsets, rows), seed=seed)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate([part.columns["0"] for part in parts])) == list(range(rows))


def test_the_bytes_of_a_subset_are_the_same_each_time_and_give_it_back() -> None:
    rows = rows_of({"b": LABELS, "a": IMAGES > 3})
    data = rows.encode()
    assert {data} == {rows_of({"b": LABELS, "a": IMAGES > 3}).encode() for _ in range(8)}
    back = Rows.decode(data)
    assert list(back.columns) == ["b", "a"] and back.named
    for name, column in rows.columns.items():
        np.testing.assert_array_equal(back.columns[name], column)
        assert back.columns[name].dtype == column.dtype


@given(st.binary(max_size=200), st.integers(0, 60))
def test_garbled_subsets_are_refused(noise: bytes, place: int) -> None:
    good = rows_of((LABELS,)).encode()
    for data in (noise, good[:place], good[:place] + noise):
        if data != good:
            with pytest.raises(ValueError, match="subset"):
                Rows.decode(data)


def test_columns_of_another_byte_order_become_tensors() -> None:
    rows = Rows.decode(rows_of((np.arange(6, dtype=">i4"), np.ones(6, ">f8"))).encode())
    numbers, ones = rows.batch(np.arange(6), torch.device("cpu"))
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5] and ones.dtype == torch.float32


def test_each_subset_lies_under_its_digest_and_all_samples_are_there(tmp_path: Path) -> None:
    subsets = lay_out(tiny_job(), tmp_path)
    assert [subset.rows for subset in subsets] == [16] * 4
    for subset in subsets:
        data = (tmp_path / subset.sha256).read_bytes()
        assert (sha256(data).hexdigest(), len(data)) == (subset.sha256, subset.size_bytes)
        assert len(Rows.decode(data)) == subset.rows


def test_a_restart_repairs_files_of_a_crash_and_deletes_those_of_another_job(tmp_path: Path) -> None:
    first = lay_out(tiny_job(), tmp_path)
    garbled = tmp_path / first[0].sha256
    garbled.write_bytes(bytes(first[0].size_bytes))
    (tmp_path / ("0" * 64)).write_bytes(b"of another job")
    (tmp_path / "1.half").write_bytes(b"of a crash")
    assert lay_out(tiny_job(), tmp_path) == first
    assert {file.name for file in tmp_path.iterdir()} == {subset.sha256 for subset in first}
    assert sha256(garbled.read_bytes()).hexdigest() == first[0].sha256
    assert lay_out(tiny_job(seed=1), tmp_path) != first
