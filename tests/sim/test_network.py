"""Calls over the simulated network keep the contract of `Peers`, and cost what the profile says."""

from __future__ import annotations

import asyncio

import pytest

from colab_swarm.errors import CallRefused, PeerError, PeerTimeout, PeerUnreachable, ProtocolError, WrongPeer
from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.peers import MAX_MESSAGE_BYTES, Contact, Message, PeerId, Peers, Role
from colab_swarm.sim import HOME, HostProfile, SimNetwork, run_virtual, virtual_time
from tests.sim.talk import Ask, Tell, Unserved, count_bytes, double, forever, pair


async def test_a_call_is_answered_after_a_dial_and_a_round_trip() -> None:
    _, alice, bob = pair()
    times = []
    for number in (1, 2):
        assert await alice.call(bob.id, Ask(number), Tell, timeout_s=5) == Tell(2 * number)
        times.append(virtual_time())
    assert times == pytest.approx([0.8, 1.0])


def test_a_simulated_peer_is_a_peers_with_a_real_identity() -> None:
    async def main() -> Peers:
        return SimNetwork(seed=3).peer("alice")

    alice = run_virtual(main())
    assert id_of(alice.public_key) == alice.id == run_virtual(main()).id
    assert verify(alice.public_key, alice.sign(b"hello"), b"hello")


@pytest.mark.parametrize(
    ("message", "code"),
    [(Unserved(), "unknown"), (Ask(-1), "refused"), (Ask(0), "failed"), (Tell(1), "unknown")],
)
async def test_a_refused_call_says_why(message: Message, code: str) -> None:
    _, alice, bob = pair()
    with pytest.raises(CallRefused) as caught:
        await alice.call(bob.id, message, Tell, timeout_s=5)
    assert caught.value.code == code


async def test_calls_above_a_peers_role_are_refused() -> None:
    network = SimNetwork(seed=1)
    alice, bob = network.peer("alice", role=Role.VIEWER), network.peer("bob")
    network.introduce()
    bob.serve(Ask, double, role=Role.WORKER)
    bob.serve_stream(Ask, count_bytes, role=Role.REDUCER)
    assert bob.role_of(alice.id) is Role.GUEST, "they have no link yet"
    with pytest.raises(CallRefused, match="needs the role worker; yours is viewer") as refused:
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert refused.value.code == "refused" and bob.role_of(alice.id) is Role.VIEWER
    stream = await alice.stream(bob.id, Ask(1), timeout_s=5)
    with pytest.raises(CallRefused, match="needs the role reducer; yours is viewer"):
        await stream.receive(Tell)


async def test_a_peer_may_call_itself_and_workers_may_call_workers() -> None:
    _, alice, bob = pair()
    bob.serve(Ask, double, role=Role.AUTHORITY)
    assert bob.role_of(bob.id) is Role.AUTHORITY
    assert await bob.call(bob.id, Ask(1), Tell, timeout_s=5) == Tell(2)
    bob.serve(Ask, double, role=Role.WORKER)
    assert await alice.call(bob.id, Ask(1), Tell, timeout_s=5) == Tell(2)
    assert bob.role_of(alice.id) is alice.role_of(bob.id) is Role.WORKER


async def test_an_undecodable_message_is_refused_as_invalid() -> None:
    _, alice, bob = pair()
    impostor = type("Ask", (Message,), {"__annotations__": {"number": str}}, frozen=True)
    with pytest.raises(CallRefused) as caught:
        await alice.call(bob.id, impostor("x"), Tell, timeout_s=5)
    assert caught.value.code == "invalid"


async def test_a_reply_of_another_type_is_a_protocol_error() -> None:
    class Words(Message, frozen=True):
        text: str

    with pytest.raises(ProtocolError):
        _, alice, bob = pair()
        await alice.call(bob.id, Ask(1), Words, timeout_s=5)


async def test_a_reply_over_the_limit_is_the_handlers_fault() -> None:
    class Long(Message, frozen=True):
        body: bytes

    async def shout(caller: PeerId, message: Ask) -> Long:
        return Long(bytes(MAX_MESSAGE_BYTES))

    _, alice, bob = pair()
    bob.serve(Ask, shout)
    with pytest.raises(CallRefused) as caught:
        await alice.call(bob.id, Ask(1), Long, timeout_s=5)
    assert caught.value.code == "failed"


async def test_a_message_over_the_limit_is_the_callers_mistake() -> None:
    class Long(Message, frozen=True):
        body: bytes

    with pytest.raises(ValueError, match="limit"):
        _, alice, bob = pair()
        await alice.call(bob.id, Long(bytes(MAX_MESSAGE_BYTES)), Tell, timeout_s=5)


