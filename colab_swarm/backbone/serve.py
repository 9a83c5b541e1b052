"""``colab-swarm backbone run.toml``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from colab_swarm.backbone.backbone import Backbone
from colab_swarm.backbone.config import RunFile
from colab_swarm.credentials import find_secret
from colab_swarm.joining import create
from colab_swarm.swarm import Swarm
from colab_swarm.widgets.invitation import Invitation


@dataclass(frozen=True)
class Served:
    """A backbone at work: its place in the run, the invitation for others, and where its page is (may be empty)."""

    swarm: Swarm
    invite: Invitation
    dashboard: str


@contextmanager
def serve(file: RunFile, *, i_have_read_the_terms: bool = False) -> Iterator[Served]:
    """Begin the run of a ``run.toml``, or go on with it, until the block ends.

    Raises:
        ValueError: the folder is another run's, or a package that is asked for is not installed.
        OSError: a port is taken.
        SwarmError: the run cannot be begun.
    """
    with create(
        file.name,
        access=file.access,
        allow=file.allowlist,
        peer_name=file.peer_name,
        options=file.options,
        i_have_read_the_terms=i_have_read_the_terms,
    ) as swarm:
        token = find_secret("HF_TOKEN") if any(one.repo for one in file.collaborations) else None
        backbone = swarm._runtime.call(_start(swarm, file, token))
        try:
            yield Served(swarm, swarm.invite(hours=file.invitation_hours), backbone.dashboard.url)
        finally:
            swarm._runtime.call(backbone.stop())


async def _start(swarm: Swarm, file: RunFile, hub_token: str | None) -> Backbone:
    presence = swarm._presence
    assert presence is not None  # a run that was created is no simulation
    backbone = Backbone(
        swarm._services,
        swarm.run_id,
        file,
        reached=lambda: str(presence.reachability.current),
        contributions=presence.trust.contributions.read,
        hub_token=hub_token,
    )
    try:
        await backbone.start()
    except BaseException:  # an interrupt included: the page's port must not stay taken
        await backbone.stop()
        raise
    return backbone
