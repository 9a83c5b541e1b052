"""Addresses: which ones this peer dials, and dials back for others; its own addresses; the networks of visitors."""

import errno
import ipaddress
import logging
import re
import socket
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import ifaddr
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from colab_swarm.errors import PortError
from colab_swarm.net.peers import CIRCUIT, MAX_ADDRESSES, Contact, PeerId, remember

MAX_BOOK_ENTRIES = 20_000
_MAX_ADDRESS_CHARS = 256
_ID = re.compile(r"[0-9a-f]{64}")
_HOST = r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?"
_ADDRESS = re.compile(f"wss?://{_HOST}")
_IROH = re.compile(f"iroh://[0-9a-f]{{64}}@{_HOST}")
IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_LOCAL_4 = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 169.254.0.0/16 127.0.0.0/8"
_LOCAL_6 = "fc00::/7 fe80::/10 ::1/128"
_LOCAL = [ipaddress.ip_network(network) for network in f"{_LOCAL_4} {_LOCAL_6}".split()]


def relay_of(address: str) -> Contact | None:
    """Return the relay in a circuit's address, with the address at which to dial it; None for other addresses."""
    entry, _, relay = address.partition(CIRCUIT)
    direct = _ADDRESS.fullmatch(entry) is not None and host_of(entry) != ""
    if not direct or _ID.fullmatch(relay) is None:
        return None
    return Contact(PeerId(bytes.fromhex(relay)), (entry,))


def is_address(text: str) -> bool:
    """Return True for ``ws://HOST:PORT``, a circuit through a relay there, or ``iroh://ENDPOINT_ID@HOST``.

    No other path is allowed, because a stranger could use it to make this peer call the API of any web server.
    """
    if len(text) > _MAX_ADDRESS_CHARS:
        return False
    if _ADDRESS.fullmatch(text) or is_iroh(text):
        return host_of(text) != ""
    return relay_of(text) is not None


def is_iroh(address: str) -> bool:
    return _IROH.fullmatch(address) is not None


def host_of(address: str) -> str:
    """Return the host in an address or URL, without brackets; "" if there is none, as in ``ws://[1:2]``."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def ip_of(host: str) -> IP | None:
    """Return the IP address in normal form; None if ``host`` is a name."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def is_local(host: str) -> bool:
    """Return True for an IP address of this machine, a home or office network, or a carrier's NAT."""
    ip = ip_of(host)
    return ip is not None and any(ip in network for network in _LOCAL)


def is_loopback(host: str) -> bool:
    ip = ip_of(host)
    return ip is not None and ip.is_loopback


def may_dial_back(address: str, seen: str) -> bool:
    """Return True if this peer may dial ``address`` because another peer asks for it.

    This is only allowed at ``seen``, the IP address from which the other peer is linked. Otherwise the other peer could
    make this one connect to other people's machines, or to machines of this peer's own network (SSRF). So names are
    never dialled, and nothing is dialled if ``seen`` is "". All addresses of this machine count as one address.
    """
    if _ADDRESS.fullmatch(address) is None:
        return False
    target_ip = ip_of(host_of(address))
    seen_ip = ip_of(seen)
    if target_ip is None or seen_ip is None:
        return False
    if target_ip == seen_ip:
        return True
    machine_ips = own_ips()
    return all(ip.is_loopback or ip in machine_ips for ip in (target_ip, seen_ip))


def only_local(contacts: Iterable[Contact]) -> bool:
    """Return True if there are addresses and all of them are private, so that no peer outside this network can dial."""
    hosts = [host_of(address) for contact in contacts for address in contact.addresses]
    return bool(hosts) and all(map(is_local, hosts))


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host``; an empty host means every interface, IPv4 and IPv6, on one port.

    Port 0 chooses a free port. Raises `PortError` if the port is taken or not allowed.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            # asyncio and aiohttp would open two sockets; with port 0, these would have two different ports
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            except OSError as error:
                is_switched_off = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not is_switched_off:
                    raise
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host or "0.0.0.0", port), family=family)
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
    """Return the addresses of a server that listens on ``host``; an empty host means every interface.

    Loopback comes first, because peers on other machines are refused there immediately. Then come public addresses,
    then private ones; in each group IPv4 is before IPv6.
    """
    if host not in ("0.0.0.0", ""):
        return (f"ws://{host}:{port}",)
    usable = {ip for ip in own_ips() if not (ip.is_link_local or ip.is_loopback)}
    if host == "0.0.0.0":
        usable = {ip for ip in usable if ip.version == 4}
    ordered = sorted(usable, key=lambda ip: (is_local(str(ip)), ip.version, int(ip)))
    hosts = ["127.0.0.1", *map(in_url, ordered)]
    return tuple(f"ws://{host}:{port}" for host in hosts[:MAX_ADDRESSES])


