"""Hosting experts, and the experts API of a swarm: hosts, layers, remote experts and panels.

A host first hosts the experts that are saved on its disk. Then it hosts experts that other peers saved and that no peer
hosts, and then new experts of vacant names. If memory is left, the host takes over experts of dead hosts. It loads each
expert from the newest complete save that fits. An expert's share of the work is its fraction of all optimizer steps of
the last minute.
"""

import asyncio
import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colab_swarm.dht.service import RunServices
from colab_swarm.errors import PeerError, StateError, require
from colab_swarm.events import ExpertHosted, Fault, Notice
from colab_swarm.moe.calls import ExpertServer, ExpertStatistics
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import Expert, HostPlan, dtype_named, kinds_of
from colab_swarm.moe.grid import ExpertInfo, Grid
from colab_swarm.moe.saves import ExpertSaves, ReplicaStore, SavePlace
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import BackgroundTasks, Runner, loop_now, on_loop
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import pack, unpack

logger = logging.getLogger(__name__)
FAREWELL_S = 60.0  # how long a host that stops may send its last saves to other peers
LIST_EVERY_S = 10.0
REST = 3  # after upkeep, pause at least this many times as long as it took, to leave a slow uplink to calls


class HostResources:
    """The resources that all hosts of one peer share: the threads of the devices, and ``folder``.

    Only one process may use the folder. Without a ``folder``, the host uses a temporary folder, and `close` deletes it.
    """

    def __init__(self, services: RunServices, directory: Directory, folder: Path | None) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="colab-swarm-", ignore_cleanup_errors=True)
            folder = Path(self._temporary.name)
        self.services = services
        self.directory = directory
        self.folder = folder
        self.server = ExpertServer(services.peers, services.events, gate=services.gate)
        self.saves = ExpertSaves(services, ReplicaStore(self.folder, me=services.peers.id))

    async def close(self) -> None:
        await self.server.close()
        await self.saves.stop()
        if self._temporary is not None:
            await asyncio.to_thread(self._temporary.cleanup)


