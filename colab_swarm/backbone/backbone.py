"""A backbone of one run: an assistant, a keeper of checkpoints for each model, and a web page."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from colab_swarm.backbone.config import RunFile
from colab_swarm.backbone.keeper import HubPush, Keeper
from colab_swarm.credentials import find_secret
from colab_swarm.errors import PeerError
from colab_swarm.net.addresses import is_loopback, relay_of
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.page import StatusPage, join_page
from colab_swarm.notebook.platforms import Consent
from colab_swarm.notebook.views import draw, metrics
from colab_swarm.runtime import on_loop
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.swarm.joining import create
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.overview import peer_rows
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.assistant import Assistant

logger = logging.getLogger(__name__)
MAX_PEERS = 256  # most peers in a snapshot


class Backbone:
    """Stays in a run from `start` to `stop`. Raises ValueError if a package that it needs is not installed.

    ``hub_token`` is a token of Hugging Face; None uses the login of this machine. `serve` sets ``invite``, the
    invitation. ``dashboard`` is the address of the web page, empty if there is none.
    """

    invite: Invitation

    def __init__(self, swarm: Swarm, file: RunFile, *, hub_token: str | None = None) -> None:
        self.swarm = swarm
        self._file = file
        services = swarm.services
        name = file.peer_name
        self.assistant = Assistant(swarm.runtime, services, swarm.run_id, name=name, stored=self._stored)
        self.page = status_page(self.snapshots)
        self.keepers: dict[str, Keeper] = {}
        for collaboration in file.collaborations:
            prefix = f"{swarm.run_id}/{collaboration.name}"
            hub = None
            if collaboration.repo:
                hub = HubPush(collaboration, token=hub_token)
            self.keepers[prefix] = Keeper(
                services,
                prefix,
                name=name,
                settings=collaboration,
                folder=Path(file.folder) / collaboration.name,
                hub=hub,
                on_standing_in=self.assistant.leave,  # ends the assistant's part, with the groups that it remembers
                forward=file.forward,
            )

    async def _stored(self, prefix: str) -> Snapshot | None:
        if prefix in self.keepers:
            return self.keepers[prefix].stored
        return None

    async def start(self) -> None:
        """Start all parts; if one fails, none runs. Raises PortError if the dashboard's port is taken."""
        try:
            if self._file.dashboard.enabled:
                await self.page.start(self._file.dashboard.host, self._file.dashboard.port)
            self.dashboard = self.page.url
            self._show_how_to_join()
            await self.assistant.start()
            for keeper in self.keepers.values():
                keeper.start()
        except BaseException:  # also after an interrupt, the port of the page must become free
            await self.stop()
            raise

    def _show_how_to_join(self) -> None:
        """Let browsers open this peer's invitations, if this peer has an https address by a proxy or tunnel."""
        addresses = self.swarm.services.peers.contact.addresses
        secure = [a for a in addresses if a.startswith("wss://") and relay_of(a) is None]
        if secure and self.swarm.network is not None:
            board = self._file.dashboard
            page_at = self.swarm.network.node.listener.page_at
            public = board.enabled and board.host != "localhost" and not is_loopback(board.host)
            page_at["/join"] = join_page(self.swarm.run, live=public)
            if public:
                page_at["/live"] = self.page.answer
            self.swarm.page = secure[0].replace("wss", "https", 1)

    async def stop(self) -> None:
        """Leave the run; the folder remains."""
        await self.page.close()
        for keeper in self.keepers.values():
            await keeper.stop()
        try:
            await self.assistant.withdraw()
        except PeerError as error:
            logger.info("left without notice to other peers: %s", error)

    def snapshots(self) -> tuple[SwarmSnapshot, ...]:
        """Return the run as this peer knows it: one snapshot for each model, or one if there is no model."""
        # leave out the log, because the page may be public, and texts of faults contain names of files
        seen = replace(self.swarm.snapshot(), at=time.time(), log=(), rounds=())
        return tuple(self._snapshot(keeper, seen) for keeper in self.keepers.values()) or (seen,)

    def _snapshot(self, keeper: Keeper, seen: SwarmSnapshot) -> SwarmSnapshot:
        branch = keeper.branch
        records = (keeper.view.others, keeper.view.assistants)
        rows = peer_rows(self.swarm.services.peers, self._file.peer_name, *records, self.swarm.runtime.time())
        return replace(
            seen,
            me=self._file.peer_name,
            peers=rows[:MAX_PEERS],
            step=branch.step if branch is not None else keeper.standing_in or 0,
            samples_per_s=0.0,
            compute_samples_per_s=sum(row.compute_samples_per_s for row in rows if row.role == "trainer"),
            loss_history=tuple((point.step, point.loss) for point in keeper.curve.points),
            model=keeper.settings.name,
            kept=keeper.kept(),
        )


def status_page(look: Callable[[], tuple[SwarmSnapshot, ...]]) -> StatusPage[tuple[SwarmSnapshot, ...]]:
    return StatusPage(
        look,
        lambda models: [draw(model) for model in models],
        lambda models: [sample for model in models for sample in metrics(model)],
        host="backbone",
    )


@contextmanager
def serve(
    file: RunFile, options: NetworkOptions | None = None, *, accept_terms: Consent = False
) -> Iterator[Backbone]:
    """Start or continue a run until the block ends.

    If the ``file`` has no model, the peer only organizes rounds, reduces and relays. ``options`` are of the network;
    None takes the file's. `create` explains ``accept_terms``. Raises ValueError if the folder belongs to another run or
    a needed package is not installed, OSError if a port is taken, and SwarmError if the run cannot be started.
    """
    with create(
        file.name,
        access=file.access,
        allow=file.allowlist,
        peer_name=file.peer_name,
        options=options or file.options,
        accept_terms=accept_terms,
    ) as swarm:
        pushes = any(collaboration.repo for collaboration in file.collaborations)
        token = find_secret("HF_TOKEN") if pushes else None
        backbone = swarm.runtime.call(on_loop(lambda: Backbone(swarm, file, hub_token=token)))
        swarm.runtime.call(backbone.start())
        try:
            backbone.invite = swarm.invite(hours=file.invitation_hours, settings=file.settings)
            yield backbone
        finally:
            swarm.runtime.call(backbone.stop())
