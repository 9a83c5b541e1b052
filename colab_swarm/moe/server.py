"""Serves this peer's experts: receives calls of any trainer, merges them into batches, computes, answers.

The event loop receives and sends parts; its only work that grows with their size is copying. The device thread decodes,
checks, joins, computes, cuts and encodes. Between them are `Batching`, under a lock, and one short task for the thread
per call: it computes the next batch, whichever call that contains, or finds that its own was merged already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from colab_swarm.errors import PeerLost
from colab_swarm.events import EventLog, Fault
from colab_swarm.moe.batching import Batching, BatchLimits, Key, PendingCall
from colab_swarm.moe.calls import BackwardExpert, CallExpert, ForwardExpert, Part, spans
from colab_swarm.moe.expert import ANY_LENGTH, Answer, Call, Expert, compute
from colab_swarm.net.peers import Peers, Refusal, Role, Stream, StreamEnded, short
from colab_swarm.runtime import PauseGate
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.tensors.device import DeviceThread

logger = logging.getLogger(__name__)
T = TypeVar("T")
LATENCIES = 1000
CALL_TIMEOUT_S = 60.0  # from a call's opening until its answer is sent
CLOSE_TIMEOUT_S = 5.0
PAUSED_RETRY_S = 10.0  # retry hint of a paused host
SHOWN_CHARS = 80


@dataclass(frozen=True)
class ExpertStatistics:
    """Counters of one expert since this peer hosts it."""

    step: int  # optimizer steps in its weights
    forward_samples: int  # answered
    backward_samples: int
    calls: int  # answered
    batches: int  # into which these calls were merged
    queued: int  # samples that wait now
    p50_s: float | None  # of the last calls, from arrival to answer; None before the first
    p99_s: float | None


class ExpertTally:
    """Counts what one expert answered."""

    def __init__(self) -> None:
        self._samples = {False: 0, True: 0}
        self._calls = self._batches = 0
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES)

    def add(self, batch: Sequence[PendingCall], now: float) -> None:
        """Count calls that were answered as one batch; ``now`` on the clock of their arrival."""
        self._batches += bool(batch)
        self._calls += len(batch)
        for call in batch:
            self._samples[call.key.backward] += call.samples
            self._latencies_s.append(now - call.arrived_at)

    def statistics(self, *, step: int, queued: int) -> ExpertStatistics:
        """Return the counters and latencies."""
        p50_s, p99_s = None, None
        if self._latencies_s:
            p50_s, p99_s = map(float, np.percentile(self._latencies_s, (50, 99)))
        return ExpertStatistics(
            step, self._samples[False], self._samples[True], self._calls, self._batches, queued, p50_s, p99_s
        )


class ExpertServer:
    """Serves experts to the swarm. One per peer and accelerator; made and used on the event loop.

    Args:
        peers: this peer's network.
        events: gets a `Fault` when an expert's own code fails.
        limits: of a batch, and of all calls together.
        gate: closed while experts are paused: new calls get a busy answer, admitted ones wait.
    """

    def __init__(
        self, peers: Peers, events: EventLog, limits: BatchLimits | None = None, gate: PauseGate | None = None
    ) -> None:
        self._peers, self._events = peers, events
        self._gate = gate or PauseGate()
        self._device = DeviceThread()
        self._experts: dict[str, Expert] = {}
        self._tallies: dict[str, ExpertTally] = {}
        self._lock = threading.Lock()  # of the batching, which loop and thread share
        self._batching: Batching[Call] = Batching(limits or BatchLimits())
        peers.serve_stream(ForwardExpert, partial(self._serve, backward=False))
        peers.serve_stream(BackwardExpert, partial(self._serve, backward=True), role=Role.WORKER)

    def add(self, expert: Expert) -> None:
        """Start to answer calls of this expert. Raises ValueError if one of its name is served already."""
        if expert.uid in self._experts:
            raise ValueError(f"{expert.uid} is served already: remove it first")
        self._experts[expert.uid] = expert
        self._tallies[expert.uid] = ExpertTally()

    def remove(self, uid: str) -> Expert:
        """Stop answering calls of this expert; waiting ones are refused.

        A batch of it may still run: use `run` for what must come after.

        Raises:
            KeyError: the expert is not served here.
        """
        expert = self._experts.pop(uid)
        del self._tallies[uid]
        with self._lock:
            self._batching.forget(uid)
        return expert

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of ``function()``, called on the device thread between two batches.

        Raises:
            RuntimeError: the server is closed.
        """
        return await self._device.run(function)

    def statistics(self) -> dict[str, ExpertStatistics]:
        """Return the statistics of each expert, by uid."""
        with self._lock:
            queued = {uid: self._batching.queued(uid) for uid in self._experts}
        return {
            uid: self._tallies[uid].statistics(step=expert.step, queued=queued[uid])
            for uid, expert in self._experts.items()
        }

    async def close(self) -> None:
        """Refuse waiting calls, finish the running batch, accept no more calls. Idempotent."""
        self._peers.unserve(ForwardExpert)
        self._peers.unserve(BackwardExpert)
        self._experts.clear()
        self._tallies.clear()
        with contextlib.suppress(TimeoutError, RuntimeError):  # an expert that hangs; closed already
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.run(lambda: None)
        self._device.shutdown(wait=False)

    # -- one call, on the loop

    async def _serve(self, opening: CallExpert, stream: Stream, *, backward: bool) -> None:
        call = self._accepted(opening, stream, backward=backward)
        try:
            with self._lock:
                retry_s = PAUSED_RETRY_S if self._gate.closed else self._batching.admit(call)
            if retry_s is not None:
                await stream.send(Part(busy_s=retry_s))
                return
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._receive(call, stream)
                for part in await self._answered(call, stream):
                    await stream.send(Part(), part)
        except TimeoutError as error:
            raise Refusal(f"the call took over {CALL_TIMEOUT_S:g} s") from error
        except ValueError as error:
            raise Refusal(str(error)) from error
        finally:
            with self._lock:
                self._batching.leave(call)

    def _accepted(self, opening: CallExpert, stream: Stream, *, backward: bool) -> Call:
        """Return the call if its announcement is valid; no memory is reserved yet."""
        uid, shape = opening.uid, opening.shape
        expert = self._experts.get(uid)
        if expert is None:
            raise Refusal(f"{uid[:SHOWN_CHARS]} is not hosted here: look it up again")
        if len(shape) != len(expert.shape) or not all(
            side > 0 and expected in (side, ANY_LENGTH)
            for side, expected in zip(shape, expert.shape, strict=True)
        ):
            raise Refusal(f"{uid} takes samples of shape {expert.shape}, not {shape!s:.{SHOWN_CHARS}}")
        try:
            codec = codec_of(opening.codec[:SHOWN_CHARS])
        except ValueError as error:
            raise Refusal(str(error)) from error
        loop, tensors = asyncio.get_running_loop(), 2 if backward else 1
        size_bytes = tensors * opening.samples * math.prod(shape) * 4
        answer: asyncio.Future[Answer] = loop.create_future()
        key = Key(uid, backward, shape)
        return Call(key, stream.peer, opening.samples, size_bytes, loop.time(), codec=codec, answer=answer)

    async def _receive(self, call: Call, stream: Stream) -> None:
        numel = call.samples * math.prod(call.key.shape)
        for _ in range(call.tensors):
            for span in spans(numel, call.codec):
                try:
                    _, payload = await stream.receive(Part)
                except StreamEnded as error:
                    raise PeerLost(f"{short(stream.peer)} cancelled its call") from error
                expected = call.codec.encoded_bytes(span.stop - span.start)
                if len(payload) != expected:
                    raise Refusal(f"received a part of {len(payload)} bytes, expected {expected}")
                call.parts.append(payload)

    async def _answered(self, call: Call, stream: Stream) -> Answer:
        """Wait for the answer, or until the caller cancels."""
        if call.key.uid not in self._experts:
            raise _gone(call.key.uid)
        await self._gate.wait_open()
        call.arrived_at = asyncio.get_running_loop().time()
        with self._lock:
            self._batching.enqueue(call)
        self._device.run(self._work).add_done_callback(self._deliver)
        leaving = asyncio.ensure_future(stream.receive(Part))
        try:
            await asyncio.wait((call.answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not call.answer.done():
                leaving.result()  # raises if the stream broke or ended
                raise Refusal("received more parts than the call announced")
            return call.answer.result()
        finally:
            call.answer.cancel()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    # -- one batch, on the device thread

    def _work(self) -> list[tuple[Call, Answer | BaseException]]:
        """Compute the next batch, if there is one."""
        with self._lock:
            calls = self._batching.take()
        if not calls:
            return []
        key, began = calls[0].key, time.perf_counter()
        expert = self._experts.get(key.uid)
        if expert is None:
            return [(call, _gone(key.uid)) for call in calls]
        try:
            answers = compute(expert, calls)
        except BaseException as error:  # SystemExit in a user's module; no memory for the batch
            return [(call, error) for call in calls]
        with self._lock:
            samples = sum(call.samples for call in calls)
            self._batching.measured(key, samples, time.perf_counter() - began)
        return answers

    def _deliver(self, working: asyncio.Future[list[tuple[Call, Answer | BaseException]]]) -> None:
        if working.cancelled():
            return
        now = asyncio.get_running_loop().time()
        answers = working.result()
        for call, answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Refusal):
                text = f"{type(answer).__name__}: {answer}"
                logger.error("expert %s failed", call.key.uid, exc_info=answer)
                self._events.emit(Fault(now, f"expert {call.key.uid}", text))
                answer = Refusal(f"{call.key.uid} failed: {text}")
            if call.answer.done():
                continue  # the caller has gone
            if isinstance(answer, BaseException):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)
        if answers and (tally := self._tallies.get(answers[0][0].key.uid)):
            tally.add([call for call, answer in answers if not isinstance(answer, BaseException)], now)


def _gone(uid: str) -> Refusal:
    return Refusal(f"{uid} is no longer hosted here: look it up again")
