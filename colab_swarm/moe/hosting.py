"""Hosting experts: claim names, serve, announce and save them, and take over experts of dead hosts.

A host starts with the experts whose saves are on its disk, then those that other peers saved and no peer hosts, then
vacant names. Later, if memory is left, it takes over experts whose hosts died, each from the newest save of any owner
that is complete and fits. It gives up names that belong to an earlier claim. A host that stops withdraws its experts
first, so that no peer calls them, and saves them a last time.

Memory. Each expert keeps its parameters, buffers and optimizer state. One batch computes at a time, so these are needed
once: one expert's gradients, a copy of its state while it is saved, and the activations of the largest batch. They are
measured on one expert that is built and takes one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import ExpertHosted, ExpertLost, Fault
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ANY_LENGTH, Expert, ExpertRule
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.records import ExpertServices
from colab_swarm.moe.replicas import MAX_HOLDERS, Claim, ExpertSaves, HolderRecord, ReplicaService
from colab_swarm.moe.saves import ReplicaStore, check_fit, cut, freeze, thaw
from colab_swarm.moe.server import ExpertServer, ExpertStatistics
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.device import accelerator

logger = logging.getLogger(__name__)
USABLE = 0.8  # share of the free memory to use: fragmentation and other programs take the rest
UNKNOWN_FREE_BYTES = 2 << 30
USUAL_LENGTH = 128  # assumed for samples of any length
SAMPLES = 2
MOST = 256  # experts per host: with more, their calls would queue
ANNOUNCEMENTS = 3  # in the life of a record
REST = 3  # upkeep that took long pauses this many times as long, to leave a slow uplink to calls


@dataclass(frozen=True)
class ExpertModel:
    """Memory that experts of one kind need, in bytes, and the structure of their state."""

    module: int  # parameters and buffers of one expert
    optimizer: int  # optimizer state of one expert
    gradients: int  # of one expert
    sample: int  # activations that the backward pass keeps per sample
    # the state of an expert after one step; its tensors have shapes but no values
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """Upper bound of a save's size."""
        return sum(64 + tensor.nbytes for tensor in _tensors(self.state))

    def experts_that_fit(self, free_bytes: int, *, max_batch_size: int) -> tuple[int, str]:
        """Return how many experts a host with so much free memory takes, 0 to `MOST`, and the arithmetic."""
        each = self.module + self.optimizer
        once = self.gradients + each + max_batch_size * self.sample
        fit = min(MOST, max(0, int((USABLE * free_bytes - once) // max(1, each))))
        return fit, (
            f"{USABLE:.0%} of {_mb(free_bytes)} free, less {_mb(once)} to compute a batch of {max_batch_size:,}, "
            f"divided by {_mb(each)} an expert (weights {_mb(self.module)}, optimizer {_mb(self.optimizer)})"
        )


def measure(make_expert: Callable[[], nn.Module], rule: ExpertRule, sample: Sequence[int]) -> ExpertModel:
    """Build one expert, let it take a step, and measure its memory.

    Raises:
        ValueError: the module cannot be an expert of such samples.
        TypeError: its state cannot be saved.
    """
    module = make_expert()
    expert = Expert("the expert", module, rule, tuple(sample))
    parameters = [*module.parameters()]
    known = {tensor.data_ptr() for tensor in (*parameters, *module.buffers())}
    activations: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            activations[tensor.data_ptr()] = max(tensor.nbytes, activations.get(tensor.data_ptr(), 0))
        return tensor

    shape = (SAMPLES, *(USUAL_LENGTH if side == ANY_LENGTH else side for side in sample))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        expert.backward(torch.rand(shape), torch.rand(shape))
    state = expert.state_dict()
    freeze(state)  # raises now if the state cannot be saved
    return ExpertModel(
        module=sum(tensor.nbytes for tensor in _tensors(state["module"])),
        optimizer=sum(tensor.nbytes for tensor in _tensors(state["optimizer"])),
        gradients=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sample=(sum(activations.values()) + 4 * torch.rand(shape).nbytes) // SAMPLES,
        state=_outline(state),
    )


def free_bytes() -> int:
    """Return the free memory of the experts' device; a low guess where the system does not report it."""
    if accelerator().type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a container without limit ("max")
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(max(0, int(limit) - int(used)))
    if not found:
        try:
            found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
        except (AttributeError, ValueError, OSError):  # Windows
            found = [UNKNOWN_FREE_BYTES]
    return min(found)


def _outline(state: Any) -> Any:
    """Return the state without the tensors' values."""
    match state:
        case Tensor():
            return torch.empty_like(state, device="meta")
        case Mapping():
            return {key: _outline(value) for key, value in state.items()}
        case list() | tuple():
            return [*map(_outline, state)]
    return state


def _tensors(state: Any) -> Iterator[Tensor]:
    match state:
        case Tensor():
            yield state
        case Mapping():
            for value in state.values():
                yield from _tensors(value)
        case list() | tuple():
            for value in state:
                yield from _tensors(value)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:,.1f} GB"


class HostResources:
    """Resources that all hosts of one peer share: the accelerator, and ``folder``, used by one process only."""

    def __init__(self, services: ExpertServices, directory: Directory, folder: Path) -> None:
        self.services, self.directory, self.folder = services, directory, folder
        self.store = ReplicaStore(folder, me=services.peers.id)
        self.server = ExpertServer(services.peers, services.events, gate=services.gate)
        self.replicas = ReplicaService(services, self.store)

    async def close(self) -> None:
        """Stop serving experts and saves."""
        await self.server.close()
        await self.replicas.stop()


@dataclass(frozen=True)
class HostSettings:
    """How experts are hosted.

    Attributes:
        copies: other peers that keep each expert's saves.
        spare: experts of dead hosts to take over beyond those requested, if memory allows.
        save_s: between two saves.
        takeover_s: between two checks for experts whose hosts died.
        farewell_s: longest time to send the last saves when the host stops.
    """

    copies: int = 2
    spare: int = 4
    save_s: float = 60.0
    takeover_s: float = 20.0
    farewell_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.copies <= MAX_HOLDERS or self.spare < 0:
            raise ValueError(f"{self}: copies must be 0 to {MAX_HOLDERS}, spare experts 0 or more")
        if min(self.save_s, self.takeover_s, self.farewell_s) <= 0:
            raise ValueError(f"{self}: times must be above 0")


@dataclass(frozen=True)
class HostPlan:
    """The experts to host: ``count`` of them, and up to ``capacity`` after other hosts died."""

    grid: Grid  # contains their names
    make: Callable[[], nn.Module]  # returns a new expert's module
    rule: ExpertRule  # how they learn
    sample: tuple[int, ...]  # shape of one sample
    model: ExpertModel  # memory and state of such an expert
    count: int
    capacity: int
    uids: tuple[str, ...] | None = None  # host only these; None: any
    arithmetic: str = ""  # explains the count in a sentence


class ExpertHosting:
    """The experts of one kind on this peer; made and used on the event loop.

    Attributes:
        experts: those hosted now, by uid.
        saves: saves them, and finds saves of others.
    """

    def __init__(self, resources: HostResources, plan: HostPlan, settings: HostSettings) -> None:
        self.experts: dict[str, Expert] = {}
        self.saves = ExpertSaves(resources.services, resources.store, copies=settings.copies)
        self.plan, self._resources, self._services = plan, resources, resources.services
        self._directory, self._server = resources.directory, resources.server
        self._settings = settings
        self._saving = asyncio.Lock()
        self._save_fault: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Host the requested experts, as far as their names are vacant, and keep them until `stop`.

        Raises:
            Exception: raised by ``plan.make``.
        """
        plan, settings = self.plan, self._settings
        await self._resources.replicas.start()
        self._repeat(self._directory.settings.ttl_s / ANNOUNCEMENTS, self._announce)  # claims, too
        try:
            await self._take(plan.count, self._here())
            await self._fill(plan.count)
        except BaseException:
            await self.stop()
            raise
        self._repeat(settings.save_s, self.save)
        self._repeat(settings.takeover_s, lambda: self._fill(plan.capacity))

    async def stop(self) -> None:
        """Withdraw the experts, save them a last time and stop serving them. Idempotent."""
        tasks = self.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        uids = [*self.experts]
        await self._directory.withdraw(self.plan.grid, uids)
        for uid in uids:
            self._server.remove(uid)
        try:
            for expert in self.experts.values():  # to this disk first, which is quick
                await self._save(expert)
            async with asyncio.timeout(self._settings.farewell_s):
                await self.save()
        except (PeerError, StateError, TimeoutError) as error:
            logger.warning("not all experts were saved: %s", str(error) or "other peers took too long")
        self.experts.clear()
        for uid in uids:
            self._services.events.emit(ExpertLost(_now(), uid, "this host stopped"))

    def kill(self) -> list[asyncio.Task[None]]:
        """End the upkeep without saving or withdrawing, as a crash would; return the tasks that are ending."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        return tasks

    async def statistics(self) -> dict[str, ExpertStatistics]:
        """Return the statistics of each expert, by uid."""
        return {uid: one for uid, one in self._server.statistics().items() if uid in self.experts}

    # -- which experts

    async def _fill(self, count: int) -> None:
        """Host up to ``count``: saved experts of dead hosts first, then, up to the requested number, vacant names."""
        if len(self.experts) < count and (saved := await self.saves.saved(self.plan.grid)):
            live = {info.uid for info in await self._directory.live(self.plan.grid)}
            await self._take(count, saved - live)
        if len(self.experts) < self.plan.count:
            await self._take(self.plan.count, self.plan.uids)

    def _here(self) -> set[str]:
        """Return the experts of this grid saved on this disk, by any owner: this peer may have had another id."""
        return {save.uid for save in self._resources.store.saves() if self.plan.grid.contains(save.uid)}

    async def _take(self, count: int, uids: Iterable[str] | None) -> None:
        """Claim some of ``uids``, or any names, until ``count`` experts are here, and host them."""
        grid, allowed = self.plan.grid, self.plan.uids
        wanted: list[str] | None = None
        if uids is not None:
            wanted = sorted(
                uid
                for uid in set(uids) - self.experts.keys()
                if grid.contains(uid) and (allowed is None or uid in allowed)
            )
            if not wanted:
                return
        claimed = await self._directory.claim(grid, count - len(self.experts), wanted=wanted)
        try:
            claims = await asyncio.gather(*map(self.saves.claims, claimed))
            for uid, saves in zip(claimed, claims, strict=True):
                await self._open(uid, saves)
        finally:
            await self._directory.withdraw(grid, set(claimed) - self.experts.keys())
            if claimed:
                await self._announce()

    async def _open(self, uid: str, claims: Iterable[Claim]) -> None:
        """Host an expert, from the first save that is complete and fits, or as a new one."""
        me, restored = self._services.peers.id, None
        for claim in claims:
            try:
                expert = await self._load(uid, claim)
                restored = claim
                break
            except StateError as error:
                logger.warning("skipped the save of %s at step %d: %s", uid, claim.step, error)
        else:
            expert = await self._server.run(lambda: self._build(uid))
        self._server.add(expert)
        self.experts[uid] = expert
        if restored is not None and restored.owner == me:
            self.saves.adopt(uid, restored)
        taken_over = restored is not None and restored.owner != me
        self._services.events.emit(ExpertHosted(_now(), uid, expert.step, taken_over))

    def _build(self, uid: str, state: dict[str, Any] | None = None) -> Expert:
        expert = Expert(uid, self.plan.make(), self.plan.rule, self.plan.sample)
        if state is not None:
            expert.load_state_dict(state)
        return expert

    async def _load(self, uid: str, claim: Claim) -> Expert:
        saved = await self.saves.fetch(uid, claim, limit_bytes=self.plan.model.state_bytes)
        state = await asyncio.to_thread(thaw, saved)
        check_fit(state, self.plan.model.state)
        if state.get("step") != claim.step:
            raise StateError("the state is not of the claimed step")
        return await self._server.run(lambda: self._build(uid, state))

    # -- upkeep

    async def _announce(self) -> None:
        """Give up names that belong to other peers, announce the others."""
        grid = self.plan.grid
        rivals = await self._directory.rivals(grid, [*self.experts])
        lost = [uid for uid in rivals if self.experts.pop(uid, None)]
        for uid in lost:
            self._server.remove(uid)
            self._services.events.emit(ExpertLost(_now(), uid, "another peer claimed it earlier"))
        if lost:
            await self._directory.withdraw(grid, lost)
        experts = {uid: (expert.shape, expert.step) for uid, expert in self.experts.items()}
        await self._directory.announce(grid, experts)

    async def save(self) -> None:
        """Save the experts that changed or lost holders, and publish which experts have saves."""
        async with self._saving:
            others = await self._resources.replicas.others()
            for expert in [*self.experts.values()]:
                await self._save(expert, others)
            if saved := self._here() | self.saves.results.keys():
                await self.saves.publish_saved(self.plan.grid, saved)

    async def _save(self, expert: Expert, others: Mapping[PeerId, HolderRecord] | None = None) -> None:
        """Save an expert here and at some of ``others``; None: only here."""
        uid = expert.uid
        if not expert.step or not self.saves.due(uid, expert.step, others or {}):
            return  # before its first step an expert equals a new one
        step, frozen = await self._server.run(lambda: (expert.step, freeze(expert.state_dict())))
        saved = await asyncio.to_thread(cut, uid, step, frozen)
        if others is None:
            fault = await self.saves.write(saved)
        else:
            fault = (await self.saves.save(saved, others)).fault
        if fault and not self._save_fault:
            self._services.events.emit(Fault(_now(), f"save of {uid}", fault))
        self._save_fault = fault

    def _repeat(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._every(period_s, work), name="host experts"))

    async def _every(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(period_s, REST * took_s) * self._services.rng.uniform(0.8, 1.0))
            began = _now()
            try:
                await work()
            except PeerError as error:
                logger.info("will retry: %s", error)
            except Exception as error:  # the experts remain in service
                logger.exception("upkeep of the experts failed")
                self._services.events.emit(Fault(_now(), "host experts", f"{type(error).__name__}: {error}"))
            took_s = _now() - began


def _now() -> float:
    return asyncio.get_running_loop().time()
