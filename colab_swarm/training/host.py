"""One peer, several processes: the GPUs of one host train as one peer through `torch.distributed`.

Only rank 0 talks to the swarm. It sums the ranks' gradients as one micro-batch; if that changed its
parameters, all ranks get them. All ranks make the same calls in the same order.

A gradient that is not finite is dropped at its rank: with float16 each rank has a scale of its own.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from colab_swarm.averaging.result import RoundResult
from colab_swarm.errors import HostError, require
from colab_swarm.training.buffers import buffer_names, buffers_of
from colab_swarm.training.flat import trained_by
from colab_swarm.training.gradients import finite_gradients, require_gradient
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.state import CheckpointFolder

logger = logging.getLogger(__name__)
_LEAD = 0
_COUNTS = 5  # samples, their weight, samples dropped, the sum of the losses by weight, the weight with a loss


@dataclass(frozen=True)
class _Update:
    step: int = 0
    lineage: bytes = b""
    result: RoundResult | None = None
    changed: bool = False  # the parameters of rank 0, which sends this after each call
    error: str = ""


class HostOptimizer:
    """A rank's part in a peer: use it like a `SwarmOptimizer`, in the same way on all ranks.

    A `GradScaler` steps it as any optimizer: ``scaler.step(optimizer, samples=…)``, then ``scaler.update()``. Where a
    framework steps, ``scaler.unscale_(optimizer)`` comes first, and ``scaler.update()`` last.
    """

    _step_supports_amp_scaling = True  # a GradScaler sets grad_scale and skips no step: the other ranks wait
    grad_scale: torch.Tensor | None

    def __init__(
        self,
        optimizer: Optimizer,
        begin: Callable[[], SwarmOptimizer] | None,
        settings: TrainingSettings,
        *,
        model: torch.nn.Module | None = None,
        timeout_s: float,
    ) -> None:
        """Use `host_optimizer`. ``begin`` joins the swarm, on rank 0."""
        self.lead: SwarmOptimizer | None = None  # on the other ranks
        self.global_step = 0
        self.lineage = b""
        self._settings = settings
        self._model = model
        self._buffer_names = buffer_names(model)
        self._parameters = trained_by(optimizer)
        sizes = [parameter.numel() for parameter in self._parameters]
        # The sum of the gradients and the `_COUNTS`.
        self._sum = torch.zeros(sum(sizes) + _COUNTS, device=self._parameters[0].device)
        views = zip(self._parameters, torch.split(self._sum[:-_COUNTS], sizes), strict=True)
        self._parts = [(parameter, part.view(parameter.shape)) for parameter, part in views]
        self._sent: object = None  # version of the parameters that the others have
        self._timeout = timedelta(seconds=timeout_s)
        self._messages = dist.new_group(backend="gloo", timeout=self._timeout)
        self._tensors = dist.new_group(timeout=self._timeout)

        def enter() -> None:
            if begin is not None:
                self.lead = begin()

        self._follow_lead(enter)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters of the model, for ``scaler.unscale_(optimizer)``."""
        return [{"params": self._parameters}]

    @torch.no_grad()
    def step(
        self,
        *,
        samples: float | None = None,
        weight: float | None = None,
        loss: float | torch.Tensor | None = None,
    ) -> RoundResult | None:
        """Count this rank's gradient: see `SwarmOptimizer.step`. All ranks get the result.

        ``samples`` is 0 if there is no batch for this rank, which then scales no loss and updates no
        `GradScaler`. A rank whose gradient is not finite adds nothing; if no rank has another one, nothing counts.

        Raises `HostError` if another rank failed, or did not respond in time, `ValueError` if a number is
        missing or, on rank 0, if no rank has samples, and `RuntimeError` if a batch has no gradient.
        """
        if samples is None:
            samples = self._settings.batch_size
        if samples == 0:
            weight = 0.0
        else:
            samples, weight = self._settings.counted(samples, weight)
        if samples:
            require_gradient(self._parameters)
        self._gather(samples, weight, loss)
        return self._follow_lead(self._step)

    def wait_step(self, timeout_s: float = 600.0) -> RoundResult | None:
        text = f"timeout_s={timeout_s:g}: the ranks wait {self._timeout} for each other; wait less"
        require(timeout_s < self._timeout.total_seconds(), text)
        return self._follow_lead(lambda: self._leading().wait_step(timeout_s))

    def load(self, source: str | Path | CheckpointFolder) -> None:
        """Continue from a checkpoint that rank 0 reads; every rank calls it."""
        self._follow_lead(lambda: self._leading().load(source))

    def save(self, target: str | Path | CheckpointFolder) -> None:
        """Write a checkpoint on rank 0."""
        if self.lead is not None:
            self.lead.save(target)

    def close(self) -> None:
        """Leave the collaboration; the model keeps its parameters. No rank waits for another."""
        if self.lead is not None:
            self.lead.close()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _gather(self, samples: float, weight: float, loss: float | torch.Tensor | None) -> None:
        total = self._sum.zero_()
        if samples and finite_gradients(self._parameters).read():
            for parameter, part in self._parts:
                if parameter.grad is not None:
                    part.add_(parameter.grad, alpha=weight)
            scale = getattr(self, "grad_scale", None)
            if scale is not None:
                total.div_(scale)
            losses = 0.0
            losses_weight = 0.0
            if loss is not None:
                mean_loss = float(torch.as_tensor(loss).mean())
                if math.isfinite(mean_loss):
                    losses = mean_loss * weight
                    losses_weight = weight
            total[-_COUNTS:] = torch.tensor([samples, weight, 0.0, losses, losses_weight])
        elif samples:
            logger.warning(
                "rank %d: a gradient of %g samples is not finite (NaN or Inf)", dist.get_rank(), samples
            )
            total[-_COUNTS + 2] = samples
        self.zero_grad()
        try:
            # The barrier names the missing rank; a reduction would not, and NCCL's would end the process.
            dist.monitored_barrier(self._messages, timeout=self._timeout)
            dist.reduce(total, _LEAD, group=self._tensors)
        except RuntimeError as error:
            raise self._lost("the ranks' gradients were not summed", error) from error

    def _step(self) -> RoundResult | None:
        samples, weight, dropped, losses, losses_weight = self._sum[-_COUNTS:].tolist()
        divisor = weight or 1.0
        loss = None
        if dropped and not samples:  # a NaN, which the swarm's optimizer drops
            samples = dropped
            divisor = math.nan
            loss = math.nan
        for parameter, part in self._parts:
            parameter.grad = part.div_(divisor).to(parameter.dtype)
        if losses_weight:
            loss = losses / losses_weight
        if self._settings.weight_unit == "samples":
            weight = None
        return self._leading().step(samples=samples, weight=weight, loss=loss)

    def _leading(self) -> SwarmOptimizer:
        assert self.lead is not None
        return self.lead

    def _follow_lead(self, act: Callable[[], RoundResult | None]) -> RoundResult | None:
        own: _Update | None = None
        version = self._sent
        if dist.get_rank() == _LEAD:
            try:
                result = act()
                lead = self._leading()
                # Tensor versions show updates between the swarm's steps, the lineage all others.
                version = (lead.lineage, [parameter._version for parameter in self._parameters])
                own = _Update(lead.global_step, lead.lineage, result, changed=version != self._sent)
            except BaseException as error:  # also an interrupt: the others must not wait for this rank
                self._exchange(_Update(error=f"{type(error).__name__}: {error}"))
                raise
        update = self._exchange(own)
        self._sent = version
        require(
            not update.error, f"rank {_LEAD}, which talks to the swarm, failed: {update.error}", HostError
        )
        self.global_step = update.step
        self.lineage = update.lineage
        return update.result

    @torch.no_grad()
    def _exchange(self, own: _Update | None) -> _Update:
        box = [own]
        try:
            dist.broadcast_object_list(box, _LEAD, group=self._messages)
            update = box[0]
            assert update is not None
            sent: list[torch.Tensor] = []
            if update.changed:
                sent = [*self._parameters, *buffers_of(self._model, self._buffer_names)]
            for tensor in sent:
                values = tensor.detach().to(self._sum.device).contiguous()
                dist.broadcast(values, _LEAD, group=self._tensors)
                if own is None:
                    tensor.copy_(values)
        except RuntimeError as error:
            raise self._lost(f"rank {_LEAD} could not send its result to the others", error) from error
        return update

    def _lost(self, what: str, error: RuntimeError) -> HostError:
        rank = dist.get_rank()
        reason = str(error).partition("\n")[0]
        return HostError(
            f"{what}: at rank {rank} a rank is missing that has died, failed, or did not respond "
            f"within {self._timeout.total_seconds():g} s; its own output shows why. "
            f"Start all ranks again. ({reason})"
        )

    def __repr__(self) -> str:
        return f"HostOptimizer(rank {dist.get_rank()} of {dist.get_world_size()}, step={self.global_step})"


