"""One bucket, several stores: a folder, memory, S3 by moto, and HTTP servers that refuse or fail."""

import asyncio
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from colab_swarm.errors import BucketAway, BucketError
from colab_swarm.mailbox import bucket as module
from colab_swarm.mailbox.bucket import MEMORY, Bucket, MemoryStore

NAME = "my run-0/a model"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    quick = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=20), "base": 2}
    monkeypatch.setitem(module.RETRY, "backoff", quick)
    monkeypatch.setitem(module.RETRY, "retry_timeout", timedelta(seconds=0.3))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
    yield at(port, host)
    server.stop()


@pytest.fixture
def answers() -> Iterator[tuple[str, list[int]]]:
    """An address, and the statuses that its server gives next; then it has each object."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"an object"
            self.send_response(statuses.pop(0) if statuses else 200)
            for name, value in (("Content-Length", len(body)), ("ETag", '"1"'), ("Last-Modified", WHEN)):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield at(server.server_port), statuses
        server.shutdown()


WHEN = "Thu, 01 Jan 2026 00:00:00 GMT"


def at(port: int, host: str = "127.0.0.1") -> str:
    return f"s3://bucket/folder?endpoint=http://{host}:{port}&region=us-east-1"


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
    assert place.received_bytes >= 3 and place.sent_bytes >= 9
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


@pytest.mark.parametrize("address", ["", "bucket", "http://127.0.0.1/x", "file://relative", "S3://bucket"])
def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(ValueError, match="is no mailbox"):
        Bucket(address, NAME)


@pytest.mark.parametrize("address", ["az://container"])
def test_a_store_that_cannot_be_opened_is_an_error(address: str) -> None:
    with pytest.raises(BucketError, match="cannot be opened"):
        Bucket(address, NAME)


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_keys_are_named(answers: tuple[str, list[int]], status: int) -> None:
    address, statuses = answers
    statuses.append(status)
    with pytest.raises(BucketError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        await Bucket(address, NAME).read("x")
    assert not isinstance(caught.value, BucketAway) and not statuses


@pytest.mark.parametrize(
    "missing", [["AWS_SECRET_ACCESS_KEY"], ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]]
)
async def test_missing_keys_are_named(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port  # nothing listens there then
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{port}")
    for name in missing:
        monkeypatch.delenv(name)
    with pytest.raises(BucketError, match=f"no secret {' and '.join(missing)} was found"):
        await Bucket(at(port), NAME).read("x")


async def test_a_server_that_is_busy_is_asked_again(answers: tuple[str, list[int]]) -> None:
    address, statuses = answers
    statuses += [503, 500, 503]
    assert await Bucket(address, NAME).read("x") == b"an object" and not statuses


async def test_a_server_that_is_off_is_away(answers: tuple[str, list[int]]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    with pytest.raises(BucketAway, match="does not answer"):
        await Bucket(at(port), NAME).read("x")


@pytest.mark.parametrize("status", [503, 429])
async def test_a_store_that_throttles_is_asked_until_the_time_is_up(
    answers: tuple[str, list[int]], status: int
) -> None:
    address, statuses = answers
    statuses += [status] * 1000
    began_at = time.monotonic()
    with pytest.raises(BucketAway, match=r"does not answer.*retries"):
        await Bucket(address, NAME).read("x")
    assert 0.3 <= time.monotonic() - began_at < 3 and len(statuses) < 998


def test_half_a_minute_is_the_limit_of_the_retries_and_not_their_number() -> None:
    backoff = module.BACKOFF
    assert module.RETRY["max_retries"] * backoff["init_backoff"] > timedelta(minutes=1)
    assert backoff["max_backoff"] < timedelta(seconds=5)


HEAD = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nLast-Modified: %s\r\nContent-Length: %d\r\n\r\n'
PACE_S = 0.05


class SlowStore:
    """A server that takes connections, and what ``answer`` makes of each; it ends with the test."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.ended = threading.Event()
        self._answer = answer
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = at(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self._answer(connection)
            self.ended.wait()

    def close(self) -> None:
        self.ended.set()
        self._server.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[socket.socket], None]], SlowStore]]:
    monkeypatch.setattr(module, "STALL_S", 4 * PACE_S)
    monkeypatch.setitem(module.RETRY, "retry_timeout", timedelta(seconds=PACE_S))
    stores: list[SlowStore] = []

    def make(answer: Callable[[socket.socket], None]) -> SlowStore:
        stores.append(SlowStore(answer))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def request_of(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1)
    return data


def silent(_: socket.socket) -> None: ...


def deaf(connection: socket.socket) -> None:
    """Read all, and answer nothing."""
    while connection.recv(1 << 16):
        pass


def half(connection: socket.socket) -> None:
    """Send the start of an object."""
    request_of(connection)
    connection.sendall(HEAD % (WHEN.encode(), 100) + b"half")


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("read", silent),
        ("read", deaf),
        ("read", half),
        ("list", half),
        ("create", silent),
        ("create", deaf),
        ("delete", deaf),
    ],
)
async def test_a_store_that_hangs_is_away_after_its_patience(
    slow: Callable[..., SlowStore], verb: str, answer: Callable[[socket.socket], None]
) -> None:
    bucket = Bucket(slow(answer).address, NAME)
    calls = {
        "read": lambda: bucket.read("x"),
        "list": lambda: bucket.list("x"),
        "create": lambda: bucket.create("x", b"data"),
        "delete": lambda: bucket.delete(["x"]),
    }
    began_at = time.monotonic()
    with pytest.raises(BucketAway, match="does not answer"):
        await calls[verb]()
    assert time.monotonic() - began_at < 20 * PACE_S


async def test_a_slow_download_is_not_cut(slow: Callable[..., SlowStore]) -> None:
    def trickle(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(HEAD % (WHEN.encode(), 10))
        for byte in b"an object!":
            pause.wait(PACE_S)
            connection.sendall(bytes([byte]))

    pause = threading.Event()
    began_at = time.monotonic()
    assert await Bucket(slow(trickle).address, NAME).read("x") == b"an object!"
    assert time.monotonic() - began_at > module.STALL_S, "it took longer than the store may be silent"


async def test_a_slow_upload_is_not_cut_but_one_that_stalls_is(
    slow: Callable[..., SlowStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UPLOAD_BYTES", 1 << 18)
    pause = threading.Event()

    def sip(connection: socket.socket) -> None:
        head = request_of(connection).lower()
        left = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        while left:
            left -= len(connection.recv(1 << 16))
        pause.wait(6 * PACE_S)
        connection.sendall(HEAD % (WHEN.encode(), 0))

    data = bytes(1 << 20)
    began_at = time.monotonic()
    assert await Bucket(slow(sip).address, NAME).create("x", data)
    assert time.monotonic() - began_at > module.STALL_S
    with pytest.raises(BucketAway):
        await Bucket(slow(silent).address, NAME).create("x", data[:1000])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_without_rights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o500)
    with pytest.raises(BucketError, match="the rights of its folder"):
        await Bucket(f"file://{tmp_path}/shared", NAME).create("x", b"")
