"""Calls of experts, at the caller and at the host. Each fault of a peer raises an `ExpertError`.

A call is one stream. The caller sends its tensors in parts. For backward, it sends the inputs first, then the
gradients. The caller keeps its side of the stream open until the answer. If the stream ends or breaks earlier, the host
cancels the call. The answer is one tensor of the same shape, or a part that says that the host is busy, or a refusal.

The host merges calls of different trainers into batches. The event loop receives and sends parts. The
thread of the expert's device decodes, checks, computes and encodes. Loop and thread share one `Batching`, protected by
a lock. For each call, the event loop gives the thread one short task. The task begins the next batch, which need not
contain this call.
"""

import asyncio
import contextlib
import logging
import math
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from colab_swarm.errors import CallRefused, ExpertError, PeerError, PeerLost, require
from colab_swarm.events import EventLog, Fault, Notice, PeerRefused
from colab_swarm.moe.batching import (
    LONGEST_RETRY_S,
    Answer,
    Batching,
    Call,
    Computed,
    Key,
    Outcome,
    Unusable,
    compute,
    encoded,
    finished,
    spans,
)
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ANY_LENGTH, BatchLimits, Expert
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.net.node import Node
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import Message, PeerId, Refusal, Role, Stream, StreamEnded, end_tasks, short
from colab_swarm.runtime import DeviceThread, PauseGate, Runner, loop_now
from colab_swarm.tensors.codecs import Floats, all_finite, codec_of
from colab_swarm.tensors.device import in_main_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_RETRY_S = 60.0
# Limits of an answer's norm. Forward: relative to the norm of the inputs plus that of as many ones; measured were at
# most 6. Backward: relative to the norm of the gradients; measured were 18,000, where a layer norm scales up inputs of
# 0.001.
MOST_FORWARD = 1e3
MOST_BACKWARD = 1e6
DECAY = 0.99  # with each batch that does not use an expert, the expert's share is multiplied by this
FORGOTTEN = 1e-4  # an expert with a smaller share was not used for about a thousand batches, and is dropped
LAST = 200  # how many calls of an expert are remembered
CALL_TIMEOUT_S = 60.0  # from a call's opening until its answer is sent
CLOSE_TIMEOUT_S = 5.0
LINK_BUSY_RETRY_S = 1.0
LONGEST = 4096  # longest sequence: attention needs memory proportional to the square of the length
SHOWN_CHARS = 80
NAMED_S = 3600.0  # least time between two events about the same caller


class ForwardExpert(Message, frozen=True):
    """Requests outputs. A tensor of shape (samples, *shape) follows, encoded by ``codec``."""

    uid: str
    samples: int
    shape: tuple[int, ...]
    codec: str


class BackwardExpert(ForwardExpert, frozen=True):
    """Requests gradients w.r.t. the inputs, and lets the expert learn. The inputs follow, then the gradients."""


class Part(Message, frozen=True):
    """Consecutive values of a tensor, in the payload. A busy host sends ``busy_s``, the seconds until the next call."""

    busy_s: float | None = None


@dataclass(frozen=True)
class MixtureStatistics:
    """Counters of a layer since its creation."""

    batches: int = 0  # forward passes
    answers: int = 0  # forward calls that succeeded
    failures: int = 0  # forward calls that failed, or were answered after the grace period
    lost_gradients: int = 0  # backward calls that failed; the gradient from that expert counted as zero
    unanswered: int = 0  # samples for which no expert answered; the layer returned them unchanged


