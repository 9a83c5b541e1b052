"""A peer hosts experts: claims their names, serves them, tells of them, saves them, and takes over those of the dead.

Which. At first as many as wanted: those whose saves lie on this disk, then those that somebody saved and nobody
hosts now, then vacant names. Later, with room left, those whose hosts died: an expert goes on from its newest save that
can be had and fits, whoever made it. Names that turn out to be rightfully another's are given up.

When it goes, a host withdraws its experts first, so that nobody calls them any more, and saves them a last time.

How many experts fit into this device's memory.

What stays for each expert: parameters and buffers, and the state of its optimizer. What is needed once, because one
batch computes at a time: one expert's gradients, a copy of its state while it is saved, and what the largest batch
keeps for its backward pass. One expert is built and takes one step to tell: an optimizer has no state before.
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
from colab_swarm.moe.calls import ExpertServices
from colab_swarm.moe.copies import MAX_HOLDERS, Claim, Copies
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ANY_LENGTH, Expert, ExpertRule
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.holders import HolderRecord, KeepingSettings, ReplicaService
from colab_swarm.moe.saves import ReplicaStore, check_fit, cut, freeze, thaw
from colab_swarm.moe.server import ExpertServer, ExpertStatistics, ServerSettings
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.device import accelerator

USABLE = 0.8

"""Share of the free memory that fragmentation, and whoever else is there, leave."""

UNKNOWN_FREE_BYTES = 2 << 30

USUAL_LENGTH = 128

"""Of a sample of any length."""

SAMPLES = 2

MOST = 256

"""Experts of one host: with more of them its calls would queue."""


@dataclass(frozen=True)
class Footprint:
    """What experts of one kind take, bytes.

    Attributes:
        module: parameters and buffers of one.
        optimizer: the optimizer's state of one.
        gradients: of one.
        sample: what the backward pass keeps of one sample.
    """

    module: int
    optimizer: int
    gradients: int
    sample: int

    @property
    def expert(self) -> int:
        """What one more expert takes."""
        return self.module + self.optimizer

    def once(self, max_batch_size: int) -> int:
        """What is taken however many experts there are."""
        return self.gradients + self.expert + max_batch_size * self.sample


@dataclass(frozen=True)
class Model:
    """An expert as all of its kind are: what it takes, and its state, of which tensors have a shape but no values."""

    footprint: Footprint
    state: Mapping[str, Any]

    @property
    def state_bytes(self) -> int:
        """Of its tensors, each with some room beside it."""
        return sum(64 + tensor.nbytes for tensor in _tensors(self.state))


def measure(make_expert: Callable[[], nn.Module], rule: ExpertRule, sample: Sequence[int]) -> Model:
    """Build one expert and let it take a step.

    Raises:
        ValueError: it is no expert of such samples.
        TypeError: its state cannot be saved.
    """
    module = make_expert()
    expert = Expert("the expert", module, rule, tuple(sample))
    parameters = [*module.parameters()]
    known = {tensor.data_ptr() for tensor in (*parameters, *module.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = max(tensor.nbytes, kept.get(tensor.data_ptr(), 0))
        return tensor

    shape = (SAMPLES, *(USUAL_LENGTH if side == ANY_LENGTH else side for side in sample))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        expert.backward(torch.rand(shape), torch.rand(shape))
    state = expert.state_dict()
    freeze(state)  # what cannot be saved is the user's to know now
    footprint = Footprint(
        module=sum(tensor.nbytes for tensor in _tensors(state["module"])),
        optimizer=sum(tensor.nbytes for tensor in _tensors(state["optimizer"])),
        gradients=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sample=(sum(kept.values()) + 4 * torch.rand(shape).nbytes) // SAMPLES,
    )
    return Model(footprint, _outline(state))


def experts_that_fit(footprint: Footprint, free_bytes: int, *, max_batch_size: int) -> int:
    """How many experts a host of so much free memory takes, 0 to `MOST`."""
    room = USABLE * free_bytes - footprint.once(max_batch_size)
    return min(MOST, max(0, int(room // max(1, footprint.expert))))


def explain(footprint: Footprint, free_bytes: int, *, max_batch_size: int) -> str:
    """The arithmetic of `experts_that_fit` in a line."""
    return (
        f"{USABLE:.0%} of {_mb(free_bytes)} free, less {_mb(footprint.once(max_batch_size))} to compute a batch of "
        f"{max_batch_size:,}, divided by {_mb(footprint.expert)} an expert "
        f"(weights {_mb(footprint.module)}, optimizer {_mb(footprint.optimizer)})"
    )


def free_bytes() -> int:
    """Free memory of the device that experts live on; a cautious guess where nobody tells."""
    if accelerator().type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    found = [*_told_by_linux()]
    if not found:
        try:
            found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
        except (AttributeError, ValueError, OSError):  # Windows
            found = [UNKNOWN_FREE_BYTES]
    return min(found)


def _told_by_linux() -> Iterator[int]:
    """What the machine has left, and what the container has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        yield max(0, int(limit) - int(used))  # "max" is no number: no limit
    except (OSError, ValueError):
        return


