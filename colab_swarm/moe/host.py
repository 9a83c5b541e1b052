"""The face of hosting: what `Swarm.host_experts` gives back, and how many experts that is."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict

import torch
from torch import nn

from colab_swarm.markup import facts, size
from colab_swarm.moe.batching import BatchLimits
from colab_swarm.moe.calls import ExpertAccess, ExpertCalls, ExpertServices
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ANY_LENGTH, ExpertRule
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.hosting import (
    USUAL_LENGTH,
    ExpertHosting,
    ExpertKind,
    Footprint,
    HostingPlan,
    HostResources,
    HostSettings,
    Model,
    experts_that_fit,
    explain,
    free_bytes,
    measure,
)
from colab_swarm.moe.layer import MixtureOfExperts, MixtureSettings, RemoteExpert
from colab_swarm.moe.server import ExpertStatistics
from colab_swarm.moe.watch import ExpertsSnapshot, ExpertsWatch
from colab_swarm.runtime import Runner

ADAM = ExpertRule(partial(torch.optim.Adam, lr=1e-3), max_grad_norm=1.0)

"""How experts learn if nothing else is said."""

USUAL_LIMITS = BatchLimits()

FILLED = 0.75

"""Share of the experts that fit which is hosted at first: the rest of the memory is for experts whose hosts die."""


@dataclass(frozen=True)
class HostPlan:
    """What to host: see `plan_host`. ``arithmetic`` says in a sentence how many experts and why."""

    kind: ExpertKind
    wanted: HostingPlan
    model: Model
    arithmetic: str


def plan_host(
    grid: Grid,
    make_expert: Callable[[], nn.Module],
    *,
    sample: Sequence[int] | None = None,
    rule: ExpertRule = ADAM,
    count: int | None = None,
    uids: Sequence[str] | None = None,
    spare: int = HostSettings.spare,
    limits: BatchLimits = USUAL_LIMITS,
) -> HostPlan:
    """Build one expert, let it take a step, and see how many this device can host.

    Args:
        grid: where they have their names.
        make_expert: makes a module that maps (n, *sample) to the same shape.
        sample: shape of one sample; -1: any length; None: what the module's ``sample`` says.
        rule: how each learns.
        count: how many; None: as many as three quarters of the free memory hold.
        uids: exactly these.
        spare: more experts that may be taken over when their hosts die.
        limits: of the server's batches.

    Raises:
        ValueError: the module cannot be an expert, none fits, or ``count`` or ``uids`` are not usable.
        TypeError: the optimizer's state cannot be saved.
    """
    if count is not None and (uids is not None or count < 1):
        raise ValueError(f"count={count}: host one expert at least, and say either count= or uids=")
    for uid in uids or ():
        grid.index(uid)
    shape = tuple(sample_of(make_expert()) if sample is None else sample)
    model = measure(make_expert, rule, shape)
    fit, why = _fitting(model.footprint, shape, limits)
    fit = min(fit, grid.size)
    why = f"{fit} of {grid} fit: {why}"
    if uids is None and count is None and not fit:
        raise ValueError(f"{why}. Take smaller experts or a smaller max_batch_size, or say count=1 to try")
    kind = ExpertKind(grid, make_expert, rule, shape)
    if uids is not None:
        names = tuple(dict.fromkeys(uids))
        return HostPlan(kind, HostingPlan(len(names), len(names), names), model, why)
    number = max(1, int(FILLED * fit)) if count is None else min(count, grid.size)
    capacity = max(number, min(number + spare, fit))
    told = f"hosting {number} experts, and up to {capacity} when other hosts die; {why}"
    return HostPlan(kind, HostingPlan(number, capacity), model, told)


def _fitting(footprint: Footprint, shape: Sequence[int], limits: BatchLimits) -> tuple[int, str]:
    """How many experts fit in the memory that is free now, and the arithmetic."""
    sample_bytes = 4 * math.prod(USUAL_LENGTH if side == ANY_LENGTH else side for side in shape)
    most = min(limits.max_batch_size, max(1, limits.max_batch_bytes // sample_bytes))
    free = free_bytes()
    return (
        experts_that_fit(footprint, free, max_batch_size=most),
        explain(footprint, free, max_batch_size=most),
    )


def sample_of(module: nn.Module) -> tuple[int, ...]:
    """The shape of one sample, as the module tells it.

    Raises:
        ValueError: it does not.
    """
    sample = getattr(module, "sample", None)
    if not isinstance(sample, tuple):
        raise ValueError(
            f"what samples does {type(module).__name__} take? Say sample=(512,), or sample=(-1, 512) for any length"
        )
    return sample


@dataclass(frozen=True)
class HostedExpert:
    """One expert of this peer.

    Attributes:
        uid: its name.
        step: updates in its weights.
        saved_step: updates in its last save; None: not saved yet.
        copies: other peers that have that save.
    """

    uid: str
    step: int
    saved_step: int | None
    copies: int


@dataclass(frozen=True)
class HostSnapshot:
    """What a panel shows of a host.

    Attributes:
        grid: names its experts' kind.
        experts: in the order of their names.
        kept_bytes: saves that this peer keeps for others.
        fault: why the last save went wrong somewhere; None if none did.
    """

    grid: str
    experts: tuple[HostedExpert, ...]
    kept_bytes: int
    fault: str | None


class ExpertHost:
    """Experts on this peer; they are served in the background until `stop`. Made by `Swarm.host_experts`."""

    def __init__(
        self,
        runtime: Runner,
        premises: HostResources,
        plan: HostPlan,
        settings: HostSettings,
        show: Callable[[ExpertHost], Any],
    ) -> None:
        """Claims names and serves from then on; ``show`` makes its panel."""
        self.grid, self.arithmetic = plan.kind.grid, plan.arithmetic
        self.stopped = False
        self._runtime, self._premises, self._show = runtime, premises, show
        self._hosting = ExpertHosting(premises, plan.kind, plan.wanted, plan.model, settings)
        runtime.call(self._hosting.start())

    @property
    def uids(self) -> list[str]:
        """The experts hosted now."""
        return sorted(self._hosting.experts)

    def statistics(self) -> dict[str, ExpertStatistics]:
        """What each expert did lately, by uid."""
        return self._runtime.call(self._hosting.statistics())

    def snapshot(self) -> HostSnapshot:
        """As it stands; safe from any thread."""
        kept = dict(self._hosting.copies.kept)
        faults = [kept[uid].fault for uid in self.uids if uid in kept]
        return HostSnapshot(
            str(self._hosting.kind.grid),
            tuple(
                HostedExpert(
                    uid,
                    expert.step,
                    kept[uid].step if uid in kept else None,
                    len(kept[uid].holders) if uid in kept else 0,
                )
                for uid, expert in sorted(dict(self._hosting.experts).items())
            ),
            self._premises.holders.shelf.kept_bytes,
            next(filter(None, faults), None),
        )

    def panel(self) -> Any:
        """A live view of all experts of the grid, and of those here at work: widgets in a notebook, text elsewhere."""
        return self._show(self)

    def save(self) -> None:
        """Save now what changed, here and at the holders."""
        self._runtime.call(self._hosting.save())

    def wait(self, seconds: float) -> None:
        """Serve for so long; an interrupt ends the waiting, not the serving."""
        self._runtime.call(asyncio.sleep(seconds))

    def stop(self) -> None:
        """Withdraw the experts, save them a last time and serve them no more. Idempotent."""
        if not self.stopped:
            self.stopped = True
            self._runtime.call(self._hosting.stop())

    def kill(self) -> None:
        """End like a process that is killed. For simulated crashes, on the runtime's loop."""
        self.stopped = True
        self._hosting.kill()
        self._premises.holders.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        if self.stopped:
            return f"ExpertHost({snapshot.grid}, stopped)"
        steps = sum(expert.step for expert in snapshot.experts)
        count = f"{len(snapshot.experts)} of {self._hosting.wanted.count} experts"
        return f"ExpertHost({snapshot.grid}, {count}, {steps:,} steps)"

    def _repr_html_(self) -> str:
        snapshot = self.snapshot()
        told = {"kept for others": size(snapshot.kept_bytes)}
        told |= {"fault of the last save": snapshot.fault} if snapshot.fault else {}
        rows = [
            (
                one.uid,
                f"{one.step:,}",
                "not yet" if one.saved_step is None else f"{one.saved_step:,}",
                f"{one.copies}",
            )
            for one in snapshot.experts
        ]
        return facts(repr(self), told, ("expert", "step", "saved at step", "copies elsewhere"), rows)


