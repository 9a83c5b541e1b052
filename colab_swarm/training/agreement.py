"""The settings that all peers of a collaboration must share: each publishes its own, and compares before it trains."""

from collections.abc import Iterable

import torch
from blake3 import blake3

from colab_swarm.training.replica import Replica, digest_of
from colab_swarm.training.settings import TrainingSettings


def agreement_of(replica: Replica, settings: TrainingSettings) -> tuple[tuple[str, str], ...]:
    """Return readable names and values of the settings; unset ones are omitted."""
    rule = replica.rule
    trained = [*replica.model, *replica.shared]
    rates = sorted(
        {float(group.get("initial_lr", group.get("lr", 0.0))) for group in rule.optimizer.param_groups}
    )
    layout = blake3(repr([(tuple(one.shape), str(one.dtype)) for one in trained]).encode()).hexdigest(4)
    found = {
        "model": f"{replica.numel:,} trained values in {len(trained)} tensors (layout {layout})",
        "frozen base": _frozen_base(rule.model, replica.model),
        "optimizer": type(rule.optimizer).__name__,
        "learning rate": ", ".join(f"{rate:g}" for rate in rates),
        "scheduler": type(rule.scheduler).__name__ if rule.scheduler else "",
        "max_grad_norm": f"{rule.max_grad_norm:g}" if rule.max_grad_norm else "",
        "target_batch_size": f"{settings.target_batch_size:g}",
        "weight_unit": settings.weight_unit,
        "local_steps": f"{settings.local_steps}" if rule.local else "",
        "compression": settings.compression,
        "mean_compression": settings.mean_compression,
    }
    return tuple((name, value) for name, value in found.items() if value)


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
    return f"{base}: {sum(one.numel() for one in frozen.values()):,} values in {', '.join(sorted(kinds))}"
