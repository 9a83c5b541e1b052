"""A peer of a run that trains with the others: data-parallel, elastically, by averages of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from colab_swarm.asking import Asking
from colab_swarm.averaging.arrays import ArrayAverages
from colab_swarm.member import Member, Who
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import Runs
from colab_swarm.training.settings import AveragingOptions, Services

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from colab_swarm.averaging.moshpit import GridResult
    from colab_swarm.elastic.optimizer import ElasticOptimizer
    from colab_swarm.elastic.settings import ElasticOptions
    from colab_swarm.elastic.snapshot import ElasticSnapshot
    from colab_swarm.training.assistant import Assistance
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.thrift import Budget
    from colab_swarm.widgets.panel import Panel


class Collaborator(Member):
    """One peer of a run, and what it trains."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        super().__init__(runtime, services, **who)
        self._averages = ArrayAverages(services.rooms, services.dht, services.averager, self.run_id)
        self._optimizer: SwarmOptimizer | None = None  # the last one made: what is shown
        self._optimizers: dict[str, SwarmOptimizer] = {}  # by name of the model
        self._elastic: dict[str, ElasticOptimizer] = {}  # likewise
        self._asking = Asking()
        self.assistance: Assistance | None = None
        self.left = False

    def _known_peers(self) -> set[PeerId]:
        trained = self._optimizer.collaboration.progress.records if self._optimizer is not None else {}
        return {*super()._known_peers(), *trained}

    def optimizer(
        self,
        optimizer: Optimizer,
        *,
        target_batch_size: int,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        name: str = "model",
        budget: Budget | None = None,
        **averaging: Unpack[AveragingOptions],
    ) -> SwarmOptimizer:
        """Let the swarm step ``optimizer``: see `SwarmOptimizer`. Calling it again for a name replaces the former one.

        Args:
            optimizer: a torch optimizer over the model's parameters; all peers use the same kind and settings.
            target_batch_size: samples of all peers together for one global step.
            scheduler: stepped once per global step.
            max_grad_norm: clip the averaged gradient to this norm.
            name: tells several models of one run apart.
            budget: for the traffic of this peer.
            **averaging: ``codec``, ``mean_codec``, ``error_feedback``, ``delayed``, ``local_steps``, ``matchmaking_s``:
                see `AveragingOptions`. All peers use the same, but for delayed.

        Raises:
            ValueError, TypeError: a setting is not usable.
            PermissionError: this peer joined as a viewer or reducer.
            StateError: a swarm trains this already, but nobody could give its state.
        """
        from colab_swarm.training.checkpoint import CheckpointFolder
        from colab_swarm.training.optimizer import SwarmOptimizer
        from colab_swarm.training.replica import UpdateRule
        from colab_swarm.training.settings import TrainingSettings

        prefix = f"{self.run_id}/{name}"
        settings = TrainingSettings.of(prefix, float(target_batch_size), budget, averaging)
        self._check_here()
        self._check_role()
        if name in self._optimizers:
            self._optimizers.pop(name).close()
        delayed, local = averaging.get("delayed", False), settings.local_steps != 1
        rule = UpdateRule(optimizer, scheduler, max_grad_norm, delayed, local)
        keeping = None if self._presence is None else self._presence.keeping
        kept = None if keeping is None else CheckpointFolder(keeping.checkpoints(name), keep=2)
        trained = SwarmOptimizer(self._runtime, self._services, settings, rule, self.name, kept)
        self._optimizer = self._optimizers[name] = trained
        self._asking.on_optimizer(name, trained)
        return trained

    def elastic_optimizer(
        self, optimizer: Optimizer, *, peers: int, name: str = "model", **options: Unpack[ElasticOptions]
    ) -> ElasticOptimizer:
        """Let a small group step ``optimizer``, whose members need not wait for all gradients; see `ElasticOptimizer`.

        It waits until the group is complete; all members begin with the first one's parameters. Calling it again for
        a name leaves the former group.

        Args:
            optimizer: a torch optimizer over the model's parameters; all members use the same kind and settings.
            peers: members of the group, this one included, 2 to 16.
            name: of the group; tells several models of one run apart.
            **options: ``scheduler`` (see `colab_swarm.elastic`), ``codec``, ``error_feedback``, ``wait_s``: see
                `ElasticSettings`. All members use the same.

        Raises:
            ValueError: a setting is not usable, or the others' differ.
            PermissionError: this peer joined as a viewer or reducer.
            StateError: the group did not come together.
        """
        from colab_swarm.elastic.group import PeerGroup
        from colab_swarm.elastic.optimizer import ElasticOptimizer
        from colab_swarm.elastic.settings import ElasticSettings

        settings = ElasticSettings(f"{self.run_id}/elastic/{name}", peers, **options)
        self._check_here()
        self._check_role()
        if name in self._elastic:
            self._elastic.pop(name).close()
        mine = self._services
        entrance = PeerGroup(mine)
        elastic = ElasticOptimizer(self._runtime, optimizer, settings, entrance, mine.events, mine.pace)
        self._elastic[name] = elastic
        return elastic

    def consistency_meter(self, name: str = "model") -> Panel[ElasticSnapshot]:
        """A live view of how far this member of an elastic group is off, beside the bound that theory gives.

        In a training loop, call its ``tick()`` after each step. It warns when the bound is passed.

        Raises:
            KeyError: there is no elastic optimizer of this name.
        """
        from colab_swarm.widgets import consistency
        from colab_swarm.widgets.panel import Panel, Views

        elastic = self._elastic[name]
        texts = (consistency.render_html, consistency.render_text, consistency.summary)
        views: Views[ElasticSnapshot] = Views(*texts, lambda snapshot: snapshot.left, stops=True)
        return Panel(elastic.snapshot, elastic.close, views=views)

    def average(
        self,
        values: Any,
        *,
        weight: float = 1.0,
        group_size: int | None = None,
        name: str = "values",
        codec: str = "float32",
    ) -> tuple[Any, GridResult]:
        """The mean of an array over all who call this at about the same time, and what became of it.

        Args:
            values: a NumPy array or torch tensor; the same length for all.
            weight: of this peer's values; 0: only receive.
            group_size: of the groups that average in turn; None: as failures and times suggest.
            name: tells several averages apart.
            codec: on the wire, one per name; onebit and topk drop most of the values for good.

        Raises:
            ValueError: values, weight, group_size or codec are not usable.
            PermissionError: this peer joined as a viewer or reducer.
        """
        self._check_here()
        self._check_role()
        average = self._averages.average(values, weight=weight, group_size=group_size, name=name, codec=codec)
        try:
            return self._runtime.call(average)
        except KeyboardInterrupt:
            print("Interrupted. Others may have counted your values; call average() again for another mean.")
            raise

    def assist(self, name: str | None = None) -> Assistance:
        """Help others train: organize their rounds, reduce, hand on the state to newcomers. Needs no torch.

        It lets peers that only dial out train together. Calling it again replaces the former one.

        Args:
            name: of the only model to help with, as given to `optimizer`; None: every model of the run.
        """
        from colab_swarm.training.assistant import Assistance, Assistant

        self._check_here()
        if self.assistance is not None:
            self.assistance.stop()
        assistant = Assistant(self._services, self.run_id, name=self.name, collaboration=name)
        self.assistance = Assistance(self._runtime, assistant)
        return self.assistance

    def _check_here(self) -> None:
        if self.left:
            raise RuntimeError("this peer has left its swarm: cs.resume(folder) or cs.join(…) brings it back")
