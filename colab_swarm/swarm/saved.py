"""One process at a time in a peer's folder: two peers with one key would push each other out of the swarm.

The folder may lie on a network drive, where file locks mean nothing to other machines. So a file says which process of
which machine has it, and when it last gave a sign of life. A process that was killed leaves the file behind: on its
own machine that is seen at once, elsewhere once the signs have stopped for a while.

A peer's folder: what it needs to come back as the same peer, in a later session or on another machine.

    identity.key             its key: whoever has it is this peer
    identity.key.authority   at the peer that began the run: whom it admitted and put out
    peer.json                run, way in, membership, options, and what it saw others give; written each minute
    checkpoints/NAME/        what each optimizer has trained
    in-use.json              which process has the folder now

All of it but the checkpoints is secret, readable by its owner only, and never part of a text. Every file is written
aside and then put in its place, so a process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from colab_swarm.errors import StateError
from colab_swarm.invite import Access
from colab_swarm.net.peers import Contact
from colab_swarm.net.relay import RelayQuota
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.notebook.platforms import Platform
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import Allowlist
from colab_swarm.trust.contributions import TallyRow

STALE_S = 180.0

"""Three missed signs of life."""

SETTLE_S = 0.1

"""How long several processes that find the folder left behind at the same moment may take to settle who has it."""


class Occupant(msgspec.Struct, frozen=True):
    """A process that has the folder.

    Attributes:
        host, pid: which one.
        began: when, in the machine's own count; tells it from a later process with its number.
        at: its last sign of life, seconds since the epoch.
    """

    host: str
    pid: int
    began: str
    at: float

    @classmethod
    def here(cls) -> Occupant:
        """This process, now."""
        return cls(socket.gethostname(), os.getpid(), _began(os.getpid()), time.time())

    def holds_against(self, other: Occupant) -> bool:
        """Whether it lives and is not ``other``, as far as can be told from where ``other`` runs."""
        if (self.host, self.pid, self.began) == (other.host, other.pid, other.began):
            return False
        if self.host == other.host and self.began:
            return _began(self.pid) == self.began
        return other.at - self.at < STALE_S


class FolderLock:
    """Taken by `take`, until `release`; `refresh` gives a sign of life."""

    _here: ClassVar[set[Path]] = set()  # those of this process

    def __init__(self, folder: Path) -> None:
        self._path = folder / "in-use.json"

    def take(self) -> None:
        """Have the folder for this process.

        Raises:
            StateError: another process has it.
        """
        if self._path in self._here:
            raise StateError(f"{self._path.parent} is in use by a swarm of this process: leave it first")
        while not self._create():
            self._require_free()
            self._path.unlink(missing_ok=True)
        time.sleep(
            SETTLE_S
        )  # others may have found it left behind too, and taken this one's away: the last one stands
        self._require_free()
        self._here.add(self._path)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(Occupant.here()))
        return True

    def refresh(self) -> None:
        """Give a sign of life.

        Raises:
            StateError: another process took the folder, for this one gave none for too long.
        """
        self._require_free()
        write_aside(self._path, msgspec.json.encode(Occupant.here()))

    def release(self) -> None:
        """Leave the folder to others. Idempotent."""
        self._here.discard(self._path)
        with contextlib.suppress(OSError, StateError):
            self._require_free()
            self._path.unlink(missing_ok=True)

    def _require_free(self) -> None:
        try:
            other = msgspec.json.decode(self._path.read_bytes(), type=Occupant)
        except (FileNotFoundError, msgspec.MsgspecError):  # garbled: killed while it wrote
            return
        here = Occupant.here()
        if other.holds_against(here):
            raise StateError(
                f"{self._path.parent} is in use by process {other.pid} on {other.host}, whose last sign of life is "
                f"{max(0.0, here.at - other.at):.0f} s old: leave the swarm there, or shut that kernel down. If it is "
                f"gone already, try again in {STALE_S / 60:.0f} minutes, or delete {self._path.name} there"
            )


def write_aside(path: Path, data: bytes) -> None:
    """Write a file for its owner's eyes, whole or not at all."""
    aside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _began(pid: int) -> str:
    """When a living process of this machine began, or that it lives at all; empty if not, or no telling (Windows)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        if os.name != "posix" or Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)  # macOS: asks whether it is there
    except ProcessLookupError:
        return ""
    except PermissionError:  # it is, and somebody else's
        pass
    return "lives"


VERSION = 1

MAX_CONTACTS = 16


class SavedPeer(msgspec.Struct, frozen=True):
    """What ``peer.json`` says.

    Attributes:
        run_id, access, name: of the run, who may join it, and what others call this peer.
        invitation: by which it came; empty if it began the run.
        allow: whom the run admits by name, at the peer that began it.
        options: how it takes part in the network, without its secrets; see `kept_options`.
        contacts: peers that could be dialled when this was written, or a while before.
        membership: that it held.
        given: what it saw others give.
        port: on which it listened; its invitations name it. 0 if it did not.
    """

    version: int
    run_id: str
    access: Access
    name: str
    invitation: str
    allow: Allowlist | None
    options: dict[str, Any]
    contacts: tuple[Contact, ...] = ()
    membership: bytes = b""
    given: tuple[TallyRow, ...] = ()
    port: int = 0

    @classmethod
    def new(cls, entrance: RunAccess, name: str, options: NetworkOptions) -> SavedPeer:
        """A peer that comes in by this entrance."""
        invitation = "" if entrance.invitation is None else str(entrance.invitation)
        settings = None if entrance.closed is None else entrance.closed.settings
        allow = None if settings is None else settings.allowlist
        kept = kept_options(options)
        return cls(VERSION, entrance.run_id, entrance.access, name, invitation, allow, kept)

    @property
    def peer_options(self) -> NetworkOptions:
        """How it is to take part in the network again."""
        relay = self.options.get("relay")
        quota = {"relay": RelayQuota(**relay)} if isinstance(relay, dict) else {}
        return NetworkOptions(**{**self.options, **quota})

    @property
    def run(self) -> str:
        """The run's name for people."""
        return self.run_id.rpartition("-")[0]

    def __repr__(self) -> str:
        return f"KeptPeer({self.name} of {self.run})"  # and no secret


