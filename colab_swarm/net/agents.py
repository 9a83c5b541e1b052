"""A child process must not outlive this one, however this one ends: a killed kernel runs no exit hooks.

One run of ngrok's agent, driven by pyngrok: https://HOST on its edge leads to a local port.

pyngrok knows an agent by the path of its binary. Each agent gets a path of its own (a link in a directory
that is gone again once the agent runs), so the user's own pyngrok tunnels and ours leave each other alone;
so does its configuration, which holds the token: on the command line everybody on the machine could read it.
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
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from colab_swarm.errors import TunnelError

if TYPE_CHECKING:
    from pyngrok.process import NgrokProcess


_WATCH = """
import os, sys
if not sys.stdin.buffer.read(1):  # the pipe closed without a word: its owner is dead
    os.kill(int(sys.argv[1]), 9)
"""


class Guardian:
    """Kills process ``pid`` when this process dies.

    It is a process of its own that waits for the end of a pipe from here, in a session of its own, so that
    what kills a notebook's process group or interrupts it does not reach it.
    """

    def __init__(self, pid: int) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Watch no more. Call it when the process has ended, before the system gives its number to another."""
        if self._watcher.returncode is None:
            with suppress(OSError):  # the watcher was killed
                self._watcher.communicate(b".")


OPEN_TIMEOUT_S = 45.0

INSTALL = (
    "tunnel='cloudflared' needs the program cloudflared: download it from "
    "https://github.com/cloudflare/cloudflared/releases/latest, make it executable and put it on the PATH; "
    "on Colab and Kaggle: !wget -qO /usr/local/bin/cloudflared https://github.com/cloudflare/cloudflared/"
    "releases/latest/download/cloudflared-linux-amd64 && chmod +x /usr/local/bin/cloudflared"
)

_URL = re.compile(r"https://[a-z0-9]+(?:-[a-z0-9]+)+\.trycloudflare\.com")  # its API's host has no hyphen

_CONNECTED = "Registered tunnel connection"

KEPT_LINES = 3


class CloudflaredAgent:
    """A running cloudflared. Make it with `open`; ``address`` is where it can be reached."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.address = ""
        self._process = process
        self._guardian = Guardian(process.pid)
        self._connected = asyncio.Event()
        self._last_lines: list[str] = []
        self._reading = asyncio.create_task(self._read_log())

    @classmethod
    async def open(cls, port: int, *, binary: str | None) -> CloudflaredAgent:
        """Start cloudflared with a tunnel to the local port.

        Args:
            port: on 127.0.0.1.
            binary: path of cloudflared; None takes the one on the PATH.

        Raises:
            TunnelError: the text says why and what to do.
        """
        path = shutil.which(binary or "cloudflared")
        if path is None:
            missing = f"there is no cloudflared at {binary}: leave it out to take the one on the PATH"
            raise TunnelError(missing if binary else INSTALL)
        arguments = ["tunnel", "--config", os.devnull, "--no-autoupdate", "--url", f"http://127.0.0.1:{port}"]
        try:
            process = await asyncio.create_subprocess_exec(
                path,
                *arguments,  # without a configuration: a quick tunnel does not get on with the user's own
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise TunnelError(f"{path} does not start: {error}") from error
        agent = cls(process)
        try:
            await agent._wait_connected()
        except BaseException:
            await agent.close()
            raise
        return agent

    def alive(self) -> bool:
        """Whether cloudflared runs."""
        return self._process.returncode is None

    async def answers(self) -> bool:
        """True: cloudflared has no local API; its public address is all there is to try."""
        return True

    async def close(self) -> None:
        """Stop cloudflared; returns when its process is gone. Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.to_thread(self._guardian.release)
        await self._reading

    async def _wait_connected(self) -> None:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._connected.wait()
        except TimeoutError:
            raise TunnelError(self._complaint(f"no tunnel after {OPEN_TIMEOUT_S:.0f} s")) from None
        if not self.address:
            raise TunnelError(self._complaint("it ended"))

    def _complaint(self, what: str) -> str:
        said = " / ".join(self._last_lines)
        return (
            f"cloudflared: {what}, saying {said!r}; check the internet connection (on Kaggle: Settings, "
            "Internet on), and try again later: quick tunnels come without a promise"
        )

    async def _read_log(self) -> None:
        """Read to the end, for a full pipe would stop it; the first address counts once it is connected."""
        assert self._process.stderr is not None
        url = ""
        while line := (await self._process.stderr.readline()).decode(errors="replace"):
            self._last_lines = [*self._last_lines, line.strip()[:200]][-KEPT_LINES:]
            found = _URL.search(line)
            url = url or (found[0] if found else "")
            if _CONNECTED in line and url:
                self.address = "ws" + url.removeprefix("http")
                self._connected.set()
        self._connected.set()


