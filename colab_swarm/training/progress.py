"""The swarm's progress as one peer sees it: the known records, the elected branch, the forecast. Pure but `refresh`."""

from collections.abc import Container, Iterable, Mapping

from colab_swarm.dht.service import DHT
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.runtime import loop_now
from colab_swarm.training.election import Election
from colab_swarm.training.forecast import BatchForecast
from colab_swarm.training.known import KnownRecords
from colab_swarm.training.pace import SwarmPace
from colab_swarm.training.records import ProgressRecord, read_participants

WATCHING = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, reduces=False, name="")
"""The own record of a peer that does not train."""


class Progress:
    """Passes what this peer reads and what its rounds show to the known records, the election and the forecast.

    ``round_samples``: of all peers together from one round to the next.
    """

    def __init__(
        self, me: PeerId, own: ProgressRecord, prefix: str = "", *, round_samples: float = 0.0
    ) -> None:
        self.prefix = prefix
        self.known = KnownRecords(me, own)
        self.election = Election(self.known)
        self.forecast = BatchForecast(self.known, round_samples)
        self.pace = SwarmPace()

    async def refresh(self, dht: DHT, peers: Peers, suspects: Iterable[PeerId] = ()) -> None:
        """Read all records; raises `PeerError` if they cannot be read now."""
        records, assistants, self.known.found = await read_participants(dht, self.prefix)
        self.on_records(records, linked=peers.linked(), suspects=suspects, now=loop_now())
        self.known.on_assistants(assistants, self.prefix)

    def on_records(
        self,
        records: Mapping[PeerId, ProgressRecord],
        *,
        linked: Container[PeerId] = (),
        suspects: Iterable[PeerId] = (),
        now: float,
    ) -> None:
        """Take the live records just read; to a peer with a state, ``suspects`` have no vote."""
        self.election.forget_old(now)
        self.forecast.forget_absent(records)
        self.known.on_records(records, linked=linked, now=now)
        self.forecast.on_records()
        self.election.on_records(suspects, step_s=self.forecast.step_s, now=now)

    def on_round(
        self,
        samples: Mapping[PeerId, float],
        step: int,
        lineage: bytes,
        *,
        now: float,
    ) -> None:
        """Take the result of a round: the ``samples`` in its mean, by contributor; these have applied it, too."""
        self.forecast.on_round(samples, step, now=now)
        self.pace.on_round(samples, now=now)
        self.election.on_round(samples, now=now)
        self.known.on_round(samples, step, lineage, now=now)

    def leap(self, step: int, lineage: bytes, *, syncing: bool) -> None:
        """Move this peer to a state that it has loaded or, ``syncing``, still needs."""
        if step < self.known.own.step:
            self.election.on_leap_back()
        self.pace.begin_again()
        self.known.leap(step, lineage, syncing=syncing)
