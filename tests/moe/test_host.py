"""Hosts of experts on the simulated network and virtual time: claim, save, take over, give up."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from colab_swarm.errors import ExpertError
from colab_swarm.events import ExpertHosted, Fault, Notice
from colab_swarm.moe.blocks import FeedForward, TransformerBlock
from colab_swarm.moe.expert import ExpertRule, plan_host
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ExpertHost
from colab_swarm.moe.saves import SavePlace, SaveRecord
from colab_swarm.sim.runtime import SimRuntime
from colab_swarm.swarm.experts import SwarmExperts
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import pack, unpack
from tests.moe.hosts import GRID, PLAN, Member, Run, host_of, make, train
from tests.moe.local import calls_of

EXPIRED_S = 120.0  # twice the life of an announcement, with checks for dead hosts in between


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def hosted(member: Member) -> list[tuple[str, int, bool]]:
    return [(e.uid, e.step, e.taken_over) for e in member.events(ExpertHosted) if isinstance(e, ExpertHosted)]


async def saved_by(hosting: ExpertHost, steps: int) -> None:
    train(hosting, steps)
    await hosting.save_changed()


async def test_hosts_share_the_grid_and_all_peers_find_their_experts(run: Run) -> None:
    _, alice = await run.host("alice", 4)
    _, bob = await run.host("bob", 2)
    reader = await run.join("carol")
    assert not alice.experts.keys() & bob.experts.keys()
    live = await reader.resources.directory.live(GRID)
    assert {info.uid for info in live} == alice.experts.keys() | bob.experts.keys() and len(live) == 6
    assert (await calls_of(reader.peers).forward(live[0], torch.ones(2, 4).numpy())).shape == (2, 4)


async def test_a_dead_hosts_expert_continues_elsewhere_from_its_last_save(run: Run) -> None:
    await run.host("alice", 1)
    member, bob = await run.host("bob", 1)
    carol, other = await run.host("carol", 1, capacity=2)
    results = member.resources.saves.results
    (uid,) = bob.experts
    train(bob, 5)
    await asyncio.sleep(2 * PLAN.save_s)  # saved in the background
    last = results[uid]
    assert (last.step, len(last.holders)) == (5, 2)
    await bob.save_changed()
    assert results[uid] is last, "nothing has changed"
    outputs = bob.experts[uid].forward(inputs := torch.rand(3, 4))
    train(bob, 2)  # lost: the steps since the save
    run.network.now().crash("bob")
    await asyncio.sleep(EXPIRED_S)
    assert [fault.name for fault in run.network.fired] == ["crash"]
    assert hosted(carol)[-1] == (uid, 5, True)
    assert torch.equal(other.experts[uid].forward(inputs), outputs)
    found = await carol.resources.directory.find(GRID, uid)
    assert found is not None and found.host.id == carol.peers.id and found.step == 5
    await saved_by(other, 1)
    assert carol.resources.saves.results[uid].step == 6  # and on from there


async def test_a_host_that_returns_continues_from_its_own_disk(run: Run) -> None:
    _, hosting = await run.host("alice", 2)
    await saved_by(hosting, 4)
    uids = [*hosting.experts]
    run.network.now().crash("alice")
    run.begin_again()  # no other peer is left, and no record of it
    again, _ = await run.host("alice", 3)
    assert sorted(hosted(again)[:2]) == sorted((uid, 4, False) for uid in uids) and len(hosted(again)) == 3
    run.network.now().crash("alice")
    run.begin_again()
    (other, *_) = {GRID.uid(index) for index in GRID} - {*uids}
    third, _ = await run.host("alice", 3, uids=(other,))  # no others, though they are saved here
    assert hosted(third) == [(other, 0, False)]
    assert [fault.name for fault in run.network.fired] == ["crash", "crash"]


async def test_a_host_that_stops_loses_nothing_and_is_not_called_any_more(run: Run) -> None:
    await run.host("alice", 1)
    bob, hosting = await run.host("bob", 1)
    (uid,) = hosting.experts
    carol, _ = await run.host("carol", 1, capacity=2)
    train(hosting, 6)
    await hosting.withdraw()
    assert [event.text for event in bob.events(Notice)] == [f"no longer hosting {uid}: this host stopped"]  # type: ignore[attr-defined]
    await asyncio.sleep(45)
    assert hosted(carol)[-1] == (uid, 6, True)  # sooner than a record expires
    await hosting.withdraw()


def with_wide_moments(state: dict[str, Any]) -> dict[str, Any]:
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1 << 10)
    return state


SPOILT: list[Callable[[dict[str, Any]], Any]] = [
    lambda state: [1, 2],
    lambda state: state | {"step": 8},
    lambda state: state | {"module": FeedForward(4, 9).state_dict()},
    with_wide_moments,
]


@pytest.mark.parametrize("spoil", [*SPOILT, None])
async def test_a_false_claim_is_skipped_in_favour_of_a_real_save(
    run: Run, spoil: Callable[[dict[str, Any]], Any] | None
) -> None:
    await run.host("alice", 1)
    _, bob = await run.host("bob", 1)
    (uid,) = bob.experts
    await saved_by(bob, 3)
    mallory = await run.join("mallory")
    if spoil is None:  # bob's save itself, as one of another step
        ((_, real),) = await mallory.resources.saves.claims(uid)
        root = real.root
    else:  # it is there, and its hash matches
        state = unpack(pack(bob.experts[uid].state_dict() | {"step": 9}))
        lies = Snapshot.of(uid.encode(), 9, pack(spoil(state)))
        await mallory.resources.saves.write(lies)
        root = lies.root
    record = SaveRecord((SavePlace(9, root, (mallory.peers.contact,)),))
    await mallory.services.dht.publish(f"run/experts/{uid}/save", record, ttl_s=6000)
    run.network.now().crash("bob")
    await asyncio.sleep(EXPIRED_S)
    carol, _ = await run.host("carol", 1)
    assert hosted(carol) == [(uid, 3, True)] and run.network.fired
    assert [place.step for _, place in await carol.resources.saves.claims(uid)] == [9, 3]


async def test_an_expert_that_both_sides_of_a_partition_host_stays_at_the_earlier_host(run: Run) -> None:
    alice, hers = await run.host("alice", uids=("ffn.0.1",))
    await saved_by(hers, 2)
    bob = await run.join("bob")
    run.network.now().partition({"alice"}, {"bob"})
    await asyncio.sleep(100)
    his = host_of(bob.resources, replace(PLAN, uids=("ffn.0.1",)))
    await his.start()
    bob.peers.when_down(his.kill)
    assert hers.experts.keys() == his.experts.keys() == {"ffn.0.1"}
    run.network.now().heal()
    await asyncio.sleep(300)
    assert [fault.name for fault in run.network.fired] == ["partition", "heal"]
    assert hers.experts and not his.experts and not alice.events(Notice)
    (lost,) = bob.events(Notice)
    assert "no longer hosting ffn.0.1: another peer claimed it earlier" in str(lost)


@pytest.mark.parametrize("away_s", [10, 200])
async def test_a_host_that_restarts_gets_its_expert_back_or_yields(run: Run, away_s: int) -> None:
    await run.join("dave")
    await run.host("alice", uids=("ffn.0.1",))
    run.network.now().crash("alice")
    await asyncio.sleep(away_s)
    _, his = await run.host("bob", uids=("ffn.0.1",))
    _, hers = await run.host("alice", uids=("ffn.0.1",))
    await asyncio.sleep(300)
    assert [bool(hers.experts), bool(his.experts)] == [away_s == 10, away_s == 200] and run.network.fired


async def test_a_full_disk_is_reported_once_and_only_what_a_peer_has_is_published(
    run: Run, tmp_path: Path
) -> None:
    for name in ("alice", "bob"):
        (tmp_path / name).write_text("a file where the folder should be: nothing can be written")
    alice, hers = await run.host("alice", 1)
    await saved_by(hers, 1)
    assert alice.resources.saves.results and not await alice.resources.saves.saved(GRID), "no peer has it"
    (tmp_path / "alice").unlink()
    bob, hosting = await run.host("bob", 1)
    for _ in range(3):
        await saved_by(hosting, 1)
    (fault,) = bob.events(Fault)
    assert "cannot write" in str(fault) and len(hosting.experts) == 1
    assert {kept.step for kept in bob.resources.saves.results.values()} == {3}
    assert await alice.resources.saves.saved(GRID) == {*hosting.experts}, "alice has it"


async def test_a_maker_that_fails_is_the_callers_error_and_claims_nothing(run: Run) -> None:
    alice = await run.join("alice")

    def fail() -> nn.Module:
        raise RuntimeError("CUDA out of memory")

    hosting = host_of(alice.resources, replace(PLAN, make=fail, count=2, capacity=2))
    with pytest.raises(RuntimeError, match="out of memory"):
        await hosting.start()
    assert await alice.resources.directory.live(GRID) == []
    assert len(await alice.resources.directory.claim(GRID, 6)) == 6


@pytest.mark.slow
@pytest.mark.ordeal
async def test_no_expert_loses_more_than_its_last_steps_while_hosts_are_killed(run: Run) -> None:
    """Every 200 s a random host of three dies and another joins; experts are taken over in between."""
    rng = random.Random(0)
    settings = {"capacity": 4}
    reader = await run.join("reader")
    hosts = {f"host {i}": await run.host(f"host {i}", 2, **settings) for i in range(3)}
    members = dict(hosts)
    saved_steps: dict[str, int] = {}

    async def learn() -> None:
        ones, calls = torch.ones(2, 4).numpy(), calls_of(reader.peers, timeout_s=2.0)
        while True:
            for info in await reader.resources.directory.live(GRID):
                with contextlib.suppress(ExpertError):
                    await calls.backward(info, ones, ones)
            await asyncio.sleep(20.0)

    learning = asyncio.create_task(learn())
    for i in range(3, 15):
        await asyncio.sleep(200)
        victim = rng.choice(sorted(hosts))
        run.network.now().crash(victim)
        dead, _ = hosts.pop(victim)
        for uid, kept in dead.resources.saves.results.items():
            saved_steps[uid] = max(kept.step, saved_steps.get(uid, 0))
        name = f"host {i}"
        members[name] = hosts[name] = await run.host(name, 2, **settings)
    await asyncio.sleep(200)
    learning.cancel()
    taken = [one for member, _ in members.values() for one in hosted(member) if one[2]]
    assert len(run.network.fired) == 12 and len(taken) >= 10
    alive = {uid: expert.step for _, hosting in hosts.values() for uid, expert in hosting.experts.items()}
    assert len(alive) == GRID.size
    assert all(alive[uid] >= step > 0 for uid, step in saved_steps.items())


# -- what a user says and sees


def test_the_host_shows_what_it_hosts_and_stops(run: Run) -> None:
    runtime = SimRuntime()
    member = runtime.call(run.join("alice"))
    host = ExpertHost(runtime, member.resources, plan_host(GRID, make, count=2), repr)
    runtime.call(host.start())
    with host:
        assert len(host.uids) == 2 and set(host.statistics()) == set(host.uids)
        assert host.panel() == repr(host) == "ExpertHost(ffn[2 x 3], 2 of 2 experts, 0 steps)"
        train(host)
        host.save()
        host.wait(1.0)
        assert [(uid, one.step) for uid, one in host.statistics().items()] == [(uid, 1) for uid in host.uids]
        assert {kept.step for kept in member.resources.saves.results.values()} == {1}
        assert "; 6 of ffn[2 x 3] fit: 80% of " in host.arithmetic
    assert host.uids == [] and "stopped" in repr(host)
    runtime.close()


def test_a_swarm_has_one_host_of_a_prefix_and_one_folder(run: Run, tmp_path: Path, capsys: Any) -> None:
    runtime = SimRuntime()
    member = runtime.call(run.join("alice"))
    runtime.call(member.resources.close())
    allowed = partial(SwarmExperts, runtime, member.services, lambda **_: None, lambda: None)
    experts = allowed()
    first = experts.host("ffn", make, grid=(2, 3), folder=tmp_path / "saves", count=1)
    second = experts.host("ffn", make, grid=(2, 3), count=2)
    assert first.stopped and first.panel().refresh().over and not capsys.readouterr().out
    seen = second.panel().refresh()
    assert not seen.over and len(seen.served) == len(second.uids) == 2
    with pytest.raises(ValueError, match="saves experts in"):
        experts.host("other", make, grid=(2,), folder=tmp_path / "elsewhere", count=1)
    train(second)
    experts.close()
    assert second.stopped and not second.uids and any((tmp_path / "saves").rglob("*"))
    again = allowed()  # what the closed one served may be served again
    again.host("ffn", make, grid=(2, 3), folder=tmp_path / "saves", count=1)
    again.close()
    runtime.close()


def test_the_count_follows_from_memory_and_leaves_room_for_experts_of_dead_hosts() -> None:
    plan = plan_host(Grid("ffn", (4, 4)), make)
    assert (plan.count, plan.capacity, plan.sample) == (12, 16, (4,)), "its samples are those of its module"
    why = "hosting 12 experts, and up to 16 when other hosts die; 16 of ffn[4 x 4] fit"
    assert plan.arithmetic.startswith(why)
    plan = plan_host(Grid("ffn", (4, 4)), make, count=3)
    assert (plan.count, plan.capacity) == (3, 7)
    plan = plan_host(GRID, lambda: TransformerBlock(8, 2), count=["ffn.0.1", "ffn.1.1"])
    assert (plan.count, plan.capacity, plan.uids) == (2, 2, ("ffn.0.1", "ffn.1.1"))
    assert plan.sample == (-1, 8)
    with pytest.raises(ValueError, match=r"unknown samples of Linear\. Say sample=\(512,\)"):
        plan_host(GRID, lambda: nn.Linear(4, 4))


IMPOSSIBLE: list[dict[str, Any]] = [
    *({"count": 0}, {"count": ["ffn.9.9"]}, {"sample": (5,)}, {"copies": -1}, {"copies": 99}),
    *({"spare": -1}, {"save_s": 0.0}, {"takeover_s": 0.0}),
    *({"devices": "cuda:9"}, {"devices": ["tpu"]}, {"dtype": "int8"}),
]


def test_impossible_hosts_are_refused_at_once() -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"state": object()}

    for wrong in IMPOSSIBLE:
        with pytest.raises(ValueError):
            plan_host(GRID, make, **wrong)
    with pytest.raises(TypeError, match="not saved without pickle"):
        plan_host(GRID, make, rule=ExpertRule(lambda parameters: Odd(parameters, lr=0.1)))


def test_none_fits_is_an_error_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.moe.expert.accelerators", lambda: (torch.device("cpu"),))
    monkeypatch.setattr("colab_swarm.moe.expert.free_ram_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"0 of ffn\[2 x 3\] fit: 80% of .* give count=1 to try"):
        plan_host(GRID, make)
    assert plan_host(GRID, make, count=1).count == 1


async def test_experts_are_spread_over_the_devices_and_so_are_those_of_a_second_host(run: Run) -> None:
    devices = tuple(torch.device("cpu", index) for index in range(3))
    member, hosting = await run.host("alice", 4, devices=devices, dtype="bfloat16")
    counts = Counter(expert.device for expert in hosting.experts.values())
    assert sorted(counts.values()) == [1, 1, 2]
    more = host_of(member.resources, replace(PLAN, grid=Grid("more", (2,)), count=2, devices=devices))
    await more.start()
    counts.update(expert.device for expert in more.experts.values())
    assert [*counts.values()] == [2, 2, 2]
    train(hosting)
    calls = calls_of((await run.join("bob")).peers)
    info = (await member.resources.directory.live(GRID))[0]
    assert (await calls.forward(info, np.ones((2, 4), np.float32))).shape == (2, 4)
    await more.withdraw()
    await hosting.withdraw()
