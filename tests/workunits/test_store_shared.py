"""Stores that outlive a process, and are used by several."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from colab_swarm.workunits.state import Assimilated, Rejected
from colab_swarm.workunits.store import ParameterStore
from tests.workunits.servers import SHARED, accepted, begun, close_checked, new_job, plus_one

pytestmark = pytest.mark.parametrize("url", SHARED, indirect=True)


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


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait(10) == -signal.SIGKILL


def test_all_is_there_when_the_store_is_opened_again(url: str) -> None:
    job = new_job()
    store = begun(url, job, units=2)
    store.assimilate(accepted(0), plus_one, server="bob", now=1.0)
    log = store.entries()
    store.close()
    again = begun(url, job)
    assert again.entries() == log and len(log) == 3
    assert again.parameters().version == 1 and again.blob(accepted(1).result) == b"result"
    np.testing.assert_array_equal(again.parameters().values, np.ones(3, np.float32))
    close_checked(again)


def test_entries_that_cannot_be_written_leave_the_blobs_alone(store: ParameterStore) -> None:
    unwritable = Rejected(at=0.0, assignment="a", reason=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.append([accepted(5), unwritable], put={"new": b"new"}, drop=[accepted(0).result])
    assert store.blob(accepted(0).result) == b"result" and len(store.entries()) == 2
    with pytest.raises(KeyError):
        store.blob("new")


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_an_assimilation_leaves_nothing_of_it(url: str) -> None:
    job = new_job()
    store = begun(url, job, units=1)
    with server_process(url, job, "bob", "pause") as bob:
        go(bob)
        assert bob.stdout is not None and bob.stdout.readline() == "in the middle\n"
        kill(bob)
    assert store.parameters().version == 0 and store.blob(accepted(0).result) == b"result"
    assert store.claim("carol", now=60.9, lease_s=60.0) is None  # bob has it for 60 s from 1.0
    claimed = store.claim("carol", now=61.0, lease_s=60.0)
    assert claimed == accepted(0)
    assert store.assimilate(claimed, plus_one, server="carol", now=62.0) == 1
    close_checked(store)


@pytest.mark.slow
def test_a_server_killed_anywhere_leaves_all_or_nothing_of_each_assimilation(url: str) -> None:
    job, numel = new_job(), 300_000
    store = begun(url, job, units=200, numel=numel)
    with server_process(url, job, "bob") as bob:
        go(bob)
        assert bob.stdout is not None
        for _ in range(7):
            assert bob.stdout.readline() == "in the middle\n"
        kill(bob)
    parameters = store.parameters()
    assert 6 <= parameters.version < 200
    np.testing.assert_array_equal(parameters.values, np.full(numel, parameters.version, np.float32))
    close_checked(store)


@pytest.mark.slow
def test_two_processes_share_the_results_and_assimilate_each_once(url: str) -> None:
    job = new_job()
    store = begun(url, job, units=20, numel=100_000)
    with ExitStack() as stack:
        servers = [stack.enter_context(server_process(url, job, name)) for name in ("bob", "carol")]
        for server in servers:
            go(server)
        for server in servers:
            server.communicate(timeout=60)
            assert server.returncode == 0
    done = [entry for _, entry in store.entries() if isinstance(entry, Assimilated)]
    assert len(done) == 20 and {entry.server for entry in done} == {"bob", "carol"}
    if not url.startswith("unix:"):  # Redis may lose changes of the values
        np.testing.assert_array_equal(store.parameters().values, np.full(100_000, 20, np.float32))
    close_checked(store)