def in_url(ip: IP) -> str:
    """Return an IP address as it is written in a URL; an IPv6 address is in brackets."""
    return str(ip) if ip.version == 4 else f"[{ip}]"


def may_dial(host: str) -> bool:
    """Return False for an address in a private block, such as 192.168.0.0/16, in which this machine has no address.

    Otherwise an invitation, or another peer, could make this peer call servers of other private networks. Other subnets
    of the same block may be dialled, because offices and VPNs have routes to them.
    """
    ip = ip_of(host)
    if ip is None or ip.is_loopback:
        return True
    blocks = [network for network in _LOCAL if ip in network]
    return not blocks or any(own in block for own in own_ips() for block in blocks)


def own_ips() -> set[IP]:
    """Return the IP addresses of this machine's interfaces."""
    ips: set[IP] = set()
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            # An IPv6 address comes as a tuple with its flow and scope.
            text = entry.ip if isinstance(entry.ip, str) else entry.ip[0]
            ips.add(ipaddress.ip_address(text))
    return ips


class AddressBook:
    """Contacts by peer, for the 20,000 peers used last; addresses that a peer announced itself come first."""

    def __init__(self) -> None:
        # Each peer's contact, and how many of its addresses the peer announced itself.
        self._entries: OrderedDict[PeerId, tuple[Contact, int]] = OrderedDict()

    def learn(self, contact: Contact) -> None:
        """Add addresses that another peer reported; invalid ones are left out."""
        entry, announced = self._entries.pop(contact.id, (Contact(contact.id), 0))
        if contact.addresses != entry.addresses[: len(contact.addresses)]:
            usable = filter(is_address, contact.addresses[:MAX_ADDRESSES])
            addresses = dict.fromkeys((*entry.addresses[:announced], *usable, *entry.addresses))
            entry = Contact(contact.id, tuple(addresses)[:MAX_ADDRESSES])
        if entry.addresses:
            remember(self._entries, contact.id, (entry, announced), MAX_BOOK_ENTRIES)

    def replace(self, contact: Contact) -> None:
        """Replace all addresses by those that the peer announced itself."""
        self._entries.pop(contact.id, None)
        self.learn(contact)
        entry = self.find(contact.id)
        if entry.addresses:
            self._entries[contact.id] = (entry, len(entry.addresses))

    def find(self, peer: PeerId) -> Contact:
        if peer not in self._entries:
            return Contact(peer)
        contact, _ = self._entries[peer]
        return contact


class VisitorLogger(logging.LoggerAdapter[logging.Logger]):
    """For aiohttp's servers: logs a visitor's bad request at level DEBUG, and an error of this peer at level ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("colab_swarm.http"), {})

    def debug(self, msg: object, *args: object, exc_info: Any = None, **options: Any) -> None:
        if exc_info is None:
            super().debug(msg, *args, **options)
        else:
            self.exception(msg, *args, exc_info=exc_info, **options)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **options: Any) -> None:
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            self.debug(f"{msg}: %s", *args, exc_info)
        else:
            super().exception(msg, *args, exc_info=exc_info, **options)


def source_of(request: web.BaseRequest) -> str:
    """Return the visitor's network: its IPv4 address, or the /64 of its IPv6 address.

    An agent or proxy on this machine appends the visitor's address to ``X-Forwarded-For``. Visitors can write into
    this header, too, so only its last entry counts, and only if the request comes from loopback.
    """
    host = request.remote or ""
    if is_loopback(host) and "X-Forwarded-For" in request.headers:
        last_header = request.headers.getall("X-Forwarded-For")[-1]
        visitor = last_header.rpartition(",")[2].strip()
        return f"forwarded {network_of(visitor)}"
    return network_of(host)


def network_of(host: str) -> str:
    """Return an IPv4 address, or an IPv6 address's /64 network, because one host can use all of it; "" for a name."""
    ip = ip_of(host)
    if ip is None:
        return ""
    if ip.version == 4:
        return str(ip)
    return str(ipaddress.ip_network((ip, 64), strict=False))
