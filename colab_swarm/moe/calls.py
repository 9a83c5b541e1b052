"""Calls of experts on other peers. Whatever goes wrong is an `ExpertError` that names the expert.

What a trainer and an expert's host say to each other.

A call is one stream. The trainer opens it, sends its tensors in parts (at backward: inputs, then gradients) and keeps
its end open until it is answered: a stream that ends or breaks before takes the call back. The host answers with one
tensor of the same shape, or with one part that says it is busy, or refuses.

Sends samples to experts and gradients back: one call per expert, all at once.

Shapes: B samples, K chosen experts, S the shape of a sample.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from colab_swarm.dht.service import DHT
from colab_swarm.errors import CallRefused, ExpertError, PeerError
from colab_swarm.events import EventLog
from colab_swarm.moe.grid import Grid
from colab_swarm.net.peers import Contact, Message, PeerId, Peers, Stream, StreamEnded, short
from colab_swarm.runtime import PauseGate
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Buffer, Codec, Floats, all_finite, codec_of


@dataclass(frozen=True)
class ExpertServices:
    """This peer's services; ``run_id`` is part of all keys in the DHT, ``gate`` is closed while experts are to rest."""

    peers: Peers
    dht: DHT
    events: EventLog
    rng: random.Random
    run_id: str
    gate: PauseGate = field(default_factory=PauseGate)


@dataclass(frozen=True)
class ExpertInfo:
    """What the swarm knows of one live expert.

    Attributes:
        uid: its name, ``prefix.u_0.….u_(d-1)``.
        host: where it runs.
        shape: of one sample, input and output alike; -1: any length.
        step: updates in its weights when its host told last.
        expires_at: swarm time until which the host's word holds, seconds.
    """

    uid: str
    host: Contact
    shape: tuple[int, ...]
    step: int
    expires_at: float

    @property
    def peer(self) -> PeerId:
        """The host's id."""
        return self.host.id


PART_BYTES = 120 << 10


class CallExpert(Message, frozen=True):
    """Calls an expert with tensors of shape (samples, *shape), encoded by ``codec``."""

    uid: str
    samples: int
    shape: tuple[int, ...]
    codec: str


class ForwardExpert(CallExpert, frozen=True):
    """Asks for outputs; one tensor follows."""


class BackwardExpert(CallExpert, frozen=True):
    """Asks for gradients w.r.t. inputs, and lets the expert learn; two tensors follow: inputs, gradients."""


class Part(Message, frozen=True):
    """Consecutive values of a tensor, in the payload; or, with ``busy_s``: ask again in so many seconds."""

    busy_s: float | None = None


def spans(numel: int, codec: Codec) -> Iterator[slice]:
    """Which values each part of a tensor holds: whole blocks of the codec, `MAX_BLOCKS` or `PART_BYTES` at most."""
    step = min(PART_BYTES // codec.encoded_bytes(BLOCK_VALUES), MAX_BLOCKS) * BLOCK_VALUES
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))


def encoded(values: Floats, codec: Codec) -> Iterator[Buffer]:
    """The parts of a tensor; they may share its memory."""
    flat = values.reshape(-1)
    return (codec.encode(flat[span]) for span in spans(flat.size, codec))


LINK_BUSY_RETRY_S = 1.0

MAX_RETRY_S = 60.0


