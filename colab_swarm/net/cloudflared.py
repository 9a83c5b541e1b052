"""One run of cloudflared: a quick tunnel (no account) from https://WORDS.trycloudflare.com to a local port."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from contextlib import suppress

from colab_swarm.errors import TunnelError
from colab_swarm.net.guardian import Guardian

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
