"""Swarms on the same local network announce themselves by multicast DNS and are found without an invitation.

An announcement is public in this network: it has the run's id, the peer's id and addresses, and whether an invitation
is needed. Do not trust any of it before the handshake. Each peer is one service, and peers of one run are merged.
On platforms without multicast (Colab, Kaggle) nothing is found, and no error is raised.
"""

import asyncio
import secrets
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
import zeroconf as mdns
from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from colab_swarm.net.addresses import in_url, ip_of, is_loopback, own_ips, relay_of
from colab_swarm.net.peers import MAX_ADDRESSES, MAX_RUN_ID_BYTES, Contact, PeerId

_SERVICE = "_colab-swarm._tcp.local."
_MAX_SERVICES = 256
_MAX_NAME_CHARS = 48
_ASK_TIMEOUT_MS = 500
Access = Literal["open", "invite", "allowlist"]


@dataclass(frozen=True)
class LanSwarm:
    """A run found on the network.

    Attributes:
        run_id: the run's unique name, at most 64 bytes.
        access: whether the run admits every peer, holders of an invitation, or accounts on its list.
        contacts, names: contacts and names of its peers, in the same order.
    """

    run_id: str
    access: Access
    contacts: tuple[Contact, ...]
    names: tuple[str, ...]

    @property
    def run(self) -> str:
        return self.run_id.rpartition("-")[0] or self.run_id


def write_properties(run_id: str, access: Access, name: str, peer: PeerId) -> dict[str, str]:
    """Return a service's TXT record, under 300 bytes; ``name`` is cut to 48 characters."""
    return {"v": "1", "run": run_id, "access": access, "peer": peer.hex(), "name": _printable(name)}


class _Record(msgspec.Struct):
    v: Literal["1"]
    run: Annotated[str, msgspec.Meta(min_length=1)]
    access: Access
    peer: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    name: str = ""


def read_announcement(
    properties: Mapping[bytes, bytes | None], ips: Iterable[str], port: int | None
) -> LanSwarm | None:
    """Decode a service's records; None if they are of another version, cannot be read or have no address."""
    try:
        text = {key.decode(): (value or b"").decode() for key, value in properties.items()}
        record = msgspec.convert(text, _Record)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return None
    hosts = dict.fromkeys(map(_host_of_url, ips))
    addresses = [f"ws://{host}:{port}" for host in hosts if host and port]
    run_is_valid = len(record.run.encode()) <= MAX_RUN_ID_BYTES and record.run.isprintable()
    if not addresses or not run_is_valid:
        return None
    peer = PeerId(bytes.fromhex(record.peer))
    contact = Contact(peer, tuple(addresses[:MAX_ADDRESSES]))
    return LanSwarm(record.run, record.access, (contact,), (_printable(record.name),))


def merge(announced: Iterable[LanSwarm]) -> list[LanSwarm]:
    """Return the runs that peers announced, sorted by run id, each with the access that most of its peers announce."""
    runs: dict[str, dict[PeerId, tuple[Access, Contact, str]]] = {}
    for announcement in announced:
        peers = runs.setdefault(announcement.run_id, {})
        (contact,) = announcement.contacts
        (name,) = announcement.names
        earlier = Contact(contact.id)
        if contact.id in peers:
            _, earlier, _ = peers[contact.id]
        addresses = dict.fromkeys((*earlier.addresses, *contact.addresses))
        merged = Contact(contact.id, tuple(addresses)[:MAX_ADDRESSES])
        peers[contact.id] = (announcement.access, merged, name)
    swarms = []
    for run_id, peers in sorted(runs.items()):
        accesses, contacts, names = zip(*peers.values(), strict=True)
        swarms.append(LanSwarm(run_id, statistics.mode(accesses), contacts, names))
    return swarms


