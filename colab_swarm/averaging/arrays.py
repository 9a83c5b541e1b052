"""Averaging arrays as people have them: NumPy or torch, of any shape, several of them told apart by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from colab_swarm.averaging.moshpit import GridAverager, GridResult, GridSettings
from colab_swarm.averaging.rooms import Rooms
from colab_swarm.averaging.round import Averager
from colab_swarm.dht.service import DHT
from colab_swarm.tensors.codecs import Floats


class ArrayAverages:
    """All that a peer averages with whoever calls for it, by name."""

    def __init__(self, rooms: Rooms, dht: DHT, averager: Averager, run_id: str) -> None:
        self._services = rooms, dht, averager
        self._run_id = run_id
        self._averagers: dict[str, GridAverager] = {}

    async def average(
        self, values: Any, *, weight: float, group_size: int | None, name: str, codec: str = "float32"
    ) -> tuple[Any, GridResult]:
        """The mean in the shape and kind of ``values``; see `GridAverager.average` and `GridSettings.codec`.

        Raises:
            ValueError: also if the values of this name travelled by another codec before.
        """
        flat, restore = flatten(values)
        if name not in self._averagers:
            prefix, settings = f"{self._run_id}/average/{name}", GridSettings(codec)
            self._averagers[name] = GridAverager(*self._services, prefix, settings)
        averager = self._averagers[name]
        if averager.codec != codec:
            raise ValueError(
                f"{name!r} is averaged as {averager.codec} here: choose another name for {codec}"
            )
        mean, result = await averager.average(flat, weight=weight, group_size=group_size)
        return restore(mean), result

    async def close(self) -> None:
        """Average no more."""
        for averager in self._averagers.values():
            averager.close()
        self._averagers.clear()


def flatten(values: Any) -> tuple[Floats, Callable[[Floats], Any]]:
    """The values as a flat float32 vector, and what makes a vector an array of the same shape and kind again.

    Args:
        values: a torch tensor, or whatever NumPy makes an array of.

    Raises:
        ValueError: they are no real numbers.
    """
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(values, torch.Tensor):
        flat = values.detach().to("cpu", torch.float32).flatten().numpy()
        return flat, lambda mean: torch.from_numpy(mean).reshape(values.shape).to(values)
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{array.dtype} cannot be averaged: pass an array or tensor of real numbers")
    kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.float32)
    return array.astype(np.float32).ravel(), lambda mean: mean.reshape(array.shape).astype(kind)
