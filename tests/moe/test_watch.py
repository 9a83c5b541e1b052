"""The snapshots of a grid's experts that a panel shows."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import ExpertError
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.host import LIST_EVERY_S, ExpertsSnapshot
from colab_swarm.net.peers import short
from colab_swarm.swarm.swarm import Swarm
from tests.moe.hosts import GRID, host, train


def look(swarm: Swarm, after_s: float = 0.0) -> ExpertsSnapshot:
    """Return the snapshot after ``after_s``, reading every half second as a panel does."""
    panel = swarm.experts.panel("ffn", grid=GRID.sides)
    for _ in range(int(2 * after_s)):
        panel.refresh()
        swarm.runtime.call(asyncio.sleep(0.5))
    return panel.refresh()


def test_the_first_snapshot_is_immediate_and_later_ones_list_hosts_experts_and_their_shares() -> None:
    with cs.simulate(2, network="lan") as sim:
        alice, bob = sim.swarms.values()
        hosting = host(sim, "alice", 2)
        train(hosting, 5)
        hosting.wait(30)
        host(sim, "bob")
        at_once = look(bob)
        assert (at_once.live, at_once.listed) == ((), False)
        seen = look(bob, 2.0)
        assert Counter((one.host, one.mine) for one in seen.live) == {
            (short(alice.id), False): 2,
            (short(bob.id), True): 1,
        }
        assert [expert.uid for expert in seen.served] == [one.uid for one in seen.live if one.mine]
        assert seen.listed and not seen.fault
        assert {one.share for one in seen.live} == {None}, "no expert has learned since"
        busy, idle = hosting.uids
        hosting.experts[busy].backward(torch.rand(2, 4), torch.rand(2, 4))
        shares = {one.uid: one.share for one in look(bob, 60.0).live}
        assert (shares[busy], shares[idle]) == (1.0, 0.0)


def test_a_failed_expert_is_left_out_and_one_of_a_dead_host_is_dead() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a bug")

    with cs.simulate(2, network="lan") as sim:
        bob = sim.swarms["bob"]
        first, second = (hosting := host(sim, "alice", 2)).uids
        assert [one.uid for one in (look(bob), look(bob, 2.0))[1].live] == [first, second]
        hosting.experts[first].module.forward = fail
        with pytest.raises(ExpertError, match="a bug"):
            bob.experts.expert(first, grid=GRID.sides)(torch.ones(1, 4))
        seen = look(bob)
        assert [one.uid for one in seen.live] == [second] and seen.left_out == (first,)
        assert [one.uid for one in look(bob, 2 * LIST_EVERY_S).live] == [first, second]
        sim.fire("crash", "alice")
        seen = look(bob, 120.0)
        assert sim.swarms.keys() == {"bob"}, "the fault did not fire"
        assert seen.live == () and seen.dead == (first, second)


def test_a_failed_listing_is_reported_and_a_closed_watch_reads_nothing(monkeypatch: Any) -> None:
    async def fails(*_: object) -> None:
        raise ConnectionError("no way")

    monkeypatch.setattr(Directory, "live", fails)
    with cs.simulate(1) as sim:
        (alice,) = sim.swarms.values()
        panel = alice.experts.panel("ffn", grid=GRID.sides)
        assert "no way" in look(alice, 1.0).fault
        alice.leave()
        assert panel.refresh().over
