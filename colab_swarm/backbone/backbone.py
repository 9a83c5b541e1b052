"""A backbone of one run: assistant, keeper of checkpoints, observer, and their web page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colab_swarm.backbone.config import CollaborationFile, RunFile
from colab_swarm.backbone.hub import Forwarder, HubPush
from colab_swarm.backbone.keeper import Keeper, Vault
from colab_swarm.backbone.observer import Observer
from colab_swarm.backbone.web import CollaborationView, ContributionView, DashboardServer, View
from colab_swarm.credentials import find_secret
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import short
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.swarm.joining import create
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.assistant import Assistant, AssistedRound, Memory
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import Snapshot
from colab_swarm.trust.contributions import Contribution

logger = logging.getLogger(__name__)

CONTRIBUTIONS_S = 30.0


class Backbone:
    """Stays with a run from `start` to `stop`.

    Args:
        services: of this peer.
        run_id: of the run.
        file: its ``run.toml``.
        reached: describes how other peers reach this one.
        contributions: reads the leaderboard; None for a run without one.
        hub_token: of Hugging Face; None for the login of this machine.

    Raises:
        ValueError: a package that the file needs is not installed.
    """

    def __init__(
        self,
        services: PeerServices,
        run_id: str,
        file: RunFile,
        *,
        reached: Callable[[], str] = lambda: "",
        contributions: Callable[[], Awaitable[Sequence[Contribution]]] | None = None,
        hub_token: str | None = None,
    ) -> None:
        self._services, self._run_id, self._file = services, run_id, file
        self._reached, self._hub_token = reached, hub_token
        self._read_contributions = contributions
        self._contributions: Sequence[Contribution] = ()
        self._since = time.time()
        self._task: asyncio.Task[None] | None = None
        self._hubs: dict[str, HubPush] = {}
        self._forwarders: list[Forwarder] = []
        self.keepers = {f"{run_id}/{one.name}": self._keeper(one) for one in file.collaborations}
        memory = Memory(stored=self._stored, on_round=self._on_round)
        self.assistant = Assistant(services, run_id, name=file.peer_name, memory=memory)
        self.dashboard = DashboardServer(self.view)

    def _keeper(self, settings: CollaborationFile) -> Keeper:
        prefix, folder = f"{self._run_id}/{settings.name}", Path(self._file.folder) / settings.name
        observer = Observer(self._services, prefix, folder)
        if self._file.forward is not None:
            self._forwarders.append(Forwarder(self._file.forward, prefix))
            observer.on_points = self._forwarders[-1].forward
        if settings.repo:
            self._hubs[prefix] = HubPush(settings, self._file.name, token=self._hub_token)
        return Keeper(
            self._services,
            prefix,
            name=self._file.peer_name,
            settings=settings,
            observer=observer,
            vault=Vault(folder, keep=settings.keep),
            push=self._hubs[prefix].push if settings.repo else None,
            on_standing_in=lambda: self.assistant.leave(prefix),  # with the groups that it remembers
        )

    async def _stored(self, prefix: str) -> Snapshot | None:
        return self.keepers[prefix].stored if prefix in self.keepers else None

    def _on_round(self, helped: AssistedRound) -> None:
        if helped.prefix in self.keepers:
            self.keepers[helped.prefix].observer.on_round(helped)

    async def start(self) -> None:
        """Start all parts.

        Raises:
            OSError: the dashboard's port is taken.
        """
        if self._file.dashboard.enabled:
            await self.dashboard.start(self._file.dashboard)
        await self.assistant.start()
        for keeper in self.keepers.values():
            keeper.start()
        if self._read_contributions is not None:
            self._task = asyncio.create_task(self._read(self._read_contributions), name="contributions")

    async def stop(self) -> None:
        """Leave the run; the folder stays."""
        if self._task is not None:
            self._task.cancel()
        await self.dashboard.close()
        for keeper in self.keepers.values():
            await keeper.stop()
        try:
            await self.assistant.stop()
        except PeerError as error:
            logger.info("left without notice to other peers: %s", error)
        for push in self._hubs.values():
            push.close()
        for forwarder in self._forwarders:
            await asyncio.to_thread(forwarder.close)

    async def _read(self, contributions: Callable[[], Awaitable[Sequence[Contribution]]]) -> None:
        while True:
            try:
                self._contributions = await contributions()
            except PeerError as error:
                logger.info("contributions not read: %s", error)
            await asyncio.sleep(CONTRIBUTIONS_S)

    def view(self) -> View:
        """Return the run as this peer knows it."""
        peers = self._services.peers
        total = peers.statistics()
        return View(
            run=self._run_id.rpartition("-")[0],
            backbone=self._file.peer_name,
            at=time.time(),
            since=self._since,
            reached=self._reached(),
            linked=len(peers.linked()),
            sent_bytes=total.sent_bytes,
            received_bytes=total.received_bytes,
            collaborations=tuple(self._collaboration(prefix, one) for prefix, one in self.keepers.items()),
            contributions=tuple(map(self._contribution, self._contributions)),
        )

    def _collaboration(self, prefix: str, keeper: Keeper) -> CollaborationView:
        observer, hub, branch = keeper.observer, self._hubs.get(prefix), keeper.observer.branch
        trainers = observer.trainers.values()
        catching_up = sum(record.syncing for record in trainers)
        return CollaborationView(
            name=keeper.settings.name,
            step=branch.step if branch is not None else keeper.standing_in or 0,
            samples_per_s=sum(record.samples_per_s for record in trainers if not record.syncing),
            trainers=len(trainers) - catching_up,
            catching_up=catching_up,
            assistants=len(observer.assistants.records),
            points=tuple(observer.curve.points),
            peers=observer.peers(),
            rounds=tuple(observer.rounds),
            round_count=observer.round_count,
            checkpoints=tuple(keeper.vault.history),
            standing_in=keeper.standing_in,
            hub="" if hub is None else hub.state,
            hub_failures=0 if hub is None else hub.failures,
        )

    def _contribution(self, one: Contribution) -> ContributionView:
        names = (keeper.observer.name_of(one.peer) for keeper in self.keepers.values())
        name = next((name for name in names if name is not None), short(one.peer))
        if one.peer == self._services.peers.id:
            name = self._file.peer_name
        return ContributionView(name, one.peer.hex(), one.samples, one.reduced_bytes, one.relayed_bytes)


@dataclass(frozen=True)
class Served:
    """A running backbone: its swarm, an invitation to the run, and the address of its page (may be empty)."""

    swarm: Swarm
    invite: Invitation
    dashboard: str


@contextmanager
def serve(file: RunFile, *, accept_terms: bool = False) -> Iterator[Served]:
    """Start or continue the run of a ``run.toml`` until the block ends.

    Raises:
        ValueError: the folder belongs to another run, or a package that the file needs is not installed.
        OSError: a port is taken.
        SwarmError: the run cannot be started.
    """
    with create(
        file.name,
        access=file.access,
        allow=file.allowlist,
        peer_name=file.peer_name,
        options=file.options,
        accept_terms=accept_terms,
    ) as swarm:
        token = find_secret("HF_TOKEN") if any(one.repo for one in file.collaborations) else None
        backbone = swarm.runtime.call(_start(swarm, file, token))
        try:
            yield Served(swarm, swarm.invite(hours=file.invitation_hours), backbone.dashboard.url)
        finally:
            swarm.runtime.call(backbone.stop())


async def _start(swarm: Swarm, file: RunFile, hub_token: str | None) -> Backbone:
    network = swarm.network
    assert network is not None  # a run that was created is no simulation
    backbone = Backbone(
        swarm.services,
        swarm.run_id,
        file,
        reached=lambda: str(network.reachability.current),
        contributions=network.trust.contributions.read,
        hub_token=hub_token,
    )
    try:
        await backbone.start()
    except BaseException:  # an interrupt included: the page's port must not stay taken
        await backbone.stop()
        raise
    return backbone
