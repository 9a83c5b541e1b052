"""Addresses to dial, to dial for others, and of visitors."""

import contextlib
import errno
import ipaddress
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import ifaddr
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from colab_swarm.errors import PortError
from colab_swarm.net.peers import CIRCUIT, MAX_ADDRESSES, Contact, PeerId, remember

MAX_BOOK_ENTRIES = 20_000
MAX_ADDRESS_CHARS = 256
MAX_SOURCES = 4096  # beyond that the source that has been quiet for longest is dropped
_ID = re.compile(r"[0-9a-f]{64}")
_HOST = r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?"
_ADDRESS, _IROH = re.compile(f"wss?://{_HOST}"), re.compile(f"iroh://[0-9a-f]{{64}}@{_HOST}")
IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_LOCAL_4 = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 169.254.0.0/16 127.0.0.0/8"
_LOCAL = [ipaddress.ip_network(one) for one in f"{_LOCAL_4} fc00::/7 fe80::/10 ::1/128".split()]


def relay_of(address: str) -> Contact | None:
    """Return the relay of a circuit's address, and where to dial it; None for other addresses."""
    entry, _, relay = address.partition(CIRCUIT)
    if not (_ADDRESS.fullmatch(entry) and host_of(entry) and _ID.fullmatch(relay)):
        return None
    return Contact(PeerId(bytes.fromhex(relay)), (entry,))


def is_address(text: str) -> bool:
    """Return True for ``ws://HOST:PORT``, a circuit through a relay there, or ``iroh://ENDPOINT_ID@HOST``.

    No other path is allowed: a stranger could have us call the API of any web server.
    """
    if len(text) > MAX_ADDRESS_CHARS:
        return False
    return bool(((_ADDRESS.fullmatch(text) or is_iroh(text)) and host_of(text)) or relay_of(text))


def is_iroh(address: str) -> bool:
    return _IROH.fullmatch(address) is not None


def host_of(address: str) -> str:
    """Return the host in an address or URL, without brackets; "" if there is none, as in ``ws://[1:2]``."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def ip_of(host: str) -> IP | None:
    """Return the IP address in its one spelling; None if ``host`` is a name."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def is_local(host: str) -> bool:
    """Return True for an IP address of this machine, a home or office network, or a carrier's NAT."""
    return (ip := ip_of(host)) is not None and any(ip in network for network in _LOCAL)


def is_loopback(host: str) -> bool:
    return (ip := ip_of(host)) is not None and ip.is_loopback


def may_dial_back(address: str, seen: str) -> bool:
    """Return True if a peer may have us dial ``address``: only at the IP address ``seen`` where we see it.

    Otherwise it could have us connect to other people's machines, or to those of our own network
    (SSRF). So names are not dialled, and nothing if ``seen`` is "". This machine's addresses are one.
    """
    one, two = ip_of(host_of(address)), ip_of(seen)
    if not _ADDRESS.fullmatch(address) or one is None or two is None:
        return False
    own = own_ips()
    return one == two or all(ip.is_loopback or ip in own for ip in (one, two))


def only_local(contacts: Iterable[Contact]) -> bool:
    """Return True if there are addresses and all are private: no peer outside this network can dial one."""
    hosts = [host_of(address) for contact in contacts for address in contact.addresses]
    return bool(hosts) and all(map(is_local, hosts))


@contextlib.contextmanager
def listening(port: int) -> Iterator[None]:
    """Raise a `PortError` that names the port if the block fails to listen on it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"port {port} of this machine is taken, by another program or by an earlier run of this cell: choose "
                f"another port, or 0 for a free one. `lsof -i :{port}` names the program"
            ) from error
        if error.errno == errno.EACCES:
            raise PortError(f"this user may not listen on port {port}: choose one from 1024 on") from error
        raise


def reachable_addresses(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses of a server that listens on ``host``; an empty host stands for every interface.

    Loopback comes first, where others are refused at once; then public addresses, IPv4 before IPv6.
    """
    if host not in ("0.0.0.0", ""):
        return (f"ws://{host}:{port}",)
    usable = {ip for ip in own_ips() if not (ip.is_link_local or ip.is_loopback)}
    if host == "0.0.0.0":
        usable = {ip for ip in usable if ip.version == 4}
    ordered = sorted(usable, key=lambda ip: (is_local(str(ip)), ip.version, int(ip)))
    hosts = ("127.0.0.1", *(str(ip) if ip.version == 4 else f"[{ip}]" for ip in ordered))
    return tuple(f"ws://{one}:{port}" for one in hosts[:MAX_ADDRESSES])


