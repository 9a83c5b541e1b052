"""What an authority must not forget: its run, who used which invitation, whom it revoked. Kept beside its key file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from colab_swarm.net.membership import SLACK_S, Grant
from colab_swarm.net.peers import PeerId


class Used(msgspec.Struct):
    """Hex ids of the peers that joined by an invitation, which ends at ``until``."""

    until: float
    peers: list[str]


class _Saved(msgspec.Struct):
    run_id: str
    used: dict[str, Used] = msgspec.field(default_factory=dict)
    revocations: bytes = b""


class AuthorityBook:
    """The authority's memory; in a file if there is a ``path``, else only as long as the process."""

    def __init__(self, run_id: str, path: Path | None = None) -> None:
        self._path = path
        self._saved = _Saved(run_id)

    @classmethod
    def open(cls, key_file: str | Path, run_id: str) -> AuthorityBook:
        """The book beside the key file; a new one, of ``run_id``, if there is none.

        Raises:
            ValueError: the file beside it is no such book.
        """
        path = Path(f"{key_file}.authority")
        book = cls(run_id, path)
        try:
            book._saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
        except FileNotFoundError:
            book._save()
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} cannot be read ({error}); move it away to begin a new run") from error
        return book

    @property
    def run_id(self) -> str:
        """The run of this authority, the same after a restart."""
        return self._saved.run_id

    @property
    def revocations(self) -> bytes:
        """The encoded list last kept, or nothing."""
        return self._saved.revocations

    def keep_revocations(self, encoded: bytes) -> None:
        """Remember the newest list."""
        self._saved.revocations = encoded
        self._save()

    def use(self, grant: Grant, peer: PeerId, *, now: float) -> bool:
        """Count that a peer joins by a grant; returns False if it is used up. Coming again is free."""
        if not grant.uses:
            return True
        used = self._saved.used.setdefault(grant.key.hex(), Used(grant.join_until, []))
        if peer.hex() not in used.peers:
            if len(used.peers) >= grant.uses:
                return False
            used.peers.append(peer.hex())
            ended = [key for key, one in self._saved.used.items() if one.until + SLACK_S < now]
            for key in ended:
                del self._saved.used[key]
            self._save()
        return True

    def _save(self) -> None:
        if self._path is None:
            return
        # written aside: a crash leaves the old book or the new one
        aside = self._path.with_name(f"{self._path.name}.new")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self._saved))
        aside.replace(self._path)
