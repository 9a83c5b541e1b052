"""`Swarm`: one peer's membership in a run."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from colab_swarm.errors import PeerError
from colab_swarm.member import Who
from colab_swarm.moe.grid import Grid
from colab_swarm.notebook_face import NotebookFace
from colab_swarm.presence import Presence
from colab_swarm.runtime import Runs
from colab_swarm.training.settings import Services

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from colab_swarm.jobs.coordinator import Coordinator, CoordinatorOptions
    from colab_swarm.jobs.in_swarm import WorkInSwarm
    from colab_swarm.jobs.volunteer import Volunteer
    from colab_swarm.moe.expert import ExpertRule
    from colab_swarm.moe.experts import HostOptions, MixtureOptions, SwarmExperts
    from colab_swarm.moe.host import ExpertHost
    from colab_swarm.moe.layer import MixtureOfExperts
    from colab_swarm.moe.remote import RemoteExpert
    from colab_swarm.moe.snapshot import ExpertsSnapshot
    from colab_swarm.moe.trainer import AsyncTrainer
    from colab_swarm.widgets.panel import Panel
    from colab_swarm.workunits.job import Job

logger = logging.getLogger(__name__)


class Swarm(NotebookFace):
    """One peer's membership in a run. Use `create`, `join` or `simulate` to get one."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        super().__init__(runtime, services, **who)
        self._experts: SwarmExperts | None = None
        self._leaving = threading.RLock()

    def host_experts(
        self,
        prefix: str,
        make_expert: Callable[[], nn.Module],
        *,
        grid: Sequence[int],
        count: int | Sequence[str] | None = None,
        sample: Sequence[int] | None = None,
        rule: ExpertRule | None = None,
        **options: Unpack[HostOptions],
    ) -> ExpertHost:
        """Host experts of a mixture on this machine's accelerator, or CPU; see `ExpertHost`.

        Calling it again for a prefix replaces the former host. Experts whose hosts died go on from their last save.

        Args:
            prefix: names the kind of experts.
            make_expert: makes one: ``lambda: cs.FeedForward(512)``, or any module from (n, *sample) to the same shape.
            grid: how many experts each dimension of the grid has room for; the same for all peers.
            count: how many, or which by name (``["ffn.0.3"]``); None: as many as fit, with the arithmetic printed.
            sample: shape of one sample; -1: any length. The experts that ship know theirs.
            rule: how each expert learns; Adam with learning rate 1e-3 if left out.
            **options: ``folder``, ``copies``, ``spare``, ``save_s``, ``takeover_s``: see `HostOptions`.

        Raises:
            ValueError: the module cannot be an expert, or an argument is not usable.
            PermissionError: this peer joined as a viewer or reducer.
        """
        self._check_role()
        how_many = count if isinstance(count, int) else None
        uids = None if isinstance(count, int) else count
        return self._use_experts().host(
            Grid.of(prefix, grid),
            make_expert,
            sample=sample,
            rule=rule,
            count=how_many,
            uids=uids,
            options=options,
        )

    def mixture_of_experts(
        self, prefix: str, dim: int, *, grid: Sequence[int], k: int = 4, **options: Unpack[MixtureOptions]
    ) -> MixtureOfExperts:
        """A layer (..., dim) -> (..., dim) whose experts are hosted by the swarm; see `MixtureOfExperts`.

        Args:
            prefix, grid: as given to `host_experts`.
            dim: of the inputs' last dimension.
            k: experts asked per sample.
            **options: ``k_min``, ``grace_s``, ``sequences``, ``reject_outliers``, ``codec``, ``timeout_s``: see
                `MixtureOptions`.

        Raises:
            ValueError: an argument is not usable.
        """
        return self._use_experts().mixture(Grid.of(prefix, grid), dim, k=k, options=options)

    def expert(
        self, uid: str, *, grid: Sequence[int], codec: str = "float32", timeout_s: float = 30.0
    ) -> RemoteExpert:
        """One expert, such as ``ffn.3.7``, as a module; it learns when you call ``backward()``."""
        prefix = uid.rsplit(".", len(grid))[0]
        return self._use_experts().remote(Grid.of(prefix, grid), uid, codec=codec, timeout_s=timeout_s)

    def experts_panel(self, prefix: str, *, grid: Sequence[int]) -> Panel[ExpertsSnapshot]:
        """A live map of the swarm's experts: where they live, how much each is used, and those of this peer at work.

        Args:
            prefix, grid: as given to `host_experts`.

        Raises:
            ValueError: an argument is not usable.
        """
        from colab_swarm.widgets.experts import VIEWS
        from colab_swarm.widgets.panel import Panel

        return Panel(self._use_experts().watch(Grid.of(prefix, grid)).snapshot, self.leave, views=VIEWS)

    def _use_experts(self) -> SwarmExperts:
        from colab_swarm.moe.experts import SwarmExperts
        from colab_swarm.moe.services import ExpertServices
        from colab_swarm.widgets.experts import host_panel

        self._check_here()
        if self._experts is None:
            mine = self._services
            services = ExpertServices(mine.peers, mine.dht, mine.events, mine.rng, self.run_id, mine.gate)
            self._experts = SwarmExperts(self._runtime, services, host_panel)
        return self._experts

    def trainer(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: Optimizer,
        **settings: Any,
    ) -> AsyncTrainer[Any]:
        """Train with many batches in flight, so that slow experts keep nobody waiting; see `AsyncTrainer`.

        Args:
            model: holds mixtures of experts somewhere inside.
            loss: of a copy of the model and a batch.
            optimizer: of the model's own parameters; may be what `optimizer` gives.
            **settings: see `TrainerSettings`: ``concurrency``, ``max_grad_norm``, ``patience_s``, ``progress``,
                ``on_update``.

        Raises:
            RuntimeError: in a simulation, whose peers have one thread each.
        """
        from colab_swarm.moe.trainer import AsyncTrainer, TrainerSettings

        if self._presence is None:
            raise RuntimeError("a simulated peer has one thread: there, write the training loop yourself")
        return AsyncTrainer(model, loss, optimizer, TrainerSettings(**settings))

    def coordinate(self, job: Job | str | Path, **options: Unpack[CoordinatorOptions]) -> Coordinator:
        """Hand out a job in work units (VC-ASGD) to peers of this swarm, and to whoever has the coordinator's link.

        Args:
            job: a `Job`, or the file that defines one.
            **options: ``folder``, ``store``, ``servers``, ``host``, ``port``, ``url``, ``tunnel``: see
                `CoordinatorOptions`.

        Raises:
            FileNotFoundError, ValueError, TypeError, StoreError, OSError: see `coordinate`.
            PermissionError: this peer joined as a viewer or reducer, or in a simulation.
        """
        self._check_role()
        coordinator = self._work().coordinate(job, options)
        self.at_session_end(coordinator.stop)
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
        """Train work units for the swarm's coordinator; see `cs.volunteer`, which needs no swarm but a link.

        Raises:
            JoinError: nobody coordinates in this swarm, or does not answer.
            ValueError: the coordinator's code is not trusted yet, or ``job`` is another job.
            PermissionError: this peer joined as a viewer or reducer, or in a simulation.
        """
        self._check_role()
        volunteer = self._work().volunteer(
            job=job, trust_code=trust_code, units=units, folder=folder, device=device
        )
        self.at_session_end(volunteer.stop)
        return volunteer

    def _work(self) -> WorkInSwarm:
        from colab_swarm.jobs.in_swarm import WorkInSwarm

        self._check_here()
        entrance = self._require_real().entrance
        return WorkInSwarm(self._runtime, self._services, entrance, self.name)

    # --- leaving --------------------------------------------------------------------------------------------------

    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links, whatever fails on the way; the failure is raised then. Idempotent.

        Args:
            hand_over_s: how long to wait for a last round, so that gradients accumulated here are not lost.
        """
        with self._leaving:  # a button, the session's end and a cell may all leave at the same moment
            if self.left:
                return
            with contextlib.ExitStack() as parts:  # it closes what came last first
                for close in reversed(self._closings(hand_over_s)):
                    parts.callback(close)

    def _closings(self, hand_over_s: float) -> list[Callable[[], object]]:
        """What closes this peer's parts, in this order."""
        call = self._runtime.call
        closings: list[Callable[[], object]] = []
        for optimizer in self._optimizers.values():
            closings.append(partial(optimizer.close, hand_over_s=hand_over_s))
        closings += [elastic.close for elastic in self._elastic.values()]
        if self._experts is not None:
            closings.append(self._experts.close)
        closings.append(self._turn_away)
        if self.assistance is not None:
            closings.append(self.assistance.stop)
        closings.append(lambda: call(self._averages.close()))
        closings.append(lambda: call(_close(self._services, self._presence)))
        closings.append(self._end_recording)
        return closings

    def _turn_away(self) -> None:
        """Let nobody use this peer any more."""
        self.left = True
        self._services.gate.release()  # a paused trainer would wait for ever

    def vanish(self) -> None:
        """End like a process that is killed: no farewell. For simulated crashes, on the runtime's loop."""
        self.left = True
        for optimizer in self._optimizers.values():
            optimizer.collaboration.vanish()
        for elastic in self._elastic.values():
            elastic.vanish()
        if self.assistance is not None:
            self.assistance.vanish()
        if self._experts is not None:
            self._experts.vanish()
        self._services.dht.vanish()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


async def _close(services: Services, presence: Presence | None) -> None:
    try:
        if presence is not None:
            await presence.leave()
        else:
            with contextlib.suppress(PeerError):
                await services.dht.stop()
            await services.averager.close()
    finally:  # an interrupt leaves no link open
        await services.peers.close()
