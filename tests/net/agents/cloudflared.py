"""Stands in for cloudflared's quick tunnels."""

import asyncio
import sys

import edge


def log(text: str) -> None:
    print(f"2026-01-01T00:00:00Z INF {text}", file=sys.stderr, flush=True)


async def run(upstream: str) -> None:
    log("Requesting new quick Tunnel at https://api.trycloudflare.com...")
    await edge.open_edge(int(upstream.rpartition(":")[2]))
    log("+-------------------------------------------------------------------+")
    log("|  Your quick Tunnel has been created! Visit it at:                  |")
    log("|  https://calm-green-otter.trycloudflare.com                        |")
    log("Registered tunnel connection connIndex=0 protocol=quic")
    await asyncio.Event().wait()


def main() -> None:
    assert sys.argv[1:3] == ["tunnel", "--config"] and "--no-autoupdate" in sys.argv, sys.argv
    if "refused" in sys.argv[0]:
        log("|  https://calm-green-otter.trycloudflare.com                        |")
        log("ERR failed to request quick Tunnel: 429 Too Many Requests")
        sys.exit(1)
    asyncio.run(run(sys.argv[sys.argv.index("--url") + 1]))
