from __future__ import annotations

import pytest

from colab_swarm.net.addresses import AddressBook, reachable_addresses
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.peers import MAX_ADDRESSES, Contact, PeerId

BOB = PeerId(b"b" * 32)


def test_a_server_on_all_interfaces_is_reached_by_loopback_first() -> None:
    first, *others = reachable_addresses("0.0.0.0", 4500)
    assert first == "ws://127.0.0.1:4500"
    assert all(address.endswith(":4500") for address in others)


def test_a_server_on_one_interface_is_reached_there_only() -> None:
    assert reachable_addresses("192.0.2.7", 4500) == ("ws://192.0.2.7:4500",)


def test_new_addresses_come_before_old_ones_and_are_bounded() -> None:
    book = AddressBook()
    for number in range(30):
        book.learn(Contact(BOB, (f"ws://{number}",)))
    assert book.find(BOB).addresses == tuple(f"ws://{n}" for n in range(29, 29 - MAX_ADDRESSES, -1))


def test_an_empty_contact_changes_nothing_but_the_peers_own_word_does() -> None:
    book = AddressBook()
    book.learn(Contact(BOB, ("ws://old",)))
    book.learn(Contact(BOB))
    assert book.find(BOB).addresses == ("ws://old",)
    book.replace(Contact(BOB, ("ws://own",)))
    assert book.find(BOB).addresses == ("ws://own",)
    book.replace(Contact(BOB))
    assert book.find(BOB) == Contact(BOB)


@pytest.mark.parametrize(
    "wrong",
    [
        "ws://h:1/shutdown",
        "ws://me@h:1",
        "http://h:1",
        "",
        "ws://h:1?a",
        "ws://[1:2]:80",
        "ws://" + "h" * 300,
    ],
)
def test_what_is_no_address_is_neither_kept_nor_announced(wrong: str) -> None:
    book = AddressBook()
    book.learn(Contact(BOB, (wrong, "wss://[::1]:4500")))
    assert book.find(BOB).addresses == ("wss://[::1]:4500",)
    with pytest.raises(ValueError, match="is not an address"):
        NodeSettings(announce=(wrong,))


def test_settings_that_no_peer_could_use_are_mistakes() -> None:
    with pytest.raises(ValueError, match="are over 16"):
        NodeSettings(announce=tuple(f"ws://h:{port}" for port in range(17)))
    with pytest.raises(ValueError, match="port=99999"):
        NodeSettings(port=99999)
