"""One process of the averaging benchmark: obeys JSON lines on its standard input, answers on its output.

``python -m colab_swarm.bench.averaging_worker swarm|gloo INDEX NUMEL``, for gloo also WORLD MEETING_FILE.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import numpy as np

from colab_swarm.averaging.group import Group
from colab_swarm.averaging.round import Averager
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact
from colab_swarm.tensors.codecs import Floats

PATTERN_VALUES = 1 << 16


class WorkerReady(msgspec.Struct):
    """The worker is up."""

    contact: Contact | None = None


class Round(msgspec.Struct):
    """Average once; members' vectors are patterns of these seeds, in member order. For gloo, empty."""

    group: Group | None = None
    seeds: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    """Seeds of members that may or may not be in the mean."""


class Done(msgspec.Struct):
    """What a round took and whether the values are right: ``wrong`` counts values that are no valid mean."""

    seconds: float
    cpu_s: float
    kept_local: int = 0
    wrong: int = 0


def pattern(seed: int) -> Floats:
    """The block that is repeated in the vector of a member."""
    return np.random.default_rng(seed).standard_normal(PATTERN_VALUES, dtype=np.float32)


def filled(seed: int, numel: int) -> Floats:
    """A member's vector."""
    return np.resize(pattern(seed), numel)


def count_wrong(values: Floats, group: Group, task: Round) -> int:
    """Values that are neither the mean with nor without the members that died."""
    weights = {seed: member.weight for seed, member in zip(task.seeds, group.members, strict=True)}
    right = np.zeros(len(values), bool)
    for left_out in {(), task.dead}:
        present = [seed for seed in task.seeds if seed not in left_out]
        total = sum(weights[seed] for seed in present)
        mean = np.sum([pattern(seed) * np.float32(weights[seed] / total) for seed in present], axis=0)
        right |= np.abs(values - np.resize(mean, len(values))) < 1e-5
    return int((~right).sum())


def say(message: msgspec.Struct) -> None:
    """One line to the benchmark."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def swarm(seed: int, numel: int) -> None:
    """A peer on the real network."""
    node = await Node.start(Identity(), NodeSettings(run_id="bench", host="127.0.0.1"))
    averager = Averager(node)
    values, others = np.empty(numel, np.float32), np.empty(numel, np.float32)
    say(WorkerReady(node.contact))
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        task = msgspec.json.decode(line, type=Round)
        group = task.group
        assert group is not None
        for member in group.members:
            node.learn(Contact(member.id, member.addresses))
        values, others = others, values  # the other members may still want what the last round left
        values[:] = filled(seed, numel)
        say(WorkerReady())
        await asyncio.to_thread(sys.stdin.buffer.readline)
        began, cpu = time.perf_counter(), time.process_time()
        result = await averager.average(group, values)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        say(WorkerReady())  # whoever checks now would slow down the others
        await asyncio.to_thread(sys.stdin.buffer.readline)
        kept_local = sum(span.numel for span in result.kept_local)
        wrong = await asyncio.to_thread(count_wrong, values, group, task)
        say(Done(seconds, cpu, kept_local, wrong))


def gloo(rank: int, numel: int, world: int, meeting: str) -> None:
    """A rank of a torch.distributed group."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    collectives: Any = distributed
    collectives.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    values = torch.from_numpy(filled(rank, numel))
    say(WorkerReady())
    while sys.stdin.buffer.readline():
        say(WorkerReady())
        sys.stdin.buffer.readline()
        began, cpu = time.perf_counter(), time.process_time()
        collectives.all_reduce(values)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        values /= world
        say(WorkerReady())
        sys.stdin.buffer.readline()
        say(Done(seconds, cpu))


if __name__ == "__main__":
    kind, own, size, *rest = sys.argv[1:]
    if kind == "swarm":
        asyncio.run(swarm(int(own), int(size)))
    else:
        gloo(int(own), int(size), int(rest[0]), rest[1])
