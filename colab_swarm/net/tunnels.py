"""A tunnel gives a peer behind a NAT a public address: an agent process here holds a link to a provider's edge.

`Tunnel` watches the agent: its process, its local API and, now and then, the public address. It starts a new agent
when one is lost; the address may change then. Each agent has a guardian process that kills it when this process dies,
because a killed kernel runs no exit hooks.

pyngrok identifies an agent by the path of its binary. Each ngrok agent gets its own path, a link in a temporary
directory, so it does not disturb the user's own pyngrok tunnels. Its configuration lies there too: it holds the token,
which any user of the machine could read on a command line. The directory is deleted once the agent runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

from colab_swarm.credentials import require_secret
from colab_swarm.errors import TunnelError
from colab_swarm.events import EventLog, Fault, QuotaWarning, TunnelChanged
from colab_swarm.net.addresses import is_address

if TYPE_CHECKING:
    from pyngrok.process import NgrokProcess

logger = logging.getLogger(__name__)
AGENT_LOG = logging.getLogger("pyngrok.process.ngrok")
OPEN_TIMEOUT_S = 60.0
"""Includes a download of 10 MB the first time ngrok is used."""
API_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 5.0, 5.0, 0.05
WARN_AT = (0.5, 0.8, 0.95)
MAX_MISSES = 2
PROBES, PROBE_AGAIN_S, PROBE_TIMEOUT_S = 3, 10.0, 15.0
BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 60.0
LOG_LINES = 3
NO_INTERNET = (
    "ngrok cannot be reached from here: check the internet connection (on Kaggle: Settings, Internet on)"
)
INSTALL = (
    "tunnel='cloudflared' needs the program cloudflared: download it from "
    "https://github.com/cloudflare/cloudflared/releases/latest, make it executable and put it on the PATH; "
    "on Colab and Kaggle: !wget -qO /usr/local/bin/cloudflared https://github.com/cloudflare/cloudflared/"
    "releases/latest/download/cloudflared-linux-amd64 && chmod +x /usr/local/bin/cloudflared"
)
_TOKEN = (
    "get your token at https://dashboard.ngrok.com/get-started/your-authtoken and save it as the secret "
    "NGROK_AUTHTOKEN (Colab: the key icon on the left; Kaggle: Add-ons, Secrets; elsewhere: an environment variable)"
)
_SPENT = "the monthly data volume of your ngrok plan is used up: use a relay or tunnel='cloudflared' instead"
_TOO_MANY = (
    "your ngrok account runs as many agents or tunnels as its plan allows: stop another one "
    "(https://dashboard.ngrok.com/agents), perhaps in a notebook you forgot"
)
_OUTDATED = (
    "the ngrok agent is too old: delete the file so that a new one is downloaded, or run `ngrok update`"
)
ADVICE = {
    "105": f"this is not an ngrok token: {_TOKEN}",
    "106": f"ngrok does not know this token: {_TOKEN}",
    "107": f"ngrok does not accept this token (mistyped, or reset): {_TOKEN}",
    "108": _TOO_MANY,
    "120": _OUTDATED,
    "121": _OUTDATED,
    "324": _TOO_MANY,
    "334": "your ngrok address is in use by another agent: stop the notebook that ran before, and try again",
    "720": _SPENT,
    "725": _SPENT,
    "726": _SPENT,
    "727": "the monthly requests of your ngrok plan are used up: use a relay or tunnel='cloudflared' instead",
    "734": "too many requests in a minute for your ngrok plan: it works again in a minute",
    "4018": f"ngrok needs an account (free) and its token: {_TOKEN}",
    "4027": _SPENT,
    "8013": "ngrok wants a card on file for TCP tunnels, even free ones: use the http tunnel, which needs none",
}
"""What to do, by the number of ngrok's error code (https://ngrok.com/docs/errors)."""
_OFFLINE = re.compile(
    r"dial tcp|no such host|failed to dial|i/o timeout|urlopen|downloading|resolve|unreachable", re.I
)
_CLOUDFLARED_URL = re.compile(
    r"https://[a-z0-9]+(?:-[a-z0-9]+)+\.trycloudflare\.com"
)  # its API has no hyphen
_GUARDIAN = """
import os, sys
if not sys.stdin.buffer.read(1):  # the pipe closed without a release: the owner is dead
    os.kill(int(sys.argv[1]), 9)
"""