def _outline(state: Any) -> Any:
    """The state without its values, which would take memory for nothing."""
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


logger = logging.getLogger(__name__)

ANNOUNCEMENTS = 3

"""In the life of a record."""

REST = 3

"""Upkeep that took long rests for so many times as long: saves leave a slow line to calls for the most part."""


@dataclass(frozen=True)
class ReplicaSettings:
    """Of the server that all experts of a peer share, and of the saves that it keeps."""

    server: ServerSettings = field(default_factory=ServerSettings)
    keeping: KeepingSettings = field(default_factory=KeepingSettings)


@dataclass(frozen=True)
class HostResources:
    """What all hosts of one peer share: one accelerator, one disk."""

    services: ExpertServices
    directory: Directory
    server: ExpertServer
    holders: ReplicaService

    @classmethod
    def open(
        cls,
        services: ExpertServices,
        directory: Directory,
        folder: Path,
        settings: ReplicaSettings = ReplicaSettings(),
    ) -> HostResources:
        """Make them, on the event loop; saves lie in ``folder``, which belongs to this process."""
        shelf = ReplicaStore(folder, me=services.peers.id, quota_bytes=settings.keeping.quota_bytes)
        server = ExpertServer(services.peers, services.events, settings.server, services.gate)
        return cls(services, directory, server, ReplicaService(services, shelf, settings.keeping))

    async def close(self) -> None:
        """Serve and keep nothing any more."""
        await self.server.close()
        await self.holders.stop()


@dataclass(frozen=True)
class ExpertKind:
    """What is hosted: experts made by ``make`` that learn by ``rule`` from samples of shape ``sample``."""

    grid: Grid
    make: Callable[[], nn.Module]
    rule: ExpertRule
    sample: tuple[int, ...]


@dataclass(frozen=True)
class HostSettings:
    """How experts are hosted.

    Attributes:
        copies: other peers that keep each expert's saves.
        spare: experts of dead hosts that are taken over beyond those wanted, where memory allows.
        save_s: between two saves.
        takeover_s: between two looks for experts whose hosts died.
        farewell_s: that a host which stops spends on sending its last saves.
    """

    copies: int = 2
    spare: int = 4
    save_s: float = 60.0
    takeover_s: float = 20.0
    farewell_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.copies <= MAX_HOLDERS or self.spare < 0:
            raise ValueError(f"{self}: copies are 0 to {MAX_HOLDERS}, spare experts 0 or more")
        if min(self.save_s, self.takeover_s, self.farewell_s) <= 0:
            raise ValueError(f"{self}: times are above 0")


@dataclass(frozen=True)
class HostingPlan:
    """Which experts: ``count`` of them, of ``uids`` if given, and up to ``capacity`` after others died."""

    count: int
    capacity: int
    uids: tuple[str, ...] | None = None


