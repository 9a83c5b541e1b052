"""What a peer trains: optimizers, elastic groups, averages of arrays, and its help to others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from colab_swarm.averaging.moshpit import ArrayAverages
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.membership import PeerContext
from colab_swarm.training.settings import AveragingOptions

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from colab_swarm.averaging.moshpit import MoshpitResult
    from colab_swarm.elastic.optimizer import ElasticOptimizer
    from colab_swarm.elastic.settings import ElasticOptions
    from colab_swarm.training.assistant import Assistance
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.settings import TrafficBudget


class SwarmTraining:
    """The models that one peer trains with others.

    Attributes:
        optimizers, elastic: by the model's name.
        latest: the optimizer made last, which the panel shows; None if this peer trains nothing.
        assistance: this peer's help to others as a reducer; None without.
        on_optimizer: called with the name of each new optimizer and the optimizer.
    """

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        services = context.services
        self._averages = ArrayAverages(services.router, services.dht, services.averager, context.run_id)
        self.latest: SwarmOptimizer | None = None
        self.optimizers: dict[str, SwarmOptimizer] = {}
        self.elastic: dict[str, ElasticOptimizer] = {}
        self.assistance: Assistance | None = None
        self.on_optimizer: Callable[[str, SwarmOptimizer], None] = lambda name, optimizer: None

    def known_peers(self) -> set[PeerId]:
        """Ids of the peers that train what this peer trains."""
        return set() if self.latest is None else set(self.latest.collaboration.progress.records)

    def optimizer(
        self,
        optimizer: Optimizer,
        *,
        target_batch_size: int,
        scheduler: LRScheduler | None,
        max_grad_norm: float | None,
        name: str,
        budget: TrafficBudget | None,
        averaging: AveragingOptions,
    ) -> SwarmOptimizer:
        """Make an optimizer; see `Swarm.optimizer`."""
        from colab_swarm.training.checkpoint import CheckpointFolder
        from colab_swarm.training.optimizer import SwarmOptimizer
        from colab_swarm.training.replica import UpdateRule
        from colab_swarm.training.settings import TrainingSettings

        context = self._context
        prefix = f"{context.run_id}/{name}"
        settings = TrainingSettings.of(prefix, float(target_batch_size), budget, averaging)
        if name in self.optimizers:
            self.optimizers.pop(name).close()
        overlap, local = averaging.get("overlap", False), settings.local_steps != 1
        rule = UpdateRule(optimizer, scheduler, max_grad_norm, overlap, local)
        keeping = None if context.network is None else context.network.keeping
        kept = None if keeping is None else CheckpointFolder(keeping.checkpoints(name), keep=2)
        trained = SwarmOptimizer(context.runtime, context.services, settings, rule, context.name, kept)
        self.latest = self.optimizers[name] = trained
        self.on_optimizer(name, trained)
        return trained

    def elastic_optimizer(
        self, optimizer: Optimizer, *, peers: int, name: str, options: ElasticOptions
    ) -> ElasticOptimizer:
        """Join an elastic group; see `Swarm.elastic_optimizer`."""
        from colab_swarm.elastic.group import PeerGroup
        from colab_swarm.elastic.optimizer import ElasticOptimizer
        from colab_swarm.elastic.settings import ElasticSettings

        context = self._context
        settings = ElasticSettings(f"{context.run_id}/elastic/{name}", peers, **options)
        if name in self.elastic:
            self.elastic.pop(name).close()
        group, services = PeerGroup(context.services), context.services
        elastic = ElasticOptimizer(
            context.runtime, optimizer, settings, group, services.events, services.pace
        )
        self.elastic[name] = elastic
        return elastic

    def average(
        self, values: Any, *, weight: float, group_size: int | None, name: str, compression: str
    ) -> tuple[Any, MoshpitResult]:
        """Average an array; see `Swarm.average`."""
        average = self._averages.average(
            values, weight=weight, group_size=group_size, name=name, compression=compression
        )
        try:
            return self._context.runtime.call(average)
        except KeyboardInterrupt:
            print("Interrupted. Others may have counted your values; call average() again for another mean.")
            raise

    def serve_as_reducer(self, name: str | None) -> Assistance:
        """Help others; see `Swarm.serve_as_reducer`."""
        from colab_swarm.training.assistant import Assistance, Assistant

        context = self._context
        if self.assistance is not None:
            self.assistance.stop()
        assistant = Assistant(context.services, context.run_id, name=context.name, collaboration=name)
        self.assistance = Assistance(context.runtime, assistant)
        return self.assistance

    def on_pause(self) -> None:
        """Let every optimizer notice that the pause gate opened or closed. Thread-safe."""
        for optimizer in list(self.optimizers.values()):  # buttons call this on other threads
            self._context.runtime.call(optimizer.collaboration.on_gate())

    def closings(self, hand_over_s: float) -> list[Callable[[], object]]:
        """Return the calls that hand over and end all training, in order."""
        closings: list[Callable[[], object]] = []
        for optimizer in self.optimizers.values():
            closings.append(partial(optimizer.close, hand_over_s=hand_over_s))
        return [*closings, *(elastic.close for elastic in self.elastic.values())]

    def close(self) -> None:
        """End the averages of arrays."""
        self._context.runtime.call(self._averages.close())

    def kill(self) -> None:
        """End like a killed process. For simulated crashes, on the runtime's loop."""
        for optimizer in self.optimizers.values():
            optimizer.collaboration.kill()
        for elastic in self.elastic.values():
            elastic.kill()
        if self.assistance is not None:
            self.assistance.kill()
