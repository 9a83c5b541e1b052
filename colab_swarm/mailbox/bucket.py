"""A store of objects: a bucket of S3, Google or Azure, a shared folder, or this process's memory.

If a store limits or fails a request, obstore repeats the request for half a minute. If a store sends no byte for
`STALL_S`, the request ends. Then the method raises `BucketAway`. If the bucket refuses this peer, the method raises
`BucketError`. The texts of these errors contain no secret. Times are seconds since the epoch by the store's clock.
`SeenTimes` has the times in a folder.
"""

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from colab_swarm.credentials import find_secret
from colab_swarm.errors import BucketAway, BucketError, JoinError, require
from colab_swarm.files import sync_through
from colab_swarm.mailbox.address import checked_address, folder_at, options_of
from colab_swarm.net.peers import Buffer, PeerId, remember
from colab_swarm.runtime import DeviceThread, loop_now

T = TypeVar("T")
Errors: TypeAlias = tuple[type[Exception], ...]
Call: TypeAlias = Callable[[Callable[[], Any], int], Coroutine[Any, Any, Any]]
BACKOFF = {"init_backoff": timedelta(seconds=0.25), "max_backoff": timedelta(seconds=4), "base": 2}
# for status 429, 5xx and lost connections; only the time limits the retries
RETRY: dict[str, Any] = {"max_retries": 1000, "retry_timeout": timedelta(seconds=30), "backoff": BACKOFF}
STALL_S = 30.0  # maximum time without a byte from the store
UPLOAD_BYTES = 1 << 20  # what a slow line sends in that time
CLOCK_SLACK_S = 2.0  # error of the clock of a folder's server, and of times in whole seconds
MOST_TIMES = 100_000  # maximum number of objects in a folder whose times are remembered
KEYS = {
    "s3": {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"},
    "gs": {"service_account_key": "GOOGLE_SERVICE_ACCOUNT_KEY"},
    "az": {"account_name": "AZURE_STORAGE_ACCOUNT_NAME", "account_key": "AZURE_STORAGE_ACCOUNT_KEY"},
}
"""For each option of a store, the name of its secret in the environment or in the platform's store of secrets."""

VARIABLES = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION", "session_token": "AWS_SESSION_TOKEN"}
"""Further options of S3, and their environment variables; an option in the address takes precedence."""
SECRET_NAMES = re.compile(r"(AWS|AZURE|GOOGLE)_.*(KEY|TOKEN|SECRET)")
SIGNED_PARTS = re.compile(r"(?<=//)[^/\s@]*(?=@)|(?<=\?)[^\s'\"]+|(?<=[Ss]ignature)\w*[=>:][^\s<,]*")
MARKER = "created/first"
"""The first object that the creator of a run writes. If this object is missing, the run is not there."""
MEMORY: "dict[str, MemoryStore]" = {}


@dataclass(frozen=True)
class StoredObject:
    """An object as the store lists it."""

    path: str
    size_bytes: int
    modified_at: float

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def member(self) -> PeerId:
        """The member that wrote the object, according to the object's path."""
        return PeerId(bytes.fromhex(self.path.rpartition("/")[2][:64]))


class MemoryStore:
    """Objects in a dictionary, for tests and simulations. Their times come from ``clock``."""

    errors: Errors = (OSError,)  # errors that its methods raise
    refusals: Errors = (PermissionError,)  # those of them that mean that this peer has no permission
    rights = "its memory"  # what a refused peer should check

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.clock = clock

    async def create(self, path: str, data: Buffer, mode: str = "create") -> bool:
        own = bytes(data), self.clock()
        if mode == "overwrite":
            self.objects.pop(path, None)
        return self.objects.setdefault(path, own) is own

    async def read(self, path: str, most_bytes: int | None) -> bytes | None:
        return self.objects[path][0][:most_bytes] if path in self.objects else None

    async def list(self, prefix: str, after: str) -> list[StoredObject]:
        found = sorted(self.objects.items())
        return [StoredObject(p, len(one), at) for p, (one, at) in found if p.startswith(prefix) and p > after]

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.objects.pop(path, None)


class ObjectStore:
    """A bucket or a folder that obstore opens.

    Args:
        open_store: opens the store. Its argument is how many seconds the store may be silent.
        call: runs a blocking call of obstore in a thread. Its second argument is the number of bytes to send.
        rights: what a refused peer should check, for the text of the error.
        sync: makes sure that a written object survives a power cut.
    """

    def __init__(
        self,
        open_store: Callable[[float], Any],
        call: Call,
        rights: str,
        sync: Callable[[str], None] = lambda path: None,
    ) -> None:
        import obstore
        from obstore import exceptions

        self._obstore = obstore
        self._open_store = open_store
        self._call = call
        self._sync = sync
        self.rights = rights
        self.errors: Errors = OSError, exceptions.BaseError
        refused = exceptions.UnauthenticatedError, exceptions.PermissionDeniedError
        self.refusals: Errors = PermissionError, *refused
        self._exists = exceptions.AlreadyExistsError, exceptions.PreconditionError

    async def create(self, path: str, data: Buffer, mode: str = "create") -> bool:
        def put() -> bool:
            how: Any = {"mode": mode, "use_multipart": False}
            store = self._open_store(patience_for(len(data)))
            try:
                self._obstore.put(store, path, data, **how)
            except self._exists:
                return False
            self._sync(path)
            return True

        return bool(await self._call(put, len(data)))

    async def read(self, path: str, most_bytes: int | None) -> bytes | None:
        def fetch() -> bytes | None:
            store = self._open_store(STALL_S)
            try:
                if most_bytes is None:
                    return bytes(self._obstore.get(store, path).bytes())
                return bytes(self._obstore.get_range(store, path, start=0, length=most_bytes))
            except FileNotFoundError:
                return None

        data: bytes | None = await self._call(fetch, 0)
        return data

    async def list(self, prefix: str, after: str) -> list[StoredObject]:
        def rows() -> Any:
            return self._obstore.list(self._open_store(STALL_S), prefix, offset=after or None).collect()

        places = []
        for row in await self._call(rows, 0):
            places.append(StoredObject(row["path"], row["size"], row["last_modified"].timestamp()))
        return sorted(places, key=lambda place: place.path)

    async def delete(self, paths: Sequence[str]) -> None:
        def remove() -> None:
            store = self._open_store(STALL_S)
            for path in paths:
                with suppress(FileNotFoundError):  # another peer may have deleted it
                    self._obstore.delete(store, path)

        await self._call(remove, 0)

    async def run(self, work: Callable[[], Any]) -> None:
        """Run other work on the store, with the limit `STALL_S` for silence."""
        await self._call(work, 0)


def open_bucket(address: str, secrets: Mapping[str, str]) -> ObjectStore:
    """Open a bucket of S3, Google or Azure. obstore itself ends a request that hangs."""
    from obstore.store import from_url

    kind = urlsplit(address).scheme
    config: dict[str, str] = dict(secrets)
    if kind == "s3":
        config |= {name: os.environ[known] for name, known in VARIABLES.items() if known in os.environ}
    config |= options_of(address)
    insecure = config.get("endpoint", "").startswith("http://")

    @lru_cache
    def open_store(patience_s: float) -> Any:
        client: Any = {"allow_http": insecure, "timeout": timedelta(days=1)}
        client["read_timeout"] = timedelta(seconds=patience_s)
        options: Any = {"config": config, "client_options": client, "retry_config": RETRY}
        return from_url(address.partition("?")[0], **options)

    async def call(work: Callable[[], Any], size_bytes: int) -> Any:
        return await asyncio.to_thread(work)

    open_store(STALL_S)
    # stores refuse requests if the clock of this machine is wrong
    rights = f"{' and '.join(KEYS[kind].values())}, and this machine's clock"
    return ObjectStore(open_store, call, rights)


def open_folder(folder: Path, run: Path) -> ObjectStore:
    """Open a shared folder in which ``run`` is the folder of a run.

    If the server of a mounted folder is away, a call may hang until the server is back. The store stops waiting for
    such a call after `STALL_S`, or later for a large upload. It makes no other call before the hanging call has
    returned, because each call would take a thread.
    """
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore

    hanging: set[asyncio.Future[Any]] = set()
    had_run = False

    def open_store(patience_s: float) -> Any:
        # if the folder is not mounted, obstore would create it, or begin a new history in the empty mount point
        nonlocal had_run
        has_run = run.is_dir()
        if not folder.is_dir() or (had_run and not has_run):
            raise FileNotFoundError(f"{folder} is not there: is the folder mounted?")
        had_run = has_run
        return LocalStore(folder)

    def sync(path: str) -> None:
        for place in (folder / path, (folder / path).parent):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                sync_through(descriptor)
            finally:
                os.close(descriptor)

    def on_end(future: asyncio.Future[Any]) -> None:
        hanging.discard(future)
        future.exception()

    async def call(work: Callable[[], Any], size_bytes: int) -> Any:
        patience_s = patience_for(size_bytes)
        silence = f"nothing came for {patience_s:.0f} s"
        if hanging:
            await asyncio.wait(hanging, timeout=patience_s)
            require(not hanging, silence, TimeoutError)
        thread = DeviceThread()
        future = thread.run(work)
        thread.shutdown(wait=False)
        await asyncio.wait([future], timeout=patience_s)
        if not future.done():
            hanging.add(future)
            future.add_done_callback(on_end)
            raise TimeoutError(silence)
        try:
            return await future
        except BaseError as error:
            # for a folder, obstore has no class for this error
            if "PermissionDenied" in str(error):
                raise PermissionError(str(error)) from error
            raise

    return ObjectStore(open_store, call, "the rights of its folder", sync)


def patience_for(size_bytes: int) -> float:
    """Return how many seconds a store may be silent during an upload of this size, as one of a few values.

    Neither obstore nor a folder tells how much of an upload is done.
    """
    doublings = (size_bytes // UPLOAD_BYTES).bit_length()
    return STALL_S * (1 << doublings)


def secrets_of(address: str) -> tuple[dict[str, str], list[str]]:
    """Return this peer's secrets for a store, by the store's options, and the names of missing secrets."""
    wanted = KEYS.get(urlsplit(address).scheme, {})
    secrets = {}
    missing = []
    for option, name in wanted.items():
        secret = find_secret(name)
        if secret:
            secrets[option] = str(secret)
        else:
            missing.append(name)
    return secrets, missing


def _absence(address: str) -> str:
    question = "have its objects been deleted?"
    if folder_at(address) is not None:
        question = "is the folder mounted?"
    return f"the run is not in {address}: {question} Runs of earlier versions of colab_swarm do not continue"


def require_rights(address: str) -> None:
    """Raise `JoinError` unless this peer has the keys of a store. Call it from the user's thread."""
    _, missing = secrets_of(address)
    require(
        not missing,
        f"the rounds of this run are in {address}, and this peer has no secret {' and '.join(missing)}: ask the "
        "creator of the run for keys that can get, put and list objects there",
        JoinError,
    )


class SeenTimes:
    """When objects of a shared folder appeared, although the clocks of their writers may be wrong. Pure.

    A *look* is one listing of the folder. An object's time is the time of its file, within two limits: at the earliest
    `CLOCK_SLACK_S` before this peer's last look without the object, and at the latest `CLOCK_SLACK_S` after the first
    look with the object. The time does not change while looks show the object.
    """

    def __init__(self) -> None:
        # The object that this peer wrote last. Its time shows the clock of the folder's server.
        self.own = ""
        self._times: dict[str, float] = {}
        # The last look at each folder: after which path it listed, and when.
        self._looks: dict[str, tuple[str, float]] = {}

    def corrected(
        self, folder: str, after: str, places: Sequence[StoredObject], *, began_at: float, now: float
    ) -> list[StoredObject]:
        """Return the objects of a look with corrected times. The look listed all paths after ``after``."""
        looked_after, looked_at = self._looks.get(folder, ("", -math.inf))
        corrected = []
        for place in places:
            if place.path not in self._times:
                seen_at = place.modified_at
                if place.path != self.own:
                    absent_at = looked_at if place.path > looked_after else -math.inf
                    seen_at = min(max(seen_at, absent_at - CLOCK_SLACK_S), now + CLOCK_SLACK_S)
                remember(self._times, place.path, seen_at, MOST_TIMES)
            corrected.append(replace(place, modified_at=self._times[place.path]))
        self._looks[folder] = (after, began_at)
        listed_paths = {place.path for place in places}
        for path in list(self._times):
            if path.startswith(f"{folder}/") and path > after and path not in listed_paths:
                del self._times[path]
        return corrected


class Bucket:
    """The objects of one model of a run at an address such as ``s3://bucket/folder``.

    Keys come from the secrets that `KEYS` names. Raises ValueError if the address is invalid, and `BucketError` if the
    store cannot be opened.
    """

    def __init__(self, address: str, prefix: str) -> None:
        self.address = checked_address(address)
        self._root = f"runs/{prefix}/"
        self._run_id = prefix.partition("/")[0]
        self.requests = 0  # number of requests so far
        self.sent_bytes = self.received_bytes = 0
        self._behind_s: float | None = None  # how far the loop's clock is behind the store's
        self._missing: list[str] = []  # names of missing secrets
        self._secrets: list[str] = []
        self._folder = folder_at(self.address)
        self._seen: SeenTimes | None = None  # only for a folder
        self._store = self._open()

    def _open(self) -> MemoryStore | ObjectStore:
        if self.address.startswith("memory://"):
            return MEMORY.setdefault(self.address, MemoryStore())
        secrets, self._missing = secrets_of(self.address)
        self._secrets += secrets.values()
        # obstore itself reads these environment variables
        for name, secret in os.environ.items():
            if secret and SECRET_NAMES.match(name):
                self._secrets.append(secret)
        try:
            if self._folder is not None:
                self._seen = SeenTimes()
                return open_folder(self._folder, self._folder / self._root.partition("/")[0] / self._run_id)
            return open_bucket(self.address, secrets)
        except ImportError as error:
            how = "a run in a bucket needs the package obstore: pip install 'colab-swarm[train]'"
            raise BucketError(how) from error
        except Exception as error:  # obstore raises various errors for an unknown address or option
            raise BucketError(f"{self.address} cannot be opened: {self._reason(error)}") from None

    async def _do(self, verb: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        self.requests += 1
        try:
            return await verb(*arguments)
        except self._store.refusals as error:
            why = f"they may have been revoked ({self._reason(error)})"
            # `from None`, because obstore's text in the traceback may show a key
            raise BucketError(
                f"{self.address} refuses this peer; check {self._store.rights}: {why}"
            ) from None
        except self._store.errors as error:
            raise BucketAway(f"{self.address} does not answer: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        """Return a store's error as one line, without secrets, signatures and queries."""
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        for secret in self._secrets:
            line = line.replace(secret, "***")
        line = SIGNED_PARTS.sub("***", line)[:300]
        if self._missing:
            line = f"{line}; no secret {' and '.join(self._missing)} was found"
        return line

    async def create(self, path: str, data: Buffer) -> bool:
        """Write an object, unless this path already has an object; return True if it was written."""
        written = await self._do(self._store.create, self._root + path, data)
        self.sent_bytes += len(data)
        if written and self._seen is not None:
            self._seen.own = path
        return written

    async def replace(self, path: str, data: Buffer) -> None:
        """Write an object, and overwrite an object that is already at this path."""
        await self._do(self._store.create, self._root + path, data, "overwrite")
        self.sent_bytes += len(data)

    async def read(self, path: str, most_bytes: int | None = None) -> bytes | None:
        """Return the bytes of an object, at most the first ``most_bytes``; None if there is no such object."""
        data = await self._do(self._store.read, self._root + path, most_bytes)
        self.received_bytes += len(data or b"")
        return data

    async def list(self, folder: str, after: str = "") -> list[StoredObject]:
        """Return the objects of a folder whose paths sort after ``after``, sorted by path."""
        began_at = self.now()
        places = await self._do(self._store.list, f"{self._root}{folder}/", after and self._root + after)
        places = [replace(place, path=place.path.removeprefix(self._root)) for place in places]
        if self._seen is None:
            return places
        return self._seen.corrected(folder, after, places, began_at=began_at, now=self.now())

    async def delete(self, paths: Sequence[str]) -> None:
        if paths:
            await self._do(self._store.delete, [self._root + path for path in paths])

    def on_time(self, modified_at: float, written_at: float) -> None:
        """Set the store's clock by an object that this peer wrote, at the loop time ``written_at``."""
        self._behind_s = modified_at - written_at + loop_now() - self._clock()

    def now(self) -> float:
        """Return the store's time or, while it is unknown, the time of this machine's clock."""
        return time.time() if self._behind_s is None else self._clock() + self._behind_s

    def _clock(self) -> float:
        # The loop's clock stops while a machine sleeps, but the times of looks must go on.
        return loop_now() if self._seen is None else time.time()

    async def require_conditional_writes(self) -> None:
        """Raise `BucketError` unless the store keeps the first of two writes to one path."""
        path = f"checks/{os.urandom(8).hex()}"
        await self.create(path, b"first")
        written_at = loop_now()
        second = await self.create(path, b"second")
        # times without correction: an object that this peer wrote has the store's time, also in a folder
        places = await self._do(self._store.list, f"{self._root}checks/", self._root + path[:-1])
        kept = await self.read(path)
        with suppress(BucketError):  # this peer's keys may not delete
            await self.delete([path])
        mine = [place for place in places if place.path == self._root + path]
        require(
            not second and kept == b"first" and mine,
            f"{self.address} overwrites objects that exist: a run needs a store with conditional writes, such as S3, "
            "R2, MinIO, Google, Azure, or a folder",
            BucketError,
        )
        self.on_time(mine[0].modified_at, written_at)

    async def enter(self, *, begins: bool, writes: bool) -> float:
        """Enter a run; return how many seconds this machine's clock is behind the store's.

        Call this method on the bucket of a run's prefix.

        Args:
            begins: True if the run is new. This peer then marks the run as created.
            writes: True if this peer's keys may write. Else the store's clock is unknown, and the method returns 0.

        Raises:
            JoinError: the run is not new, and there is no mark of its creation here.
            BucketError: the folder cannot be made, or the store does not keep the first of two writes.
        """
        if begins:
            if self._folder is not None:
                await self._make_folder(self._store, self._folder)
            await self.create(MARKER, b"created")
        else:
            try:
                marker = await self.read(MARKER)
            except BucketAway as error:
                # this error means that the folder is missing
                require(
                    not isinstance(error.__context__, FileNotFoundError), _absence(self.address), JoinError
                )
                raise
            require(marker is not None, _absence(self.address), JoinError)
        if not writes:
            return 0.0
        await self.require_conditional_writes()
        return self.now() - time.time()

    async def _make_folder(self, store: MemoryStore | ObjectStore, folder: Path) -> None:
        def make() -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BucketError(f"the folder {folder} cannot be made: {error}") from error

        assert isinstance(store, ObjectStore)
        await self._do(store.run, make)

    def __repr__(self) -> str:
        return f"Bucket({self.address}, {self.requests} requests)"
