"""Addresses that are dialled, kept and announced; visitors of public pages: none may lock out another."""

import errno
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from socket import AF_INET
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.abc import ResolveResult
from multidict import CIMultiDict

from colab_swarm.errors import PeerUnreachable, PortError
from colab_swarm.net import addresses
from colab_swarm.net.addresses import (
    AddressBook,
    listening_socket,
    may_dial,
    may_dial_back,
    reachable_addresses,
    source_of,
)
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.patience import VisitLimit
from colab_swarm.net.peers import MAX_ADDRESSES, Contact, PeerId
from tests.net.swarm import Echo, peers

BOB = PeerId(b"b" * 32)
LONGEST = "ws://" + "h" * 251
WRONG = "ws://h:1/shutdown ws://me@h:1 http://h:1 ws://h:1?a ws://[1:2]:80 ws://h:1/relay/ab"


def test_a_server_on_all_interfaces_is_reached_by_loopback_first() -> None:
    first, *others = reachable_addresses("0.0.0.0", 4500)
    assert first == "ws://127.0.0.1:4500"
    assert all(address.endswith(":4500") and "[" not in address for address in others)
    assert first not in others
    assert reachable_addresses("192.0.2.7", 4500) == ("ws://192.0.2.7:4500",)


def test_a_peers_own_word_replaces_what_others_told_of_which_the_newest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "MAX_BOOK_ENTRIES", 2)
    book = AddressBook()
    for number in range(30):
        book.learn(Contact(BOB, (f"ws://{number}",)))
    book.learn(Contact(BOB))  # an empty one changes nothing
    assert book.find(BOB).addresses == tuple(f"ws://{n}" for n in range(29, 29 - MAX_ADDRESSES, -1))
    book.replace(Contact(BOB, ("ws://own",)))
    assert book.find(BOB).addresses == ("ws://own",)
    book.replace(Contact(BOB))
    assert book.find(BOB) == Contact(BOB)
    others = [PeerId(name * 32) for name in (b"a", b"c", b"d")]
    for other in others:
        book.learn(Contact(other, ("ws://a",)))
    assert [bool(book.find(other).addresses) for other in others] == [False, True, True]


@pytest.mark.parametrize("wrong", [*WRONG.split(), "", f"{LONGEST}h"])
def test_what_is_no_address_is_neither_kept_nor_announced(wrong: str) -> None:
    book = AddressBook()
    book.learn(Contact(BOB, (wrong, "wss://[::1]:4500", LONGEST)))
    assert book.find(BOB).addresses == ("wss://[::1]:4500", LONGEST)
    with pytest.raises(ValueError, match="is not an address"):
        NodeSettings(announce=(wrong,))


def test_settings_that_no_peer_could_use_are_mistakes() -> None:
    NodeSettings(announce=("ws://h:1",) * 16, port=65535, run_id="x" * 64)
    with pytest.raises(ValueError, match="are over 16"):
        NodeSettings(announce=("ws://h:1",) * 17)
    with pytest.raises(ValueError, match="port=65536"):
        NodeSettings(port=65536)
    with pytest.raises(ValueError, match="over 64 bytes"):
        NodeSettings(run_id="x" * 65)


def test_a_source_has_its_own_limit_and_the_quietest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = VisitLimit(2)
    assert [limit.admit("alice", 5.0) for _ in range(3)] == [True, True, False]
    assert limit.admit("bob", 5.5) and not limit.admit("alice", 5.9) and limit.admit("alice", 6.0)
    limit.forgive("bob")
    assert limit.admit("bob", 6.4) and limit.admit("bob", 6.4)
    monkeypatch.setattr("colab_swarm.net.patience.MAX_SOURCES", 2)
    limit = VisitLimit(1)
    assert limit.admit("alice", 0.0) and limit.admit("bob", 0.0) and not limit.admit("alice", 0.0)
    assert limit.admit("carol", 0.0) and not limit.admit("alice", 0.0) and limit.admit("bob", 0.0)