async def test_a_call_that_takes_too_long_times_out_and_cancels_the_handler() -> None:
    cancelled: list[float] = []

    async def watch(caller: PeerId, message: Ask) -> Tell:
        try:
            return await forever(caller, message)
        finally:
            cancelled.append(virtual_time())

    _, alice, bob = pair()
    bob.serve(Ask, watch)
    with pytest.raises(PeerTimeout):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=2)
    at = virtual_time()
    await asyncio.sleep(1)
    assert at == pytest.approx(2) and cancelled == pytest.approx([2.1])


async def test_a_call_to_oneself_takes_no_time() -> None:
    _, _, bob = pair()
    assert (await bob.call(bob.id, Ask(4), Tell, timeout_s=1), virtual_time()) == (Tell(8), 0.0)


async def test_a_stranger_without_address_is_unreachable() -> None:
    with pytest.raises(PeerUnreachable, match="no address"):
        network = SimNetwork()
        alice, bob = network.peer("alice"), network.peer("bob")
        await alice.call(bob.id, Ask(1), Tell, timeout_s=1)


async def test_another_peer_at_the_address_is_the_wrong_peer() -> None:
    with pytest.raises(WrongPeer):
        _, alice, bob = pair()
        nobody = PeerId(bytes(32))
        alice.learn(Contact(nobody, bob.contact.addresses))
        await alice.call(nobody, Ask(1), Tell, timeout_s=5)


async def test_a_false_address_does_not_hide_the_true_one() -> None:
    _, alice, bob = pair()
    alice.learn(Contact(bob.id, ("sim://alice", "sim://nobody")))
    assert await alice.call(bob.id, Ask(1), Tell, timeout_s=5) == Tell(2)


async def test_a_peer_in_client_mode_is_called_back_but_never_dialled() -> None:
    network = SimNetwork()
    alice, bob = network.peer("alice", listen=False), network.peer("bob")
    alice.serve(Ask, double)
    bob.serve(Ask, double)
    network.introduce()
    assert alice.contact.addresses == ()
    with pytest.raises(PeerUnreachable):
        await bob.call(alice.id, Ask(1), Tell, timeout_s=1)
    await alice.call(bob.id, Ask(1), Tell, timeout_s=1)
    assert await bob.call(alice.id, Ask(5), Tell, timeout_s=1) == Tell(10)


async def test_bandwidth_is_shared_first_in_first_out() -> None:
    _, alice, bob = pair(bob=HostProfile(upload_bps=1e6, download_bps=8e5))
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    began, times = virtual_time(), []

    async def push() -> None:
        stream = await alice.stream(bob.id, Ask(0), timeout_s=5)
        await stream.send(Tell(1), bytes(100_000))
        await stream.end()
        await stream.receive(Tell)
        times.append(virtual_time() - began)

    await asyncio.gather(push(), push())
    assert times == pytest.approx([1.2, 2.2], abs=0.02)


async def test_both_clocks_meet_in_the_middle() -> None:
    network, alice, bob = pair()
    network.now().skew("bob", 300.0)
    apart = bob.time() - alice.time()
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert (apart, bob.time() - alice.time()) == pytest.approx((300.0, 0.0))


async def test_statistics_count_bytes_and_round_trips() -> None:
    _, alice, bob = pair()
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert alice.statistics(bob.id).sent_bytes == bob.statistics(alice.id).received_bytes > 0
    total = alice.statistics()
    assert total.rtt_s == pytest.approx(0.2) and total.links == 1 and total.received_bytes > 0


def test_same_seed_same_trace() -> None:
    async def main(seed: int) -> list[float]:
        network = SimNetwork(HOME, seed=seed)
        peers = [network.peer(name) for name in ("alice", "bob", "carol")]
        network.introduce()
        network.now().lose(0.2)
        times = []
        for caller in peers:
            for other in peers:
                with pytest.raises(PeerError):
                    await caller.call(other.id, Ask(1), Tell, timeout_s=9)
                times.append(virtual_time())
        return times

    assert run_virtual(main(7)) == run_virtual(main(7)) != run_virtual(main(8))


async def test_a_link_that_stands_need_not_be_dialled() -> None:
    network, alice, bob = pair()
    network.standing = lambda one, other: {one.name, other.name} == {"alice", "bob"}
    assert await alice.call(bob.id, Ask(1), Tell, timeout_s=5) == Tell(2)
    assert virtual_time() == pytest.approx(0.2)
