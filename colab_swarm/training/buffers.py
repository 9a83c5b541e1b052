"""A model's buffers, such as BatchNorm's statistics: the model changes them, and a round averages the changes."""

import torch

from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.device import copy_in, host_copy, to_host
from colab_swarm.training.flat import FlatValues


class Buffers:
    """The saved buffers of numbers of a model, and the swarm's copies of them.

    Attributes:
        names: of the buffers in the model; fixed. None without a model.
        shared: the swarm's copies, in main memory. `add` changes them in each round, and a replica when it
            loads a state.
        changed: True from then on, until `show` has copied them to the model.
        numel: how many values they have.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self.names = buffer_names(model)
        self.shared = [host_copy(buffer.detach()) for buffer in self.live]
        self.changed = False
        self.numel = sum(buffer.numel() for buffer in self.shared)

    @property
    def live(self) -> list[torch.Tensor]:
        """The model's own buffers, with which it computes."""
        return buffers_of(self._model, self.names)

    @torch.no_grad()
    def write_change(self, out: Floats) -> None:
        """Write the model's buffers minus the shared ones to ``out``; 0 where they are not finite."""
        parts = FlatValues(self.shared, out).parts
        for live, shared, part in zip(self.live, self.shared, parts, strict=True):
            torch.nan_to_num((to_host(live).to(shared.dtype) - shared).to(part), 0.0, 0.0, 0.0, out=part)

    def add(self, mean: Floats) -> None:
        """Add the mean of all peers' changes to the shared buffers."""
        for shared, part in zip(self.shared, FlatValues(self.shared, mean).parts, strict=True):
            if shared.is_floating_point():
                shared.add_(part)
            else:
                shared.add_(part.round().long().to(shared.dtype))
        self.changed = True

    @torch.no_grad()
    def show(self) -> None:
        """Copy the shared buffers to the model, if they have changed."""
        if self.changed:
            for live, shared in zip(self.live, self.shared, strict=True):
                copy_in(shared, live)
        self.changed = False


def buffer_names(model: torch.nn.Module | None) -> list[str]:
    """Return the names of the saved buffers of numbers, in the model's order."""
    if model is None:
        return []
    saved = model.state_dict().keys()
    return [name for name, buffer in model.named_buffers() if name in saved and _is_number(buffer)]


def _is_number(buffer: torch.Tensor) -> bool:
    return not (buffer.is_complex() or buffer.dtype == torch.bool)


def buffers_of(model: torch.nn.Module | None, names: list[str]) -> list[torch.Tensor]:
    """Return the model's present buffers; ``model.to(…)`` makes new ones."""
    if model is None:
        return []
    return [buffer for name, buffer in model.named_buffers() if name in names]
