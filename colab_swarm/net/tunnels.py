"""A tunnel gives a peer behind a NAT a public address: a local agent process keeps a connection to a provider's server.

`Tunnel` watches the agent, and starts a new one if the tunnel is lost; the address may change then. A
guardian process starts each agent, and kills it when this process dies, because a killed kernel runs
no exit hooks. The guardian has its own session, so it survives signals to the notebook's process group.

pyngrok is only used to download the ngrok agent. The agent's configuration contains the token. It is in a temporary
directory until the agent runs, because any user of the machine could read a token on a command line.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import aiohttp

from colab_swarm.credentials import require_secret
from colab_swarm.errors import TunnelError, require
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.net.addresses import is_address
from colab_swarm.project import install

logger = logging.getLogger(__name__)
# Maximum time for the download of the ngrok agent (10 MB), which is needed at its first use.
_DOWNLOAD_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 45.0
# Time between two checks of the agent, and between two requests to the public address; 20,000 a month are free.
CHECK_S = 1.0
PROBE_S = 180.0
# A tunnel counts as lost if this many requests in a row fail, with this time between them.
_PROBES = 3
_PROBE_AGAIN_S = 10.0
PROBE_TIMEOUT_S = 15.0
_BACK_OFF_S = 0.5
_MAX_BACK_OFF_S = 60.0
_LOG_LINES = 3
# The parts of the monthly data volume at which the user is warned.
_WARNED_SHARES = (0.5, 0.8, 0.95)
_NO_INTERNET = "ngrok cannot be reached: check the internet connection (on Kaggle: Settings, Internet on)"
_INSTALL = (
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
# The numbers are ngrok's error codes, see https://ngrok.com/docs/errors.
ADVICE = {
    "105": f"this is not an ngrok token: {_TOKEN}",
    "106": f"ngrok does not know this token: {_TOKEN}",
    "107": f"ngrok does not accept this token (mistyped, or reset): {_TOKEN}",
    "108": _TOO_MANY,
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
_OFFLINE = re.compile(
    r"(?i)dial tcp|no such host|failed to dial|i/o timeout|urlopen|downloading|resolve|unreachable|no tunnel after"
)
# The address of a tunnel has hyphens; the address of Cloudflare's API has none.
_CLOUDFLARED_URL = re.compile(r"https://[a-z0-9]+(?:-[a-z0-9]+)+\.trycloudflare\.com")
_GUARDIAN = """
import ctypes, os, signal, subprocess, sys, threading
def die_with_guardian():  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
linux = sys.platform == "linux"
agent = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=die_with_guardian if linux else None)
def kill_without_owner():
    sys.stdin.buffer.read()  # ends when the owner closes the pipe, or dies
    agent.kill()
threading.Thread(target=kill_without_owner, daemon=True).start()
agent.wait()
os._exit(0)  # not sys.exit: the thread holds stdin
"""


@dataclass(frozen=True)
class TunnelSettings:
    """Which tunnel to open, and how to watch it. ngrok needs a token; cloudflared needs an installed program.

    Attributes:
        auth_token: the user's ngrok token.
        agent: path of the program; None for pyngrok's copy of ngrok, or for the cloudflared on the PATH.
        quota_bytes: monthly data volume of the ngrok plan; None for no limit.
    """

    kind: Literal["ngrok", "cloudflared"]
    auth_token: str | None = field(default=None, repr=False)
    agent: str | None = None
    quota_bytes: float | None = 1e9

    def __post_init__(self) -> None:
        supported = self.kind in ("ngrok", "cloudflared")
        require(supported, f"tunnel={self.kind!r} is unknown: take 'ngrok' or 'cloudflared'")


def settings_of(kind: Literal["ngrok", "cloudflared"]) -> TunnelSettings:
    """Return a tunnel's settings; this may ask the user for a token. Raises `TunnelError` or `SecretError`."""
    if kind != "ngrok":
        return TunnelSettings(kind)
    _require_pyngrok()
    where = "get one at https://dashboard.ngrok.com/get-started/your-authtoken"
    return TunnelSettings(kind, auth_token=require_secret("NGROK_AUTHTOKEN", help=where))


def _require_pyngrok() -> None:
    require(find_spec("pyngrok"), f"tunnel='ngrok' needs pyngrok: {install('notebook')}", TunnelError)


def explain(text: str) -> str:
    """Return an error of ngrok or pyngrok as one sentence that names the fix."""
    code = re.search(r"ERR_NGROK_(\d+)", text)
    if code is not None and code[1] in ADVICE:
        return f"{ADVICE[code[1]]} ({code[0]})"
    if code is not None:
        return f"ngrok: {text[:300]}; see https://ngrok.com/docs/errors/{code[0].lower()}"
    if _OFFLINE.search(text):
        return f"{_NO_INTERNET} ({text[:300]})"
    return f"ngrok: {text[:300]}"


