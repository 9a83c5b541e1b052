"""Calls of experts on other peers. Every fault of a peer is an `ExpertError` that names the expert.

A call is one stream. The caller sends its tensors in parts (backward: inputs, then gradients) and
keeps its end open until the answer arrives: a stream that ends or breaks earlier cancels the call.
The host answers with one tensor of the same shape, with one part that says it is busy, or with a
refusal.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from colab_swarm.errors import CallRefused, ExpertError, PeerError
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.grid import ExpertInfo, Grid
from colab_swarm.net.peers import Message, Peers, Stream, StreamEnded, short
from colab_swarm.runtime import Runner
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Buffer, Codec, Floats, all_finite, codec_of

PART_BYTES = 120 << 10
LINK_BUSY_RETRY_S = 1.0
MAX_RETRY_S = 60.0
DECAY = 0.99  # of an expert's share, per batch without it
FORGOTTEN = 1e-4  # an expert with less was not used for about a thousand batches: it is dropped


class ForwardExpert(Message, frozen=True):
    """Requests outputs; a tensor of shape (samples, *shape) follows, encoded by ``codec``."""

    uid: str
    samples: int
    shape: tuple[int, ...]
    codec: str


class BackwardExpert(ForwardExpert, frozen=True):
    """Requests gradients w.r.t. the inputs and lets the expert learn; two tensors follow: inputs, gradients."""


class Part(Message, frozen=True):
    """Consecutive values of a tensor, in the payload; or, with ``busy_s``: call again after so many seconds."""

    busy_s: float | None = None


def spans(numel: int, codec: Codec) -> Iterator[slice]:
    """Yield the values of each part of a tensor: whole codec blocks, at most `MAX_BLOCKS` and `PART_BYTES`."""
    step = min(PART_BYTES // codec.encoded_bytes(BLOCK_VALUES), MAX_BLOCKS) * BLOCK_VALUES
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))


def encoded(values: Floats, codec: Codec) -> Iterator[Buffer]:
    """Yield the encoded parts of a tensor; they may share its memory."""
    flat = values.reshape(-1)
    return (codec.encode(flat[span]) for span in spans(flat.size, codec))


@dataclass(frozen=True)
class MixtureStatistics:
    """Counters of a layer since its creation."""

    batches: int = 0  # forward passes
    answers: int = 0  # forward calls that succeeded
    failures: int = 0  # forward calls that failed or were later than the grace period
    lost_gradients: int = 0  # backward calls that failed: the part of that expert counted as zero
    unanswered: int = 0  # samples without any answer, which passed unchanged
    outliers: int = 0  # answers for single samples that were too far from the others
    sent_bytes: int = 0  # of activations and gradients, as encoded
    received_bytes: int = 0


class ExpertCalls:
    """Calls experts on any peer; a layer and its deep copies share one, and with it their statistics.

    A busy expert is called again after the delay that its host requests. Each outcome is reported
    to the directory. ``timeout_s`` is for finding experts, and again for calling one, dialling and
    retries included. ``codec`` compresses activations and gradients, both ways. Warning: onebit and
    topk have no error feedback here, so the lost values never arrive. Train with them from the
    start, or use int8.
    """

    def __init__(
        self,
        peers: Peers,
        directory: Directory,
        runtime: Runner,
        *,
        codec: str = "float32",
        timeout_s: float = 30.0,
    ) -> None:
        self.directory, self.runtime, self.timeout_s = directory, runtime, timeout_s
        self._peers, self._codec = peers, codec_of(codec)
        self._lock = threading.Lock()  # of counters and shares
        self._counts = Counter[str]()
        self._shares: dict[str, float] = {}

    def __deepcopy__(self, memo: object) -> "ExpertCalls":
        return self

    def count(self, **more: int) -> None:
        """Add to the counters of `MixtureStatistics`; this and the next three are thread-safe."""
        with self._lock:
            self._counts.update(more)

    def statistics(self) -> MixtureStatistics:
        with self._lock:
            return MixtureStatistics(**self._counts)

    def on_batch(self, weights: Mapping[str, float]) -> int:
        """Record a batch that was mixed with these sums of weights; return how many other experts are known."""
        total = sum(weights.values())
        with self._lock:
            if total:
                shares = {uid: DECAY * share for uid, share in self._shares.items()}
                for uid, weight in weights.items():
                    shares[uid] = shares.get(uid, 0.0) + (1 - DECAY) * weight / total
                self._shares = {u: share for u, share in shares.items() if share >= FORGOTTEN or u in weights}
            return len(self._shares.keys() - weights.keys())

    def shares(self) -> dict[str, float]:
        """Return each known expert's part of the work of about the last hundred batches; they sum to 1."""
        with self._lock:
            total = sum(self._shares.values())
            return {uid: share / total for uid, share in sorted(self._shares.items())}

    async def find(self, grid: Grid, uid: str) -> ExpertInfo:
        """Return the expert's host, shape and step; raise `ExpertError` if no host was found in time."""
        try:
            async with asyncio.timeout(self.timeout_s):
                info = await self.directory.find(grid, uid)
        except TimeoutError as error:
            raise ExpertError(f"{uid} was not found in {self.timeout_s:g} s") from error
        if info is None:
            raise ExpertError(f"no peer hosts {uid}: host it, or wait until a peer takes it over")
        return info

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        """Return outputs for ``inputs`` (n, *shape); raise `ExpertError` if late, not finite or of another shape."""
        return await self._call(ForwardExpert, info, [inputs])

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        """Return the gradient w.r.t. ``inputs``, given that w.r.t. the outputs; the expert takes an optimizer step.

        Raises `ExpertError` as `forward` does. It is then unknown whether the expert learned.
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
        """Call an expert once, without a timeout for the answer or a report to the directory.

        Raises `ExpertError` as `forward` does, with ``retry_s`` if the expert or the link is busy.
        """
        inputs = tensors[0]
        opening = kind(info.uid, len(inputs), inputs.shape[1:], self._codec.name)
        where = f"expert {info.uid} at {short(info.host.id)}"
        self._peers.learn(info.host)
        try:
            async with await self._peers.stream(info.host.id, opening, timeout_s=self.timeout_s) as stream:
                sending = asyncio.create_task(self._send(stream, tensors))
                try:
                    return (await self._receive(stream, inputs.size)).reshape(inputs.shape)
                finally:  # a host that is busy or refuses may answer before it has received everything
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        except (PeerError, ValueError) as error:
            how = {ExpertError: "", CallRefused: " refused:"}.get(type(error), " failed:")
            busy = isinstance(error, CallRefused) and error.code == "busy"
            retry_s = LINK_BUSY_RETRY_S if busy else getattr(error, "retry_s", None)
            raise ExpertError(f"{where}{how} {error}", retry_s=retry_s) from error

    async def _send(self, stream: Stream, tensors: Sequence[Floats]) -> None:
        try:
            for tensor in tensors:
                for part in encoded(np.ascontiguousarray(tensor, np.float32), self._codec):
                    await stream.send(Part(), part)
                    self.count(sent_bytes=memoryview(part).nbytes)
        except ValueError as error:  # from the codec: ends the wait for the answer
            stream.reset(str(error))

    async def _receive(self, stream: Stream, numel: int) -> Floats:
        values = np.empty(numel, np.float32)
        for span in spans(numel, self._codec):
            try:
                part, payload = await stream.receive(Part)
            except StreamEnded as error:
                raise ExpertError(f"sent {span.start} of {numel} values") from error
            self.count(received_bytes=len(payload))
            if part.busy_s is not None:
                retry_s = max(0.0, min(MAX_RETRY_S, part.busy_s))  # in this order, NaN becomes the maximum
                raise ExpertError(f"is busy: call again in {retry_s:.2g} s", retry_s=retry_s)
            values[span] = self._codec.decode(payload, span.stop - span.start)
            if not all_finite(values[span]):
                raise ExpertError("sent values that are not finite")
        return values
