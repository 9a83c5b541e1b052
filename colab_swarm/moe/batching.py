"""The calls that wait at a host of experts: their memory, their merging into batches, their computation.

The host merges calls with the same `Key`. The next batch takes the oldest calls of the key whose first call has waited
longest. A call holds the memory of the parts that the host has received so far. All calls of one caller together may
hold at most as much memory as is still free (Choudhury and Hahne, 1998). So one caller with many calls gets half of the
memory, and two such callers get a third each. A caller's only call may use all free memory. If a call would exceed this
limit, it gets a busy answer, even if the host has already received a part of it.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from colab_swarm.errors import require
from colab_swarm.moe.expert import BatchLimits, Expert
from colab_swarm.net.peers import PeerId, Refusal
from colab_swarm.tensors.codecs import BLOCK_VALUES, MAX_BLOCKS, Buffer, Codec, Floats, all_finite
from colab_swarm.tensors.device import Arrival

PART_BYTES = 120 << 10
MIN_RETRY_S = 0.05
LONGEST_RETRY_S = 10.0  # a paused host also answers with this delay
Answer: TypeAlias = list[Buffer]  # the encoded parts of the tensor for the caller
Outcome: TypeAlias = Answer | BaseException


class Excerpt(NamedTuple):
    """The answer to one call: the call's rows in the outputs of its batch."""

    outputs: Arrival
    first: int


Computed: TypeAlias = tuple["Call", Excerpt | BaseException]


def spans(numel: int, codec: Codec) -> Iterator[slice]:
    """Yield each part's range of a tensor's values: whole codec blocks, at most `MAX_BLOCKS` and `PART_BYTES`."""
    step = min(PART_BYTES // codec.encoded_bytes(BLOCK_VALUES), MAX_BLOCKS) * BLOCK_VALUES
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))


def encoded(values: Floats, codec: Codec) -> Iterator[Buffer]:
    """Yield the encoded parts of a tensor. The parts may share the tensor's memory."""
    flat = values.reshape(-1)
    return (codec.encode(flat[span]) for span in spans(flat.size, codec))


class Key(NamedTuple):
    """What calls must have in common to be merged."""

    uid: str
    backward: bool
    shape: tuple[int, ...]
    device: torch.device = torch.device("cpu")  # where the expert is


@dataclass(eq=False)
class Call:
    """A call with its samples, and the future for which the call's handler waits."""

    key: Key
    caller: PeerId
    samples: int
    size_bytes: int  # of the samples, decoded
    arrived_at: float  # monotonic seconds
    codec: Codec
    answer: asyncio.Future[Answer]
    parts: list[memoryview] = field(default_factory=list)  # as received
    held_bytes: int = 0  # bytes received; counted until the answer, which has about the same size, is sent
    received: bool = False  # whether all parts were received

    def decode_into(self, tensors: Sequence[Floats]) -> None:
        """Decode the parts and free them; raise `ValueError` if a part is no tensor or not finite."""
        parts = iter(self.parts)
        for tensor in tensors:
            flat = tensor.reshape(-1)
            for span in spans(flat.size, self.codec):
                flat[span] = self.codec.decode(next(parts), span.stop - span.start)
                require(all_finite(flat[span]), "your tensors hold values that are not finite")
        self.parts.clear()


class Unusable(Refusal):
    """A refusal of a call that failed because of the caller's tensors."""