async def probe(address: str) -> str | None:
    """Request a page from the public address; return None if the tunnel reaches a server, else the fault."""
    url = "http" + address.removeprefix("ws")
    headers = {"ngrok-skip-browser-warning": "1"}
    timeout = aiohttp.ClientTimeout(PROBE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            code = response.headers.get("Ngrok-Error-Code")
            if code is not None:
                return explain(code)
            # The provider answers 404 for an unknown tunnel, and 502 or 530 for a lost one; a peer answers 426.
            if response.status == 404 or response.status >= 500:
                return f"HTTP status {response.status}"
            return None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")


@dataclass
class _AgentLog:
    """Reads the log of an agent: the tunnel's ``address`` once the agent is connected, and a ``fault``."""

    address: str = ""
    fault: str = ""
    _url: str = ""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))

    def read(self, line: str) -> None:
        self.last_lines.append(line.strip()[:200])
        if line.startswith("{"):
            # ngrok
            with suppress(ValueError):
                entry = json.loads(line)
                if entry.get("lvl") in ("eror", "crit") and entry.get("err"):
                    self.fault = str(entry["err"])
                elif entry.get("msg") == "started tunnel":
                    self.address = str(entry.get("url")).replace("http", "ws", 1)
            return
        # cloudflared
        match = _CLOUDFLARED_URL.search(line)
        if match is not None and not self._url:
            self._url = match[0]
        if "Registered tunnel connection" in line:
            self.address = self._url.replace("http", "ws", 1)


async def _install_ngrok(settings: TunnelSettings) -> tuple[str, str]:
    """Return the path of the ngrok agent, which is downloaded if necessary, and the version of its configuration."""
    _require_pyngrok()
    from pyngrok import conf, installer
    from pyngrok.exception import PyngrokError

    require(settings.auth_token, explain("ERR_NGROK_4018"), TunnelError)
    text = f"there is no ngrok agent at {settings.agent}: leave it out to download one"
    require(settings.agent is None or os.path.exists(settings.agent), text, TunnelError)
    config = conf.PyngrokConfig(ngrok_path=settings.agent)
    try:
        async with asyncio.timeout(_DOWNLOAD_TIMEOUT_S):
            if not os.path.exists(config.ngrok_path):
                await asyncio.to_thread(
                    installer.install_ngrok, config.ngrok_path, ngrok_version=config.ngrok_version
                )
    except TimeoutError:
        raise TunnelError(f"no ngrok agent after {_DOWNLOAD_TIMEOUT_S:.0f} s; {_NO_INTERNET}") from None
    except (PyngrokError, OSError) as error:
        raise TunnelError(explain(str(error))) from None
    return config.ngrok_path, config.config_version


