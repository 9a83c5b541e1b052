"""Stand-ins for the directory and for calls: experts in this process, and the ways in which they fail."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from colab_swarm.errors import ExpertError, NoExpertsError
from colab_swarm.moe.calls import BackwardExpert, ExpertCalls, ForwardExpert
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import Expert, ExpertRule
from colab_swarm.moe.grid import ExpertInfo, Grid, Index
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact
from colab_swarm.runtime import Runner
from colab_swarm.tensors.codecs import Floats

T = TypeVar("T")
HOST = Contact(bytes(32), ())
LR = 0.05


class LocalExperts:
    """Modules that step by plain SGD, as a directory and as call attempts. ``dead`` ones fail, ``late`` ones wait."""

    def __init__(
        self,
        grid: Grid,
        make: Callable[[], nn.Module],
        *,
        living: Sequence[Index] | None = None,
        shape: tuple[int, ...] = (4,),
    ) -> None:
        self.grid, self.shape = grid, shape
        rule = ExpertRule(partial(torch.optim.SGD, lr=LR))
        self.experts = {}
        for uid in map(grid.uid, living or grid):
            self.experts[uid] = Expert(uid, make(), rule, shape, torch.device("cpu"))
        self.modules = {uid: expert.module for uid, expert in self.experts.items()}
        self.dead, self.dead_backward, self.late = set[str](), set[str](), set[str]()
        self.busy: dict[str, int] = {}
        self.forwards, self.backwards = list[str](), list[str]()
        self.failures: list[tuple[str, str]] = []
        self._device = threading.Lock()  # callers may be on loops of their own
        self.gone: set[str] = set()  # not in the directory any more

    async def find(self, grid: Grid, uid: str) -> ExpertInfo | None:
        return self._info(uid) if uid in self.modules else None

    async def best(self, grid: Grid, scores: Sequence[Floats], k: int) -> list[list[ExpertInfo]]:
        if not self.modules.keys() - self.gone:
            raise NoExpertsError(f"no expert of {grid} is alive")
        living = {uid: grid.index(uid) for uid in self.modules if uid not in self.gone}

        def priority(row: int, uid: str) -> float:
            return sum(float(score[row, u]) for score, u in zip(scores, living[uid], strict=True))

        rows = (sorted(living, key=lambda uid: -priority(row, uid)) for row in range(len(scores[0])))
        return [[self._info(uid) for uid in best[:k]] for best in rows]

    def _info(self, uid: str) -> ExpertInfo:
        return ExpertInfo(uid, HOST, self.shape, 0, 1e9)

    async def live(self, grid: Grid) -> list[ExpertInfo]:
        return [self._info(uid) for uid in self.modules if uid not in self.gone]

    def on_failure(self, info: ExpertInfo, reason: str) -> None:
        self.failures.append((info.uid, reason))
        self.gone.add(info.uid)

    def on_success(self, info: ExpertInfo) -> None:
        pass

    async def attempt(self, kind: type[ForwardExpert], info: ExpertInfo, tensors: Sequence[Floats]) -> Floats:
        return await (self.backward if kind is BackwardExpert else self.forward)(info, *tensors)

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        self.forwards.append(info.uid)
        await self._fail(info.uid, self.dead)
        with self._device:
            return self.experts[info.uid].forward(torch.from_numpy(inputs)).numpy()

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        self.backwards.append(info.uid)
        await self._fail(info.uid, self.dead_backward)
        with self._device:
            return self.experts[info.uid].backward(torch.from_numpy(inputs), torch.from_numpy(grads)).numpy()

    async def _fail(self, uid: str, dead: set[str]) -> None:
        await asyncio.sleep(0)
        if self.busy.get(uid):
            self.busy[uid] -= 1
            raise ExpertError(f"{uid} is busy", retry_s=0.001)
        if uid in dead:
            raise ExpertError(f"{uid} is dead")
        if uid in self.late:
            await asyncio.Event().wait()


class Function(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own, from any thread, as the runtime does."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class LocalCalls(ExpertCalls):
    """Calls of local experts, with the retries and reports of real ones."""

    def __init__(self, experts: LocalExperts, timeout_s: float = 5.0) -> None:
        super().__init__(
            cast(Node, None), cast(Directory, experts), cast(Runner, LocalRunner()), timeout_s=timeout_s
        )
        self.attempt = experts.attempt  # type: ignore[method-assign]


class LocalRunner:
    call = staticmethod(run)


def calls_of(peers: Node, **options: Any) -> ExpertCalls:
    """Return calls of experts whose hosts the test knows, awaited on its own loop."""
    ignores = SimpleNamespace(on_failure=lambda *_: None, on_success=lambda _: None)
    return ExpertCalls(peers, cast(Directory, ignores), cast(Runner, None), **options)


def tanh_expert(dim: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
