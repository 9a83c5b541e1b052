"""Swarms on the same local network announce themselves by multicast DNS and are found without an invitation.

The announcement is public there: run id, peer, addresses, whether an invitation is needed. Trust
none of it before the handshake. Each peer is one service; peers of one run are merged. Platforms
without multicast (Colab, Kaggle) find nothing, and nothing fails.
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

from colab_swarm.net.addresses import ip_of, is_loopback, own_ips, relay_of
from colab_swarm.net.peers import MAX_ADDRESSES, MAX_RUN_ID_BYTES, Contact, PeerId

SERVICE = "_colab-swarm._tcp.local."
MAX_SERVICES = 256
MAX_NAME_CHARS = 48
Access = Literal["open", "invite", "allowlist"]


@dataclass(frozen=True)
class LanSwarm:
    """A run found on the network; ``names`` are those of the peers in ``contacts``."""

    run_id: str  # the run's unique name, 64 bytes at most
    access: Access  # the run admits every peer, holders of an invitation, or accounts on its list
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
    """Decode a service's records; None if of another version, garbled or without address."""
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
    return LanSwarm(record.run, record.access, (contact,), (_printable(record.name),))


def merge(announced: Iterable[LanSwarm]) -> list[LanSwarm]:
    """Return the runs that peers announced, by name, with the access that most announce."""
    runs: dict[str, dict[PeerId, tuple[Access, Contact, str]]] = {}
    for one in announced:
        peers, (contact,), (name,) = runs.setdefault(one.run_id, {}), one.contacts, one.names
        before = peers[contact.id][1].addresses if contact.id in peers else ()
        addresses = tuple(dict.fromkeys((*before, *contact.addresses)))[:MAX_ADDRESSES]
        peers[contact.id] = one.access, Contact(contact.id, addresses), name
    found = []
    for run_id, peers in sorted(runs.items()):
        accesses, contacts, names = zip(*peers.values(), strict=True)
        found.append(LanSwarm(run_id, statistics.mode(accesses), contacts, names))
    return found


def announced(contact: Contact) -> tuple[list[str], int]:
    """Return the IP addresses and the port to announce (a service has one port); none and 0 without.

    Loopback is announced only if there is no other address: it leads every other machine to itself.
    """
    parts = [urlsplit(address) for address in contact.addresses if relay_of(address) is None]
    found = [(one.port, one.hostname or "") for one in parts if one.scheme == "ws" and one.port]
    if not (dialled := [(port, host) for port, host in found if _dialled(host)]):
        return [], 0
    port = dialled[0][0]
    ips = [host for other, host in dialled if other == port]
    return [ip for ip in ips if not is_loopback(ip)] or ips, port


class LanAnnouncer:
    """Announces one peer from its first `update` until `close`; `OSError` without multicast."""

    def __init__(self, run_id: str, access: Access, name: str, *, interfaces: Sequence[str] = ()) -> None:
        self._run_id, self._access, self._name = run_id, access, name
        self._zeroconf = _open(interfaces)
        # a random name: processes of one machine do not always hear each other's objections
        self._label = secrets.token_hex(8)
        self._info: AsyncServiceInfo | None = None

    async def update(self, contact: Contact) -> None:
        """Announce the peer's addresses, if any; takes a second at first. Raises `OSError`."""
        ips, port = announced(contact)
        try:
            if self._info is not None:
                await (await self._zeroconf.async_unregister_service(self._info))
                self._info = None
            if ips:
                self._info = AsyncServiceInfo(
                    SERVICE,
                    f"{self._label}.{SERVICE}",
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
    """Listen; return the runs announced in the local network, none without multicast."""
    names: dict[str, None] = {}

    def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed and len(names) < MAX_SERVICES:
            names[name] = None

    with suppress(OSError):
        async with _open(interfaces) as opened:
            browser = AsyncServiceBrowser(opened.zeroconf, SERVICE, handlers=[on_change])
            try:
                await asyncio.sleep(seconds)
            finally:
                await browser.async_cancel()
            said = await asyncio.gather(*(_ask(opened.zeroconf, name) for name in names))
            return merge(one for one in said if one is not None)
    return []


async def _ask(zeroconf: Zeroconf, name: str) -> LanSwarm | None:
    try:
        info = AsyncServiceInfo(SERVICE, name)
        await info.async_request(zeroconf, 500)  # ms, to ask for properties that were not announced
        return read_announcement(info.properties, info.parsed_addresses(), info.port)
    except mdns.Error:  # any device of the network may announce any name
        return None


def _open(interfaces: Sequence[str]) -> AsyncZeroconf:
    # nothing can be sent from ::1, and zeroconf would log that
    usable = interfaces or [ip for ip in map(str, own_ips()) if ip != "::1"]
    for choice in (usable, [ip for ip in usable if ":" not in ip]):
        with suppress(OSError, RuntimeError):  # of IPv6, or no multicast at all
            return AsyncZeroconf(interfaces=list(choice))
    raise OSError("no interface of this machine supports multicast")


def _dialled(host: str) -> str:
    ip = ip_of(host)
    if ip is None or (ip.version == 6 and ip.is_link_local):  # link-local ones need an interface
        return ""
    return str(ip) if ip.version == 4 else f"[{ip.compressed}]"


def _printable(name: str) -> str:
    return "".join(filter(str.isprintable, name))[:MAX_NAME_CHARS]
