"""What DHTs say to each other. Keys and targets are 32 bytes, like peers' ids."""

from __future__ import annotations

from colab_swarm.dht.records import Record
from colab_swarm.net.peers import Contact, Message


class FindPeers(Message, frozen=True):
    """Which peers near ``target`` do you know?"""

    target: bytes
    asker: Contact


class FoundPeers(Message, frozen=True):
    """The nearest known, nearest first."""

    contacts: tuple[Contact, ...]


class FindValue(Message, frozen=True):
    """What do you hold under ``key``, and which peers near it do you know?"""

    key: bytes
    asker: Contact


class FoundValue(Message, frozen=True):
    """All records held under the key, and the nearest peers known."""

    records: tuple[Record, ...]
    contacts: tuple[Contact, ...]


class Fetch(Message, frozen=True):
    """What do you hold under ``key``? If nothing, ask on: at peers nearer to it, ``relays`` in a row at most."""

    key: bytes
    relays: int


class Fetched(Message, frozen=True):
    """All records of the first peer found to hold any, and how many queries in a row it took after this one."""

    records: tuple[Record, ...]
    hops: int


class Store(Message, frozen=True):
    """Hold these records; ``at`` is the sender's swarm time."""

    key: bytes
    records: tuple[Record, ...]
    asker: Contact
    at: float


class Stored(Message, frozen=True):
    """For each record why it was refused, or an empty text; and the nearest peers known."""

    refusals: tuple[str, ...]
    contacts: tuple[Contact, ...]
