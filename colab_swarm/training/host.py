"""One peer, several processes: the GPUs of one host train as one peer through `torch.distributed`.

Only rank 0 talks to the swarm. It sums the ranks' gradients as one micro-batch; if that changed its
parameters, all ranks get them. All ranks make the same calls in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from colab_swarm.averaging.round import RoundResult
from colab_swarm.errors import HostError, require
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.replica import trained_by
from colab_swarm.training.state import CheckpointFolder

LEAD = 0


@dataclass(frozen=True)
class _Update:
    step: int = 0
    lineage: bytes = b""
    result: RoundResult | None = None
    changed: bool = False  # the parameters of rank 0, which sends this after each call
    error: str = ""


class HostOptimizer:
    """A rank's part in a peer: use it like a `SwarmOptimizer`, in the same way on all ranks."""

    def __init__(
        self, optimizer: Optimizer, begin: Callable[[], SwarmOptimizer] | None, *, timeout_s: float
    ) -> None:
        """Use `host_optimizer`. ``begin`` joins the swarm, on rank 0."""
        self.lead: SwarmOptimizer | None = None  # on the other ranks
        self.global_step, self.lineage = 0, b""
        self._parameters = trained_by(optimizer)
        sizes = [parameter.numel() for parameter in self._parameters]
        # The sum of the gradients; the samples; the sum of the losses, and the samples with a loss.
        self._sum = torch.zeros(sum(sizes) + 3, device=self._parameters[0].device)
        views = zip(self._parameters, torch.split(self._sum[:-3], sizes), strict=True)
        self._parts = [(parameter, part.view(parameter.shape)) for parameter, part in views]
        self._sent: object = None  # version of the parameters that the others have
        self._timeout = timedelta(seconds=timeout_s)
        self._messages = dist.new_group(backend="gloo", timeout=self._timeout)
        self._tensors = dist.new_group(timeout=self._timeout)

        def enter() -> None:
            self.lead = begin() if begin else None

        self._follow_lead(enter)

    @torch.no_grad()
    def step(self, *, samples: float, loss: float | None = None) -> RoundResult | None:
        """See `SwarmOptimizer.step`. All ranks get the result.

        ``samples`` is 0 if there is no batch for this rank. Raises `HostError` if another rank
        failed, or did not respond in time, and `ValueError`, on rank 0, if no rank has samples.
        """
        self._gather(float(samples), loss)
        return self._follow_lead(self._step)

    def wait_step(self, timeout_s: float = 600.0) -> RoundResult | None:
        require(
            timeout_s < self._timeout.total_seconds(),
            f"timeout_s={timeout_s:g}: the ranks wait {self._timeout} for each other; wait less",
        )
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

    def _gather(self, samples: float, loss: float | None) -> None:
        total = self._sum.zero_()
        if samples:
            for parameter, part in self._parts:
                if parameter.grad is not None:
                    part.add_(parameter.grad, alpha=samples)
            losses = (0.0, 0.0) if loss is None else (loss * samples, samples)
            total[-3:] = torch.tensor([samples, *losses])
        self.zero_grad()
        try:
            # The barrier names the missing rank; a reduction would not, and NCCL's would end the process.
            dist.monitored_barrier(self._messages, timeout=self._timeout)
            dist.reduce(total, LEAD, group=self._tensors)
        except RuntimeError as error:
            raise self._lost("the ranks' gradients were not summed", error) from error

    def _step(self) -> RoundResult | None:
        samples, losses, of_samples = self._sum[-3:].tolist()
        for parameter, part in self._parts:
            parameter.grad = part.div_(samples or 1.0).to(parameter.dtype)
        return self._leading().step(samples=samples, loss=losses / of_samples if of_samples else None)

    def _leading(self) -> SwarmOptimizer:
        assert self.lead is not None
        return self.lead

    def _follow_lead(self, act: Callable[[], RoundResult | None]) -> RoundResult | None:
        own: _Update | None = None
        version = self._sent
        if dist.get_rank() == LEAD:
            try:
                result, lead = act(), self._leading()
                # Tensor versions show updates between the swarm's steps, the lineage all others.
                version = (lead.lineage, [parameter._version for parameter in self._parameters])
                own = _Update(lead.global_step, lead.lineage, result, changed=version != self._sent)
            except BaseException as error:  # also an interrupt: the others must not wait for this rank
                self._exchange(_Update(error=f"{type(error).__name__}: {error}"))
                raise
        update = self._exchange(own)
        self._sent = version
        require(not update.error, f"rank {LEAD}, which talks to the swarm, failed: {update.error}", HostError)
        self.global_step, self.lineage = update.step, update.lineage
        return update.result

    @torch.no_grad()
    def _exchange(self, own: _Update | None) -> _Update:
        box = [own]
        try:
            dist.broadcast_object_list(box, LEAD, group=self._messages)
            update = box[0]
            assert update is not None
            for parameter in self._parameters if update.changed else ():
                values = parameter.detach().contiguous()
                dist.broadcast(values, LEAD, group=self._tensors)
                if own is None:
                    parameter.copy_(values)
        except RuntimeError as error:
            raise self._lost(f"rank {LEAD} could not send its result to the others", error) from error
        return update

    def _lost(self, what: str, error: RuntimeError) -> HostError:
        rank, reason = dist.get_rank(), str(error).partition("\n")[0]
        return HostError(
            f"{what}: at rank {rank} a rank is missing that has died, failed, or did not respond "
            f"within {self._timeout.total_seconds():g} s; its own output shows why. "
            f"Start all ranks again. ({reason})"
        )

    def __repr__(self) -> str:
        return f"HostOptimizer(rank {dist.get_rank()} of {dist.get_world_size()}, step={self.global_step})"


def host_optimizer(
    swarm: Any, optimizer: Optimizer, *, target_batch_size: int, timeout_s: float = 1800.0, **settings: Any
) -> HostOptimizer:
    """Make one peer of all processes of a `torch.distributed` job; every rank calls it after ``init_process_group``.

    Do not wrap the model in `DistributedDataParallel`: gradients are summed here. A `GradScaler`
    would skip steps on one rank alone: use bfloat16.

    Args:
        swarm: this peer's `Swarm` on rank 0, None on the others.
        optimizer: over equal parameters in the same order on all ranks; that of rank 0 steps.
        timeout_s: longest time that one rank waits for another, a long evaluation or catching up included.
        target_batch_size, settings: those of `Swarm.optimizer`; only rank 0's count.

    Raises `RuntimeError` if there is no process group, `ValueError` if rank 0 has no swarm or
    another rank has one, `HostError` if another rank failed, and what `Swarm.optimizer` raises.
    """
    require(
        dist.is_initialized(),
        "call torch.distributed.init_process_group(…) first; torchrun sets what it needs",
        RuntimeError,
    )
    require(
        (swarm is None) is not (dist.get_rank() == LEAD),
        "only rank 0 talks to the swarm: give it the swarm, and None to all other ranks",
    )
    chosen = {"target_batch_size": target_batch_size, **settings}
    begin = None if swarm is None else partial(swarm.optimizer, optimizer, **chosen)
    return HostOptimizer(optimizer, begin, timeout_s=timeout_s)
