"""Notices changes of frozen parameters, and of the set of parameters that is trained."""

import logging

import torch

from colab_swarm.errors import require
from colab_swarm.training.names import ModelNames
from colab_swarm.training.replica import Replica

logger = logging.getLogger(__name__)

_LOOK_STEPS = 10  # number of steps within which another optimizer is expected to take a step
_AGAIN = "make a new optimizer, and pass it to swarm.optimizer(…) again, at all peers"


class TrainedParameters:
    """Finds changes of the set of trained parameters since `Swarm.optimizer`, and parameters that no optimizer trains.

    If the values of frozen parameters change, such as a teacher's, it stores these parameters in `Replica.moved`.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._names = ModelNames(replica.rule.model)
        self._trainable = self._present_trainable()
        self._shapes = [parameter.shape for parameter in replica.model]
        self._groups = self._present_groups()
        # The step at which to check whether another optimizer trains the bystanders: the trainable parameters that
        # this optimizer does not train.
        self._look_step = replica.step + _LOOK_STEPS
        trained = set(map(id, replica.model))
        beside = [parameter for parameter in self._all() if id(parameter) not in trained]
        self._bystanders = [(one, one._version) for one in beside if one.requires_grad]
        # Quantized parameters are left out, because they are packed when they are moved to a GPU.
        frozen = [one for one in beside if not one.requires_grad and one.is_floating_point()]
        self._frozen = [(one, one._version) for one in frozen]

    def _all(self) -> list[torch.Tensor]:
        """Return all parameters of the model; without a model, the trained parameters."""
        if self._replica.rule.model is None:
            return self._replica.model
        return list(self._replica.rule.model.parameters())

    def _present_trainable(self) -> dict[int, torch.Tensor]:
        return {id(parameter): parameter for parameter in self._all() if parameter.requires_grad}

    def _present_groups(self) -> list[list[int]]:
        groups = self._replica.rule.optimizer.param_groups
        return [list(map(id, group["params"])) for group in groups]

    def check(self) -> list[str]:
        """Return new sentences for the user; raise `RuntimeError` if other parameters are trained now."""
        self._check_trainable()
        for name, parameter, shape in zip(
            self._replica.names, self._replica.model, self._shapes, strict=True
        ):
            if parameter.shape != shape:
                raise RuntimeError(
                    f"{name} was resized, from the shape {tuple(shape)} to {tuple(parameter.shape)}, after "
                    f"swarm.optimizer(…): {_AGAIN}"
                )
        text = "the parameter groups of the wrapped optimizer were changed after swarm.optimizer(…)"
        require(self._groups == self._present_groups(), f"{text}: {_AGAIN}", RuntimeError)
        self._replica.buffers.check()
        self._look_for_bystanders()
        return self._look_for_moved()

    def _check_trainable(self) -> None:
        present = self._present_trainable()
        if present.keys() == self._trainable.keys():
            return
        both = {**self._trainable, **present}
        changed = [both[key] for key in both if (key in present) is not (key in self._trainable)]
        names = ModelNames(self._replica.rule.model).named(changed)
        raise RuntimeError(
            f"parameters were frozen or unfrozen, added or replaced, such as {next(iter(names))}: make a new "
            "optimizer over the trainable ones, and pass it to swarm.optimizer(…) again, at all peers"
        )

    def _look_for_bystanders(self) -> None:
        if not self._bystanders or self._replica.step < self._look_step:
            return
        left = [one for one, version in self._bystanders if one.grad is not None and one._version == version]
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
