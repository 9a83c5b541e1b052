"""`swarm.average`: means of torch tensors, NumPy arrays and lists of numbers, by name."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from colab_swarm.averaging.moshpit import MoshpitAverager, MoshpitResult
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.settings import PeerServices


class ArrayAverages:
    def __init__(self, services: PeerServices, run_id: str) -> None:
        self._services, self._run_id = services, run_id
        self._averagers: dict[str, MoshpitAverager] = {}

    async def average(
        self, values: Any, *, weight: float, group_size: int | None, name: str, compression: str = "float32"
    ) -> tuple[Any, MoshpitResult]:
        """Return the mean in the shape and kind of ``values``; see `MoshpitAverager.average`."""
        flat, restore = flatten(values)
        if name not in self._averagers:
            services, prefix = self._services, f"{self._run_id}/average/{name}"
            self._averagers[name] = MoshpitAverager(
                services.router, services.dht, services.averager, prefix, compression
            )
        averager = self._averagers[name]
        if averager.codec != compression:
            raise ValueError(
                f"{name!r} is averaged as {averager.codec} here: choose another name for {compression}"
            )
        mean, result = await averager.average(flat, weight=weight, group_size=group_size)
        return restore(mean), result

    async def close(self) -> None:
        for averager in self._averagers.values():
            averager.close()
        self._averagers.clear()


def flatten(values: Any) -> tuple[Floats, Callable[[Floats], Any]]:
    """Return the values as a flat float32 vector, and what restores their shape and kind."""
    torch = sys.modules.get("torch")  # imported already if there is a tensor
    if torch is not None and isinstance(values, torch.Tensor):
        flat = values.detach().to("cpu", torch.float32).flatten().numpy()
        return flat, lambda mean: torch.from_numpy(mean).reshape(values.shape).to(values)
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{array.dtype} cannot be averaged: pass an array or tensor of real numbers")
    kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.float32)
    return array.astype(np.float32).ravel(), lambda mean: mean.reshape(array.shape).astype(kind)
