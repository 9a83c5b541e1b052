"""The directory on a simulated network: announce, find, ban, expire."""

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from colab_swarm.dht.service import RunServices
from colab_swarm.errors import NoExpertsError
from colab_swarm.events import EventLog, ExpertBanned
from colab_swarm.moe import directory as module
from colab_swarm.moe.directory import Cache, Directory
from colab_swarm.moe.grid import ExpertInfo, Grid
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, PAPER_CLOUD, NetworkProfile, SimNetwork
from colab_swarm.tensors.codecs import Floats
from tests.dht.swarm import Member, swarm

GRID = Grid("ffn", (4, 8))
SHAPE = (16,)


@dataclass
class Scout(Member):
    """One peer, its DHT and its directory."""

    directory: Directory
    services: RunServices


async def scouts(
    count: int, *, profile: NetworkProfile = LAN, seed: int = 0
) -> tuple[SimNetwork, list[Scout]]:
    """``count`` peers that know each other through the DHT."""
    network, members = await swarm(count, profile=profile, seed=seed)
    found = []
    for member in members:
        rng = random.Random(f"{seed} {member.peers.name}")
        services = RunServices(member.peers, member.dht, EventLog(), rng, "run")
        found.append(Scout(member.peers, member.dht, Directory(services), services))
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


async def test_the_best_live_experts_come_first_and_withdrawn_ones_disappear_at_once() -> None:
    _, (alice, bob, carol, *_, dave) = await scouts(8)
    await announce(alice, "ffn.1.2", "ffn.1.3", "ffn.3.7")
    await announce(bob, "ffn.0.0", "ffn.1.4")
    best = uids(await carol.directory.best(GRID, scores("ffn.1.2", "ffn.3.5", "ffn.1.4"), 2))
    assert best == [["ffn.1.2", "ffn.1.3"], ["ffn.3.7", "ffn.1.4"], ["ffn.1.4", "ffn.1.3"]]
    (all_of_them,) = uids(await carol.directory.best(GRID, scores("ffn.3.7"), 9))
    assert len(all_of_them) == 5
    await alice.directory.withdraw(GRID, ["ffn.1.2", "ffn.1.3", "ffn.3.7"])
    assert uids(await dave.directory.best(GRID, scores("ffn.1.2"), 4)) == [["ffn.1.4", "ffn.0.0"]]
    for shapes in ([], [(2, 4)], [(2, 8), (2, 4)], [(2, 4), (3, 8)], [(4,), (8,)]):
        with pytest.raises(ValueError, match=r"do not fit ffn\[4 x 8\]"):
            await dave.directory.best(GRID, [np.zeros(shape, np.float32) for shape in shapes], 1)