def own_ips() -> set[IP]:
    ips = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    return {ipaddress.ip_address(ip if isinstance(ip, str) else ip[0]) for ip in ips}


class AddressBook:
    """Contacts by peer, the 20,000 used last; addresses that a peer announced itself come first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[PeerId, tuple[Contact, int]] = OrderedDict()  # how many it announced

    def learn(self, contact: Contact) -> None:
        """Add addresses that another peer reported; invalid ones are left out."""
        known, announced = self._entries.pop(contact.id, (Contact(contact.id), 0))
        if contact.addresses != known.addresses[: len(contact.addresses)]:
            usable = filter(is_address, contact.addresses[:MAX_ADDRESSES])
            addresses = dict.fromkeys((*known.addresses[:announced], *usable, *known.addresses))
            known = Contact(contact.id, tuple(addresses)[:MAX_ADDRESSES])
        if known.addresses:
            remember(self._entries, contact.id, (known, announced), MAX_BOOK_ENTRIES)

    def replace(self, contact: Contact) -> None:
        """Replace all addresses by those that the peer announced itself."""
        self._entries.pop(contact.id, None)
        self.learn(contact)
        known = self.find(contact.id)
        if known.addresses:
            self._entries[contact.id] = known, len(known.addresses)

    def find(self, peer: PeerId) -> Contact:
        return self._entries[peer][0] if peer in self._entries else Contact(peer)


class VisitLimit:
    """Limits each source, a peer or a `source_of`, to ``most`` requests in ``window_s``. No I/O."""

    def __init__(self, most: int, window_s: float = 1.0) -> None:
        self._most, self._window_s = most, window_s
        self._visits: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def admit(self, source: Hashable, now: float) -> bool:
        """Count a request at ``now`` (monotonic seconds); return whether it is allowed."""
        began_at, count = self._visits.get(source, (now, 0))
        if now - began_at >= self._window_s:
            began_at, count = now, 0
        remember(self._visits, source, (began_at, count + 1), MAX_SOURCES)
        return count < self._most

    def forgive(self, source: Hashable) -> None:
        self._visits.pop(source, None)


class VisitorLogger(logging.LoggerAdapter[logging.Logger]):
    """For aiohttp's servers: a visitor's bad request is a DEBUG line, and their number one INFO line a minute."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("colab_swarm.http"), {})
        self._bad, self._told_at = 0, time.monotonic()

    def debug(self, msg: object, *args: object, exc_info: Any = None, **more: Any) -> None:
        if exc_info is None:
            super().debug(msg, *args, **more)
        else:
            self.exception(msg, *args, exc_info=exc_info, **more)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if not isinstance(exc_info, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            super().exception(msg, *args, exc_info=exc_info, **more)
            return
        self.debug(f"{msg}: %s", *args, exc_info)
        self._bad += 1
        if (now := time.monotonic()) - self._told_at >= 60.0:
            self.info("%d bad requests in the last %.0f s", self._bad, now - self._told_at)
            self._bad, self._told_at = 0, now


def source_of(request: web.BaseRequest) -> str:
    """Return the visitor's network: its IPv4 address, or the /64 of its IPv6 address.

    An agent or proxy on this machine appends the visitor's address to ``X-Forwarded-For``, into which
    visitors can write too: only the last entry counts, and only if the request comes from loopback.
    """
    host, prefix = request.remote or "", ""
    if is_loopback(host) and "X-Forwarded-For" in request.headers:
        host = request.headers.getall("X-Forwarded-For")[-1].rpartition(",")[2].strip()
        prefix = "forwarded "
    return f"{prefix}{network_of(host)}"


def network_of(host: str) -> str:
    """Return an IPv4 address, or the /64 of an IPv6 address, which one host can fill; "" for others."""
    ip = ip_of(host)
    return str((ip if ip is None or ip.version == 4 else ipaddress.ip_network((ip, 64), strict=False)) or "")
