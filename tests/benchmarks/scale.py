"""Memory and time of a peer with a large model: real peers, as processes on loopback, and gloo beside them.

Each peer has a `SwarmOptimizer` over a model of a few large matrices and many small tensors, which
is not run: its gradients are filled in. Every step has one micro-batch and includes a round.

*memory_vectors*: the peak of a peer's resident memory during the steps, minus that before
`Swarm.optimizer`, in vectors; the larger of all peers. A vector is a float32 for each trained
value. What is subtracted is the process with torch, the parameters, and the inner optimizer's own
state. The gradients as autograd makes them count, and so does all that the swarm adds.

*step_over_round*: the whole ``optimizer.step()`` by `RoundFinished.averaging_s` of its round.
*vs_gloo*: that round by an all-reduce of a float32 vector of the same size among as many processes.
"""

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from colab_swarm.events import RoundFinished
from colab_swarm.experiments.loss_per_byte import wait_trainers
from colab_swarm.experiments.report import Report, reports
from tests.benchmarks.averaging import average_with_gloo, run_together
from tests.benchmarks.harness import (
    Channel,
    Crew,
    call_all,
    enter,
    receive_all,
)
from tests.benchmarks.overhead import memory_mib


class Case(NamedTuple):
    millions: float  # of trained values
    peers: int = 2
    dtype: str = "float32"
    inner: str = "SGD"

    @property
    def name(self) -> str:
        """Names the figures; those of two peers with float32 and SGD by their size alone."""
        of = zip(self[1:], Case(0)[1:], ("_peers", "", ""), strict=True)
        return f"{self.millions:g}m" + "".join(f"_{mine}{what}" for mine, usual, what in of if mine != usual)


QUICK = (Case(2), Case(2, dtype="bfloat16"))
FULL = (
    *(
        Case(size, peers, dtype)
        for size in (16, 124)
        for peers in (2, 4)
        for dtype in ("float32", "bfloat16")
    ),
    Case(16, inner="Adam"),
    Case(124, inner="Adam"),
    Case(350),
)
# its share of the values
LAYERS = 12
WIDTH = 768
EMBEDDING = 0.3


@reports("scale")
def run(report: Report) -> None:
    for case in QUICK if report.quick else FULL:
        _measure(report, case, rounds=3 if report.quick else 6)


def _measure(report: Report, case: Case, rounds: int) -> None:
    numel = sum(math.prod(shape) for shape in shapes(case.millions))
    with Crew() as crew, tempfile.TemporaryDirectory() as folder:
        invite = crew.start(step_as_peer, *case, grace_s=10.0).receive()["invite"]
        peers = [
            crew[0],
            *(crew.start(step_as_peer, *case, invite, grace_s=10.0) for _ in range(case.peers - 1)),
        ]
        receive_all(peers[1:])
        path = f"{folder}/meeting"
        gloo = [crew.start(average_with_gloo, rank, numel, path, case.peers) for rank in range(case.peers)]
        receive_all(gloo)
        call_all(peers)
        # Not in turns: a peer that waits for gloo's would be too late for its part of the batch.
        ours = [call_all(peers) for _ in range(rounds + 1)][1:]
        theirs = [run_together(gloo) for _ in range(rounds + 1)][1:]
    step_s, round_s, gloo_s = (
        statistics.median(max(one[key] for one in members) for members in found)
        for key, found in (("step_s", ours), ("round_s", ours), ("seconds", theirs))
    )
    note = f"{case.peers} peers, {numel / 1e6:.0f} M values, {case.dtype} parameters, {case.inner}"
    vectors = max(one["peak_mib"] for members in ours for one in members) * 2**18 / numel
    report.add_rows(
        (f"memory_vectors_{case.name}", vectors, "vectors", note),
        (f"step_over_round_{case.name}", step_s / round_s, "times", "lower is better"),
        (f"vs_gloo_{case.name}", round_s / gloo_s, "times", "a round; only ours is encrypted"),
        (f"step_s_{case.name}", step_s, "s", ""),
        (f"round_s_{case.name}", round_s, "s", ""),
    )


def shapes(millions: float) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a model's tensors: an embedding, and of each layer two matrices and three vectors."""
    rows = int(millions * 1e6 / WIDTH)
    yield int(rows * EMBEDDING), WIDTH
    layer = int(rows * (1 - EMBEDDING) / LAYERS) // 3
    for _ in range(LAYERS):
        yield from ((layer, WIDTH), (WIDTH,), (WIDTH, 2 * layer), (2 * layer,), (WIDTH,))


def step_as_peer(parent: Channel, millions: float, peers: int, dtype: str, inner: str, *invites: str) -> None:
    torch.set_num_threads(1)
    swarm = enter(*invites, name=f"peer-{time.monotonic_ns()}")
    kind: torch.dtype = getattr(torch, dtype)
    parameters = [torch.nn.Parameter(torch.full(shape, 0.01, dtype=kind)) for shape in shapes(millions)]
    bare: torch.optim.Optimizer = getattr(torch.optim, inner)(parameters, lr=1e-6)
    fill_gradients(parameters, 0.0)
    bare.step()  # makes its state
    bare.zero_grad()
    gc.collect()
    before_mib = memory_mib("status", "VmRSS:")
    optimizer = swarm.optimizer(bare, target_batch_size=peers, min_peers=peers)
    parent.call(invite="" if invites else str(swarm.invite()))
    wait_trainers(swarm, optimizer.rounds, peers)
    found = dict[str, float]()
    while True:
        parent.call(**found)
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the last peak
        result = None
        # On a busy machine one of them may get two micro-batches, and another none.
        while result is None or len(result.contributors) < peers:
            fill_gradients(parameters, 1e-3)
            began = time.perf_counter()
            result = optimizer.step(samples=1)
            step_s = time.perf_counter() - began
        last = swarm.events.recent(RoundFinished)[-1]
        assert isinstance(last, RoundFinished)
        found = {
            "step_s": step_s,
            "round_s": last.averaging_s,
            "peak_mib": memory_mib("status", "VmHWM:") - before_mib,
        }


def fill_gradients(parameters: list[torch.nn.Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
