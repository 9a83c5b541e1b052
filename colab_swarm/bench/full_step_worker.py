"""One peer of ours of ``bench averaging --vs hivemind``: the same conversation as `hivemind_worker`.

``python -m colab_swarm.bench.full_step_worker step|groups NUMEL PEERS [INVITATION]``
"""

from __future__ import annotations

import importlib
import json
import sys
import time

import numpy as np

import colab_swarm as cs
from colab_swarm.averaging.exchange import UploadEncoding
from colab_swarm.events import RoundFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.progress import ProgressRecord, next_lineage
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.state import Snapshot

GROUP = 4


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def no_state() -> Snapshot:
    raise AssertionError("nobody falls behind here")


async def begin(swarm: Swarm, numel: int) -> Collaboration:
    """Join the training of a vector, of which each peer alone has a batch at once."""
    own = ProgressRecord(0, b"same", 0.0, 1.0, syncing=True, reduces=True, name=swarm.name)
    settings = TrainingSettings(
        "bench", 1.0, compression="float16", mean_compression="float16", matchmaking_timeout_s=2.0
    )
    services = swarm.services
    collaboration = Collaboration(services, settings, own=own, numel=numel, schema=b"", snapshot=no_state)
    await collaboration.start()
    await collaboration.adopt(0, b"same")
    return collaboration


def average_in_groups(swarm: Swarm, values: Floats) -> int:
    """The same by `Swarm.average`, in groups of `GROUP`."""
    mean, result = swarm.average(values, group_size=GROUP)
    values[:] = mean
    return len(result.peers) if result.complete else 0


async def step(collaboration: Collaboration, values: Floats) -> int:
    """One full step: find the group, average, advance; returns how many took part."""
    await collaboration.report(1.0, None)
    result = await collaboration.average(values, 1.0, UploadEncoding())
    if result is None:
        return 0
    await collaboration.advance(next_lineage(collaboration.progress.own.lineage, values), result)
    return len(result.contributors) if not result.kept_local else 0


def main(mode: str, numel: int, peers: int, invites: list[str]) -> None:
    importlib.import_module("torch")  # a trainer has it, and casts with it
    options = cs.NetworkOptions(lan=False, use_relays=False)
    name = f"peer-{time.monotonic_ns()}"
    swarm = (
        cs.join(invites[0], peer_name=name, options=options)
        if invites
        else cs.create("bench", options=options)
    )
    collaboration = swarm.runtime.call(begin(swarm, numel))
    vectors = np.empty(numel, np.float32), np.empty(numel, np.float32)
    say(contact="" if invites else str(swarm.invite()))
    for number, line in enumerate(sys.stdin):
        values = vectors[number % 2]
        values[:] = json.loads(line)["value"]
        while mode == "step" and len(collaboration.progress.records) < peers:
            swarm.runtime.call(collaboration.refresh())
        say(ready=True)
        sys.stdin.readline()
        began = time.perf_counter()
        if mode == "groups":
            members = average_in_groups(swarm, values)
        else:
            members = swarm.runtime.call(step(collaboration, values))
        seconds = time.perf_counter() - began
        last = next(reversed(swarm.events.recent(RoundFinished)), None)
        reduced_s = last.averaging_s if isinstance(last, RoundFinished) else 0.0
        low, high = float(values.min()), float(values.max())
        say(seconds=seconds, reduced_s=reduced_s, members=members, low=low, high=high)
    swarm.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
