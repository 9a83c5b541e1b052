"""Measure the memory and time that a model needs on this machine, and the time that the swarm adds to a step.

Nothing is trained.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colab_swarm.markup import milliseconds, size
from colab_swarm.training.settings import Due, TrainingSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.timing import Turn

_CALIBRATION_S = 2.0
PARAMETER_BYTES = 16  # training memory per parameter: value, gradient and two moments, in float32
USABLE = 0.8  # fraction of the free memory to plan with; the rest is for temporaries and fragments
_MAX_MICRO_BATCH = 512
_MOST_FACTOR = 1.1  # give advice if a step as a peer takes longer than this many steps alone
_MOST_WAITS = 0.1  # give advice if rounds take more than this fraction of the time


@dataclass(frozen=True)
class Subject:
    """The model that is examined."""

    name: str  # for people, such as "ALBERT-large at 512 tokens"
    parameters: int  # number of trained values
    sample_bytes: float  # memory of the values saved for the backward pass of one sample
    samples_per_s: float = 0.0  # measured speed, including the loading of batches; 0 if unknown


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

    with _restored(model):
        model.train()
        passes = _train(model, batches)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro_batch = next(passes)
        # the first passes are slow
        _measure(passes.__next__, seconds / 4, 1)
        samples_per_s = _measure(passes.__next__, seconds, 3)
    numel = sum(parameter.numel() for parameter in trained)
    sample_bytes = sum(saved_bytes.values()) / micro_batch
    return Subject(type(model).__name__, numel, sample_bytes, samples_per_s)


@contextlib.contextmanager
def _restored(model: "Module") -> Iterator[None]:
    """At the end of the block, restore the model's gradients, buffers and modes, and torch's random state."""
    import torch

    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            model.zero_grad(set_to_none=True)
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
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


def _measure(train: Callable[[], int], seconds: float, min_passes: int) -> float:
    """Return the samples per second, measured over at least ``seconds`` and ``min_passes`` passes."""
    import torch

    samples = 0
    passes_done = 0
    began_at = time.perf_counter()
    while passes_done < min_passes or time.perf_counter() - began_at < seconds:
        samples += train()
        passes_done += 1
    # wait for the GPU, whose kernels run asynchronously
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - began_at)


def calibrate_step(optimizer: "SwarmOptimizer", compute: Callable[[], object]) -> float:
    """Return the seconds that one turn of the training loop takes without the swarm. Trains nothing.

    A turn is ``compute`` and, with local steps, a step of the optimizer.
    """
    model = optimizer.rule.model
    if model is None:
        raise ValueError("pass model=… to swarm.optimizer(…) too: step=… may change its buffers")
    with _restored(model):
        _measure(lambda: _turn(compute), 0.0, 1)
        if all(parameter.grad is None for parameter in model.parameters()):
            raise ValueError("step=… left no gradient: end it with loss.backward(), before optimizer.step()")
        alone_s = 1 / _measure(lambda: _turn(model.zero_grad, compute), _CALIBRATION_S, 3)
    if optimizer.rule.local:
        # Measure with a copy of the optimizer, on copies of the parameters. The copy lacks the hooks, and lacks a
        # ``step`` that a scheduler has replaced, because that would step the original.
        inner = optimizer.rule.optimizer
        own = {name: value for name, value in vars(inner).items() if not name.endswith(("_hooks", "step"))}
        twin = object.__new__(type(inner))
        twin.__setstate__(deepcopy(own))
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().clone()
        alone_s += 1 / _measure(lambda: _turn(twin.step), _CALIBRATION_S / 4, 3)
    return alone_s


def _turn(*works: Callable[[], object]) -> int:
    for work in works:
        work()
    return 1


def advice(alone_s: float, turns: "Sequence[Turn]", settings: TrainingSettings) -> list[tuple[str, str, str]]:
    """Compare the turns of a loop with a turn without the swarm, which takes ``alone_s``.

    Each result is a name, the facts, and the advice, which is empty if all is well.
    """
    due = Due.NOTHING if settings.communication.local_steps == 1 else Due.LOCAL_STEP
    usual = [turn for turn in turns if turn.due is due] or turns
    own_s = statistics.median(turn.own_s for turn in usual)
    step_s = statistics.median(turn.step_s for turn in usual)
    factor = (own_s + step_s) / alone_s
    words = f"a step here takes {factor:.2f} of what it takes alone, {milliseconds(alone_s)}: "
    words += f"{milliseconds(own_s)} before step() and {milliseconds(step_s)} in it"
    fix = "take larger micro-batches: step() takes as long for small ones"
    if own_s > _MOST_FACTOR * alone_s:
        fix = "end other work on this machine; or step=… must do all that your loop does before step()"
    # If each turn has a round, the fact about rounds below says what to do.
    facts = [("step", words, fix if factor > _MOST_FACTOR and usual is not turns else "")]
    rounds = 0
    in_rounds_s = 0.0
    all_s = 0.0
    for turn in turns:
        rounds += turn.due is Due.ROUND
        if turn.due not in (Due.NOTHING, Due.LOCAL_STEP):
            in_rounds_s += turn.step_s
        # The usual time before `step()`, not the measured one, because the loop may have had a break.
        all_s += turn.step_s + own_s
    if rounds:
        round_s = in_rounds_s / rounds
        period_s = all_s / rounds
        copied = size((turns[-1].copied_bytes - turns[0].copied_bytes) / rounds)
        words = f"a round takes {round_s:,.2f} s of every {period_s:,.2f} s, and copies {copied} to and from devices"
        steps = max(30, 2 * settings.communication.local_steps)
        fix = f"pass cs.Communication('sparseloco', local_steps={steps}) at all peers (see swarm.plan)"
        if not settings.communication.overlap:
            fix += ", or overlap=True"
        facts.append(("rounds", words, fix if round_s > _MOST_WAITS * period_s else ""))
    return facts


def fitting_batch(free_bytes: float, subject: Subject) -> int:
    """Return the largest power of two up to 512 that fits into ``free_bytes``; 0 if none does."""
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * subject.parameters
    fitting = min(int(room_bytes / subject.sample_bytes), _MAX_MICRO_BATCH)
    if fitting <= 0:
        return 0
    return 1 << (fitting.bit_length() - 1)
