"""Decides where a trainer's vectors lie: on the model's devices if their memory allows it, else in main memory."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from colab_swarm.markup import size
from colab_swarm.tensors.codecs import ErrorFeedback
from colab_swarm.tensors.device import host_values, in_main_memory, spare_bytes
from colab_swarm.tensors.device_vector import DeviceFeedback, DeviceVector
from colab_swarm.tensors.vector import HostVector, Vector
from colab_swarm.training.flat import FlatValues, reals
from colab_swarm.training.replica import Mode, Replica

logger = logging.getLogger(__name__)

ModelVector: TypeAlias = HostVector | DeviceVector
_VALUE_BYTES = 4
# Number of float32 vectors that rounds need, in addition to the memory of the user's loop and to the sum of gradients.
# Keys: True if steps are local, True if updates are delayed.
_VECTORS = {
    # The vector of the last round, from which other peers may still recover chunks.
    (False, False): 1,
    # The contribution, the swarm's parameters and gradients, two vectors of the optimizer, and its step's own memory.
    (False, True): 8,
    # The swarm's parameters, the outer momentum, and gradients, which Nesterov momentum changes.
    (True, False): 4,
    # In addition, the contribution, and the model's parameters at the time when a round began.
    (True, True): 6,
}
# The residual (the error feedback) and, while a round runs, the part that its compression cuts off. SparseLoCo has
# these vectors in place of the momentum.
_FEEDBACK_VECTORS = 2


class Placement:
    """Decides where gradients are summed, and where a round's vector, its residual and the swarm's parameters lie.

    Sums lie on the model's devices. At the first contribution, the other vectors move there, too, if they fit: by then
    the free memory shows how much a step needs at most. After an out-of-memory error, all these vectors lie in main
    memory until the end.

    ``held(vector)`` is True while another peer may still recover chunks from this vector. At most ``limit_bytes`` of
    the devices' memory are used; None allows all free memory.
    """

    def __init__(
        self,
        replica: Replica,
        held: Callable[[Vector], bool],
        *,
        error_feedback: bool,
        limit_bytes: float | None,
    ) -> None:
        self._replica = replica
        self._held = held
        rule = replica.rule
        self._vectors = _VECTORS[rule.local, rule.delayed]
        if error_feedback and not rule.sparse:
            self._vectors += _FEEDBACK_VECTORS
        self._vector_bytes = _VALUE_BYTES * replica.numel
        most_vectors = math.inf if limit_bytes is None else limit_bytes / self._vector_bytes
        self._sums_there = most_vectors >= 1
        # Whether vectors lie on the devices; None: not decided yet.
        self._vectors_there: bool | None = None
        if most_vectors < 1 + self._vectors:
            self._vectors_there = False
        self._host_vectors: list[HostVector] = []
        self._summed: HostVector | None = None  # the vector whose memory the present sum uses
        self.aside: ModelVector | None = None  # the contribution of a delayed update

    @property
    def on_devices(self) -> bool:
        """True if sums lie on devices; then flags are computed there, too, so that nothing waits for the devices."""
        model = self._replica.model
        return self._sums_there and not all(in_main_memory(parameter.device) for parameter in model)

    def new_sum(self) -> FlatValues:
        """Return memory for a sum of gradients."""
        self._summed = None
        if self.on_devices:
            try:
                return self._sum_there()
            except torch.OutOfMemoryError as error:
                self.leave_devices(error, sums=True)
        return self._sum_in(self._free_vector())

    def _sum_there(self) -> FlatValues:
        return FlatValues(self._replica.model)

    def _sum_in(self, vector: HostVector) -> FlatValues:
        self._summed = vector
        return FlatValues(self._replica.model, vector.values[self._replica.front :])

    def _free_vector(self) -> HostVector:
        for vector in self._host_vectors:
            if vector is not self.aside and not self._held(vector):
                return vector
        vector = HostVector(host_values(self._replica.numel, self._replica.model[0].device))
        self._host_vectors.append(vector)
        return vector

    def new_vector(self) -> ModelVector:
        """Return a vector for the change by local steps; the caller writes the values."""
        if self._vectors_there and self.on_devices:
            return self._device_vector(FlatValues(self._replica.model))
        return self._free_vector()

    def vector_of(self, total: FlatValues) -> ModelVector:
        """Return a vector with the values of ``total``, a sum of `new_sum`, in the same memory if possible."""
        summed = self._summed
        self._summed = None
        if summed is not None:
            return summed
        if self._vectors_there and self.on_devices:
            return self._device_vector(total)
        vector = self._free_vector()
        total.write_to(vector.values[self._replica.front :])
        return vector

    def _device_vector(self, values: FlatValues) -> DeviceVector:
        return DeviceVector(np.zeros(self._replica.front, np.float32), values.segments)

    def sum_from(self, vector: ModelVector) -> FlatValues | None:
        """Return a contribution's memory as a sum for more gradients; None if it is held, or lies elsewhere."""
        if self._held(vector) or isinstance(vector, DeviceVector) is not self.on_devices:
            return None
        if isinstance(vector, HostVector):
            return self._sum_in(vector)
        return self.values_of(vector)

    def values_of(self, held: ModelVector | ErrorFeedback | DeviceFeedback) -> FlatValues:
        """Return the part of a vector that belongs to the parameters, on the vector's own device."""
        model = self._replica.model
        if isinstance(held, DeviceVector | DeviceFeedback):
            return FlatValues(model, segments=held.body)
        values = held.values if isinstance(held, HostVector) else held.residual
        return FlatValues(model, values[self._replica.front :])

    def decide(self) -> None:
        """Decide where vectors lie, unless this was decided before, and move the swarm's parameters there."""
        if not self.on_devices:
            return
        if self._vectors_there is None:
            vectors = self._vectors
            if self._replica.rule.mode is Mode.DIRECT and not self._replica.step:
                # The optimizer allocates two vectors in its first step.
                vectors += 2
            needed_bytes = Counter[torch.device]()
            for parameter in self._replica.model:
                needed_bytes[parameter.device] += vectors * _VALUE_BYTES * reals(parameter).numel()
            self._vectors_there = all(
                spare_bytes(device) >= needed for device, needed in needed_bytes.items()
            )
            logger.info("the swarm's vectors lie %s", self.where)
        self._replica.place(beside_model=self._vectors_there)

    def leave_devices(self, error: torch.OutOfMemoryError, *, sums: bool = False) -> bool:
        """Move all vectors, and with ``sums`` also future sums, to main memory; return False if all were there."""
        leaves = self._vectors_there is not False or (sums and self._sums_there)
        self._vectors_there = False
        if sums:
            self._sums_there = False
        if leaves:
            # The error's frames may refer to a copy, which then could not be swapped, and keep a device's memory.
            error.__traceback__ = None
        self._replica.place(beside_model=False)
        if leaves:
            logger.warning("the swarm's vectors lie %s from now on: %s", self.where, error)
        return leaves

    @property
    def where(self) -> str:
        """A text on where sums and vectors lie, and on how much of the devices' memory they take at most."""
        if not self.on_devices:
            return "in main memory"
        devices = ", ".join(sorted({str(parameter.device) for parameter in self._replica.model}))
        if self._vectors_there:
            return f"on {devices} ({size((1 + self._vectors) * self._vector_bytes)} at most)"
        return f"in main memory, and sums of gradients on {devices} ({size(self._vector_bytes)})"
