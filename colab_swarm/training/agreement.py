"""The settings that must be equal at all peers of a collaboration, as each peer publishes them for comparison."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colab_swarm.markup import count, plain
from colab_swarm.training.digests import digest_of_tensors
from colab_swarm.training.records import MAX_PAIR_TEXT
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import TrainingSettings

FROZEN_BASE = "frozen base"
# Options of PEFT's LoRA; its other options show in the names and shapes of the tensors.
_LORA_OPTIONS = (
    "r",
    "lora_alpha",
    "alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)
# Entries of a group that are no options, and options that say how a step is computed, not what its result is.
_NOT_COMPARED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def agreement_of(
    replica: Replica, settings: TrainingSettings, *, frozen_base: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return readable names and values of the settings; unset settings are omitted.

    If this model's frozen parameters have changed, ``frozen_base`` describes them as they were at the beginning.
    """
    rule = replica.rule
    types = "/".join(sorted({kind for kind, _ in replica.kinds.values()}))
    layout = blake3(repr(replica.kinds).encode()).hexdigest(4)
    values = {
        "model": f"{replica.numel:,} trained values in {len(replica.kinds)} {types} tensors (layout {layout})",
        FROZEN_BASE: frozen_base or frozen_base_of(rule.model, replica.model),
        "adapters": _adapters(rule.model),
        "optimizer": type(rule.optimizer).__name__,
        "optimizer options": _options(rule.optimizer, rule.scheduler, replica.name_by_id),
        "learning rate": _learning_rates(rule.optimizer),
        "scheduler": type(rule.scheduler).__name__ if rule.scheduler else "",
        "max_grad_norm": f"{rule.max_grad_norm:g}" if rule.max_grad_norm else "",
        "target_batch_size": f"{settings.target_batch_size:g}",
        "weight_unit": settings.weight_unit,
        "local_steps": f"{settings.communication.local_steps}" if rule.local else "",
        "compression": settings.communication.compression,
        "mean_compression": settings.communication.mean_compression,
    }
    return tuple((name, value) for name, value in values.items() if value)


def _learning_rates(optimizer: Optimizer) -> str:
    """Return the distinct learning rates that the optimizer had before any scheduler, lowest first."""
    rates = {float(group.get("initial_lr", group.get("lr", 0.0))) for group in optimizer.param_groups}
    return ", ".join(f"{rate:g}" for rate in sorted(rates))


def _options(optimizer: Optimizer, scheduler: LRScheduler | None, names: Mapping[int, str]) -> str:
    """Return a digest of the parameter groups' options, and a text on those that differ from the class's defaults.

    If there are several groups, the digest includes the ``names`` of their parameters.
    """
    defaults = _defaults(type(optimizer))
    skipped = {*_NOT_COMPARED, "lr"}
    if getattr(scheduler, "cycle_momentum", False):
        skipped |= {"momentum", "betas"}
    exact = []
    texts = Counter[str]()
    for group in optimizer.param_groups:
        options = {name: _plain(group[name]) for name in sorted(defaults.keys() & group.keys() - skipped)}
        members = sorted(names.get(id(parameter), "") for parameter in group["params"])
        exact.append((options, members if len(optimizer.param_groups) > 1 else ()))
        chosen = [f"{name}={value}" for name, value in options.items() if value != _plain(defaults[name])]
        texts[" ".join(chosen) or "defaults"] += len(group["params"])
    text = ", ".join(texts)
    if len(texts) > 1:
        text = ", ".join(f"{options} ({count(number, 'tensor')})" for options, number in texts.items())
    return plain(f"{blake3(repr(exact).encode()).hexdigest(4)}: {text}", MAX_PAIR_TEXT)


def _defaults(kind: type) -> Mapping[str, Any]:
    """Return the options of an optimizer's class with their defaults.

    The options of a base class are included if the constructor passes further options (``**kwargs``) on to it.
    """
    defaults: dict[str, Any] = {}
    for base in kind.__mro__:
        initializer = vars(base).get("__init__")
        if not inspect.isfunction(initializer):
            continue
        parameters = inspect.signature(initializer).parameters.values()
        for parameter in parameters:
            defaults.setdefault(parameter.name, parameter.default)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return defaults


def _plain(value: object) -> str:
    """Return an option as a text that is the same for equal numbers of different types."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{float(value):.6g}"
    return str(value)


def _adapters(model: torch.nn.Module | None) -> str:
    """Return a text on a PEFT model's adapters, the options that scale them, and a digest; empty without adapters."""
    adapters: Mapping[str, Any] = getattr(getattr(model, "module", model), "peft_config", {})
    texts = []
    for name, config in sorted(adapters.items()):
        options = {option: getattr(config, option, None) for option in _LORA_OPTIONS}
        texts.append(" ".join([name, *(f"{key}={_plain(value)}" for key, value in options.items() if value)]))
    if not texts:
        return ""
    text = ", ".join(texts)
    return plain(f"{blake3(text.encode()).hexdigest(4)}: {text}", MAX_PAIR_TEXT)


def frozen_base_of(model: torch.nn.Module | None, trained: Iterable[torch.Tensor]) -> str:
    """Return a digest and the size of the parameters that are not in ``trained``; an empty text if there are none.

    If such a parameter requires gradients, another optimizer may train it. Then the digest includes only the layout of
    this parameter, not its values.
    """
    if model is None:
        return ""
    skipped = {id(parameter) for parameter in trained}
    frozen = {}
    kinds = set()
    layout = []
    numel = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in skipped:
            continue
        # prefixes of DataParallel and torch.compile
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
        if not parameter.requires_grad:
            frozen[name] = parameter
        numel += parameter.numel()
        kinds.add(str(parameter.dtype).removeprefix("torch."))
        quantization = getattr(parameter, "quant_type", "")
        layout.append((name, tuple(parameter.shape), parameter.dtype, quantization))
    if not layout:
        return ""
    base = blake3(repr(layout).encode() + digest_of_tensors(frozen.values())).hexdigest(4)
    return f"{base}: {numel:,} values in {', '.join(sorted(kinds))}"