AGENT_LOG = logging.getLogger("pyngrok.process.ngrok")

HIDDEN = "(hidden)"

NGROK_OPEN_TIMEOUT_S = 60.0

"""For all of it; the first time ever, that is a download of 10 MB."""

API_TIMEOUT_S = 5.0

STOP_TIMEOUT_S, CHECK_S = 5.0, 0.05

NO_INTERNET = (
    "ngrok cannot be reached from here: check the internet connection (on Kaggle: Settings, Internet on)"
)

_TOKEN = (
    "get your token at https://dashboard.ngrok.com/get-started/your-authtoken and keep it as the secret "
    "NGROK_AUTHTOKEN (Colab: the key icon on the left; Kaggle: Add-ons, Secrets; elsewhere: an environment "
    "variable)"
)

_SPENT = "the month's data volume of your ngrok plan is used up: take a relay or tunnel='cloudflared' instead"

_TOO_MANY = (
    "your ngrok account runs as many agents or tunnels as its plan allows: stop another one "
    "(https://dashboard.ngrok.com/agents), perhaps in a notebook you forgot"
)

_OUTDATED = "ngrok's agent is too old: delete the file so that a new one is downloaded, or run `ngrok update`"

ADVICE = {
    "105": f"this is no ngrok token: {_TOKEN}",
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
    "727": "the month's requests of your ngrok plan are used up: take a relay or tunnel='cloudflared' instead",
    "734": "too many requests in a minute for your ngrok plan: it works again in a minute",
    "4018": f"ngrok needs an account (free) and its token: {_TOKEN}",
    "4027": _SPENT,
    "8013": "ngrok wants a card on file for TCP tunnels, even free ones: use the http tunnel, which needs none",
}

"""What to do, by the number of ngrok's error code (https://ngrok.com/docs/errors)."""

_OFFLINE = re.compile(
    r"dial tcp|no such host|failed to dial|i/o timeout|urlopen|downloading|resolve|unreachable", re.I
)


def explain(text: str) -> str:
    """What ngrok or pyngrok said, in one sentence with the fix."""
    code = re.search(r"ERR_NGROK_(\d+)", text)
    if code is not None and code[1] in ADVICE:
        return f"{ADVICE[code[1]]} ({code[0]})"
    if code is not None:
        return f"ngrok: {text[:300]}; see https://ngrok.com/docs/errors/{code[0].lower()}"
    return f"{NO_INTERNET} ({text[:300]})" if _OFFLINE.search(text) else f"ngrok: {text[:300]}"


def require_pyngrok() -> None:
    """Raise `TunnelError` if pyngrok is not installed."""
    if find_spec("pyngrok") is None:
        raise TunnelError("tunnel='ngrok' needs pyngrok: pip install \"colab-swarm[notebook]\"")


