"""An averaging round among processes on loopback, compared with gloo, memory alone and hivemind."""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import colab_swarm as cs
from colab_swarm.averaging.exchange import UploadEncoding
from colab_swarm.averaging.group import Group, GroupMember, RoundTerms
from colab_swarm.averaging.round import Averager
from colab_swarm.bench.harness import BenchReport, Channel, Crew, Worker, benchmark, call_all, receive_all
from colab_swarm.bench.link import contact, start_node, where
from colab_swarm.events import RoundFinished
from colab_swarm.net.peers import Contact
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.progress import ProgressRecord, next_lineage
from colab_swarm.training.settings import TrainingSettings

PEERS = 4
STEP_PEERS, CROWD, GROUP = (4, 8), 16, 4
Found = list[dict[str, Any]]


@benchmark("averaging")
def run(report: BenchReport, python: str | None = None) -> None:
    """With a ``python`` that has hivemind, also measure the steps of hivemind."""
    numel = 2_000_000 if report.quick else 18_000_000
    _compare_with_gloo(report, numel, rounds=6 if report.quick else 50)
    _kill_members(report, numel, crowd=4 if report.quick else 8, kills=2 if report.quick else 10)
    _measure_steps(report, python)


def _start_peers(crew: Crew, seeds: Sequence[int], numel: int) -> dict[Worker, GroupMember]:
    workers = [crew.start(average_as_peer, seed, numel) for seed in seeds]
    found = map(contact, receive_all(workers))
    members = [
        GroupMember(one.id, one.addresses, 1.0 + seed, 1.0) for seed, one in zip(seeds, found, strict=True)
    ]
    return dict(zip(workers, members, strict=True))


def _compare_with_gloo(report: BenchReport, numel: int, rounds: int) -> None:
    with Crew() as crew, tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        gloo = [crew.start(average_with_gloo, rank, numel, PEERS, meeting) for rank in range(PEERS)]
        peers = _start_peers(crew, range(PEERS), numel)
        receive_all(gloo)
        pairs = [(_round(peers, numel), _run_together(gloo, {})) for _ in range(rounds + 1)][1:]
    ours, theirs = zip(*pairs, strict=True)
    seconds, gloo_s = _median_s(ours), _median_s(theirs)
    wire_gb = 2 * (PEERS - 1) * numel * 4 / 1e9
    cpu_s = statistics.median(sum(one["cpu_s"] for one in members) for members in ours)
    vectors, piece, began = [pattern(numel) for _ in range(PEERS)], 1 << 14, time.perf_counter()
    for start in range(0, numel, piece):
        total = sum(vector[start : start + piece] for vector in vectors)
        for vector in vectors:
            np.copyto(vector[start : start + piece], total)
    memory_s = (time.perf_counter() - began) / min(PEERS, os.cpu_count() or 1)
    note = "4 processes, in turns; only ours is encrypted"
    report.add_rows(
        ("seconds", seconds, "s", note),
        ("gloo_seconds", gloo_s, "s", note),
        ("vs_gloo", seconds / gloo_s, "times", "lower is better"),
        ("cpu_s_per_gb", cpu_s / wire_gb, "CPU-s/GB", "of payload, all processes together"),
        ("memory_limit_s", memory_s, "s", "summing and copying, no network"),
        (
            "success",
            statistics.mean(all(one["right"] for one in members) for members in ours),
            "",
            f"of {rounds} rounds",
        ),
    )


def _kill_members(report: BenchReport, numel: int, crowd: int, kills: int) -> None:
    rng, killed = random.Random(0), []
    with Crew() as crew:
        peers = _start_peers(crew, range(crowd), numel)
        calm_s = _median_s([_round(peers, numel) for _ in range(4)][1:])
        for number in range(kills):
            victim = rng.choice(list(peers))
            killed.append(_round(peers, numel, victim=victim, after_s=calm_s * rng.random()))
            del peers[victim]
            peers |= _start_peers(crew, [crowd + number], numel)
    extra_s = max(one["seconds"] for members in killed for one in members) - calm_s
    success = statistics.mean(all(one["right"] for one in members) for members in killed)
    report.add("kill_extra_s", extra_s, "s", f"slowest survivor, over {calm_s:.2f} s undisturbed")
    report.add("kill_success", success, "", "right at all survivors")


