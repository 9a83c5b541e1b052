"""The directory on a simulated network: announce, find, ban, expire."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np
import pytest

from colab_swarm.errors import NoExpertsError
from colab_swarm.events import EventLog, ExpertBanned
from colab_swarm.moe.directory import Directory, DirectorySettings
from colab_swarm.moe.grid import ExpertInfo, ExpertServices, Grid
from colab_swarm.sim import LAN, NetworkProfile, SimNetwork, run_virtual, virtual_time
from colab_swarm.tensors.codecs import Floats
from tests.dht.swarm import Member, swarm

GRID = Grid("ffn", (4, 8))
SHAPE = (16,)
SETTINGS = DirectorySettings()


@dataclass
class Scout(Member):
    """One peer, its DHT and its directory."""

    directory: Directory
    events: EventLog


async def scouts(
    count: int, settings: DirectorySettings = SETTINGS, *, profile: NetworkProfile = LAN, seed: int = 0
) -> tuple[SimNetwork, list[Scout]]:
    """``count`` peers that know each other through the DHT."""
    network, members = await swarm(count, profile=profile, seed=seed)
    found = []
    for member in members:
        events = EventLog()
        services = ExpertServices(
            member.peers, member.dht, events, random.Random(f"{seed} {member.peers.name}"), "run"
        )
        found.append(Scout(member.peers, member.dht, Directory(services, settings), events))
    return network, found


async def announce(scout: Scout, *uids: str, step: int = 0, grid: Grid = GRID) -> None:
    await scout.directory.announce(grid, {uid: (SHAPE, step) for uid in uids})


def scores(*wanted: str, grid: Grid = GRID) -> list[Floats]:
    """For each sample, scores that favour one expert and its neighbours."""
    found = [np.zeros((len(wanted), side), np.float32) for side in grid.sides]
    for n, uid in enumerate(wanted):
        for scores, index in zip(found, grid.index(uid), strict=True):
            scores[n] = -np.abs(np.arange(scores.shape[1]) - index)
    return found


def uids(found: list[list[ExpertInfo]]) -> list[list[str]]:
    return [[info.uid for info in sample] for sample in found]


def test_all_peers_find_announced_experts() -> None:
    async def main() -> tuple[ExpertInfo | None, Scout]:
        _, (alice, bob, *_) = await scouts(8)
        await announce(alice, "ffn.1.2", "ffn.3.7", step=5)
        return await bob.directory.find(GRID, "ffn.3.7"), alice

    info, alice = run_virtual(main())
    assert info is not None and info.host == alice.peers.contact
    assert (info.uid, info.shape, info.step) == ("ffn.3.7", SHAPE, 5)
    assert 59 < info.expires_at - alice.peers.time() <= 60


def test_the_best_live_experts_come_first() -> None:
    async def main() -> list[list[str]]:
        _, (alice, bob, carol, *_) = await scouts(8)
        await announce(alice, "ffn.1.2", "ffn.1.3", "ffn.3.7")
        await announce(bob, "ffn.0.0", "ffn.1.4")
        return uids(await carol.directory.best(GRID, scores("ffn.1.2", "ffn.3.5", "ffn.1.4"), 2))

    assert run_virtual(main()) == [["ffn.1.2", "ffn.1.3"], ["ffn.3.7", "ffn.1.4"], ["ffn.1.4", "ffn.1.3"]]


@pytest.mark.parametrize("sides", [(300,), (2, 300), (2, 3, 2), (2, 2, 2, 2)])
def test_grids_of_any_dimension_are_searched_and_listed(sides: tuple[int, ...]) -> None:
    grid = Grid("block", sides)
    everywhere = [grid.uid(index) for index in grid][:: max(1, grid.size // 8)]

    async def main() -> tuple[list[str], list[list[str]]]:
        _, (alice, bob, carol) = await scouts(3)
        await announce(alice, *everywhere[::2], grid=grid)
        await announce(bob, *everywhere[1::2], grid=grid)
        live = [info.uid for info in await carol.directory.live(grid)]
        best = await carol.directory.best(grid, scores(*everywhere, grid=grid), 1)
        return live, uids(best)

    assert run_virtual(main()) == (everywhere, [[uid] for uid in everywhere])


def test_fewer_live_experts_than_requested_are_all_returned() -> None:
    async def main() -> list[list[str]]:
        _, (alice, bob) = await scouts(2)
        await announce(alice, "ffn.1.2", "ffn.3.7")
        return uids(await bob.directory.best(GRID, scores("ffn.3.7"), 4))

    assert run_virtual(main()) == [["ffn.3.7", "ffn.1.2"]]


def test_withdrawn_experts_disappear_at_once() -> None:
    async def main() -> list[list[str]]:
        _, (alice, bob, carol) = await scouts(3)
        await announce(alice, "ffn.1.2", "ffn.3.7")
        await announce(bob, "ffn.1.4")
        await alice.directory.withdraw(GRID, ["ffn.1.2", "ffn.3.7"])
        return uids(await carol.directory.best(GRID, scores("ffn.1.2"), 4))

    assert run_virtual(main()) == [["ffn.1.4"]]


def test_a_dead_host_disappears_when_its_record_expires_and_the_error_says_so() -> None:
    async def main() -> tuple[int, list[str]]:
        network, (alice, bob, _) = await scouts(3)
        await announce(alice, "ffn.1.2", "ffn.3.7")
        before = len(await bob.directory.live(GRID))
        network.now().crash("alice")
        await asyncio.sleep(61)
        with pytest.raises(NoExpertsError, match=r"ffn\[4 x 8\] can be called: this peer saw 2, .* 61 s"):
            await bob.directory.best(GRID, scores("ffn.1.2"), 4)
        return before, [fault.name for fault in network.fired]

    assert run_virtual(main()) == (2, ["crash"])


def test_without_any_announcement_the_error_names_the_prefix() -> None:
    async def main() -> None:
        _, (alice, _) = await scouts(2)
        with pytest.raises(NoExpertsError, match=r"ffn\[4 x 8\] is live, and this peer never saw one"):
            await alice.directory.best(GRID, scores("ffn.1.2"), 4)
        assert await alice.directory.live(GRID) == [] and await alice.directory.find(GRID, "ffn.1.2") is None

    run_virtual(main())


def test_a_failed_expert_is_banned_until_the_ban_ends_or_it_answers() -> None:
    async def main() -> tuple[list[list[list[str]]], list[ExpertBanned]]:
        _, (alice, bob) = await scouts(2)
        await announce(alice, "ffn.1.2", "ffn.1.3")
        ((info,),) = await bob.directory.best(GRID, scores("ffn.1.2"), 1)
        seen = [[[info.uid]]]
        bob.directory.on_failure(info, "not finite")
        bob.directory.on_failure(info, "not finite")  # another call that was under way
        seen.append(uids(await bob.directory.best(GRID, scores("ffn.1.2"), 1)))
        await asyncio.sleep(5)
        seen.append(uids(await bob.directory.best(GRID, scores("ffn.1.2"), 1)))
        bob.directory.on_failure(info, "not finite")
        bob.directory.on_success(info)
        seen.append(uids(await bob.directory.best(GRID, scores("ffn.1.2"), 1)))
        return seen, [event for event in bob.events.recent() if isinstance(event, ExpertBanned)]

    seen, bans = run_virtual(main())
    assert seen == [[["ffn.1.2"]], [["ffn.1.3"]], [["ffn.1.2"]], [["ffn.1.2"]]]
    assert [(ban.uid, ban.reason, ban.seconds) for ban in bans] == [
        ("ffn.1.2", "not finite", 5.0),
        ("ffn.1.2", "not finite", 10.0),
    ]


def test_a_banned_expert_is_used_again_as_soon_as_another_peer_hosts_it() -> None:
    async def main() -> list[ExpertInfo | None]:
        network, (alice, bob, carol) = await scouts(3)
        await announce(alice, "ffn.1.2")
        found = [info := await carol.directory.find(GRID, "ffn.1.2")]
        assert info is not None
        network.now().crash("alice")
        carol.directory.on_failure(info, "lost")
        found.append(await carol.directory.find(GRID, "ffn.1.2"))
        await announce(bob, "ffn.1.2", step=9)
        await carol.directory.live(GRID)
        await asyncio.sleep(31)
        carol.directory.on_failure(info, "lost")
        return [*found, await carol.directory.find(GRID, "ffn.1.2")]

    first, banned, again = run_virtual(main())
    assert first is not None and banned is None and again is not None
    assert (first.step, again.step) == (0, 9)


def test_a_prefix_whose_experts_are_all_dead_is_skipped() -> None:
    async def main() -> list[list[str]]:
        _, (alice, bob, carol) = await scouts(3)
        await announce(alice, "ffn.1.2")
        await announce(bob, "ffn.3.7")
        ((info, _),) = await carol.directory.best(GRID, scores("ffn.1.2"), 4)
        carol.directory.on_failure(info, "lost")
        return uids(await carol.directory.best(GRID, scores("ffn.1.2"), 1))

    assert run_virtual(main()) == [["ffn.3.7"]]


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_a_clock_that_is_a_minute_off_neither_hides_nor_keeps_experts(skew_s: float) -> None:
    async def main() -> tuple[list[bool], list[str]]:
        network, (alice, bob, carol) = await scouts(3)
        network.now().skew("alice", skew_s)
        await announce(alice, "ffn.1.2")
        await announce(bob, "ffn.3.7")
        seen = [len(await scout.directory.live(GRID)) == 2 for scout in (alice, bob, carol)]
        await asyncio.sleep(59)
        seen += [len(await scout.directory.live(GRID)) == 2 for scout in (alice, carol)]
        await asyncio.sleep(2)
        seen += [len(await scout.directory.live(GRID)) == 0 for scout in (alice, carol)]
        return seen, [fault.name for fault in network.fired]

    assert run_virtual(main()) == ([True] * 7, ["skew"])


@pytest.mark.parametrize("shapes", [[], [(2, 4)], [(2, 8), (2, 4)], [(2, 4), (3, 8)], [(4,), (8,)]])
def test_scores_that_do_not_fit_the_grid_are_a_mistake(shapes: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        _, (alice,) = await scouts(1)
        with pytest.raises(ValueError, match=r"do not fit ffn\[4 x 8\]"):
            await alice.directory.best(GRID, [np.zeros(shape, np.float32) for shape in shapes], 1)

    run_virtual(main())


def test_two_hosts_announce_a_row_and_others_replace_them_before_their_records_expire() -> None:
    async def announced_by(scout: Scout) -> int:
        return len((await scout.dht.get("run/experts/ffn/0")).keys())

    async def main() -> tuple[int, list[bool], list[str]]:
        network, found = await scouts(8)
        hosts = sorted(found[1:6], key=lambda scout: scout.peers.id)
        for i, scout in enumerate(hosts):
            await announce(scout, f"ffn.1.{i}")
        first = await announced_by(found[0])
        for scout in hosts[:2]:  # the two that announce
            network.now().crash(scout.peers.name)
        seen = []
        for _ in range(8):
            await asyncio.sleep(15)
            for i, scout in enumerate(hosts[2:]):
                await announce(scout, f"ffn.1.{i + 2}")
            seen.append("ffn.1.4" in [info.uid for info in await found[0].directory.live(GRID)])
        return first, seen, [fault.name for fault in network.fired]

    assert run_virtual(main()) == (2, [True] * 8, ["crash", "crash"])


def test_invalid_records_do_no_harm() -> None:
    async def main() -> list[list[str]]:
        _, (alice, bob, mallory) = await scouts(3)
        await announce(alice, "ffn.1.2")
        for key in ("run/experts/ffn/0", "run/experts/ffn.0/0"):
            for junk in (7, [["ws://" + "x" * 900], []], [[], [[1 << 40, -5, None, "?"]]]):
                await mallory.dht.store(key, junk, subkey=mallory.peers.id, ttl_s=60, signed=True)
                await mallory.dht.store(key, junk, subkey=b"1", ttl_s=60)
        return uids(await bob.directory.best(GRID, scores("ffn.1.2"), 4))

    assert run_virtual(main()) == [["ffn.1.2"]]


def test_a_search_reads_few_keys_and_a_repeated_one_none() -> None:
    grid = Grid("ffn", (32, 32))

    async def main() -> tuple[int, int, float]:
        _, (alice, bob) = await scouts(2)
        await announce(alice, *map(grid.uid, grid), grid=grid)
        batch = scores(*map(grid.uid, list(grid)[::16]), grid=grid)
        first = await bob.directory.best(grid, batch, 4)
        reads = bob.directory._cache.loads
        began = virtual_time()
        assert await bob.directory.best(grid, batch, 4) == first
        return reads, bob.directory._cache.loads, virtual_time() - began

    assert run_virtual(main()) == (5, 5, 0.0)


def test_a_wide_sparse_grid_is_searched_without_reading_what_is_empty() -> None:
    grid = Grid("ffn", (200, 200))

    async def main() -> tuple[list[list[str]], int]:
        _, (alice, bob) = await scouts(2)
        await announce(alice, "ffn.7.7", "ffn.150.3", grid=grid)
        rng = np.random.default_rng(0)
        batch = [rng.standard_normal((64, 200)).astype(np.float32) for _ in range(2)]
        found = await bob.directory.best(grid, batch, 4)
        return [sorted(sample) for sample in uids(found)], bob.directory._cache.loads

    assert run_virtual(main()) == ([["ffn.150.3", "ffn.7.7"]] * 64, 3)