class ExpertHost(AbstractContextManager["ExpertHost"]):
    """Experts of one kind on this peer, served in the background until `close`. Made by `Swarm.experts`."""

    def __init__(
        self, runtime: Runner, resources: HostResources, plan: HostPlan, show: "Callable[[ExpertHost], Any]"
    ) -> None:
        self.plan = plan
        self.grid = plan.grid
        self.stopped = False
        self.experts: dict[str, Expert] = {}
        self._runtime = runtime
        self._show = show
        self._saves = resources.saves
        self._directory = resources.directory
        self._server = resources.server
        self._me = resources.services.peers.id
        self._events = resources.services.events
        self._saving = asyncio.Lock()
        self._save_fault: str | None = None
        self._tasks = BackgroundTasks("host experts", self._events, resources.services.rng)

    @property
    def arithmetic(self) -> str:
        """A sentence that says how many experts fit."""
        return self.plan.arithmetic

    @property
    def uids(self) -> list[str]:
        """The experts hosted now."""
        return sorted(self.experts)

    def statistics(self) -> dict[str, ExpertStatistics]:
        served = self._runtime.call(on_loop(self._server.statistics))
        return {uid: served[uid] for uid in self.uids if uid in served}

    def panel(self) -> Any:
        """Return a live view of all experts of the grid: widgets in a notebook, text elsewhere."""
        return self._show(self)

    def save(self) -> None:
        """Save now all experts that have changed, on this disk and at other peers."""
        self._runtime.call(self.save_changed())

    def wait(self, seconds: float) -> None:
        """Wait for ``seconds`` while the host serves its experts. An interrupt ends only the wait."""
        self._runtime.call(asyncio.sleep(seconds))

    def close(self) -> None:
        """Withdraw the experts, save them a last time and stop serving them. Idempotent."""
        if not self.stopped:
            self.stopped = True
            self._runtime.call(self.withdraw())

    def kill(self) -> list[asyncio.Task[Any]]:
        """End like a killed process, to simulate a crash; return the tasks that are ending. Call on the event loop."""
        self.stopped = True
        self._saves.kill()
        return self._tasks.cancel()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.stopped:
            return f"ExpertHost({self.grid}, stopped)"
        steps = sum(expert.step for expert in [*self.experts.values()])
        return f"ExpertHost({self.grid}, {len(self.experts)} of {self.plan.count} experts, {steps:,} steps)"

    async def start(self) -> None:
        """Host the requested number of experts, or fewer if not enough names are vacant."""
        plan = self.plan
        self._tasks.every(self._directory.ttl_s / 3, self._announce, rest=REST)
        try:
            await self._take(plan.count, self._here())
            await self._fill(plan.count)
        except BaseException:  # also after a cancellation, the names must become free again
            await self.withdraw()
            raise
        self._tasks.every(plan.save_s, self.save_changed, rest=REST)
        self._tasks.every(plan.takeover_s, lambda: self._fill(plan.capacity), rest=REST)

    async def withdraw(self) -> None:
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        uids = [*self.experts]
        await self._directory.withdraw(self.grid, uids)
        for uid in uids:
            self._server.remove(uid)
        try:
            for expert in self.experts.values():  # on this disk first, because that is quick
                await self._save(expert)
            async with asyncio.timeout(FAREWELL_S):
                await self.save_changed()
        except (PeerError, StateError, TimeoutError) as error:
            logger.warning("not all experts were saved: %s", str(error) or "other peers took too long")
        self.experts.clear()
        for uid in uids:
            self._events.emit(Notice(loop_now(), f"no longer hosting {uid}: this host stopped"))

    async def _fill(self, count: int) -> None:
        if len(self.experts) < count and (saved := await self._saves.saved(self.grid)):
            await self._take(count, saved - {info.uid for info in await self._directory.live(self.grid)})
        await self._take(self.plan.count, None)

    def _here(self) -> set[str]:
        # saves of any owner, because this peer may have had another id
        return {save.uid for save in self._saves.store.saves() if self.grid.contains(save.uid)}

    async def _take(self, count: int, uids: Iterable[str] | None) -> None:
        given = [set(some) for some in (uids, self.plan.uids) if some is not None]
        if given:
            wanted = set.intersection(*given) - self.experts.keys()
        else:
            wanted = None
        if wanted == set():
            return
        claimed = await self._directory.claim(self.grid, count - len(self.experts), wanted=wanted)
        try:
            claims = await asyncio.gather(*map(self._saves.claims, claimed))
            for uid, saves in zip(claimed, claims, strict=True):
                await self._open(uid, saves)
        finally:
            await self._directory.withdraw(self.grid, set(claimed) - self.experts.keys())
            if claimed:
                await self._announce()

    async def _open(self, uid: str, claims: Iterable[tuple[PeerId, SavePlace]]) -> None:
        taken_over = False
        device = self._server.emptiest(self.plan.devices)
        self._saves.results.pop(uid, None)
        self._saves.safe.pop(uid, None)
        for owner, place in claims:
            try:
                saved = await self._saves.fetch(uid, place, limit_bytes=self.plan.model.state_bytes)
                state = await asyncio.to_thread(unpack, saved.blob)
                expert = await self._server.run(device, partial(self._build, uid, device, state))
                require(expert.step == place.step, "the state is not of the claimed step", StateError)
            except StateError as error:
                logger.warning("skipped the save of %s at step %d: %s", uid, place.step, error)
                continue
            taken_over = owner != self._me
            if not taken_over:
                self._saves.safe[uid] = place  # this save is published until a newer one is safe
            break
        else:
            expert = await self._server.run(device, partial(self._build, uid, device))
        self._server.add(expert)
        self.experts[uid] = expert
        self._events.emit(ExpertHosted(loop_now(), uid, expert.step, taken_over))

    def _build(self, uid: str, device: torch.device, state: dict[str, Any] | None = None) -> Expert:
        plan = self.plan
        expert = Expert(uid, plan.make(), plan.rule, plan.sample, device, dtype_named(plan.dtype, device))
        if state is not None:
            expert.load_state_dict(state)
            fits = kinds_of(expert.state_dict()).items() <= plan.model.kinds.items()
            require(fits, "the saved state does not fit this expert: another class?", StateError)
        return expert

    async def _announce(self) -> None:
        rivals = await self._directory.rivals(self.grid, [*self.experts])
        lost = [uid for uid in rivals if self.experts.pop(uid, None)]
        for uid in lost:
            self._server.remove(uid)
            self._events.emit(Notice(loop_now(), f"no longer hosting {uid}: another peer claimed it earlier"))
        if lost:
            await self._directory.withdraw(self.grid, lost)
        experts = {uid: (expert.shape, expert.step) for uid, expert in self.experts.items()}
        await self._directory.announce(self.grid, experts)

    async def save_changed(self) -> None:
        """Save the experts that have changed or lost holders, and publish which experts have saves."""
        async with self._saving:
            others = await self._saves.others()
            for expert in [*self.experts.values()]:
                await self._save(expert, others)
            saved = self._here() | {*filter(self.grid.contains, self._saves.safe)}
            if saved:
                await self._saves.publish_saved(self.grid, saved)

    async def _save(self, expert: Expert, others: Set[PeerId] | None = None) -> None:
        uid = expert.uid
        copies = self.plan.copies
        if not expert.step or not self._saves.due(uid, expert.step, others or set(), copies):
            return  # before its first step, an expert needs no save: it equals a new one
        step, blob = await self._server.run(expert.device, lambda: (expert.step, pack(expert.state_dict())))
        saved = await asyncio.to_thread(Snapshot.of, uid.encode(), step, blob)
        if others is None:
            fault = await self._saves.write(saved)
        else:
            fault = (await self._saves.save(saved, others, copies)).fault
        if fault and not self._save_fault:
            self._events.emit(Fault(loop_now(), f"save of {uid}", fault))
        self._save_fault = fault