class ExpertCalls:
    """Forward and backward through experts, wherever they are.

    Args:
        peers: this peer's network.
        codec: how activations and gradients travel, both ways.
        timeout_s: for a whole call, dialling included.

    Raises:
        ValueError: there is no such codec.
    """

    def __init__(self, peers: Peers, *, codec: str = "float32", timeout_s: float = 30.0) -> None:
        self._peers, self._codec, self._timeout_s = peers, codec_of(codec), timeout_s
        self.sent_bytes = self.received_bytes = 0
        """Payload of all calls so far."""

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        """What the expert makes of ``inputs`` (n, *shape).

        Raises:
            ExpertError: it did not answer, or not with finite values of this shape; or it is busy (``retry_s``).
        """
        return await self._call(ForwardExpert, info, [inputs])

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        """The gradient w.r.t. ``inputs``, given that w.r.t. the outputs; the expert takes its step.

        Raises:
            ExpertError: as `forward`. Whether the expert learned is then unknown.
        """
        return await self._call(BackwardExpert, info, [inputs, grads])

    async def _call(self, kind: type[CallExpert], info: ExpertInfo, tensors: Sequence[Floats]) -> Floats:
        inputs = tensors[0]
        opening = kind(info.uid, len(inputs), inputs.shape[1:], self._codec.name)
        where = f"expert {info.uid} at {short(info.peer)}"
        self._peers.learn(info.host)
        try:
            async with asyncio.timeout(self._timeout_s):
                stream = await self._peers.stream(info.peer, opening, timeout_s=self._timeout_s)
                async with stream:
                    return (await self._converse(stream, tensors)).reshape(inputs.shape)
        except ExpertError as error:
            raise ExpertError(f"{where} {error}", retry_s=error.retry_s) from error
        except CallRefused as error:
            retry_s = LINK_BUSY_RETRY_S if error.code == "busy" else None
            raise ExpertError(f"{where} refused: {error}", retry_s=retry_s) from error
        except TimeoutError as error:
            raise ExpertError(f"{where} did not answer in {self._timeout_s:g} s") from error
        except (PeerError, ValueError) as error:
            raise ExpertError(f"{where} failed: {error}") from error

    async def _converse(self, stream: Stream, tensors: Sequence[Floats]) -> Floats:
        sending = asyncio.create_task(self._send(stream, tensors))
        try:
            return await self._receive(stream, tensors[0].size, self._codec)
        finally:  # who is busy or refuses says so before it has all
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, stream: Stream, tensors: Sequence[Floats]) -> None:
        try:
            for tensor in tensors:
                for part in encoded(np.ascontiguousarray(tensor, np.float32), self._codec):
                    await stream.send(Part(), part)
                    self.sent_bytes += memoryview(part).nbytes
        except ValueError as error:  # of the codec; who waits for the answer hears of it
            stream.reset(str(error))

    async def _receive(self, stream: Stream, numel: int, codec: Codec) -> Floats:
        values = np.empty(numel, np.float32)
        for span in spans(numel, codec):
            try:
                part, payload = await stream.receive(Part)
            except StreamEnded as error:
                raise ExpertError(f"gave {span.start} of {numel} values") from error
            self.received_bytes += len(payload)
            if part.busy_s is not None:
                retry_s = max(0.0, min(MAX_RETRY_S, part.busy_s))  # in this order, NaN gives the most
                raise ExpertError(f"is busy: ask again in {retry_s:.2g} s", retry_s=retry_s)
            values[span] = codec.decode(payload, span.stop - span.start)
            if not all_finite(values[span]):
                raise ExpertError("gave values that are not finite")
        return values


T = TypeVar("T")

Flags = npt.NDArray[np.bool_]

Places = npt.NDArray[np.intp]


class FindsExperts(Protocol):
    """Knows which experts live, and leaves out those that fail: `Directory`."""

    async def find(self, grid: Grid, uid: str) -> ExpertInfo | None:
        """One by its name."""

    async def best(self, grid: Grid, scores: Sequence[Floats], k: int) -> list[list[ExpertInfo]]:
        """Per sample the k best live ones, best first; scores[i] is (B, sides[i])."""

    def on_failure(self, uid: str, reason: str) -> None:
        """An expert did not do its work."""

    def on_success(self, uid: str) -> None:
        """An expert did its work."""


class CallsExperts(Protocol):
    """Reaches experts wherever they are: `ExpertCalls`. Whatever goes wrong is an ExpertError.

    Attributes:
        sent_bytes, received_bytes: payload of all calls so far.
    """

    sent_bytes: int
    received_bytes: int

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        """What the expert makes of ``inputs``."""

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        """The gradient w.r.t. ``inputs``; the expert takes its step."""


