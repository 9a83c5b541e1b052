"""How much memory and time a model needs on this machine, measured by training it for two seconds."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

_CALIBRATION_S = 2.0
PARAMETER_BYTES = 16  # training memory per parameter: value, gradient and two moments, in float32
USABLE = 0.8  # share of free memory to plan with; the rest is for temporaries and fragments
_MAX_MICRO_BATCH = 512


@dataclass(frozen=True)
class Subject:
    """The model that is examined."""

    name: str  # for people, such as "ALBERT-large at 512 tokens"
    parameters: int  # number of trained values
    sample_bytes: float  # saved for the backward pass of one sample
    samples_per_s: float = 0.0  # measured speed, with the loading of batches; 0 if unknown


def calibrate(
    model: "Module", batches: "Iterable[Mapping[str, Tensor]]", *, seconds: float = _CALIBRATION_S
) -> Subject:
    """Run ``model(**batch).loss.backward()`` for about ``seconds`` after a short warm-up.

    Afterwards the model and torch's random state are as before. Raises ValueError if the batches run out.
    """
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved_bytes: dict[int, int] = {}

    def note(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        saved_bytes[address] = 0 if address in own_storages else storage.nbytes()
        return tensor

    with _restored(model, trained):
        passes = _train(model, batches)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro_batch = next(passes)
        # the first passes are slow
        _measure(passes, seconds / 4, 1)
        samples_per_s = _measure(passes, seconds, 3)
    numel = sum(parameter.numel() for parameter in trained)
    sample_bytes = sum(saved_bytes.values()) / micro_batch
    return Subject(type(model).__name__, numel, sample_bytes, samples_per_s)


@contextlib.contextmanager
def _restored(model: "Module", trained: "list[Parameter]") -> Iterator[None]:
    """Restore the model's gradients, buffers and modes, and torch's random state, at the end."""
    import torch

    gradients = [parameter.grad for parameter in trained]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            model.train()
            model.zero_grad(set_to_none=True)
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _train(model: "Module", batches: "Iterable[Mapping[str, Tensor]]") -> Iterator[int]:
    """Yield the samples of each batch after its forward and backward pass."""
    device = next(model.parameters()).device
    for batch in batches:
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        model(**inputs).loss.backward()
        model.zero_grad(set_to_none=True)
        yield len(next(iter(batch.values())))
    raise ValueError("the batches ran out during the calibration: pass an endless iterable, or more of them")


def _measure(passes: Iterator[int], seconds: float, min_passes: int) -> float:
    """Return the samples per second of at least ``min_passes`` passes within ``seconds``."""
    import torch

    samples = 0
    passes_done = 0
    began_at = time.perf_counter()
    while passes_done < min_passes or time.perf_counter() - began_at < seconds:
        samples += next(passes)
        passes_done += 1
    # kernels of a GPU run asynchronously
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - began_at)


def fitting_batch(free_bytes: float, subject: Subject) -> int:
    """Return the largest power of two up to 512 that fits into ``free_bytes``; 0 if none does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * subject.parameters
    fitting = min(int(room_bytes / subject.sample_bytes), _MAX_MICRO_BATCH)
    if fitting <= 0:
        return 0
    return 1 << (fitting.bit_length() - 1)
