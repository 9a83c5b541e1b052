"""Stands in for ngrok's agent (version 3): ``ngrok http URL`` with its log as JSON.

The token selects the behaviour: ``session-NNN`` fails at the start with ERR_NGROK_NNN, ``tunnel-NNN`` at the
opening of the tunnel, ``offline`` never reaches ngrok, ``silent`` stays silent.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import edge


def log(**fields: object) -> None:
    print(json.dumps({"t": "2026-01-01T00:00:00+0000", "lvl": "info", "err": None, **fields}), flush=True)


def fail(error: str) -> None:
    log(lvl="eror", msg="session closing", obj="tunnels.session", err=error)
    log(lvl="warn", msg="update check failed", err="HTTP status 404")
    sys.exit(1)


def read_token() -> str:
    if "--authtoken" in sys.argv:
        sys.exit("every user can read a token on the command line")
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    return str((config["agent"] if config["version"] == "3" else config)["authtoken"])


async def run(upstream: str, token: str) -> None:
    log(msg="starting web service", obj="web", addr="127.0.0.1:4040")
    log(msg="client session established", obj="tunnels.session")
    if token.startswith("tunnel-"):
        fail(f"failed to start tunnel: no such luck. ERR_NGROK_{token.removeprefix('tunnel-')}")
    url = f"http://127.0.0.1:{await edge.open_edge(int(upstream.rpartition(':')[2]))}"
    log(msg="started tunnel", obj="tunnels", name="command_line", addr=upstream, url=url)
    await asyncio.Event().wait()


def main() -> None:
    assert sys.argv[1] == "http" and sys.argv[-4:] == ["--log", "stdout", "--log-format", "json"], sys.argv
    token = read_token()
    if token.startswith("session-"):
        fail(f"The authtoken you specified is invalid. Your authtoken: {token} ERR_NGROK_{token[8:]}")
    if token == "offline":
        fail("failed to dial ngrok server with address connect.ngrok-agent.com:443: lookup: i/o timeout")
    if token == "silent":
        time.sleep(1000)
    asyncio.run(run(sys.argv[2], token))
