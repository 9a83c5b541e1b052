"""A model's buffers: statistics such as BatchNorm's are averaged by rounds; other ones each peer keeps.

A mean is right for statistics only. A position in a queue, a flag or a counter that wraps round has none,
nor have the buffers beside it in its module. So each peer keeps these as its model writes them, and who
joins takes them whole from a donor.
"""

import itertools
from collections.abc import Iterable

import torch

from colab_swarm.errors import require
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.device import copy_in, host_copy, to_host
from colab_swarm.tensors.statedict import KINDS
from colab_swarm.training.flat import FlatValues

_COUNT = "num_batches_tracked"  # of BatchNorm: an integer of which a rounded mean is right


class Buffers:
    """The saved buffers of a model, and the swarm's copies of them.

    Attributes:
        averaged: whether rounds average each one, by its name in the model; fixed. Empty without a model.
        shared: the swarm's copies, in main memory. `add` and `load` change them; those that are not averaged are
            copied at each contribution.
        numel: how many values the averaged ones have.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self.averaged = averaged_by_name(model)
        self.shared = [host_copy(buffer.detach()) for buffer in self.live]
        self.numel = sum(buffer.numel() for buffer in self._statistics(self.shared))
        # What `show` has to copy to the model.
        self._averages_changed = False
        self._all_changed = False

    @property
    def live(self) -> list[torch.Tensor]:
        """The model's own buffers, with which it computes."""
        return buffers_of(self._model, self.averaged)

    def _statistics(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return list(itertools.compress(buffers, self.averaged.values()))

    def check(self) -> None:
        """Raise `RuntimeError` if a buffer of the model has another size than at the beginning."""
        for name, live, shared in zip(self.averaged, self.live, self.shared, strict=True):
            require(
                live.shape == shared.shape,
                f"buffer {name} had the shape {tuple(shared.shape)} and has {tuple(live.shape)}: peers share buffers "
                "of one size; register it with persistent=False, so that each peer keeps its own",
                RuntimeError,
            )

    @torch.no_grad()
    def write_change(self, out: Floats) -> None:
        """Write the change of each statistic since the last mean to ``out``, and copy the other buffers.

        A statistic that began at infinity has no change: its value itself is written, and 0 for what is not finite.
        """
        for live, shared, averaged in zip(self.live, self.shared, self.averaged.values(), strict=True):
            if not averaged:
                shared.copy_(to_host(live))
        statistics = self._statistics(self.shared)
        parts = FlatValues(statistics, out).parts
        for live, shared, part in zip(self._statistics(self.live), statistics, parts, strict=True):
            values = to_host(live).to(shared.dtype)
            before = torch.where(shared.isfinite(), shared, 0)
            torch.nan_to_num((values - before).to(part), 0.0, 0.0, 0.0, out=part)

    @torch.no_grad()
    def add(self, mean: Floats) -> None:
        """Add the mean of all peers' changes to the statistics."""
        statistics = self._statistics(self.shared)
        parts = FlatValues(statistics, mean).parts
        for live, shared, part in zip(self._statistics(self.live), statistics, parts, strict=True):
            if not shared.is_floating_point():
                shared.add_(part.round().long().to(shared.dtype))
                continue
            began = shared.isfinite()
            if not began.all():
                # Values that stay infinite, as those of a mask, were written as 0 by all.
                begins = ~began & to_host(live).isfinite() & (part != 0)
                shared[begins] = 0
            shared.add_(part)
        self._averages_changed = True

    @torch.no_grad()
    def load(self, buffers: Iterable[torch.Tensor]) -> None:
        """Take a donor's buffers, in the order of ``averaged``; `show` brings all of them to the model."""
        for shared, loaded in zip(self.shared, buffers, strict=True):
            shared.copy_(loaded)
        self._all_changed = True

    @torch.no_grad()
    def show(self) -> None:
        """Copy what has changed in the swarm's copies to the model."""
        for live, shared, averaged in zip(self.live, self.shared, self.averaged.values(), strict=True):
            if self._all_changed or (averaged and self._averages_changed):
                copy_in(shared, live)
        self._averages_changed = False
        self._all_changed = False


def averaged_by_name(model: torch.nn.Module | None) -> dict[str, bool]:
    """Return the names of the saved buffers, in the model's order, and whether each one is averaged.

    That are statistics: floats without integers or flags beside them.
    """
    if model is None:
        return {}
    saved = model.state_dict().keys()
    has_statistics = {}
    for path, module in model.named_modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if _can_be_sent(buffer)}
        has_statistics[path] = all(
            buffer.is_floating_point() or name == _COUNT for name, buffer in own.items()
        )
    averaged = {}
    for name, buffer in model.named_buffers():
        if name in saved and _can_be_sent(buffer):
            averaged[name] = has_statistics[name.rpartition(".")[0]]
    return averaged


def _can_be_sent(buffer: torch.Tensor) -> bool:
    return str(buffer.dtype).removeprefix("torch.") in KINDS and buffer.layout is torch.strided


def buffers_of(model: torch.nn.Module | None, names: Iterable[str]) -> list[torch.Tensor]:
    """Return the model's present buffers; ``model.to(…)`` makes new ones."""
    if model is None:
        return []
    present = dict(model.named_buffers())
    return [present[name] for name in names]
