"""The samples of the next ``step()`` without arguments: those of the batches since the last step, or a framework's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

Loss = float | torch.Tensor


@dataclass
class _Drawn:
    """The batches that one loader gave since the last step."""

    sizes: list[float | None] = field(default_factory=list)  # samples of each batch; None: not known
    # At the time when the last batch was drawn: for each gradient, the tensor's id and how often it was changed.
    marks: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class NextStep:
    """Samples, weight and loss of the next ``step()`` without arguments.

    Gradients add up until a step, so the batches since the last step count together. A batch does not count if it
    gave no gradient, for example because the loop skipped it, or if the loop cleared its gradients.
    """

    _trained: Callable[[], Iterable[torch.Tensor]]  # returns the parameters that get the gradients
    _batch_size: float | None  # the samples that count if no batch was drawn and nothing was set
    _drawn: dict[int, _Drawn] = field(default_factory=dict)  # by the loader's number
    _said: tuple[float | None, float | None, Loss | None] | None = None

    def say(self, samples: float | None, weight: float | None, loss: Loss | None) -> None:
        """Let the next step count these values in place of the drawn batches."""
        self._said = samples, weight, loss

    def draw(self, samples: float | None, loader: int) -> None:
        """Count a batch that loader number ``loader`` gives now; ``samples`` is None if its size is not known."""
        marks = []
        for parameter in self._trained():
            gradient = parameter.grad
            if gradient is not None:
                marks.append((id(parameter), id(gradient), gradient._version))
        drawn = self._drawn.setdefault(loader, _Drawn())
        if not marks:
            drawn.sizes = []
        elif drawn.sizes and drawn.marks == marks:
            drawn.sizes.pop()
        drawn.sizes.append(samples)
        drawn.marks = marks

    def on_cleared(self) -> None:
        """Forget all batches except each loader's last one, whose gradients may still come."""
        for drawn in self._drawn.values():
            drawn.sizes = drawn.sizes[-1:]

    def take(self) -> tuple[float | None, float | None, Loss | None]:
        """Return the samples, weight and loss that the step counts, and forget the batches."""
        said = self._said
        sizes = [size for drawn in self._drawn.values() for size in drawn.sizes]
        self._said = None
        self._drawn = {}
        if said is not None:
            return said
        if not sizes:
            return self._batch_size, None, None
        if None in sizes:
            return None, None, None
        return sum(filter(None, sizes)), None, None