def _round(
    peers: dict[Worker, GroupMember], numel: int, *, victim: Worker | None = None, after_s: float = 0.0
) -> Found:
    members = sorted(peers.values(), key=lambda member: member.id)
    group = Group(os.urandom(16), RoundTerms("", 0, b"bench", numel), tuple(members))
    dead = peers[victim].weight if victim else 0.0
    return _run_together(peers, {"group": msgspec.to_builtins(group), "dead": dead}, victim, after_s)


def _run_together(
    workers: Collection[Worker], task: dict[str, object], victim: Worker | None = None, after_s: float = 0.0
) -> Found:
    call_all(workers, **task)
    for worker in workers:
        worker.send()
    if victim is not None:
        time.sleep(after_s)
        victim.process.kill()
    left = [worker for worker in workers if worker is not victim]
    receive_all(left)
    return call_all(left)


def _median_s(rounds: Sequence[Found]) -> float:
    return float(statistics.median(max(one["seconds"] for one in members) for members in rounds))


def pattern(numel: int) -> Floats:
    return np.resize(np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32), numel)


def _is_mean(values: Floats, group: Group, dead: float) -> bool:
    """Tell whether the values are the mean of all members, or of all but the dead one of this weight."""
    weights = np.array([member.weight for member in group.members])
    means = [(some**2).sum() / some.sum() for some in (weights, weights[weights != dead])]
    near = [np.isclose(values, np.float32(mean) * pattern(len(values)), rtol=1e-5) for mean in means]
    return bool(np.logical_or(*near).all())


async def average_as_peer(parent: Channel, seed: int, numel: int) -> None:
    node = await start_node(run_id="bench")
    averager, found = Averager(node), where(node)
    values, others = np.empty(numel, np.float32), np.empty(numel, np.float32)
    while True:
        task = await parent.wait_call(**found)
        group = msgspec.convert(task["group"], Group)
        for member in group.members:
            node.learn(Contact(member.id, member.addresses))
        values, others = others, values  # other members may still read the vector of the last round
        values[:] = (1.0 + seed) * pattern(numel)
        await parent.wait_call()
        began, cpu_began = time.perf_counter(), time.process_time()
        result = await averager.average(group, values)
        found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
        await parent.wait_call()  # a check at this moment would slow down the other members
        found["right"] = not result.kept_local and await asyncio.to_thread(
            _is_mean, values, group, task["dead"]
        )