@dataclass(frozen=True)
class TunnelSettings:
    """Which tunnel to open, and how to watch it.

    Attributes:
        kind: ``ngrok`` (needs an account's token) or ``cloudflared`` (needs the program, no account).
        auth_token: the ngrok token.
        agent: path of the program; None uses pyngrok's own, or the cloudflared on the PATH.
        quota_bytes: monthly data volume of the ngrok plan (1 GB on the free one); None for no limit.
        check_s: seconds between checks of the agent.
        probe_s: seconds between requests to the public address; ngrok's free plan has 20,000 requests a month.
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
    """Return the settings of a tunnel given by name; call it on the user's thread, which may ask for a token.

    Raises:
        TunnelError: the library that the tunnel needs is not installed.
        SecretError: the token was not found.
    """
    if kind != "ngrok":
        return TunnelSettings(kind)
    _require_pyngrok()
    where = "get one at https://dashboard.ngrok.com/get-started/your-authtoken"
    return TunnelSettings(kind, auth_token=require_secret("NGROK_AUTHTOKEN", help=where))


def _require_pyngrok() -> None:
    if find_spec("pyngrok") is None:
        raise TunnelError("tunnel='ngrok' needs pyngrok: pip install \"colab-swarm[notebook]\"")


def explain(text: str) -> str:
    """Return an error of ngrok or pyngrok as one sentence with its fix."""
    code = re.search(r"ERR_NGROK_(\d+)", text)
    if code is not None and code[1] in ADVICE:
        return f"{ADVICE[code[1]]} ({code[0]})"
    if code is not None:
        return f"ngrok: {text[:300]}; see https://ngrok.com/docs/errors/{code[0].lower()}"
    return f"{NO_INTERNET} ({text[:300]})" if _OFFLINE.search(text) else f"ngrok: {text[:300]}"


def passed_marks(used_bytes: float, quota_bytes: float) -> int:
    """Return how many of the marks 50, 80 and 95 % of the quota are reached."""
    return sum(used_bytes >= share * quota_bytes for share in WARN_AT)


async def probe(address: str) -> str | None:
    """Request a page from the public address; return None if the tunnel leads to a server, else the fault."""
    url, headers = "http" + address.removeprefix("ws"), {"ngrok-skip-browser-warning": "1"}
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            code = response.headers.get("Ngrok-Error-Code")
            if code is not None:
                return explain(code)
            # the edge answers 404 for an unknown tunnel, 502 and 530 for a lost one; a peer answers 426
            wrong = response.status == 404 or response.status >= 500
            return f"HTTP status {response.status}" if wrong else None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")


class Guardian:
    """Kills process ``pid`` when this process dies.

    The guardian is a process that waits for the end of a pipe from here. It has its own session, so it survives
    signals to the notebook's process group.
    """

    def __init__(self, pid: int) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Stop guarding. Call it as soon as the process has ended, before the system reuses its pid."""
        if self._watcher.returncode is None:
            with suppress(OSError):  # the watcher was killed
                self._watcher.communicate(b".")


class CloudflaredAgent:
    """A cloudflared process. Make it with `open`; peers dial ``address``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.address = ""
        self._process, self._guardian = process, Guardian(process.pid)
        self._connected = asyncio.Event()
        self._last_lines: list[str] = []
        self._reading = asyncio.create_task(self._read_log())

    @classmethod
    async def open(cls, settings: TunnelSettings, port: int) -> CloudflaredAgent:
        """Start cloudflared with a tunnel to ``port`` on 127.0.0.1.

        Raises:
            TunnelError: the text names the fix.
        """
        binary = settings.agent
        path = shutil.which(binary or "cloudflared")
        if path is None:
            missing = f"there is no cloudflared at {binary}: leave it out to use the one on the PATH"
            raise TunnelError(missing if binary else INSTALL)
        # no configuration file: a quick tunnel conflicts with the user's own
        arguments = ["tunnel", "--config", os.devnull, "--no-autoupdate", "--url", f"http://127.0.0.1:{port}"]
        nothing, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                path, *arguments, stdin=nothing, stdout=nothing, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise TunnelError(f"{path} does not start: {error}") from error
        agent, fault = cls(process), "it ended"
        try:
            try:
                await asyncio.wait_for(agent._connected.wait(), OPEN_TIMEOUT_S)
            except TimeoutError:
                fault = f"no tunnel after {OPEN_TIMEOUT_S:.0f} s"
            if not agent.address:
                raise TunnelError(
                    f"cloudflared: {fault}; its log says {' / '.join(agent._last_lines)!r}; check the internet "
                    "connection (on Kaggle: Settings, Internet on), and try again later: quick tunnels come "
                    "without a guarantee"
                )
        except BaseException:
            await agent.close()
            raise
        return agent

    def alive(self) -> bool:
        return self._process.returncode is None

    async def answers(self) -> bool:
        """Return True: cloudflared has no local API to try."""
        return True

    async def close(self) -> None:
        """Stop cloudflared; return when its process has ended. Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.to_thread(self._guardian.release)
        await self._reading

    async def _read_log(self) -> None:
        """Read the log to its end, since a full pipe would block cloudflared; set the address once it is connected."""
        assert self._process.stderr is not None
        url = ""
        while line := (await self._process.stderr.readline()).decode(errors="replace"):
            self._last_lines = [*self._last_lines, line.strip()[:200]][-LOG_LINES:]
            found = _CLOUDFLARED_URL.search(line)
            url = url or (found[0] if found else "")
            if "Registered tunnel connection" in line and url:
                self.address = "ws" + url.removeprefix("http")
                self._connected.set()
        self._connected.set()