class Batching:
    """The calls at one host: a queue of waiting calls for each `Key`, and the memory that all calls hold."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._queues: dict[Key, deque[Call]] = {}
        self._inside: dict[Call, None] = {}
        # bytes by caller
        self._held = Counter[bytes]()
        self._byte_s = (
            1e-9  # seconds to compute one byte of a call, mean of the last batches; starts with a guess
        )

    def admit(self, call: Call) -> float | None:
        """Admit a call and return None; if there is no memory now, return the seconds to wait before a retry.

        Raises `ValueError` if the call is empty, or has more bytes than a batch may have.
        """
        if call.samples < 1:
            raise ValueError(f"a call of {call.samples} samples: send at least one")
        most_bytes = self.limits.max_batch_bytes
        if call.size_bytes > most_bytes:
            mine, most = (size_bytes / 2**20 for size_bytes in (call.size_bytes, most_bytes))
            raise ValueError(f"a call of {mine:.4g} MiB: this host takes {most:.4g} MiB at once; split it")
        retry_s = self._busy_s(call, call.size_bytes)
        if retry_s is None:
            self._inside[call] = None
        return retry_s

    def hold(self, call: Call, more_bytes: int) -> float | None:
        """Take memory for a part that the host received; return None, or the seconds to wait before a retry."""
        retry_s = self._busy_s(call, more_bytes)
        if retry_s is None:
            self._count(call, more_bytes)
        return retry_s

    def _busy_s(self, call: Call, more_bytes: int) -> float | None:
        held = self._held.total()
        after = call.held_bytes + more_bytes
        own = self._held[call.caller] - call.held_bytes
        free = self.limits.max_held_bytes - held - more_bytes
        # the only call of a caller may use all free memory, because it may be as large as a batch
        if free >= 0 and (not own or own + after <= free):
            return None
        return min(max(MIN_RETRY_S, held * self._byte_s), LONGEST_RETRY_S)

    def _count(self, call: Call, more_bytes: int) -> None:
        call.held_bytes += more_bytes
        self._held[call.caller] += more_bytes
        if not self._held[call.caller]:
            del self._held[call.caller]

    def enqueue(self, call: Call) -> None:
        """Queue an admitted call whose parts have all been received."""
        self._queues.setdefault(call.key, deque()).append(call)

    def leave(self, call: Call) -> None:
        """Free the memory of an answered or cancelled call. Idempotent."""
        if call not in self._inside:
            return
        del self._inside[call]
        self._count(call, -call.held_bytes)
        if call in (queue := self._queues.get(call.key, deque())):
            queue.remove(call)
            if not queue:
                del self._queues[call.key]

    def take(self, device: torch.device) -> list[Call]:
        """Return the next batch for this device; empty if no call waits for it."""
        keys = [key for key in self._queues if key.device == device]
        if not keys:
            return []
        key = min(keys, key=lambda key: self._queues[key][0].arrived_at)
        queue = self._queues[key]
        batch = [queue.popleft()]
        samples = batch[0].samples
        size_bytes = batch[0].size_bytes
        while queue:
            samples = samples + queue[0].samples
            size_bytes = size_bytes + queue[0].size_bytes
            if samples > self.limits.max_batch_size or size_bytes > self.limits.max_batch_bytes:
                break
            batch.append(queue.popleft())
        if not queue:
            del self._queues[key]
        return batch

    def waits(self, device: torch.device) -> bool:
        """Return True if a call waits for this device."""
        return any(key.device == device for key in self._queues)

    def measured(self, size_bytes: int, seconds: float) -> None:
        self._byte_s += 0.2 * (seconds / size_bytes - self._byte_s)

    def queued(self, uid: str) -> int:
        samples = 0
        for key, queue in self._queues.items():
            if key.uid == uid:
                samples += sum(call.samples for call in queue)
        return samples


def compute(expert: Expert, calls: Sequence[Call]) -> list[Computed]:
    """Begin to compute calls of one key as one batch; `finished` waits for the answers."""
    samples = sum(call.samples for call in calls)
    key = calls[0].key
    row = 0
    pinned = expert.device.type == "cuda"
    stacks = [torch.empty(samples, *key.shape, pin_memory=pinned) for _ in range(1 + key.backward)]
    computed: list[Computed] = []
    valid: list[Call] = []
    for call in calls:
        own = [stack[row : row + call.samples] for stack in stacks]
        try:
            call.decode_into([tensor.numpy() for tensor in own])
        except ValueError as error:
            computed.append((call, Unusable(str(error))))
            continue
        valid.append(call)
        row += call.samples
    if valid:
        function = expert.backward if key.backward else expert.forward
        computed += _computed(function, valid, [stack[:row] for stack in stacks])
    return computed


def _computed(
    function: Callable[..., Tensor], calls: Sequence[Call], tensors: Sequence[Tensor]
) -> list[Computed]:
    """Return the calls in order, each with its outputs or error. After a failure, compute each call separately.

    After a failed backward, do so only if the error is a `FloatingPointError`. After any other error, the expert may
    have taken a step.
    """
    sizes = [call.samples for call in calls]
    try:
        outputs = Arrival(function(*tensors).contiguous())
    except Exception as error:  # the user's module may raise any error; the server reports it
        bad_data = isinstance(error, FloatingPointError)
        if len(calls) == 1 or not (bad_data or len(tensors) == 1):
            failure = Unusable(str(error)) if bad_data else error
            return [(call, failure) for call in calls]
        parts = zip(calls, *(torch.split(tensor, sizes) for tensor in tensors), strict=True)
        computed = []
        for call, *own in parts:
            computed += _computed(function, [call], own)
        return computed
    rows = itertools.accumulate(sizes, initial=0)
    return [(call, Excerpt(outputs, row)) for call, row in zip(calls, rows, strict=False)]


def finished(computed: Sequence[Computed]) -> list[tuple[Call, Outcome]]:
    """Wait until the device has computed the batch; return each call with its answer or error."""
    answers: list[tuple[Call, Outcome]] = []
    for call, result in computed:
        answer: Outcome
        try:
            if isinstance(result, BaseException):
                answer = result
            else:
                outputs = result.outputs.read()[result.first : result.first + call.samples]
                answer = list(encoded(outputs.numpy(), call.codec))
        except ValueError as error:  # the values are not finite, which some codecs cannot represent
            answer = Refusal(f"{call.key.uid} answers with {error}")
        except Exception as error:  # the device failed after the computation had begun
            answer = error
        answers.append((call, answer))
    return answers
