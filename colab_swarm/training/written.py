"""Notices that somebody else than the optimizer wrote to a model's weights, such as ``load_state_dict``."""

from collections.abc import Sequence

import torch

from colab_swarm.training.flat import reals

LOADED = 0.05  # of the values' norm: SAM, weight clipping and swapped averages change less between two steps
_SAMPLES = 64  # values of each tensor that are compared


class WrittenWeights:
    """Remembers a model's weights as the optimizer wrote them last, by some values of each tensor.

    Torch counts what is written to a tensor, but for ``.data``; so nothing is compared where nothing was written.
    """

    def __init__(self, model: Sequence[torch.Tensor]) -> None:
        self._model = model
        self.on_written()

    def on_written(self) -> None:
        """Take the present weights for the optimizer's own."""
        self._versions = self._present_versions()
        self._values = self._present_values()

    def _present_versions(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for parameter in self._model]

    def _present_values(self) -> list[torch.Tensor]:
        return [_some_values(parameter) for parameter in self._model]

    def change(self) -> float:
        """Return by how much others changed the weights since then, in norms of the values; 0 if they did not."""
        versions = self._present_versions()
        if versions == self._versions:
            return 0.0
        before = torch.cat([values.cpu().double() for values in self._values])
        now = torch.cat([values.cpu().double() for values in self._present_values()])
        self._versions = versions
        difference = float(torch.linalg.vector_norm(now - before))
        if not difference:
            return 0.0
        return difference / max(float(torch.linalg.vector_norm(before)), 1e-30)


@torch.no_grad()
def _some_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of values at equal distances in memory."""
    values = reals(parameter.detach())
    # A view in the order of memory: flatten() would copy a tensor with its channels last.
    by_stride = sorted(range(values.ndim), key=values.stride().__getitem__, reverse=True)
    values = values.permute(by_stride).flatten()
    step = max(1, len(values) // _SAMPLES)
    return values[::step][:_SAMPLES].to(torch.float32, copy=True)
