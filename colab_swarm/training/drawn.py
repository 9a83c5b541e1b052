"""What the next bare ``step()`` counts: the batches that were drawn since the last one, or what a framework says."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

Loss = float | torch.Tensor


@dataclass
class _Drawn:
    """What one loader gave since the last step."""

    sizes: list[float | None] = field(default_factory=list)  # samples of each batch; None: not known
    # As the last batch was drawn: of each gradient, which tensor it is and how often it was changed.
    marks: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class NextStep:
    """Samples, weight and loss of the next bare ``step()``.

    Gradients add up until a step, so the batches since the last one count together. A batch of which no gradient
    came, such as one that the loop passed over, does not count; nor do those whose gradients were cleared.
    """

    _trained: Callable[[], Iterable[torch.Tensor]]  # gives the parameters that get the gradients
    _batch_size: float | None  # what counts if nobody says anything
    _drawn: dict[int, _Drawn] = field(default_factory=dict)  # by the loader's number
    _said: tuple[float | None, float | None, Loss | None] | None = None

    def say(self, samples: float | None, weight: float | None, loss: Loss | None) -> None:
        """Count this, whatever was drawn."""
        self._said = samples, weight, loss

    def draw(self, samples: float | None, loader: int) -> None:
        """Count a batch that the loader of this number gives now; ``samples`` is None if nothing says how many."""
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
