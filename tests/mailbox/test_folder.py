"""A run in a shared folder: a server that is away, and writers whose clocks are off."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import BucketAway, BucketError
from colab_swarm.events import Fault, Notice
from colab_swarm.mailbox import bucket as module
from colab_swarm.mailbox.bucket import CLOCK_SLACK_S, Bucket, SeenTimes, StoredObject
from tests.training.toy import join_training, model, take

NAME = "my run-0/a model"


def shared(tmp_path: Path) -> Bucket:
    (tmp_path / "folder").mkdir(exist_ok=True)
    return Bucket(f"file://{tmp_path}/folder", NAME)


async def test_the_folder_of_a_run_may_be_a_link_but_must_be_possible(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "disk")
    bucket = shared(tmp_path)
    assert await bucket.create("x/1", b"x") and len(await bucket.list("x")) == 1
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BucketError, match=f"the folder {tmp_path}/file/box cannot be made"):
        await Bucket(f"file://{tmp_path}/file/box", NAME).enter(begins=True, writes=True)


async def test_a_file_of_a_folder_has_the_time_when_it_was_seen_not_the_one_it_claims(tmp_path: Path) -> None:
    bucket = shared(tmp_path)
    rounds = tmp_path / "folder/runs" / NAME / "rounds"

    async def write(name: str, claimed_at: float) -> None:
        await shared(tmp_path).create(f"rounds/{name}", b"")
        os.utime(rounds / name, (claimed_at, claimed_at))

    await write("alice", 1e9)
    (first,) = await bucket.list("rounds")
    assert first.modified_at == 1e9, "it was there at the first look"
    began_at = bucket.now()
    await write("bob", 1e9)
    await write("carol", 4e9)
    listed = await bucket.list("rounds")
    for place in listed[1:]:
        assert began_at - 2 * CLOCK_SLACK_S <= place.modified_at <= bucket.now() + CLOCK_SLACK_S
    for name in ("alice", "bob", "carol"):
        os.utime(rounds / name, (3e9, 3e9))
    assert await bucket.list("rounds") == listed
    bucket.on_time(1e9, module.loop_now())  # of a file of its own, by the clock of the server
    assert bucket.now() == pytest.approx(1e9, abs=5)


async def test_a_peer_has_the_clock_of_the_folders_server_also_after_a_night_of_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time()
    monkeypatch.setattr(module.time, "time", lambda: 1e9)
    bucket = shared(tmp_path)
    await bucket.require_conditional_writes()
    assert abs(bucket.now() - right) < 5
    await bucket.list("rounds")
    stopped_at = module.loop_now()
    later = right + 8 * 3600.0
    monkeypatch.setattr(module.time, "time", lambda: 1e9 + 8 * 3600.0)
    monkeypatch.setattr(module, "loop_now", lambda: stopped_at)  # the loop's clock stood still meanwhile
    file = tmp_path / "folder/runs" / NAME / "rounds/alice"
    await shared(tmp_path).create("rounds/alice", b"")
    os.utime(file, (later, later))
    (place,) = await bucket.list("rounds")
    assert place.modified_at == pytest.approx(later, abs=CLOCK_SLACK_S)
    assert bucket.now() == pytest.approx(later, abs=5)


class Server:
    """What serves all folders: while it is not up, each call into one hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up = threading.Event()
        self.up.set()
        self.hung = 0  # calls
        self._monkeypatch = monkeypatch

    def fail(self) -> None:
        self._monkeypatch.setattr(module, "STALL_S", 0.1)
        self.up.clear()

    def recover(self) -> None:
        self._monkeypatch.setattr(module, "STALL_S", 30.0)
        self.up.set()

    def call(self, work: Callable[[], Any]) -> Any:
        if not self.up.is_set():
            self.hung += 1
        self.up.wait()
        return work()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(monkeypatch)
    submit = module.DeviceThread.submit

    def hanging(threads: module.DeviceThread, work: Callable[[], Any]) -> Future[Any]:
        return submit(threads, server.call, work)

    monkeypatch.setattr(module.DeviceThread, "submit", hanging)
    yield server
    server.up.set()


VERBS: dict[str, Callable[[Bucket], Coroutine[Any, Any, Any]]] = {
    "read": lambda bucket: bucket.read("rounds/alice"),
    "list": lambda bucket: bucket.list("rounds"),
    "create": lambda bucket: bucket.create("rounds/bob", b"his"),
    "delete": lambda bucket: bucket.delete(["rounds/bob"]),
    "enter": lambda bucket: bucket.enter(begins=True, writes=True),
}


@pytest.mark.real_time
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
async def test_a_folder_that_hangs_is_away_after_its_patience_and_costs_one_thread(
    tmp_path: Path, server: Server, verb: str
) -> None:
    bucket = shared(tmp_path)
    await bucket.create("rounds/alice", b"hers")
    server.fail()
    for _ in range(3):
        with pytest.raises(BucketAway, match="does not answer: TimeoutError: nothing came for 0 s"):
            await VERBS[verb](bucket)
    assert server.hung == 1
    server.recover()
    assert await bucket.read("rounds/alice") == b"hers"


@pytest.mark.real_time
@pytest.mark.slow
async def test_a_call_that_fails_after_its_patience_harms_nobody_and_a_large_file_may_take_longer(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = shared(tmp_path)
    server.fail()
    with pytest.raises(BucketAway):
        await bucket.create("rounds/alice", b"hers")
    (tmp_path / "folder").rmdir()
    server.recover()
    with pytest.raises(BucketAway, match="is the folder mounted"):
        await bucket.create("rounds/alice", b"hers")
    (tmp_path / "folder").mkdir()
    assert await bucket.create("rounds/alice", b"hers")
    monkeypatch.setattr(module, "UPLOAD_BYTES", 100)
    server.fail()
    asyncio.get_running_loop().call_later(0.3, server.up.set)
    assert await bucket.create("states/large", bytes(1000)), "16 times the patience"


@pytest.mark.slow
def test_a_run_in_a_folder_that_hangs_says_so_goes_on_and_can_be_left(tmp_path: Path, server: Server) -> None:
    swarm = cs.create("away", mailbox=f"file://{tmp_path}/folder")
    optimizer = join_training(swarm, net := model(), local_steps=2, target_batch_size=20)
    while optimizer.global_step < 1:
        take(optimizer, net, 0)
    hangs: list[Fault] = []

    def bring_back(event: object) -> None:
        if isinstance(event, Fault) and "does not answer" in event.text:
            hangs.append(event)
            server.recover()

    swarm.events.listen(bring_back)
    server.fail()
    while optimizer.global_step < 3:
        take(optimizer, net, 0)
    assert len(hangs) == 1, "the folder hung, and one event says so"
    assert "the bucket answers again" in [event.text for event in swarm.events.recent(Notice)]
    server.fail()
    swarm.leave()
    assert not server.up.is_set(), "it still hangs"
    with pytest.raises(BucketAway, match="does not answer"):
        cs.create("away", mailbox=f"file://{tmp_path}/folder")


def test_a_look_at_some_files_says_nothing_of_the_others() -> None:
    seen = SeenTimes()

    def look(after: str, at: float, *paths: str) -> list[float]:
        places = [StoredObject(path, 1, 1e9) for path in paths]
        corrected = seen.corrected("rounds", after, places, began_at=at, now=at + 60.0)
        return [place.modified_at for place in corrected]

    assert look("rounds/2", 2e9) == []
    assert look("", 3e9, "rounds/1") == [1e9], "it may have been there"
    assert look("", 4e9, "rounds/1", "rounds/2") == [1e9, 3e9 - CLOCK_SLACK_S]
