"""A trainer's way into the groups of its rounds: whom it expects there, and when it comes if it is called."""

from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundTerms, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.memory import SwarmView
from colab_swarm.averaging.standing import Standing
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.training.forecast import ThroughputEstimator
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import ProgressRecord
from colab_swarm.training.settings import (
    HEAVIEST,
    ROUND_TIMEOUT_S,
    LinkBandwidth,
    PeerServices,
    RoundInput,
    TrainingSettings,
)


class Meetings(SwarmView):
    """Finds the group of each round of a trainer, by its ``progress`` and its speed.

    Attributes:
        standing: what others' delays have cost this peer; rounds let them earn.
        shares: the strategy, which learns from each round.
        called: step and lineage of the round to which another peer called this one. `on_called` sets it, `LinkRounds`
            resets it when this peer takes part, or needs the state.
        in_a_round: True from a contribution until its mean is applied. `LinkRounds` writes it: a faster member may
            call the next round meanwhile.
    """

    def __init__(
        self,
        services: PeerServices,
        settings: TrainingSettings,
        progress: Progress,
        throughput: ThroughputEstimator,
        *,
        numel: int,
        schema: bytes,
    ) -> None:
        peers = services.peers
        patience_s = settings.matchmaking_timeout_s
        self.called: tuple[int, bytes] | None = None
        self.in_a_round = False
        self.bandwidth = LinkBandwidth(peers)
        self.shares = AdaptiveShares()
        self.standing = Standing(
            peers.id,
            progress.election.account_of,
            peers.read_at,
            services.events,
            progress.forecast.longest_s,
        )
        self._peers = peers
        self._settings = settings
        self._progress = progress
        self._throughput = throughput
        self._numel = numel
        self._schema = schema
        self._matchmaker = Matchmaker(
            services.router,
            settings.prefix,
            self,
            standing=self.standing,
            strategy=self.shares,
            settings=GroupFormationSettings(patience_s, patience_s, heaviest=HEAVIEST),
        )
        self.close = self._matchmaker.close
        self.forget = self._matchmaker.forget

    async def wait_called(self) -> None:
        """Wait until another peer calls this one to a round."""
        news = self._progress.known.news
        while self.called is None:
            news.clear()
            await news.wait()

    async def find_group(self, own: ProgressRecord, contribution: RoundInput) -> Group:
        """Return the group of a record's step and lineage; raises RoundRefused if there is none."""
        peers = self._peers
        ticket = Ticket(
            self.terms(own.step, own.lineage),
            contribution.weight,
            bool(peers.contact.addresses) and not own.syncing,
            *self.bandwidth.known(),
            metered=peers.metered,
            unused=contribution.unused,
            loss=contribution.loss,
            samples=contribution.samples,
        )
        candidates = await self.expected(own.step, own.lineage)
        awaited = self._progress.known.waiting(own.step, own.lineage) & peers.linked()
        deadline = loop_now() + ROUND_TIMEOUT_S
        return await self._matchmaker.join(ticket, candidates, deadline, awaited=awaited)

    def terms(self, step: int, lineage: bytes) -> RoundTerms:
        settings = self._settings
        codecs = settings.compression, settings.mean_compression
        return RoundTerms(settings.prefix, step, lineage, self._numel, self._schema, *codecs)

    def believed_s(self, peer: PeerId) -> float:
        return self._progress.forecast.believed_s(peer)

    def stands(self, step: int, lineage: bytes) -> bool:
        return self._progress.election.stands(step, lineage)

    async def expected(self, step: int, lineage: bytes) -> list[PeerId]:
        """Return the peers that should take part, by their records, the last round or a call."""
        known = self._progress.known
        expected = known.participants(step, lineage) | known.assistants.keys()
        expected |= self._matchmaker.likely(step, lineage)  # a record may be late
        # Skip peers at a later step: they would answer that this step is over.
        for peer, record in known.all.items():
            if record.absent or record.step > step:
                expected.discard(peer)
        return sorted(expected)

    def on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        known = self._progress.known
        own = known.own
        # The lineage of the step that is being applied is known when that is done.
        applying = self.in_a_round and terms.step == own.step + 1
        here = own.syncing or applying or (own.step, own.lineage) == terms.key
        ahead = known.all.get(caller, own).step > terms.step  # by its record: no peer expects it here
        if own.absent or ahead or not here:
            return None
        if caller != self._peers.id:  # its own organizer has begun, and would follow itself forever
            self.called = terms.key
            known.news.set()
        if own.syncing:
            return 0.0
        now = loop_now()
        ready_in_s = self._throughput.ready_in_s(now, patience_s=self._settings.matchmaking_timeout_s)
        if ready_in_s is None or applying:
            return ready_in_s
        return max(ready_in_s, self._progress.forecast.early_s(now))
