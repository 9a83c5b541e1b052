"""Work units inside a swarm: peers find the coordinator by the DHT, and their memberships let them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colab_swarm.errors import JoinError
from colab_swarm.runtime import Runner
from colab_swarm.swarm.network import NetworkSession
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.coordinator import Coordinator, CoordinatorOptions, open_coordinator
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.messages import Token
from colab_swarm.workunits.volunteering import Volunteer, open_volunteer


def coordinate(
    runtime: Runner, network: NetworkSession, job: Job | str | Path, options: CoordinatorOptions
) -> Coordinator:
    """Coordinate ``job`` as this peer and announce it in the DHT; see `Swarm.coordinate`."""
    job = job if isinstance(job, Job) else Job.load(job)
    coordinator = open_coordinator(job, network.access, _token(network), options)
    runtime.call(network.announce("coordinators", lambda: None if coordinator.stopped else coordinator.url))
    return coordinator


def volunteer(runtime: Runner, network: NetworkSession, **options: Any) -> Volunteer:
    """Work for the swarm's coordinator, the one announced last; ``options`` are those of `open_volunteer`."""
    found = runtime.call(network.announced("coordinators"))
    newest = sorted(found.values(), key=lambda record: -record.expires_at)
    urls = [
        record.value
        for record in newest
        if isinstance(record.value, str) and record.value.startswith(("http://", "https://"))
    ]
    if not urls:
        raise JoinError(
            "nobody coordinates work units in this swarm: call swarm.coordinate(job) here or at another peer; "
            "if a coordinator has just started, try again in a few seconds"
        )
    admission = network.access.admission
    authority = None if admission is None else admission.authority

    def client(_: Path) -> CoordinatorClient:
        return CoordinatorClient(urls[0], _token(network), run_id=network.access.run_id, authority=authority)

    return open_volunteer(client, **options)


def _token(network: NetworkSession) -> Token:
    admission = network.access.admission
    return Token(network.node, b"" if admission is None else lambda: admission.membership)
