"""`ElasticOptimizer`: a torch optimizer that steps with the gradients that have arrived so far."""

import asyncio
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from colab_swarm.averaging.group import chunk_values
from colab_swarm.elastic.group import enter_group
from colab_swarm.elastic.steps import (
    ElasticSettings,
    ElasticSnapshot,
    ElasticStep,
    ElasticSteps,
    Piece,
)
from colab_swarm.errors import StateError, StepError, require
from colab_swarm.events import BatchDropped
from colab_swarm.runtime import Runner, uninterrupted
from colab_swarm.tensors.codecs import BLOCK_VALUES, ErrorFeedback, Floats, codec_of
from colab_swarm.training.agreement import agreement_of
from colab_swarm.training.flat import reals
from colab_swarm.training.records import Rates
from colab_swarm.training.replica import Replica, UpdateRule, WrappedOptimizer
from colab_swarm.training.settings import PeerServices, TrainingSettings

FEWEST = 4  # fewest buckets of a model that is not tiny, so that most are sent before backward ends


class Buckets:
    """A model's gradients: one flat vector, cut into equal buckets that fill up during backward.

    The vector begins with the last of the ``parameters``, because backward computes their gradients first. A bucket has
    at most ``most`` values, a multiple of `BLOCK_VALUES`. When a bucket is full, the thread of the backward pass calls
    ``on_full(bucket, values)``. Then ``values``, a view of `vector`, does not change any more.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, most: int, on_full: Callable[[int, Floats], None]
    ) -> None:
        self._on_full = on_full
        self._lock = threading.Lock()  # needed because gradients of several devices come on several threads
        ends = list(accumulate(reals(parameter).numel() for parameter in reversed(parameters)))
        numel = ends.pop()
        self._starts = dict(zip(reversed(parameters), [0, *ends], strict=True))
        self._size = min(most, max(1, numel // (FEWEST * BLOCK_VALUES)) * BLOCK_VALUES)
        self.sizes = [min(self._size, numel - at) for at in range(0, numel, self._size)]
        self._hooks = []
        for parameter in parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        self.begin()

    def begin(self) -> None:
        self.vector: Floats = np.empty(sum(self.sizes), np.float32)  # the gradient so far
        self._tensor = torch.from_numpy(self.vector)
        self._sent: dict[
            torch.Tensor, tuple[torch.Tensor, int]
        ] = {}  # gradients, and how often each was changed
        self._absent = dict.fromkeys(self._starts)  # parameters without a gradient so far, in order
        self._open_parts = Counter(chain.from_iterable(map(self._overlapping, self._starts)))

    def check(self) -> None:
        """Raise `StepError` if parameters got no gradient, because the optimizer would still decay and move them."""
        shapes = [tuple(parameter.shape) for parameter in self._absent]
        require(
            not shapes,
            f"{len(shapes)} of {len(self._starts)} parameters got no gradient, such as one of shape {shapes[:1]}: call "
            "loss.backward() before each step(), and freeze what the loss does not use before "
            "swarm.elastic.optimizer(…), or use swarm.optimizer(…)",
            StepError,
        )

    def check_unchanged(self) -> None:
        """Raise `RuntimeError` if gradients changed after they were sent, because the step would ignore the change."""
        for parameter, (gradient, version) in self._sent.items():
            require(
                parameter.grad is gradient and gradient._version == version,
                "gradients were changed or cleared between backward() and step(), as by clip_grad_norm_, but they had "
                "been sent before. Change them in a hook, parameter.register_hook(…), which comes first, or use "
                "swarm.optimizer(…, max_grad_norm=…)",
                RuntimeError,
            )

    def span(self, bucket: int) -> slice:
        return slice(bucket * self._size, bucket * self._size + self.sizes[bucket])

    @torch.no_grad()
    def to_gradients(self, gradients: Sequence[Floats]) -> None:
        flat = torch.from_numpy(np.concatenate(gradients))
        for parameter, start in self._starts.items():
            values = reals(parameter)
            parameter.grad = torch.empty_like(parameter)
            reals(parameter.grad).copy_(flat[start : start + values.numel()].view(values.shape))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _overlapping(self, parameter: torch.Tensor) -> range:
        start = self._starts[parameter]
        return range(start // self._size, -(-(start + reals(parameter).numel()) // self._size))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            if parameter not in self._absent:
                # As after an interrupt, the step continues with the gradients that were sent, and ignores those of
                # this backward().
                self._sent = {}
                raise RuntimeError(
                    "the gradients of this step are already being sent: call optimizer.step() after each backward()"
                )
            gradient = parameter.grad
            if gradient is None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen between the forward pass and "
                    "backward(): freeze parameters before swarm.elastic.optimizer(…), and make a new one to change "
                    "which are trained"
                )
            self._take(parameter, reals(gradient.detach().to_dense()))
            self._sent[parameter] = gradient, gradient._version

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        del self._absent[parameter]
        start = self._starts[parameter]
        self._tensor[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)
        for bucket in self._overlapping(parameter):
            self._open_parts[bucket] -= 1
            if not self._open_parts[bucket]:
                self._on_full(bucket, self.vector[self.span(bucket)])


class ElasticOptimizer(WrappedOptimizer):
    """Data-parallel training in a small group whose members need not wait for all gradients (Elastic Consistency).

    During ``backward()``, each member sends its gradient to all other members in buckets, last layer first. `step`
    waits until the scheduler has enough gradients. By equation 11, member i of p members then applies::

        (g_i + the others' gradients that arrived + stand-ins for the rest + corrections of earlier steps) / p

    Here g_i is the member's own gradient. So p members with batches of n samples train like one process with batches of
    p n samples, except for late gradients. With `BoundedStaleness(single_steps=True)`, a member steps once for each
    gradient (equation 10).

    Call `step` once after each ``backward()``. Parameters must stay the same tensors; buffers are local. You cannot
    clip gradients or use a GradScaler, because gradients are sent before `step` and must not change afterwards.
    """

    made_by = "swarm.elastic.optimizer(…)"
    # With this, a GradScaler calls `step` even if a gradient overflows, and `step` can refuse it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        runtime: Runner,
        optimizer: Optimizer,
        settings: ElasticSettings,
        services: PeerServices,
    ) -> None:
        """Do not call this; use `Swarm.elastic`."""
        self._runtime = runtime
        self._settings = settings
        self._services = services
        self._closed = False
        self._replica = Replica(UpdateRule(optimizer))
        super().__init__(optimizer, optimizer)
        most = chunk_values(settings.compression)  # an encoded bucket is one packet on a peer link
        self._buckets = Buckets(self._replica.model, most=most, on_full=self._on_full)
        self._codec = codec_of(settings.compression)
        sizes = self._buckets.sizes
        lossy = any(self._codec.gamma(numel) for numel in sizes)
        self._feedback = ErrorFeedback(sum(sizes)) if settings.error_feedback and lossy else None
        self._carried: Floats | None = None  # corrections of an earlier group, for all members
        self._step = 0
        self._history = deque[ElasticStep](maxlen=500)
        try:
            runtime.call(self._enter())
        except BaseException:  # also after an interrupt, the hooks must be removed
            self._buckets.close()
            raise

    async def _enter(self) -> None:
        self._loop = asyncio.get_running_loop()
        sizes = self._buckets.sizes
        settings = self._settings
        terms = (  # the terms on which all members must agree
            f"{settings.peers} peers, {settings.scheduler!r}, {settings.compression}, "
            f"error_feedback={settings.error_feedback}, {sum(sizes)} values in {len(sizes)} buckets, "
            f"model {self._replica.schema.hex()[:8]}, {self._optimizer_terms()}"
        )
        async with enter_group(self._services, settings, terms, self._replica) as exchange:
            self._exchange = exchange
            self._steps = ElasticSteps(exchange, settings, sizes)
            try:
                await exchange.begin()
            except BaseException:  # also after a cancellation: the others must not wait for this member
                exchange.kill()
                raise

    def _optimizer_terms(self) -> str:
        """Return the optimizer's class, options and learning rates as the text that peers compare."""
        rates = [group.get("lr", 0.0) for group in self._wrapped.param_groups]
        text = "the optimizer has lr=None, which members cannot compare: Adafactor(…, lr=1e-3, relative_step=False)"
        require(None not in rates, text)
        agreement = dict(agreement_of(self._replica, TrainingSettings("", target_batch_size=1)))
        names = ("optimizer", "optimizer options", "learning rate")
        return ", ".join(f"{name} {agreement[name]}" for name in names if name in agreement)

    @property
    def member(self) -> int:
        return self._exchange.me

    def snapshot(self) -> ElasticSnapshot:
        scheduler = repr(self._settings.scheduler)
        exchange = self._exchange
        return ElasticSnapshot(scheduler, exchange.me, exchange.members, tuple(self._history), self._closed)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, samples: float = 0.0
    ) -> ElasticStep:
        """Wait until the scheduler lets this member continue, apply the arrived gradients, and zero the gradients.

        After an interrupt the step is still open. Then call `step` again, without another ``backward()``. Only a
        simulation uses ``samples``, for the time of the next batch. A ``closure`` is not supported.
        """
        require(closure is None, "a closure cannot be re-run by all peers: call loss.backward(), then step()")
        require(
            not self._closed,
            "this optimizer has left its group: create a new one with swarm.elastic.optimizer(…)",
            RuntimeError,
        )
        require(
            not hasattr(self, "found_inf"),
            "a GradScaler divides gradients after backward(), which has sent them before: train without one, in "
            "float32 or torch.autocast(…, dtype=torch.bfloat16), or use swarm.optimizer(…), which takes it",
            RuntimeError,
        )
        if self._steps.finished is None:
            self._buckets.check()
            self._buckets.check_unchanged()
            pace = self._services.pace
            self._runtime.call(self._steps.finish(pace(samples) if pace else 0.0))
        return uninterrupted(self._apply)

    def _apply(self) -> ElasticStep:
        assert self._steps.finished is not None
        closed, result = self._steps.finished
        with self._replica.lock:
            while closed.updates:
                self._buckets.to_gradients(closed.updates[0])
                self._wrapped.step()
                # if the next update raises, another call of `step` continues with it
                del closed.updates[0]
            self._wrapped.zero_grad(set_to_none=True)
        if self._feedback is not None:
            self._feedback.settle()
        self._step = self._step + 1
        self._carried = None
        self._buckets.begin()
        self._steps.finished = None
        self._history.append(result)
        return result

    def close(self) -> None:
        """Leave the group; the others continue. Idempotent."""
        if not self._closed:
            self._closed = True
            self._buckets.close()
            self._runtime.call(self._steps.leave())

    def kill(self) -> None:
        """End without a goodbye, like a crashed peer. Call this on the runtime's loop."""
        self._closed = True
        self._exchange.kill()

    def _on_full(self, bucket: int, values: Floats) -> None:
        if self._carried is not None:
            values += self._carried[self._buckets.span(bucket)]
        squares = _squares(values)
        if not math.isfinite(squares):
            reason = f"bucket {bucket} of step {self._step} was not finite (NaN or Inf) and counts as zero"
            self._services.events.emit(BatchDropped(self._loop.time(), reason))
            values = np.zeros_like(values)
            squares = 0.0
        residual_squares = 0.0
        if self._feedback is None:
            payload = self._codec.encode(values)
            arrived = self._codec.decode(payload, values.size)
        else:
            span = self._buckets.span(bucket)
            payload, arrived = self._feedback.encode(self._codec, span.start, values)
            residual_squares = _squares(values + self._feedback.residual[span] - arrived)
        rates: Rates = ()
        if bucket == 0:
            rates = self._replica.digests.rates
        self._steps.hand_over(Piece(self._step, bucket, squares, residual_squares, rates), arrived, payload)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the residuals and corrections that this member must still apply."""
        corrections = torch.from_numpy(self._runtime.call(self._corrections()))
        if self._feedback is None:
            residual = {}
        else:
            residual = self._feedback.state_dict()
        debts = {"corrections": corrections, **residual}
        return self._saved(lambda: {"optimizer": self._wrapped.state_dict(), **debts})

    async def _corrections(self) -> Floats:
        carried = self._carried
        if carried is None:
            total = np.zeros(sum(self._buckets.sizes), np.float32)
        else:
            total = carried.copy()
        for late in self._steps.ledger.late:
            total[self._buckets.span(late.bucket)] += late.change
        return total

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the residuals and corrections of a state; call it before the first ``backward()``.

        Load the parameters and the wrapped optimizer's state before the group is formed: when it is formed, the members
        copy those of the first member. Only the first member applies its loaded corrections. Raises `StateError` if the
        state belongs to another model.
        """
        self._load(state_dict, self._load_debts)

    def _load_debts(self, state_dict: Mapping[str, Any]) -> None:
        saved = torch.as_tensor(state_dict.get("corrections", ()), dtype=torch.float32)
        corrections: Floats = saved.cpu().numpy().copy()
        require(
            corrections.shape == (sum(self._buckets.sizes),),
            f"the state has corrections of shape {corrections.shape}: it belongs to another model",
            StateError,
        )
        if self._feedback is not None:
            self._feedback = ErrorFeedback(len(corrections), state_dict)
        if self._exchange.me == 0:
            self._carried = corrections

    def __repr__(self) -> str:
        inner = type(self._wrapped).__name__
        scheduler = self._settings.scheduler
        members = f"{self._exchange.members} members, {len(self._steps.ledger.lost)} lost"
        state = "left" if self._closed else members
        return f"ElasticOptimizer({inner}, {scheduler}, step={self._step}, {state})"


def _squares(values: Floats) -> float:
    with np.errstate(over="ignore"):  # the caller checks for infinity
        return float(np.dot(values, values))
