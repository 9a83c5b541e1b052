"""Which waiting calls are merged, in what order, and what is refused: the pure core of a host of experts."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.moe.batching import (
    KNOWN_S,
    LONGEST_RETRY_S,
    MIN_RETRY_S,
    Answer,
    Batching,
    Call,
    Key,
    Teachers,
    compute,
    finished,
)
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.expert import ADAM, BatchLimits, Expert, ExpertRule
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import CODECS, Floats, codec_of

CPU = torch.device("cpu")
LIMITS = BatchLimits(max_batch_size=8, max_batch_bytes=80, max_held_bytes=120)
RULE = ExpertRule(partial(torch.optim.SGD, lr=0.1))
SMALL = 4
FORWARD, BACKWARD = Key("ffn.0", False, (4,)), Key("ffn.0", True, (4,))


def check_batching(batching: Batching, *, calls: int | None = None) -> None:
    """Assert that the sums are right, every waiting call was admitted, and that ``calls`` are inside."""
    inside, held, kin = batching._inside, batching._held, batching._kin
    assert calls is None or len(inside) == calls
    assert held.total() == sum(one.held_bytes for one in inside) <= batching.limits.max_held_bytes
    assert held == Counter({c: sum(one.held_bytes for one in inside if one.caller == c) for c in held})
    assert kin == Counter({v: sum(one.held_bytes for one in inside if one.voucher == v) for v in kin})
    queues = list(batching._queues.values())
    waiting = [one for queue in queues for one in queue]
    assert all(queues) and set(waiting) <= inside.keys()
    assert len(set(waiting)) == len(waiting)


def pending(
    caller: str = "alice",
    samples: int = 1,
    *,
    key: Key = FORWARD,
    size_bytes: int = 1,
    at: float = 0.0,
    voucher: str = "",
) -> Call:
    answer = cast(asyncio.Future[Answer], None)
    return Call(
        key,
        PeerId(caller.encode()),
        (voucher or caller).encode(),
        samples,
        size_bytes,
        at,
        CODECS["float32"],
        answer,
    )


def received_call(
    parts: Sequence[bytes],
    codec: str,
    *,
    backward: bool,
    caller: str = "alice",
    voucher: str = "",
    at: float = 0.0,
) -> Call:
    key, views = Key("ffn.0", backward, (SMALL,)), [memoryview(part) for part in parts]
    count = len(parts[0]) // codec_of(codec).encoded_bytes(SMALL)
    return Call(
        key,
        PeerId(caller.encode()),
        (voucher or caller).encode(),
        count,
        16,
        at,
        codec_of(codec),
        cast(Any, None),
        views,
    )


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


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([(4, 1)] * 4, [2, 2]),
        ([(9, 1), (1, 1), (9, 1)], [1, 1, 1]),  # more samples than a batch
        ([(1, 40)] * 3, [2, 1]),  # bytes
    ],
)
def test_calls_are_merged_oldest_first_until_a_batch_is_full(
    batching: Batching, sizes: list[tuple[int, int]], batches: list[int]
) -> None:
    calls = [pending(str(at), n, size_bytes=size_bytes, at=at) for at, (n, size_bytes) in enumerate(sizes)]
    enqueue(batching, *calls)
    waiting = iter(calls)
    assert [batching.take(CPU) for _ in batches] == [[*islice(waiting, count)] for count in batches]
    assert batching.take(CPU) == []


def test_different_kinds_of_calls_never_mix_and_the_oldest_comes_first(batching: Batching) -> None:
    keys = [FORWARD, BACKWARD, Key("ffn.0", False, (5,)), Key("ffn.1", False, (4,))]
    calls = [pending(key=key, at=-at) for at, key in enumerate(keys)]
    late = pending(key=FORWARD, at=1)
    enqueue(batching, *calls, late)
    assert [batching.take(CPU) for _ in keys] == [[calls[3]], [calls[2]], [calls[1]], [calls[0], late]]


@pytest.mark.parametrize(
    ("samples", "size_bytes", "text"),
    [
        *((0, 0, "at least"), (-1, -1, "at least"), (1, 81, "split it")),
        (10**12, 10**15, "a call of .* MiB: .* MiB"),
    ],
)
def test_an_empty_call_and_one_larger_than_any_batch_are_refused(
    batching: Batching, samples: int, size_bytes: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        batching.admit(pending(samples=samples, size_bytes=size_bytes))


def test_one_caller_gets_half_of_the_memory_and_leaves_the_rest_to_others(batching: Batching) -> None:
    enqueue(batching, *(pending("alice", size_bytes=20) for _ in range(3)))
    assert batching.admit(pending("alice", size_bytes=20)) is not None
    enqueue(batching, pending("bob", size_bytes=20), pending("carol", size_bytes=20))
    assert batching.admit(pending("bob", size_bytes=20)) is not None


def test_an_empty_server_takes_a_call_as_large_as_a_batch(batching: Batching) -> None:
    large = pending(size_bytes=80)
    enqueue(batching, large)
    assert batching.admit(pending("bob", size_bytes=80)) is not None
    batching.leave(large)
    batching.leave(large)
    assert batching.admit(pending("bob", size_bytes=80)) is None


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
        assert [one.arrived_at for one in batch] == sorted(one.arrived_at for one in batch)
        for one in batch:
            waiting.remove(one)
            batching.leave(one)
        check_batching(batching)
    assert not waiting and batching.admit(pending(size_bytes=80)) is None


def test_announced_calls_hold_nothing_and_peers_of_one_voucher_leave_others_a_quarter(
    batching: Batching,
) -> None:
    sybils = [pending(f"sybil {i}", size_bytes=60, voucher="mallory") for i in range(10)]
    assert all(batching.admit(one) is None for one in sybils), "announced bytes are counted"
    refused = [batching.hold(one, 10) for _ in range(6) for one in sybils]
    held = sum(one.held_bytes for one in sybils)
    assert any(refused) and held == 90, "the attack must fire and take its three quarters"
    enqueue(batching, pending("bob", size_bytes=10), pending("carol", size_bytes=10))
    assert receive(batching, pending("erin", size_bytes=10, voucher="mallory")) is not None
    for one in sybils:
        batching.leave(one)
    enqueue(batching, pending("bob", size_bytes=40))


class Lesson:
    """An expert that callers teach to return its inputs, in times that they choose."""

    def __init__(self, rule: ExpertRule = ADAM) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.expert = Expert("ffn.0", FeedForward(SMALL, 16), rule, (SMALL,), CPU)
        self.teachers, self.rng = Teachers(), np.random.default_rng(0)
        self.probe = torch.randn(32, SMALL)

    def call(self, caller: str, at: float, grads: Floats | None = None, *, voucher: str = "") -> Call:
        inputs = self.rng.standard_normal((8, SMALL)).astype(np.float32)
        if grads is None:
            outputs = self.expert.forward(torch.from_numpy(inputs)).numpy()
            grads = (outputs - inputs) / outputs.size
        parts = [inputs.tobytes(), np.broadcast_to(grads, inputs.shape).astype(np.float32).tobytes()]
        call = received_call(parts, "float32", backward=True, caller=caller, voucher=voucher, at=at)
        finished(compute(self.expert, [call], self.teachers))
        return call

    def norm(self) -> float:
        return float(self.expert.forward(self.probe).norm())


@pytest.mark.parametrize(
    ("rule", "size", "step_s"), [(ADAM, 0.01, 0.026), (RULE, 1.0, 0.026), (ADAM, 1e6, 1.0)]
)
def test_one_account_does_not_outweigh_two_others_at_an_expert(
    rule: ExpertRule, size: float, step_s: float
) -> None:
    """As many small steps as it can, or few large ones: 150 of them moved the outputs 4-fold, by Adam."""
    lesson, began = Lesson(rule), KNOWN_S + 20.0
    for second in range(int(began)):
        shares = [lesson.call(name, second).share for name in ("alice", "bob")]
    before = lesson.norm()
    calls, at = [], began
    while at < began + 4.0:
        calls.append(lesson.call("mallory", at, np.full(SMALL, size, np.float32)))
        at += step_s
        if at % 1.0 < step_s:
            shares += [lesson.call(name, at).share for name in ("alice", "bob")]
    assert sum(call.share for call in calls) < len(calls) / 2 and any(call.insists for call in calls)
    assert np.mean(shares) > 0.95 and lesson.norm() < 1.5 * before


def test_identities_of_one_voucher_move_an_expert_as_one_account() -> None:
    lesson = Lesson()
    names = ["alice", "bob", *(f"sybil {i}" for i in range(8))]
    shares = dict[str, list[float]]()
    for second in range(40):
        for name in names:
            voucher = "mallory" if name.startswith("sybil") else ""
            call = lesson.call(name, second, voucher=voucher)
            shares.setdefault(name, []).append(call.share)
    means = {name: float(np.mean(values)) for name, values in shares.items()}
    assert means["alice"] == means["bob"] == 1.0
    assert sum(mean for name, mean in means.items() if name.startswith("sybil")) < 2.0


def test_a_caller_alone_or_beside_one_that_hardly_calls_teaches_as_before() -> None:
    lesson, plain = Lesson(), Lesson()
    plain.teachers.weigh = lambda *_: None  # type: ignore[method-assign, assignment]
    for second in range(80):
        for scene in (lesson, plain):
            scene.call("alice", second)
            if second >= 50 and second % 25 == 0:
                scene.call("mallory", second, np.full(SMALL, 1e-9, np.float32))
    assert lesson.norm() == plain.norm()
