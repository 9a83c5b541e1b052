"""Scripted faults happen when scripted, look as in life, and are recorded."""

import asyncio
from functools import partial

import pytest

from colab_swarm.errors import CallRefused, PeerLost, PeerTimeout, PeerUnreachable
from colab_swarm.net.peers import Message, PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HostProfile, NetworkProfile, ScriptedFault, SimNetwork, SimPeers
from colab_swarm.sim.runtime import SimRuntime
from tests.sim.talk import Ask, Tell, double, forever, pair


async def test_a_crash_breaks_calls_in_flight_and_calls_the_listeners() -> None:
    network, alice, bob = pair()
    bob.unserve(Ask)
    bob.serve(Ask, forever)
    lost: list[PeerId] = []
    alice.on_lost(lost.append)
    network.at(3.0).crash("bob")
    assert network.coming == [ScriptedFault(3.0, "crash", ("bob",))]
    with pytest.raises(PeerLost, match="bob crashed"):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
    assert loop_now() == pytest.approx(3.1)
    with pytest.raises(PeerUnreachable):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
    assert lost == [bob.id] and not network.coming
    assert network.fired == [ScriptedFault(3.0, "crash", ("bob",))]


async def test_a_crash_during_the_handshake_fails_the_dial() -> None:
    network, alice, bob = pair()
    network.at(0.45).crash("bob")  # TCP and the WebSocket upgrade took 0.4 s
    with pytest.raises(PeerUnreachable, match="nobody answers"):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
    assert loop_now() == pytest.approx(0.6) and not alice.linked()


async def test_a_crash_cancels_handlers_in_the_order_of_their_start() -> None:
    network, alice, bob = pair()
    ended: list[int] = []

    async def wait(caller: PeerId, message: Ask) -> Tell:
        try:
            return await forever(caller, message)
        finally:
            ended.append(message.number)

    bob.unserve(Ask)
    bob.serve(Ask, wait)
    calls = [alice.call(bob.id, Ask(number), Tell, timeout_s=60) for number in range(50)]
    network.at(3.0).crash("bob")
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert ended == list(range(50)) and {type(failure) for failure in failures} == {PeerLost}


async def test_a_crashed_peers_calls_fail_and_it_comes_back_as_a_new_process_or_restarted() -> None:
    network, alice, bob = pair()
    with pytest.raises(ValueError, match="already up"):
        network.peer("alice")
    network.now().crash("alice")
    with pytest.raises(PeerLost, match="alice is down"):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert network.peer("alice").id == alice.id
    network.now().crash("bob")
    network.now().restart("bob")
    network.introduce()
    assert await network.by_name["alice"].call(bob.id, Ask(3), Tell, timeout_s=5) == Tell(6)


@pytest.mark.parametrize("linked", [True, False])
async def test_a_partition_is_silence_and_messages_and_dials_arrive_when_it_heals(linked: bool) -> None:
    network, alice, bob = pair()
    if linked:
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    network.now().partition({"alice"}, {"bob"})
    with pytest.raises(PeerTimeout):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    network.at(9.0).heal()
    assert await alice.call(bob.id, Ask(2), Tell, timeout_s=20) == Tell(4)
    assert 9.0 < loop_now() < 10.0


async def test_a_long_partition_or_freeze_breaks_the_links_across_it_only() -> None:
    network, alice, bob = pair()
    carol, dave = network.peer("carol"), network.peer("dave")
    carol.serve(Ask, double)
    network.introduce()
    for caller, other in ((alice, bob), (alice, carol), (dave, bob)):
        await caller.call(other.id, Ask(1), Tell, timeout_s=5)
    network.now().partition({"alice", "carol"}, {"bob"})  # dave reaches both sides
    await asyncio.sleep(60)
    assert (alice.linked(), bob.linked()) == ({carol.id}, {dave.id})
    network.now().heal()
    network.now().freeze("carol", 10.0)
    network.at(loop_now() + 5.0).freeze("carol", 60.0)  # again, and for longer
    await asyncio.sleep(20)
    assert alice.linked() == {carol.id}
    await asyncio.sleep(30)
    assert (alice.linked(), dave.linked()) == (set(), {bob.id})


