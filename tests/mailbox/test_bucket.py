"""One bucket, several stores: a folder, memory, S3 by moto, and servers that refuse, fail or hang."""

import asyncio
import contextlib
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from colab_swarm.errors import BucketAway, BucketError
from colab_swarm.mailbox import bucket as module
from colab_swarm.mailbox.bucket import MEMORY, Bucket, MemoryStore

NAME = "my run-0/a model"
PACE_S = 0.05
HEAD = (
    b'HTTP/1.1 %d OK\r\nETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'
    b"Connection: close\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    quick = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=20), "base": 2}
    monkeypatch.setitem(module.RETRY, "backoff", quick)
    monkeypatch.setitem(module.RETRY, "retry_timeout", timedelta(seconds=1.5))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield f"s3://bucket/folder?endpoint={url}&region=us-east-1"
    server.stop()


@pytest.fixture(params=["folder", "folder with spaces", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "s3":
        return Bucket(request.getfixturevalue("s3"), NAME)
    if request.param == "memory":
        return Bucket(f"memory://{tmp_path}", NAME)
    (tmp_path / request.param).mkdir()
    return Bucket(f"file://{tmp_path}/{request.param}", NAME)


async def test_the_verbs(place: Bucket) -> None:
    await place.require_conditional_writes()
    assert await place.create("rounds/1/alice", b"one") and not await place.create("rounds/1/alice", b"other")
    assert await place.create("rounds/2/bob", b"second") and await place.create("roundsabout", b"")
    found = await place.list("rounds")
    assert [(one.path, one.size_bytes) for one in found] == [("rounds/1/alice", 3), ("rounds/2/bob", 6)]
    assert all(abs(one.modified_at - place.now()) < 5 for one in found)
    assert [one.path for one in await place.list("rounds", "rounds/1/alice")] == ["rounds/2/bob"]
    assert [one.path for one in await place.list("rounds", "rounds/2")] == ["rounds/2/bob"]
    assert await place.read("rounds/1/alice") == b"one" and await place.read("rounds/1/carol") is None
    assert place.received_bytes >= 3 and place.sent_bytes >= 9 and place.requests >= 10
    await place.delete(["rounds/1/alice", "rounds/2/bob"])
    assert await place.list("rounds") == [] and await place.list("nothing") == []


async def test_of_two_writers_one_is_first(place: Bucket) -> None:
    written = await asyncio.gather(*(place.create("race", bytes([number])) for number in range(8)))
    assert sum(written) == 1 and await place.read("race") == bytes([written.index(True)])


async def test_a_store_that_overwrites_is_refused() -> None:
    class Overwriting(MemoryStore):
        async def create(self, path: str, data: object) -> bool:
            self.objects.pop(path, None)
            return await super().create(path, data)  # type: ignore[arg-type]

    MEMORY["memory://overwriting"] = Overwriting()
    with pytest.raises(BucketError, match="conditional writes"):
        await Bucket("memory://overwriting", NAME).require_conditional_writes()


Answer = Callable[[socket.socket], None]


class Server:
    """Answers each connection by the next of ``answers``, and by the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._ended = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                threading.Thread(target=self._talk, args=(connection, answer), daemon=True).start()

    def _talk(self, connection: socket.socket, answer: Answer) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection)
            self._ended.wait()

    def bucket(self, *answers: Answer) -> Bucket:
        self.answers[:] = answers
        return Bucket(f"s3://bucket?endpoint={self.url}&region=x", NAME)

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):  # it is off
            self._server.shutdown(socket.SHUT_RDWR)  # else it goes on as long as somebody accepts
        self._server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 4 * PACE_S)
    monkeypatch.setitem(module.RETRY, "retry_timeout", timedelta(seconds=PACE_S))


def request_of(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1)
    return data


def status(number: int) -> Answer:
    def answer(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(HEAD % (number, 9) + b"an object")

    return answer


def silent(_: socket.socket) -> None: ...


def deaf(connection: socket.socket) -> None:
    """Read all, and answer nothing."""
    while connection.recv(1 << 16):
        pass


def half(connection: socket.socket) -> None:
    """Send the start of an object."""
    request_of(connection)
    connection.sendall(HEAD % (200, 100) + b"half")


@pytest.mark.parametrize(
    "missing", [["AWS_SECRET_ACCESS_KEY"], ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]]
)
async def test_missing_keys_are_named(
    missing: list[str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.close()
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
    for name in missing:
        monkeypatch.delenv(name)
    with pytest.raises(BucketError, match=f"no secret {' and '.join(missing)} was found"):
        await server.bucket().read("x")


async def test_a_busy_server_is_asked_again_until_the_time_is_up_and_one_that_is_off_is_away(
    server: Server,
) -> None:
    bucket = server.bucket(status(503), status(500), status(503), status(200))
    assert await bucket.read("x") == b"an object" and len(server.answers) == 1
    for number in (503, 429):
        bucket = server.bucket(*[status(number)] * 1000)
        with pytest.raises(BucketAway, match=r"does not answer.*retries"):
            await bucket.read("x")
        assert 2 < len(server.answers) < 998
    server.close()
    with pytest.raises(BucketAway, match="does not answer"):
        await bucket.read("x")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("verb", "answer"),
    [("read", silent), ("read", deaf), ("read", half), ("list", half), ("create", deaf), ("delete", deaf)],
)
async def test_a_store_that_hangs_is_away_after_its_patience(
    server: Server, verb: str, answer: Answer
) -> None:
    bucket = server.bucket(answer)
    calls = {
        "read": lambda: bucket.read("x"),
        "list": lambda: bucket.list("x"),
        "create": lambda: bucket.create("x", b"data"),
        "delete": lambda: bucket.delete(["x"]),
    }
    with pytest.raises(BucketAway, match="does not answer"):
        await calls[verb]()


@pytest.mark.usefixtures("impatient")
async def test_a_slow_download_or_upload_is_not_cut_but_one_that_stalls_is(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UPLOAD_BYTES", 1 << 18)
    pause = threading.Event()

    def trickle(connection: socket.socket) -> None:
        """Take longer than a store may be silent."""
        request_of(connection)
        connection.sendall(HEAD % (200, 10))
        for byte in b"an object!":
            pause.wait(PACE_S)
            connection.sendall(bytes([byte]))

    def sip(connection: socket.socket) -> None:
        head = request_of(connection).lower()
        left = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        while left:
            left -= len(connection.recv(1 << 16))
        pause.wait(6 * PACE_S)
        connection.sendall(HEAD % (200, 0))

    assert await server.bucket(trickle).read("x") == b"an object!"
    assert await server.bucket(sip).create("x", bytes(1 << 20))
    with pytest.raises(BucketAway):
        await server.bucket(silent).create("x", bytes(1000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_without_rights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o500)
    with pytest.raises(BucketError, match="the rights of its folder"):
        await Bucket(f"file://{tmp_path}/shared", NAME).create("x", b"")