class HostOptions(TypedDict, total=False):
    """How experts are hosted; what `Swarm.host_experts` takes besides.

    Attributes:
        folder: where saves lie; by the same folder the experts go on later where they were. Left out: a temporary one;
            what other peers keep is all that survives this process.
        copies: other peers that keep each expert's saves.
        spare: experts of dead hosts that are taken over beyond ``count``, where memory allows.
        save_s: between two saves.
        takeover_s: between two looks for experts whose hosts died.
        farewell_s: how long the last saves may take on their way to other peers.
    """

    folder: str | Path
    copies: int
    spare: int
    save_s: float
    takeover_s: float
    farewell_s: float


class MixtureOptions(TypedDict, total=False):
    """How a layer uses its experts; what `Swarm.mixture_of_experts` takes besides.

    Attributes:
        k_min, grace_s, sequences, reject_outliers: see `MixtureSettings`.
        compression: of activations and gradients on the wire, as for `Swarm.optimizer`, but not adaptive. Warning:
            onebit and topk have no error feedback here, so the lost values never arrive. Train with them from the
            beginning, or use int8.
        timeout_s: for finding experts, and again for calling them.
    """

    k_min: int
    grace_s: float
    sequences: bool
    reject_outliers: float | None
    compression: str
    timeout_s: float


