"""What every store does alike."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from colab_swarm.errors import StoreError
from colab_swarm.workunits.state import AnyEntry, Assimilated, Rejected
from colab_swarm.workunits.store import ParameterStore, open_store
from colab_swarm.workunits.weights import Floats
from tests.workunits.servers import KINDS, accepted, begun, new_job, plus_one

pytestmark = pytest.mark.parametrize("url", KINDS, indirect=True)


def some(number: int) -> AnyEntry:
    return Rejected(at=0.0, assignment=f"{number:032x}", reason="bad")


def test_a_job_of_another_size_is_refused(store: ParameterStore) -> None:
    store.begin(np.ones(3, np.float32))  # its first parameters stay
    parameters = store.parameters()
    assert parameters.version == 0 and not parameters.values.flags.writeable
    np.testing.assert_array_equal(parameters.values, np.zeros(3, np.float32), strict=True)
    with pytest.raises(StoreError, match="3 parameters, but the model has 4: give the job another name"):
        store.begin(np.zeros(4, np.float32))


def test_missing_parameters_are_an_error_that_says_what_to_do(url: str) -> None:
    store = open_store(url, new_job())
    with pytest.raises(StoreError, match="start its coordinator first"):
        store.parameters()
    assert store.entries() == []
    store.close()


def test_jobs_of_one_store_do_not_see_each_other(store: ParameterStore, url: str) -> None:
    other = begun(url, new_job(), numel=5)
    assert other.entries() == [] and other.claim("bob", now=0.0, lease_s=1.0) is None
    assert len(other.parameters().values) == 5
    with pytest.raises(KeyError):
        other.blob(accepted(0).result)
    other.close()


def test_vectors_and_blobs_of_megabytes_come_back_as_they_were(url: str) -> None:
    store = open_store(url, new_job())
    first = np.random.default_rng(0).random(400_001, np.float32)
    store.begin(first)
    store.append([], put={"a": first.tobytes(), "b": b"", "c": b"c" * (1 << 20)})
    np.testing.assert_array_equal(store.parameters().values, first)
    assert [store.blob(name) for name in "abc"] == [first.tobytes(), b"", b"c" * (1 << 20)]
    store.close()


def test_entries_of_several_writers_are_read_once_and_in_their_order(store: ParameterStore) -> None:
    seen: list[AnyEntry] = []
    start = store.entries()[-1][0]

    def write(writer: int) -> None:
        for number in range(5):
            store.append([some(100 * writer + 2 * number), some(100 * writer + 2 * number + 1)])

    def read_new(after: int) -> int:
        found = store.entries(after)
        seen.extend(entry for _, entry in found)
        return found[-1][0] if found else after

    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(write, writer) for writer in range(3)]
        last = start
        while not all(writer.done() for writer in writers):
            last = read_new(last)
        for writer in writers:
            writer.result()
    read_new(last)
    numbers = [int(entry.assignment, 16) for entry in seen if isinstance(entry, Rejected)]
    assert [[n for n in numbers if n // 100 == writer] for writer in range(3)] == [
        list(range(100 * writer, 100 * writer + 10)) for writer in range(3)
    ]


def test_blobs_are_put_replaced_and_dropped_with_the_entries(store: ParameterStore) -> None:
    store.append([some(1)], put={"a": b"1", "b": b"2"})
    store.append([some(2)], put={"b": b"3"}, drop=["a", "never-there"])
    assert store.blob("b") == b"3"
    with pytest.raises(KeyError):
        store.blob("a")


def test_results_are_claimed_oldest_first_and_again_when_their_time_is_over(store: ParameterStore) -> None:
    assert store.claim("bob", now=10.0, lease_s=5.0) == accepted(0)
    assert store.claim("carol", now=11.0, lease_s=5.0) == accepted(1)
    assert store.claim("dave", now=14.9, lease_s=5.0) is None
    assert store.claim("dave", now=15.0, lease_s=5.0) == accepted(0)


def test_an_assimilation_changes_parameters_log_queue_and_blobs_at_once(store: ParameterStore) -> None:
    claimed = store.claim("bob", now=10.0, lease_s=5.0)
    assert claimed is not None
    before = store.parameters()
    assert store.assimilate(claimed, plus_one, server="bob", now=11.0) == 1
    assert store.claim("bob", now=99.0, lease_s=1.0) == accepted(1)
    np.testing.assert_array_equal(store.parameters().values, np.ones(3, np.float32))
    np.testing.assert_array_equal(before.values, np.zeros(3, np.float32))
    entry = store.entries()[-1][1]
    assert isinstance(entry, Assimilated) and 0 < entry.seconds < 10
    assert (entry.at, entry.unit, entry.server, entry.version) == (11.0, claimed.unit, "bob", 1)
    with pytest.raises(KeyError):
        store.blob(claimed.result)


def test_a_unit_that_is_done_is_not_assimilated_again(store: ParameterStore) -> None:
    assert store.assimilate(accepted(0), plus_one, server="bob", now=1.0) == 1
    length = len(store.entries())
    assert store.assimilate(accepted(0), plus_one, server="carol", now=2.0) is None
    assert store.parameters().version == 1 and len(store.entries()) == length


def test_a_fault_of_the_update_changes_nothing(store: ParameterStore) -> None:
    def faulty(values: Floats) -> Floats:
        raise ZeroDivisionError

    length = len(store.entries())
    with pytest.raises(ZeroDivisionError):
        store.assimilate(accepted(0), faulty, server="bob", now=1.0)
    assert len(store.entries()) == length and store.blob(accepted(0).result) == b"result"
    assert store.assimilate(accepted(0), plus_one, server="bob", now=1.0) == 1


def test_of_two_servers_with_the_same_result_one_assimilates_it(store: ParameterStore) -> None:
    together = threading.Barrier(2)

    def serve(server: str) -> int | None:
        together.wait(10)
        return store.assimilate(accepted(0), plus_one, server=server, now=1.0)

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(serve, ["bob", "carol"]), key=str) == [1, None]
    np.testing.assert_array_equal(store.parameters().values, np.ones(3, np.float32))
