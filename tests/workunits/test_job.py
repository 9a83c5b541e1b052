"""Jobs: what a plan may say, jobs from files, data as rows, the files of subsets, and one unit's training."""

import textwrap
import traceback
import tracemalloc
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from colab_swarm.workunits import job as jobs
from colab_swarm.workunits.job import Job, Rows, UnitTraining, WorkPlan, lay_out, measure, rows_of
from colab_swarm.workunits.weights import Schema
from tests.workunits.digits import digits_job
from tests.workunits.local import tiny_job

JOB = textwrap.dedent(
    """
    from dataclasses import dataclass
    import torch
    from colab_swarm.workunits.job import Job, WorkPlan

    @dataclass
    class Width:
        hidden: int = 3

    def model():
        return torch.nn.Linear(4, Width().hidden)

    def data():
        raise RuntimeError("volunteers have no data")

    job = Job("linear", model, data, data, plan=WorkPlan(alpha=0.5))
    """
)


def test_a_job_from_a_file_carries_its_text_which_errors_show_and_leaves_the_data_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    job = Job.load(path)
    assert (job.name, job.plan.alpha, job.code) == ("linear", 0.5, JOB)
    assert job.first_model().weight.shape == (3, 4)
    again = Job.from_code(job.code, "job.py of a coordinator")
    first = job.first_model()
    torch.rand(1)  # a user's own random numbers change nothing
    assert torch.equal(again.first_model().weight, first.weight)  # the seed of the plan
    with pytest.raises(RuntimeError, match="no data") as raised:
        again.rows()
    trace = "".join(traceback.format_exception(raised.value))
    assert 'File "job.py of a coordinator"' in trace
    assert 'raise RuntimeError("volunteers have no data")' in trace