def average_with_gloo(parent: Channel, rank: int, numel: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    collectives: Any = torch.distributed
    collectives.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    values, found = torch.from_numpy(pattern(numel)), dict[str, float]()
    while True:
        parent.call(**found)
        parent.call()
        began = time.perf_counter()
        collectives.all_reduce(values)
        found = {"seconds": time.perf_counter() - began}
        values /= world
        parent.call()


def _measure_steps(report: BenchReport, python: str | None) -> None:
    numel, steps = (400_000, 3) if report.quick else (2_400_000, 10)
    hivemind = [python, Path(__file__).with_name("hivemind_worker.py")]
    for peers in STEP_PEERS[:1] if report.quick else STEP_PEERS:
        ours = _time_steps(make_full_steps, "step", peers=peers, numel=numel, steps=steps)
        step_s, reduced_s = _add_steps(report, "", ours, peers)
        waits = [one["seconds"] - one["reduced_s"] for one in ours]
        report.add(f"overhead_s_{peers}", statistics.median(waits), "s", "of a step is not the averaging")
        if python is not None:
            found = _time_steps(hivemind, peers=peers, numel=numel, steps=steps)
            their_s, their_reduced_s = _add_steps(report, "hivemind_", found, peers)
            suffix = "" if peers == STEP_PEERS[-1] or report.quick else f"_{peers}"
            report.add(f"step_vs_hivemind{suffix}", their_s / step_s, "times", "faster per full step")
            report.add(f"allreduce_vs_hivemind{suffix}", their_reduced_s / reduced_s, "times", "faster in it")
    if not report.quick:
        crowd = _time_steps(make_full_steps, "groups", peers=CROWD, numel=numel, steps=steps)
        report.add("groups_success", statistics.mean(one["right"] for one in crowd), "", "groups of 4")


def _time_steps(
    work: Callable[..., None] | list[Any], *mode: str, peers: int, numel: int, steps: int
) -> list[dict[str, float]]:
    """Return the slowest member's times of each step but the first, and whether all means were right."""
    found = []
    with Crew() as crew:
        entry = crew.start(work, *mode, numel, peers, grace_s=10.0).receive()["contact"]
        for _ in range(peers - 1):
            crew.start(work, *mode, numel, peers, entry, grace_s=10.0)
        receive_all(crew[1:])
        for _ in range(steps + 1):
            for index, worker in enumerate(crew):
                worker.send(value=float(index))
            receive_all(crew)
            before = _loopback_bytes()
            members = call_all(crew)
            step = {key: max(one[key] for one in members) for key in ("seconds", "reduced_s")}
            errors = [abs(one[end] - (peers - 1) / 2) for one in members for end in ("low", "high")]
            found.append({**step, "right": max(errors) < 0.01, "traffic": _loopback_bytes() - before})
    return found[1:]


def _loopback_bytes() -> int:
    counters = Path("/proc/net/dev")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def _add_steps(
    report: BenchReport, whose: str, steps: list[dict[str, float]], peers: int
) -> tuple[float, float]:
    seconds, reduced_s, traffic = (
        statistics.median(one[key] for one in steps) for key in ("seconds", "reduced_s", "traffic")
    )
    right = sum(one["right"] for one in steps)
    report.add(f"{whose}step_s_{peers}", seconds, "s", f"right at all in {right} of {len(steps)}")
    report.add(f"{whose}allreduce_s_{peers}", reduced_s, "s", "the averaging itself")
    if traffic:
        report.add(f"{whose}traffic_mb_{peers}", traffic / 1e6, "MB", "over loopback in a step")
    return seconds, reduced_s


def make_full_steps(parent: Channel, mode: str, numel: int, peers: int, *invites: str) -> None:
    def no_state() -> Snapshot:
        raise AssertionError("no peer falls behind in this benchmark")

    async def begin() -> Collaboration:
        own = ProgressRecord(0, b"same", 0.0, 1.0, syncing=True, reduces=True, name=swarm.name)
        settings = TrainingSettings(
            "bench", 1.0, compression="float16", mean_compression="float16", matchmaking_timeout_s=2.0
        )
        made = Collaboration(swarm.services, settings, own, numel, b"", no_state)
        await made.start()
        await made.adopt(0, b"same")
        return made

    async def step() -> None:
        await collaboration.report(1.0, None)
        lineage = collaboration.progress.own.lineage
        await collaboration.average(values, 1.0, UploadEncoding(), partial(next_lineage, lineage))

    options = cs.NetworkOptions(lan=False, use_relays=False)
    if invites:
        swarm = cs.join(invites[0], peer_name=f"peer-{time.monotonic_ns()}", options=options)
    else:
        swarm = cs.create("bench", options=options)
    collaboration = swarm.runtime.call(begin())
    values, others = np.empty(numel, np.float32), np.empty(numel, np.float32)
    found: dict[str, Any] = {"contact": "" if invites else str(swarm.invite())}
    while True:
        values, others = others, values
        values[:] = parent.call(**found)["value"]
        while mode == "step" and len(collaboration.progress.records) < peers:
            swarm.runtime.call(collaboration.refresh())
        parent.call(ready=True)
        began = time.perf_counter()
        if mode == "groups":
            values[:], _ = swarm.average(values, group_size=GROUP)
        else:
            swarm.runtime.call(step())
        found = {
            "seconds": time.perf_counter() - began,
            "low": float(values.min()),
            "high": float(values.max()),
        }
        last = next(reversed(swarm.events.recent(RoundFinished)), None)
        found["reduced_s"] = last.averaging_s if isinstance(last, RoundFinished) else 0.0