def announced(contact: Contact) -> tuple[list[str], int]:
    """Return the IP addresses and the port to announce, or no address and port 0. A service has only one port.

    Loopback is announced only if there is no other address, because it leads every other machine to itself.
    """
    ips_by_port: dict[int, list[str]] = {}
    for address in contact.addresses:
        url = urlsplit(address)
        direct = url.scheme == "ws" and relay_of(address) is None
        if direct and url.port and _host_of_url(url.hostname or ""):
            ips_by_port.setdefault(url.port, []).append(url.hostname or "")
    if not ips_by_port:
        return [], 0
    # The first address is the best one, so its port is announced.
    port, ips = next(iter(ips_by_port.items()))
    reachable = [ip for ip in ips if not is_loopback(ip)]
    return reachable or ips, port


class LanAnnouncer:
    """Announces one peer from the first `update` until `close`; raises `OSError` without multicast."""

    def __init__(self, run_id: str, access: Access, name: str, *, interfaces: Sequence[str] = ()) -> None:
        self._run_id = run_id
        self._access = access
        self._name = name
        self._zeroconf = _open(interfaces)
        # The label is random, because processes on one machine do not always receive each other's claims to a name.
        self._label = secrets.token_hex(8)
        self._info: AsyncServiceInfo | None = None

    async def update(self, contact: Contact) -> None:
        """Announce the peer's addresses, if it has any; the first call takes a second. Raises `OSError`."""
        ips, port = announced(contact)
        try:
            if self._info is not None:
                await (await self._zeroconf.async_unregister_service(self._info))
                self._info = None
            if ips:
                self._info = AsyncServiceInfo(
                    _SERVICE,
                    f"{self._label}.{_SERVICE}",
                    parsed_addresses=ips,
                    port=port,
                    properties=write_properties(self._run_id, self._access, self._name, contact.id),
                    server=f"{self._label}.local.",
                )
                await (await self._zeroconf.async_register_service(self._info))
        except mdns.Error as error:
            raise OSError(f"multicast DNS failed: {error!r}") from error

    async def close(self) -> None:
        await self._zeroconf.async_close()


async def find_swarms(*, seconds: float = 1.5, interfaces: Sequence[str] = ()) -> list[LanSwarm]:
    """Listen for some ``seconds``; return the runs announced in the local network, or none without multicast."""
    names: dict[str, None] = {}

    def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed and len(names) < _MAX_SERVICES:
            names[name] = None

    with suppress(OSError):
        async with _open(interfaces) as opened:
            browser = AsyncServiceBrowser(opened.zeroconf, _SERVICE, handlers=[on_change])
            try:
                await asyncio.sleep(seconds)
            finally:
                await browser.async_cancel()
            answers = await asyncio.gather(*(_ask(opened.zeroconf, name) for name in names))
            return merge(swarm for swarm in answers if swarm is not None)
    return []


async def _ask(zeroconf: Zeroconf, name: str) -> LanSwarm | None:
    try:
        info = AsyncServiceInfo(_SERVICE, name)
        # Asks for properties that were not in the announcement.
        await info.async_request(zeroconf, _ASK_TIMEOUT_MS)
        return read_announcement(info.properties, info.parsed_addresses(), info.port)
    except mdns.Error:
        # Any device of the network may announce any name.
        return None


def _open(interfaces: Sequence[str]) -> AsyncZeroconf:
    # Without ::1, from which nothing can be sent: zeroconf would log an error.
    usable = interfaces or [ip for ip in map(str, own_ips()) if ip != "::1"]
    only_ipv4 = [ip for ip in usable if ":" not in ip]
    for choice in (usable, only_ipv4):
        # There may be no multicast for IPv6, or none at all.
        with suppress(OSError, RuntimeError):
            return AsyncZeroconf(interfaces=list(choice))
    raise OSError("no interface of this machine supports multicast")


def _host_of_url(host: str) -> str:
    """Return an IP address as it is written in a URL; "" for a name, or for an address that needs an interface."""
    ip = ip_of(host)
    if ip is None or (ip.version == 6 and ip.is_link_local):
        return ""
    return in_url(ip)


def _printable(name: str) -> str:
    return "".join(filter(str.isprintable, name))[:_MAX_NAME_CHARS]
