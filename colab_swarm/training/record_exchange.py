"""A trainer's record on its way to the others, and theirs on their way here, with the comparison of states."""

import asyncio
import logging
import math

from colab_swarm.errors import PeerError
from colab_swarm.events import Fault
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.training.comparison import Comparison
from colab_swarm.training.forecast import MAX_REPORT_S, ThroughputEstimator
from colab_swarm.training.meetings import Meetings
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import progress_key
from colab_swarm.training.rounds import TrainedModel
from colab_swarm.training.settings import PeerServices

logger = logging.getLogger(__name__)

_FORMING_S = 5.0  # between two records while a round forms
_UNKNOWN_PERIOD_S = 1.0  # while no speed is known
_LEAST_PERIOD_S = 0.25
_LEAST_TTL_S = 60.0
_GONE_S = 0.5


class RecordExchange:
    """Publishes this trainer's record in the DHT, and reads the others'.

    Peers that keep the ``meetings`` waiting have no vote.
    """

    def __init__(
        self,
        services: PeerServices,
        progress: Progress,
        model: TrainedModel,
        throughput: ThroughputEstimator,
        meetings: Meetings,
        comparison: Comparison,
    ) -> None:
        self._services = services
        self._progress = progress
        self._model = model
        self._throughput = throughput
        self._meetings = meetings
        self._comparison = comparison

    async def keep_exchanging(self) -> None:
        """Exchange records for ever: the sooner the batch will be full, the more often."""
        urgent = self._progress.known.urgent
        while True:
            await wait_until(loop_now() + self._period_s(), urgent)
            urgent.clear()
            try:
                await self.exchange()
            except PeerError as error:
                logger.info("progress not exchanged: %s", error)
            except Exception as error:  # a door: the others must go on hearing of this peer
                logger.exception("progress not exchanged")
                self._services.events.emit(Fault.of(loop_now(), "progress", error))

    def _period_s(self) -> float:
        called = self._meetings.called
        if called is not None and called[0] >= self._progress.known.own.step:
            return _FORMING_S
        eta_s = self._progress.forecast.seconds_to_batch(loop_now())
        if eta_s == math.inf:
            return _UNKNOWN_PERIOD_S
        return min(max(eta_s / 4, _LEAST_PERIOD_S), MAX_REPORT_S)

    async def exchange(self) -> None:
        """Publish the own record, and read the others'; raises `PeerError`."""
        await self._publish(ttl_s=max(4 * self._period_s(), _LEAST_TTL_S))
        await self.refresh()

    async def withdraw(self) -> None:
        """Publish a record that expires at once."""
        await self._publish(ttl_s=_GONE_S)

    async def _publish(self, *, ttl_s: float) -> None:
        known = self._progress.known
        if self._throughput.idle(loop_now()) and known.own.computes:
            known.update(idle=True)
        addresses = self._services.peers.contact.addresses  # a tunnel or a relay may have opened or closed
        up, down = self._meetings.bandwidth.known()
        known.update(addresses=addresses, reduces=bool(addresses), upload_bps=up, download_bps=down)
        loss = await asyncio.to_thread(self._model.loss)  # it may wait for a GPU
        if loss is not None:
            known.update(loss=loss)
        await self._services.dht.publish(progress_key(self._progress.prefix), known.own, ttl_s=ttl_s)

    async def refresh(self) -> None:
        """Read the others' records, and compare this peer's with them."""
        progress = self._progress
        await progress.refresh(
            self._services.dht, self._services.peers, self._meetings.standing.suspects(loop_now())
        )
        self._comparison.compare_states()
        self._comparison.compare_rates(progress.election.rates(), progress.known.own.step)
        progress.known.news.set()
