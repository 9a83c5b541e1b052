"""One peer, several processes: the GPUs of one host train as one peer through `torch.distributed`.

Only rank 0 talks to the swarm. In each ``step()``, the ranks sum their gradients on their devices, and rank 0 counts
the sum as one micro-batch. If this changes the parameters of rank 0, rank 0 sends them to all ranks. All ranks must
make the same calls in the same order.

Each rank drops those of its own gradients that are not finite. With float16 each rank has its own gradient scale.
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
from colab_swarm.tensors.device import Flag, carry_numbers, floats_of
from colab_swarm.training.buffers import averaged_by_name, buffers_of
from colab_swarm.training.flat import FlatValues, GradientSum, clear_gradients, set_gradients, trained_by
from colab_swarm.training.gradients import MeanLoss, finite_gradients, require_gradient
from colab_swarm.training.optimizer import SwarmOptimizer, loss_of
from colab_swarm.training.replica import WrappedOptimizer
from colab_swarm.training.schedule import NO_SCHEDULER_HERE
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.state import CheckpointFolder

logger = logging.getLogger(__name__)
_LEAD = 0
# Numbers in a rank's counts: samples dropped, the weighted sum of the losses, the weight that has a loss, samples, and
# the weight of the samples.
_COUNTS = 5


@dataclass(frozen=True)
class _Update:
    step: int = 0
    lineage: bytes = b""
    result: RoundResult | None = None
    changed: bool = False  # whether the parameters of rank 0 changed; it sends this after each call
    error: str = ""


class RankSum:
    """A rank's gradients and their counts, on the model's devices; after a reduction, rank 0 has the sums of all ranks.

    Only `to_gradients` reads from a device or waits for it.

    Attributes:
        tensors: the tensors that the ranks sum: the gradients times their weights and, as the last tensor, the counts.
            The counts include, for each parameter, how many ranks had a gradient.
    """

    def __init__(self, parameters: list[torch.Tensor], rank: int) -> None:
        self._parameters = parameters
        self._rank = rank
        self._gradient = FlatValues(parameters)
        device = parameters[0].device
        self._counts = torch.zeros(_COUNTS + len(parameters), dtype=torch.float32, device=device)
        self.tensors = [*self._gradient.segments, self._counts]
        self._check: tuple[Flag, float] | None = None  # is the newest gradient finite, and its samples

    def gather(
        self,
        samples: float,
        weight: float,
        loss: float | torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> None:
        """Take this rank's gradient, a mean times ``scale``; it counts if it is finite and ``samples`` is not 0."""
        self.read_check()
        self._counts.zero_()
        total = GradientSum(self._gradient)
        if samples:
            finite = finite_gradients(self._parameters)
            self._check = finite, samples
            total.add_gradients(self._parameters, weight=weight, scale=scale, counts=finite.value)
            if loss is not None:
                losses = MeanLoss()
                losses.add(loss, weight, finite.value)
                self._counts[1], self._counts[2] = losses.sums
            counts = finite.value.to(self._counts.device)
            self._counts[0] = counts.logical_not() * samples
            used = [float(parameter.grad is not None) for parameter in self._parameters]
            self._counts[3:] = carry_numbers([samples, weight, *used], counts.device) * counts
        # Each rank's sum gets the factor 1, so that the sums of the ranks can be added.
        total.mean(1.0)
        clear_gradients(self._parameters)

    def read_check(self) -> None:
        """Warn if the gradient of the last call was not finite; reading it only now, no call waits for the device."""
        if self._check is not None:
            finite, samples = self._check
            self._check = None
            if not finite.read():
                text = "rank %d: a gradient of %g samples is not finite (NaN or Inf)"
                logger.warning(text, self._rank, samples)

    def to_gradients(self) -> tuple[float, float, float | None]:
        """Set the parameters' gradients to the mean over all ranks; return the mean's samples, weight and loss."""
        counts = floats_of(self._counts)
        dropped, losses, losses_weight, samples, weight = map(float, counts[:_COUNTS])
        # A parameter that no rank used stays as it is, as in one process.
        unused = [count == 0.0 for count in counts[_COUNTS:]]
        divisor = weight or 1.0
        loss = losses / losses_weight if losses_weight else None
        if dropped and not samples:
            # The swarm's optimizer drops this NaN, and reports it.
            samples = dropped
            divisor = math.nan
            loss = math.nan
            unused = []
        self._gradient.multiply(1 / divisor)
        set_gradients(self._parameters, self._gradient, unused, shared=True)
        return samples, weight, loss


