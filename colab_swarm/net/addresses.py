"""Which addresses others can try to dial."""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict

import ifaddr

from colab_swarm.net.hello import MAX_ADDRESSES
from colab_swarm.net.peers import Contact, PeerId

MAX_BOOK_ENTRIES = 20_000
MAX_ADDRESS_CHARS = 256
_ADDRESS = re.compile(r"wss?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


def is_address(text: str) -> bool:
    """Whether this is ``ws://HOST:PORT``; with a path, a stranger could have us call any web server's API."""
    return len(text) <= MAX_ADDRESS_CHARS and _ADDRESS.fullmatch(text) is not None


def reachable_addresses(host: str, port: int) -> tuple[str, ...]:
    """The dial addresses of a server that listens on ``host``: of every interface if that is ``0.0.0.0``.

    Loopback comes first: peers on the same machine succeed at once, others are refused at once.
    """
    if host not in ("0.0.0.0", ""):
        return (f"ws://{host}:{port}",)
    found = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if isinstance(ip.ip, str)]
    usable = {ip for ip in found if not ipaddress.ip_address(ip).is_link_local} | {"127.0.0.1"}
    ordered = sorted(usable, key=lambda ip: (not ipaddress.ip_address(ip).is_loopback, ip))
    return tuple(f"ws://{ip}:{port}" for ip in ordered[:MAX_ADDRESSES])


class AddressBook:
    """Contacts by peer; the ones not heard of for longest are dropped beyond 20,000."""

    def __init__(self) -> None:
        self._contacts: OrderedDict[PeerId, Contact] = OrderedDict()

    def learn(self, contact: Contact) -> None:
        """Remember the addresses, before those known already; what is none is left out."""
        known = self.find(contact.id).addresses
        if contact.addresses and contact.addresses != known[: len(contact.addresses)]:
            usable = filter(is_address, contact.addresses[:MAX_ADDRESSES])
            addresses = tuple(dict.fromkeys((*usable, *known)))[:MAX_ADDRESSES]
            self._contacts[contact.id] = Contact(contact.id, addresses)
        if contact.id in self._contacts:
            self._contacts.move_to_end(contact.id)
        if len(self._contacts) > MAX_BOOK_ENTRIES:
            self._contacts.popitem(last=False)

    def replace(self, contact: Contact) -> None:
        """Take the peer's own word for where it is."""
        self._contacts.pop(contact.id, None)
        self.learn(contact)

    def find(self, peer: PeerId) -> Contact:
        """What is known; an empty contact if nothing."""
        return self._contacts.get(peer, Contact(peer))