class ExpertCalls:
    """Calls experts on any peer. A layer and its deep copies share one object, so they also share the statistics.

    If an expert is busy, this object calls it again after the delay that the host requests. Finding experts may take
    ``timeout_s``. One call may take ``timeout_s`` again, including dialling and retries. Warning: onebit, topk and
    sparseloco have no error feedback here. Use them only from the start of the training; otherwise use int8.
    """

    def __init__(
        self,
        peers: Node,
        directory: Directory,
        runtime: Runner,
        *,
        codec: str = "float32",
        timeout_s: float = 30.0,
    ) -> None:
        self.directory = directory
        self.runtime = runtime
        self.timeout_s = timeout_s
        self._peers = peers
        self._codec = codec_of(codec)
        self._lock = threading.Lock()  # protects the counters and shares
        self._counts = Counter[str]()
        self._shares: dict[str, float] = {}

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a model with remote experts cannot be saved whole, as they live at other peers: save model.state_dict(), "
            "and load it into a model that this code has made"
        )

    def __deepcopy__(self, memo: object) -> "ExpertCalls":
        return self

    def count(self, **more: int) -> None:
        """Add to the counters of `MixtureStatistics`. This method and the next three are thread-safe."""
        with self._lock:
            self._counts.update(more)

    def statistics(self) -> MixtureStatistics:
        with self._lock:
            return MixtureStatistics(**self._counts)

    def on_batch(self, weights: Mapping[str, float]) -> int:
        """Record each expert's sum of mixing weights in a batch; return the number of other known experts."""
        total = sum(weights.values())
        with self._lock:
            if total:
                shares = {}
                for uid in {*self._shares, *weights}:
                    new = (1 - DECAY) * weights.get(uid, 0.0) / total
                    share = DECAY * self._shares.get(uid, 0.0) + new
                    if share >= FORGOTTEN:
                        shares[uid] = share
                self._shares = shares
            return len(self._shares.keys() - weights.keys())

    def shares(self) -> dict[str, float]:
        """Return each known expert's fraction of the work of about the last hundred batches. The fractions sum to 1."""
        with self._lock:
            total = sum(self._shares.values())
            return {uid: share / total for uid, share in sorted(self._shares.items())}

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        """Return the outputs for ``inputs`` (n, *shape).

        Raises `ExpertError` if the call fails, or if the outputs are late, not finite, too large or of another shape.
        """
        return await self._call(ForwardExpert, info, [inputs])

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        """Return the gradient w.r.t. ``inputs``; the expert takes an optimizer step.

        ``grads`` is the gradient w.r.t. the outputs. Raises `ExpertError` as `forward` does. After an error, the
        expert may or may not have learned.
        """
        return await self._call(BackwardExpert, info, [inputs, grads])

    async def _call(self, kind: type[ForwardExpert], info: ExpertInfo, tensors: Sequence[Floats]) -> Floats:
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    try:
                        values = await self.attempt(kind, info, tensors)
                        break
                    except ExpertError as error:
                        if error.retry_s is None:
                            raise
                        await asyncio.sleep(error.retry_s)
        except (ExpertError, TimeoutError) as error:
            late = f"expert {info.uid} at {short(info.host.id)} did not answer in {self.timeout_s:g} s"
            self.directory.on_failure(info, str(error) or late)
            raise ExpertError(str(error) or late) from error
        self.directory.on_success(info)
        return values

    async def attempt(self, kind: type[ForwardExpert], info: ExpertInfo, tensors: Sequence[Floats]) -> Floats:
        """Call an expert once, without a timeout for the answer and without a report to the directory.

        Raises `ExpertError` as `forward` does. If the expert or the link is busy, the error has ``retry_s``.
        """
        inputs = tensors[0]
        opening = kind(info.uid, len(inputs), inputs.shape[1:], self._codec.name)
        self._peers.learn(info.host)
        try:
            async with await self._peers.stream(info.host.id, opening, timeout_s=self.timeout_s) as stream:
                sending = asyncio.create_task(self._send(stream, tensors))
                try:
                    values = (await self._receive(stream, inputs.size)).reshape(inputs.shape)
                    _require_bounded(values, tensors)
                    return values
                finally:  # a host that is busy or refuses may answer before it has received all parts
                    await end_tasks(sending)
        except (PeerError, ValueError) as error:
            busy = isinstance(error, CallRefused) and error.code == "busy"
            retry_s = getattr(error, "retry_s", None)
            if busy:
                retry_s = LINK_BUSY_RETRY_S
            raise ExpertError(
                f"expert {info.uid} at {short(info.host.id)}: {error}", retry_s=retry_s
            ) from error

    async def _send(self, stream: Stream, tensors: Sequence[Floats]) -> None:
        try:
            for tensor in tensors:
                for part in encoded(np.ascontiguousarray(tensor, np.float32), self._codec):
                    await stream.send(Part(), part)
        except ValueError as error:  # the codec failed; end the wait for the answer
            stream.reset(str(error))

    async def _receive(self, stream: Stream, numel: int) -> Floats:
        values = np.empty(numel, np.float32)
        for span in spans(numel, self._codec):
            try:
                part, payload = await stream.receive(Part)
            except StreamEnded as error:
                raise ExpertError(f"sent {span.start} of {numel} values") from error
            if part.busy_s is not None:
                retry_s = max(
                    0.0, min(MAX_RETRY_S, part.busy_s)
                )  # with `min` inside `max`, NaN becomes the maximum
                raise ExpertError(f"busy: call again in {retry_s:.2g} s", retry_s=retry_s)
            values[span] = self._codec.decode(payload, span.stop - span.start)
            require(all_finite(values[span]), "sent values that are not finite", ExpertError)
        return values


