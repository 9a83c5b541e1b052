"""A torch layer whose experts run on other peers (Learning@home, sections 3.1 and 3.2).

In each direction, the layer makes one call per expert, and all calls run in parallel. The layer renormalises the mixing
weights over the experts that answered. Do not scale the loss (`GradScaler`), because experts step on the gradients that
they receive.

Shapes: B samples, K chosen experts, G dimensions of the grid, E experts that answered, M indices of
a dimension, S the shape of a sample, D values of a sample.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colab_swarm.errors import ExpertError, NoExpertsError, require
from colab_swarm.moe.calls import ExpertCalls, MixtureStatistics, fits
from colab_swarm.moe.expert import ANY_LENGTH
from colab_swarm.moe.grid import ExpertInfo, Grid, Mask
from colab_swarm.net.peers import end_tasks
from colab_swarm.tensors.codecs import Floats, all_finite

logger = logging.getLogger(__name__)
ATTEMPTS = 2
Places: TypeAlias = npt.NDArray[np.intp]


class Gating(nn.Module):
    """``g(x, f) = sum_i g_i(x)[u_i]`` for the expert f at the indices u_i (Learning@home, section 3.2).

    Each dimension i of the grid has one linear map g_i.
    """

    def __init__(self, dim: int, sides: Sequence[int]) -> None:
        super().__init__()
        self.sides = tuple(sides)
        self.maps = nn.Linear(dim, sum(sides))  # the maps g_i of all dimensions, concatenated

    def forward(self, x_BD: Tensor) -> tuple[Tensor, ...]:
        """Return scores (B, side) for each dimension."""
        return self.maps(x_BD).split(self.sides, dim=1)  # type: ignore[no-any-return]


def priorities(scores: Sequence[Tensor], indices_BKG: Tensor) -> Tensor:
    """Return the priorities (B, K) of the experts at these indices, differentiable in the scores."""
    parts_BK = [score_BM.gather(1, indices_BKG[:, :, i]) for i, score_BM in enumerate(scores)]
    return torch.stack(parts_BK).sum(0)


def mixing_weights(priorities_BK: Tensor, answered_BK: Tensor) -> Tensor:
    """Return the softmax of the priorities over the experts that answered. The other experts have weight 0."""
    lowest = torch.finfo(priorities_BK.dtype).min
    weights_BK = priorities_BK.masked_fill(~answered_BK, lowest).softmax(1)
    return weights_BK.masked_fill(
        ~answered_BK, 0.0
    )  # with -inf before the softmax, the gradient would be NaN


def balance_loss(importance_E: Tensor, idle: int) -> Tensor:
    """Return the squared coefficient of variation of the importances (Shazeer et al. 2017, eq. 6-7), >= 0.

    ``importance_E`` has each expert's sum of weights over the batch. There are ``idle`` other known experts, whose
    importance is 0.
    """
    count = max(1, len(importance_E) + idle)
    mean = importance_E.sum() / count
    variance = ((importance_E - mean).square().sum() + idle * mean.square()) / count
    return variance / mean.square().clamp_min(1e-20)


class _RemoteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, values: Tensor, backward: Callable[[Floats], Floats]) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.backward_call = backward
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:
        # backward sends the inputs' memory again; this raises if they were changed in place since forward
        _ = ctx.saved_tensors
        return torch.from_numpy(ctx.backward_call(as_floats(grads))), None, None


def attach_backward(inputs: Tensor, values: Floats, backward: Callable[[Floats], Floats]) -> Tensor:
    """Return ``values`` as a differentiable function of ``inputs``. ``backward`` computes the gradient remotely.

    Autograd calls ``backward`` even if the inputs need no gradient, because experts learn from this call. The function
    is on the CPU. Autograd has one thread per GPU for all callers, and a call that waits there would stop the others.
    """
    if torch.is_grad_enabled() and not inputs.requires_grad:
        inputs = inputs.detach().requires_grad_()
    answer: Tensor = _RemoteFunction.apply(inputs, torch.from_numpy(values), backward)  # type: ignore[no-untyped-call]
    return answer


def as_floats(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().to("cpu", torch.float32).numpy())


class RemoteExpert(nn.Module):
    """One expert as a module: forward and backward run on the expert's host, and each backward lets it learn.

    Maps a tensor (..., *sample shape) to a tensor of the same shape and dtype. The expert computes with float32 values.
    Raises `ValueError` if ``uid`` is not in the grid.
    """

    def __init__(self, calls: ExpertCalls, grid: Grid, uid: str) -> None:
        super().__init__()
        grid.index(uid)
        self.grid = grid
        self.uid = uid
        self._calls = calls

    def extra_repr(self) -> str:
        return self.uid

    def info(self) -> ExpertInfo:
        """Return the expert's current host, shape and step; raise `ExpertError` if no host is found in time."""
        calls = self._calls
        try:
            info = calls.runtime.call(
                asyncio.wait_for(calls.directory.find(self.grid, self.uid), calls.timeout_s)
            )
        except TimeoutError:
            info = None
        if info is None:
            raise ExpertError(
                f"no peer hosts {self.uid}, or it was not found in {calls.timeout_s:g} s: "
                "host it, or wait until a peer takes it over"
            )
        return info

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the expert's outputs.

        Raises `ExpertError` if the expert fails, also in backward, and `ValueError` if the inputs do not fit.
        """
        info = self.info()
        calls = self._calls
        sample = inputs.shape[-len(info.shape) :]
        if not fits(sample, info.shape):
            raise ValueError(f"{self.uid} takes samples of shape {info.shape}, not {tuple(inputs.shape)}")
        if not inputs.numel():
            return inputs
        with torch.autocast(inputs.device.type, enabled=False):
            samples = inputs.reshape(-1, *sample).float().cpu()
            values = as_floats(samples)
            answers = calls.runtime.call(calls.forward(info, values))

            def backward(grads: Floats) -> Floats:
                return calls.runtime.call(calls.backward(info, values, grads))

            outputs = attach_backward(samples, answers, backward)
        return outputs.reshape(inputs.shape).to(inputs)


class MixtureOfExperts(nn.Module):
    """``y = sum_f w_f f(x)`` over the k best live experts f, with the softmax ``w`` of their priorities (eq. 1).

    Maps a tensor (..., dim), or (..., length, dim) with ``sequences``, to a tensor of the same shape and
    dtype. Experts learn when ``backward()`` runs through this layer. Deep copies share the statistics.

    Args:
        k: number of experts that the layer calls per sample.
        k_min: number of answers per sample for which the layer waits until the calls time out.
        grace_s: seconds to wait for the other answers after the first ``k_min``. Later answers count as failed.
        sequences: True if each sample is a sequence. Experts get whole sequences, and the gating scores their means.
    """

    def __init__(
        self,
        calls: ExpertCalls,
        grid: Grid,
        dim: int,
        *,
        k: int = 4,
        k_min: int = 1,
        grace_s: float = 5.0,
        sequences: bool = False,
    ) -> None:
        require(1 <= k_min <= k, f"k={k}, k_min={k_min}: call at least one expert, wait for at most k")
        require(grace_s >= 0, f"grace_s={grace_s}: give seconds, 0 or more")
        super().__init__()
        self.gating = Gating(dim, grid.sides)
        self.grid = grid
        self.dim = dim
        self.k = k
        self.k_min = k_min
        self.grace_s = grace_s
        self.sequences = sequences
        self.balance_loss: Tensor = torch.zeros(())
        """`balance_loss` of the last forward pass. Add a small multiple of it to your loss, to spread the work."""
        self._calls = calls

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "balance_loss": torch.zeros(()),
        }  # it is part of a graph, so it cannot be copied

    def extra_repr(self) -> str:
        return f"{self.grid}, k={self.k}"

    @property
    def utilisation(self) -> dict[str, float]:
        """Each known expert's fraction of the recent work. The fractions sum to 1."""
        return self._calls.shares()

    def statistics(self) -> MixtureStatistics:
        return self._calls.statistics()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mixture. In a compiled model, this layer itself is not compiled.

        Raises `NoExpertsError` if no expert can be called, or if no expert answers for any sample. Raises `ValueError`
        if the inputs do not fit this layer or the experts, or are not finite.
        """
        sample_axes = 2 if self.sequences else 1
        least_axes = 3 if self.sequences else 1
        leading = "batch, length" if self.sequences else "..."
        if inputs.ndim < least_axes or inputs.shape[-1] != self.dim:
            raise ValueError(
                f"inputs of {self.grid} must be of shape ({leading}, {self.dim}), not {tuple(inputs.shape)}"
            )
        if not inputs.numel():
            return inputs
        sample = inputs.shape[-sample_axes:]
        with torch.autocast(inputs.device.type, enabled=False):
            mixed = self._mix(inputs.reshape(-1, *sample).float())
        return mixed.reshape(inputs.shape).to(inputs.dtype)

    def _mix(self, samples_BS: Tensor) -> Tensor:
        features_BD = samples_BS.mean(1) if self.sequences else samples_BS
        scores = [score_BM.float() for score_BM in self.gating(features_BD.to(self.gating.maps.weight))]
        inputs_BS = samples_BS.cpu()
        batch = _Batch(self, self._calls, as_floats(inputs_BS))
        self._calls.runtime.call(batch.forward([as_floats(score_BM) for score_BM in scores]))
        self._calls.count(batches=1)
        device = samples_BS.device

        def backward(grads_BKS: Floats) -> Floats:
            return self._calls.runtime.call(batch.backward(grads_BKS))

        outputs_BKS = attach_backward(inputs_BS, batch.outputs_BKS, backward)
        answered_BK = torch.from_numpy(batch.answered_BK).to(device)
        indices_BKG = torch.from_numpy(batch.indices_BKG).to(device)
        weights_BK = mixing_weights(priorities(scores, indices_BKG), answered_BK)
        answered = weights_BK[answered_BK]
        # an expert that two peers host occurs twice, and is counted once
        uids = np.array([info.uid for info in batch.infos], np.str_)
        used, places = np.unique(uids[batch.experts_BK[batch.answered_BK]], return_inverse=True)
        places_of_answers = torch.from_numpy(places).to(device)
        importance_E = answered.new_zeros(len(used)).index_add(0, places_of_answers, answered)
        shares = dict(zip(used.tolist(), importance_E.tolist(), strict=True))
        self.balance_loss = balance_loss(importance_E, self._calls.on_batch(shares))
        ones = (1,) * (samples_BS.ndim - 1)
        mixed_BS = (outputs_BKS.to(device) * weights_BK.reshape(*weights_BK.shape, *ones)).sum(1)
        return torch.where(answered_BK.any(1).reshape(-1, *ones), mixed_BS, samples_BS)


class _Batch:
    """Forward and backward of one batch. For gradient checkpointing, tensor sizes do not depend on the answers."""

    def __init__(self, layer: MixtureOfExperts, calls: ExpertCalls, inputs_BS: Floats) -> None:
        require(
            all_finite(inputs_BS),
            f"inputs of {layer.grid} are not finite: lower the learning rate or clip gradients; float16 overflows",
        )
        self._layer = layer
        self._grid = layer.grid
        self._calls = calls
        self._inputs_BS = inputs_BS
        batch = len(inputs_BS)
        k = min(layer.k, layer.grid.size)
        self.outputs_BKS: Floats = np.zeros((batch, k, *inputs_BS.shape[1:]), np.float32)
        self.answered_BK: Mask = np.zeros((batch, k), np.bool_)
        self.indices_BKG = np.zeros((batch, k, len(layer.grid.sides)), np.int64)
        self.infos: list[ExpertInfo] = []  # experts that were chosen
        self.experts_BK = np.full((batch, k), -1, np.intp)  # places in `infos`; -1: none
        self._fault = "none was found in time"  # later the reason why the last call failed

    async def forward(self, scores: Sequence[Floats]) -> None:
        rows = np.arange(len(self._inputs_BS))
        for attempt in range(ATTEMPTS):
            try:
                await self._choose(rows, [score_BM[rows] for score_BM in scores])
            except NoExpertsError:
                if attempt == 0:
                    raise
                break  # there are no other experts than those that failed
            await self._call(rows)
            rows = np.flatnonzero(~self.answered_BK.any(1))
            if not len(rows):
                break
        if not self.answered_BK.any():
            raise NoExpertsError(
                f"no expert of {self._grid} answered this batch of {len(rows)} ({self._fault}): "
                "try it again when their hosts are back, as swarm.experts.trainer(…) does"
            )
        if len(rows):
            logger.warning("%d samples pass %s unchanged: %s", len(rows), self._grid, self._fault)
        self._calls.count(unanswered=len(rows))

    async def _choose(self, rows: Places, scores: Sequence[Floats]) -> None:
        self.experts_BK[rows] = -1
        try:
            async with asyncio.timeout(self._calls.timeout_s):
                best = await self._calls.directory.best(self._grid, scores, self.answered_BK.shape[1])
                await self._check_shapes({info.shape for experts in best for info in experts})
        except TimeoutError:
            logger.warning("no experts of %s found in %g s", self._grid, self._calls.timeout_s)
            return
        places = {(info.uid, info.host.id): place for place, info in enumerate(self.infos)}
        for row, experts in zip(rows, best, strict=True):
            for slot, info in enumerate(experts):
                place = places.setdefault((info.uid, info.host.id), len(places))
                self.experts_BK[row, slot] = place
                if place == len(self.infos):
                    self.infos.append(info)

    async def _check_shapes(self, shapes: Set[tuple[int, ...]]) -> None:
        """Raise ValueError if no live expert takes samples of this layer's shape.

        If only some experts take other shapes, only calls to these experts fail.
        """
        sample = self._inputs_BS.shape[1:]
        if not shapes or any(fits(sample, shape) for shape in shapes):
            return
        live = await self._calls.directory.live(self._grid)
        if any(fits(sample, info.shape) for info in live):
            return
        prefix = self._grid.prefix
        shape = min(shapes)
        if len(shape) == len(sample) and shape[-1] != sample[-1]:
            raise ValueError(f"experts of {prefix} have width {shape[-1]}, this layer has {sample[-1]}")
        raise ValueError(
            f"experts of {prefix} take samples of shape {shape}, this layer sends {sample}: "
            f"sequences=True sends sequences whole, and {ANY_LENGTH} stands for any length"
        )

    def _groups(self, wanted_BK: Mask) -> Iterator[tuple[ExpertInfo, Places, Places]]:
        for place, info in enumerate(self.infos):
            rows, slots = np.nonzero(wanted_BK & (self.experts_BK == place))
            if len(rows):
                yield info, rows, slots

    async def _call(self, rows: Places) -> None:
        calls = self._calls
        grace_s = self._layer.grace_s
        asked_BK = np.zeros_like(self.answered_BK)
        asked_BK[rows] = True
        groups: dict[asyncio.Task[Floats], tuple[ExpertInfo, Places, Places]] = {}
        for info, samples, slots in self._groups(asked_BK):
            task = asyncio.create_task(calls.forward(info, self._inputs_BS[samples]))
            groups[task] = info, samples, slots
        try:
            await self._wait({task: samples for task, (_, samples, _) in groups.items()}, rows)
        finally:
            await end_tasks(*groups)
        for task, (info, *places) in groups.items():
            if task.cancelled():
                self._fault = f"{grace_s:g} s later than others"
                calls.directory.on_failure(info, self._fault)
            elif isinstance(task.exception(), ExpertError):
                self._fault = str(task.exception())
            if task.cancelled() or isinstance(task.exception(), ExpertError):
                calls.count(failures=1)
                continue
            self.outputs_BKS[*places] = task.result()
            self.answered_BK[*places] = True
            self.indices_BKG[*places] = self._grid.index(info.uid)
            calls.count(answers=1)

    async def _wait(self, calls: Mapping[asyncio.Task[Floats], Places], rows: Places) -> None:
        open_calls_B = np.zeros(len(self._inputs_BS), np.intp)
        missing_B = np.zeros_like(open_calls_B)
        missing_B[rows] = self._layer.k_min
        for samples in calls.values():
            open_calls_B[samples] += 1
        pending = set(calls)
        while pending and ((missing_B > 0) & (open_calls_B > 0)).any():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                open_calls_B[calls[task]] -= 1
                if task.exception() is None:
                    missing_B[calls[task]] -= 1
        if pending:
            await asyncio.wait(pending, timeout=self._layer.grace_s)

    async def backward(self, grads_BKS: Floats) -> Floats:
        groups = [*self._groups(self.answered_BK)]
        if not all_finite(
            grads_BKS
        ):  # the experts must not receive these gradients, but the caller's optimizer may
            self._calls.count(lost_gradients=len(groups))
            return np.full_like(self._inputs_BS, np.nan)
        calls = []
        for info, rows, slots in groups:
            calls.append(self._calls.backward(info, self._inputs_BS[rows], grads_BKS[rows, slots]))
        results = await asyncio.gather(*calls, return_exceptions=True)
        grads_BS = np.zeros_like(self._inputs_BS)
        for (_, rows, _), result in zip(groups, results, strict=True):
            if isinstance(result, ExpertError):
                self._calls.count(lost_gradients=1)
            elif isinstance(result, BaseException):
                raise result
            else:
                grads_BS[rows] += result  # correct because each sample occurs only once in ``rows``
        return grads_BS
