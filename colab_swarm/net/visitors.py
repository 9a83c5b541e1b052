"""Limits how often each visitor may ask for a public page, so that none shuts out the others."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from aiohttp import web

from colab_swarm.net.addresses import is_loopback

WINDOW_S = 1.0
MAX_SOURCES = 4096
"""Visitors that are counted at a time; beyond that the one that has been quiet longest is forgotten."""


class VisitLimit:
    """Counts the visits of each source in windows of one second. Free of I/O.

    Args:
        most: visits of one source per window.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._began_at = float("-inf")

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, source: str, now: float) -> bool:
        """Count a visit; return whether the source may make it.

        Args:
            source: see `source_of`.
            now: monotonic seconds.
        """
        if now - self._began_at >= WINDOW_S:
            self._counts.clear()
            self._began_at = now
        self._counts[source] = self._counts.get(source, 0) + 1
        self._counts.move_to_end(source)
        if len(self._counts) > MAX_SOURCES:
            self._counts.popitem(last=False)
        return self._counts[source] <= self._most


def source_of(request: web.BaseRequest) -> str:
    """Return the visitor's network: its IPv4 address, or the /64 of its IPv6 address.

    A tunnel's agent or a proxy on this machine appends the visitor's address to ``X-Forwarded-For``. Visitors may
    write into that header themselves, so only the last entry counts, and only if the request comes from loopback.
    """
    remote = request.remote or ""
    if is_loopback(remote) and "X-Forwarded-For" in request.headers:
        last = request.headers.getall("X-Forwarded-For")[-1]
        return f"forwarded {_network(last.rpartition(',')[2].strip())}"
    return _network(remote)


def _network(host: str) -> str:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))
