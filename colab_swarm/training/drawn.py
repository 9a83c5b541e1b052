"""What the next bare ``step()`` counts: the batches that were drawn since the last one, or what a framework says."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

Loss = float | torch.Tensor
# Of each gradient, which tensor it is and how often it was changed; empty without any.
_Marks = list[tuple[int, int, int]]


@dataclass
class _Drawn:
    """What one loader gave since the last step."""

    sizes: list[float | None] = field(default_factory=list)  # samples of each batch; None: not known
    marks: _Marks = field(default_factory=list)  # of the gradients as the last batch was drawn


class NextStep:
    """Samples, weight and loss of the next bare ``step()``.

    Gradients add up until a step, so the batches since the last one count together. A batch of which no gradient
    came, such as one that the loop passed over, does not count; nor do those whose gradients were cleared.

    Args:
        trained: gives the parameters that get the gradients.
        batch_size: what counts if nobody says anything.
    """

    def __init__(self, trained: Callable[[], Iterable[torch.Tensor]], batch_size: float | None) -> None:
        self._trained = trained
        self._batch_size = batch_size
        self._drawn: dict[int, _Drawn] = {}  # by the loader's number
        self._said: tuple[float | None, float | None, Loss | None] | None = None

    def say(self, samples: float | None, weight: float | None, loss: Loss | None) -> None:
        """Count this, whatever was drawn."""
        self._said = samples, weight, loss

    def draw(self, samples: float | None, loader: int) -> None:
        """Count a batch that the loader of this number gives now; ``samples`` is None if nothing says how many."""
        marks = self._marks()
        drawn = self._drawn.setdefault(loader, _Drawn())
        if not marks:
            drawn.sizes = []
        elif drawn.sizes and drawn.marks == marks:
            drawn.sizes.pop()
        drawn.sizes.append(samples)
        drawn.marks = marks

    def on_cleared(self) -> None:
        """Take the gradients of all but the last batches for cleared: theirs may still come."""
        for drawn in self._drawn.values():
            drawn.sizes = drawn.sizes[-1:]

    def take(self) -> tuple[float | None, float | None, Loss | None]:
        """Return what the step counts, and begin again."""
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

    def _marks(self) -> _Marks:
        marks = []
        for parameter in self._trained():
            gradient = parameter.grad
            if gradient is not None:
                marks.append((id(parameter), id(gradient), gradient._version))
        return marks