def _require_bounded(values: Floats, tensors: Sequence[Floats]) -> None:
    """Raise `ExpertError` if the answer's norm is too large, compared with that of the last tensor of the call."""
    with np.errstate(over="ignore"):  # the values of an unknown peer may overflow
        given = float(np.linalg.norm(tensors[-1]))
        norm = float(np.linalg.norm(values))
    if len(tensors) > 1:
        most = MOST_BACKWARD * given
    else:
        most = MOST_FORWARD * (given + values.size**0.5)
    if not norm <= most:
        raise ExpertError(f"sent values of norm {norm:.3g}, the limit is {most:.3g}")


@dataclass(frozen=True)
class ExpertStatistics:
    """Counters of one expert since this peer began to host it, and rates over its last `LAST` calls."""

    uid: str  # its name
    step: int  # optimizer steps in its weights
    samples: int  # samples in answered calls, forward and backward
    calls: int  # answered calls
    batch_size: float | None  # mean samples per computed batch; None before the first
    queued: int  # samples that wait now
    calls_per_s: float  # rate of the last calls until now, forward and backward
    samples_per_s: float
    latency_s: float | None  # median of the last calls, from arrival to answer; None before the first


@dataclass
class _Served:
    expert: Expert
    samples: int = 0
    calls: int = 0
    batches: int = 0
    # for each call, the time of its answer, the seconds that it waited, and its samples
    last: deque[tuple[float, float, int]] = field(default_factory=partial(deque, maxlen=LAST))

    def count(self, batch: Sequence[Call], now: float) -> None:
        self.batches += bool(batch)
        self.calls += len(batch)
        for call in batch:
            self.samples += call.samples
            self.last.append((now, now - call.arrived_at, call.samples))

    def statistics(self, queued: int, now: float) -> ExpertStatistics:
        answered_at = [at for at, _, _ in self.last]
        latencies_s = [latency_s for _, latency_s, _ in self.last]
        seconds = max(1.0, now - min(answered_at, default=now))
        return ExpertStatistics(
            uid=self.expert.uid,
            step=self.expert.step,
            samples=self.samples,
            calls=self.calls,
            batch_size=self.samples / self.batches if self.batches else None,
            queued=queued,
            calls_per_s=len(self.last) / seconds,
            samples_per_s=sum(samples for _, _, samples in self.last) / seconds,
            latency_s=statistics.median(latencies_s) if latencies_s else None,
        )


