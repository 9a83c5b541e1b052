"""The folder that saves a peer, so that it is the same peer in a later session or on another machine.

    identity.key             the peer's key: a process that has the key is this peer
    identity.key.authority   only at the peer that created the run: the peers that it admitted and removed
    peer.json                run, invitation, membership, options, contributions; written often
    checkpoints/NAME/        what each optimizer has trained
    in-use.json, .lock       which process uses the folder now

All files except the checkpoints are secret. A file is written under another name and then renamed, so a killed
process leaves no damaged file. Two processes with one key would push each other out of the swarm, so only one process
uses the folder at a time. If it is killed, the system frees its lock on `in-use.lock`. On Linux, other processes of
the same machine notice this immediately, also from another container. On a network drive, other machines do not see
the lock: they wait until the heartbeats in `in-use.json` have stopped.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec
from filelock import FileLock, Timeout

from colab_swarm.errors import StateError, require
from colab_swarm.files import write_file
from colab_swarm.invite import Access
from colab_swarm.net.peers import UNDECODABLE, Contact, PeerId
from colab_swarm.notebook.platforms import Platform
from colab_swarm.project import update
from colab_swarm.trust.authority import Allowlist
from colab_swarm.trust.contributions import Tally

STALE_S = 180.0  # after this time without a heartbeat, the process counts as dead
VERSION = 1
MAX_CONTACTS = 64  # peers that are linked come first, then those that were linked most recently


class Occupant(msgspec.Struct, frozen=True):
    """The process that uses the folder."""

    store: str  # a random name of its `PeerStore`
    host: str
    pid: int
    at: float  # its last heartbeat, seconds since the epoch
    lock: str = ""  # id of the lock that it holds, made of boot id, device and file; empty if it holds none


class SavedPeer(msgspec.Struct, frozen=True):
    version: int
    run_id: str
    access: Access  # who may join the run
    name: str  # this peer's name, for people
    invitation: str  # the invitation with which it joined; empty if it created the run
    allow: Allowlist | None  # the allowlist of the run, if this peer created the run
    options: dict[str, Any]  # the peer's `NetworkOptions`, without secrets
    contacts: tuple[Contact, ...] = ()  # peers that could be dialled when this was written, or before
    membership: bytes = b""
    tally: Tally = ()  # the contributions of peers, as this peer saw them
    port: int = 0  # where it listened; kept because its invitations name the port; 0 if it did not listen
    mailbox: str = ""  # address of the bucket that has the run's rounds, if any

    @property
    def run(self) -> str:
        return self.run_id.rpartition("-")[0]

    def __repr__(self) -> str:
        return f"SavedPeer({self.name} of {self.run})"  # shows no secret


def read_saved(folder: Path) -> SavedPeer | None:
    """Return the peer that a folder saves, or None. Raises StateError if it is damaged or of a newer version."""
    path = folder / "peer.json"
    try:
        data = path.read_bytes()
        header = msgspec.json.decode(data)
        if isinstance(header, dict) and header.get("version", 0) > VERSION:
            raise StateError(f"{path} was written by a newer colab_swarm: {update()}")
        saved = msgspec.json.decode(data, type=SavedPeer)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(folder, error) from error
    except (*UNDECODABLE, TypeError) as error:
        raise damaged(folder) from error
    text = f"{folder} has lost its identity.key: join again with an invitation"
    require((folder / "identity.key").exists(), text, StateError)
    return saved


def damaged(folder: Path) -> StateError:
    return StateError(
        f"{folder / 'peer.json'} is damaged: move the folder away and join with an invitation; "
        f"{folder / 'identity.key'} still works as NetworkOptions(identity=…)"
    )


def _unusable(folder: Path, error: OSError) -> StateError:
    for place in (folder, *folder.parents):
        if place.is_file():
            text = (
                f"state_dir={str(folder)!r}: {place} is a file; name a folder, which is made if it is missing"
            )
            return StateError(text)
    return StateError(f"{folder} is unusable: {error.strerror or error}; take another folder")


def folder_of(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


def loss_warning(folder: Path, here: Platform) -> str:
    if not here.lasting or folder.is_relative_to(here.lasting):
        return ""
    first = "To come back later,"
    if "drive" in here.lasting:
        first = "Mount your Drive first (from google.colab import drive; drive.mount('/content/drive')), and"
    return f"{folder} vanishes with this session of {here.name}. {first} save to {here.lasting}/…"


class PeerStore:
    """A peer's folder, reserved for this process until `close`. Raises StateError if the folder is in use."""

    # a lock that nobody refers to is released
    _open: ClassVar[set[object]] = set()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key_file = folder / "identity.key"
        self._record = folder / "in-use.json"
        self._name = secrets.token_hex(8)
        self._lock = FileLock(folder / "in-use.lock", mode=0o600, thread_local=False)
        # held while files are written, so that nothing is written after `close`
        self._writing = threading.Lock()
        self._closed = False
        self._written = b""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._reserve()
        except OSError as error:
            self._lock.release()
            raise _unusable(folder, error) from error
        except BaseException:
            self._lock.release()
            raise
        try:
            # the peer of an earlier session; None if the folder is new
            self.saved = read_saved(folder)
        except BaseException:
            self.close()
            raise
        self.peer = self.saved

    def _reserve(self) -> None:
        # `_require_free` judges the lock of another process by its record; some network drives have no locks
        with contextlib.suppress(Timeout, OSError, NotImplementedError):
            self._lock.acquire(timeout=0)
        while True:
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            self._require_free()
            self._record.unlink(missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self._occupant()))
        # Another process may have found the same abandoned file and deleted ours. The process that writes last wins.
        time.sleep(0.1)
        self._require_free()
        self._open.add(self)

    def _occupant(self) -> Occupant:
        lock = self._lock_id() if self._lock.is_locked else ""
        return Occupant(self._name, socket.gethostname(), os.getpid(), time.time(), lock)

    def _lock_id(self) -> str:
        """Return an id of the lock that is the same in all containers of a machine; empty if there is none."""
        with contextlib.suppress(OSError):
            # the boot id changes when the machine boots again
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            file = Path(self._lock.lock_file).stat()
            return f"{boot} {file.st_dev} {file.st_ino}"
        return ""

    def _require_free(self) -> None:
        try:
            other = msgspec.json.decode(self._record.read_bytes(), type=Occupant)
        except (FileNotFoundError, msgspec.MsgspecError):
            # a process that was killed while it wrote leaves a garbled file
            return
        if other.store == self._name:
            return
        age_s = max(0.0, time.time() - other.at)
        is_dead = age_s >= STALE_S
        if other.lock and other.lock == self._lock_id():
            # the other process is alive as long as this process cannot take the lock
            is_dead = self._lock.is_locked
        require(
            is_dead,
            f"{self.folder} is in use by process {other.pid} on {other.host}, whose last heartbeat is {age_s:.0f} s "
            "old: leave the swarm there, or shut that kernel down. If it has ended already, try again in "
            f"{STALE_S / 60:.0f} minutes, or delete {self._record.name} there",
            StateError,
        )

    def checkpoints(self, name: str) -> Path:
        return self.folder / "checkpoints" / quote(name, safe="").replace(".", "%2E")

    def begin(self, peer: SavedPeer) -> None:
        if self.saved is not None:
            peer = msgspec.structs.replace(peer, contacts=self.saved.contacts, port=self.saved.port)
        self.peer = peer

    def write(self, contacts: Sequence[Contact], membership: bytes, tally: Tally, port: int = 0) -> None:
        """Save the peer's state and write a heartbeat; earlier contacts come after the linked ones.

        Raises StateError if that fails, or if another process took the folder because heartbeats were missing.
        """
        with self._writing:
            if self._closed or self.peer is None:
                return
            by_id: dict[PeerId, Contact] = {}
            for contact in (*contacts, *self.peer.contacts):
                by_id.setdefault(contact.id, contact)
            kept_contacts = tuple(by_id.values())[:MAX_CONTACTS]
            self.peer = msgspec.structs.replace(
                self.peer, contacts=kept_contacts, membership=membership, tally=tally, port=port
            )
            try:
                self._write_files(msgspec.json.encode(self.peer))
            except OSError as error:
                raise _unusable(self.folder, error) from error

    def _write_files(self, data: bytes) -> None:
        # after the folder was unmounted, saving a checkpoint may have created it again, without the key
        if not self.key_file.exists():
            raise FileNotFoundError(None, "its identity.key is gone (was a drive unmounted?)")
        self._require_free()
        write_file(self._record, [msgspec.json.encode(self._occupant())], sync=True, private=True)
        if data != self._written:
            write_file(self.folder / "peer.json", [data], sync=True, private=True)
            self._written = data

    def close(self) -> None:
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self._open.discard(self)
            with contextlib.suppress(OSError, StateError):
                self._require_free()
                self._record.unlink(missing_ok=True)
            self._lock.release()

    def __repr__(self) -> str:
        return f"PeerStore({str(self.folder)!r})"
