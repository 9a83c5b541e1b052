"""A tunnel gives a peer that nobody can dial a public address: an agent here keeps a link to a provider's edge.

The agent is watched (its process, its local API, now and then the way round through the public address) and
started anew when it is lost; the address may be another one then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import aiohttp

from colab_swarm.credentials import require_secret
from colab_swarm.errors import TunnelError
from colab_swarm.events import EventLog, Fault, QuotaWarning, TunnelChanged
from colab_swarm.net.addresses import is_address
from colab_swarm.net.agents import CloudflaredAgent, NgrokAgent, explain, require_pyngrok

logger = logging.getLogger(__name__)
WARN_AT = (0.5, 0.8, 0.95)
MAX_MISSES = 2
PROBES, PROBE_AGAIN_S, PROBE_TIMEOUT_S = 3, 10.0, 15.0
BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True)
class TunnelSettings:
    """Which tunnel, and how it is watched.

    Attributes:
        kind: ``ngrok`` (needs an account's token) or ``cloudflared`` (needs the program, no account).
        auth_token: ngrok's.
        agent: path of the program; None takes pyngrok's own, or the cloudflared on the PATH.
        quota_bytes: what the ngrok plan carries a month (the free one 1 GB); None for no limit.
        check_s: seconds between looks at the agent.
        probe_s: seconds between tries of the public address; each is one of the 20,000 requests that ngrok's
            free plan carries a month.
    """

    kind: Literal["ngrok", "cloudflared"]
    auth_token: str | None = field(default=None, repr=False)
    agent: str | None = None
    quota_bytes: float | None = 1e9
    check_s: float = 1.0
    probe_s: float = 180.0

    def __post_init__(self) -> None:
        if self.kind not in ("ngrok", "cloudflared"):
            raise ValueError(f"tunnel={self.kind!r} is unknown: take 'ngrok' or 'cloudflared'")


def settings_of(kind: Literal["ngrok", "cloudflared"]) -> TunnelSettings:
    """Return the settings of the tunnel that the user named.

    Call it on the user's thread, which may be asked for a token. The library is looked for first.

    Raises:
        TunnelError: the library that the tunnel needs is not installed.
        SecretError: the token is nowhere.
    """
    if kind != "ngrok":
        return TunnelSettings(kind)
    require_pyngrok()
    where = "get one at https://dashboard.ngrok.com/get-started/your-authtoken"
    return TunnelSettings(kind, auth_token=require_secret("NGROK_AUTHTOKEN", help=where))


class Agent(Protocol):
    """A running tunnel program."""

    address: str

    def alive(self) -> bool: ...

    async def answers(self) -> bool: ...

    async def close(self) -> None: ...


class QuotaMeter:
    """Says when 50, 80 and 95 % of a quota are used, each once."""

    def __init__(self, quota_bytes: float) -> None:
        self.quota_bytes = quota_bytes
        self._left = [share * quota_bytes for share in WARN_AT]

    def on_used(self, used_bytes: float) -> bool:
        """Whether to warn now."""
        left = [mark for mark in self._left if mark > used_bytes]
        warn, self._left = len(left) < len(self._left), left
        return warn


class Tunnel:
    """One tunnel to a local port, open until `close`. Make it with `open`.

    Attributes:
        address: ``wss://HOST``, or None while the tunnel is lost.
    """

    def __init__(
        self,
        settings: TunnelSettings,
        port: int,
        *,
        on_change: Callable[[str | None], None],
        events: EventLog,
        sent_bytes: Callable[[], float],
    ) -> None:
        self.address: str | None = None
        self._settings, self._port = settings, port
        self._on_change, self._events = on_change, events
        self._sent_bytes, self._sent_before = sent_bytes, sent_bytes()
        metered = settings.kind == "ngrok" and settings.quota_bytes is not None
        self._meter = QuotaMeter(settings.quota_bytes or 0.0) if metered else None
        self._loop = asyncio.get_running_loop()
        self._agent: Agent | None = None
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        settings: TunnelSettings,
        port: int,
        *,
        on_change: Callable[[str | None], None],
        events: EventLog,
        sent_bytes: Callable[[], float],
    ) -> Tunnel:
        """Open the tunnel and keep it open.

        Args:
            settings: which tunnel.
            port: on 127.0.0.1, where a peer listens.
            on_change: called on the loop with the new address when it changes later, and with None when the
                tunnel is lost.
            events: gets `TunnelChanged` and `QuotaWarning`.
            sent_bytes: bytes sent through the tunnel so far; what has been sent before the opening is left
                out.

        Raises:
            TunnelError: the text says why and what to do.
        """
        tunnel = cls(settings, port, on_change=on_change, events=events, sent_bytes=sent_bytes)
        agent = tunnel._agent = await tunnel._open_agent()
        tunnel._change(agent.address, "opened", tell=False)
        tunnel._watching = asyncio.create_task(tunnel._watch(agent))
        return tunnel

    def __repr__(self) -> str:
        return f"Tunnel({self._settings.kind}, {self.address or 'lost'})"

    async def close(self) -> None:
        """Close the tunnel; returns when its processes are gone. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._agent is not None:
            await self._agent.close()
        self.address = None

    async def _open_agent(self) -> Agent:
        settings = self._settings
        agent: Agent
        if settings.kind == "ngrok":
            agent = await NgrokAgent.open(self._port, auth_token=settings.auth_token, binary=settings.agent)
        else:
            agent = await CloudflaredAgent.open(self._port, binary=settings.agent)
        if not is_address(agent.address):
            await agent.close()
            raise TunnelError(f"{settings.kind} opened {agent.address!r}, which no peer can dial: try again")
        return agent

    async def _watch(self, agent: Agent) -> None:
        try:
            while True:
                reason = await self._wait_lost(agent)
                await agent.close()
                self._change(None, reason)
                agent = self._agent = await self._reopen()
                self._change(agent.address, "opened again")
        except Exception as error:
            logger.exception("a tunnel is no longer watched")
            self._events.emit(Fault(self._loop.time(), "tunnel", f"{type(error).__name__}: {error}"))

    async def _wait_lost(self, agent: Agent) -> str:
        """Look after the agent until it is lost; returns the reason."""
        misses = failures = 0
        probe_at = self._loop.time() + self._settings.probe_s
        while True:
            await asyncio.sleep(self._settings.check_s)
            self._count()
            if not agent.alive():
                return "its agent died"
            misses = 0 if await agent.answers() else misses + 1
            if misses == MAX_MISSES:
                return "its agent hangs"
            if self._loop.time() < probe_at:
                continue
            trouble = await probe(agent.address)
            failures = failures + 1 if trouble else 0
            if failures == PROBES:
                return f"its public address does not lead here: {trouble}"
            again_s = PROBE_AGAIN_S if trouble else self._settings.probe_s
            probe_at = self._loop.time() + min(again_s, self._settings.probe_s)

    async def _reopen(self) -> Agent:
        """A new agent, tried at growing intervals for as long as it takes."""
        back_off_s = BACK_OFF_S
        while True:
            try:
                return await self._open_agent()
            except TunnelError as error:
                logger.info("no tunnel yet: %s", error)
                self._events.emit(TunnelChanged(self._loop.time(), None, str(error)))
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)

    def _change(self, address: str | None, reason: str, *, tell: bool = True) -> None:
        self.address = address
        self._events.emit(TunnelChanged(self._loop.time(), address, reason))
        if tell:
            self._on_change(address)

    def _count(self) -> None:
        used_bytes = self._sent_bytes() - self._sent_before
        if self._meter is not None and self._meter.on_used(used_bytes):
            self._events.emit(QuotaWarning(self._loop.time(), used_bytes, self._meter.quota_bytes))


async def probe(address: str) -> str | None:
    """Ask the public address for a page: None if the tunnel leads to a server, else what is wrong."""
    url = "http" + address.removeprefix("ws")
    headers = {"ngrok-skip-browser-warning": "1"}
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            code = response.headers.get("Ngrok-Error-Code")
            if code is not None:
                return explain(code)
            # 404 is the edge's word for an unknown tunnel, 502 and 530 for a lost one; a peer answers 426
            wrong = response.status == 404 or response.status >= 500
            return f"HTTP status {response.status}" if wrong else None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
