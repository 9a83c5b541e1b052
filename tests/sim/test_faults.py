"""Scripted faults happen when scripted, look as in life, and are recorded."""

from __future__ import annotations

import asyncio

import pytest

from colab_swarm.errors import PeerLost, PeerTimeout, PeerUnreachable
from colab_swarm.net.peers import PeerId
from colab_swarm.sim import HostProfile, NetworkProfile, ScriptedFault, run_virtual, virtual_time
from tests.sim.talk import Ask, Tell, double, forever, pair


def test_a_crash_breaks_calls_in_flight_and_calls_the_listeners() -> None:
    async def main() -> tuple[list[PeerId], PeerId, list[ScriptedFault]]:
        network, alice, bob = pair()
        bob.serve(Ask, forever)
        lost: list[PeerId] = []
        alice.on_lost(lost.append)
        network.at(3.0).crash("bob")
        with pytest.raises(PeerLost, match="bob crashed"):
            await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
        assert virtual_time() == pytest.approx(3.1)
        with pytest.raises(PeerUnreachable):
            await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
        return lost, bob.id, network.fired

    lost, bob, fired = run_virtual(main())
    assert lost == [bob] and fired == [ScriptedFault(3.0, "crash", ("bob",))]


def test_a_restarted_peer_answers_again() -> None:
    async def main() -> Tell:
        network, alice, bob = pair()
        network.at(1.0).crash("bob")
        network.at(2.0).restart("bob")
        await asyncio.sleep(3)
        return await alice.call(bob.id, Ask(3), Tell, timeout_s=5)

    assert run_virtual(main()) == Tell(6)


def test_a_crashed_name_comes_back_as_a_new_process_with_the_same_identity() -> None:
    async def main() -> bool:
        network, _, bob = pair()
        with pytest.raises(ValueError, match="already up"):
            network.peer("bob")
        network.now().crash("bob")
        return network.peer("bob").id == bob.id

    assert run_virtual(main())


def test_a_crashed_peers_own_calls_fail() -> None:
    async def main() -> None:
        network, alice, bob = pair()
        network.now().crash("alice")
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)

    with pytest.raises(PeerLost, match="alice is down"):
        run_virtual(main())


def test_a_partition_is_silence_and_its_messages_arrive_when_it_heals() -> None:
    async def main() -> float:
        network, alice, bob = pair()
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        network.now().partition({"alice"}, {"bob"})
        with pytest.raises(PeerTimeout):
            await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        network.at(20.0).heal()
        assert await alice.call(bob.id, Ask(2), Tell, timeout_s=60) == Tell(4)
        return virtual_time()

    assert run_virtual(main()) == pytest.approx(20.1)


def test_a_long_partition_breaks_the_links_across_it_only() -> None:
    async def main() -> tuple[int, int]:
        network, alice, bob = pair()
        carol = network.peer("carol")
        carol.serve(Ask, double)
        network.introduce()
        for other in (bob, carol):
            await alice.call(other.id, Ask(1), Tell, timeout_s=5)
        network.now().partition({"alice", "carol"}, {"bob"})
        await asyncio.sleep(60)
        return len(alice.linked()), len(bob.linked())

    assert run_virtual(main()) == (1, 0)


def test_a_dial_into_a_partition_times_out_and_succeeds_after_it() -> None:
    async def main() -> Tell:
        network, alice, bob = pair()
        network.now().partition({"alice"}, {"bob"})
        with pytest.raises(PeerTimeout):
            await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        network.at(9.0).heal()
        return await alice.call(bob.id, Ask(1), Tell, timeout_s=20)

    assert run_virtual(main()) == Tell(2)


def test_a_slow_peer_answers_late() -> None:
    async def main() -> float:
        network, alice, bob = pair()
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        network.now().slow("bob", 10)
        began = virtual_time()
        await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        return virtual_time() - began

    assert run_virtual(main()) == pytest.approx(2.0)


def test_a_fault_fires_just_before_the_message_it_waits_for() -> None:
    heard: list[int] = []

    async def hear(caller: PeerId, message: Ask) -> Tell:
        heard.append(message.number)
        return Tell(0)

    async def main() -> list[str]:
        network, alice, bob = pair()
        bob.serve(Ask, hear)
        network.when(lambda message: isinstance(message, Ask), receiver="bob", nth=3).crash("bob")
        with pytest.raises(PeerLost):
            for number in range(9):
                await alice.call(bob.id, Ask(number), Tell, timeout_s=5)
        return [fault.name for fault in network.fired]

    assert run_virtual(main()) == ["crash"] and heard == [0, 1]


def test_a_fault_that_waits_for_a_reply_leaves_the_caller_without_it() -> None:
    async def main() -> int:
        network, alice, bob = pair()
        network.when(lambda message: isinstance(message, Tell), sender="bob").crash("bob")
        with pytest.raises(PeerLost):
            await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
        return len(network.fired)

    assert run_virtual(main()) == 1


def test_down_callbacks_run_on_a_crash_but_not_on_leaving() -> None:
    async def main() -> list[str]:
        network, alice, bob = pair()
        told: list[str] = []
        alice.when_down(lambda: told.append("alice"))
        bob.when_down(lambda: told.append("bob"))
        network.now().crash("alice")
        await bob.close()
        return told

    assert run_virtual(main()) == ["alice"]


def test_a_peer_that_leaves_cancels_its_handlers_and_breaks_its_links() -> None:
    async def main() -> tuple[int, int]:
        _, alice, bob = pair()
        bob.serve(Ask, forever)
        call = asyncio.create_task(alice.call(bob.id, Ask(1), Tell, timeout_s=60))
        await asyncio.sleep(2)
        await bob.close()
        with pytest.raises(PeerLost, match="bob left"):
            await call
        return len(alice.linked()), len(asyncio.all_tasks())

    assert run_virtual(main()) == (0, 1)


def test_latency_and_bandwidth_of_all_change_by_a_factor() -> None:
    async def main() -> tuple[float, float]:
        line = HostProfile(8e6, 8e6)
        network, alice, bob = pair(NetworkProfile("far", latency_s=0.1, hosts=(line,)))

        async def seconds() -> float:
            began = virtual_time()
            await alice.call(bob.id, Ask(1), Tell, timeout_s=60)
            return virtual_time() - began

        await seconds()
        network.now().latency(3)
        slower = await seconds()
        network.now().bandwidth(1 / 10_000)
        return slower, await seconds()

    latency_s, all_s = run_virtual(main())
    assert latency_s == pytest.approx(0.6, abs=0.01)
    assert all_s - latency_s == pytest.approx(2 * 100 * 8 / 800, rel=0.1)  # about 100 bytes, there and back


def test_a_scheduled_fault_is_listed_before_it_happens() -> None:
    async def main() -> None:
        network, *_ = pair()
        network.at(3.0).crash("bob")
        assert network.coming == [ScriptedFault(3.0, "crash", ("bob",))]
        await asyncio.sleep(4)
        assert not network.coming
        assert network.fired == [ScriptedFault(3.0, "crash", ("bob",))]

    run_virtual(main())
