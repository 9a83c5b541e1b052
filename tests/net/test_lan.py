"""Announcing and finding swarms on the local network; garbage from it does no harm."""

import asyncio
import os
import socket
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.net import lan
from colab_swarm.net.addresses import is_address
from colab_swarm.net.lan import LanAnnouncer, LanSwarm, announced, read_announcement
from colab_swarm.net.peers import MAX_ADDRESSES, Contact
from tests.net.swarm import identity

RUN_ID = "albert-1f3a"
ALICE, BOB = (identity(name).id for name in ("alice", "bob"))


def properties(name: str = "alice", run_id: str = RUN_ID) -> dict[bytes, bytes | None]:
    return as_bytes(lan.write_properties(run_id, "open", name, ALICE))


def as_bytes(properties: dict[str, str]) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in properties.items()}


def test_an_announcement_is_read_back_but_for_wrong_ones_and_addresses_that_cannot_be_dialled() -> None:
    ips = ["192.0.2.7", "fe80::1", "fe80::1%eth0", "2001:DB8::7", "nonsense", "192.0.2.7"]
    contact = Contact(ALICE, ("ws://192.0.2.7:4500", "ws://[2001:db8::7]:4500"))
    assert read_announcement(properties(), ips, 4500) == LanSwarm(RUN_ID, "open", (contact,), ("alice",))
    long = properties("n" * 500, run_id="r" * 64)
    assert read_announcement(long, ips, 4500) is not None
    assert sum(len(key) + len(value or b"") + 2 for key, value in long.items()) < 300
    wrong = [{"v": "2"}, {"peer": "zz"}, {"access": "x"}, {"run": ""}, {"run": "r" * 65}, {"run": "a\nb"}]
    for change in wrong:
        assert read_announcement(properties() | as_bytes(change), ips, 4500) is None
    assert read_announcement({b"run": None}, ips, 4500) is None


def test_the_peers_of_one_run_are_merged() -> None:
    def swarm(name: str, run_id: str = RUN_ID, host: str = "192.0.2.7") -> LanSwarm:
        contact = Contact(identity(name).id, (f"ws://{host}:4500",))
        return LanSwarm(run_id, "open", (contact,), (name,))

    found = [swarm("carol", "zebra-77"), swarm("alice"), swarm("bob"), swarm("alice", host="198.51.100.7")]
    albert, zebra = lan.merge(found)
    assert (albert.run, albert.names, zebra.run) == ("albert", ("alice", "bob"), "zebra")
    assert albert.contacts[0] == Contact(ALICE, ("ws://192.0.2.7:4500", "ws://198.51.100.7:4500"))


def test_addresses_of_one_port_are_announced_and_loopback_only_alone() -> None:
    others = "ws://192.0.2.7:4500", "ws://[2001:db8::7]:4500", "ws://192.0.2.8:4501"
    circuit = f"ws://192.0.2.9:4500/relay/{BOB.hex()}"
    addresses = ("ws://127.0.0.1:4500", "wss://192.0.2.6:4500", *others, circuit)
    assert announced(Contact(ALICE, addresses)) == (["192.0.2.7", "2001:db8::7"], 4500)
    assert announced(Contact(ALICE, addresses[:2])) == (["127.0.0.1"], 4500)
    assert announced(Contact(ALICE, addresses[1:2])) == ([], 0)


KEYS = st.sampled_from([b"v", b"run", b"access", b"peer", b"name"]) | st.binary(max_size=9)
SAID = st.sampled_from([b"1", b"open", b"invite", ALICE.hex().encode()])
VALUES = st.none() | st.binary(max_size=80) | SAID


@settings(max_examples=60)
@given(
    said=st.dictionaries(KEYS, VALUES),
    ips=st.lists(st.ip_addresses().map(str) | st.text(max_size=9), max_size=18),
    port=st.none() | st.integers(0, 65535),
)
def test_any_multicast_bytes_are_an_announcement_in_bounds_or_nothing(
    said: dict[bytes, bytes | None], ips: list[str], port: int | None
) -> None:
    for garbled in (said, properties() | said):
        found = read_announcement(garbled, ips, port)
        if found is not None:
            ((contact,), (name,)) = found.contacts, found.names
            assert 0 < len(contact.addresses) <= MAX_ADDRESSES and all(map(is_address, contact.addresses))
            assert name.isprintable() and found.run_id.isprintable() and len(contact.id) == 32


LOOPBACK = ["127.0.0.1"]


async def find(run_id: str, wanted: set[Contact]) -> LanSwarm:
    """Look until these contacts, and no others, are there (the deadline of `run` bounds it)."""
    while True:
        for swarm in await lan.find_swarms(seconds=1.2, interfaces=LOOPBACK):
            if swarm.run_id == run_id and set(swarm.contacts) == wanted:
                return swarm


def has_multicast() -> bool:
    group = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver, suppress(OSError):
        receiver.settimeout(1.0)
        receiver.bind(("", 0))
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, group[4:])
        receiver.sendto(b"hello", ("224.0.0.251", receiver.getsockname()[1]))
        return receiver.recv(5) == b"hello"
    return False


@pytest.mark.slow
@pytest.mark.skipif(not has_multicast(), reason="no multicast on loopback")
async def test_announced_peers_are_found_until_they_say_goodbye() -> None:
    run_id = f"lantest-{os.getpid()}"

    async def announce(name: str) -> LanAnnouncer:
        announcer = LanAnnouncer(run_id, "open", name, interfaces=LOOPBACK)
        await announcer.update(Contact(identity(name).id, ("ws://127.0.0.1:4500",)))
        return announcer

    alice, bob = await asyncio.gather(announce("alice"), announce("bob"))
    both = {Contact(one, ("ws://127.0.0.1:4500",)) for one in (ALICE, BOB)}
    swarm = await find(run_id, both)
    assert (swarm.run, swarm.access, set(swarm.names)) == ("lantest", "open", {"alice", "bob"})
    moved = Contact(BOB, ("ws://127.0.0.1:4600",))
    await asyncio.gather(alice.update(Contact(ALICE)), bob.update(moved))  # alice can no longer be dialled
    await find(run_id, {moved})
    await asyncio.gather(alice.close(), bob.close())
    await bob.close()


async def test_neither_a_foreign_name_nor_a_network_without_multicast_has_a_run() -> None:
    assert await lan._ask(None, "evil.example.com.") is None  # type: ignore[arg-type]
    assert await lan.find_swarms(seconds=0.01, interfaces=["192.0.2.250"]) == []
    with pytest.raises(OSError, match="no interface of this machine supports multicast"):
        LanAnnouncer(RUN_ID, "open", "alice", interfaces=["192.0.2.250"])
