"""One expert: a module with its own optimizer and step counter, and the experts that ship.

Forward has no side effect. Backward computes forward again, as gradient checkpointing does, and takes an optimizer
step at once. So gradients are stale by the calls of others in between (Learning@home, section 3.2). A batch merged from
several callers is one step, on the sum of their gradients.

The module runs in the mode in which you pass it. Avoid `BatchNorm` and dropout: batch statistics in training mode are
those of all merged calls, and dropout draws another mask at backward than at forward. Experts that ship use neither.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.errors import StateError
from colab_swarm.markup import settings
from colab_swarm.moe.batching import PendingCall
from colab_swarm.moe.calls import encoded, spans
from colab_swarm.net.peers import Refusal
from colab_swarm.tensors.codecs import Buffer, Codec, Floats, all_finite
from colab_swarm.tensors.device import accelerator

ANY_LENGTH = -1
DRY_RUN_SAMPLES = 2  # batch statistics of a single sample are an error
DRY_RUN_LENGTH = 3


class FeedForward(nn.Module):
    """``x + W3 ReLU(LN(W2 ReLU(LN(W1 x))))``, dim -> hidden -> hidden -> dim (Learning@home, section 4.1).

    Args:
        dim: values of a sample.
        hidden: width inside; None: 4 * ``dim``.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.sample = (dim,)
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        change_BD: Tensor = self.layers(x_BD)
        return x_BD + change_BD


