"""What torch, and code written for torch, expects of an optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from colab_swarm.training.replica import Replica


class TorchFace(Optimizer):
    """An optimizer whose state is the swarm's: it can be read as any other's, and changed by nobody alone."""

    _replica: Replica

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the last ``backward()``; what is accumulated stays."""
        self._replica.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer, to read; with delayed updates a change of them has no effect."""
        return self._replica.groups()

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self._replica.rule.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self._replica.rule.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer; `save` writes everything."""
        return self._replica.rule.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not offered: one peer's optimizer state must not differ from the others'."""
        raise TypeError(
            "peers share one optimizer state: use optimizer.load(path) with a file written by save(path)"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not offered: the swarm has agreed on the parameters."""
        raise TypeError("the swarm has agreed on the parameters: add groups before swarm.optimizer(…)")
