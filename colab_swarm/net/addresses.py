"""Which addresses others can try to dial."""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

import ifaddr

from colab_swarm.net.hello import MAX_ADDRESSES
from colab_swarm.net.peers import CIRCUIT, Contact, PeerId

MAX_BOOK_ENTRIES = 20_000
MAX_ADDRESS_CHARS = 256
_ID = re.compile(r"[0-9a-f]{64}")
_ADDRESS = re.compile(r"wss?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_LOCAL = [
    ipaddress.ip_network(network)
    for network in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
        *("fc00::/7", "fe80::/10", "::1/128"),
    )
]


class CircuitAddress(NamedTuple):
    """A way to a peer through a relay: the relay, with the one address to dial it at."""

    relay: Contact

    @classmethod
    def parse(cls, address: str) -> CircuitAddress | None:
        """The circuit that an address names; None if it names none."""
        entry, found, relay = address.partition(CIRCUIT)
        if not (found and _ADDRESS.fullmatch(entry) and _ID.fullmatch(relay)):
            return None
        return cls(Contact(PeerId(bytes.fromhex(relay)), (entry,)))

    def __str__(self) -> str:
        return f"{self.relay.addresses[0]}{CIRCUIT}{self.relay.id.hex()}"


def is_address(text: str) -> bool:
    """Whether this is ``ws://HOST:PORT``, or a circuit through a relay there.

    With any other path, a stranger could have us call any web server's API.
    """
    if len(text) > MAX_ADDRESS_CHARS:
        return False
    return _ADDRESS.fullmatch(text) is not None or CircuitAddress.parse(text) is not None


def host_of(address: str) -> str:
    """The host in ``ws://HOST:PORT``, without brackets."""
    return urlsplit(address).hostname or ""


def is_ip(host: str) -> bool:
    """Whether this is an IP address, which names no other host than it says."""
    return _ip(host) is not None


def is_local(host: str) -> bool:
    """Whether this is an IP address of the machine itself, a home or office network, or a carrier's NAT."""
    ip = _ip(host)
    return ip is not None and any(ip in network for network in _LOCAL)


def is_public(host: str) -> bool:
    """Return True if this is an IP address of one machine on the internet."""
    ip = _ip(host)
    return ip is not None and ip.is_global and not ip.is_multicast


def is_loopback(host: str) -> bool:
    """Whether this is an address of the machine itself."""
    ip = _ip(host)
    return ip is not None and ip.is_loopback


def same_host(host: str, other: str) -> bool:
    """Return True if both IP addresses are one machine's: they are equal, or both are this machine's own."""
    one, two = _ip(host), _ip(other)
    if one is None or two is None:
        return False
    own = _own_ips()
    return one == two or all(ip.is_loopback or ip in own for ip in (one, two))


def may_dial_back(address: str, seen: str) -> bool:
    """Return True if a peer that is seen at ``seen`` may have us dial ``address``: only where it is seen itself.

    Otherwise it could have us knock at machines of other people, or at those of our own network (SSRF).

    Args:
        address: what the peer says of itself.
        seen: its IP address as we see it; "" behind a relay or a tunnel, where nothing may be dialled.
    """
    return is_address(address) and CircuitAddress.parse(address) is None and same_host(host_of(address), seen)


def only_local(contacts: Iterable[Contact]) -> bool:
    """Return True if there are addresses and all are private: nobody outside this network can dial one."""
    hosts = [host_of(address) for contact in contacts for address in contact.addresses]
    return bool(hosts) and all(map(is_local, hosts))


def reachable_addresses(host: str, port: int) -> tuple[str, ...]:
    """The dial addresses of a server that listens on ``host``: of every interface if that is empty.

    Loopback comes first: peers on the same machine succeed at once, others are refused at once. Public addresses
    come next, IPv4 before IPv6.
    """
    if host not in ("0.0.0.0", ""):
        return (f"ws://{host}:{port}",)
    usable = {ip for ip in _own_ips() if not ip.is_link_local and not ip.is_loopback}
    if host == "0.0.0.0":
        usable = {ip for ip in usable if ip.version == 4}
    ordered = sorted(usable, key=lambda ip: (is_local(str(ip)), ip.version, int(ip)))
    hosts = ("127.0.0.1", *(str(ip) if ip.version == 4 else f"[{ip}]" for ip in ordered))
    return tuple(f"ws://{one}:{port}" for one in hosts[:MAX_ADDRESSES])


def _own_ips() -> set[IP]:
    """Of this machine's interfaces."""
    texts = [
        ip.ip if isinstance(ip.ip, str) else ip.ip[0]
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    ]
    return {ipaddress.ip_address(text) for text in texts}


def _ip(host: str) -> IP | None:
    """The IP address, of which there is one spelling; None if this is a name."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


class AddressBook:
    """Contacts by peer; the ones not heard of for longest are dropped beyond 20,000.

    What a peer says of itself stays before what others say, so that hearsay cannot push it out.
    """

    def __init__(self) -> None:
        self._contacts: OrderedDict[PeerId, Contact] = OrderedDict()
        self._first_hand: dict[PeerId, tuple[str, ...]] = {}

    def learn(self, contact: Contact) -> None:
        """Remember the addresses, before older hearsay; what is none is left out."""
        known = self.find(contact.id).addresses
        if contact.addresses and contact.addresses != known[: len(contact.addresses)]:
            usable = filter(is_address, contact.addresses[:MAX_ADDRESSES])
            own = self._first_hand.get(contact.id, ())
            addresses = tuple(dict.fromkeys((*own, *usable, *known)))[:MAX_ADDRESSES]
            self._contacts[contact.id] = Contact(contact.id, addresses)
        if contact.id in self._contacts:
            self._contacts.move_to_end(contact.id)
        if len(self._contacts) > MAX_BOOK_ENTRIES:
            dropped, _ = self._contacts.popitem(last=False)
            self._first_hand.pop(dropped, None)

    def replace(self, contact: Contact) -> None:
        """Take the peer's own word for where it is."""
        self._contacts.pop(contact.id, None)
        self._first_hand.pop(contact.id, None)
        self.learn(contact)
        if contact.id in self._contacts:
            self._first_hand[contact.id] = self._contacts[contact.id].addresses

    def find(self, peer: PeerId) -> Contact:
        """What is known; an empty contact if nothing."""
        return self._contacts.get(peer, Contact(peer))