class TransformerBlock(nn.Module):
    """A pre-norm Transformer encoder block: self-attention and a feed-forward layer.

    Args:
        dim: width of the embeddings.
        heads: of the attention; must divide ``dim``.
        hidden: width of the feed-forward layer; None: 4 * ``dim``.
    """

    def __init__(self, dim: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.sample = (-1, dim)  # of any length
        self.layer = nn.TransformerEncoderLayer(
            dim,
            heads,
            4 * dim if hidden is None else hidden,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return a tensor of the same shape; sequences do not see each other."""
        y_BLD: Tensor = self.layer(x_BLD)
        return y_BLD


@dataclass(frozen=True)
class ExpertRule:
    """How an expert learns.

    Attributes:
        optimizer: makes the optimizer from the expert's parameters.
        scheduler: makes its learning-rate schedule, which advances with each step; None: no schedule.
        max_grad_norm: clip gradients of a batch to this 2-norm; None: no clipping.
    """

    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_grad_norm: float | None = None

    def __repr__(self) -> str:
        return settings(self)


class Expert:
    """A module that learns from its callers. After construction only the device thread may use it.

    Args:
        uid: its name in the grid.
        module: maps (n, *sample) to the same shape, float32; it is moved to the accelerator, if there is one.
        rule: how it learns.
        sample: shape of one sample, without the batch; -1: any length.

    Raises:
        ValueError: a dry run showed that the module cannot be an expert of such samples.
    """

    def __init__(self, uid: str, module: nn.Module, rule: ExpertRule, sample: tuple[int, ...]) -> None:
        self.uid, self.shape, self.step = uid, tuple(sample), 0
        self._rule, self._device = rule, accelerator()
        self._module = module.to(self._device)
        self._dry_run()
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        # torch refuses an optimizer without parameters
        self._optimizer = rule.optimizer(self._parameters) if self._parameters else None
        self._scheduler = rule.scheduler(self._optimizer) if rule.scheduler and self._optimizer else None

    def __repr__(self) -> str:
        return f"Expert({self.uid}, {type(self._module).__name__}, samples {self.shape}, step {self.step})"

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for ``inputs`` (n, *shape), on the CPU; nothing changes, not even buffers.

        Raises:
            ValueError: the outputs have another shape or type.
        """
        return _to_cpu(self._call(inputs.to(self._device))[0])

    def backward(self, inputs: Tensor, grads: Tensor) -> Tensor:
        """Take one step, given the loss's gradient w.r.t. the outputs; return that w.r.t. ``inputs``, on the CPU.

        Raises:
            FloatingPointError: a gradient is not finite; nothing was changed.
        """
        inputs = inputs.detach().to(self._device).requires_grad_()
        try:
            with torch.enable_grad():
                outputs, buffers = self._call(inputs)
                torch.autograd.backward(outputs, grads.to(self._device))
            assert inputs.grad is not None  # the dry run saw one
            norm = clip_grad_norm_(self._parameters, self._rule.max_grad_norm or math.inf)
            changes_are_finite = all(  # a constant mask may hold infinities
                bool((buffers[name].isfinite() | (buffers[name] == old)).all())
                for name, old in self._module.named_buffers()
            )
            if not (norm.isfinite() and inputs.grad.isfinite().all() and changes_are_finite):
                raise FloatingPointError(f"{self.uid}: these tensors lead to values that are not finite")
            self._advance(buffers)
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        return _to_cpu(inputs.grad)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`. Tensors are the expert's own, not copies."""
        return {
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of an expert of the same kind.

        Raises:
            StateError: it is of another kind; this expert may be half changed: do not use it.
        """
        try:
            self._module.load_state_dict(state["module"])
            for part, key in ((self._optimizer, "optimizer"), (self._scheduler, "scheduler")):
                if part is not None:
                    part.load_state_dict(state[key])
            self.step = int(state["step"])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"this state does not fit {self!r}: {error}") from error

    def _call(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the module's outputs and its new buffers; the module keeps the old ones."""
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        outputs = functional_call(self._module, buffers, (inputs,)) if buffers else self._module(inputs)
        if not isinstance(outputs, Tensor) or outputs.shape != inputs.shape or outputs.dtype != inputs.dtype:
            raise ValueError(f"{self.uid}: {_described(inputs)} became {_described(outputs)}")
        return outputs, buffers

    def _advance(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(buffers[name])
        if self._optimizer:
            self._optimizer.step()
        if self._scheduler:
            self._scheduler.step()
        self.step += 1

    def _dry_run(self) -> None:
        shape = [DRY_RUN_SAMPLES, *(DRY_RUN_LENGTH if side == ANY_LENGTH else side for side in self.shape)]
        inputs = torch.linspace(-1, 1, math.prod(shape), device=self._device).reshape(shape)
        wanted = "an expert maps (n, *sample) to the same shape, float32, and has gradients"
        try:
            with torch.enable_grad():
                outputs, _ = self._call(inputs.requires_grad_())
                (gradient,) = torch.autograd.grad(outputs.sum(), inputs, allow_unused=True)
        except Exception as error:  # the user's code may raise anything
            raise ValueError(f"{self.uid} failed on a batch of shape {shape}: {error}; {wanted}") from error
        if gradient is None:
            raise ValueError(f"{self.uid}: its outputs do not depend on its inputs; {wanted}")


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _described(value: object) -> str:
    return (
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )


Answer: TypeAlias = list[Buffer]
"""The encoded parts of the tensor for the caller."""


@dataclass(eq=False)
class Call(PendingCall):
    """A call with its encoded parts, and the future that its handler awaits on the loop."""

    codec: Codec
    answer: asyncio.Future[Answer]
    parts: list[memoryview] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """Number of tensors: inputs and, at backward, gradients."""
        return 2 if self.key.backward else 1

    def decode_into(self, tensors: Sequence[Floats]) -> None:
        """Decode the parts and free them.

        Raises:
            ValueError: a part cannot be decoded or holds values that are not finite.
        """
        parts = iter(self.parts)
        for tensor in tensors:
            flat = tensor.reshape(-1)
            for span in spans(flat.size, self.codec):
                flat[span] = self.codec.decode(next(parts), span.stop - span.start)
                if not all_finite(flat[span]):
                    raise ValueError(
                        "your tensors hold values that are not finite: an expert must not see them"
                    )
        self.parts.clear()


def compute(expert: Expert, calls: Sequence[Call]) -> list[tuple[Call, Answer | BaseException]]:
    """Compute calls of one key as one batch; return the answer or the error of each."""
    samples = sum(call.samples for call in calls)
    stacks = [np.empty((samples, *calls[0].key.shape), np.float32) for _ in range(calls[0].tensors)]
    answers: list[tuple[Call, Answer | BaseException]] = []
    valid: list[Call] = []
    row = 0
    for call in calls:
        try:
            call.decode_into([stack[row : row + call.samples] for stack in stacks])
        except ValueError as error:
            answers.append((call, Refusal(str(error))))
        else:
            valid.append(call)
            row += call.samples
    if valid:
        answers += zip(valid, _outcomes(expert, valid, [stack[:row] for stack in stacks]), strict=True)
    return answers


def _outcomes(
    expert: Expert, calls: Sequence[Call], stacks: Sequence[Floats]
) -> list[Answer | BaseException]:
    """Return answers in the order of the calls. A batch that fails is retried call by call: bad data fail one caller.

    A backward that failed for another reason than its data may have taken its step: it is not retried.
    """
    try:
        tensors = [torch.from_numpy(stack) for stack in stacks]
        outputs = (expert.backward if len(tensors) == 2 else expert.forward)(*tensors).numpy()
    except Exception as error:  # the user's module may raise anything: the server reports it
        if len(calls) > 1 and (len(stacks) == 1 or isinstance(error, FloatingPointError)):
            return [
                outcome
                for call, rows in zip(calls, _rows(calls), strict=True)
                for outcome in _outcomes(expert, [call], [stack[rows] for stack in stacks])
            ]
        return [Refusal(str(error)) if isinstance(error, FloatingPointError) else error] * len(calls)
    answers: list[Answer | BaseException] = []
    for call, rows in zip(calls, _rows(calls), strict=True):
        try:
            answers.append(list(encoded(outputs[rows], call.codec)))
        except ValueError as error:  # not finite: some codecs cannot represent it
            answers.append(Refusal(f"{call.key.uid} answers with {error}"))
    return answers


def _rows(calls: Sequence[Call]) -> Iterator[slice]:
    row = 0
    for call in calls:
        yield slice(row, row + call.samples)
        row += call.samples
