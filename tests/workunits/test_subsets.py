"""The data of a job as files."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from colab_swarm.workunits.job import Rows, lay_out
from tests.workunits.local import tiny_job


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