class NgrokAgent:
    """A running agent. Make it with `open`; ``address`` is where it can be reached."""

    def __init__(self, port: int, auth_token: str, binary: str | None) -> None:
        self.address = ""
        self._port, self._auth_token, self._binary = port, auth_token, binary
        self._path = ""
        self._process: NgrokProcess | None = None
        self._guardian: Guardian | None = None
        self._given_up = False

    @classmethod
    async def open(cls, port: int, *, auth_token: str | None, binary: str | None) -> NgrokAgent:
        """Start the agent and open a tunnel to the local port.

        Args:
            port: on 127.0.0.1.
            auth_token: of an ngrok account.
            binary: path of the agent; None takes pyngrok's, which it downloads if there is none.

        Raises:
            TunnelError: the text says why and what to do.
        """
        require_pyngrok()
        if not auth_token:
            raise TunnelError(explain("ERR_NGROK_4018"))
        if binary is not None and not os.path.exists(binary):
            raise TunnelError(f"there is no ngrok agent at {binary}: leave it out to have one downloaded")
        agent = cls(port, auth_token, binary)
        starting = asyncio.create_task(asyncio.to_thread(agent._start))
        try:
            async with asyncio.timeout(NGROK_OPEN_TIMEOUT_S):
                while not starting.done():
                    await asyncio.wait([starting], timeout=CHECK_S)
                    agent._guard()
            starting.result()
        except BaseException as error:
            await agent._give_up(starting)
            if isinstance(error, TimeoutError):
                raise TunnelError(f"no tunnel after {OPEN_TIMEOUT_S:.0f} s; {NO_INTERNET}") from None
            raise
        return agent

    def alive(self) -> bool:
        """Whether the agent's process runs."""
        return self._process is not None and self._process.proc.poll() is None

    async def answers(self) -> bool:
        """Whether the agent's local API answers."""
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
        """Stop the agent; returns when its process is gone. Idempotent."""
        await asyncio.to_thread(self._stop)

    def _start(self) -> None:
        """Download if need be, start, open the tunnel; blocks, as pyngrok has no other way in all its versions."""
        from pyngrok.exception import PyngrokError

        AGENT_LOG.addFilter(self._redact)
        try:
            with tempfile.TemporaryDirectory(prefix="colab-swarm-", ignore_cleanup_errors=True) as private:
                self._connect(Path(private))
        except (PyngrokError, OSError) as error:
            # not chained: pyngrok's errors hold the agent's log
            raise TunnelError(explain(str(error).replace(self._auth_token, HIDDEN))) from None
        finally:
            if self._given_up:
                self._stop()

    def _connect(self, private: Path) -> None:
        from pyngrok import conf, ngrok, process

        config = conf.PyngrokConfig(ngrok_path=self._binary, start_new_session=True)
        config.auth_token = None  # whatever is set here goes on the command line
        config.config_path = _write_config(private, config.config_version, self._auth_token)
        ngrok.install_ngrok(config)
        if self._given_up:
            return
        config.ngrok_path = self._path = _link(Path(config.ngrok_path), private)
        tunnel = ngrok.connect(f"http://127.0.0.1:{self._port}", "http", pyngrok_config=config)
        self._process = process.get_process(config)
        self.address = "ws" + (tunnel.public_url or "").removeprefix("http")

    def _guard(self) -> NgrokProcess | None:
        """The agent's process as soon as there is one, guarded; pyngrok's public verbs wait until it has started."""
        from pyngrok import process

        started = process._current_processes.get(self._path)
        if started is not None and self._guardian is None:
            self._guardian = Guardian(started.proc.pid)
        return started

    async def _give_up(self, starting: asyncio.Task[None]) -> None:
        """Have the starting thread end soon: pyngrok reads the agent's log without a limit in time."""
        self._given_up = True
        for _ in range(round(STOP_TIMEOUT_S / CHECK_S)):
            started = self._guard()
            if started is not None:
                started.proc.kill()
            if starting.done():
                break
            await asyncio.wait([starting], timeout=CHECK_S)
        else:
            starting.cancel()  # a download goes on in its thread, and ends by ``_given_up``
        await asyncio.gather(starting, return_exceptions=True)  # the caller has its error, or has gone
        await self.close()

    def _stop(self) -> None:
        from pyngrok import process

        process.kill_process(self._path)
        if self._guardian is not None:
            self._guardian.release()
        AGENT_LOG.removeFilter(self._redact)

    def _redact(self, record: logging.LogRecord) -> bool:
        """Hide the token: the agent repeats one it refuses, and pyngrok logs that as an error for all to see."""
        record.msg = str(record.msg).replace(self._auth_token, HIDDEN)
        return True


def _write_config(private: Path, version: str, auth_token: str) -> str:
    """The agent's configuration (YAML, of which JSON is a part), in the dialect that pyngrok reads."""
    path = private / "ngrok.yml"
    secret: dict[str, Any] = {"authtoken": str(auth_token)}
    path.touch(mode=0o600)
    path.write_text(json.dumps({"version": version, **({"agent": secret} if version == "3" else secret)}))
    return str(path)


def _link(binary: Path, private: Path) -> str:
    """Another path of the binary."""
    path = private / binary.name
    try:
        path.symlink_to(binary.absolute())
    except OSError:  # Windows allows links to administrators only
        shutil.copy2(binary, path)
    return str(path)
