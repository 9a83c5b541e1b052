"""A place for objects: a bucket of S3, Google or Azure, a shared folder, or this process's memory.

A store that throttles or fails is asked again for half a minute, and one that sends no byte is given
up after `STALL_S`. Then a verb raises `BucketAway` or, if the bucket refuses this peer, `BucketError`.
Their texts show no secret. Times are seconds since the epoch by the store's own clock; in a folder,
see `SeenTimes`.
"""

import asyncio
import math
import os
import re
import stat
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
BACKOFF = {"init_backoff": timedelta(seconds=0.25), "max_backoff": timedelta(seconds=4), "base": 2}
# of 429, 5xx and lost connections; the time is the limit
RETRY: dict[str, Any] = {"max_retries": 1000, "retry_timeout": timedelta(seconds=30), "backoff": BACKOFF}
STALL_S = 30.0  # without a byte from the store
UPLOAD_BYTES = 1 << 20  # that a slow line sends in that time
CLOCK_SLACK_S = 2.0  # of a folder's server, and of times in whole seconds
MOST_TIMES = 100_000  # of objects in a folder, that are remembered
MOST_LOOKS = 1_000
KEYS = {
    "s3": {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"},
    "gs": {"service_account_key": "GOOGLE_SERVICE_ACCOUNT_KEY"},
    "az": {"account_name": "AZURE_STORAGE_ACCOUNT_NAME", "account_key": "AZURE_STORAGE_ACCOUNT_KEY"},
}
"""Names of the secrets, in the environment or the platform's store, for an option of the store."""

VARIABLES = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION", "session_token": "AWS_SESSION_TOKEN"}
"""More options of S3, by their environment variables; the address wins."""
SECRET_NAMES = re.compile(r"(AWS|AZURE|GOOGLE)_.*(KEY|TOKEN|SECRET)")
SIGNED_PARTS = re.compile(r"(?<=//)[^/\s@]*(?=@)|(?<=\?)[^\s'\"]*|(?<=[Ss]ignature)\w*[=>:][^\s<,]*")
MARKER = "created/first"
"""An object of a run that its creator writes first: where it is missing, the run is not."""
MEMORY: "dict[str, MemoryStore]" = {}


@dataclass(frozen=True)
class StoredObject:
    """An object in a list."""

    path: str
    size_bytes: int
    modified_at: float

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def member(self) -> PeerId:
        """Who wrote it, by its path."""
        return PeerId(bytes.fromhex(self.path.rpartition("/")[2][:64]))


class MemoryStore:
    """For tests and simulations: objects in a dictionary, by the loop's clock."""

    errors: Errors = (OSError,)  # that its verbs raise
    refusals: Errors = (PermissionError,)  # of these, those that say that this peer may not
    rights = "its memory"  # what a refused peer should check

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.clock = clock

    async def create(self, path: str, data: Buffer) -> bool:
        own = bytes(data), self.clock()
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
    """A bucket that obstore opens."""

    def __init__(self, address: str, secrets: Mapping[str, str]) -> None:
        import obstore
        from obstore import exceptions
        from obstore.store import from_url

        self._obstore = obstore
        self.errors: Errors = OSError, exceptions.BaseError
        refused = exceptions.UnauthenticatedError, exceptions.PermissionDeniedError
        self.refusals: Errors = PermissionError, *refused
        self._exists = exceptions.AlreadyExistsError, exceptions.PreconditionError
        kind = urlsplit(address).scheme
        # stores refuse requests of another time than theirs
        self.rights = f"{' and '.join(KEYS[kind].values())}, and this machine's clock"
        config: dict[str, str] = dict(secrets)
        if kind == "s3":
            config |= {name: os.environ[known] for name, known in VARIABLES.items() if known in os.environ}
        config |= options_of(address)
        insecure = config.get("endpoint", "").startswith("http://")

        def open_store(patience_s: float) -> Any:
            client: Any = {"allow_http": insecure, "timeout": timedelta(days=1)}
            client["read_timeout"] = timedelta(seconds=patience_s)
            options: dict[str, Any] = {"config": config, "client_options": client, "retry_config": RETRY}
            return from_url(address.partition("?")[0], **options)

        self._store_by = lru_cache(open_store)
        self._store_by(STALL_S)

    async def create(self, path: str, data: Buffer) -> bool:
        how: dict[str, Any] = {"mode": "create", "use_multipart": False}
        store = self._store_by(patience_for(len(data)))
        try:
            await asyncio.to_thread(self._obstore.put, store, path, data, **how)
        except self._exists:
            return False
        return True

    async def read(self, path: str, most_bytes: int | None) -> bytes | None:
        store = self._store_by(STALL_S)

        def fetch() -> bytes:
            if most_bytes is None:
                return bytes(self._obstore.get(store, path).bytes())
            return bytes(self._obstore.get_range(store, path, start=0, length=most_bytes))

        try:
            return await asyncio.to_thread(fetch)
        except FileNotFoundError:
            return None

    async def list(self, prefix: str, after: str) -> list[StoredObject]:
        listing = self._obstore.list(self._store_by(STALL_S), prefix, offset=after or None)
        rows = await asyncio.to_thread(listing.collect)
        places = [StoredObject(row["path"], row["size"], row["last_modified"].timestamp()) for row in rows]
        return sorted(places, key=lambda place: place.path)

    async def delete(self, paths: Sequence[str]) -> None:
        await asyncio.to_thread(self._obstore.delete, self._store_by(STALL_S), list(paths))


class FolderStore:
    """Objects as files of a folder. Nothing is read or written through a link that lies in it.

    Where a link, a pipe or a file of another kind takes the place of an object or a folder, it is
    renamed: it would else stop the run. Where the server of a mounted folder is away, a call may hang
    until it is back. Such a call is given up after `STALL_S`, and no other is made before it has
    returned.
    """

    errors: Errors = (OSError,)
    refusals: Errors = (PermissionError,)
    rights = "the rights of its folder"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hanging: asyncio.Future[Any] | None = None

    async def _call(self, work: Callable[[], T], size_bytes: int = 0) -> T:
        """Do the work in a thread; raises TimeoutError if it does not end in time."""
        patience_s = patience_for(size_bytes)
        hanging = self._hanging
        if hanging is not None:
            # Each further call would take a thread.
            await asyncio.wait([hanging], timeout=patience_s)
            require(hanging.done(), f"nothing came for {patience_s:.0f} s", TimeoutError)
        thread = DeviceThread()
        call = thread.run(work)
        thread.shutdown(wait=False)
        await asyncio.wait([call], timeout=patience_s)
        if not call.done():
            call.add_done_callback(asyncio.Future.exception)
            self._hanging = call
        require(call.done(), f"nothing came for {patience_s:.0f} s", TimeoutError)
        return await call

    async def make(self) -> None:
        try:
            await self._call(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        except TimeoutError:
            raise
        except OSError as error:
            raise BucketError(f"the folder {self._folder} cannot be made: {error}") from error

    async def create(self, path: str, data: Buffer) -> bool:
        def write() -> bool:
            file = self._make_way(path)
            draft = file.with_name(f"{file.name}#{os.urandom(8).hex()}")
            try:
                with draft.open("xb") as content:
                    content.write(data)
                    content.flush()
                    # After a power cut, a manifest that others have followed must not be empty.
                    sync_through(content.fileno())
                os.link(draft, file)
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
            return True

        return await self._call(write, len(data))

    def _make_way(self, path: str) -> Path:
        """Return the file of an object, after its folders were made."""
        require(".." not in Path(path).parts, "an object lies below its folder")
        require(self._folder.is_dir(), "is the folder mounted?", FileNotFoundError)
        file = self._folder / path
        place = self._folder
        for name in Path(path).parts:
            place /= name
            is_kind = stat.S_ISREG if place == file else stat.S_ISDIR
            # One look: another peer may write the object meanwhile, which must stay.
            with suppress(FileNotFoundError):
                if not is_kind(place.lstat().st_mode):
                    place.rename(f"{place}#{os.urandom(8).hex()}")
            if place != file:
                place.mkdir(exist_ok=True)
        return file

    async def read(self, path: str, most_bytes: int | None) -> bytes | None:
        file = self._folder / path

        def size() -> int | None:
            # a pipe or a device has no end, and a link may lead out of the folder
            return file.stat().st_size if self._holds(path) and file.is_file() else None

        def fetch() -> bytes:
            with file.open("rb") as content:
                return content.read(most_bytes)

        with suppress(FileNotFoundError):
            size_bytes = await self._call(size)
            if size_bytes is not None:
                return await self._call(fetch, size_bytes)
        return None

    def _holds(self, path: str) -> bool:
        """Return whether no link lies on the way to an object or a folder."""
        place = Path(os.path.realpath(self._folder)) / path
        return os.path.realpath(place) == str(place)

    async def list(self, prefix: str, after: str) -> list[StoredObject]:
        def files(folder: str) -> Iterator[StoredObject]:
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(self._folder / folder) as entries,
            ):
                for entry in entries:
                    path = f"{folder}/{entry.name}"
                    # all paths in a folder sort before its name and a "0", which follows "/"
                    if entry.is_dir(follow_symlinks=False) and f"{path}0" > after:
                        yield from files(path)
                    # a draft has a "#" in its name
                    elif entry.is_file(follow_symlinks=False) and path > after and "#" not in entry.name:
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield StoredObject(path, status.st_size, status.st_mtime)

        def listed() -> list[StoredObject]:
            if not self._holds(prefix):
                return []
            return sorted(files(prefix.rstrip("/")), key=lambda place: place.path)

        return await self._call(listed)

    async def delete(self, paths: Sequence[str]) -> None:
        def remove() -> None:
            for path in paths:
                if self._holds(path):
                    (self._folder / path).unlink(missing_ok=True)

        await self._call(remove)


def patience_for(size_bytes: int) -> float:
    """Return how long a store may be silent about an object of this size; one of a few values.

    Neither obstore nor a folder tells how much of an upload has gone.
    """
    doublings = (size_bytes // UPLOAD_BYTES).bit_length()
    return STALL_S * (1 << doublings)


def secrets_of(address: str) -> tuple[dict[str, str], list[str]]:
    """Return this peer's secrets for a store, by its options, and which secrets are missing."""
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
    """Raise `JoinError` unless this peer has the keys of a store. From the user's thread."""
    _, missing = secrets_of(address)
    require(
        not missing,
        f"the rounds of this run are in {address}, and this peer has no secret {' and '.join(missing)}: ask the "
        "creator of the run for keys that can get, put and list objects there",
        JoinError,
    )


class SeenTimes:
    """When objects of a shared folder appeared: a writer chooses the times of its files. Pure.

    An object's time is its file's, but at most `CLOCK_SLACK_S` before this peer's last look without
    it, or after its first look with it. It is the same ever after. The ``own`` object was written last
    by this peer: its time is that of the folder's server, by which the peer sets its clock.
    """

    def __init__(self) -> None:
        self.own = ""
        self._times: dict[str, float] = {}
        # By folder, the last look from each path on. Later looks from earlier paths replace others.
        self._looks: dict[str, list[tuple[str, float]]] = {}

    def corrected(
        self, folder: str, after: str, places: Sequence[StoredObject], *, began_at: float, now: float
    ) -> list[StoredObject]:
        """Return a look's objects with their times; it listed all paths beyond ``after``."""
        looks = self._looks.setdefault(folder, [("", -math.inf)])
        corrected = []
        for place in places:
            if place.path not in self._times:
                seen_at = place.modified_at
                if place.path != self.own:
                    _, absent_at = looks[bisect_left(looks, (place.path,)) - 1]
                    seen_at = min(max(seen_at, absent_at - CLOCK_SLACK_S), now + CLOCK_SLACK_S)
                remember(self._times, place.path, seen_at, MOST_TIMES)
            corrected.append(replace(place, modified_at=self._times[place.path]))
        while looks and looks[-1][0] >= after:
            looks.pop()
        looks.append((after, began_at))
        del looks[1:-MOST_LOOKS]
        return corrected


class Bucket:
    """The objects of one model of a run at an address such as ``s3://bucket/folder``.

    Keys come from secrets: see `KEYS`. Raises ValueError for an address that is none, `BucketError`
    if the store cannot be opened.
    """

    def __init__(self, address: str, prefix: str) -> None:
        self.address = checked_address(address)
        self._root = f"runs/{prefix}/"
        self.requests = 0  # so far
        self.sent_bytes = self.received_bytes = 0
        self._behind_s: float | None = None  # of this machine's clock, behind the store's
        self._missing: list[str] = []  # secrets
        self._secrets: list[str] = []
        self._seen: SeenTimes | None = None
        self._store = self._open()

    def _open(self) -> MemoryStore | ObjectStore | FolderStore:
        if self.address.startswith("memory://"):
            return MEMORY.setdefault(self.address, MemoryStore())
        folder = folder_at(self.address)
        if folder is not None:
            self._seen = SeenTimes()
            return FolderStore(folder)
        secrets, self._missing = secrets_of(self.address)
        self._secrets += secrets.values()
        # obstore reads these itself
        for name, secret in os.environ.items():
            if secret and SECRET_NAMES.match(name):
                self._secrets.append(secret)
        try:
            return ObjectStore(self.address, secrets)
        except ImportError as error:
            how = "a run in a bucket needs the package obstore: pip install 'colab-swarm[train]'"
            raise BucketError(how) from error
        except Exception as error:  # of obstore, for an address or an option that it does not know
            raise BucketError(f"{self.address} cannot be opened: {self._reason(error)}") from None

    async def _do(self, verb: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        self.requests += 1
        try:
            return await verb(*arguments)
        except self._store.refusals as error:
            why = f"they may have been revoked ({self._reason(error)})"
            # obstore's own text, in a traceback, may show a key
            raise BucketError(
                f"{self.address} refuses this peer; check {self._store.rights}: {why}"
            ) from None
        except self._store.errors as error:
            raise BucketAway(f"{self.address} does not answer: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        """Return a store's error in one line, without secrets, signatures and queries."""
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        for secret in self._secrets:
            line = line.replace(secret, "***")
        line = SIGNED_PARTS.sub("***", line)[:300]
        if self._missing:
            line = f"{line}; no secret {' and '.join(self._missing)} was found"
        return line

    async def create(self, path: str, data: Buffer) -> bool:
        """Write an object unless there is one at that path; return whether it was written."""
        written = await self._do(self._store.create, self._root + path, data)
        self.sent_bytes += len(data)
        if written and self._seen is not None:
            self._seen.own = path
        return written

    async def read(self, path: str, most_bytes: int | None = None) -> bytes | None:
        """Return an object, or only its first ``most_bytes``; None if there is none."""
        data = await self._do(self._store.read, self._root + path, most_bytes)
        self.received_bytes += len(data or b"")
        return data

    async def list(self, folder: str, after: str = "") -> list[StoredObject]:
        """Return the objects of a folder whose paths sort after ``after``, sorted."""
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
        """Learn how the store's clock goes from an own object, written at a time of the loop."""
        self._behind_s = modified_at - written_at + loop_now() - self._clock()

    def now(self) -> float:
        """Return the store's time, as far as it is known."""
        return time.time() if self._behind_s is None else self._clock() + self._behind_s

    def _clock(self) -> float:
        # The loop's clock stands still while a machine sleeps, and the time of a look must not.
        return loop_now() if self._seen is None else time.time()

    async def require_conditional_writes(self) -> None:
        """Raise `BucketError` unless the store keeps the first of two writes."""
        path = f"checks/{os.urandom(8).hex()}"
        first = await self.create(path, b"first")
        written_at = loop_now()
        second = await self.create(path, b"second")
        # raw times: an own object has that of the store's clock, also in a folder
        places = await self._do(self._store.list, f"{self._root}checks/", self._root + path[:-1])
        kept = await self.read(path)
        with suppress(BucketError):  # this peer's keys may not delete
            await self.delete([path])
        mine = [place for place in places if place.path == self._root + path]
        require(
            first and not second and kept == b"first" and mine,
            f"{self.address} overwrites objects that exist: a run needs a store with conditional writes, such as S3, "
            "R2, MinIO, Google, Azure, or a folder",
            BucketError,
        )
        self.on_time(mine[0].modified_at, written_at)

    async def enter(self, *, begins: bool, writes: bool) -> float:
        """Return how many seconds this machine's clock is behind the store's. For a run's prefix.

        Args:
            begins: the run is new, and is marked as created.
            writes: this peer's keys may write; else the store's clock is not known, and 0 is returned.

        Raises:
            JoinError: the run is not new, and was not created here.
            BucketError: see `require_conditional_writes`.
        """
        if begins:
            if isinstance(self._store, FolderStore):
                await self._do(self._store.make)
            await self.create(MARKER, b"created")
        else:
            require(await self.read(MARKER) is not None, _absence(self.address), JoinError)
        if not writes:
            return 0.0
        await self.require_conditional_writes()
        return self.now() - time.time()

    def __repr__(self) -> str:
        return f"Bucket({self.address}, {self.requests} requests)"
