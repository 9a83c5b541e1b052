"""A backbone of one run: assistant, keepers of checkpoints, and their web page."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colab_swarm.backbone.config import RunFile
from colab_swarm.backbone.keeper import HubPush, Keeper
from colab_swarm.backbone.web import CollaborationView, DashboardServer, View
from colab_swarm.credentials import find_secret
from colab_swarm.errors import PeerError
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.swarm.joining import create
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.assistant import Assistant
from colab_swarm.training.state import Snapshot

logger = logging.getLogger(__name__)


class Backbone:
    """Stays with a run from `start` to `stop`.

    Args:
        swarm: this peer in the run.
        file: the run's ``run.toml``.
        hub_token: of Hugging Face; None for the login of this machine.

    Raises:
        ValueError: a package that the file needs is not installed.
    """

    def __init__(self, swarm: Swarm, file: RunFile, *, hub_token: str | None = None) -> None:
        self._swarm, self._file, self._since = swarm, file, time.time()
        self.assistant = Assistant(
            swarm.runtime, swarm.services, swarm.run_id, name=file.peer_name, stored=self._stored
        )
        self.dashboard = DashboardServer(self.view)
        self.keepers: dict[str, Keeper] = {}
        for one in file.collaborations:
            prefix = f"{swarm.run_id}/{one.name}"
            self.keepers[prefix] = Keeper(
                swarm.services,
                prefix,
                name=file.peer_name,
                settings=one,
                folder=Path(file.folder) / one.name,
                hub=HubPush(one, token=hub_token) if one.repo else None,
                on_standing_in=self.assistant.leave,  # with the groups that it remembers
                forward=file.forward,
            )

    async def _stored(self, prefix: str) -> Snapshot | None:
        return self.keepers[prefix].stored if prefix in self.keepers else None

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

    async def stop(self) -> None:
        """Leave the run; the folder stays."""
        await self.dashboard.close()
        for keeper in self.keepers.values():
            await keeper.stop()
        try:
            await self.assistant.withdraw()
        except PeerError as error:
            logger.info("left without notice to other peers: %s", error)

    def view(self) -> View:
        """Return the run as this peer knows it."""
        peers = self._swarm.services.peers
        total = peers.statistics()
        return View(
            run=self._swarm.run_id.rpartition("-")[0],
            backbone=self._file.peer_name,
            at=time.time(),
            since=self._since,
            reached=str(self._swarm.reachability),
            linked=len(peers.linked()),
            sent_bytes=total.sent_bytes,
            received_bytes=total.received_bytes,
            collaborations=tuple(map(_collaboration, self.keepers.values())),
        )


def _collaboration(keeper: Keeper) -> CollaborationView:
    observer, hub, branch = keeper.observer, keeper.hub, keeper.observer.branch
    trainers = [record for record in observer.trainers.values() if not record.syncing]
    return CollaborationView(
        name=keeper.settings.name,
        step=branch.step if branch is not None else keeper.standing_in or 0,
        samples_per_s=sum(record.samples_per_s for record in trainers),
        trainers=len(trainers),
        catching_up=len(observer.trainers) - len(trainers),
        assistants=len(observer.progress.assistants),
        points=tuple(observer.curve.points),
        peers=observer.peers(),
        checkpoints=keeper.vault.checkpoints,
        standing_in=keeper.standing_in,
        hub="" if hub is None else hub.state,
        hub_failures=0 if hub is None else hub.failures,
    )


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
    backbone = Backbone(swarm, file, hub_token=hub_token)
    try:
        await backbone.start()
    except BaseException:  # an interrupt included: the page's port must not stay taken
        await backbone.stop()
        raise
    return backbone