class SwarmExperts:
    """All that one peer has to do with experts; made when it is first asked for.

    Args:
        runtime, services: of the peer.
        show: makes a panel, from what takes a snapshot, what its button stops, and whether that is a host.
    """

    def __init__(
        self,
        runtime: Runner,
        services: ExpertServices,
        show: Callable[[Callable[[], ExpertsSnapshot], Callable[[], None], bool], Any],
    ) -> None:
        self._runtime, self._services, self._show = runtime, services, show
        self._directory = runtime.call(self._make_directory())
        self._premises: HostResources | None = None
        self._folder: Path | None = None
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
        """See `Swarm.host_experts`."""
        grid = Grid.of(prefix, shape)
        folder = options.get("folder")
        settings = HostSettings(**{name: value for name, value in options.items() if name != "folder"})  # type: ignore[arg-type]
        plan = plan_host(
            grid,
            make_expert,
            sample=sample,
            rule=rule or ADAM,
            count=count if isinstance(count, int) else None,
            uids=None if isinstance(count, int) else count,
            spare=settings.spare,
        )
        if grid.prefix in self._hosts:
            self._hosts.pop(grid.prefix).stop()
        premises = self._open(None if folder is None else Path(folder))
        if count is None:
            print(plan.arithmetic)
        host = self._hosts[grid.prefix] = ExpertHost(self._runtime, premises, plan, settings, self._panel)
        return host

    def mixture(
        self, prefix: str, shape: Sequence[int], dim: int, *, k: int, options: MixtureOptions
    ) -> MixtureOfExperts:
        """See `Swarm.mixture_of_experts`."""
        grid = Grid.of(prefix, shape)
        access = self._access(options.get("compression", "float32"), options.get("timeout_s", 30.0))
        rest = {name: value for name, value in options.items() if name not in ("compression", "timeout_s")}
        return MixtureOfExperts(access, grid, dim, MixtureSettings(k, **rest))  # type: ignore[arg-type]

    def remote(self, uid: str, shape: Sequence[int], *, compression: str, timeout_s: float) -> RemoteExpert:
        """See `Swarm.expert`."""
        grid = Grid.of(uid.rsplit(".", len(shape))[0], shape)
        return RemoteExpert(self._access(compression, timeout_s), grid, uid)

    def _panel(self, host: ExpertHost) -> Any:
        def read() -> ExpertsSnapshot:
            snapshot = self.watch(host.grid).snapshot()
            return replace(snapshot, over=snapshot.over or host.stopped)

        return self._show(read, host.stop, True)

    def panel(self, prefix: str, shape: Sequence[int], leave: Callable[[], None]) -> Any:
        """See `Swarm.experts_panel`."""
        return self._show(self.watch(Grid.of(prefix, shape)).snapshot, leave, False)

    def watch(self, grid: Grid) -> ExpertsWatch:
        """What a panel of the grid's experts reads."""
        if grid not in self._watches:
            self._watches[grid] = ExpertsWatch(
                self._runtime, self._services, self._directory, grid, self._served
            )
        return self._watches[grid]

    def _served(self) -> dict[str, ExpertStatistics]:
        return {} if self._premises is None else self._premises.server.statistics()

    def close(self) -> None:
        """Withdraw and save what is hosted, serve nothing any more."""
        for watch in self._watches.values():
            watch.close()
        for host in self._hosts.values():
            host.stop()
        self._hosts.clear()
        if self._premises is not None:
            self._runtime.call(self._premises.close())
        self._runtime.call(self._directory.close())
        if self._temporary is not None:
            self._temporary.cleanup()

    def kill(self) -> None:
        """End like a process that is killed. For simulated crashes, on the runtime's loop."""
        for host in self._hosts.values():
            host.kill()

    def _access(self, compression: str, timeout_s: float) -> ExpertAccess:
        calls = ExpertCalls(self._services.peers, codec=compression, timeout_s=timeout_s)
        return ExpertAccess(self._runtime.call, self._directory, calls, timeout_s)

    def _open(self, folder: Path | None) -> HostResources:
        """What all hosts here share, in the folder of the first."""
        if self._premises is None:
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="colab-swarm-experts-", ignore_cleanup_errors=True
                )
                folder = Path(self._temporary.name)
            self._folder = folder
            self._premises = self._runtime.call(self._make_premises(folder))
        elif folder is not None and folder != self._folder:
            raise ValueError(
                f"experts of this peer are saved in {self._folder}: leave folder= out, or leave the swarm first"
            )
        return self._premises

    async def _make_directory(self) -> Directory:
        return Directory(self._services)

    async def _make_premises(self, folder: Path) -> HostResources:
        return HostResources.open(self._services, self._directory, folder)
