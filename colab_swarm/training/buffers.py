"""A model's buffers: statistics such as BatchNorm's are averaged by rounds; other ones each peer keeps.

A mean is right for statistics only. A position in a queue, a flag or a counter that wraps round has none,
nor have the buffers beside it in its module. So each peer keeps these as its model writes them, and who
joins takes them whole from a donor.
"""

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
        names: of the buffers in the model; fixed. None without a model.
        averaged: whether rounds average each one.
        shared: the swarm's copies, in main memory. `add` and `load` change them; those that are not averaged are
            copied at each contribution.
        numel: how many values the averaged ones have.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self.names = buffer_names(model)
        self.shared = [host_copy(buffer.detach()) for buffer in self.live]
        averaged = averaged_buffers(model)
        self.averaged = [name in averaged for name in self.names]
        self.numel = sum(buffer.numel() for buffer in self._statistics(self.shared))
        # What `show` has to copy to the model.
        self._averages_changed = False
        self._all_changed = False

    @property
    def live(self) -> list[torch.Tensor]:
        """The model's own buffers, with which it computes."""
        return buffers_of(self._model, self.names)

    def _statistics(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [buffer for buffer, averaged in zip(buffers, self.averaged, strict=True) if averaged]

    def check(self) -> None:
        """Raise `RuntimeError` if a buffer of the model has another size than at the beginning."""
        for name, live, shared in zip(self.names, self.live, self.shared, strict=True):
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
        for live, shared, averaged in zip(self.live, self.shared, self.averaged, strict=True):
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
        """Take a donor's buffers, in the order of ``names``; `show` brings all of them to the model."""
        for shared, loaded in zip(self.shared, buffers, strict=True):
            shared.copy_(loaded)
        self._all_changed = True

    @torch.no_grad()
    def show(self) -> None:
        """Copy what has changed in the swarm's copies to the model."""
        for live, shared, averaged in zip(self.live, self.shared, self.averaged, strict=True):
            if self._all_changed or (averaged and self._averages_changed):
                copy_in(shared, live)
        self._averages_changed = False
        self._all_changed = False


def buffer_names(model: torch.nn.Module | None) -> list[str]:
    """Return the names of the saved buffers, in the model's order."""
    if model is None:
        return []
    saved = model.state_dict().keys()
    return [name for name, buffer in model.named_buffers() if name in saved and _can_be_sent(buffer)]


def averaged_buffers(model: torch.nn.Module | None) -> set[str]:
    """Return the names of the buffers that are statistics: floats without integers or flags beside them."""
    names: set[str] = set()
    if model is None:
        return names
    for path, module in model.named_modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if _can_be_sent(buffer)}
        if all(buffer.is_floating_point() or name == _COUNT for name, buffer in own.items()):
            names.update(f"{path}.{name}".lstrip(".") for name in own)
    return names


def _can_be_sent(buffer: torch.Tensor) -> bool:
    return str(buffer.dtype).removeprefix("torch.") in KINDS and buffer.layout is torch.strided


def buffers_of(model: torch.nn.Module | None, names: list[str]) -> list[torch.Tensor]:
    """Return the model's present buffers; ``model.to(…)`` makes new ones."""
    if model is None:
        return []
    present = dict(model.named_buffers())
    return [present[name] for name in names]
