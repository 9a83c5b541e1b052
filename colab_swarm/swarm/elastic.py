"""`Swarm.elastic`: small groups that step on partial gradients."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from colab_swarm.elastic.optimizer import ElasticOptimizer
from colab_swarm.elastic.steps import ElasticSettings, ElasticSnapshot
from colab_swarm.notebook.meters import ELASTIC_VIEWS
from colab_swarm.notebook.panel import Panel
from colab_swarm.runtime import Runner
from colab_swarm.training.settings import PeerServices, settings_for


class SwarmElastic:
    """A peer's part in groups of Elastic Consistency; has the ``optimizers`` by the model's name, the newest last."""

    def __init__(self, runtime: Runner, services: PeerServices, check: Callable[..., None]) -> None:
        self._runtime = runtime
        self._services = services
        self._check = check
        self.optimizers: dict[str, ElasticOptimizer] = {}

    def optimizer(
        self, optimizer: Optimizer, *, peers: int, name: str = "model", **options: Any
    ) -> ElasticOptimizer:
        """Let a small group step ``optimizer`` on partial gradients; see `ElasticOptimizer`.

        Waits until the group is complete. It has ``peers`` members, 2 to 16 including this one. All members start
        from the parameters of the first member. For ``options`` see `ElasticSettings`. Raises ValueError if an option
        is not usable or differs from the other members' option, and StateError if the group did not form.
        """
        self._check(worker=True)
        prefix = f"{self._services.run_id}/elastic/{name}"
        settings = settings_for(self.optimizer, ElasticSettings, prefix, peers, **options)
        if name in self.optimizers:
            self.optimizers.pop(name).close()
        trained = ElasticOptimizer(self._runtime, optimizer, settings, self._services)
        self.optimizers[name] = trained
        return trained

    def meter(self, name: str = "model") -> Panel[ElasticSnapshot]:
        """Return a live view that compares this member's inconsistency with its bound."""
        trained = self.optimizers[name]
        return Panel(trained.snapshot, trained.close, views=ELASTIC_VIEWS)

    def close(self) -> None:
        for trained in self.optimizers.values():
            trained.close()

    def kill(self) -> None:
        """End as a killed process would."""
        for trained in self.optimizers.values():
            trained.kill()
