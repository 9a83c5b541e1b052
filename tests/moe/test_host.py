"""Hosts of experts in simulated swarms: claim, save, take over, give up; and what a user says and sees."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.errors import ExpertError
from colab_swarm.events import ExpertHosted, Fault, Notice
from colab_swarm.moe.blocks import FeedForward, TransformerBlock
from colab_swarm.moe.expert import ExpertRule, plan_host
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ExpertHost
from colab_swarm.moe.saves import SavePlace, SaveRecord
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import pack, unpack
from tests.moe.hosts import GRID, SAVE_S, host, make, peer, resources_of, train

EXPIRED_S = 120.0  # twice the life of an announcement, with checks for dead hosts in between
SIDES = GRID.sides


@pytest.fixture
def sim() -> Iterator[Simulation]:
    """Of alice, in one thread: these tensors are tiny, and more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with cs.simulate(1, network="lan") as simulation:
        yield simulation
    torch.set_num_threads(threads)


def hosted(swarm: Swarm) -> list[tuple[str, int, bool]]:
    return [(event.uid, event.step, event.taken_over) for event in swarm.events.recent(ExpertHosted)]


def texts(swarm: Swarm) -> list[str]:
    return [event.text for event in swarm.events.recent(Notice) if "hosting" in event.text]


def save(hosting: ExpertHost, steps: int) -> None:
    train(hosting, steps)
    hosting.save()


def test_a_dead_hosts_expert_continues_elsewhere_from_its_last_save(sim: Simulation) -> None:
    _, bob, carol = host(sim, "alice"), host(sim, "bob"), host(sim, "carol", spare=1)
    (uid,) = bob.uids
    train(bob, 5)
    bob.wait(2 * SAVE_S)  # saved in the background
    outputs = bob.experts[uid].forward(inputs := torch.rand(3, 4))
    train(bob, 2)  # lost: the steps since the save
    sim.fire("crash", "bob")
    carol.wait(EXPIRED_S)
    assert hosted(sim.swarms["carol"])[-1] == (uid, 5, True)
    assert torch.equal(carol.experts[uid].forward(inputs), outputs)
    found = sim.swarms["alice"].experts.expert(uid, grid=SIDES).info()
    assert (found.host.id, found.step) == (sim.swarms["carol"].id, 5)


def test_a_host_that_stops_loses_nothing_and_is_not_called_any_more(sim: Simulation) -> None:
    _, bob, carol = host(sim, "alice"), host(sim, "bob"), host(sim, "carol", spare=1)
    (uid,) = bob.uids
    train(bob, 6)
    bob.close()
    assert texts(sim.swarms["bob"]) == [f"no longer hosting {uid}: this host stopped"]
    carol.wait(45)
    assert hosted(sim.swarms["carol"])[-1] == (uid, 6, True)  # sooner than a record expires
    bob.close()


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
def test_a_false_claim_is_skipped_in_favour_of_a_real_save(
    sim: Simulation, tmp_path: Path, spoil: Callable[[dict[str, Any]], Any] | None
) -> None:
    host(sim, "alice")
    bob = host(sim, "bob")
    (uid,) = bob.uids
    save(bob, 3)
    mallory = peer(sim, "mallory")
    call, saves = mallory.runtime.call, resources_of(mallory, tmp_path).saves
    ((_, real),) = call(saves.claims(uid))
    root = real.root  # bob's save itself, as one of another step
    if spoil is not None:  # it is there, and its hash matches
        state = unpack(pack(bob.experts[uid].state_dict() | {"step": 9}))
        lies = Snapshot.of(uid.encode(), 9, pack(spoil(state)))
        call(saves.write(lies))
        root = lies.root
    record = SaveRecord((SavePlace(9, root, (mallory.services.peers.contact,)),))
    call(mallory.services.dht.publish(f"{mallory.run_id}/experts/{uid}/save", record, ttl_s=6000))
    sim.fire("crash", "bob")
    call(asyncio.sleep(EXPIRED_S))
    host(sim, "carol")
    assert hosted(sim.swarms["carol"]) == [(uid, 3, True)]
    reader = resources_of(peer(sim, "dave"), tmp_path / "dave").saves
    assert [place.step for _, place in call(reader.claims(uid))] == [9, 3]


def test_an_expert_that_both_sides_of_a_partition_host_stays_at_the_earlier_host(sim: Simulation) -> None:
    alice, bob = host(sim, "alice", ["ffn.0.1"]), peer(sim, "bob")
    save(alice, 2)
    sim.fire("partition", {"alice"}, {"bob"})
    alice.wait(100)
    his = host(sim, "bob", ["ffn.0.1"])
    assert alice.uids == his.uids == ["ffn.0.1"]
    sim.fire("heal")
    alice.wait(300)
    assert alice.uids and not his.uids and not texts(sim.swarms["alice"])
    assert texts(bob) == ["no longer hosting ffn.0.1: another peer claimed it earlier"]


def test_a_full_disk_is_reported_once_and_only_what_a_peer_has_is_published(
    sim: Simulation, tmp_path: Path
) -> None:
    """A file is where the folder should be: nothing can be written."""
    for name in ("alice", "bob"):
        (tmp_path / name).write_text("")
    reader = peer(sim, "carol")
    saves = resources_of(reader, tmp_path / "carol").saves
    save(host(sim, "alice", folder=tmp_path / "alice"), 1)
    assert not reader.runtime.call(saves.saved(GRID)), "no peer has it"
    (tmp_path / "alice").unlink()
    bob = host(sim, "bob", folder=tmp_path / "bob")
    for _ in range(3):
        save(bob, 1)
    (fault,) = sim.swarms["bob"].events.recent(Fault)
    assert "cannot write" in str(fault)
    assert reader.runtime.call(saves.saved(GRID)) == {*bob.uids}, "alice has it"
    (_, kept), *_ = reader.runtime.call(saves.claims(bob.uids[0]))
    assert kept.step == 3


