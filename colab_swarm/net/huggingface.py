"""The account behind a Hugging Face token, from the Hub's ``whoami-v2``. The token is never logged."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import aiohttp
import msgspec

from colab_swarm.errors import PeerUnreachable
from colab_swarm.net.peers import UNDECODABLE

ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
TOKEN = re.compile(r"[!-~]{1,512}")


@dataclass(frozen=True)
class Account:
    """A user of the Hub, and the organisations that the user is a member of."""

    name: str
    organisations: tuple[str, ...] = ()


class _Organisation(msgspec.Struct):
    name: str


class _Answer(msgspec.Struct):
    name: str
    type: str = "user"
    orgs: tuple[_Organisation, ...] = ()


async def whoami(token: str, *, endpoint: str | None = None) -> Account | None:
    """Return the account of a token; None if the Hub does not know the token.

    Args:
        token: a user access token; the right to read is enough.
        endpoint: URL of the Hub; by default the environment's ``HF_ENDPOINT``, else huggingface.co.

    Raises:
        PeerUnreachable: the Hub did not answer in 10 s, or its answer cannot be decoded.
    """
    if not TOKEN.fullmatch(token):
        return None
    url = (endpoint or os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/") + "/api/whoami-v2"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
            session.get(url, headers={"Authorization": f"Bearer {token}"}, allow_redirects=False) as response,
        ):
            if response.status in (401, 403):
                return None
            if response.status != 200:
                raise PeerUnreachable(f"{url} answers {response.status} {response.reason}: try again later")
            data = b""
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise ValueError("the answer is too long")
            return _account(data)
    except (aiohttp.ClientError, ValueError, TimeoutError) as error:
        raise PeerUnreachable(f"{url} does not answer ({type(error).__name__}): try again later") from error


def _account(data: bytes) -> Account | None:
    """Decode an answer; return None for a token of an organisation, not of a person."""
    try:
        answer = msgspec.json.decode(data, type=_Answer)
    except UNDECODABLE as error:
        raise ValueError("not an answer of whoami-v2") from error
    return Account(answer.name, tuple(one.name for one in answer.orgs)) if answer.type == "user" else None
