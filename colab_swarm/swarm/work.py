"""Work units inside a swarm: peers find the coordinator by the DHT, and their memberships let them in."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from colab_swarm.errors import JoinError, PeerError
from colab_swarm.runtime import Runner
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.coordinator import Coordinator, CoordinatorOptions, open_coordinator
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.tokens import Token
from colab_swarm.workunits.volunteering import Volunteer, open_volunteer

TTL_S = 180.0
PUBLISH_EVERY_S = 60.0


def coordinate(
    runtime: Runner,
    services: PeerServices,
    access: RunAccess,
    job: Job | str | Path,
    options: CoordinatorOptions,
) -> Coordinator:
    """Coordinate ``job`` as this peer and announce it in the DHT; see `Swarm.coordinate`."""
    job = job if isinstance(job, Job) else Job.load(job)
    coordinator = open_coordinator(job, access, _token(services, access), options)

    async def announce() -> None:
        while not coordinator.stopped:
            with contextlib.suppress(PeerError):
                key, me = _key(access), services.peers.id
                await services.dht.store(key, coordinator.url, subkey=me, ttl_s=TTL_S, signed=True)
            await asyncio.sleep(PUBLISH_EVERY_S)

    async def begin() -> None:
        task = asyncio.create_task(announce(), name="announce a coordinator")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0)

    runtime.call(begin())
    return coordinator


def volunteer(
    runtime: Runner, services: PeerServices, access: RunAccess, *, name: str, **options: Any
) -> Volunteer:
    """Work for the swarm's coordinator, the one announced last; ``options`` are those of `open_volunteer`."""

    async def find() -> list[str]:
        found = await services.dht.get(_key(access))
        return [
            record.value
            for subkey, record in sorted(found.items(), key=lambda item: -item[1].expires_at)
            if record.owner == subkey
            and isinstance(record.value, str)
            and record.value.startswith(("http://", "https://"))
        ]

    urls = runtime.call(find())
    if not urls:
        raise JoinError(
            "nobody coordinates work units in this swarm: call swarm.coordinate(job) here or at another peer; "
            "if a coordinator has just started, try again in a few seconds"
        )
    admission = access.admission
    authority = None if admission is None else admission.authority

    def client(_: Path) -> CoordinatorClient:
        return CoordinatorClient(urls[0], _token(services, access), run_id=access.run_id, authority=authority)

    return open_volunteer(client, name=name, gate=services.gate, **options)


def _key(access: RunAccess) -> str:
    return f"{access.run_id}/coordinators"


def _token(services: PeerServices, access: RunAccess) -> Token:
    admission = access.admission
    return Token(services.peers, b"" if admission is None else lambda: admission.membership)