@pytest.mark.parametrize(
    ("code", "message"),
    [("x = 1", "defines no job"), ("job = 3", "defines no job"), ("#" * (1 << 20 | 1), "characters")],
)
def test_a_file_without_a_job_is_refused(code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job.from_code(code, "job.py")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(
            (name, 0)
            for name in ("subsets", "batch_size", "max_epochs", "replication", "deadline_s", "tolerance")
        ),
        *((name, 6.4) for name in ("batch_size", "subsets", "max_epochs", "seed")),
        *(("alpha", alpha) for alpha in (1.0, -0.1, "e/e", float("nan"))),
        *(("target_accuracy", 1.5), ("seed", -1)),
        *(("needs", needs) for needs in (8, "8 GB", {"memory_gb": 8})),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(name: str, wrong: Any) -> None:
    error = TypeError if name == "needs" else ValueError
    with pytest.raises(error, match=rf"{name}={wrong}|alpha is|write cs.workunits.Resources\(memory_gb=8\)"):
        WorkPlan(**{name: wrong})


def test_alpha_is_a_number_the_papers_schedule_or_a_function_that_is_looked_at_in_no_time() -> None:
    assert [WorkPlan(alpha=0.95).alpha_of(e) for e in (1, 9)] == [0.95, 0.95]
    assert [WorkPlan(seed=0).alpha_of(e) for e in (1, 9)] == [0.5, 0.9]
    assert WorkPlan(alpha=lambda e: 1 - 1 / (e + 9)).alpha_of(1) == 0.9
    with pytest.raises(ValueError, match="alpha is 2 in epoch 2"):
        WorkPlan(alpha=lambda e: e - 0.5 if e < 2 else 2 * (e - 1), max_epochs=3)
    with pytest.raises(ValueError, match="in epoch 1000000000000"):
        WorkPlan(max_epochs=10**12, alpha=lambda epoch: 0.9 if epoch < 10**12 else 2.0)


def test_subsets_follow_the_volunteers_but_keep_some_batches_each() -> None:
    plan = WorkPlan(expected_volunteers=3, batch_size=32)
    sizes = (100_000, 10**6), (600, 10**6), (20, 10**3), (100_000, 10**10)  # rows, bytes
    assert [plan.subsets_of(*size) for size in sizes] == [12, 4, 1, 150]  # at last none over 64 MiB
    assert WorkPlan(subsets=50).subsets_of(50, 1) == 50
    with pytest.raises(ValueError, match="only 10 samples"):
        WorkPlan(subsets=50).subsets_of(10, 1)


def test_the_defaults_are_the_papers_loss_and_measure_on_as_many_samples_as_the_plan_says() -> None:
    model, batch = torch.nn.Identity(), (torch.eye(3) * 50, torch.tensor([0, 1, 0]))
    assert jobs.share_correct(model, batch) == pytest.approx(2 / 3)
    assert float(jobs.cross_entropy(model, batch)) == pytest.approx(50 / 3)
    job = digits_job(validation_samples=50)
    assert len(job.validation_rows()) == 50
    assert 0 <= measure(job, job.first_model(), job.validation_rows()) < 0.5


def training(job: Job, seed: int = 7) -> UnitTraining:
    return UnitTraining(job.with_plan(local_epochs=2), job.rows(), seed=seed, model=job.first_model())


def test_replicas_of_a_unit_agree_bit_for_bit_and_leave_the_users_random_numbers_alone() -> None:
    job, before, results = digits_job(), torch.random.get_rng_state(), list[Any]()
    for _ in range(2):
        one = training(job)
        one.finish()
        results.append(Schema.of(one.model).flatten(one.model))
    assert one.batches == 16
    np.testing.assert_array_equal(*results)
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(IndexError, match="done"):
        one.step()


def test_each_epoch_of_a_unit_trains_every_sample_once_in_an_order_of_its_own() -> None:
    seen: list[float] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return model(batch[0]).sum()

    job = replace(tiny_job(batch_size=16), loss=loss)
    training(job).finish()
    samples = sorted(job.rows().columns["0"][:, 0].tolist())
    assert sorted(seen[:64]) == sorted(seen[64:]) == samples and seen[:64] != seen[64:]


def test_a_unit_saved_between_two_batches_ends_as_if_it_had_not_stopped() -> None:
    job = digits_job()
    whole, first, second = (training(job) for _ in range(3))
    whole.finish()
    for _ in range(11):
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.done == 11
    second.finish()
    schema = Schema.of(whole.model)
    np.testing.assert_array_equal(schema.flatten(whole.model), schema.flatten(second.model))
    with pytest.raises(ValueError, match="another unit"):
        training(job).load_state_dict(training(job, seed=8).state_dict())


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
        ({1, 2}, TypeError, "no rows"),
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


def test_the_bytes_of_a_subset_are_the_same_each_time_and_give_it_back_in_native_byte_order() -> None:
    columns = {"b": LABELS, "a": IMAGES > 3, "big": np.arange(6, dtype=">i4"), "ones": np.ones(6, ">f8")}
    rows = rows_of(columns)
    data = rows.encode()
    assert {data} == {rows_of(columns).encode() for _ in range(8)}
    back = Rows.decode(data)
    assert list(back.columns) == [*columns] and back.named
    for name, column in rows.columns.items():
        np.testing.assert_array_equal(back.columns[name], column)
    assert [back.columns[name].dtype for name in "ba"] == [LABELS.dtype, bool]
    batch = back.batch(np.arange(6), torch.device("cpu"))
    assert isinstance(batch, dict)
    assert batch["big"].tolist() == [0, 1, 2, 3, 4, 5] and batch["ones"].dtype == torch.float32


@given(st.binary(max_size=200), st.integers(0, 60))
def test_garbled_subsets_are_refused(noise: bytes, place: int) -> None:
    good = rows_of((LABELS,)).encode()
    for data in (noise, good[:place], good[:place] + noise):
        if data != good:
            with pytest.raises(ValueError, match="subset"):
                Rows.decode(data)


def test_a_small_file_that_would_fill_the_memory_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    tracemalloc.start()
    with pytest.raises(ValueError, match="67,108,864 bytes: too large"):
        Rows.decode(bomb)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(bomb) < 10_000 and most < 1 << 20
    with pytest.raises(ValueError, match="the samples are alike"):
        rows_of((np.zeros((1000, 1 << 14), np.float32),)).encode()
    padded = rows_of((np.arange(1 << 15).repeat(100),))  # 25 MiB
    assert len(Rows.decode(padded.encode())) == len(padded)


def test_each_subset_lies_under_its_digest_and_a_restart_repairs_the_files(tmp_path: Path) -> None:
    subsets, most = lay_out(tiny_job(), tmp_path)
    assert [subset.rows for subset in subsets] == [16] * 4
    for subset in subsets:
        data = (tmp_path / subset.sha256).read_bytes()
        assert (sha256(data).hexdigest(), len(data)) == (subset.sha256, subset.size_bytes)
        assert len(Rows.decode(data)) == subset.rows
    garbled = tmp_path / subsets[0].sha256
    garbled.write_bytes(bytes(subsets[0].size_bytes))
    (tmp_path / ("0" * 64)).write_bytes(b"of another job")
    (tmp_path / "1.half").write_bytes(b"of a crash")
    assert lay_out(tiny_job(), tmp_path) == (subsets, most) and most > 0
    assert {file.name for file in tmp_path.iterdir()} == {subset.sha256 for subset in subsets}
    assert sha256(garbled.read_bytes()).hexdigest() == subsets[0].sha256
    assert lay_out(tiny_job(seed=1), tmp_path)[0] != subsets
