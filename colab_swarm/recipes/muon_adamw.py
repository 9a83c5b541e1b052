"""Muon for the hidden matrices of a model, AdamW for the other parameters, as the optimizer of local steps.

This is the inner optimizer of MuLoCo (arXiv 2505.23725).
"""

from collections import defaultdict
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from colab_swarm.errors import require


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` and `AdamW` as one optimizer. A parameter group's entry ``muon`` says which one steps it.

    Muon makes the update of a matrix orthogonal. Then the pseudo-gradients, which are the changes by local steps, keep
    more of their direction when they are compressed to a few bits.
    """

    def __init__(self, model: torch.nn.Module, *, lr: float, weight_decay: float) -> None:
        embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        shaped = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        # the last matrix is the head; AdamW steps the head and the embeddings
        hidden = {parameter for parameter in shaped[:-1] if parameter not in embeddings}
        matrices = []
        others = []
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter in hidden:
                matrices.append(parameter)
            else:
                others.append(parameter)
        require(
            matrices, "Muon is for hidden matrices, and the model has no hidden matrix: use torch.optim.AdamW"
        )
        # Muon's updates are as large as AdamW's (Moonlight, arXiv 2502.16982), so one learning rate is enough for both.
        self._parts: list[Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay),
        ]
        groups = []
        for part in self._parts:
            for group in part.param_groups:
                groups.append({**group, "muon": part is self._parts[0]})
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        """Let the two parts step the groups of this optimizer, with its state."""
        for part in self._parts:
            muon = part is self._parts[0]
            part.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = defaultdict(dict, self.state)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def muon(model: torch.nn.Module, *, lr: float = 2e-3, weight_decay: float = 0.1) -> MuonAdamW:
    """Return an optimizer: Muon for hidden matrices, AdamW for embeddings, the last matrix, norms and biases.

    Use it with ``local_steps``. Without local steps, peers average gradients, which compression distorts just as much
    with AdamW. Raises ValueError if the model has no hidden matrix.
    """
    return MuonAdamW(model, lr=lr, weight_decay=weight_decay)
