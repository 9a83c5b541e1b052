"""The experts API of a swarm: hosts, layers, remote experts and panels. `plan_host` decides how many experts fit."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar

import torch
from torch import nn

from colab_swarm.markup import facts, size
from colab_swarm.moe.batching import BatchLimits
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ANY_LENGTH, ExpertRule
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.hosting import (
    USUAL_LENGTH,
    ExpertHosting,
    HostPlan,
    HostResources,
    HostSettings,
    free_bytes,
    measure,
)
from colab_swarm.moe.layer import MixtureOfExperts, MixtureSettings, RemoteExpert
from colab_swarm.moe.records import ExpertServices
from colab_swarm.moe.server import ExpertStatistics
from colab_swarm.moe.watch import ExpertsSnapshot, ExpertsWatch
from colab_swarm.runtime import Runner

T = TypeVar("T")
ADAM = ExpertRule(partial(torch.optim.Adam, lr=1e-3), max_grad_norm=1.0)  # how experts learn by default
LIMITS = BatchLimits()
FILLED = 0.75  # share of the experts that fit to host at first; the rest is for experts of dead hosts


def plan_host(
    grid: Grid,
    make_expert: Callable[[], nn.Module],
    *,
    sample: Sequence[int] | None = None,
    rule: ExpertRule = ADAM,
    count: int | Sequence[str] | None = None,
    spare: int = HostSettings.spare,
) -> HostPlan:
    """Build one expert, let it take a step, and compute how many this device can host.

    Args:
        grid: contains their names.
        make_expert: returns a module that maps (n, *sample) to the same shape.
        sample: shape of one sample; -1: any length; None: the module's attribute ``sample``.
        rule: how each learns.
        count: how many, or the names of exactly these; None: three quarters of those that fit in the free memory.
        spare: experts of dead hosts to take over beyond ``count``.

    Raises:
        ValueError: the module cannot be an expert, none fits, or ``count`` is not usable.
        TypeError: the optimizer's state cannot be saved.
    """
    uids = None if count is None or isinstance(count, int) else tuple(dict.fromkeys(count))
    for uid in uids or ():
        grid.index(uid)
    if isinstance(count, int) and count < 1:
        raise ValueError(f"count={count}: host at least one expert")
    if sample is None:
        module = make_expert()
        sample = getattr(module, "sample", None)
        if not isinstance(sample, tuple):
            name = type(module).__name__
            raise ValueError(
                f"unknown samples of {name}. Say sample=(512,), or sample=(-1, 512) for any length"
            )
    shape = tuple(sample)
    model = measure(make_expert, rule, shape)
    sample_bytes = 4 * math.prod(USUAL_LENGTH if side == ANY_LENGTH else side for side in shape)
    batch_size = min(LIMITS.max_batch_size, max(1, LIMITS.max_batch_bytes // sample_bytes))
    fit, why = model.experts_that_fit(free_bytes(), max_batch_size=batch_size)
    fit = min(fit, grid.size)
    why = f"{fit} of {grid} fit: {why}"
    if uids is not None:
        return HostPlan(grid, make_expert, rule, shape, model, len(uids), len(uids), uids, why)
    if count is None and not fit:
        raise ValueError(f"{why}. Use smaller experts, or give count=1 to try")
    number = min(count, grid.size) if isinstance(count, int) else max(1, int(FILLED * fit))
    capacity = max(number, min(number + spare, fit))
    why = f"hosting {number} experts, and up to {capacity} when other hosts die; {why}"
    return HostPlan(grid, make_expert, rule, shape, model, number, capacity, None, why)


@dataclass(frozen=True)
class HostedExpert:
    """One expert of this peer."""

    uid: str  # its name
    step: int  # optimizer steps in its weights
    saved_step: int | None  # steps in its last save; None: not saved yet
    copies: int  # other peers that have that save


@dataclass(frozen=True)
class HostSnapshot:
    """State of a host."""

    grid: str  # of its experts
    experts: tuple[HostedExpert, ...]  # in the order of their names
    kept_bytes: int  # saves that this peer keeps for others
    fault: str | None  # why the last save of an expert failed; None if none did


class ExpertHost:
    """Experts on this peer, served in the background until `stop`. Made by `Swarm.host_experts`."""

    def __init__(
        self,
        runtime: Runner,
        resources: HostResources,
        plan: HostPlan,
        settings: HostSettings,
        show: Callable[[ExpertHost], Any],
    ) -> None:
        """Claim names and start to serve; ``show`` makes the panel."""
        self.grid, self.arithmetic = plan.grid, plan.arithmetic
        self.stopped = False
        self._runtime, self._resources, self._show = runtime, resources, show
        self._hosting = ExpertHosting(resources, plan, settings)
        runtime.call(self._hosting.start())

    @property
    def uids(self) -> list[str]:
        """The experts hosted now."""
        return sorted(self._hosting.experts)

    def statistics(self) -> dict[str, ExpertStatistics]:
        """Return the statistics of each expert, by uid."""
        return self._runtime.call(self._hosting.statistics())

    def snapshot(self) -> HostSnapshot:
        """Return the host's state. Thread-safe."""
        saves, experts = dict(self._hosting.saves.results), sorted(dict(self._hosting.experts).items())
        hosted, fault = [], None
        for uid, expert in experts:
            save = saves.get(uid)
            fault = fault or (save.fault if save else None)
            steps, copies = (save.step, len(save.holders)) if save else (None, 0)
            hosted.append(HostedExpert(uid, expert.step, steps, copies))
        return HostSnapshot(str(self.grid), tuple(hosted), self._resources.store.kept_bytes, fault)

    def panel(self) -> Any:
        """Return a live view of all experts of the grid: widgets in a notebook, text elsewhere."""
        return self._show(self)

    def save(self) -> None:
        """Save changed experts now, on this disk and at other peers."""
        self._runtime.call(self._hosting.save())

    def wait(self, seconds: float) -> None:
        """Serve for so long; an interrupt ends the wait and not the serving."""
        self._runtime.call(asyncio.sleep(seconds))

    def stop(self) -> None:
        """Withdraw the experts, save them a last time and stop serving them. Idempotent."""
        if not self.stopped:
            self.stopped = True
            self._runtime.call(self._hosting.stop())

    def kill(self) -> None:
        """End as a killed process would. For simulated crashes, on the runtime's loop."""
        self.stopped = True
        self._hosting.kill()
        self._resources.replicas.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        if self.stopped:
            return f"ExpertHost({snapshot.grid}, stopped)"
        steps = sum(expert.step for expert in snapshot.experts)
        count = f"{len(snapshot.experts)} of {self._hosting.plan.count} experts"
        return f"ExpertHost({snapshot.grid}, {count}, {steps:,} steps)"

    def _repr_html_(self) -> str:
        snapshot = self.snapshot()
        entries = {"kept for others": size(snapshot.kept_bytes)}
        entries |= {"fault of the last save": snapshot.fault} if snapshot.fault else {}
        rows = [
            (
                one.uid,
                f"{one.step:,}",
                "not yet" if one.saved_step is None else f"{one.saved_step:,}",
                f"{one.copies}",
            )
            for one in snapshot.experts
        ]
        return facts(repr(self), entries, ("expert", "step", "saved at step", "copies elsewhere"), rows)


