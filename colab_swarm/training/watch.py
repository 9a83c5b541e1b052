"""Notices what a user changes of a model beside its optimizer's steps: weights, frozen parameters, membership."""

import logging

import torch

from colab_swarm.errors import require
from colab_swarm.training.names import ModelNames
from colab_swarm.training.replica import Replica

logger = logging.getLogger(__name__)

_LOOK_STEPS = 10  # in which another optimizer has taken a step
_AGAIN = "make a new optimizer, and pass it to swarm.optimizer(…) again, at all peers"


class TrainedParameters:
    """Finds what changed in what is trained since `Swarm.optimizer`, and parameters that no optimizer trains.

    It notes frozen parameters that were changed, such as a teacher's, in `Replica.moved`.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._names = ModelNames(replica.rule.model)
        self._trainable = self._present_trainable()
        self._shapes = [parameter.shape for parameter in replica.model]
        self._groups = self._present_groups()
        # When to look whether another optimizer trains the bystanders; none: it is done.
        self._look_step = replica.step + _LOOK_STEPS
        trained = set(map(id, replica.model))
        beside = [parameter for parameter in self._all() if id(parameter) not in trained]
        self._bystanders = [(one, one._version) for one in beside if one.requires_grad]
        self._frozen = [(one, one._version) for one in beside if _is_frozen(one)]

    def _all(self) -> list[torch.Tensor]:
        """Return the model's parameters, as far as they are known."""
        if self._replica.rule.model is None:
            return self._replica.model
        return list(self._replica.rule.model.parameters())

    def _present_trainable(self) -> dict[int, torch.Tensor]:
        return {id(parameter): parameter for parameter in self._all() if parameter.requires_grad}

    def _present_groups(self) -> list[list[int]]:
        groups = self._replica.rule.optimizer.param_groups
        return [list(map(id, group["params"])) for group in groups]

    def check(self) -> list[str]:
        """Return new sentences for the user; raise `RuntimeError` if something else is trained now."""
        self._check_trainable()
        self._check_shapes()
        text = "the parameter groups of the wrapped optimizer were changed after swarm.optimizer(…)"
        require(self._groups == self._present_groups(), f"{text}: {_AGAIN}", RuntimeError)
        self._replica.buffers.check()
        self._look_for_bystanders()
        return self._look_for_moved()

    def _check_trainable(self) -> None:
        present = self._present_trainable()
        if present.keys() == self._trainable.keys():
            return
        changed = {**self._trainable, **present}
        for key in self._trainable.keys() & present.keys():
            del changed[key]
        names = ModelNames(self._replica.rule.model).named(list(changed.values()))
        raise RuntimeError(
            f"parameters were frozen or unfrozen, added or replaced, such as {next(iter(names))}: make a new "
            "optimizer over the trainable ones, and pass it to swarm.optimizer(…) again, at all peers"
        )

    def _check_shapes(self) -> None:
        for name, parameter, shape in zip(
            self._replica.names, self._replica.model, self._shapes, strict=True
        ):
            if parameter.shape != shape:
                raise RuntimeError(
                    f"{name} was resized, from the shape {tuple(shape)} to {tuple(parameter.shape)}, after "
                    f"swarm.optimizer(…): {_AGAIN}"
                )

    def _look_for_bystanders(self) -> None:
        if not self._bystanders or self._replica.step < self._look_step:
            return
        left = []
        for parameter, version in self._bystanders:
            if parameter.grad is not None and parameter._version == version:
                left.append(parameter)
        self._bystanders = []
        if left:
            logger.warning(
                "no optimizer trains %s of model=… (%d in all), nor are they compared: train or freeze them",
                next(iter(self._names.named(left))),
                len(left),
            )

    def _look_for_moved(self) -> list[str]:
        moved = [parameter for parameter, version in self._frozen if parameter._version != version]
        if not moved:
            return []
        self._frozen = [pair for pair in self._frozen if pair[0]._version == pair[1]]
        named = self._names.named(moved)
        is_first = not self._replica.moved
        self._replica.moved |= named
        if not is_first:
            return []
        return [
            f"frozen parameters change, such as {next(iter(named))}: peers do not average them, but a late joiner "
            "gets them with the state"
        ]


def _is_frozen(parameter: torch.Tensor) -> bool:
    # Quantized ones are packed when they come to a GPU.
    return not parameter.requires_grad and parameter.is_floating_point()
