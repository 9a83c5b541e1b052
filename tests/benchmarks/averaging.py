"""An averaging round among processes on loopback, compared with gloo and hivemind."""

import asyncio
import os
import statistics
import tempfile
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import msgspec
import numpy as np
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import Group, GroupMember, RoundTerms
from colab_swarm.averaging.moshpit import MoshpitAverager
from colab_swarm.averaging.round import Averager
from colab_swarm.events import RoundFinished
from colab_swarm.experiments.loss_per_byte import wait_trainers
from colab_swarm.experiments.report import Report, reports
from colab_swarm.net.peers import Contact
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.records import ProgressRecord, StepTaken
from colab_swarm.training.rounds import Ready, TrainedModel
from colab_swarm.training.settings import RoundInput, StepOffer, TrainingSettings
from tests.benchmarks.harness import (
    Channel,
    Crew,
    Worker,
    call_all,
    enter,
    receive_all,
)
from tests.benchmarks.link import contact, start_node, where

PEERS = 4
STEP_PEERS = (4, 8)
CROWD = 16
GROUP = 4


@reports("averaging")
def run(report: Report, python: str | None = None) -> None:
    """With a ``python`` that has hivemind, also measure the steps of hivemind."""
    numel, rounds = (2_000_000, 6) if report.quick else (18_000_000, 50)
    with Crew() as crew, tempfile.TemporaryDirectory() as folder:
        gloo = [crew.start(average_with_gloo, rank, numel, f"{folder}/meeting") for rank in range(PEERS)]
        peers = [crew.start(average_as_peer, rank, numel) for rank in range(PEERS)]
        found = map(contact, receive_all(peers))
        members = [GroupMember(one.id, one.addresses, 1.0 + rank, 1.0) for rank, one in enumerate(found)]
        members.sort(key=lambda member: member.id)
        receive_all(gloo)

        def average() -> list[dict[str, Any]]:
            group = Group(os.urandom(16), RoundTerms("", 0, b"bench", numel), tuple(members))
            return run_together(peers, group=msgspec.to_builtins(group))

        pairs = [(average(), run_together(gloo)) for _ in range(rounds + 1)]
    ours, theirs = zip(*pairs, strict=True)
    seconds, gloo_s = (
        statistics.median(max(one["seconds"] for one in members) for members in found[1:])
        for found in (ours, theirs)
    )
    right = [all(one["right"] for one in members) for members in ours[1:]]
    note = "4 processes, in turns; only ours is encrypted"
    report.add_rows(
        ("seconds", seconds, "s", note),
        ("gloo_seconds", gloo_s, "s", note),
        ("vs_gloo", seconds / gloo_s, "times", "lower is better"),
        ("success", statistics.mean(right), "", f"of {rounds} rounds"),
    )
    _measure_steps(report, python)


def run_together(workers: list[Worker], **task: object) -> list[dict[str, Any]]:
    call_all(workers, **task)
    call_all(workers)
    return call_all(workers)


def pattern(numel: int) -> Floats:
    return np.resize(np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32), numel)


async def average_as_peer(parent: Channel, rank: int, numel: int) -> None:
    node = await start_node(run_id="bench")
    averager = Averager(node)
    found = where(node)
    values = np.empty(numel, np.float32)
    others = np.empty(numel, np.float32)
    while True:
        group = msgspec.convert((await parent.wait_call(**found))["group"], Group)
        for member in group.members:
            node.learn(Contact(member.id, member.addresses))
        weights = [member.weight for member in group.members]
        mean = np.float32(np.average(weights, weights=weights))
        values, others = others, values  # other members may still read the vector of the last round
        values[:] = (1.0 + rank) * pattern(numel)
        await parent.wait_call()
        began = time.perf_counter()
        result = await averager.average(group, HostVector(values))
        found = {"seconds": time.perf_counter() - began}
        await parent.wait_call()  # a check at this moment would slow down the other members
        right = await asyncio.to_thread(np.allclose, values, mean * pattern(numel), rtol=1e-5)
        found["right"] = right and not result.kept_local


def average_with_gloo(parent: Channel, rank: int, numel: int, meeting: str, peers: int = PEERS) -> None:
    torch.set_num_threads(1)
    collectives: Any = torch.distributed
    collectives.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=peers)
    values = torch.from_numpy(pattern(numel))
    found = dict[str, float]()
    while True:
        parent.call(**found)
        parent.call()
        found = {"seconds": timeit(partial(collectives.all_reduce, values), number=1)}
        values /= peers
        parent.call()