def host_optimizer(
    swarm: Any,
    optimizer: Optimizer,
    *,
    target_batch_size: int,
    model: torch.nn.Module | None = None,
    timeout_s: float = 1800.0,
    **settings: Any,
) -> HostOptimizer:
    """Make one peer of all processes of a `torch.distributed` job; every rank calls it after ``init_process_group``.

    Do not wrap the model in `DistributedDataParallel`: gradients are summed here. On GPUs without bfloat16,
    such as Kaggle's two T4, each rank has a `GradScaler` of its own::

        with torch.autocast("cuda", torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer, samples=…)
        scaler.update()

    Args:
        swarm: this peer's `Swarm` on rank 0, None on the others.
        optimizer: over equal parameters in the same order on all ranks; that of rank 0 steps.
        model: whose parameters these are, at every rank. The swarm averages rank 0's buffers, as with
            `DistributedDataParallel`; all ranks get them when the parameters change. So BatchNorm's statistics
            are of rank 0's batches; those of all ranks need `torch.nn.SyncBatchNorm`, and a batch at each rank.
        timeout_s: longest time that one rank waits for another, a long evaluation or catching up included.
        target_batch_size, settings: those of `Swarm.optimizer`; only rank 0's count, but for each rank's
            ``batch_size`` and ``weight_unit``.

    Raises `RuntimeError` if there is no process group, `ValueError` if rank 0 has no swarm or
    another rank has one, `HostError` if another rank failed, and what `Swarm.optimizer` raises.
    """
    text = "call torch.distributed.init_process_group(…) first; torchrun sets its environment"
    require(dist.is_initialized(), text, RuntimeError)
    text = "only rank 0 talks to the swarm: give it the swarm, and None to all other ranks"
    require((swarm is None) is not (dist.get_rank() == _LEAD), text)
    chosen = {"target_batch_size": target_batch_size, "model": model, **settings}
    begin = None
    if swarm is not None:
        begin = partial(swarm.optimizer, optimizer, **chosen)
    counting = {name: settings[name] for name in ("batch_size", "weight_unit") if name in settings}
    counts = TrainingSettings("", target_batch_size, **counting)
    return HostOptimizer(optimizer, begin, counts, model=model, timeout_s=timeout_s)