class ExpertServer:
    """Serves experts to the swarm, with a thread for each device. A peer has one server, and uses it on the event loop.

    ``events`` gets a `Fault` when the code of an expert fails, and a `PeerRefused` when the server refuses a caller's
    tensors. While ``gate`` is closed, new calls get a busy answer, and admitted calls wait.
    """

    def __init__(
        self, peers: Node, events: EventLog, limits: BatchLimits | None = None, gate: PauseGate | None = None
    ) -> None:
        self._peers = peers
        self._events = events
        self._gate = gate or PauseGate()
        self._threads: dict[torch.device, DeviceThread] = {}
        self._served: dict[str, _Served] = {}
        self._computed: dict[torch.device, list[Computed]] = {}  # begun, but not answered
        self._named = LeftOut[PeerId](NAMED_S, NAMED_S)
        self._lock = threading.Lock()  # protects the batching, which the loop and the threads share
        self._batching = Batching(limits or BatchLimits())
        peers.serve_stream(ForwardExpert, self._serve, role=Role.WORKER)
        peers.serve_stream(BackwardExpert, self._serve, role=Role.WORKER)

    def run(self, device: torch.device, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the thread of a device, between two batches."""
        if device not in self._threads:
            thread = self._threads[device] = DeviceThread()
            if device.type == "cuda":
                # torch warns unless the thread itself sets the device
                thread.submit(torch.cuda.set_device, device)
                thread.submit(lambda: torch.empty(1, device=device))
        return self._threads[device].run(function)

    def emptiest(self, devices: Sequence[torch.device]) -> torch.device:
        """Return the device that has the fewest experts."""
        busy = Counter(served.expert.device for served in self._served.values())
        return min(devices, key=lambda device: busy[device])

    def add(self, expert: Expert) -> None:
        """Begin to answer calls of this expert."""
        self._served[expert.uid] = _Served(expert)

    def remove(self, uid: str) -> Expert:
        """Refuse calls of this expert, also waiting ones; return the expert. A batch may still run on its device."""
        return self._served.pop(uid).expert

    def statistics(self) -> dict[str, ExpertStatistics]:
        with self._lock:
            queued = {uid: self._batching.queued(uid) for uid in self._served}
        now = loop_now()
        return {uid: expert.statistics(queued[uid], now) for uid, expert in self._served.items()}

    async def close(self) -> None:
        """Refuse waiting calls, finish the running batch, accept no more calls. Idempotent."""
        self._peers.unserve(ForwardExpert)
        self._peers.unserve(BackwardExpert)
        self._served.clear()
        for thread in self._threads.values():
            with contextlib.suppress(
                TimeoutError, RuntimeError
            ):  # an expert hangs; the thread is closed already
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await thread.run(lambda: None)
            thread.shutdown(wait=False)

    async def _serve(self, opening: ForwardExpert, stream: Stream) -> None:
        call = self._accepted(opening, stream)
        try:
            with self._lock:
                retry_s = LONGEST_RETRY_S if self._gate.closed else self._batching.admit(call)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if retry_s is None:
                    retry_s = await self._receive(call, stream)
                if retry_s is not None:
                    await stream.send(Part(busy_s=retry_s))
                    return
                for part in await self._answered(call, stream):
                    await stream.send(Part(), part)
        except TimeoutError as error:
            if not call.received:
                text = (
                    f"{short(call.caller)} sent {call.held_bytes:,} bytes of a call in {CALL_TIMEOUT_S:g} s"
                )
                self._events.emit(Notice(loop_now(), f"{text}; its memory is free again"))
            raise Refusal(f"the call took over {CALL_TIMEOUT_S:g} s") from error
        except ValueError as error:
            raise Refusal(str(error)) from error
        finally:
            with self._lock:
                self._batching.leave(call)

    def _accepted(self, opening: ForwardExpert, stream: Stream) -> Call:
        uid = opening.uid
        shape = opening.shape
        if uid not in self._served:
            raise Refusal(f"{uid[:SHOWN_CHARS]} is not hosted here: look it up again")
        expert = self._served[uid].expert
        if not fits(shape, expert.shape):
            raise Refusal(
                f"{uid} takes samples of shape {expert.shape}, not {shape!s:.{SHOWN_CHARS}}; "
                f"a {ANY_LENGTH} stands for 1 to {LONGEST}"
            )
        try:
            codec = codec_of(opening.codec[:SHOWN_CHARS])
        except ValueError as error:
            raise Refusal(str(error)) from error
        loop = asyncio.get_running_loop()
        key = Key(uid, isinstance(opening, BackwardExpert), shape, expert.device)
        size_bytes = (1 + key.backward) * opening.samples * math.prod(shape) * 4
        answer = loop.create_future()
        return Call(key, stream.peer, opening.samples, size_bytes, loop.time(), codec, answer)

    async def _receive(self, call: Call, stream: Stream) -> float | None:
        """Receive a call's tensors; return None, or, if memory ran out, the seconds to wait before a retry."""
        numel = call.samples * math.prod(call.key.shape)
        for _ in range(1 + call.key.backward):
            for span in spans(numel, call.codec):
                try:
                    _, payload = await stream.receive(Part)
                except StreamEnded as error:
                    raise PeerLost(f"{short(stream.peer)} cancelled its call") from error
                expected = call.codec.encoded_bytes(span.stop - span.start)
                if len(payload) != expected:
                    raise Refusal(f"received a part of {len(payload)} bytes, expected {expected}")
                with self._lock:
                    retry_s = self._batching.hold(call, len(payload))
                if retry_s is not None:
                    return retry_s
                call.parts.append(payload)
        call.received = True
        return None

    async def _answered(self, call: Call, stream: Stream) -> Answer:
        if call.key.uid not in self._served:
            raise _gone(call.key.uid)
        await self._gate.wait_open()
        call.arrived_at = loop_now()
        with self._lock:
            self._batching.enqueue(call)
        device = call.key.device
        self.run(device, partial(self._work, device)).add_done_callback(self._deliver)
        leaving = asyncio.ensure_future(stream.receive(Part))
        try:
            await asyncio.wait((call.answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not call.answer.done():
                leaving.result()  # raises if the stream broke or ended
                raise Refusal("received more parts than the call announced")
            return call.answer.result()
        finally:
            call.answer.cancel()
            await end_tasks(leaving)

    def _work(self, device: torch.device) -> list[list[tuple[Call, Outcome]]]:
        """Begin the next batch; return the answers of the batch before.

        On a CPU, and if no other batch follows, also return the answers of this batch.
        """
        began = time.perf_counter()
        with self._lock:
            calls = self._batching.take(device)
        beginning: list[Computed] = []
        if calls:
            uid = calls[0].key.uid
            served = self._served.get(uid)
            try:
                if served is None or served.expert.device != device:
                    raise _gone(uid)
                beginning = compute(served.expert, calls)
            except (
                BaseException
            ) as error:  # such as SystemExit in a user's module, or no memory for the batch
                beginning = [(call, error) for call in calls]
        ending = [self._computed.pop(device, [])]
        with self._lock:
            follows = self._batching.waits(device)
        # A CPU does not compute while this thread continues, so waiting for the next batch would only delay answers.
        if follows and not in_main_memory(device):
            self._computed[device] = beginning
        else:
            ending.append(beginning)
        answers = [finished(computed) for computed in ending if computed]
        size_bytes = sum(call.size_bytes for batch in answers for call, _ in batch)
        if size_bytes:
            with self._lock:
                self._batching.measured(size_bytes, time.perf_counter() - began)
        return answers

    def _deliver(self, working: asyncio.Future[list[list[tuple[Call, Outcome]]]]) -> None:
        if working.cancelled():
            return
        now = loop_now()
        for answers in working.result():
            for call, answer in answers:
                self._answer(call, answer, now)
            if served := self._served.get(answers[0][0].key.uid):
                served.count([call for call, answer in answers if not isinstance(answer, BaseException)], now)

    def _answer(self, call: Call, answer: Outcome, now: float) -> None:
        uid = call.key.uid
        if isinstance(answer, BaseException) and not isinstance(answer, Refusal):
            text = f"{type(answer).__name__}: {answer}"
            logger.error("expert %s failed", uid, exc_info=answer)
            self._events.emit(Fault(now, f"expert {uid}", text))
            answer = Refusal(f"{uid} failed: {text}")
        if isinstance(answer, Unusable) and self._named.fail(call.caller, now) is not None:
            self._events.emit(PeerRefused(now, call.caller.hex(), f"a call for {uid}", str(answer)))
        if call.answer.done():
            return  # the caller has left
        if isinstance(answer, BaseException):
            call.answer.set_exception(answer)
        else:
            call.answer.set_result(answer)


def _gone(uid: str) -> Refusal:
    return Refusal(f"{uid} is no longer hosted here: look it up again")


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Return True if an expert takes samples of ``shape``; ``expected`` is the expert's own shape."""
    if len(shape) != len(expected):
        return False
    for side, wanted in zip(shape, expected, strict=True):
        if wanted == ANY_LENGTH and not 0 < side <= LONGEST:
            return False
        if wanted not in (ANY_LENGTH, side):
            return False
    return True
