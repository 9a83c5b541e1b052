"""Invitations: one line of text that holds what a newcomer needs to find the swarm.

    swarm://NAME#PAYLOAD

PAYLOAD is base64url of a version byte, msgpack and a checksum; whatever stands before the ``#`` is for people.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import time

import msgspec

from colab_swarm.errors import InviteError
from colab_swarm.net.peers import UNDECODABLE, Contact, Message

VERSION = 1
CHECK_BYTES = 6
MAX_CHARACTERS = 8192
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Invite(Message, frozen=True):
    """What an invitation says.

    Attributes:
        run_id: the run's unique name; its part before the last ``-`` is the name people gave it.
        entries: peers that can be dialled; any one suffices.
        expires_at: seconds since the epoch.
    """

    run_id: str
    entries: tuple[Contact, ...]
    expires_at: float

    def __str__(self) -> str:
        body = bytes([VERSION]) + msgspec.msgpack.encode(self)
        payload = base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")
        return f"swarm://{self.run_id.rpartition('-')[0]}#{payload}"

    @classmethod
    def parse(cls, text: str, *, now: float | None = None) -> Invite:
        """Read an invitation; spaces and line breaks that a chat program put in do not matter.

        Raises:
            InviteError: it is mistyped, expired or of another version; the text says which and what to do.
        """
        payload = "".join(text.split()).rpartition("#")[2].strip("\"'<>`")
        if len(payload) > MAX_CHARACTERS:
            raise InviteError(
                f"this is no invitation: {len(payload):,} characters; paste the swarm://… line alone"
            )
        body = _body(payload)
        if body[0] != VERSION:
            raise InviteError(
                f"this invitation is of version {body[0]}, this colab_swarm reads version {VERSION}: "
                + ("`pip install -U colab-swarm`" if body[0] > VERSION else "ask for a new invitation")
            )
        try:
            invite = msgspec.msgpack.decode(body[1:], type=cls)
        except UNDECODABLE as error:
            raise InviteError("this invitation cannot be read: ask for a new one") from error
        late_s = (time.time() if now is None else now) - invite.expires_at
        if late_s > 0:
            raise InviteError(
                f"this invitation expired {_ago(late_s)} ago: ask for a new one (`swarm.invite()`)"
            )
        return invite


def _body(payload: str) -> bytes:
    try:
        data = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
    if not body or check != _check(body):
        raise InviteError("this invitation is mistyped or cut off: copy the whole swarm://… line again")
    return body


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"colab-swarm invite" + body).digest()[:CHECK_BYTES]


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
