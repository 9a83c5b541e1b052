"""A vacant place goes to one peer, however many claim it and whatever the network does."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from colab_swarm.moe.directory import DirectorySettings
from colab_swarm.moe.grid import Grid
from colab_swarm.sim import HOME, LAN, PAPER_CLOUD, NetworkProfile, run_virtual
from tests.moe.test_directory import GRID, Scout, announce, scouts


async def keep_places(scout: Scout, grid: Grid, uids: list[str]) -> None:
    """Act as a host: announce the held places, give up those of earlier claims."""
    while True:
        await scout.directory.announce(grid, {uid: ((16,), 0) for uid in uids})
        for uid in await scout.directory.rivals(grid, uids):
            uids.remove(uid)
            await scout.directory.withdraw(grid, [uid])
        await asyncio.sleep(15)


def test_a_peer_claims_vacant_places_only() -> None:
    async def main() -> tuple[list[str], list[str]]:
        _, (alice, bob) = await scouts(2)
        await announce(alice, *(GRID.uid(index) for index in GRID if index != (2, 3)))
        return await bob.directory.claim(GRID, 1), await bob.directory.claim(GRID, 1)

    assert run_virtual(main()) == (["ffn.2.3"], [])


def test_only_wanted_places_are_claimed() -> None:
    async def main() -> list[str]:
        _, (alice, bob) = await scouts(2)
        await announce(alice, "ffn.1.2")
        return await bob.directory.claim(GRID, 3, wanted=["ffn.1.2", "ffn.3.7", "ffn.0.0"])

    assert sorted(run_virtual(main())) == ["ffn.0.0", "ffn.3.7"]


def test_a_claimed_expert_cannot_be_called_until_it_is_announced() -> None:
    async def main() -> list[int]:
        _, (alice, bob, carol) = await scouts(3)
        claimed = await alice.directory.claim(GRID, 3)
        counts = [len(await bob.directory.live(GRID))]
        await announce(alice, *claimed)
        return [*counts, len(await carol.directory.live(GRID))]

    assert run_virtual(main()) == [0, 3]


@pytest.mark.parametrize("profile", [LAN, HOME, PAPER_CLOUD])
@pytest.mark.parametrize("sides", [(8,), (3, 4)])
def test_peers_that_claim_at_once_get_different_places(
    profile: NetworkProfile, sides: tuple[int, ...]
) -> None:
    grid = Grid("ffn", sides)

    async def main() -> list[list[str]]:
        _, found = await scouts(8, profile=profile)
        return await asyncio.gather(*(scout.directory.claim(grid, 1) for scout in found))

    got = list(itertools.chain(*run_virtual(main())))
    assert len(got) == len(set(got)) == 8


def test_a_full_grid_gives_fewer_places() -> None:
    async def main() -> list[list[str]]:
        _, found = await scouts(6, profile=HOME)
        return await asyncio.gather(*(scout.directory.claim(Grid("ffn", (3, 4)), 3) for scout in found))

    got = list(itertools.chain(*run_virtual(main())))
    assert len(got) == len(set(got)) == 12


def test_two_holders_of_a_place_after_a_partition_become_one_when_it_heals() -> None:
    async def main() -> tuple[list[str], list[str], list[str], list[str]]:
        network, found = await scouts(4, DirectorySettings(settle_s=5.0))
        alice, bob, *_ = found
        names = [scout.peers.name for scout in found]
        for scout in found:
            scout.dht.start()
        network.now().partition(set(names[::2]), set(names[1::2]))
        wanted = ["ffn.1.2", "ffn.3.7"]
        await asyncio.sleep(60)  # both halves have noticed
        first = await alice.directory.claim(GRID, 2, wanted=wanted)
        second = await bob.directory.claim(GRID, 2, wanted=wanted)
        assert sorted(first) == sorted(second) == wanted  # the fault did harm
        hosts = [asyncio.create_task(keep_places(s, GRID, u)) for s, u in ((alice, first), (bob, second))]
        await asyncio.sleep(30)
        network.now().heal()
        await asyncio.sleep(120)
        live = [info.host.id.hex() for info in await found[2].directory.live(GRID)]
        for host in hosts:
            host.cancel()
        assert live == [alice.peers.id.hex()] * 2
        return sorted(first), second, wanted, [fault.name for fault in network.fired]

    first, second, wanted, fired = run_virtual(main())
    assert (first, second, fired) == (wanted, [], ["partition", "heal"])


def test_a_place_announced_by_two_at_once_belongs_to_the_smaller_id() -> None:
    async def main() -> tuple[list[list[str]], list[bool]]:
        _, (alice, bob) = await scouts(2)
        await asyncio.gather(announce(alice, "ffn.1.2"), announce(bob, "ffn.1.2"))
        lost = [await scout.directory.rivals(GRID, ["ffn.1.2"]) for scout in (alice, bob)]
        return lost, [alice.peers.id > bob.peers.id, bob.peers.id > alice.peers.id]

    lost, greater = run_virtual(main())
    assert lost == [["ffn.1.2"] if loses else [] for loses in greater]


def test_a_clock_that_is_a_minute_behind_takes_no_place_from_its_holder() -> None:
    async def main() -> tuple[list[str], list[str], list[str]]:
        network, (alice, bob, _) = await scouts(3)
        await announce(alice, "ffn.1.2")
        network.now().skew("bob", -60.0)
        claimed = await bob.directory.claim(GRID, 1, wanted=["ffn.1.2"])
        return claimed, await alice.directory.rivals(GRID, ["ffn.1.2"]), [f.name for f in network.fired]

    assert run_virtual(main()) == ([], [], ["skew"])


def test_the_place_of_a_dead_host_is_vacant_when_its_record_expires() -> None:
    async def main() -> tuple[list[list[str]], list[str]]:
        network, (alice, bob, _) = await scouts(3)
        await announce(alice, "ffn.1.2")
        network.now().crash("alice")
        early = await bob.directory.claim(GRID, 1, wanted=["ffn.1.2"])
        await asyncio.sleep(60)
        late = await bob.directory.claim(GRID, 1, wanted=["ffn.1.2"])
        return [early, late], [fault.name for fault in network.fired]

    assert run_virtual(main()) == ([[], ["ffn.1.2"]], ["crash"])