class Tunnel:
    """One tunnel to a ``port`` on 127.0.0.1, from `open` until `close`; it is opened again whenever it is lost.

    ``on_change`` is called on the event loop with each later address, or with None when the tunnel is lost. A `Notice`
    of each change is emitted to ``events``; with ngrok, also when 50, 80 and 95 % of the plan's data volume are used.
    ``sent_bytes`` returns the bytes sent through tunnels so far; the quota counts from the opening. ``address`` is
    ``wss://HOST``, or None while the tunnel is lost.
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
        self._settings = settings
        self._url = f"http://127.0.0.1:{port}"
        self._on_change = on_change
        self._events = events
        self._sent_bytes = sent_bytes
        self._sent_before_bytes = sent_bytes()
        # How many of the `_WARNED_SHARES` are exceeded already.
        self._shares_passed = 0
        self._loop = asyncio.get_running_loop()
        self._guardian: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> "Tunnel":
        """Open the tunnel and return it; raise a `TunnelError` that names the fix."""
        self._set_address(await self._connect())
        self._watching = asyncio.create_task(self._watch())
        return self

    async def close(self) -> None:
        """Close the tunnel, and wait until its processes have ended. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._stop()
        self.address = None

    async def _connect(self) -> str:
        kind = self._settings.kind
        try:
            if kind == "cloudflared":
                address, fault = await self._run_cloudflared()
            else:
                address, fault = await self._run_ngrok()
        except TunnelError:
            raise
        except NotImplementedError as error:
            # Up to Python 3.13, the event loop policy watches child processes; uvloop's policy does not.
            text = "the event loop policy of this process starts no programs: asyncio.set_event_loop_policy(None)"
            raise TunnelError(text) from error
        except (OSError, ValueError) as error:
            # The disk may be full, there may be too many processes, or a line of the log may be too long.
            raise TunnelError(f"the program of the tunnel cannot be started: {error}") from error
        require(address, fault, TunnelError)
        if not is_address(address):
            await self._stop()
            raise TunnelError(f"{kind} opened {address!r}, which no peer can dial: try again")
        return address

    async def _run_cloudflared(self) -> tuple[str, str]:
        """Start cloudflared; return its public address and "", or "" and the reason why it was stopped."""
        agent = self._settings.agent
        program = shutil.which(agent or "cloudflared")
        if program is None and agent:
            raise TunnelError(f"no cloudflared is at {agent}: leave it out to use that of the PATH")
        if program is None:
            raise TunnelError(_INSTALL)
        # No configuration file is read, because the user's own would conflict with a quick tunnel.
        options = ["--config", os.devnull, "--no-autoupdate", "--url", self._url]
        address, fault = await self._run(program, "tunnel", *options)
        advice = "check the internet connection (on Kaggle: Settings, Internet on), and try again"
        return address, f"cloudflared: {fault}; {advice} later: quick tunnels come without a guarantee"

    async def _run_ngrok(self) -> tuple[str, str]:
        """Start ngrok; return its public address and "", or "" and the reason why it was stopped."""
        program, version = await _install_ngrok(self._settings)
        auth_token = str(self._settings.auth_token)
        config: dict[str, Any] = {"version": version}
        if version == "3":
            config["agent"] = {"authtoken": auth_token}
        else:
            config["authtoken"] = auth_token
        with tempfile.TemporaryDirectory(prefix="colab-swarm", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "ngrok.yml"
            file.touch(mode=0o600)
            # JSON is valid YAML.
            file.write_text(json.dumps(config))
            options = ["--config", str(file), "--log", "stdout", "--log-format", "json"]
            address, fault = await self._run(program, "http", self._url, *options)
        # The agent's error repeats a token that was refused.
        return address, explain(fault.replace(auth_token, "(hidden)"))

    async def _run(self, *command: str) -> tuple[str, str]:
        """Start a program; return its public address, or "" and the reason why it was stopped."""
        start = asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _GUARDIAN, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        starting = asyncio.create_task(start)
        log = _AgentLog()
        ending = "it ended"
        try:
            self._guardian = await asyncio.shield(starting)
            assert self._guardian.stdout is not None
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                while not log.address and (line := await self._guardian.stdout.readline()):
                    log.read(line.decode(errors="replace"))
        except TimeoutError:
            ending = f"no tunnel after {OPEN_TIMEOUT_S:.0f} s"
        finally:
            # The start is not cancelled, because this would kill the guardian and leave the program running.
            self._guardian = await starting
            if not log.address:
                await self._stop()
        last_lines = " / ".join(log.last_lines)
        return log.address, log.fault or f"{ending}; its log says {last_lines!r}"

    async def _stop(self) -> None:
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            # The guardian kills the program, and ends.
            self._guardian.stdin.close()
            await self._guardian.wait()

    async def _watch(self) -> None:
        try:
            while True:
                reason = await self._wait_lost()
                await self._stop()
                self._set_address(None, reason)
                await self._reconnect()
        except Exception as error:
            logger.exception("a tunnel is no longer watched")
            self._events.emit(Fault.of(self._loop.time(), "tunnel", error))

    async def _wait_lost(self) -> str:
        assert self._guardian is not None and self._guardian.stdout is not None and self.address is not None
        probe_at = self._loop.time() + PROBE_S
        failures = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    # The log must be read, because a full pipe would block the program.
                    while await self._guardian.stdout.read(1 << 16):
                        pass
                    await self._guardian.wait()
            self._check_quota()
            if self._guardian.returncode is not None:
                return "its agent died"
            if self._loop.time() < probe_at:
                continue
            fault = await probe(self.address)
            if fault is None:
                failures = 0
                probe_at = self._loop.time() + PROBE_S
                continue
            failures += 1
            if failures == _PROBES:
                return f"its public address does not lead here: {fault}"
            probe_at = self._loop.time() + min(_PROBE_AGAIN_S, PROBE_S)

    def _check_quota(self) -> None:
        quota_bytes = self._settings.quota_bytes
        if self._settings.kind != "ngrok" or quota_bytes is None:
            return
        used_bytes = self._sent_bytes() - self._sent_before_bytes
        passed = sum(used_bytes >= share * quota_bytes for share in _WARNED_SHARES)
        if passed > self._shares_passed:
            self._shares_passed = passed
            share = f"{used_bytes / quota_bytes:.0%} of the plan's {quota_bytes / 1e6:.0f} MB a month"
            self._notice(f"tunnel: {used_bytes / 1e6:.0f} MB sent, {share}")

    async def _reconnect(self) -> None:
        back_off_s = _BACK_OFF_S
        while self.address is None:
            try:
                self._set_address(await self._connect())
            except TunnelError as error:
                logger.info("no tunnel yet: %s", error)
                self._notice(f"tunnel lost: {error}")
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, _MAX_BACK_OFF_S)

    def _set_address(self, address: str | None, lost: str = "") -> None:
        self.address = address
        if address is None:
            self._notice(f"tunnel lost: {lost}")
        else:
            self._notice(f"tunnel open at {address}")
        if self._watching is not None:
            self._on_change(address)

    def _notice(self, text: str) -> None:
        self._events.emit(Notice(self._loop.time(), text))
