"""The snapshots of a grid's experts that a panel shows."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from colab_swarm.moe.directory import Directory
from colab_swarm.moe.host import LIST_EVERY_S, ExpertsSnapshot, ExpertsWatch
from colab_swarm.net.peers import short
from colab_swarm.runtime import Runtime
from tests.moe.hosts import GRID, Member, Run, train


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def watch_of(member: Member) -> tuple[ExpertsWatch, Directory]:
    resources = member.resources
    served, runtime = resources.server.statistics, Runtime.__new__(Runtime)  # these tests look on the loop
    return ExpertsWatch(runtime, member.peers.id, resources.directory, GRID, served), resources.directory


async def look(watch: ExpertsWatch, after_s: float = 0.0) -> ExpertsSnapshot:
    """Return the snapshot after ``after_s``, reading every half second as a panel does."""
    read = watch.look
    for _ in range(int(2 * after_s)):
        await read()
        await asyncio.sleep(0.5)
    return await read()


async def test_the_first_snapshot_is_immediate_and_later_ones_list_hosts_experts_and_their_shares(
    run: Run,
) -> None:
    alice, hosting = await run.host("alice", 2)
    train(hosting, 5)
    await asyncio.sleep(30)
    bob, _ = await run.host("bob", 1)
    watch, _ = watch_of(bob)
    at_once = await look(watch)
    assert (at_once.live, at_once.listed) == ((), False)
    seen = await look(watch, 2.0)
    assert Counter((one.host, one.mine) for one in seen.live) == {
        (short(alice.peers.id), False): 2,
        (short(bob.peers.id), True): 1,
    }
    assert [expert.uid for expert in seen.served] == [one.uid for one in seen.live if one.mine]
    assert seen.listed and not seen.fault
    assert {one.share for one in seen.live} == {None}, "no expert has learned since"
    busy, idle = sorted(hosting.experts)
    hosting.experts[busy].backward(torch.rand(2, 4), torch.rand(2, 4))
    shares = {one.uid: one.share for one in (await look(watch, 60.0)).live}
    assert (shares[busy], shares[idle]) == (1.0, 0.0)


async def test_a_failed_expert_is_left_out_and_one_of_a_dead_host_is_dead(run: Run) -> None:
    alice, _ = await run.host("alice", 2)
    watch, directory = watch_of(await run.join("bob"))
    seen = await look(watch, 2.0)
    first, second = (one.uid for one in seen.live)
    (info, _) = await directory.live(GRID)
    directory.on_failure(info, "did not answer")
    seen = await look(watch)
    assert [one.uid for one in seen.live] == [second] and seen.left_out == (first,)
    assert [one.uid for one in (await look(watch, 2 * LIST_EVERY_S)).live] == [first, second]
    alice.peers.crash()
    seen = await look(watch, 120.0)
    assert not alice.peers.up, "the fault did not fire"
    assert seen.live == () and seen.dead == (first, second)


async def test_a_failed_listing_is_reported_and_a_closed_watch_reads_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, directory = watch_of(await run.join("alice"))

    async def fails(grid: object) -> None:
        raise ConnectionError("no way")

    monkeypatch.setattr(directory, "live", fails)
    assert "no way" in (await look(watch, 1.0)).fault
    watch.close()
    assert watch.snapshot().over
    await look(watch)  # was queued
    assert watch.snapshot().over
