"""The settings that all peers of a collaboration must share: each publishes its own, and compares before it trains."""

from collections.abc import Iterable

import torch
from blake3 import blake3
from torch.optim import Optimizer

from colab_swarm.training.digests import digest_of
from colab_swarm.training.flat import layout_of
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import TrainingSettings


def agreement_of(replica: Replica, settings: TrainingSettings) -> tuple[tuple[str, str], ...]:
    """Return readable names and values of the settings; unset ones are omitted."""
    rule = replica.rule
    trained = [*replica.model, *replica.buffers.shared]
    layout = blake3(layout_of(trained).encode()).hexdigest(4)
    values = {
        "model": f"{replica.numel:,} trained values in {len(trained)} tensors (layout {layout})",
        "frozen base": _frozen_base(rule.model, replica.model),
        "optimizer": type(rule.optimizer).__name__,
        "learning rate": _learning_rates(rule.optimizer),
        "scheduler": "",
        "max_grad_norm": "",
        "target_batch_size": f"{settings.target_batch_size:g}",
        "weight_unit": settings.weight_unit,
        "local_steps": "",
        "compression": settings.compression,
        "mean_compression": settings.mean_compression,
    }
    if rule.scheduler:
        values["scheduler"] = type(rule.scheduler).__name__
    if rule.max_grad_norm:
        values["max_grad_norm"] = f"{rule.max_grad_norm:g}"
    if rule.local:
        values["local_steps"] = f"{settings.local_steps}"
    return tuple((name, value) for name, value in values.items() if value)


def _learning_rates(optimizer: Optimizer) -> str:
    """Return the different learning rates before any scheduler, lowest first."""
    rates = set()
    for group in optimizer.param_groups:
        rates.add(float(group.get("initial_lr", group.get("lr", 0.0))))
    return ", ".join(f"{rate:g}" for rate in sorted(rates))


def _frozen_base(model: torch.nn.Module | None, trained: Iterable[torch.Tensor]) -> str:
    """Return a digest and the size of the parameters that are not trained; empty without any."""
    if model is None:
        return ""
    skipped = {id(parameter) for parameter in trained}
    frozen = {}
    kinds = set()
    layout = []
    for name, parameter in model.named_parameters():
        if id(parameter) in skipped:
            continue
        # prefixes of DataParallel and torch.compile
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
        frozen[name] = parameter
        kinds.add(str(parameter.dtype).removeprefix("torch."))
        quantization = getattr(parameter, "quant_type", "")
        layout.append((name, tuple(parameter.shape), parameter.dtype, quantization))
    if not frozen:
        return ""
    base = blake3(repr(layout).encode() + digest_of(frozen.values())).hexdigest(4)
    numel = sum(parameter.numel() for parameter in frozen.values())
    return f"{base}: {numel:,} values in {', '.join(sorted(kinds))}"