@pytest.mark.parametrize("fault", ["freeze", "cut"])
async def test_a_frozen_or_cut_off_peer_is_silent_for_its_time_and_its_links_stay(fault: str) -> None:
    network, alice, bob = pair()
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    getattr(network.now(), fault)("bob", 20.0)
    assert (network.frozen_s("bob") == 20.0) is (fault == "freeze")
    with pytest.raises(PeerTimeout):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert await alice.call(bob.id, Ask(2), Tell, timeout_s=60) == Tell(4)
    assert loop_now() == pytest.approx(20.9, abs=0.2) and alice.linked() == {bob.id}
    assert [one.name for one in network.fired] == [fault] and network.frozen_s("bob") == 0.0


@pytest.mark.parametrize(("kind", "heard"), [(Ask, [0, 1]), (Tell, [0, 1, 2])])
async def test_a_fault_fires_just_before_the_message_or_reply_it_waits_for(
    kind: type[Message], heard: list[int]
) -> None:
    asked: list[int] = []

    async def hear(caller: PeerId, message: Ask) -> Tell:
        asked.append(message.number)
        return Tell(0)

    network, alice, bob = pair()
    bob.unserve(Ask)
    bob.serve(Ask, hear)
    side = {"receiver": "bob"} if kind is Ask else {"sender": "bob"}
    network.when(lambda message: isinstance(message, kind), nth=3, **side).crash("bob")  # type: ignore[arg-type]
    with pytest.raises(PeerLost):
        for number in range(9):
            await alice.call(bob.id, Ask(number), Tell, timeout_s=5)
    assert [fault.name for fault in network.fired] == ["crash"] and asked == heard


async def test_a_peer_that_leaves_cancels_its_handlers_and_breaks_its_links() -> None:
    network, alice, bob = pair()
    bob.unserve(Ask)
    bob.serve(Ask, forever)
    told: list[str] = []
    for peer in (alice, bob):
        peer.when_down(partial(told.append, peer.name))
    call = asyncio.create_task(alice.call(bob.id, Ask(1), Tell, timeout_s=60))
    await asyncio.sleep(2)
    await bob.close()
    with pytest.raises(CallRefused, match="cancelled"):
        await call
    await asyncio.sleep(1)
    assert (len(alice.linked()), len(asyncio.all_tasks())) == (0, 1)
    network.now().crash("alice")
    assert told == ["alice"], "a peer that leaves is not down"


async def test_latency_and_bandwidth_change_by_a_factor_of_all_or_of_one() -> None:
    network, alice, bob = pair(NetworkProfile("far", latency_s=0.1, hosts=(HostProfile(8e6, 8e6),)))

    async def seconds() -> float:
        began = loop_now()
        await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
        return loop_now() - began

    network.now().latency(3)
    dial_s = await seconds()
    latency_s = await seconds()
    network.now().slow("bob", 10)
    slow_s = await seconds()
    network.now().slow("bob", 1)
    network.now().bandwidth(1 / 10_000)
    all_s = await seconds()
    assert (dial_s, latency_s, slow_s) == pytest.approx((2.4, 0.6, 6.0), abs=0.01)
    assert all_s - latency_s == pytest.approx(2 * 100 * 8 / 800, rel=0.1)  # about 100 bytes, there and back


def test_a_crash_between_two_runs_of_the_loop_is_noted_in_the_next_one() -> None:
    runtime, lost = SimRuntime(), list[PeerId]()

    async def link() -> tuple[SimNetwork, SimPeers, SimPeers]:
        network, alice, bob = pair()
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        for peer in (alice, bob):
            peer.on_lost(lambda other: lost.append(other) if loop_now() else None)
        return network, alice, bob

    network, alice, bob = runtime.call(link())
    network.now().crash("bob")
    assert not lost
    runtime.call(asyncio.sleep(1))
    assert sorted(lost) == sorted([alice.id, bob.id])
    runtime.close()
