"""Peers compare no tensors, but digests, which detect any change, and projections, which measure the change.

`StateDigests` computes both for one replica. `WrittenWeights` notices changes outside the optimizer's steps.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch.optim import Optimizer

from colab_swarm.tensors.statedict import flatten
from colab_swarm.training.flat import reals
from colab_swarm.training.records import (
    HALF_TOLERANCE,
    LINEAGE_BYTES,
    MAX_RATES,
    PROJECTIONS,
    SKETCH_STEPS,
    TOLERANCE,
    Rates,
    StateSketch,
    StepTaken,
)

# Part of the values' norm. SAM, weight clipping and swapped averages change a smaller part between two steps.
LOADED = 0.05
_SAMPLES = 64  # number of values of each tensor that are compared

_SIGNS = 1 << 16  # length of a block: longer tensors are cut into blocks, which share their random signs


def digest_of_tensors(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of the tensors' bytes; its speed is over 1 GB/s."""
    digest = blake3(max_threads=blake3.AUTO)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest(LINEAGE_BYTES)


def digest_with_optimizer(parameters: Iterable[torch.Tensor], optimizer: Optimizer) -> str:
    """Return a digest of the parameters and of the optimizer's state."""
    tensors, layout = flatten(optimizer.state_dict())
    return digest_of_tensors((*parameters, *tensors.values())).hex() + blake3(layout).hexdigest(8)


def projections_of(parameters: list[torch.Tensor], optimizer: Optimizer, lineage: bytes) -> tuple[float, ...]:
    """Return the values of a `StateSketch`: first for the parameters, then for each kind of optimizer state."""
    kinds = {"": [*parameters]}
    for parameter in parameters:
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                kinds.setdefault(kind, []).append(value)
    values: list[float] = []
    for kind in sorted(kinds):
        values += _project(kinds[kind], lineage)
    return tuple(values)


