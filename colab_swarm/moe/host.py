"""Hosting experts, and the experts API of a swarm: hosts, layers, remote experts and panels.

A host starts with the experts whose saves are on its disk, then those that other peers saved and no
peer hosts, then vacant names. Later, if memory is left, it takes over experts whose hosts died,
each from the newest save of any owner that is complete and fits. It gives up names that belong to
an earlier claim. A host that stops withdraws its experts first, so that no peer calls them, and
saves them a last time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn

from colab_swarm.dht.service import BackgroundTasks, RunServices
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import ExpertHosted, ExpertLost, Fault
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import (
    ANY_LENGTH,
    USUAL_LENGTH,
    Expert,
    ExpertModel,
    ExpertRule,
    check_fit,
    free_bytes,
    measure,
)
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.layer import MixtureOfExperts, MixtureSettings, RemoteExpert
from colab_swarm.moe.saves import MAX_HOLDERS, ExpertSaves, HolderRecord, ReplicaStore, SavePlace
from colab_swarm.moe.server import BatchLimits, ExpertServer, ExpertStatistics
from colab_swarm.moe.watch import ExpertsSnapshot, ExpertsWatch
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import Runner
from colab_swarm.tensors.chunks import Snapshot, pack, unpack

logger = logging.getLogger(__name__)
T = TypeVar("T")
ADAM = ExpertRule(partial(torch.optim.Adam, lr=1e-3), max_grad_norm=1.0)  # how experts learn by default
LIMITS = BatchLimits()
FILLED = 0.75  # share of the experts that fit to host at first; the rest is for experts of dead hosts
FAREWELL_S = 60.0  # to send the last saves to other peers when a host stops
ANNOUNCEMENTS = 3  # in the life of a record
REST = 3  # upkeep that took long pauses this many times as long, to leave a slow uplink to calls


@dataclass(frozen=True)
class HostPlan:
    """The experts to host, and how.

    Attributes:
        grid: contains their names.
        make: returns a new expert's module.
        rule: how they learn.
        sample: shape of one sample.
        model: memory and state of such an expert.
        count, capacity: how many, and up to how many after other hosts died.
        uids: host only these; None: any.
        arithmetic: explains the count in a sentence.
        copies: other peers that keep each expert's saves.
        spare: experts of dead hosts to take over beyond ``count``, if memory allows.
        save_s: between two saves.
        takeover_s: between two checks for experts whose hosts died.
    """

    grid: Grid
    make: Callable[[], nn.Module]
    rule: ExpertRule
    sample: tuple[int, ...]
    model: ExpertModel
    count: int = 1
    capacity: int = 1
    uids: tuple[str, ...] | None = None
    arithmetic: str = ""
    copies: int = 2
    spare: int = 4
    save_s: float = 60.0
    takeover_s: float = 20.0

    def __post_init__(self) -> None:
        if not 0 <= self.copies <= MAX_HOLDERS or self.spare < 0:
            raise ValueError(
                f"copies={self.copies}, spare={self.spare}: give 0 to {MAX_HOLDERS}, and 0 or more"
            )
        if (shortest := min(self.save_s, self.takeover_s)) <= 0:
            raise ValueError(f"{shortest:g} s: the times of a host must be above 0")


def plan_host(
    grid: Grid,
    make_expert: Callable[[], nn.Module],
    *,
    sample: Sequence[int] | None = None,
    rule: ExpertRule | None = None,
    count: int | Sequence[str] | None = None,
    **settings: Any,
) -> HostPlan:
    """Build one expert, let it take a step, and compute how many this device can host.

    ``sample`` is the shape of one sample (-1: any length; None: the module's attribute ``sample``),
    ``count`` how many, or the names of exactly these (None: three quarters of those that fit in the
    free memory). Raises ValueError if the module cannot be an expert, none fits, or ``count`` is
    not usable; TypeError if its state cannot be saved.
    """
    uids, rule = _names(grid, count), rule or ADAM
    shape = _sample_of(make_expert) if sample is None else tuple(sample)
    plan = HostPlan(grid, make_expert, rule, shape, measure(make_expert, rule, shape), uids=uids, **settings)
    sample_bytes = 4 * math.prod(USUAL_LENGTH if side == ANY_LENGTH else side for side in shape)
    batch_size = min(LIMITS.max_batch_size, max(1, LIMITS.max_batch_bytes // sample_bytes))
    fit, why = plan.model.experts_that_fit(free_bytes(), max_batch_size=batch_size)
    fit = min(fit, grid.size)
    why = f"{fit} of {grid} fit: {why}"
    if uids is not None:
        return replace(plan, count=len(uids), capacity=len(uids), arithmetic=why)
    if count is None and not fit:
        raise ValueError(f"{why}. Use smaller experts, or give count=1 to try")
    number = min(count, grid.size) if isinstance(count, int) else max(1, int(FILLED * fit))
    capacity = max(number, min(number + plan.spare, fit))
    why = f"hosting {number} experts, and up to {capacity} when other hosts die; {why}"
    return replace(plan, count=number, capacity=capacity, arithmetic=why)


def _names(grid: Grid, count: int | Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(count, int) and count < 1:
        raise ValueError(f"count={count}: host at least one expert")
    if count is None or isinstance(count, int):
        return None
    for uid in count:
        grid.index(uid)
    return tuple(dict.fromkeys(count))


def _sample_of(make_expert: Callable[[], nn.Module]) -> tuple[int, ...]:
    module = make_expert()
    sample = getattr(module, "sample", None)
    if not isinstance(sample, tuple):
        raise ValueError(
            f"unknown samples of {type(module).__name__}. Say sample=(512,), or sample=(-1, 512) for any length"
        )
    return sample


class HostResources:
    """What all hosts of one peer share: the accelerator, and ``folder``, used by one process only."""

    def __init__(self, services: RunServices, directory: Directory, folder: Path) -> None:
        self.services, self.directory, self.folder = services, directory, folder
        self.server = ExpertServer(services.peers, services.events, gate=services.gate)
        self.saves = ExpertSaves(services, ReplicaStore(folder, me=services.peers.id))

    async def close(self) -> None:
        """Stop serving experts and saves."""
        await self.server.close()
        await self.saves.stop()


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
    """Experts of one kind on this peer, served in the background until `stop`. Made by `Swarm.host_experts`.

    Its coroutines run on the event loop.
    """

    def __init__(
        self, runtime: Runner, resources: HostResources, plan: HostPlan, show: Callable[[ExpertHost], Any]
    ) -> None:
        """``show`` makes the panel."""
        self.grid, self.arithmetic = plan.grid, plan.arithmetic
        self.stopped = False
        self.experts: dict[str, Expert] = {}
        self.plan, self._services, self._saves = plan, resources.services, resources.saves
        self._runtime, self._show = runtime, show
        self._directory, self._server = resources.directory, resources.server
        self._saving = asyncio.Lock()
        self._save_fault: str | None = None
        self._tasks = BackgroundTasks("host experts", self._services.events, self._services.rng)

    @property
    def uids(self) -> list[str]:
        """The experts hosted now."""
        return sorted(self.experts)

    def statistics(self) -> dict[str, ExpertStatistics]:
        """Return the statistics of each expert, by uid."""
        served = self._runtime.call(_on_loop(self._server.statistics))
        return {uid: served[uid] for uid in self.uids if uid in served}

    def snapshot(self) -> HostSnapshot:
        """Return the host's state. Thread-safe."""
        experts = sorted(dict(self.experts).items())
        saves = [self._saves.results.get(uid) for uid, _ in experts]
        hosted = tuple(
            HostedExpert(uid, expert.step, save.step if save else None, len(save.holders) if save else 0)
            for (uid, expert), save in zip(experts, saves, strict=True)
        )
        fault = next((save.fault for save in saves if save and save.fault), None)
        return HostSnapshot(str(self.grid), hosted, self._saves.store.kept_bytes, fault)

    def panel(self) -> Any:
        """Return a live view of all experts of the grid: widgets in a notebook, text elsewhere."""
        return self._show(self)

    def save(self) -> None:
        """Save changed experts now, on this disk and at other peers."""
        self._runtime.call(self.save_changed())

    def wait(self, seconds: float) -> None:
        """Serve for so long; an interrupt ends the wait and not the serving."""
        self._runtime.call(asyncio.sleep(seconds))

    def stop(self) -> None:
        """Withdraw the experts, save them a last time and stop serving them. Idempotent."""
        if not self.stopped:
            self.stopped = True
            self._runtime.call(self.close())

    def kill(self) -> list[asyncio.Task[Any]]:
        """End as a killed process would; return the tasks that are ending. For simulated crashes, on the loop."""
        self.stopped = True
        self._saves.kill()
        return self._tasks.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self.stopped:
            return f"ExpertHost({self.grid}, stopped)"
        steps = sum(expert.step for expert in [*self.experts.values()])
        return f"ExpertHost({self.grid}, {len(self.experts)} of {self.plan.count} experts, {steps:,} steps)"

    # -- on the event loop

    async def start(self) -> None:
        """Host the requested experts, as far as their names are vacant; raise errors of ``plan.make``."""
        plan = self.plan
        await self._saves.start()
        # claims are announced, too
        self._tasks.every(self._directory.settings.ttl_s / ANNOUNCEMENTS, self._announce, rest=REST)
        try:
            await self._take(plan.count, self._here())
            await self._fill(plan.count)
        except BaseException:
            await self.close()
            raise
        self._tasks.every(plan.save_s, self.save_changed, rest=REST)
        self._tasks.every(plan.takeover_s, lambda: self._fill(plan.capacity), rest=REST)

    async def close(self) -> None:
        """Do as `stop`."""
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        uids = [*self.experts]
        await self._directory.withdraw(self.grid, uids)
        for uid in uids:
            self._server.remove(uid)
        try:
            for expert in self.experts.values():  # to this disk first, which is quick
                await self._save(expert)
            async with asyncio.timeout(FAREWELL_S):
                await self.save_changed()
        except (PeerError, StateError, TimeoutError) as error:
            logger.warning("not all experts were saved: %s", str(error) or "other peers took too long")
        self.experts.clear()
        for uid in uids:
            self._services.events.emit(ExpertLost(_now(), uid, "this host stopped"))

    async def _fill(self, count: int) -> None:
        if len(self.experts) < count and (saved := await self._saves.saved(self.grid)):
            live = {info.uid for info in await self._directory.live(self.grid)}
            await self._take(count, saved - live)
        if len(self.experts) < self.plan.count:
            await self._take(self.plan.count, None)

    def _here(self) -> set[str]:
        """Return the experts of this grid saved on this disk, by any owner: this peer may have had another id."""
        return {save.uid for save in self._saves.store.saves() if self.grid.contains(save.uid)}

    async def _take(self, count: int, uids: Iterable[str] | None) -> None:
        """Host more experts, up to ``count``; None: any that the plan allows."""
        grid, wanted = self.grid, self.plan.uids if uids is None else uids
        if wanted is not None:
            allowed = set(wanted if self.plan.uids is None else self.plan.uids) - self.experts.keys()
            wanted = sorted(filter(grid.contains, allowed.intersection(wanted)))
            if not wanted:
                return
        claimed = await self._directory.claim(grid, count - len(self.experts), wanted=wanted)
        try:
            claims = await asyncio.gather(*map(self._saves.claims, claimed))
            for uid, saves in zip(claimed, claims, strict=True):
                await self._open(uid, saves)
        finally:
            await self._directory.withdraw(grid, set(claimed) - self.experts.keys())
            if claimed:
                await self._announce()

    async def _open(self, uid: str, claims: Iterable[tuple[PeerId, SavePlace]]) -> None:
        """Host an expert, from the first save that is complete and fits, or as a new one."""
        taken_over = False
        self._saves.results.pop(uid, None)
        self._saves.safe.pop(uid, None)
        for owner, place in claims:
            try:
                expert = await self._load(uid, place)
            except StateError as error:
                logger.warning("skipped the save of %s at step %d: %s", uid, place.step, error)
                continue
            taken_over = owner != self._services.peers.id
            if not taken_over:
                self._saves.safe[uid] = place  # published until a newer one is safe
            break
        else:
            expert = await self._server.device.run(lambda: self._build(uid))
        self._server.add(expert)
        self.experts[uid] = expert
        self._services.events.emit(ExpertHosted(_now(), uid, expert.step, taken_over))

    def _build(self, uid: str, state: dict[str, Any] | None = None) -> Expert:
        expert = Expert(uid, self.plan.make(), self.plan.rule, self.plan.sample)
        if state is not None:
            expert.load_state_dict(state)
        return expert

    async def _load(self, uid: str, place: SavePlace) -> Expert:
        saved = await self._saves.fetch(uid, place, limit_bytes=self.plan.model.state_bytes)
        state = await asyncio.to_thread(unpack, saved.manifest.layout, saved.blob)
        check_fit(state, self.plan.model.state)
        if state.get("step") != place.step:
            raise StateError("the state is not of the claimed step")
        return await self._server.device.run(lambda: self._build(uid, state))

    async def _announce(self) -> None:
        grid = self.grid
        rivals = await self._directory.rivals(grid, [*self.experts])
        lost = [uid for uid in rivals if self.experts.pop(uid, None)]
        for uid in lost:
            self._server.remove(uid)
            self._services.events.emit(ExpertLost(_now(), uid, "another peer claimed it earlier"))
        if lost:
            await self._directory.withdraw(grid, lost)
        experts = {uid: (expert.shape, expert.step) for uid, expert in self.experts.items()}
        await self._directory.announce(grid, experts)

    async def save_changed(self) -> None:
        """Save the experts that changed or lost holders, and publish which experts have saves."""
        async with self._saving:
            others = await self._saves.others()
            for expert in [*self.experts.values()]:
                await self._save(expert, others)
            if saved := self._here() | {*filter(self.grid.contains, self._saves.results)}:
                await self._saves.publish_saved(self.grid, saved)

    async def _save(self, expert: Expert, others: Mapping[PeerId, HolderRecord] | None = None) -> None:
        """Save an expert here and at some of ``others``; None: only here."""
        uid, copies = expert.uid, self.plan.copies
        if not expert.step or not self._saves.due(uid, expert.step, others or {}, copies):
            return  # before its first step an expert equals a new one
        step, packed = await self._server.device.run(lambda: (expert.step, pack(expert.state_dict())))
        saved = await asyncio.to_thread(Snapshot.of, uid.encode(), step, *packed)
        if others is None:
            fault = await self._saves.write(saved)
        else:
            fault = (await self._saves.save(saved, others, copies)).fault
        if fault and not self._save_fault:
            self._services.events.emit(Fault(_now(), f"save of {uid}", fault))
        self._save_fault = fault


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _on_loop(make: Callable[[], T]) -> T:
    return make()


class SwarmExperts:
    """A swarm's experts: one directory, at most one host per prefix, and all layers and panels.

    ``show`` makes a panel from a function that takes a snapshot, its button's action, and whether that stops a host.
    """

    def __init__(
        self,
        runtime: Runner,
        services: RunServices,
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
        folder: str | Path | None = None,
        **settings: Any,
    ) -> ExpertHost:
        """Host experts as `Swarm.host_experts` does; an earlier host of the prefix is stopped."""
        grid = Grid(prefix, tuple(shape))
        plan = plan_host(grid, make_expert, **settings)
        if grid.prefix in self._hosts:
            self._hosts.pop(grid.prefix).stop()
        resources = self._open(folder)
        if settings.get("count") is None:
            print(plan.arithmetic)
        host = ExpertHost(self._runtime, resources, plan, self._panel)
        self._runtime.call(host.start())
        self._hosts[grid.prefix] = host
        return host

    def mixture(self, prefix: str, shape: Sequence[int], dim: int, **settings: Any) -> MixtureOfExperts:
        """Return a layer as `Swarm.mixture_of_experts` does."""
        grid, how = Grid(prefix, tuple(shape)), MixtureSettings(**settings)
        return MixtureOfExperts(self._calls(how.compression, how.timeout_s), grid, dim, how)

    def remote(self, uid: str, shape: Sequence[int], *, compression: str, timeout_s: float) -> RemoteExpert:
        """Return one expert as a module, as `Swarm.expert` does."""
        grid = Grid(uid.rsplit(".", len(shape))[0], tuple(shape))
        return RemoteExpert(self._calls(compression, timeout_s), grid, uid)

    def panel(self, prefix: str, shape: Sequence[int], leave: Callable[[], None]) -> Any:
        """Return a live view of a grid's experts, as `Swarm.experts_panel` does."""
        return self._show(self.watch(Grid(prefix, tuple(shape))).snapshot, leave, False)

    def _panel(self, host: ExpertHost) -> Any:
        def read() -> ExpertsSnapshot:
            snapshot = self.watch(host.grid).snapshot()
            return replace(snapshot, over=snapshot.over or host.stopped)

        return self._show(read, host.stop, True)

    def watch(self, grid: Grid) -> ExpertsWatch:
        """Return the source of a grid's snapshots."""
        if grid not in self._watches:
            mine = self._runtime, self._services.peers, self._directory
            self._watches[grid] = ExpertsWatch(*mine, grid, self._served)
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

    def _open(self, folder: str | Path | None) -> HostResources:
        """Return the resources of all hosts here, in the folder of the first."""
        if self._resources is None:
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="colab-swarm-experts-", ignore_cleanup_errors=True
                )
                folder = self._temporary.name
            make = partial(HostResources, self._services, self._directory, Path(folder))
            self._resources = self._runtime.call(_on_loop(make))
        elif folder is not None and Path(folder) != self._resources.folder:
            raise ValueError(
                f"this peer saves experts in {self._resources.folder}: omit folder=, or leave the swarm first"
            )
        return self._resources