class HostOptions(TypedDict, total=False):
    """Options of `Swarm.host_experts`.

    Attributes:
        folder: stores saves; with the same folder a later session continues from them. Without it, only the copies at
            other peers survive this process.
        copies: other peers that keep each expert's saves.
        spare: experts of dead hosts to take over beyond ``count``, if memory allows.
        save_s: between two saves.
        takeover_s: between two checks for experts whose hosts died.
        farewell_s: longest time to send the last saves to other peers.
    """

    folder: str | Path
    copies: int
    spare: int
    save_s: float
    takeover_s: float
    farewell_s: float


class MixtureOptions(TypedDict, total=False):
    """Options of `Swarm.mixture_of_experts`.

    Attributes:
        k_min, grace_s, sequences, reject_outliers: see `MixtureSettings`.
        compression: of activations and gradients, as for `Swarm.optimizer`, but not adaptive. Warning: onebit and topk
            have no error feedback here, so the lost values never arrive. Train with them from the start, or use int8.
        timeout_s: for finding experts, and again for calling them.
    """

    k_min: int
    grace_s: float
    sequences: bool
    reject_outliers: float | None
    compression: str
    timeout_s: float


async def _on_loop(make: Callable[[], T]) -> T:
    return make()


class SwarmExperts:
    """A swarm's experts: one directory, at most one host per prefix, and all layers and panels.

    Args:
        runtime, services: of the peer.
        show: makes a panel from a function that takes a snapshot, its button's action, and whether that stops a host.
    """

    def __init__(
        self,
        runtime: Runner,
        services: ExpertServices,
        show: Callable[[Callable[[], ExpertsSnapshot], Callable[[], None], bool], Any],
    ) -> None:
        self._runtime, self._services, self._show = runtime, services, show
        self._directory = runtime.call(_on_loop(partial(Directory, services)))
        self._resources: HostResources | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._hosts: dict[str, ExpertHost] = {}  # by prefix
        self._watches: dict[Grid, ExpertsWatch] = {}

    def host(
        self,
        prefix: str,
        shape: Sequence[int],
        make_expert: Callable[[], nn.Module],
        *,
        sample: Sequence[int] | None,
        rule: ExpertRule | None,
        count: int | Sequence[str] | None,
        options: HostOptions,
    ) -> ExpertHost:
        """Host experts as `Swarm.host_experts` does; an earlier host of the prefix is stopped."""
        grid = Grid.of(prefix, shape)
        folder = options.get("folder")
        settings = HostSettings(**{name: value for name, value in options.items() if name != "folder"})  # type: ignore[arg-type]
        plan = plan_host(
            grid, make_expert, sample=sample, rule=rule or ADAM, count=count, spare=settings.spare
        )
        if grid.prefix in self._hosts:
            self._hosts.pop(grid.prefix).stop()
        resources = self._open(None if folder is None else Path(folder))
        if count is None:
            print(plan.arithmetic)
        host = self._hosts[grid.prefix] = ExpertHost(self._runtime, resources, plan, settings, self._panel)
        return host

    def mixture(
        self, prefix: str, shape: Sequence[int], dim: int, *, k: int, options: MixtureOptions
    ) -> MixtureOfExperts:
        """Return a layer as `Swarm.mixture_of_experts` does."""
        grid = Grid.of(prefix, shape)
        calls = self._calls(options.get("compression", "float32"), options.get("timeout_s", 30.0))
        rest = {name: value for name, value in options.items() if name not in ("compression", "timeout_s")}
        return MixtureOfExperts(calls, grid, dim, MixtureSettings(k, **rest))  # type: ignore[arg-type]

    def remote(self, uid: str, shape: Sequence[int], *, compression: str, timeout_s: float) -> RemoteExpert:
        """Return one expert as a module, as `Swarm.expert` does."""
        grid = Grid.of(uid.rsplit(".", len(shape))[0], shape)
        return RemoteExpert(self._calls(compression, timeout_s), grid, uid)

    def panel(self, prefix: str, shape: Sequence[int], leave: Callable[[], None]) -> Any:
        """Return a live view of a grid's experts, as `Swarm.experts_panel` does."""
        return self._show(self.watch(Grid.of(prefix, shape)).snapshot, leave, False)

    def _panel(self, host: ExpertHost) -> Any:
        def read() -> ExpertsSnapshot:
            snapshot = self.watch(host.grid).snapshot()
            return replace(snapshot, over=snapshot.over or host.stopped)

        return self._show(read, host.stop, True)

    def watch(self, grid: Grid) -> ExpertsWatch:
        """Return the source of a grid's snapshots."""
        if grid not in self._watches:
            self._watches[grid] = ExpertsWatch(
                self._runtime, self._services, self._directory, grid, self._served
            )
        return self._watches[grid]

    def _served(self) -> dict[str, ExpertStatistics]:
        return {} if self._resources is None else self._resources.server.statistics()

    def close(self) -> None:
        """Withdraw and save the hosted experts, then stop serving."""
        for watch in self._watches.values():
            watch.close()
        for host in self._hosts.values():
            host.stop()
        self._hosts.clear()
        if self._resources is not None:
            self._runtime.call(self._resources.close())
        self._runtime.call(self._directory.close())
        if self._temporary is not None:
            self._temporary.cleanup()

    def kill(self) -> None:
        """End as a killed process would. For simulated crashes, on the runtime's loop."""
        for host in self._hosts.values():
            host.kill()

    def _calls(self, compression: str, timeout_s: float) -> ExpertCalls:
        peers = self._services.peers
        return ExpertCalls(peers, self._directory, self._runtime, codec=compression, timeout_s=timeout_s)

    def _open(self, folder: Path | None) -> HostResources:
        """Return the resources of all hosts here, in the folder of the first."""
        if self._resources is None:
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="colab-swarm-experts-", ignore_cleanup_errors=True
                )
                folder = Path(self._temporary.name)
            make = partial(HostResources, self._services, self._directory, folder)
            self._resources = self._runtime.call(_on_loop(make))
        elif folder is not None and folder != self._resources.folder:
            raise ValueError(
                f"this peer saves experts in {self._resources.folder}: omit folder=, or leave the swarm first"
            )
        return self._resources
