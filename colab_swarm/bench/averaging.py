"""An averaging round among processes on loopback, compared with torch.distributed's gloo, memory alone and hivemind."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import distributed

import colab_swarm as cs
from colab_swarm.averaging.exchange import UploadEncoding
from colab_swarm.averaging.group import Group, GroupMember
from colab_swarm.averaging.round import Averager
from colab_swarm.bench.harness import BenchReport, Crew, Parent, Worker, call_all
from colab_swarm.bench.link import contact, start_node, where
from colab_swarm.events import RoundFinished
from colab_swarm.net.peers import Contact
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.progress import ProgressRecord, next_lineage
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.state import Snapshot

PATTERN_VALUES = 1 << 16
PEERS = 4
STEP_PEERS, CROWD, GROUP = (4, 8), 16, 4
"""Processes that make full steps; processes that average in groups, and the size of such a group."""


def run(quick: bool, python: str | None = None) -> BenchReport:
    """Measure rounds and full steps; with a ``python`` that has hivemind, also the steps of hivemind."""
    report = BenchReport("averaging", quick)
    numel = 2_000_000 if quick else 18_000_000
    _compare_with_gloo(report, numel, rounds=6 if quick else 50)
    _kill_members(report, numel, crowd=4 if quick else 8, kills=2 if quick else 10)
    _measure_steps(report, python)
    return report


# --- one round ------------------------------------------------------------------------------------------------------


class RoundPeer(NamedTuple):
    """A process that averages, and its entry in a group; its vector repeats the pattern of ``seed``."""

    worker: Worker
    seed: int
    member: GroupMember


def _start_peers(crew: Crew, seeds: Sequence[int], numel: int) -> list[RoundPeer]:
    peers = []
    for seed, worker in [(seed, crew.start(average_as_peer, seed, numel)) for seed in seeds]:
        found = contact(worker.receive())
        peers.append(RoundPeer(worker, seed, GroupMember(found.id, found.addresses, 1.0 + seed % 3, 1.0)))
    return peers


def _compare_with_gloo(report: BenchReport, numel: int, rounds: int) -> None:
    with Crew() as crew, tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        gloo = [crew.start(average_with_gloo, rank, numel, PEERS, meeting) for rank in range(PEERS)]
        peers = _start_peers(crew, range(PEERS), numel)
        for worker in gloo:
            worker.receive()
        pairs = [(_round(peers, numel), _run_together(gloo, {})) for _ in range(rounds + 1)][1:]
    ours, theirs = zip(*pairs, strict=True)
    seconds, gloo_s = _median_s(ours), _median_s(theirs)
    wire_gb = 2 * (PEERS - 1) * numel * 4 / 1e9
    cpu_s = statistics.median(sum(one["cpu_s"] for one in members) for members in ours)
    note = f"{PEERS} processes, {numel / 1e6:g} M float32 values, encrypted"
    report.add("seconds", seconds, "s", note)
    report.add("gloo_seconds", gloo_s, "s", "torch.distributed all_reduce, in turns, not encrypted")
    report.add("vs_gloo", seconds / gloo_s, "times", "lower is better")
    report.add("cpu_s_per_gb", cpu_s / wire_gb, "CPU-s/GB", "of payload, all processes together")
    report.add("memory_limit_s", _memory_limit_s(numel), "s", "summing and copying, no network")
    report.add("success", statistics.mean(map(_right, ours)), "", f"of {rounds} rounds")


def _kill_members(report: BenchReport, numel: int, crowd: int, kills: int) -> None:
    rng, killed = random.Random(0), []
    with Crew() as crew:
        peers = _start_peers(crew, range(crowd), numel)
        calm_s = _median_s([_round(peers, numel) for _ in range(4)][1:])
        for number in range(kills):
            victim = rng.choice(peers)
            killed.append(_round(peers, numel, victim=victim, after_s=calm_s * rng.random()))
            peers.remove(victim)
            peers += _start_peers(crew, [crowd + number], numel)
    extra_s = max(one["seconds"] for members in killed for one in members) - calm_s
    note = f"slowest survivor; 1 of {crowd} killed in each of {kills} rounds, over {calm_s:.2f} s undisturbed"
    report.add("kill_extra_s", extra_s, "s", note)
    report.add("kill_success", statistics.mean(map(_right, killed)), "", "right at all survivors")


def _round(
    peers: Sequence[RoundPeer], numel: int, *, victim: RoundPeer | None = None, after_s: float = 0.0
) -> list[dict[str, Any]]:
    """Average once. The victim is killed ``after_s`` seconds after the start and gives no result."""
    ordered = sorted(peers, key=lambda peer: peer.member.id)
    group = Group(os.urandom(16), 0, b"bench", tuple(peer.member for peer in ordered), numel)
    task = {
        "group": msgspec.to_builtins(group),
        "seeds": [peer.seed for peer in ordered],
        "dead": [victim.seed] if victim else [],
    }
    return _run_together([peer.worker for peer in peers], task, victim and victim.worker, after_s)


def _run_together(
    workers: Sequence[Worker], task: dict[str, object], victim: Worker | None = None, after_s: float = 0.0
) -> list[dict[str, Any]]:
    """Prepare all, start all, and check the values only when all have finished."""
    call_all(workers, **task)
    for worker in workers:
        worker.send()
    if victim is not None:
        time.sleep(after_s)
        victim.process.kill()
    left = [worker for worker in workers if worker is not victim]
    for worker in left:
        worker.receive()
    return call_all(left)


def _right(members: Sequence[dict[str, Any]]) -> bool:
    return all(not one["kept_local"] and not one["wrong"] for one in members)


def _median_s(rounds: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Return the median over rounds of the slowest member's seconds."""
    return float(statistics.median(max(one["seconds"] for one in members) for members in rounds))