class NgrokAgent:
    """An ngrok agent, driven by pyngrok. Make it with `open`; peers dial ``address``."""

    def __init__(self, settings: TunnelSettings, port: int) -> None:
        self.address = ""
        self._port, self._token, self._binary = port, settings.auth_token or "", settings.agent
        self._path = ""
        self._process: NgrokProcess | None = None
        self._guardian: Guardian | None = None
        self._given_up = False

    @classmethod
    async def open(cls, settings: TunnelSettings, port: int) -> NgrokAgent:
        """Download the agent if there is none, start it and open a tunnel to ``port`` on 127.0.0.1.

        Raises:
            TunnelError: the text names the fix.
        """
        _require_pyngrok()
        if not settings.auth_token:
            raise TunnelError(explain("ERR_NGROK_4018"))
        if settings.agent is not None and not os.path.exists(settings.agent):
            raise TunnelError(f"there is no ngrok agent at {settings.agent}: leave it out to download one")
        agent = cls(settings, port)
        starting = asyncio.create_task(asyncio.to_thread(agent._start))
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                while not starting.done():
                    await asyncio.wait([starting], timeout=POLL_S)
                    agent._guard()
            starting.result()
        except BaseException as error:
            await agent._give_up(starting)
            if isinstance(error, TimeoutError):
                raise TunnelError(f"no tunnel after {OPEN_TIMEOUT_S:.0f} s; {NO_INTERNET}") from None
            raise
        return agent

    def alive(self) -> bool:
        return self._process is not None and self._process.proc.poll() is None

    async def answers(self) -> bool:
        """Return True if the agent's local API answers."""
        assert self._process is not None
        timeout = aiohttp.ClientTimeout(total=API_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self._process.api_url}/api/tunnels"),
            ):
                return True
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def close(self) -> None:
        """Stop the agent; return when its process has ended. Idempotent."""
        await asyncio.to_thread(self._stop)

    def _start(self) -> None:
        """Run in a thread: pyngrok has no asynchronous interface in all its versions."""
        from pyngrok.exception import PyngrokError

        AGENT_LOG.addFilter(self._redact)
        try:
            with tempfile.TemporaryDirectory(prefix="colab-swarm-", ignore_cleanup_errors=True) as private:
                self._connect(Path(private))
        except (PyngrokError, OSError) as error:
            # not chained: pyngrok's errors hold the agent's log
            raise TunnelError(explain(str(error).replace(self._token, "(hidden)"))) from None
        finally:
            if self._given_up:
                self._stop()

    def _connect(self, private: Path) -> None:
        from pyngrok import conf, ngrok, process

        config = conf.PyngrokConfig(ngrok_path=self._binary, start_new_session=True)
        config.auth_token = None  # pyngrok would put it on the command line
        secret: dict[str, Any] = {"authtoken": str(self._token)}
        nested = {"agent": secret} if config.config_version == "3" else secret
        file = private / "ngrok.yml"
        file.touch(mode=0o600)
        file.write_text(json.dumps({"version": config.config_version, **nested}))  # JSON is valid YAML
        config.config_path = str(file)
        ngrok.install_ngrok(config)
        if self._given_up:
            return
        binary = Path(config.ngrok_path)
        link = private / binary.name
        try:
            link.symlink_to(binary.absolute())
        except OSError:  # Windows allows links to administrators only
            shutil.copy2(binary, link)
        config.ngrok_path = self._path = str(link)
        tunnel = ngrok.connect(f"http://127.0.0.1:{self._port}", "http", pyngrok_config=config)
        self._process = process.get_process(config)
        self.address = "ws" + (tunnel.public_url or "").removeprefix("http")

    def _guard(self) -> NgrokProcess | None:
        """Guard the process as soon as it exists and return it; pyngrok's public functions wait until it is ready."""
        from pyngrok import process

        started = process._current_processes.get(self._path)
        if started is not None and self._guardian is None:
            self._guardian = Guardian(started.proc.pid)
        return started

    async def _give_up(self, starting: asyncio.Task[None]) -> None:
        """End the starting thread soon: pyngrok reads the agent's log without a timeout."""
        self._given_up = True
        for _ in range(round(STOP_TIMEOUT_S / POLL_S)):
            started = self._guard()
            if started is not None:
                started.proc.kill()
            if starting.done():
                break
            await asyncio.wait([starting], timeout=POLL_S)
        else:
            starting.cancel()  # a download continues in its thread, and ends by ``_given_up``
        await asyncio.gather(starting, return_exceptions=True)  # the caller has its error already
        await self.close()

    def _stop(self) -> None:
        from pyngrok import process

        process.kill_process(self._path)
        if self._guardian is not None:
            self._guardian.release()
        AGENT_LOG.removeFilter(self._redact)

    def _redact(self, record: logging.LogRecord) -> bool:
        """Hide the token: the agent repeats a refused one, and pyngrok logs that as an error."""
        record.msg = str(record.msg).replace(self._token, "(hidden)")
        return True