class ExpertHosting:
    """The experts of one kind on this peer; made and used on the event loop.

    Attributes:
        experts: those hosted now, by uid.
        copies: what became of their saves.
    """

    def __init__(
        self,
        premises: HostResources,
        kind: ExpertKind,
        wanted: HostingPlan,
        model: Model,
        settings: HostSettings,
    ) -> None:
        """``model``: an expert as all of this kind are built; what is loaded must be built like it."""
        self.experts: dict[str, Expert] = {}
        self.copies = Copies(premises.services, premises.holders, copies=settings.copies)
        self.kind, self.wanted = kind, wanted
        self._premises, self._services = premises, premises.services
        self._directory, self._server = premises.directory, premises.server
        self._model, self._settings = model, settings
        self._saving = asyncio.Lock()
        self._save_fault: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Host what is wanted, as far as it is vacant, and go on until `stop`.

        Raises:
            Exception: whatever ``make`` raises.
        """
        settings = self._settings
        await self._premises.holders.start()
        self._go_on(self._directory.settings.ttl_s / ANNOUNCEMENTS, self._announce)  # of what is claimed, too
        try:
            await self._take(self.wanted.count, self._here())
            await self._fill(self.wanted.count)
        except BaseException:
            await self.stop()
            raise
        self._go_on(settings.save_s, self.save)
        self._go_on(settings.takeover_s, lambda: self._fill(self.wanted.capacity))

    async def stop(self) -> None:
        """Withdraw the experts, save them a last time and serve them no more. Idempotent."""
        tasks = self.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        uids = [*self.experts]
        await self._directory.withdraw(self.kind.grid, uids)
        for uid in uids:
            self._server.remove(uid)
        try:
            for expert in self.experts.values():  # first what is quick
                await self._save(expert)
            async with asyncio.timeout(self._settings.farewell_s):
                await self.save()
        except (PeerError, StateError, TimeoutError) as error:
            logger.warning("not all experts were saved: %s", str(error) or "other peers took too long")
        self.experts.clear()
        for uid in uids:
            self._services.events.emit(ExpertLost(_now(), uid, "this host stopped"))

    def kill(self) -> list[asyncio.Task[None]]:
        """End the upkeep without a word, as a crash would; returns the tasks that are ending."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        return tasks

    async def statistics(self) -> dict[str, ExpertStatistics]:
        """What the experts did lately, by uid."""
        return {uid: told for uid, told in self._server.statistics().items() if uid in self.experts}

    # -- which experts

    async def _fill(self, count: int) -> None:
        """Host up to ``count``: those with saves and no host, then, if fewer than wanted are here, vacant names."""
        if len(self.experts) < count:
            await self._take(count, await self._dead())
        if len(self.experts) < self.wanted.count:
            await self._take(self.wanted.count, self.wanted.uids)

    def _here(self) -> set[str]:
        """Experts of this grid with saves on this disk, whoever made them: this peer may have had another id then."""
        return {save.uid for save in self._premises.holders.shelf.saves() if self._of_grid(save.uid)}

    async def _dead(self) -> set[str]:
        """Experts that somebody saved and nobody hosts."""
        saved = await self.copies.saved(self.kind.grid)
        return saved - {info.uid for info in await self._directory.live(self.kind.grid)} if saved else set()

    async def _take(self, count: int, uids: Iterable[str] | None) -> None:
        """Claim some of ``uids``, or any names, until ``count`` experts are here, and host them."""
        grid, wanted = self.kind.grid, None if uids is None else sorted(filter(self._may_host, set(uids)))
        if wanted == []:
            return
        claimed = await self._directory.claim(grid, count - len(self.experts), wanted=wanted)
        try:
            claims = await asyncio.gather(*map(self.copies.claims, claimed))
            for uid, saves in zip(claimed, claims, strict=True):
                await self._open(uid, saves)
        finally:
            await self._directory.withdraw(grid, set(claimed) - self.experts.keys())
            if claimed:
                await self._announce()

    def _may_host(self, uid: str) -> bool:
        """Whether it is of this grid, wanted, and not here yet."""
        wanted = self.wanted.uids is None or uid in self.wanted.uids
        return wanted and uid not in self.experts and self._of_grid(uid)

    def _of_grid(self, uid: str) -> bool:
        with contextlib.suppress(ValueError):
            return bool(self.kind.grid.index(uid))
        return False

    async def _open(self, uid: str, saves: Iterable[Claim]) -> None:
        """Host an expert, from the first of ``saves`` that can be had and fits, or as it is made."""
        expert, claim = await self._restored(uid, saves)
        if expert is None:
            expert = await self._server.run(lambda: self._build(uid))
        self._server.add(expert)
        self.experts[uid] = expert
        taken_over = claim is not None and claim.owner != self._services.peers.id
        if claim is not None and not taken_over:
            self.copies.adopt(uid, claim)
        self._services.events.emit(ExpertHosted(_now(), uid, expert.step, taken_over))

    def _build(self, uid: str) -> Expert:
        return Expert(uid, self.kind.make(), self.kind.rule, self.kind.sample)

    async def _restored(self, uid: str, saves: Iterable[Claim]) -> tuple[Expert, Claim] | tuple[None, None]:
        for claim in saves:
            try:
                return await self._load(uid, claim), claim
            except StateError as error:
                logger.warning("passed over the save of %s at step %d: %s", uid, claim.step, error)
        return None, None

    async def _load(self, uid: str, claim: Claim) -> Expert:
        saved = await self.copies.fetch(uid, claim, limit_bytes=self._model.state_bytes)
        state = await asyncio.to_thread(thaw, saved)
        check_fit(state, self._model.state)
        if state.get("step") != claim.step:
            raise StateError("the state is not of the step that was claimed")

        def build() -> Expert:
            expert = self._build(uid)
            expert.load_state_dict(state)
            return expert

        return await self._server.run(build)

    # -- upkeep

    async def _announce(self) -> None:
        """Give up what is another's, tell of the rest."""
        grid = self.kind.grid
        told = await self._directory.rivals(grid, [*self.experts])
        lost = [uid for uid in told if self.experts.pop(uid, None)]
        for uid in lost:
            self._server.remove(uid)
            self._services.events.emit(ExpertLost(_now(), uid, "another peer claimed it earlier"))
        if lost:
            await self._directory.withdraw(grid, lost)
        experts = {uid: (expert.shape, expert.step) for uid, expert in self.experts.items()}
        await self._directory.announce(grid, experts)

    async def save(self) -> None:
        """Save the experts that changed, or whose holders were lost, and tell of which there are saves."""
        async with self._saving:
            others = await self._premises.holders.others()
            for expert in [*self.experts.values()]:
                await self._save(expert, others)
            if saved := self._here() | self.copies.kept.keys():
                await self.copies.tell_saved(self.kind.grid, saved)

    async def _save(self, expert: Expert, others: Mapping[PeerId, HolderRecord] | None = None) -> None:
        """Save an expert here and at some of ``others``; None: only here."""
        uid = expert.uid
        if not expert.step or not self.copies.due(uid, expert.step, others or {}):
            return  # before its first step an expert is as good as a new one
        step, frozen = await self._server.run(lambda: (expert.step, freeze(expert.state_dict())))
        saved = await asyncio.to_thread(cut, uid, step, frozen)
        if others is None:
            fault = await self.copies.write(saved)
        else:
            fault = (await self.copies.save(saved, others)).fault
        if fault and not self._save_fault:
            self._fault(f"save of {uid}", fault)
        self._save_fault = fault

    def _go_on(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._every(period_s, work), name="host experts"))

    async def _every(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(period_s, REST * took_s) * self._services.rng.uniform(0.8, 1.0))
            began = _now()
            try:
                await work()
            except PeerError as error:
                logger.info("the next try will do better: %s", error)
            except Exception as error:  # the experts go on being served
                logger.exception("upkeep of the experts failed")
                self._fault("host experts", f"{type(error).__name__}: {error}")
            took_s = _now() - began

    def _fault(self, where: str, text: str) -> None:
        self._services.events.emit(Fault(_now(), where, text))


def _now() -> float:
    return asyncio.get_running_loop().time()
