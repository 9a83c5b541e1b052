"""One expert of another peer as a module of a torch model."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor, nn

from colab_swarm.errors import ExpertError
from colab_swarm.moe.dispatch import ExpertAccess, as_floats, through
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.services import ExpertInfo
from colab_swarm.tensors.codecs import Floats


class RemoteExpert(nn.Module):
    """Computes forward and backward where the expert is, which learns from each backward.

    Maps a tensor (..., *sample shape) to one of the same shape and dtype; float32 inside. It has no parameters here.

    Args:
        access: reaches the expert.
        grid: where it is.
        uid: its name.

    Raises:
        ValueError: it is none of the grid.
    """

    def __init__(self, access: ExpertAccess, grid: Grid, uid: str) -> None:
        super().__init__()
        grid.index(uid)
        self.grid, self.uid = grid, uid
        self._access = access

    def extra_repr(self) -> str:
        """Its name."""
        return self.uid

    def info(self) -> ExpertInfo:
        """Where it is now, its shape and step.

        Raises:
            ExpertError: nobody hosts it.
        """
        return self._access.run(self._find())

    async def _find(self) -> ExpertInfo:
        try:
            async with asyncio.timeout(self._access.timeout_s):
                info = await self._access.directory.find(self.grid, self.uid)
        except TimeoutError as error:
            raise ExpertError(f"{self.uid} was not found in {self._access.timeout_s:g} s") from error
        if info is None:
            raise ExpertError(f"nobody hosts {self.uid}: host it, or wait until a peer takes it over")
        return info

    def forward(self, inputs: Tensor) -> Tensor:
        """Of the same shape and dtype.

        Raises:
            ExpertError: nobody hosts it, or it failed; in backward too.
            ValueError: the inputs do not fit.
        """
        info = self.info()
        sample = inputs.shape[-len(info.shape) :]
        if inputs.ndim < len(info.shape) or any(
            size not in (-1, given) for size, given in zip(info.shape, sample, strict=True)
        ):
            raise ValueError(f"{self.uid} takes samples of shape {info.shape}, not {tuple(inputs.shape)}")
        if not inputs.numel():
            return inputs
        with torch.autocast(inputs.device.type, enabled=False):
            samples = inputs.reshape(-1, *sample).float().cpu()
            values = as_floats(samples)

            def backward(grads: Floats) -> Floats:
                return self._access.run(self._access.backward(info, values, grads))

            outputs = through(samples, self._access.run(self._access.forward(info, values)), backward)
        return outputs.reshape(inputs.shape).to(inputs)
