"""`ElasticOptimizer`: a torch optimizer that steps with the gradients of a group, as far as they have arrived."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from colab_swarm.elastic.meter import Meter
from colab_swarm.elastic.settings import (
    ElasticSettings,
    ElasticSnapshot,
    ElasticStep,
    GroupTransport,
    Piece,
    PieceExchange,
)
from colab_swarm.elastic.steps import Buckets, ElasticSteps, OwnBucket
from colab_swarm.errors import StateError
from colab_swarm.events import BatchDropped, EventLog
from colab_swarm.markup import facts
from colab_swarm.runtime import Runner
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.feedback import ErrorFeedback
from colab_swarm.training.replica import Replica, UpdateRule, uninterrupted

HISTORY = 500
"""Steps that a snapshot tells of."""


class ElasticOptimizer(Optimizer):
    """Data-parallel training in a small group whose members need not wait for all gradients (Elastic Consistency).

    Each member's gradient goes to all others in buckets, last layer first, while ``backward()`` goes on. `step` waits
    until the scheduler has enough and applies, by equation 11, what is there::

        g_i + those of the others that arrived + stand-ins for what did not + corrections of earlier steps,   all / p

    so that p members with batches of n train as one process with batches of p n would, but for what is late. Call it
    once after each ``backward()``. The parameters must be the same tensors throughout; buffers, such as the statistics
    of a batch normalisation, are each member's own.
    """

    def __init__(
        self,
        runtime: Runner,
        optimizer: Optimizer,
        settings: ElasticSettings,
        entrance: GroupTransport,
        events: EventLog,
        pace: Callable[[float], float] | None = None,
    ) -> None:
        """Use `Swarm.elastic_optimizer` or `group_optimizer`. Returns when the group is complete.

        Args:
            pace: in a simulation, what the computation of so many samples takes, seconds.
        """
        self._runtime, self._inner, self._settings, self._events = runtime, optimizer, settings, events
        self._pace, self._closed = pace, False
        self._replica = Replica(UpdateRule(optimizer))
        self._buckets = Buckets(self._replica.model, most=settings.bucket_values, on_full=self._on_full)
        self._codec, sizes = settings.wire, self._buckets.sizes
        lossy = any(self._codec.gamma(numel) for numel in sizes)
        self._feedback = ErrorFeedback(sum(sizes)) if settings.error_feedback and lossy else None
        self._carried: Floats | None = None  # corrections of a former group, for all members
        self._step, self._history = 0, deque[ElasticStep](maxlen=HISTORY)
        terms = settings.terms(sizes, self._replica.schema)
        try:
            runtime.call(self._enter(entrance, terms, sizes))
        except BaseException:
            self._buckets.close()
            raise

    async def _enter(self, entrance: GroupTransport, terms: str, sizes: list[int]) -> None:
        self._loop = asyncio.get_running_loop()

        def receive(exchange: PieceExchange) -> ElasticSteps:
            self._steps = ElasticSteps(exchange, self._settings, sizes)
            return self._steps

        self._exchange = await entrance.enter(self._settings, terms, self._replica, receive)

    # --- what a trainer uses --------------------------------------------------------------------------------------

    @property
    def member(self) -> int:
        """This member's number in the group, from 0."""
        return self._exchange.me

    @property
    def meter(self) -> Meter:
        """How far this member is off; for charts."""
        return self._steps.meter

    def snapshot(self) -> ElasticSnapshot:
        """How far this member is off, and was."""
        scheduler, exchange = repr(self._settings.scheduler), self._exchange
        return ElasticSnapshot(scheduler, exchange.me, exchange.members, tuple(self._history), self._closed)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, samples: float = 0.0
    ) -> ElasticStep:
        """Wait until the scheduler lets this member go on, and apply what is there; gradients are zeroed.

        An interrupt leaves the step open: call it again, without another ``backward()``.

        Args:
            closure: not supported, must be None.
            samples: of a batch; only a simulation wants it, to know how long the next one takes.
        """
        if closure is not None:
            raise ValueError("a closure cannot be re-run by a group: call loss.backward() and step()")
        if self._closed:
            raise RuntimeError(
                "this optimizer has left its group: make a new one with swarm.elastic_optimizer(…)"
            )
        if self._steps.finished is None:
            if self._buckets.lacking:
                uninterrupted(self._buckets.flush)
            self._runtime.call(self._steps.finish(self._pace(samples) if self._pace else 0.0))
        return uninterrupted(self._apply)

    def _apply(self) -> ElasticStep:
        assert self._steps.finished is not None
        closed, result = self._steps.finished
        with self._replica.lock:
            self._buckets.to_gradients(closed.gradients)
            self._inner.step()
            self._inner.zero_grad(set_to_none=True)
        if self._feedback is not None:
            self._feedback.settle()
        self._step, self._carried = self._step + 1, None
        self._buckets.begin()
        self._steps.finished = None
        self._history.append(result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the model's gradients; what was sent is not taken back."""
        self._inner.zero_grad(set_to_none)

    def close(self) -> None:
        """Leave the group; the others go on. Idempotent."""
        if not self._closed:
            self._closed = True
            self._buckets.close()
            self._runtime.call(self._leave())

    async def _leave(self) -> None:
        self._steps.leave()
        await self._exchange.close()

    def kill(self) -> None:
        """End without a word, as a crash would; on the runtime's loop."""
        self._closed = True
        self._exchange.kill()

    # --- buckets --------------------------------------------------------------------------------------------------

    def _on_full(self, bucket: int, values: Floats) -> None:
        """Encode a bucket and hand it to the loop; on the thread that runs backward."""
        if self._carried is not None:
            values += self._carried[self._buckets.span(bucket)]
        squares = _squares(values)
        if not math.isfinite(squares):
            reason = f"bucket {bucket} of step {self._step} was not finite (NaN or Inf) and counts as zero"
            self._events.emit(BatchDropped(self._loop.time(), reason))
            values, squares = np.zeros_like(values), 0.0
        payload, arrived, residual_squares = self._encode(bucket, values)
        piece = Piece(self._step, bucket, squares, residual_squares)
        self._steps.hand_over(OwnBucket(piece, arrived, payload))

    def _encode(self, bucket: int, values: Floats) -> tuple[Any, Floats, float]:
        if self._feedback is None:
            payload = self._codec.encode(values)
            return payload, self._codec.decode(payload, values.size), 0.0
        span = self._buckets.span(bucket)
        payload, arrived = self._feedback.encode(self._codec, span.start, values)
        return payload, arrived, _squares(values + self._feedback.residual[span] - arrived)

    # --- torch's face ---------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self._inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and what this member still owes: residuals of compression, late corrections."""
        corrections = self._runtime.call(self._corrections())
        residual = {} if self._feedback is None else self._feedback.state_dict()
        return {
            "optimizer": self._inner.state_dict(),
            "corrections": torch.from_numpy(corrections),
            **residual,
        }

    async def _corrections(self) -> Floats:
        """What arrived late and is not applied yet."""
        total = (
            np.zeros(sum(self._buckets.sizes), np.float32) if self._carried is None else self._carried.copy()
        )
        for late in self._steps.ledger.late:
            total[self._buckets.span(late.bucket)] += late.change
        return total

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Owe what is owed in a state; call it before the first ``backward()``.

        The wrapped optimizer's part, and the parameters, are to be loaded before the group is formed: all members take
        over the first one's. So of the corrections only the first one's count; they go out with its next gradient.

        Raises:
            StateError: the state belongs to another model.
        """
        saved = torch.as_tensor(state_dict.get("corrections", ()), dtype=torch.float32)
        corrections: Floats = saved.cpu().numpy().copy()
        if corrections.shape != (sum(self._buckets.sizes),):
            raise StateError(
                f"the state has corrections of shape {corrections.shape}: it belongs to another model"
            )
        if self._feedback is not None:
            self._feedback = ErrorFeedback(len(corrections), state_dict)
        if self._exchange.me == 0:
            self._carried = corrections

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not offered: the group has agreed on the parameters."""
        raise TypeError(
            "the group has agreed on the parameters: add groups before swarm.elastic_optimizer(…)"
        )

    def __repr__(self) -> str:
        inner, scheduler = type(self._inner).__name__, self._settings.scheduler
        state = (
            "left"
            if self._closed
            else f"{self._exchange.members} members, {len(self._steps.ledger.lost)} lost"
        )
        return f"ElasticOptimizer({inner}, {scheduler}, step={self._step}, {state})"

    def _repr_html_(self) -> str:
        snapshot = self.snapshot()
        told: dict[str, object] = {"member": f"{snapshot.member} of {snapshot.members}, counted from 0"}
        if snapshot.steps:
            last = snapshot.steps[-1]
            allowed = "no bound is known" if last.bound is None else f"{last.bound:.3g} allowed"
            told["inconsistency"] = f"{last.inconsistency:.3g}, {allowed}"
            told["waited in the last step"] = f"{1000 * last.waited_s:.0f} ms"
            told["not there by then"] = f"{last.missing:.0%}"
        return facts(repr(self), told)


def _squares(values: Floats) -> float:
    with np.errstate(over="ignore"):  # who asks looks whether it is finite
        return float(np.dot(values, values))
