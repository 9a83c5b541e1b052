"""Work units among the peers of a run: hand a job out, or train units of another peer's job."""

from pathlib import Path

from colab_swarm.errors import JoinError
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import Runner
from colab_swarm.swarm.network import NetworkSession
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.coordinator import Coordinator, CoordinatorOptions, open_coordinator
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.volunteering import Volunteer, open_volunteer

_NO_COORDINATOR = (
    "nobody coordinates work units in this swarm: call swarm.coordinate(job) here or at another peer; "
    "if a coordinator has just started, try again in a few seconds"
)


def coordinate(
    job: Job | str | Path, runtime: Runner, network: NetworkSession, options: CoordinatorOptions
) -> Coordinator:
    """Hand out the job, and announce its link in the run until the coordinator or the peer stops."""
    if not isinstance(job, Job):
        job = Job.load(job)
    coordinator = open_coordinator(job, network.access, network.token(), options)

    def link() -> str | None:
        return None if coordinator.stopped else coordinator.url

    volunteers = coordinator.dispatcher.state.volunteers
    # the peer's saved tally has the earlier ones
    before = {peer: record.accepted for peer, record in dict(volunteers).items()}

    def units() -> dict[PeerId, int]:
        return {
            PeerId(bytes.fromhex(peer)): record.accepted - before.get(peer, 0)
            for peer, record in volunteers.items()
        }

    # one that runs already counts on
    network.trust.contributions.units.setdefault(coordinator, units)
    runtime.call(network.announce("coordinators", link))
    network.stops.append(coordinator.stop)
    return coordinator


def volunteer(
    runtime: Runner,
    network: NetworkSession,
    name: str,
    *,
    job: Job | None,
    trust_code: bool,
    units: int,
    folder: str | Path | None,
    device: str | None,
) -> Volunteer:
    """Train units of the run's newest coordinator; JoinError if none is known."""
    urls = runtime.call(network.coordinators())
    if not urls:
        raise JoinError(_NO_COORDINATOR)
    admission = network.access.admission
    authority = None if admission is None else admission.authority

    def open_client(_: object) -> CoordinatorClient:
        return CoordinatorClient(urls[0], network.token(), run_id=network.access.run_id, authority=authority)

    unit_volunteer = open_volunteer(
        open_client,
        name=name,
        job=job,
        trust_code=trust_code,
        units=units,
        folder=folder,
        device=device,
        gate=network.gate,
    )
    network.stops.append(unit_volunteer.stop)
    return unit_volunteer