def _memory_limit_s(numel: int) -> float:
    """Return what the sums and copies of a round cost all cores together, in pieces that fit the cache."""
    vectors = [np.resize(pattern(seed), numel) for seed in range(PEERS)]
    piece, began = 1 << 14, time.perf_counter()
    for start in range(0, numel, piece):
        total = sum(vector[start : start + piece] for vector in vectors)
        for vector in vectors:
            np.copyto(vector[start : start + piece], total)
    return (time.perf_counter() - began) / min(PEERS, os.cpu_count() or 1)


def pattern(seed: int) -> Floats:
    """Return the block that a member's vector repeats."""
    return np.random.default_rng(seed).standard_normal(PATTERN_VALUES, dtype=np.float32)


def _count_wrong(values: Floats, group: Group, seeds: list[int], dead: list[int]) -> int:
    """Count the values that equal neither the mean of all members nor that without the dead ones."""
    weights = {seed: member.weight for seed, member in zip(seeds, group.members, strict=True)}
    right = np.zeros(len(values), bool)
    for absent in ([], dead):
        present = [seed for seed in seeds if seed not in absent]
        total = sum(weights[seed] for seed in present)
        mean = np.sum([pattern(seed) * np.float32(weights[seed] / total) for seed in present], axis=0)
        right |= np.abs(values - np.resize(mean, len(values))) < 1e-5
    return int((~right).sum())


async def average_as_peer(parent: Parent, seed: int, numel: int) -> None:
    """Worker: a peer on the real network."""
    node = await start_node(run_id="bench")
    averager = Averager(node)
    values, others = np.empty(numel, np.float32), np.empty(numel, np.float32)
    parent.send(**where(node))
    while True:
        task = await parent.wait()
        group = msgspec.convert(task["group"], Group)
        for member in group.members:
            node.learn(Contact(member.id, member.addresses))
        values, others = others, values  # other members may still read the vector of the last round
        values[:] = np.resize(pattern(seed), numel)
        parent.send()
        await parent.wait()
        began, cpu_began = time.perf_counter(), time.process_time()
        result = await averager.average(group, values)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        parent.send()  # a check at this moment would slow down the other members
        await parent.wait()
        kept_local = sum(span.numel for span in result.kept_local)
        wrong = await asyncio.to_thread(_count_wrong, values, group, task["seeds"], task["dead"])
        parent.send(seconds=seconds, cpu_s=cpu_s, kept_local=kept_local, wrong=wrong)


def average_with_gloo(parent: Parent, rank: int, numel: int, world: int, meeting: str) -> None:
    """Worker: a rank of a torch.distributed group."""
    torch.set_num_threads(1)
    collectives: Any = distributed
    collectives.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    values = torch.from_numpy(np.resize(pattern(rank), numel))
    parent.send()
    while True:
        parent.receive()
        parent.send()
        parent.receive()
        began, cpu_began = time.perf_counter(), time.process_time()
        collectives.all_reduce(values)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        values /= world
        parent.send()
        parent.receive()
        parent.send(seconds=seconds, cpu_s=cpu_s, kept_local=0, wrong=0)


# --- full steps: find the group, average, advance --------------------------------------------------------------------


def _measure_steps(report: BenchReport, python: str | None) -> None:
    numel, steps = (400_000, 3) if report.quick else (2_400_000, 10)
    hivemind = [python, Path(__file__).with_name("hivemind_worker.py")]
    for peers in STEP_PEERS[:1] if report.quick else STEP_PEERS:
        ours = _time_steps(make_full_steps, "step", peers=peers, numel=numel, steps=steps)
        seconds, reduced_s = _add_steps(report, "", ours, peers, numel)
        waits = [one["seconds"] - one["reduced_s"] for one in ours]
        report.add(f"overhead_s_{peers}", statistics.median(waits), "s", "of a step is not the averaging")
        if python is not None:
            found = _time_steps(hivemind, peers=peers, numel=numel, steps=steps)
            their_s, their_reduced_s = _add_steps(report, "hivemind_", found, peers, numel)
            suffix = "" if peers == STEP_PEERS[-1] or report.quick else f"_{peers}"
            report.add(f"step_vs_hivemind{suffix}", their_s / seconds, "times", "faster per full step")
            report.add(f"allreduce_vs_hivemind{suffix}", their_reduced_s / reduced_s, "times", "faster in it")
    if not report.quick:
        crowd = _time_steps(make_full_steps, "groups", peers=CROWD, numel=numel, steps=steps)
        note = f"of {steps} averages of {CROWD} processes in groups of {GROUP}, right at all"
        report.add("groups_success", statistics.mean(one["right"] for one in crowd), "", note)


