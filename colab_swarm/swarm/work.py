"""Work units inside a swarm: its peers find the coordinator by the DHT, and their memberships let them in."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from colab_swarm.errors import JoinError, PeerError
from colab_swarm.runtime import Runner
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.coordinator import (
    Coordinator,
    CoordinatorOptions,
    RunContext,
    WorkLink,
    open_coordinator,
)
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.tokens import Token
from colab_swarm.workunits.volunteering import Volunteer, VolunteerFolder, default_folder, open_volunteer

TTL_S = 180.0
PUBLISH_EVERY_S = 60.0


@dataclass(frozen=True)
class WorkInSwarm:
    """The work units of one peer's swarm."""

    runtime: Runner
    services: PeerServices
    entrance: RunAccess
    name: str

    @property
    def _key(self) -> str:
        return f"{self.entrance.run_id}/coordinators"

    @property
    def _token(self) -> Token:
        admission = self.entrance.admission
        return Token(self.services.peers, b"" if admission is None else lambda: admission.membership)

    def coordinate(self, job: Job | str | Path, options: CoordinatorOptions) -> Coordinator:
        """See `Swarm.coordinate`."""
        job = job if isinstance(job, Job) else Job.load(job)
        seat = RunContext(self.entrance.run_id, self._token, self.entrance.admission, self._link)
        coordinator = open_coordinator(job, seat, options)
        self.runtime.call(self._announce(coordinator))
        return coordinator

    def _link(self, url: str, hours: float) -> WorkLink:
        """The authority issues links; others pass on the invitation that they came by."""
        if self.entrance.invitation is None:
            return WorkLink.issue(url, self.entrance, self.services.peers, hours=hours)
        return WorkLink(url, self.entrance.invitation)

    async def _announce(self, coordinator: Coordinator) -> None:
        task = asyncio.create_task(self._keep_announced(coordinator), name="announce a coordinator")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0)

    async def _keep_announced(self, coordinator: Coordinator) -> None:
        me = self.services.peers.id
        while not coordinator.stopped:
            with contextlib.suppress(PeerError):
                await self.services.dht.store(self._key, coordinator.url, subkey=me, ttl_s=TTL_S, signed=True)
            await asyncio.sleep(PUBLISH_EVERY_S)

    def volunteer(
        self,
        *,
        job: Job | None,
        trust_code: bool,
        units: int,
        folder: str | Path | None,
        device: str | torch.device | None,
    ) -> Volunteer:
        """See `Swarm.volunteer`."""
        urls = self.runtime.call(self._find())
        if not urls:
            raise JoinError(
                "nobody coordinates work units in this swarm: swarm.coordinate(job) does, here or elsewhere; "
                "if somebody has just begun, try again in a few seconds"
            )
        place = VolunteerFolder.take(default_folder(folder), self.name)
        admission = self.entrance.admission
        authority = None if admission is None else admission.authority
        client = CoordinatorClient(urls[0], self._token, run_id=self.entrance.run_id, authority=authority)
        try:
            return open_volunteer(
                client,
                place,
                job=job,
                trust_code=trust_code,
                units=units,
                name=self.name,
                device=device,
                gate=self.services.gate,
            )
        except BaseException:
            place.lock.release()
            raise

    async def _find(self) -> list[str]:
        """Addresses of coordinators, the newest told first."""
        found = await self.services.dht.get(self._key)
        told = sorted(found.items(), key=lambda entry: -entry[1].expires_at)
        return [
            record.value
            for subkey, record in told
            if record.owner == subkey
            and isinstance(record.value, str)
            and record.value.startswith(("http://", "https://"))
        ]
