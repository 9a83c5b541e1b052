"""`Swarm.work`: work units among the peers of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from colab_swarm.errors import JoinError
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import Runner
from colab_swarm.swarm.network import NetworkSession
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.coordinator import Coordinator, CoordinatorOptions, open_coordinator
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.volunteering import Volunteer, open_volunteer

_NO_COORDINATOR = (
    "nobody coordinates work units in this swarm: call swarm.work.coordinate(job) here or at another peer; "
    "if a coordinator has just started, try again in a few seconds"
)


class SwarmWork:
    """A peer's work units (VC-ASGD): hand out a job to peers and to holders of its link, or train units of a job.

    Methods raise RuntimeError after `Swarm.leave`, and PermissionError if the peer joined as a viewer or reducer.
    """

    def __init__(
        self, runtime: Runner, network: NetworkSession, name: str, check: Callable[..., None]
    ) -> None:
        self._runtime = runtime
        self._network = network
        self._name = name
        self._check = check

    def coordinate(self, job: Job | str | Path, **options: Unpack[CoordinatorOptions]) -> Coordinator:
        """Hand out a job in work units to the peers of the run and to everyone who has the job's link.

        The link is announced in the run until the coordinator or the peer stops. ``job`` may also be a Python file
        that defines ``job``. Raises the errors of `colab_swarm.workunits.coordinate`.
        """
        self._check(worker=True)
        network = self._network
        if not isinstance(job, Job):
            job = Job.load(job)
        coordinator = open_coordinator(job, network.access, network.token(), options)

        def link() -> str | None:
            return None if coordinator.stopped else coordinator.url

        volunteers = coordinator.dispatcher.state.volunteers
        # units that were accepted earlier are in the peer's saved tally already
        before = {peer: record.accepted for peer, record in dict(volunteers).items()}

        def units() -> dict[PeerId, int]:
            return {
                PeerId(bytes.fromhex(peer)): record.accepted - before.get(peer, 0)
                for peer, record in volunteers.items()
            }

        # a coordinator that runs already keeps its count
        network.trust.contributions.units.setdefault(coordinator, units)
        self._runtime.call(network.announce("coordinators", link))
        network.stops.append(coordinator.close)
        return coordinator

    def volunteer(
        self,
        *,
        job: Job | None = None,
        trust_code: bool = False,
        units: int = 1,
        folder: str | Path | None = None,
        device: str | None = None,
    ) -> Volunteer:
        """Train work units of the swarm's newest coordinator; see `colab_swarm.workunits.volunteer`.

        Raises JoinError if no coordinator answers, and ValueError if its code is not trusted yet.
        """
        self._check(worker=True)
        network = self._network
        urls = self._runtime.call(network.coordinators())
        if not urls:
            raise JoinError(_NO_COORDINATOR)
        admission = network.access.admission
        authority = None if admission is None else admission.authority

        def open_client(_: object) -> CoordinatorClient:
            run_id = network.access.run_id
            return CoordinatorClient(urls[0], network.token(), run_id=run_id, authority=authority)

        unit_volunteer = open_volunteer(
            open_client,
            name=self._name,
            job=job,
            trust_code=trust_code,
            units=units,
            folder=folder,
            device=device,
            gate=network.gate,
        )
        network.stops.append(unit_volunteer.close)
        return unit_volunteer