def _time_steps(
    work: Callable[..., None] | list[Any], *mode: str, peers: int, numel: int, steps: int
) -> list[dict[str, Any]]:
    """Time steps of ``peers`` processes that ``work(*mode, numel, peers[, address of the first])``.

    Returns:
        Per step, the slowest member's ``seconds`` in all and ``reduced_s`` in the averaging, whether the mean was
        ``right`` at all, and the ``traffic`` over loopback in bytes. The first step is not counted.
    """
    found, mean = [], (peers - 1) / 2
    with Crew() as crew:
        entry = crew.start(work, *mode, numel, peers, grace_s=10.0).receive()["contact"]
        for _ in range(peers - 1):
            crew.start(work, *mode, numel, peers, entry, grace_s=10.0)
        for worker in crew[1:]:
            worker.receive()
        for _ in range(steps + 1):
            for index, worker in enumerate(crew):
                worker.send(value=float(index))
            for worker in crew:
                worker.receive()
            before = _loopback_bytes()
            members = call_all(crew)
            errors = [abs(one[end] - mean) for one in members for end in ("low", "high")]
            step: dict[str, Any] = {key: max(one[key] for one in members) for key in ("seconds", "reduced_s")}
            found.append({**step, "right": max(errors) < 0.01, "traffic": _loopback_bytes() - before})
    return found[1:]


def _loopback_bytes() -> int:
    """Return the bytes sent over the loopback interface since the system started; 0 where it does not count them."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def _add_steps(
    report: BenchReport, whose: str, steps: list[dict[str, Any]], peers: int, numel: int
) -> tuple[float, float]:
    seconds, reduced_s, traffic = (
        statistics.median(one[key] for one in steps) for key in ("seconds", "reduced_s", "traffic")
    )
    right = sum(one["right"] for one in steps)
    note = f"{peers} processes, {numel / 1e6:g} M values as float16; right at all in {right} of {len(steps)}"
    report.add(f"{whose}step_s_{peers}", seconds, "s", note)
    report.add(f"{whose}allreduce_s_{peers}", reduced_s, "s", "the averaging itself")
    if traffic:
        least_mb = 2 * (peers - 1) * numel * 2 / 1e6
        note = f"over loopback in a step, headers included; the values alone are {least_mb:.1f}"
        report.add(f"{whose}traffic_mb_{peers}", traffic / 1e6, "MB", note)
    return seconds, reduced_s


def make_full_steps(parent: Parent, mode: str, numel: int, peers: int, *invites: str) -> None:
    """Worker of full steps. It exchanges the same messages as ``hivemind_worker.py``.

    Args:
        mode: ``step`` for a training step of all, ``groups`` for `Swarm.average` in groups.
    """

    def no_state() -> Snapshot:
        raise AssertionError("no peer falls behind in this benchmark")

    async def begin() -> Collaboration:
        own = ProgressRecord(0, b"same", 0.0, 1.0, syncing=True, reduces=True, name=swarm.name)
        settings = TrainingSettings(
            "bench", 1.0, compression="float16", mean_compression="float16", matchmaking_timeout_s=2.0
        )
        made = Collaboration(swarm.services, settings, own=own, numel=numel, schema=b"", snapshot=no_state)
        await made.start()
        await made.adopt(0, b"same")
        return made

    async def step() -> None:
        await collaboration.report(1.0, None)
        result = await collaboration.average(values, 1.0, UploadEncoding())
        if result is not None:
            await collaboration.advance(next_lineage(collaboration.progress.own.lineage, values), result)

    options = cs.NetworkOptions(lan=False, use_relays=False)
    if invites:
        swarm = cs.join(invites[0], peer_name=f"peer-{time.monotonic_ns()}", options=options)
    else:
        swarm = cs.create("bench", options=options)
    collaboration = swarm.runtime.call(begin())
    values, others = np.empty(numel, np.float32), np.empty(numel, np.float32)
    parent.send(contact="" if invites else str(swarm.invite()))
    while True:
        values, others = others, values
        values[:] = parent.receive()["value"]
        while mode == "step" and len(collaboration.progress.records) < peers:
            swarm.runtime.call(collaboration.refresh())
        parent.send(ready=True)
        parent.receive()
        began = time.perf_counter()
        if mode == "groups":
            values[:], _ = swarm.average(values, group_size=GROUP)
        else:
            swarm.runtime.call(step())
        seconds = time.perf_counter() - began
        last = next(reversed(swarm.events.recent(RoundFinished)), None)
        reduced_s = last.averaging_s if isinstance(last, RoundFinished) else 0.0
        low, high = float(values.min()), float(values.max())
        parent.send(seconds=seconds, reduced_s=reduced_s, low=low, high=high)
