"""Simulated runs in a bucket: peers that train, and their objects."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from colab_swarm.errors import BucketError
from colab_swarm.events import Fault, Notice, PeerRefused
from colab_swarm.mailbox.objects import RoundManifest, unseal
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, model, parameters_of, take

ROUNDS, BATCH = 6, 4
SETTINGS: dict[str, Any] = {"target_batch_size": 40, "local_steps": 3}


Create = Callable[[str, bytes], Awaitable[bool]]
Change = Callable[[Any, Create, str, bytes], Awaitable[bool]]
"""What a liar does in place of writing its own contribution; it gets its part in the training."""


@dataclass
class Trained:
    lineages: dict[int, bytes] = field(default_factory=dict)  # by step
    samples: float = 0.0
    refusals: int = 0
    requests: int = 0
    finite: bool = True


def train(
    swarm: Swarm,
    change: "Change | None" = None,
    *,
    rounds: int = ROUNDS,
    leave_s: float = 0.0,
    meddle: Callable[[Any], None] = lambda bucket: None,
    **more: Any,
) -> Trained:
    """Train for so many rounds; ``meddle`` may change how this peer sees the bucket."""
    optimizer, told = join_training(swarm, net := model(), **SETTINGS | more), Trained()
    bucket = optimizer.rounds._journal.bucket  # type: ignore[attr-defined]
    meddle(bucket)
    before = bucket.requests
    if change is not None:
        create = bucket.create

        async def changed(path: str, data: bytes) -> bool:
            own = path.endswith(swarm.id.hex())
            return await change(optimizer.rounds, create, path, data) if own else await create(path, data)

        bucket.create = changed
    while optimizer.global_step < rounds:
        try:
            told.samples += BATCH
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
        except BucketError:
            told.refusals += 1
            swarm.runtime.call(asyncio.sleep(10.0))
        told.lineages[optimizer.global_step] = optimizer.lineage
    told.requests, told.finite = bucket.requests - before, bool(parameters_of(net).isfinite().all())
    if leave_s:
        while optimizer._gathered.samples < 2 * BATCH:
            take(optimizer, net, optimizer.global_step, slice(0, BATCH))
            told.samples += BATCH
        swarm.leave(hand_over_s=leave_s)
    return told


def agree(results: dict[str, Trained], *names: str, rounds: int = ROUNDS) -> None:
    """All of these have reached the last round, on one branch."""
    assert set(names) <= set(results)
    for step in range(1, rounds + 9):
        assert len({one.lineages[step] for one in results.values() if step in one.lineages}) <= 1
    assert all(max(results[name].lineages) >= rounds and results[name].finite for name in names)


def manifests(sim: Simulation) -> list[RoundManifest]:
    found = sorted(path for path in sim.bucket.objects if "manifest" in path)
    return [unseal(sim.bucket.objects[path][0], RoundManifest)[0] for path in found]


def closings(sim: Simulation) -> list[float]:
    return sorted(at for path, (_, at) in sim.bucket.objects.items() if "manifest" in path)


def faults(sim: Simulation, *names: str) -> str:
    """Return what these members did not take from the bucket, a line an object."""
    lines = []
    for name in names:
        events = sim.swarms[name].events
        lines += [event.text for event in events.recent(Fault)]
        lines += [f"{event.what} does not count: {event.why}" for event in events.recent(PeerRefused)]
    return "\n".join(lines)


def notices(sim: Simulation, name: str) -> list[str]:
    return [event.text for event in sim.swarms[name].events.recent(Notice)]


def count(sim: Simulation, kind: type[Any]) -> int:
    return sum(len(swarm.events.recent(kind)) for swarm in sim.swarms.values())


def fail(sim: Simulation, error: Exception, begin: float, end: float) -> None:
    """Let the store fail from one time to another."""

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        async def verb(*given: Any) -> Any:
            if begin <= sim.time < end:
                raise error
            return await real(*given)

        return verb

    for name in ("create", "read", "list"):
        setattr(sim.bucket, name, failing(getattr(sim.bucket, name)))