@dataclass(frozen=True)
class LiveExpert:
    """One expert that can be called."""

    uid: str  # its name
    host: str  # short id of its host
    mine: bool  # whether the host is this peer
    step: int  # number of its optimizer steps, as last announced
    share: float | None  # its fraction of all steps of the last minute, 0 to 1; None while no expert learns


@dataclass(frozen=True)
class ExpertsSnapshot:
    """The experts of one grid, as this peer knows them."""

    grid: Grid  # contains the experts
    live: tuple[LiveExpert, ...] = ()  # experts that can be called, in grid order
    left_out: tuple[str, ...] = ()  # experts that failed, and that this peer does not call for a while
    dead: tuple[str, ...] = ()  # experts that have died since this watch started
    listed: bool = False  # whether the experts were listed at least once
    served: tuple[ExpertStatistics, ...] = ()  # experts of this peer
    fault: str = ""  # why the last listing failed; empty if it succeeded
    over: bool = False  # whether this peer has left


@dataclass(eq=False)
class ExpertsWatch:
    """Follows the experts of one grid. On the event loop, ``served`` returns the statistics of this peer's experts."""

    runtime: Runner
    me: PeerId
    directory: Directory
    grid: Grid
    served: Callable[[], dict[str, ExpertStatistics]]

    def __post_init__(self) -> None:
        self._listings: deque[list[ExpertInfo]] = deque(maxlen=7)
        self._live: list[LiveExpert] = []
        self._seen: set[str] = set()
        self._began_at = float("-inf")
        self._fault = ""
        self._closed = False
        self._listing: asyncio.Task[None] | None = None
        self._last = ExpertsSnapshot(self.grid)

    def snapshot(self) -> ExpertsSnapshot:
        """Return the state without waiting for a peer. Call this method from any thread except the event loop's."""
        if self._closed:
            return replace(self._last, over=True)
        return self.runtime.call(self.look())

    def close(self) -> None:
        self._closed = True  # a `look` that is running may still replace the last snapshot

    async def look(self) -> ExpertsSnapshot:
        """Return the state; if the last listing is older than `LIST_EVERY_S`, list the experts in the background."""
        if loop_now() - self._began_at >= LIST_EVERY_S and (self._listing is None or self._listing.done()):
            self._began_at = loop_now()
            self._listing = asyncio.create_task(self._list(), name="list experts")
        left_out = self._seen & self.directory.banned()
        live = tuple(info for info in self._live if info.uid not in left_out)
        served = self.served()
        self._last = ExpertsSnapshot(
            self.grid,
            live,
            left_out=tuple(sorted(left_out)),
            dead=tuple(sorted(self._seen - left_out - {info.uid for info in live})),
            listed=bool(self._listings),
            served=tuple(served[uid] for uid in sorted(served) if self.grid.contains(uid)),
            fault=self._fault,
        )
        return self._last

    async def _list(self) -> None:
        try:
            async with asyncio.timeout(60.0):
                found = await self.directory.live(self.grid)
        except Exception as error:  # the panel shows the error, and the next look tries again
            logger.info("the experts could not be listed", exc_info=True)
            self._fault = f"{type(error).__name__}: {error}"
            return
        self._fault = ""
        self._listings.append(found)
        self._seen.update(info.uid for info in found)
        first: dict[str, int] = {}
        for listing in self._listings:
            for info in listing:
                first.setdefault(info.uid, info.step)
        grown = {info.uid: max(0, info.step - first[info.uid]) for info in found}
        total = sum(grown.values())
        self._live = []
        for info in found:
            share = grown[info.uid] / total if total else None
            mine = info.host.id == self.me
            self._live.append(LiveExpert(info.uid, short(info.host.id), mine, info.step, share))
