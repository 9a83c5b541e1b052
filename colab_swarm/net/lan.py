"""Swarms on the same local network announce themselves by multicast DNS and are found without an invitation.

The announcement is public on that network: the run's id, the announcing peer, its addresses, and whether an invitation
is needed. Trust none of it before the handshake. Each announcing peer is one service; peers of one
run are merged. On platforms without multicast (Colab, Kaggle) nothing is found and nothing fails.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from colab_swarm.net.addresses import ip_of, is_loopback, own_ips, relay_of
from colab_swarm.net.carrier import MAX_RUN_ID_BYTES
from colab_swarm.net.peers import MAX_ADDRESSES, Contact, PeerId

SERVICE = "_colab-swarm._tcp.local."
MAX_SERVICES = 256
MAX_NAME_CHARS = 48
Access = Literal["open", "invite", "allowlist"]


@dataclass(frozen=True)
class Announcement:
    """What one peer announces on its network."""

    run_id: str  # the run's unique name, 64 bytes at most
    access: Access  # the run admits every peer, holders of an invitation, or accounts on its list
    name: str  # the peer's display name; cut to 48 characters
    contact: Contact  # the peer; of its addresses, the ``ws://IP:PORT`` ones of one port are announced


@dataclass(frozen=True)
class LanSwarm:
    """A run found on the network; ``names`` are those of the peers in ``contacts``."""

    run_id: str
    access: Access
    contacts: tuple[Contact, ...]
    names: tuple[str, ...]

    @property
    def run(self) -> str:
        """The run's display name."""
        return self.run_id.rpartition("-")[0] or self.run_id


def write_properties(announcement: Announcement) -> dict[str, str]:
    """Return the service's TXT record, under 300 bytes."""
    return {
        "v": "1",
        "run": announcement.run_id,
        "access": announcement.access,
        "peer": announcement.contact.id.hex(),
        "name": _printable(announcement.name),
    }


class _Record(msgspec.Struct):
    v: Literal["1"]
    run: Annotated[str, msgspec.Meta(min_length=1)]
    access: Access
    peer: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    name: str = ""


def read_announcement(
    properties: Mapping[bytes, bytes | None], ips: Iterable[str], port: int | None
) -> Announcement | None:
    """Decode a service's records; None if they are of another version, garbled or without address."""
    try:
        text = {key.decode(): (value or b"").decode() for key, value in properties.items()}
        record = msgspec.convert(text, _Record)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return None
    addresses = [f"ws://{host}:{port}" for host in dict.fromkeys(map(_dialled, ips)) if host and port]
    proper = len(record.run.encode()) <= MAX_RUN_ID_BYTES and record.run.isprintable()
    if not (proper and addresses):
        return None
    contact = Contact(PeerId(bytes.fromhex(record.peer)), tuple(addresses[:MAX_ADDRESSES]))
    return Announcement(record.run, record.access, _printable(record.name), contact)


def merge(announcements: Iterable[Announcement]) -> list[LanSwarm]:
    """Return the announced runs, by name; their access is the one that most of their peers announce."""
    runs: dict[str, dict[PeerId, Announcement]] = {}
    for one in announcements:
        peers = runs.setdefault(one.run_id, {})
        before = peers[one.contact.id].contact.addresses if one.contact.id in peers else ()
        addresses = tuple(dict.fromkeys((*before, *one.contact.addresses)))[:MAX_ADDRESSES]
        peers[one.contact.id] = replace(one, contact=Contact(one.contact.id, addresses))
    return [
        LanSwarm(
            run_id,
            statistics.mode(one.access for one in peers.values()),
            tuple(one.contact for one in peers.values()),
            tuple(one.name for one in peers.values()),
        )
        for run_id, peers in sorted(runs.items())
    ]


def announced(contact: Contact) -> tuple[list[str], int]:
    """Return the IP addresses and the port to announce (a service has one port); none and 0 without dial address.

    Loopback is announced only if there is no other address: it leads every other machine to itself.
    """
    parts = [urlsplit(address) for address in contact.addresses if relay_of(address) is None]
    found = [(one.port, one.hostname or "") for one in parts if one.scheme == "ws" and one.port]
    dialled = [(port, host) for port, host in found if _dialled(host)]
    if not dialled:
        return [], 0
    port = dialled[0][0]
    ips = [host for other, host in dialled if other == port]
    return [ip for ip in ips if not is_loopback(ip)] or ips, port


