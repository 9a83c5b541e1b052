"""Which calls the device computes next, and how many may wait. Pure.

State: per `Key` a queue of waiting calls, oldest first, and the memory of all calls that were admitted and have not
left: still being received, waiting, being computed or being answered.

- Calls of one key may be merged into a batch; forward and backward, or samples of different shapes, never are.
- The key whose oldest call has waited longest comes first. Merging is oldest first and skips no call. A call with more
  samples than `max_batch_size` is computed alone; admission limits bytes, not samples.
- No caller crowds out the others: a caller that has calls here may hold at most as much as is still free (the dynamic
  threshold of Choudhury and Hahne, 1998). One caller alone gets half of the memory, two get a third each.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0
UNKNOWN_RETRY_S = 0.5
NEWEST = 0.2  # weight of the newest batch in the mean cost of a sample


class Key(NamedTuple):
    """What calls must have in common to be merged."""

    uid: str
    backward: bool
    shape: tuple[int, ...]


@dataclass(eq=False)
class PendingCall:
    """A call: ``samples`` of ``key``, which take ``size_bytes`` of memory; ``arrived_at`` is a monotonic time."""

    key: Key
    caller: bytes
    samples: int
    size_bytes: int
    arrived_at: float


W = TypeVar("W", bound=PendingCall)


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one batch and of all calls together."""

    max_batch_size: int = 4096  # samples up to which calls are merged
    max_batch_bytes: int = 128 << 20  # of a batch's tensors as float32, and so of a call's
    max_held_bytes: int = 512 << 20  # of all admitted calls together

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or not 0 < self.max_batch_bytes <= self.max_held_bytes:
            raise ValueError(
                f"{self}: a batch needs a sample, and the memory for all calls must hold a batch"
            )


class Batching(Generic[W]):
    """The calls at one device."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._queues: dict[Key, deque[W]] = {}
        self._inside: dict[W, None] = {}
        self._held: Counter[bytes] = Counter()
        self._held_bytes = 0
        self._sample_s: dict[tuple[str, bool], float] = {}

    def admit(self, call: W) -> float | None:
        """Reserve memory for a call; return None, or the seconds to wait before a retry.

        Raises:
            ValueError: the call is empty, or has more bytes than any batch.
        """
        limits, caller = self.limits, call.caller
        if call.samples < 1:
            raise ValueError(f"a call of {call.samples} samples: send at least one")
        if call.size_bytes > limits.max_batch_bytes:
            most = f"this host takes {limits.max_batch_bytes / 2**20:.4g} MiB at once"
            raise ValueError(f"a call of {call.size_bytes / 2**20:.4g} MiB: {most}; split it")
        free = limits.max_held_bytes - self._held_bytes - call.size_bytes
        if free < 0 or (self._held[caller] and self._held[caller] + call.size_bytes > free):
            return self._retry_s()
        self._inside[call] = None
        self._held[caller] += call.size_bytes
        self._held_bytes += call.size_bytes
        return None

    def enqueue(self, call: W) -> None:
        """Queue an admitted call that was received completely."""
        self._queues.setdefault(call.key, deque()).append(call)

    def leave(self, call: W) -> None:
        """Free the memory of a call that is answered or cancelled. Idempotent."""
        if call not in self._inside:
            return
        del self._inside[call]
        self._held_bytes -= call.size_bytes
        self._held[call.caller] -= call.size_bytes
        if not self._held[call.caller]:
            del self._held[call.caller]
        queue = self._queues.get(call.key, ())
        if queue and call in queue:
            queue.remove(call)
            self._drop_if_empty(call.key)

    def take(self) -> list[W]:
        """Return the next batch; empty if no call waits."""
        if not self._queues:
            return []
        key = min(self._queues, key=lambda key: self._queues[key][0].arrived_at)
        queue = self._queues[key]
        batch = [queue.popleft()]
        samples, size_bytes = batch[0].samples, batch[0].size_bytes
        while queue:
            samples, size_bytes = samples + queue[0].samples, size_bytes + queue[0].size_bytes
            if samples > self.limits.max_batch_size or size_bytes > self.limits.max_batch_bytes:
                break
            batch.append(queue.popleft())
        self._drop_if_empty(key)
        return batch

    def measured(self, key: Key, samples: int, seconds: float) -> None:
        """Record that a batch of ``samples`` took ``seconds``."""
        last = self._sample_s.get((key.uid, key.backward), seconds / samples)
        self._sample_s[key.uid, key.backward] = last + NEWEST * (seconds / samples - last)

    def queued(self, uid: str) -> int:
        """Return the number of samples that wait for an expert."""
        return sum(call.samples for key, queue in self._queues.items() if key.uid == uid for call in queue)

    def forget(self, uid: str) -> None:
        """Drop the measured cost of an expert that was removed."""
        for backward in (False, True):
            self._sample_s.pop((uid, backward), None)

    def _drop_if_empty(self, key: Key) -> None:
        if not self._queues[key]:
            del self._queues[key]

    def _retry_s(self) -> float:
        """Estimate how long all admitted calls will take."""
        costs = [
            call.samples * self._sample_s[call.key.uid, call.key.backward]
            for call in self._inside
            if (call.key.uid, call.key.backward) in self._sample_s
        ]
        return min(max(MIN_RETRY_S, sum(costs)), MAX_RETRY_S) if costs else UNKNOWN_RETRY_S

    def check_invariants(self) -> None:
        """Assert, in tests, that the sums are right and every waiting call was admitted."""
        assert self._held_bytes == sum(call.size_bytes for call in self._inside) <= self.limits.max_held_bytes
        assert self._held == Counter(
            {c: sum(x.size_bytes for x in self._inside if x.caller == c) for c in self._held}
        )
        waiting = [call for queue in self._queues.values() for call in queue]
        assert all(self._queues.values()) and set(waiting) <= self._inside.keys()
        assert len(set(waiting)) == len(waiting)