def _project(tensors: list[torch.Tensor], seed: bytes) -> list[float]:
    """Return the norm of all values, and `PROJECTIONS` sums of them with random signs, each divided by the norm."""
    rows: list[torch.Tensor] = []
    for tensor in tensors:
        values = reals(tensor).flatten()
        whole = len(values) // _SIGNS * _SIGNS
        # Blocks of `_SIGNS` values are the rows of one matrix; the rest of the tensor is one more row.
        matrices = [values[:whole].view(-1, _SIGNS), values[whole:].view(1, -1)]
        rows += [blocks for blocks in matrices if blocks.numel()]
    # The first `_SIGNS` rows of signs belong to the values within a block, the other rows to the blocks.
    count = (_SIGNS + sum(map(len, rows))) * PROJECTIONS
    bits = np.unpackbits(np.frombuffer(blake3(seed).digest(count // 8 + 1), np.uint8))[:count]
    signs = torch.from_numpy(2 * bits.astype(np.float32) - 1).view(-1, PROJECTIONS)
    of_values: dict[torch.device, torch.Tensor] = {}
    results = defaultdict(list)  # by device; they are read together, because each read waits for the device
    start = _SIGNS
    for blocks in rows:
        device = blocks.device
        inner = of_values.setdefault(device, signs[:_SIGNS].to(device))[: blocks.shape[1]]
        outer = signs[start : start + len(blocks)].to(device)
        start += len(blocks)
        values = blocks.float()
        # A norm for each block, because the norm of a long tensor is not exact enough.
        squares = torch.linalg.vector_norm(values, dim=1, keepdim=True).square()
        results[device].append(torch.cat([squares, outer * (values @ inner)], dim=1).sum(0))
    sums = sum(torch.stack(parts).cpu().double().sum(0) for parts in results.values())
    square, *projections = torch.as_tensor(sums).tolist()
    norm = math.sqrt(square)
    return [norm, *(projection / (norm or 1.0) for projection in projections)]


def versions_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return torch's count of the changes of each tensor, and the address of its values."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


@dataclass
class StateDigests:
    """The data of a `Replica` that other peers compare: learning rates, sketches, and changes outside a step.

    ``_optimizer`` is the wrapped optimizer. ``_stepping`` takes the swarm's steps on ``_parameters``. Both are the same
    optimizer, except with local steps.
    """

    _optimizer: Optimizer
    _stepping: Optimizer
    _model: list[torch.Tensor]
    _parameters: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.on_loaded()

    def on_step(self) -> None:
        """Note that the optimizer stepped, so the present parameters are the swarm's."""
        self._versions = versions_of(self._model)

    def on_loaded(self) -> None:
        """Note that a state was loaded, so the parameters are the swarm's, and earlier changes no longer count."""
        self.on_step()
        self._changed = False

    def on_changed(self) -> None:
        """Note that the user changed the swarm's parameters, in a mode in which they are copies."""
        self._changed = True

    @property
    def changed(self) -> bool:
        """True if the parameters changed outside a step since a state was loaded, as far as torch counts changes."""
        # A schedule-free optimizer changes the parameters to evaluate.
        if self._parameters is self._model and not hasattr(self._optimizer, "eval"):
            self._changed |= self._versions != versions_of(self._model)
        return self._changed

    @property
    def tolerance(self) -> float:
        """Maximum distance of the sketches of states that count as equal."""
        if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self._model):
            return HALF_TOLERANCE
        return TOLERANCE

    @property
    def rates(self) -> Rates:
        """The learning rates of the next step, highest first."""
        groups = self._optimizer.param_groups
        rates = {float(group["lr"]) for group in groups if group.get("lr") is not None}
        return tuple(sorted(rates, reverse=True)[:MAX_RATES])

    def of_step(self, step: int, lineage: bytes) -> StepTaken:
        """Return a description of the step that was just taken, with a sketch every `SKETCH_STEPS` steps."""
        # A schedule-free optimizer that evaluates shows other parameters than it trains.
        evaluates = any(group.get("train_mode") is False for group in self._optimizer.param_groups)
        sketch = None
        if step % SKETCH_STEPS == 0 and not evaluates:
            sketch = self.sketch(step, lineage)
        return StepTaken(lineage, self.rates, sketch)

    @torch.no_grad()
    def sketch(self, step: int, lineage: bytes) -> StateSketch:
        """Return a sketch of parameters and optimizer state; call it under the replica's lock."""
        return StateSketch(step, lineage, projections_of(self._parameters, self._stepping, lineage))


class WrittenWeights:
    """Remembers a model's weights as the optimizer wrote them last, by some values of each tensor.

    Torch counts each write to a tensor, except writes to ``.data``. So values are compared only if a count, or the
    address of the values, has changed.
    """

    def __init__(self, model: Sequence[torch.Tensor]) -> None:
        self._model = model
        self.on_written()

    def on_written(self) -> None:
        """Remember the present weights as written by the optimizer."""
        self._versions = versions_of(self._model)
        self._values = [_some_values(parameter) for parameter in self._model]

    def change(self) -> float:
        """Return how much the user changed the weights since `on_written`, relative to the values' norm, or 0."""
        versions = versions_of(self._model)
        if versions == self._versions:
            return 0.0
        before = torch.cat([values.cpu().double() for values in self._values])
        now = torch.cat([_some_values(parameter).cpu().double() for parameter in self._model])
        self._versions = versions
        difference = float(torch.linalg.vector_norm(now - before))
        if not difference:
            return 0.0
        return difference / max(float(torch.linalg.vector_norm(before)), 1e-30)


@torch.no_grad()
def _some_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of some values that have equal distances in memory."""
    values = reals(parameter.detach())
    # A view in the order of memory, because flatten() alone would copy a tensor in the channels-last format.
    by_stride = sorted(range(values.ndim), key=values.stride().__getitem__, reverse=True)
    values = values.permute(by_stride).flatten()
    step = max(1, len(values) // _SAMPLES)
    return values[::step][:_SAMPLES].to(torch.float32, copy=True)