class HostOptimizer(WrappedOptimizer):
    """One rank's optimizer in a peer of several processes: use it like a `SwarmOptimizer`, on all ranks alike.

    On rank 0, ``param_groups``, ``state``, ``defaults`` and ``state_dict()`` are those of its `SwarmOptimizer`. Another
    rank shows its own optimizer, which takes no step. Step hooks are called on rank 0 only.

    A `GradScaler` works as with any optimizer: call ``scaler.step(optimizer, samples=…)``, then ``scaler.update()``.
    If a framework calls ``step()``, ``scaler.unscale_(optimizer)`` comes before it, and ``scaler.update()`` after it.
    """

    made_by = "host_optimizer(…)"
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
        """Use `host_optimizer` instead of this constructor. ``begin`` joins the swarm, on rank 0."""
        self.lead: SwarmOptimizer | None = None  # stays None on all ranks except rank 0
        self.global_step = 0
        self.lineage = b""
        self._settings = settings
        self._model = model
        self._buffer_names = list(averaged_by_name(model))
        self._parameters = trained_by(optimizer)
        self._sum = RankSum(self._parameters, dist.get_rank())
        self._sent: object = None  # version of the parameters that rank 0 sent last
        self._timeout = timedelta(seconds=timeout_s)
        self._messages = dist.new_group(backend="gloo", timeout=self._timeout)
        self._tensors = self._messages
        if self._places() == {"cuda"} and dist.is_nccl_available():
            self._tensors = dist.new_group(backend="nccl", timeout=self._timeout)

        def enter() -> None:
            if begin is not None:
                self.lead = begin()

        self._follow_lead(enter)
        wrapped = self.lead or optimizer
        super().__init__(wrapped, wrapped)

    def _places(self) -> set[str]:
        """Return the device types of all ranks' sums; raises ValueError if the sums of two ranks differ in size."""
        own = [(values.device.type, len(values)) for values in self._sum.tensors]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own, group=self._messages)
        sizes = [[size for _, size in places] for places in ranks]
        text = f"the ranks sum {sizes} values: give all ranks equal models, spread over their devices alike"
        require(all(size == sizes[0] for size in sizes), text)
        return {place for places in ranks for place, _ in places}

    def __setattr__(self, name: str, value: object) -> None:
        # A torch scheduler replaces the step of its optimizer.
        if hasattr(value, "_wrapped_by_lr_sched"):
            if self.lead is not None:
                # This raises an error, and undoes what the scheduler has changed.
                setattr(self.lead, name, value)
            raise ValueError(NO_SCHEDULER_HERE)
        super().__setattr__(name, value)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float | torch.Tensor] | None = None,
        *,
        samples: float | None = None,
        weight: float | None = None,
        loss: float | torch.Tensor | None = None,
    ) -> RoundResult | None:
        """Count this rank's gradient: see `SwarmOptimizer.step`. All ranks get the result.

        Pass ``samples=0`` if there is no batch for this rank; such a rank scales no loss and updates no `GradScaler`.
        A rank whose gradient is not finite adds nothing, and warns at its next call. If no rank has a finite gradient,
        nothing counts.

        Raises `HostError` if another rank failed or did not respond in time, `StepError` if a number is missing or a
        batch has no gradient, and on rank 0 `ValueError` if no rank has samples.
        """
        if closure is not None:
            loss = loss_of(closure)
        if samples is None:
            samples = self._settings.batch_size
        if samples == 0:
            weight = 0.0
        else:
            samples, weight = self._settings.counted(samples, weight)
        if samples:
            require_gradient(self._parameters)
        self._sum.gather(samples, weight, loss, getattr(self, "grad_scale", None))
        try:
            # The barrier's error names the missing rank. A reduction's would not, and NCCL's would end the process.
            dist.monitored_barrier(self._messages, timeout=self._timeout)
            for values in self._sum.tensors:
                dist.reduce(values, _LEAD, group=self._tensors)
        except RuntimeError as error:
            raise self._lost("the ranks' gradients were not summed", error) from error
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
        self._sum.read_check()
        if self.lead is not None:
            self.lead.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank 0's `SwarmOptimizer`; on another rank, the empty state of its own optimizer."""
        return self._saved(self._wrapped.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of rank 0's `state_dict`; load its parameters into the model before. Every rank calls this."""
        self._follow_lead(lambda: self._load(state_dict, self._leading().load_state_dict))

    def _mode(self, name: str) -> Callable[[], object]:
        return partial(self._follow_lead, super()._mode(name))

    def _step(self) -> RoundResult | None:
        samples, total_weight, loss = self._sum.to_gradients()
        weight = None if self._settings.weight_unit == "samples" else total_weight
        try:
            return self._leading().step(samples=samples, weight=weight, loss=loss)
        finally:
            # Otherwise a backward pass after an error would add to the old sum; the next call begins a new sum.
            clear_gradients(self._parameters)

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
                # Tensor versions show updates between the swarm's steps; the lineage shows all other updates.
                version = (lead.lineage, [parameter._version for parameter in self._parameters])
                own = _Update(lead.global_step, lead.lineage, result, changed=version != self._sent)
            except BaseException as error:  # also an interrupt: the others must not wait for this rank
                self._exchange(_Update(error=f"{type(error).__name__}: {error}"))
                raise
        update = self._exchange(own)
        self._sent = version
        if update.error:
            raise HostError(f"rank {_LEAD}, which talks to the swarm, failed: {update.error}")
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
            if not update.changed:
                return update
            device = self._parameters[0].device
            for tensor in (*self._parameters, *buffers_of(self._model, self._buffer_names)):
                values = tensor.detach().to(device).contiguous()
                # As bytes: gloo has no bool.
                dist.broadcast(values.view(-1).view(torch.uint8), _LEAD, group=self._tensors)
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

    Do not wrap the model in `DistributedDataParallel`, because this optimizer sums the gradients. On GPUs without
    bfloat16, such as Kaggle's two T4, each rank has its own `GradScaler`::

        with torch.autocast("cuda", torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer, samples=…)
        scaler.update()

    Args:
        swarm: this peer's `Swarm` on rank 0, None on the other ranks.
        optimizer: an optimizer over equal parameters, in the same order on all ranks; rank 0's optimizer takes the
            steps.
        model: the model that has these parameters, on every rank. The swarm averages rank 0's buffers, as with
            `DistributedDataParallel`, and all ranks get them when the parameters change. So BatchNorm's statistics
            are those of rank 0's batches. For statistics over all ranks, use `torch.nn.SyncBatchNorm`, and give each
            rank a batch.
        timeout_s: maximum time that a rank waits for another rank. It must include a long evaluation, and catching up.
        target_batch_size, settings: as in `Swarm.optimizer`. Rank 0's values count, but each rank uses its own
            ``batch_size`` and ``weight_unit``.

    Raises `RuntimeError` if there is no process group, `ValueError` if rank 0 has no swarm or
    another rank has one, `HostError` if another rank failed, and what `Swarm.optimizer` raises.
    """
    text = "call torch.distributed.init_process_group(…) first; torchrun sets its environment"
    require(dist.is_initialized(), text, RuntimeError)
    text = "only rank 0 talks to the swarm: give it the swarm, and None to all other ranks"
    require((swarm is None) is not (dist.get_rank() == _LEAD), text)
    begin = None
    if swarm is not None:
        begin = partial(
            swarm.optimizer, optimizer, target_batch_size=target_batch_size, model=model, **settings
        )
    counting = {name: settings[name] for name in ("batch_size", "weight_unit") if name in settings}
    counts = TrainingSettings("", target_batch_size, **counting)
    return HostOptimizer(optimizer, begin, counts, model=model, timeout_s=timeout_s)