def _measure_steps(report: Report, python: str | None) -> None:
    numel, steps = (400_000, 3) if report.quick else (2_400_000, 10)
    ways: dict[str, list[Any]] = {"": [make_full_steps, "step"]}
    if python is not None:
        ways["hivemind_"] = [[python, Path(__file__).with_name("hivemind_worker.py")]]
    sizes = STEP_PEERS[:1] if report.quick else STEP_PEERS
    for peers in sizes:
        for whose, work in ways.items():
            step_s, allreduce_s, right = _time_steps(work, peers, numel, steps)
            report.add(f"{whose}step_s_{peers}", step_s, "s", f"right at all in {right:.0%} of the steps")
            if not whose:
                report.add(f"allreduce_s_{peers}", allreduce_s, "s", "the averaging itself")
        if python is not None:
            suffix = "" if peers == sizes[-1] else f"_{peers}"
            gain = step_s / report.figures[f"step_s_{peers}"]
            report.add(f"step_vs_hivemind{suffix}", gain, "times", "faster per full step")
    if not report.quick:
        *_, right = _time_steps([make_full_steps, "groups"], CROWD, numel, steps)
        report.add("groups_success", right, "", "groups of 4")


def _time_steps(work: list[Any], peers: int, numel: int, steps: int) -> tuple[float, float, float]:
    """Return the slowest member's times of a step and of the averaging in it, and the share of right steps."""
    found = []
    with Crew() as crew:
        entry = crew.start(*work, numel, peers, grace_s=10.0).receive()["contact"]
        for _ in range(peers - 1):
            crew.start(*work, numel, peers, entry, grace_s=10.0)
        receive_all(crew[1:])
        for _ in range(steps + 1):
            for index, worker in enumerate(crew):
                worker.send(value=float(index))
            receive_all(crew)
            members = call_all(crew)
            errors = [abs(one[end] - (peers - 1) / 2) for one in members for end in ("low", "high")]
            seconds = (max(one.get(key, 0.0) for one in members) for key in ("seconds", "reduced_s"))
            found.append((*seconds, max(errors) < 0.01))
    step_s, reduced_s, right = zip(*found[1:], strict=True)
    return statistics.median(step_s), statistics.median(reduced_s), statistics.mean(right)


def make_full_steps(parent: Channel, mode: str, numel: int, peers: int, *invites: str) -> None:
    def no_state() -> Snapshot:
        raise AssertionError("no peer falls behind in this benchmark")

    async def begin() -> LinkRounds:
        own = ProgressRecord(0, b"same", 0.0, 1.0, syncing=False, name=swarm.name, min_peers=peers)
        settings = TrainingSettings("bench", peers, communication=cs.Communication("float16"))
        model = TrainedModel(numel, b"", no_state, 0.0, lambda: None)
        made = LinkRounds(swarm.services, settings, own, model)
        await made.start()
        return made

    async def step() -> None:
        """Count one sample of as many as there are peers, form the group and average."""
        ready = Ready.COMPUTE
        while ready is Ready.COMPUTE:
            rounds.count(1.0, loop_now())
            ready = await rounds.ready(StepOffer(1.0))
        assert ready is Ready.CONTRIBUTE, ready
        lineage = rounds.view.own.lineage
        given = RoundInput(HostVector(values), 1.0, 1.0)
        async with aclosing(rounds.contribute(given)) as outcomes:
            async for outcome in outcomes:
                await rounds.on_applied(outcome, StepTaken(outcome.mean.lineage_after(lineage)))

    swarm = enter(*invites, name=f"peer-{time.monotonic_ns()}")
    rounds = swarm.runtime.call(begin())
    groups = MoshpitAverager(
        swarm.services.router, swarm.services.dht, swarm.services.averager, "bench/groups"
    )
    values = np.empty(numel, np.float32)
    others = np.empty(numel, np.float32)
    found: dict[str, Any] = {"contact": "" if invites else str(swarm.invite())}
    while True:
        values, others = others, values
        values[:] = parent.call(**found)["value"]
        if mode == "step":
            wait_trainers(swarm, rounds, peers)
        parent.call(ready=True)
        began = time.perf_counter()
        if mode == "groups":
            values[:], _ = swarm.runtime.call(groups.average(values, group_size=GROUP))
        else:
            swarm.runtime.call(step())
        seconds = time.perf_counter() - began
        found = {"seconds": seconds, "low": float(values.min()), "high": float(values.max())}
        last = next(reversed(swarm.events.recent(RoundFinished)), None)
        found["reduced_s"] = last.averaging_s if isinstance(last, RoundFinished) else 0.0
