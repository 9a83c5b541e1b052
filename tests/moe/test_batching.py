"""Which waiting calls are merged, in what order, and what is refused: the pure core of a host of experts."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.moe.batching import LONGEST_RETRY_S, MIN_RETRY_S, Answer, Batching, Call, Key
from colab_swarm.moe.expert import BatchLimits, ExpertRule
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import CODECS, codec_of

CPU = torch.device("cpu")
LIMITS = BatchLimits(max_batch_size=8, max_batch_bytes=80, max_held_bytes=120)
RULE = ExpertRule(partial(torch.optim.SGD, lr=0.1))
SMALL = 4
FORWARD, BACKWARD = Key("ffn.0", False, (4,)), Key("ffn.0", True, (4,))


def check_batching(batching: Batching, *, calls: int | None = None) -> None:
    """Assert that the sums are right, every waiting call was admitted, and that ``calls`` are inside."""
    inside, held = batching._inside, batching._held
    assert calls is None or len(inside) == calls
    assert held.total() == sum(one.held_bytes for one in inside) <= batching.limits.max_held_bytes
    assert held == Counter({c: sum(one.held_bytes for one in inside if one.caller == c) for c in held})
    queues = list(batching._queues.values())
    waiting = [one for queue in queues for one in queue]
    assert all(queues) and set(waiting) <= inside.keys()
    assert len(set(waiting)) == len(waiting)


def pending(
    caller: str = "alice", samples: int = 1, *, key: Key = FORWARD, size_bytes: int = 1, at: float = 0.0
) -> Call:
    answer = cast(asyncio.Future[Answer], None)
    return Call(key, PeerId(caller.encode()), samples, size_bytes, at, CODECS["float32"], answer)


def received_call(parts: Sequence[bytes], codec: str, *, backward: bool) -> Call:
    call = pending(samples=len(parts[0]) // codec_of(codec).encoded_bytes(SMALL), size_bytes=16)
    views = [memoryview(part) for part in parts]
    return replace(call, key=Key("ffn.0", backward, (SMALL,)), codec=codec_of(codec), parts=views)


@pytest.fixture
def batching() -> Iterator[Batching]:
    batching = Batching(LIMITS)
    yield batching
    check_batching(batching)


def receive(batching: Batching, call: Call) -> float | None:
    """Let a call in and receive it at once; if it is refused, return its delay."""
    if (retry_s := batching.admit(call)) is None:
        retry_s = batching.hold(call, call.size_bytes)
    return retry_s


def enqueue(batching: Batching, *calls: Call) -> None:
    for one in calls:
        assert receive(batching, one) is None
        batching.enqueue(one)


def test_different_kinds_of_calls_never_mix_and_the_oldest_comes_first(batching: Batching) -> None:
    keys = [FORWARD, BACKWARD, Key("ffn.0", False, (5,)), Key("ffn.1", False, (4,))]
    calls = [pending(key=key, at=-at) for at, key in enumerate(keys)]
    late = pending(key=FORWARD, at=1)
    enqueue(batching, *calls, late)
    assert [batching.take(CPU) for _ in keys] == [[calls[3]], [calls[2]], [calls[1]], [calls[0], late]]


def test_a_busy_answer_says_how_long_the_admitted_calls_will_take(batching: Batching) -> None:
    enqueue(batching, *(pending(name, 5, size_bytes=40) for name in "abc"))
    more = pending(size_bytes=40)
    assert batching.admit(more) == MIN_RETRY_S
    batching.measured(80, 1.0)
    assert batching.admit(more) == pytest.approx(0.3)
    for seconds, limit_s in ((1e6, LONGEST_RETRY_S), (1e-9, MIN_RETRY_S)):
        for _ in range(200):
            batching.measured(80, seconds)
        assert batching.admit(more) == limit_s


STEPS = st.tuples(
    st.integers(0, 5), st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 80), st.booleans()
)


@given(st.lists(STEPS, max_size=60))
def test_in_any_sequence_the_sums_are_right_and_every_admitted_call_is_computed(steps: list[Any]) -> None:
    batching = Batching(LIMITS)
    waiting: list[Call] = []
    for at, (verb, caller, samples, size_bytes, backward) in enumerate(steps):
        if verb < 4:
            key = BACKWARD if backward else FORWARD
            new = pending(caller, samples, size_bytes=size_bytes, key=key, at=at)
            if receive(batching, new) is None:
                batching.enqueue(new)
                waiting.append(new)
        elif verb == 4 and waiting:
            batching.leave(waiting.pop(0))
        else:
            for done in batching.take(CPU):
                waiting.remove(done)
                batching.leave(done)
        check_batching(batching)
    while batch := batching.take(CPU):
        assert len({one.key for one in batch}) == 1
        assert len(batch) == 1 or sum(one.samples for one in batch) <= 8
        assert sum(one.size_bytes for one in batch) <= 80
        assert [one.arrived_at for one in batch] == sorted(one.arrived_at for one in batch)
        for one in batch:
            waiting.remove(one)
            batching.leave(one)
        check_batching(batching)
    assert not waiting and batching.admit(pending(size_bytes=80)) is None


def test_announced_calls_hold_nothing_and_a_caller_leaves_others_half(batching: Batching) -> None:
    calls = [pending("alice", size_bytes=60) for _ in range(10)]
    assert all(batching.admit(one) is None for one in calls), "announced bytes are not counted"
    refused = [batching.hold(one, 10) for _ in range(6) for one in calls]
    held = sum(one.held_bytes for one in calls)
    assert any(refused) and held == 60, "of the 120 bytes"
    enqueue(batching, pending("bob", size_bytes=10), pending("carol", size_bytes=10))
    for one in calls:
        batching.leave(one)
    enqueue(batching, pending("bob", size_bytes=40))