class LanAnnouncer:
    """Announces one peer until `close`. Make it with `start`."""

    def __init__(self, announcement: Announcement, zeroconf: AsyncZeroconf) -> None:
        self._announcement, self._zeroconf = announcement, zeroconf
        # a random name: processes of one machine do not always hear each other's objections
        self._label = f"{announcement.contact.id.hex()[:8]}-{secrets.token_hex(4)}"
        self._info: AsyncServiceInfo | None = None

    @classmethod
    async def start(
        cls, announcement: Announcement, *, interfaces: Sequence[str] | None = None
    ) -> LanAnnouncer:
        """Announce a peer; takes about a second, in which others may object to its name.

        Args:
            announcement: what to announce; nothing while its contact has no addresses.
            interfaces: IP addresses of the interfaces to use; None for all.

        Raises:
            OSError: no interface supports multicast.
        """
        announcer = cls(announcement, _open(interfaces))
        try:
            await announcer.update(announcement.contact)
        except BaseException:
            await announcer.close()
            raise
        return announcer

    async def update(self, contact: Contact) -> None:
        """Announce the peer's new addresses."""
        self._announcement = replace(self._announcement, contact=contact)
        ips, port = announced(contact)
        before = self._info
        self._info = None
        if ips:
            self._info = AsyncServiceInfo(
                SERVICE,
                before.name if before else f"{self._label}.{SERVICE}",
                parsed_addresses=ips,
                port=port,
                properties=write_properties(self._announcement),
                server=f"{self._label}.local.",
            )
        if self._info is not None and before is None:
            await (await self._zeroconf.async_register_service(self._info, allow_name_change=True))
        elif self._info is not None:
            await (await self._zeroconf.async_update_service(self._info))
        elif before is not None:
            await (await self._zeroconf.async_unregister_service(before))

    async def close(self) -> None:
        """Withdraw the announcement. Idempotent."""
        await self._zeroconf.async_close()


async def find_swarms(*, seconds: float = 1.5, interfaces: Sequence[str] | None = None) -> list[LanSwarm]:
    """Return the runs announced on the local network, by name; none where multicast does not work.

    Args:
        seconds: how long to listen.
        interfaces: IP addresses of the interfaces to use; None for all.
    """
    with suppress(OSError):
        async with _open(interfaces) as zeroconf:
            return merge(await _listen(zeroconf.zeroconf, seconds))
    return []


async def _listen(zeroconf: Zeroconf, seconds: float) -> list[Announcement]:
    found: dict[str, Announcement] = {}
    queries: dict[str, asyncio.Task[None]] = {}

    async def query(name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if await info.async_request(zeroconf, 1000 * seconds):
            announcement = read_announcement(info.properties, info.parsed_addresses(), info.port)
            if announcement is not None:
                found[name] = announcement

    def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            found.pop(name, None)
        elif len(queries) < MAX_SERVICES:
            queries[name] = asyncio.create_task(query(name))

    browser = AsyncServiceBrowser(zeroconf, SERVICE, handlers=[on_change])
    try:
        await asyncio.sleep(seconds)
    finally:
        await browser.async_cancel()
        for task in queries.values():
            task.cancel()
        await asyncio.gather(*queries.values(), return_exceptions=True)
    return list(found.values())


def _open(interfaces: Sequence[str] | None) -> AsyncZeroconf:
    """Open multicast sockets on the interfaces, IPv4 and IPv6 as far as the machine has them."""
    if interfaces is not None:
        return AsyncZeroconf(interfaces=list(interfaces))
    old = [str(ip) for ip in own_ips() if ip.version == 4]
    new = [str(ip) for ip in own_ips() if ip.version == 6 and not ip.is_loopback]
    for choice in ([*old, *new], old, new):
        with suppress(OSError, RuntimeError):  # some interfaces have one version only, or no multicast
            return AsyncZeroconf(interfaces=choice)
    raise OSError("no interface of this machine supports multicast")


def _dialled(host: str) -> str:
    ip = ip_of(host)
    if ip is None or (ip.version == 6 and ip.is_link_local):  # link-local ones need an interface
        return ""
    return str(ip) if ip.version == 4 else f"[{ip.compressed}]"


def _printable(name: str) -> str:
    return "".join(filter(str.isprintable, name))[:MAX_NAME_CHARS]