class Tunnel:
    """One tunnel to a local port; opened by `open`, then reopened whenever it is lost, until `close`.

    Args:
        settings: which tunnel.
        port: the port on 127.0.0.1 where a peer listens.
        on_change: called on the loop with each later address, and with None when the tunnel is lost.
        events: gets `TunnelChanged` and `QuotaWarning`.
        sent_bytes: returns the bytes sent through tunnels so far; the quota counts from the opening.

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
        self._settings, self._port, self._on_change, self._events = settings, port, on_change, events
        self._sent_bytes, self._sent_before, self._warned = sent_bytes, sent_bytes(), 0
        self._loop = asyncio.get_running_loop()
        self._agent: NgrokAgent | CloudflaredAgent | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> Tunnel:
        """Open the tunnel and return it.

        Raises:
            TunnelError: the text names the fix.
        """
        agent = self._agent = await self._open_agent()
        self._set_address(agent.address, "opened")
        self._watching = asyncio.create_task(self._watch(agent))
        return self

    def __repr__(self) -> str:
        return f"Tunnel({self._settings.kind}, {self.address or 'lost'})"

    async def close(self) -> None:
        """Close the tunnel; return when its processes have ended. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._agent is not None:
            await self._agent.close()
        self.address = None

    async def _open_agent(self) -> NgrokAgent | CloudflaredAgent:
        kind = NgrokAgent if self._settings.kind == "ngrok" else CloudflaredAgent
        agent = await kind.open(self._settings, self._port)
        if not is_address(agent.address):
            await agent.close()
            fault = f"{self._settings.kind} opened {agent.address!r}, which no peer can dial: try again"
            raise TunnelError(fault)
        return agent

    async def _watch(self, agent: NgrokAgent | CloudflaredAgent) -> None:
        try:
            while True:
                reason = await self._wait_lost(agent)
                await agent.close()
                self._set_address(None, reason)
                self._on_change(None)
                agent = self._agent = await self._reopen()
                self._set_address(agent.address, "opened again")
                self._on_change(agent.address)
        except Exception as error:
            logger.exception("a tunnel is no longer watched")
            self._events.emit(Fault.of(self._loop.time(), "tunnel", error))

    async def _wait_lost(self, agent: NgrokAgent | CloudflaredAgent) -> str:
        misses = failures = 0
        probe_at = self._loop.time() + self._settings.probe_s
        while True:
            await asyncio.sleep(self._settings.check_s)
            used_bytes, quota_bytes = self._sent_bytes() - self._sent_before, self._settings.quota_bytes
            if self._settings.kind == "ngrok" and quota_bytes is not None:
                passed = passed_marks(used_bytes, quota_bytes)
                if passed > self._warned:
                    self._warned = passed
                    self._events.emit(QuotaWarning(self._loop.time(), used_bytes, quota_bytes))
            if not agent.alive():
                return "its agent died"
            misses = 0 if await agent.answers() else misses + 1
            if misses == MAX_MISSES:
                return "its agent hangs"
            if self._loop.time() < probe_at:
                continue
            fault = await probe(agent.address)
            failures = failures + 1 if fault else 0
            if failures == PROBES:
                return f"its public address does not lead here: {fault}"
            again_s = PROBE_AGAIN_S if fault else self._settings.probe_s
            probe_at = self._loop.time() + min(again_s, self._settings.probe_s)

    async def _reopen(self) -> NgrokAgent | CloudflaredAgent:
        """Open a new agent; retry at growing intervals until it works."""
        back_off_s = BACK_OFF_S
        while True:
            try:
                return await self._open_agent()
            except TunnelError as error:
                logger.info("no tunnel yet: %s", error)
                self._events.emit(TunnelChanged(self._loop.time(), None, str(error)))
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)

    def _set_address(self, address: str | None, reason: str) -> None:
        self.address = address
        self._events.emit(TunnelChanged(self._loop.time(), address, reason))
