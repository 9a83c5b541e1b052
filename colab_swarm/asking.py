"""`swarm.try_model()`: ask the model that is trained here, as it is and as this peer found it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colab_swarm.widgets.try_model import Replies, TryModel

if TYPE_CHECKING:
    from torch import nn

    from colab_swarm.recipes.asking import Askable, Weights
    from colab_swarm.recipes.replies import Reply
    from colab_swarm.training.beginning import Beginning
    from colab_swarm.training.optimizer import SwarmOptimizer


@dataclass(frozen=True)
class _Trained:
    optimizer: SwarmOptimizer
    beginning: Beginning


class Asking:
    """What a swarm's user can ask: the last model that was made known, and the weights that training began with."""

    def __init__(self) -> None:
        self._known: tuple[nn.Module, Askable] | None = None
        self._trained: dict[str, _Trained] = {}

    def can_ask(self, model: nn.Module, askable: Askable) -> None:
        """From now on it is this model that is asked, unless another is given."""
        self._known = model, askable

    def on_optimizer(self, name: str, optimizer: SwarmOptimizer) -> None:
        """This peer begins to train; ``optimizer`` has caught up with the swarm."""
        from colab_swarm.training.beginning import Beginning

        groups = optimizer.param_groups
        parameters = [one for group in groups for one in group["params"] if one.requires_grad]
        self._trained[name] = _Trained(optimizer, Beginning(parameters, step=optimizer.global_step))

    def try_model(self, question: Any, model: nn.Module | None, askable: Askable | None) -> TryModel:
        """Ask; without a question the examples, with a form to ask more.

        Raises:
            ValueError: there is no such model, or the question cannot be asked.
        """
        if model is None or askable is None:
            if self._known is None or (model is not None and model is not self._known[0]):
                raise ValueError(
                    "which model? Pass model= and labels=, or get it by cs.albert(…, swarm=swarm), which makes it known"
                )
            model, askable = self._known[0], askable or self._known[1]
        asked, known = model, askable
        questions = list(known.examples) if question is None else [question]
        form = known.form if question is None else None
        return TryModel(lambda these: self._ask(asked, known, these), questions, form=form)

    def _ask(self, model: nn.Module, askable: Askable, questions: Sequence[Any]) -> Replies:
        trained = next((one for one in self._trained.values() if one.beginning.is_of(model)), None)
        if trained is None:
            found = _replies(askable, model, questions, None)
            return Replies(found, None, None, "no swarm.optimizer(…) trains this model")
        beginning = trained.beginning
        before = beginning.weights_of(model) or None
        step_before = None if before is None else beginning.step
        found = _replies(askable, model, questions, before)
        return Replies(found, step_before, trained.optimizer.global_step, beginning.why_not)


def _replies(
    askable: Askable, model: nn.Module, questions: Sequence[Any], before: Weights | None
) -> tuple[Reply, ...]:
    return tuple(reply for one in questions for reply in askable.replies(model, one, before))
