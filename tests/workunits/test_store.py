"""What every store does alike, those that processes share, and what only databases or Redis do."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import sqlalchemy as sa
from redis import Redis

from colab_swarm.errors import StoreError
from colab_swarm.workunits import redis_store
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated, Expired, Rejected
from colab_swarm.workunits.store import ParameterStore, open_store
from colab_swarm.workunits.weights import Floats
from tests.workunits.servers import SERVERS, accepted, redis_server

every_kind = pytest.mark.parametrize("url", ["memory", "sqlite", *SERVERS], indirect=True)
redis = pytest.mark.parametrize("url", ["redis"], indirect=True)
processes = pytest.mark.parametrize("url", ["redis", "postgresql"], indirect=True)
databases = pytest.mark.parametrize("url", ["postgresql", "mariadb"], indirect=True)


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a store; its kind is the parameter."""
    kind: str = request.param
    if kind == "memory":
        yield "memory"
    elif kind == "sqlite":
        yield str(tmp_path_factory.mktemp("store") / "store.db")
    else:
        try:
            with SERVERS[kind]() as url:
                yield url
        except FileNotFoundError as absent:
            if "is not installed" not in str(absent):
                raise
            pytest.skip(str(absent))


@pytest.fixture
def store(url: str) -> Iterator[ParameterStore]:
    """With two results that wait; checked afterwards."""
    store = begun(url, new_job(), units=2)
    yield store
    close_checked(store)


def close_checked(store: ParameterStore) -> None:
    """Close it if no unit is there twice, versions have no gaps and nothing is lost."""
    log = store.entries()
    positions = [position for position, _ in log]
    assert positions == sorted(set(positions))
    done = [entry for _, entry in log if isinstance(entry, Assimilated)]
    assert [entry.version for entry in done] == list(range(1, len(done) + 1))
    assert len({entry.unit for entry in done}) == len(done)
    assert store.parameters().version == len(done)
    store.close()


def new_job() -> str:
    return f"job-{next(numbers)}"


numbers = itertools.count()


def begun(url: str, job: str, *, units: int = 0, numel: int = 3) -> ParameterStore:
    """A store with zeros for parameters and ``units`` results that wait."""
    store = open_store(url, job)
    store.begin(np.zeros(numel, np.float32))
    for subset in range(units):
        one = accepted(subset)
        store.append([one], put={one.result: b"result"})
    return store


def plus_one(values: Floats) -> Floats:
    return values + np.float32(1)


@every_kind
def test_a_job_begins_once_and_sees_nothing_of_other_jobs(url: str) -> None:
    store = open_store(url, new_job())
    with pytest.raises(StoreError, match="start its coordinator first"):
        store.parameters()
    first = np.random.default_rng(0).random(400_001, np.float32)
    store.begin(first)
    store.begin(np.ones_like(first))
    store.append([], put={"a": first.tobytes(), "b": b"", "c": b"c" * (1 << 20)})
    parameters = store.parameters()
    assert parameters.version == 0 and not parameters.values.flags.writeable
    np.testing.assert_array_equal(parameters.values, first, strict=True)
    assert [store.blob(name) for name in "abc"] == [first.tobytes(), b"", b"c" * (1 << 20)]
    with pytest.raises(
        StoreError, match="400,001 parameters, but the model has 4: give the job another name"
    ):
        store.begin(np.zeros(4, np.float32))
    other = begun(url, new_job(), numel=5)
    assert other.entries() == [] and len(other.parameters().values) == 5
    with pytest.raises(KeyError):
        other.blob("a")
    close_checked(other)
    close_checked(store)


@every_kind
def test_a_result_waits_is_claimed_and_is_assimilated_once(store: ParameterStore) -> None:
    assert store.claim("bob", now=10.0, lease_s=5.0) == accepted(0)
    assert store.claim("carol", now=11.0, lease_s=5.0) == accepted(1)
    assert store.claim("dave", now=14.9, lease_s=5.0) is None
    assert store.claim("dave", now=15.0, lease_s=5.0) == accepted(0)

    def faulty(values: Floats) -> Floats:
        raise ZeroDivisionError

    before, log = store.parameters(), store.entries()
    with pytest.raises(ZeroDivisionError):
        store.assimilate(accepted(0), faulty, server="dave", now=15.0)
    assert store.entries() == log and store.blob(accepted(0).result) == b"result"
    assert store.assimilate(accepted(0), plus_one, server="dave", now=16.0) == 1
    np.testing.assert_array_equal(store.parameters().values, np.ones(3, np.float32))
    np.testing.assert_array_equal(before.values, np.zeros(3, np.float32))
    entry = store.entries()[-1][1]
    assert isinstance(entry, Assimilated) and 0 < entry.seconds < 10
    assert (entry.at, entry.unit, entry.server, entry.version) == (16.0, accepted(0).unit, "dave", 1)
    with pytest.raises(KeyError):
        store.blob(accepted(0).result)
    assert store.assimilate(accepted(0), plus_one, server="bob", now=17.0) is None
    assert store.parameters().version == 1 and len(store.entries()) == len(log) + 1
    assert store.claim("bob", now=99.0, lease_s=1.0) == accepted(1)


@every_kind
def test_entries_of_several_writers_are_read_once_and_in_their_order(store: ParameterStore) -> None:
    seen: list[AnyEntry] = []
    start = store.entries()[-1][0]

    def some(number: int) -> AnyEntry:
        return Rejected(at=0.0, assignment=f"{number:032x}", reason="bad")

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