def test_a_maker_that_fails_is_the_callers_error_and_claims_nothing(sim: Simulation) -> None:
    made = []

    def fail() -> nn.Module:
        made.append(make())
        if len(made) > 1:  # not while it is measured
            raise RuntimeError("CUDA out of memory")
        return made[0]

    with pytest.raises(RuntimeError, match="out of memory"):
        host(sim, "alice", 2, maker=fail)
    assert len(host(sim, "bob", GRID.size).uids) == GRID.size


@pytest.mark.slow
@pytest.mark.ordeal
def test_no_expert_loses_more_than_its_last_steps_while_hosts_are_killed(sim: Simulation) -> None:
    """Every 200 s a random host of three dies and another joins; experts are taken over in between."""
    rng, reader = random.Random(0), sim.swarms["alice"]
    hosts = {f"host {i}": host(sim, f"host {i}", 2, spare=2) for i in range(3)}
    swarms = [sim.swarms[name] for name in hosts]
    saved_steps = Counter[str]()

    def learn(seconds: float) -> None:
        for _ in range(int(seconds / 20)):
            for index in GRID:
                with contextlib.suppress(ExpertError):
                    one = reader.experts.expert(GRID.uid(index), grid=SIDES, timeout_s=2.0)
                    one(torch.ones(2, 4)).sum().backward()
            reader.runtime.call(asyncio.sleep(20.0))

    for i in range(3, 15):
        learn(100)
        before = {uid: one.step for hosting in hosts.values() for uid, one in hosting.experts.items()}
        learn(100)  # what it had 100 s ago is saved
        victim = rng.choice(sorted(hosts))
        sim.fire("crash", victim)
        for uid in hosts.pop(victim).uids:
            saved_steps[uid] = max(before.get(uid, 0), saved_steps[uid])
        hosts[f"host {i}"] = host(sim, f"host {i}", 2, spare=2)
        swarms.append(sim.swarms[f"host {i}"])
    learn(200)
    assert len(sim.network.fired) == 12
    assert sum(taken_over for swarm in swarms for *_, taken_over in hosted(swarm)) >= 10
    alive = {uid: expert.step for hosting in hosts.values() for uid, expert in hosting.experts.items()}
    assert len(alive) == GRID.size and sum(saved_steps.values()) > 100
    assert all(alive[uid] >= step for uid, step in saved_steps.items())


# -- what a user says and sees


def test_a_swarm_has_one_host_of_a_prefix_and_one_folder(tmp_path: Path, capsys: Any) -> None:
    options: dict[str, Any] = {"grid": (2, 3), "folder": tmp_path / "saves"}
    with cs.simulate(1) as sim:
        alice = sim.swarms["alice"]
        first = alice.experts.host("ffn", make, count=1, **options)
        second = alice.experts.host("ffn", make, grid=(2, 3), count=2)
        assert first.stopped and first.uids == [] and "stopped" in repr(first)
        assert first.panel().refresh().over and not capsys.readouterr().out
        seen = second.panel().refresh()
        assert not seen.over and len(seen.served) == len(second.uids) == 2
        assert repr(second) == "ExpertHost(ffn[2 x 3], 2 of 2 experts, 0 steps)"
        assert "; 6 of ffn[2 x 3] fit: 80% of " in second.arithmetic
        with pytest.raises(ValueError, match="saves experts in"):
            alice.experts.host("other", make, grid=(2,), folder=tmp_path / "elsewhere", count=1)
        learned = {uid: 1 for uid in second.uids}
        train(second)
        second.save()
        second.wait(1.0)
        assert {uid: one.step for uid, one in second.statistics().items()} == learned
        alice.leave()
        assert second.stopped and not second.uids
    with cs.simulate(1) as sim:
        again = sim.swarms["alice"].experts.host("ffn", make, count=2, **options)
        assert {uid: one.step for uid, one in again.statistics().items()} == learned
        assert not any(taken_over for *_, taken_over in hosted(sim.swarms["alice"])), "from its own disk"


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


def test_experts_are_spread_over_the_devices_and_so_are_those_of_a_second_host(
    sim: Simulation, tmp_path: Path
) -> None:
    alice = sim.swarms["alice"]
    resources, counts = resources_of(alice, tmp_path), Counter[torch.device]()
    devices = tuple(torch.device("cpu", index) for index in range(3))
    for prefix, count, spread in (("ffn", 4, [1, 1, 2]), ("more", 2, [2, 2, 2])):
        plan = plan_host(Grid(prefix, SIDES), make, count=count, dtype="bfloat16")
        hosting = ExpertHost(alice.runtime, resources, replace(plan, devices=devices), repr)
        alice.runtime.call(hosting.start())
        counts.update(expert.device for expert in hosting.experts.values())
        assert sorted(counts.values()) == spread
        train(hosting)
        one = peer(sim, "bob").experts.expert(hosting.uids[0], grid=SIDES)
        assert one(torch.ones(2, 4)).shape == (2, 4)
    alice.runtime.call(resources.close())
