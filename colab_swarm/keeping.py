"""A peer's folder: what it needs to come back as the same peer, in a later session or on another machine.

    identity.key             its key: whoever has it is this peer
    identity.key.authority   at the peer that began the run: whom it admitted and put out
    peer.json                run, way in, membership, options, and what it saw others give; written each minute
    checkpoints/NAME/        what each optimizer has trained
    in-use.json              which process has the folder now

All of it but the checkpoints is secret, readable by its owner only, and never part of a text. Every file is written
aside and then put in its place, so a process may be killed at any moment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from colab_swarm.access import Entrance
from colab_swarm.errors import StateError
from colab_swarm.folder_lock import FolderLock, write_aside
from colab_swarm.invite import Access
from colab_swarm.net.peers import Contact
from colab_swarm.net.relay import RelayQuota
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.presence import PeerOptions
from colab_swarm.trust.authority import Allowlist
from colab_swarm.trust.contributions import Row
from colab_swarm.widgets.environment import Platform

VERSION = 1
MAX_CONTACTS = 16


class KeptPeer(msgspec.Struct, frozen=True):
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
    given: tuple[Row, ...] = ()
    port: int = 0

    @classmethod
    def new(cls, entrance: Entrance, name: str, options: PeerOptions) -> KeptPeer:
        """A peer that comes in by this entrance."""
        invitation = "" if entrance.invitation is None else str(entrance.invitation)
        settings = None if entrance.closed is None else entrance.closed.settings
        allow = None if settings is None else settings.allowlist
        kept = kept_options(options)
        return cls(VERSION, entrance.run_id, entrance.access, name, invitation, allow, kept)

    @property
    def peer_options(self) -> PeerOptions:
        """How it is to take part in the network again."""
        relay = self.options.get("relay")
        quota = {"relay": RelayQuota(**relay)} if isinstance(relay, dict) else {}
        return PeerOptions(**{**self.options, **quota})

    @property
    def run(self) -> str:
        """The run's name for people."""
        return self.run_id.rpartition("-")[0]

    def __repr__(self) -> str:
        return f"KeptPeer({self.name} of {self.run})"  # and no secret


class _Version(msgspec.Struct):
    version: int


def read_kept(folder: Path) -> KeptPeer | None:
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
        kept = msgspec.json.decode(data, type=KeptPeer)
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


class Keeping:
    """A folder that this process has.

    Attributes:
        folder: the folder.
        found: the peer that it kept before; None if it is new.
        key_file: the peer's key.
    """

    def __init__(self, folder: Path, lock: FolderLock, found: KeptPeer | None) -> None:
        self.folder, self.found, self.key_file = folder, found, folder / "identity.key"
        self._lock, self._peer, self._written = lock, found, b""
        self._writing = threading.Lock()  # one write at a time, and none after the end
        self._closed = False

    @classmethod
    def open(cls, folder: Path) -> Keeping:
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

    def begin(self, peer: KeptPeer) -> None:
        """This is the peer to keep; contacts and the like come with `write`."""
        if self.found is not None:
            peer = msgspec.structs.replace(peer, contacts=self.found.contacts, port=self.found.port)
        self._peer = peer

    def on_port(self, port: int) -> None:
        """It listens there; the next `write` says so."""
        with self._writing:
            if self._peer is not None:
                self._peer = msgspec.structs.replace(self._peer, port=port)

    def write(self, contacts: Sequence[Contact], membership: bytes, given: tuple[Row, ...]) -> None:
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


def kept_options(options: PeerOptions) -> dict[str, Any]:
    """Options as they are kept: the key is the folder's, and a tunnel's token is asked for again."""
    tunnel = options.tunnel.kind if isinstance(options.tunnel, TunnelSettings) else options.tunnel
    return asdict(replace(options, tunnel=tunnel, identity=None))


def _unusable(folder: Path, error: OSError) -> StateError:
    return StateError(
        f"{folder} cannot be used to keep a peer: {error.strerror or error}; take another folder"
    )