@pytest.mark.parametrize(
    ("remote", "headers", "source"),
    [
        ("203.0.113.9", {}, "203.0.113.9"),
        ("203.0.113.9", {"X-Forwarded-For": "198.51.100.7"}, "203.0.113.9"),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.1, 198.51.100.7"}, "forwarded 198.51.100.7"),
        ("::1", {"X-Forwarded-For": "127.0.0.1"}, "forwarded 127.0.0.1"),
        ("::ffff:203.0.113.9", {}, "203.0.113.9"),
        ("2001:db8::1:2:3:4", {}, "2001:db8::/64"),
        ("127.0.0.1", {"X-Forwarded-For": "x" * 9999}, "forwarded "),
        (None, {}, ""),
    ],
)
def test_the_source_is_the_visitors_network(remote: str, headers: Mapping[str, str], source: str) -> None:
    request: Any = SimpleNamespace(remote=remote, headers=CIMultiDict(headers))
    assert source_of(request) == source


@pytest.mark.parametrize(
    ("address", "seen", "may"),
    [
        ("ws://198.51.100.7:22", "198.51.100.7", True),
        ("ws://198.51.100.7:22", "203.0.113.9", False),
        ("ws://[2001:db8::1]:22", "2001:db8:0::1", True),
        ("ws://198.51.100.7:22", "::ffff:198.51.100.7", True),
        ("ws://198.51.100.7:22/relay/" + "0" * 64, "198.51.100.7", False),
        ("ws://metadata.internal:80", "203.0.113.9", False),
        ("ws://192.168.1.2:80", "192.168.1.2", True),
        ("ws://169.254.169.254:80", "192.168.1.2", False),
        ("ws://[::ffff:127.0.0.1]:80", "192.168.1.2", False),
        ("ws://198.51.100.7:22/admin", "198.51.100.7", False),
        ("ws://127.0.0.1:80", "192.168.1.2", False),
        ("ws://[::1]:80", "127.0.0.1", True),
        ("ws://127.evil.example:80", "127.0.0.1", False),
        ("ws://198.51.100.7:22", "", False),
    ],
)
def test_only_the_requesting_host_is_dialled_back(address: str, seen: str, may: bool) -> None:
    assert may_dial_back(address, seen) is may


@pytest.mark.parametrize(
    ("own", "host", "may"),
    [
        ("192.168.1.2", "192.168.1.9", True),
        ("100.64.3.4", "100.99.1.1", True),
        ("203.0.113.7", "172.17.0.1", False),
        ("192.168.1.2", "169.254.169.254", False),
        ("192.168.1.2", "::ffff:10.0.0.1", False),
        ("fd00::2", "fd00::1", True),
        ("203.0.113.7", "198.51.100.7", True),
        ("203.0.113.7", "127.0.0.1", True),
    ],
)
def test_an_address_of_a_private_network_is_dialled_from_that_network_only(
    own: str, host: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "own_ips", lambda: {ip_address(own), ip_address("127.0.0.1")})
    assert may_dial(host) is may


@pytest.mark.parametrize("name", ["", "router.example.org"])
async def test_no_request_reaches_a_private_address_of_an_invitation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that stands for it is no way around."""
    asked = []

    async def resolve(self: object, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        asked.append(host)
        return [ResolveResult(hostname=host, host="10.9.8.7", port=port, family=AF_INET, proto=0, flags=0)]

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", resolve)
    monkeypatch.setattr(addresses, "own_ips", lambda: {ip_address("192.168.1.2")})
    async with peers("alice") as (alice,):
        alice.learn(Contact(BOB, (f"ws://{name or '10.9.8.7'}:80",)))
        with pytest.raises(PeerUnreachable, match=r"10\.9\.8\.7 is in a private network"):
            await alice.call(BOB, Echo(), Echo, timeout_s=5)
    assert asked == ([name] if name else [])


def test_every_interface_is_one_port_and_only_ipv4_where_ipv6_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening_socket("", 0) as first, pytest.raises(PortError, match="is taken"):
        listening_socket("", first.getsockname()[1])
    create_server = socket.create_server
    refused = []

    def without_ipv6(address: Any, **options: Any) -> socket.socket:
        if options["family"] == socket.AF_INET6:
            refused.append(address)
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create_server(address, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    with listening_socket("", 0) as second:
        assert second.family == socket.AF_INET and refused == [("", 0)]