@every_kind
def test_blobs_change_with_the_entries_or_not_at_all(store: ParameterStore) -> None:
    store.append([accepted(2)], put={"a": b"1", "b": b"2"})
    store.append([accepted(3)], put={"b": b"3"}, drop=["a", "never-there"])
    unwritable = Rejected(at=0.0, assignment="a", reason=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.append([accepted(4), unwritable], put={"a": b"4"}, drop=["b"])
    assert store.blob("b") == b"3" and len(store.entries()) == 4
    with pytest.raises(KeyError):
        store.blob("a")


@contextmanager
def server_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A parameter server in a process of its own, which has claimed a result and waits for `go`."""
    command = [sys.executable, "-m", "tests.workunits.store_process", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "claimed\n"
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.slow
@processes
def test_a_server_killed_in_the_middle_of_an_assimilation_leaves_nothing_of_it(url: str) -> None:
    job = new_job()
    store = begun(url, job, units=1)
    with server_process(url, job, "bob", "pause") as bob:
        go(bob)
        assert bob.stdout is not None and bob.stdout.readline() == "in the middle\n"
        bob.kill()
        assert bob.wait(10) == -signal.SIGKILL
    assert store.parameters().version == 0 and store.blob(accepted(0).result) == b"result"
    assert store.claim("carol", now=60.9, lease_s=60.0) is None  # bob has it for 60 s from 1.0
    claimed = store.claim("carol", now=61.0, lease_s=60.0)
    assert claimed == accepted(0)
    assert store.assimilate(claimed, plus_one, server="carol", now=62.0) == 1
    close_checked(store)


@pytest.mark.slow
@processes
def test_two_processes_share_the_results_and_assimilate_each_once(url: str) -> None:
    job = new_job()
    store = begun(url, job, units=20, numel=100_000)
    with server_process(url, job, "bob") as bob:
        go(bob)
        while claimed := store.claim("carol", now=1.0, lease_s=60.0):
            store.assimilate(claimed, plus_one, server="carol", now=1.0)
        bob.communicate(timeout=60)
        assert bob.returncode == 0
    done = [entry for _, entry in store.entries() if isinstance(entry, Assimilated)]
    assert len(done) == 20 and {entry.server for entry in done} == {"bob", "carol"}
    if not url.startswith("unix:"):  # Redis may lose changes of the values
        np.testing.assert_array_equal(store.parameters().values, np.full(100_000, 20, np.float32))
    close_checked(store)


@databases
def test_tables_are_created_once_by_stores_that_open_at_the_same_time(url: str) -> None:
    engine = sa.create_engine(url)
    for table in ("jobs", "ends", "log", "queue", "blobs"):
        with engine.begin() as connection:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS swarm_{table}"))
    engine.dispose()
    with ThreadPoolExecutor(4) as threads:
        for store in threads.map(lambda _: open_store(url, new_job()), range(4)):
            assert store.entries() == []
            store.close()


@databases
def test_while_one_assimilates_the_log_is_written_and_another_loses_no_change(store: ParameterStore) -> None:
    with ThreadPoolExecutor(1) as carol:
        others = []

        def slow(values: Floats) -> Floats:
            store.append([Expired(at=1.0, assignment="a"), accepted(2)], put={"a": b"1"})
            for again in (1, 0):
                one = accepted(again)
                others.append(carol.submit(store.assimilate, one, plus_one, server="carol", now=1.0))
            return plus_one(values)

        assert store.assimilate(accepted(0), slow, server="bob", now=2.0) == 1
        assert [other.result(20) for other in others] == [2, None]
    kinds = [type(entry) for _, entry in store.entries(2)]
    assert kinds == [Expired, Accepted, Assimilated, Assimilated]
    np.testing.assert_array_equal(store.parameters().values, np.full(3, 2, np.float32))


@redis
@pytest.mark.parametrize(("other", "value"), [(1, 10), (0, 1)], ids=["another unit", "the same unit"])
def test_in_redis_a_change_of_the_values_can_be_lost_but_no_entry(
    store: ParameterStore, url: str, other: int, value: int
) -> None:
    def overtaken(values: Floats) -> Floats:
        assert store.assimilate(accepted(other), plus_one, server="carol", now=1.0) == 1
        return values + np.float32(10)

    assert store.assimilate(accepted(0), overtaken, server="bob", now=2.0) == (2 if other else None)
    np.testing.assert_array_equal(store.parameters().values, np.full(3, value, np.float32))
    done = [entry for _, entry in store.entries() if isinstance(entry, Assimilated)]
    assert [(entry.server, entry.version) for entry in done] == [("carol", 1), ("bob", 2)][: other + 1]
    with Redis.from_url(url) as server:
        waiting = [key for key in server.keys("colab-swarm:*") if server.ttl(key) != -1]
        assert waiting == []  # nothing is left behind, and parameters do not expire


@redis
def test_parameters_that_waited_too_long_change_nothing(
    store: ParameterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "NEW_S", 0)  # Redis deletes them at once
    with pytest.raises(StoreError, match="no such key"):
        store.assimilate(accepted(0), plus_one, server="bob", now=1.0)
    assert store.parameters().version == 0 and store.claim("carol", now=1.0, lease_s=1.0) == accepted(0)


@redis
def test_a_redis_without_persistence_causes_a_warning(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(durable=True) as durable:
        begun(durable, new_job()).close()
        store = begun(durable, new_job(), units=1)
    assert not caplog.text
    with pytest.raises(StoreError, match="Check that redis-server runs"):
        store.assimilate(accepted(0), plus_one, server="bob", now=1.0)
    store.close()
    begun(url, new_job()).close()
    assert "if it stops, job" in caplog.text and "appendonly yes" in caplog.text