class RunsCalls(Protocol):
    """Runs coroutines for callers that wait: `Runs.call`."""

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result."""


@dataclass(frozen=True)
class ExpertAccess:
    """How modules reach experts; their copies share it.

    Attributes:
        run: runs a coroutine, waits for its result.
        directory: finds experts.
        calls: reaches them.
        timeout_s: for finding, and again for calling them, all retries included.
    """

    run: RunsCalls
    directory: FindsExperts
    calls: CallsExperts
    timeout_s: float = 30.0

    def __deepcopy__(self, memo: object) -> ExpertAccess:
        return self

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        """As `CallsExperts.forward`; a busy expert is asked again, and the directory hears how it went."""
        return await self._try(info, lambda: self.calls.forward(info, inputs))

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        """As `CallsExperts.backward`; a busy expert is asked again, and the directory hears how it went."""
        return await self._try(info, lambda: self.calls.backward(info, inputs, grads))

    async def _try(self, info: ExpertInfo, call: Callable[[], Coroutine[Any, Any, Floats]]) -> Floats:
        try:
            async with asyncio.timeout(self.timeout_s):
                values = await until_free(call)
        except TimeoutError as error:
            self.directory.on_failure(info.uid, f"no answer in {self.timeout_s:g} s")
            raise ExpertError(f"expert {info.uid} did not answer in {self.timeout_s:g} s") from error
        except ExpertError as error:
            self.directory.on_failure(info.uid, str(error))
            raise
        self.directory.on_success(info.uid)
        return values


async def until_free(call: Callable[[], Coroutine[Any, Any, Floats]]) -> Floats:
    """What ``call()`` returns once the expert is not busy; asks again when its host said."""
    while True:
        try:
            return await call()
        except ExpertError as error:
            if error.retry_s is None:
                raise
            await asyncio.sleep(error.retry_s)


@dataclass(frozen=True)
class ExpertBatch:
    """The part of a batch that goes to one expert: ``rows`` are its samples, it is choice ``slots[i]`` of rows[i]."""

    info: ExpertInfo
    rows: Places
    slots: Places

    def joined(self, other: ExpertBatch) -> ExpertBatch:
        """This and more samples for the same expert."""
        rows = np.concatenate([self.rows, other.rows])
        return ExpertBatch(self.info, rows, np.concatenate([self.slots, other.slots]))


def group(chosen: Sequence[Sequence[ExpertInfo]], rows: Iterable[int]) -> list[ExpertBatch]:
    """Group samples by expert; ``chosen[i]`` are the experts of sample ``rows[i]``, best first."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    infos: dict[str, ExpertInfo] = {}
    for row, experts in zip(rows, chosen, strict=True):
        for slot, info in enumerate(experts):
            places[info.uid].append((row, slot))
            infos[info.uid] = info
    return [
        ExpertBatch(infos[uid], *np.asarray(found, np.intp).T.copy()) for uid, found in places.items()
    ]  # transposed: one array of rows, one of slots


async def wait_for_answers(
    tasks: Mapping[asyncio.Task[Floats], ExpertBatch], needed: Places, grace_s: float
) -> set[asyncio.Task[Floats]]:
    """Wait until every sample has the answers it needs or can get none any more, then ``grace_s`` for the rest.

    Args:
        tasks: a call per group; each ends by itself in the end.
        needed: answers that each sample of the batch needs, B.
        grace_s: seconds.

    Returns:
        The calls that have not ended.
    """
    open_calls, missing = np.zeros_like(needed), needed.copy()
    for one in tasks.values():
        open_calls[one.rows] += 1
    pending = set(tasks)
    while pending and ((missing > 0) & (open_calls > 0)).any():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            open_calls[tasks[task].rows] -= 1
            missing[tasks[task].rows] -= task.exception() is None
    if pending:
        _, pending = await asyncio.wait(pending, timeout=grace_s)
    return pending


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait until it has ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ExpertAnswers(torch.autograd.Function):
    """Values that came from elsewhere, as a function of the inputs: backward asks where they came from."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, values: Tensor, backward: Callable[[Floats], Floats]) -> Tensor:
        """``values``, whose gradient goes through ``backward`` to ``inputs``."""
        ctx.save_for_backward(inputs)
        ctx.backward_call = backward
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:
        """Of the inputs, the values, the function."""
        _ = (
            ctx.saved_tensors
        )  # raises if the inputs, whose memory is sent again, were changed in place meanwhile
        return torch.from_numpy(ctx.backward_call(as_floats(grads))), None, None


def through(inputs: Tensor, values: Floats, backward: Callable[[Floats], Floats]) -> Tensor:
    """``values``; when differentiated, ``backward`` turns their gradient into that of ``inputs``, also on the CPU.

    The call goes out even if nobody wants the inputs' gradient: it is how experts learn. On the CPU because autograd
    computes there on the caller's thread: all callers share one thread per GPU, and a wait there would hold up all.
    """
    if torch.is_grad_enabled() and not inputs.requires_grad:
        inputs = inputs.detach().requires_grad_()
    answer: Tensor = ExpertAnswers.apply(inputs, torch.from_numpy(values), backward)  # type: ignore[no-untyped-call]
    return answer


def as_floats(tensor: Tensor) -> Floats:
    """Contiguous float32 on the host."""
    return np.ascontiguousarray(tensor.detach().to("cpu", torch.float32).numpy())
