"""Who a Hugging Face token belongs to, asked of the Hub's ``whoami-v2``. The token is never logged."""

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
    """The account that a token belongs to; None if the Hub does not know the token.

    Args:
        token: a user access token; one that may read suffices.
        endpoint: the Hub; by default what the environment's ``HF_ENDPOINT`` names, else huggingface.co.

    Raises:
        PeerUnreachable: the Hub did not answer in 10 s, or not in a way that can be understood.
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
            return _account(await _read(response))
    except (aiohttp.ClientError, ValueError, TimeoutError) as error:
        raise PeerUnreachable(f"{url} does not answer ({type(error).__name__}): try again later") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise ValueError("an endless answer")
    return data


def _account(data: bytes) -> Account | None:
    """What an answer says; None for a token that is an organisation's, not a person's."""
    try:
        answer = msgspec.json.decode(data, type=_Answer)
    except UNDECODABLE as error:
        raise ValueError("not an answer of whoami-v2") from error
    if answer.type != "user":
        return None
    return Account(answer.name, tuple(one.name for one in answer.orgs))