@pytest.mark.parametrize("sides", [(300,), (2, 3, 2)])
async def test_grids_of_any_dimension_are_searched_and_listed(sides: tuple[int, ...]) -> None:
    grid = Grid("block", sides)
    everywhere = [grid.uid(index) for index in grid][:: max(1, grid.size // 8)]
    _, (alice, bob, carol) = await scouts(3)
    await announce(alice, *everywhere[::2], grid=grid)
    await announce(bob, *everywhere[1::2], grid=grid)
    live = [info.uid for info in await carol.directory.live(grid)]
    best = await carol.directory.best(grid, scores(*everywhere, grid=grid), 1)
    assert (live, uids(best)) == (everywhere, [[uid] for uid in everywhere])


async def test_a_dead_host_disappears_and_its_place_is_vacant_when_its_record_expires() -> None:
    network, (alice, bob, _) = await scouts(3)
    await announce(alice, "ffn.1.2", "ffn.3.7")
    before = len(await bob.directory.live(GRID))
    network.now().crash("alice")
    early = await bob.directory.claim(GRID, 1, wanted=["ffn.1.2"])
    await asyncio.sleep(61)
    with pytest.raises(NoExpertsError, match=r"ffn\[4 x 8\] can be called: host some, check the prefix"):
        await bob.directory.best(GRID, scores("ffn.1.2"), 4)
    assert await bob.directory.live(GRID) == [] and await bob.directory.find(GRID, "ffn.1.2") is None
    late = await bob.directory.claim(GRID, 1, wanted=["ffn.1.2"])
    assert (before, early, late) == (2, [], ["ffn.1.2"])
    assert [fault.name for fault in network.fired] == ["crash"]


async def test_a_failed_expert_is_banned_until_the_ban_ends_or_it_answers() -> None:
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
    bans = [event for event in bob.services.events.recent() if isinstance(event, ExpertBanned)]
    assert seen == [[["ffn.1.2"]], [["ffn.1.3"]], [["ffn.1.2"]], [["ffn.1.2"]]]
    assert {(ban.uid, ban.reason) for ban in bans} == {("ffn.1.2", "not finite")}
    assert [ban.seconds for ban in bans] == [5.0, 10.0]
    assert bob.services.expert_calls == {alice.peers.id: 1}, "an answer earns its host a call"
    assert alice.services.expert_calls == {}


async def test_a_banned_expert_is_used_again_as_soon_as_another_peer_hosts_it() -> None:
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
    first, banned, again = [*found, await carol.directory.find(GRID, "ffn.1.2")]
    assert first is not None and banned is None and again is not None
    assert (first.step, again.step) == (0, 9)


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
async def test_a_clock_that_is_a_minute_off_neither_hides_nor_keeps_experts(skew_s: float) -> None:
    network, (alice, bob, carol) = await scouts(3)
    network.now().skew("alice", skew_s)
    await announce(alice, "ffn.1.2")
    await announce(bob, "ffn.3.7")
    for scout, uid in ((alice, "ffn.3.7"), (bob, "ffn.1.2")):  # nor takes or loses a place
        assert await scout.directory.claim(GRID, 1, wanted=[uid]) == []
        assert await scout.directory.rivals(GRID, ["ffn.1.2", "ffn.3.7"]) == []
    seen = [len(await scout.directory.live(GRID)) == 2 for scout in (alice, bob, carol)]
    await asyncio.sleep(59)
    seen += [len(await scout.directory.live(GRID)) == 2 for scout in (alice, carol)]
    await asyncio.sleep(2)
    seen += [len(await scout.directory.live(GRID)) == 0 for scout in (alice, carol)]
    assert (seen, [fault.name for fault in network.fired]) == ([True] * 7, ["skew"])


async def test_two_hosts_announce_a_row_and_others_replace_them_before_their_records_expire() -> None:
    network, (alice, *found) = await scouts(8)
    hosts = sorted(found[:5], key=lambda scout: scout.peers.id)
    for i, scout in enumerate(hosts):
        await announce(scout, f"ffn.1.{i}")
    assert len(await alice.dht.get("run/experts/ffn/4x8/1/0")) == 2
    for scout in hosts[:2]:  # the two that announce
        network.now().crash(scout.peers.name)
    for _ in range(8):
        await asyncio.sleep(15)
        for i, scout in enumerate(hosts[2:]):
            await announce(scout, f"ffn.1.{i + 2}")
        assert "ffn.1.4" in [info.uid for info in await alice.directory.live(GRID)]
    assert [fault.name for fault in network.fired] == ["crash", "crash"]


async def test_a_search_reads_few_keys_none_of_them_empty_and_a_repeated_one_reads_none() -> None:
    grid, wide = Grid("ffn", (32, 32)), Grid("wide", (256, 256))
    _, (alice, bob) = await scouts(2)
    await announce(alice, *map(grid.uid, grid), grid=grid)
    batch = scores(*map(grid.uid, list(grid)[::16]), grid=grid)
    first = await bob.directory.best(grid, batch, 4)
    reads = bob.directory._cache.loads
    await asyncio.sleep(module.CACHE_S / 3)
    began = loop_now()
    assert await bob.directory.best(grid, batch, 4) == first
    assert (reads, bob.directory._cache.loads, loop_now() - began) == (5, 5, 0.0)
    await announce(alice, "wide.7.7", "wide.150.3", grid=wide)
    rng = np.random.default_rng(0)
    batch = [rng.standard_normal((64, 256)).astype(np.float32) for _ in range(2)]
    found = await bob.directory.best(wide, batch, 4)
    assert [sorted(sample) for sample in uids(found)] == [["wide.150.3", "wide.7.7"]] * 64
    assert bob.directory._cache.loads == reads + 3


class Far:
    """Takes a second to read and returns the number of reads."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int | None]] = []
        self.fresh = False
        self.cache: Any = Cache(cast(Any, self.read))  # of numbers by name

    async def read(self, key: str, old: int | None, fresh: bool) -> tuple[int, float]:
        self.reads.append((key, old))
        self.fresh = fresh
        value = len(self.reads)
        await asyncio.sleep(1)
        return value, 10.0


async def test_a_cached_value_is_shared_forgotten_refreshed_and_expires() -> None:
    far = Far()
    assert await far.cache.get(["a", "b"]) == {"a": 1, "b": 2}
    assert await far.cache.get(["b", "a"]) == {"a": 1, "b": 2} and far.cache.peek("c") is None
    assert loop_now() == 1, "both at once, and then none"
    far.cache.forget("a")
    asked = [asyncio.create_task(far.cache.get(["a"])) for _ in range(3)]
    await asyncio.sleep(0.5)
    asked[0].cancel()  # must not end the read for the others
    assert await asyncio.gather(*asked[1:]) == [{"a": 3}] * 2 and far.reads[2:] == [("a", None)]
    await asyncio.sleep(6)
    assert far.cache.peek("a") == 3
    await asyncio.sleep(2)
    assert far.cache.peek("a") == 4 and far.reads[3:] == [("a", 3)], "refreshed in the background"
    assert await far.cache.get(["a"], fresh=True) == {"a": 5} and far.fresh
    await asyncio.sleep(10)
    assert far.cache.peek("a") is None
    early = asyncio.create_task(far.cache.get(["a"]))
    await asyncio.sleep(0.5)
    assert await far.cache.get(["a"], fresh=True) == {"a": 7}, "from a read that starts now"
    assert await early == {"a": 6} and far.cache.peek("a") == 7
    late = asyncio.create_task(far.cache.get(["c"]))
    await asyncio.sleep(0.5)
    await far.cache.close()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert far.cache.peek("c") is None


async def test_a_peer_claims_vacant_and_wanted_places_only_and_serves_them_when_it_announces_them() -> None:
    _, (alice, bob, carol) = await scouts(3)
    await announce(alice, *(GRID.uid(index) for index in GRID if index not in ((2, 3), (3, 7))))
    assert await bob.directory.claim(GRID, 3, wanted=["ffn.1.2", "ffn.3.7"]) == ["ffn.3.7"]
    assert (await bob.directory.claim(GRID, 1), await bob.directory.claim(GRID, 1)) == (["ffn.2.3"], [])
    assert len(await carol.directory.live(GRID)) == GRID.size - 2
    await announce(bob, "ffn.2.3", "ffn.3.7")
    await asyncio.sleep(module.CACHE_S)
    assert len(await carol.directory.live(GRID)) == GRID.size


@pytest.mark.parametrize("profile", [LAN, PAPER_CLOUD])
@pytest.mark.parametrize(("sides", "each", "claimed"), [((8,), 1, 8), ((3, 4), 3, 12)])
async def test_peers_that_claim_at_once_get_different_places_while_there_are_some(
    profile: NetworkProfile, sides: tuple[int, ...], each: int, claimed: int
) -> None:
    _, found = await scouts(8, profile=profile)
    claims = (scout.directory.claim(Grid("ffn", sides), each) for scout in found)
    shares = await asyncio.gather(*claims)
    got = [*itertools.chain(*shares)]
    assert len(got) == len(set(got)) == claimed and max(map(len, shares)) <= each


@pytest.mark.parametrize("later_s", [0.0, 1.0])
async def test_the_lowest_claim_hosts_an_expert_for_hosts_and_callers(later_s: float) -> None:
    _, (first, second, carol) = await scouts(3)
    if not later_s and first.peers.id > second.peers.id:
        first, second = second, first
    announcing = asyncio.create_task(announce(first, "ffn.1.2"))
    await asyncio.sleep(later_s)
    await asyncio.gather(announcing, announce(second, "ffn.1.2"))
    assert await first.directory.rivals(GRID, ["ffn.1.2"]) == []
    assert await second.directory.rivals(GRID, ["ffn.1.2"]) == ["ffn.1.2"]
    called = await carol.directory.find(GRID, "ffn.1.2")
    assert called is not None and called.host.id == first.peers.id


async def test_a_search_cut_short_returns_the_experts_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (alice, bob, *_) = await scouts(8)
    grid = Grid("wide", (256, 256))
    await announce(alice, "wide.0.0", "wide.200.0", grid=grid)
    await bob.directory.best(grid, scores("wide.0.0", grid=grid), 1)
    monkeypatch.setattr(module, "EXTRA_WAITS", -1)  # a single round, which finds a prefix it has not read
    assert uids(await bob.directory.best(grid, scores("wide.200.0", grid=grid), 2)) == [
        ["wide.200.0", "wide.0.0"]
    ]