class _Version(msgspec.Struct):
    version: int


def read_kept(folder: Path) -> SavedPeer | None:
    """The peer that a folder keeps; None if it keeps none.

    Raises:
        StateError: it cannot be read, is damaged, or was written by a newer version.
    """
    path = folder / "peer.json"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        if msgspec.json.decode(data, type=_Version).version > VERSION:
            raise StateError(f"{path} was written by a newer colab_swarm: `pip install -U colab-swarm`")
        kept = msgspec.json.decode(data, type=SavedPeer)
        kept.peer_options  # noqa: B018 - raises for options that are none
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise StateError(
            f"{path} is damaged: move the folder away and join with an invitation; {folder / 'identity.key'} is "
            "still good as PeerOptions(identity=…)"
        ) from error
    if not (folder / "identity.key").exists():
        raise StateError(f"{folder} has lost its identity.key: nobody can come back as this peer; join anew")
    return kept


def folder_of(path: str | Path) -> Path:
    """One path for one folder."""
    return Path(path).expanduser().resolve()


def lasts(folder: Path, here: Platform) -> str:
    """A warning if the folder vanishes with the session; else empty."""
    if not here.lasting or folder.is_relative_to(here.lasting):
        return ""
    how = "from google.colab import drive; drive.mount('/content/drive')" if "drive" in here.lasting else ""
    first = f"Mount your Drive first ({how}), and" if how else "To come back later,"
    return f"{folder} vanishes with this session of {here.name}. {first} keep in {here.lasting}/…"


class PeerStore:
    """A folder that this process has.

    Attributes:
        folder: the folder.
        found: the peer that it kept before; None if it is new.
        key_file: the peer's key.
    """

    def __init__(self, folder: Path, lock: FolderLock, found: SavedPeer | None) -> None:
        self.folder, self.found, self.key_file = folder, found, folder / "identity.key"
        self._lock, self._peer, self._written = lock, found, b""
        self._writing = threading.Lock()  # one write at a time, and none after the end
        self._closed = False

    @classmethod
    def open(cls, folder: Path) -> PeerStore:
        """Take a folder; it is made if need be.

        Raises:
            StateError: another process has it, or it cannot be used.
        """
        lock = FolderLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.take()
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            return cls(folder, lock, read_kept(folder))
        except BaseException:
            lock.release()
            raise

    def checkpoints(self, name: str) -> Path:
        """Where the optimizer called ``name`` is kept."""
        return self.folder / "checkpoints" / quote(name, safe="").replace(".", "%2E")

    def begin(self, peer: SavedPeer) -> None:
        """This is the peer to keep; contacts and the like come with `write`."""
        if self.found is not None:
            peer = msgspec.structs.replace(peer, contacts=self.found.contacts, port=self.found.port)
        self._peer = peer

    def on_port(self, port: int) -> None:
        """It listens there; the next `write` says so."""
        with self._writing:
            if self._peer is not None:
                self._peer = msgspec.structs.replace(self._peer, port=port)

    def write(self, contacts: Sequence[Contact], membership: bytes, given: tuple[TallyRow, ...]) -> None:
        """Keep these from now on, and give a sign of life.

        Args:
            contacts: whom this peer is linked to, the best first; earlier ones come after them.
            membership: of this peer.
            given: its tally.

        Raises:
            StateError: another process took the folder, or it cannot be written.
        """
        with self._writing:
            if self._closed or self._peer is None:
                return
            linked = {contact.id for contact in contacts}
            before = (contact for contact in self._peer.contacts if contact.id not in linked)
            self._peer = msgspec.structs.replace(
                self._peer,
                contacts=(*contacts, *before)[:MAX_CONTACTS],
                membership=membership,
                given=given,
            )
            self._save(msgspec.json.encode(self._peer))

    def _save(self, data: bytes) -> None:
        try:
            if (
                not self.key_file.exists()
            ):  # saving a checkpoint makes the folder anew, where nobody looks for it
                raise FileNotFoundError(None, "its identity.key is gone (was a drive unmounted?)")
            self._lock.refresh()
            if data != self._written:
                write_aside(self.folder / "peer.json", data)
                self._written = data
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def close(self) -> None:
        """Leave the folder to others. Idempotent."""
        with self._writing:
            if not self._closed:
                self._closed = True
                self._lock.release()

    def __repr__(self) -> str:
        return f"Keeping({str(self.folder)!r})"


def kept_options(options: NetworkOptions) -> dict[str, Any]:
    """Options as they are kept: the key is the folder's, and a tunnel's token is asked for again."""
    tunnel = options.tunnel.kind if isinstance(options.tunnel, TunnelSettings) else options.tunnel
    return asdict(replace(options, tunnel=tunnel, identity=None))


def _unusable(folder: Path, error: OSError) -> StateError:
    return StateError(
        f"{folder} cannot be used to keep a peer: {error.strerror or error}; take another folder"
    )
