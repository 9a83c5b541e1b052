"""A model's buffers: rounds average statistics, such as BatchNorm's; each peer keeps its own values of other buffers.

A mean makes sense for statistics only. A position in a queue, a flag or a counter that wraps around has no useful mean,
and neither have the other buffers of a module with such a buffer. So each peer keeps these buffers as its model writes
them, and a late joiner copies them from its donor.
"""

import itertools
from collections.abc import Iterable

import torch

from colab_swarm.errors import require
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.device import copy_in, host_copy, to_host
from colab_swarm.tensors.statedict import KINDS
from colab_swarm.training.flat import FlatValues

_COUNT = "num_batches_tracked"  # BatchNorm's counter: the only integer buffer that is averaged, with rounding


class Buffers:
    """The saved buffers of a model, and the swarm's copies of them.

    Attributes:
        averaged: maps the name of each saved buffer of the model to True if rounds average it, else to False. This map
            never changes, and is empty without a model.
        shared: the swarm's copies, in main memory. `add` and `load` change them. Each contribution renews the copies of
            buffers that are not averaged.
        numel: number of values in the averaged buffers.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self.averaged = averaged_by_name(model)
        self.shared = [host_copy(buffer.detach()) for buffer in self.live]
        self.numel = sum(buffer.numel() for buffer in self._statistics(self.shared))
        # Which buffers `show` has to copy to the model.
        self._averages_changed = False
        self._all_changed = False

    @property
    def live(self) -> list[torch.Tensor]:
        """The model's own buffers, with which the model computes."""
        return buffers_of(self._model, self.averaged)

    def _statistics(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return list(itertools.compress(buffers, self.averaged.values()))

    def check(self) -> None:
        """Raise `RuntimeError` if the shape of a buffer has changed since the beginning."""
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

        Where a statistic was not finite at the last mean, ``out`` gets its value in place of a change. Where the result
        is not finite, ``out`` gets 0.
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
                # For values that stay infinite, such as those of a mask, all peers wrote 0.
                begins = ~began & to_host(live).isfinite() & (part != 0)
                shared[begins] = 0
            shared.add_(part)
        self._averages_changed = True

    @torch.no_grad()
    def load(self, buffers: Iterable[torch.Tensor]) -> None:
        """Take a donor's buffers, in the order of ``averaged``; the next `show` copies all of them to the model."""
        for shared, loaded in zip(self.shared, buffers, strict=True):
            shared.copy_(loaded)
        self._all_changed = True

    @torch.no_grad()
    def show(self) -> None:
        """Copy those of the swarm's copies that have changed to the model's buffers."""
        for live, shared, averaged in zip(self.live, self.shared, self.averaged.values(), strict=True):
            if self._all_changed or (averaged and self._averages_changed):
                copy_in(shared, live)
        self._averages_changed = False
        self._all_changed = False


def averaged_by_name(model: torch.nn.Module | None) -> dict[str, bool]:
    """Return the names of the saved buffers, in the model's order, each with True if rounds average the buffer.

    A module's buffers are averaged if all of them are floats, not counting `num_batches_tracked`: then they are
    statistics.
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
    """Return the model's present buffers of these names; ``model.to(…)`` may have replaced earlier tensors."""
    if model is None:
        return []
    present = dict(model.named_buffers())
    return [present[name] for name in names]
