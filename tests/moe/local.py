"""Experts in this process, their directory and the ways in which they fail."""

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


class LocalExperts(ExpertCalls):
    """Modules that step by plain SGD, called without a network. ``dead`` ones fail, ``late`` ones wait."""

    def __init__(
        self, grid: Grid, *, living: Sequence[Index] | None = None, dim: int = 4, timeout_s: float = 5.0
    ) -> None:
        super().__init__(cast(Node, None), cast(Directory, self), cast(Runner, self), timeout_s=timeout_s)
        rule = ExpertRule(partial(torch.optim.SGD, lr=LR))
        self.shape: tuple[int, ...] = (dim,)
        self.experts = dict[str, Expert]()
        for uid in map(grid.uid, living or grid):
            module = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
            self.experts[uid] = Expert(uid, module, rule, self.shape, torch.device("cpu"))
        self.modules = {uid: expert.module for uid, expert in self.experts.items()}
        self.dead, self.dead_backward, self.late = set[str](), set[str](), set[str]()
        self.gone = set[str]()  # not in the directory any more
        self.busy: dict[str, int] = {}
        self.forwards, self.backwards = list[str](), list[str]()
        self.failures: list[tuple[str, str]] = []
        self._device = threading.Lock()  # callers may be on loops of their own

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on a loop of its own, from any thread, as the runtime does."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, coroutine).result()

    def info(self, uid: str) -> ExpertInfo:
        return ExpertInfo(uid, HOST, self.shape, 0, 1e9)

    async def find(self, grid: Grid, uid: str) -> ExpertInfo | None:
        return self.info(uid) if uid in self.modules else None

    async def live(self, grid: Grid) -> list[ExpertInfo]:
        return [self.info(uid) for uid in self.modules if uid not in self.gone]

    async def best(self, grid: Grid, scores: Sequence[Floats], k: int) -> list[list[ExpertInfo]]:
        living = await self.live(grid)
        if not living:
            raise NoExpertsError(f"no expert of {grid} is alive")

        def priority(row: int, uid: str) -> float:
            return sum(float(score[row, u]) for score, u in zip(scores, grid.index(uid), strict=True))

        rows = range(len(scores[0]))
        return [sorted(living, key=lambda info: -priority(row, info.uid))[:k] for row in rows]

    def on_failure(self, info: ExpertInfo, reason: str) -> None:
        self.failures.append((info.uid, reason))
        self.gone.add(info.uid)

    def on_success(self, info: ExpertInfo) -> None:
        pass

    async def attempt(self, kind: type[ForwardExpert], info: ExpertInfo, tensors: Sequence[Floats]) -> Floats:
        uid, backward = info.uid, kind is BackwardExpert
        (self.backwards if backward else self.forwards).append(uid)
        await asyncio.sleep(0)
        if self.busy.get(uid):
            self.busy[uid] -= 1
            raise ExpertError(f"{uid} is busy", retry_s=0.001)
        if uid in (self.dead_backward if backward else self.dead):
            raise ExpertError(f"{uid} is dead")
        if uid in self.late:
            await asyncio.Event().wait()
        expert = self.experts[uid]
        with self._device:
            return (expert.backward if backward else expert.forward)(*map(torch.from_numpy, tensors)).numpy()


class Function(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def calls_of(peers: Node, **options: Any) -> ExpertCalls:
    """Return calls of experts whose hosts the test knows, awaited on its own loop."""
    ignores = SimpleNamespace(on_failure=lambda *_: None, on_success=lambda _: None)
    return ExpertCalls(peers, cast(Directory, ignores), cast(Runner, None), **options)
