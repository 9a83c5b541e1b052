"""Calls of experts over encrypted links on loopback, by honest and hostile callers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from colab_swarm.errors import CallRefused, ExpertError
from colab_swarm.events import EventLog, Fault, PeerRefused
from colab_swarm.moe import calls as expert_calls
from colab_swarm.moe.batching import LONGEST_RETRY_S, Call, compute, finished
from colab_swarm.moe.blocks import FeedForward, TransformerBlock
from colab_swarm.moe.calls import LONGEST, ExpertServer, ForwardExpert, Part
from colab_swarm.moe.expert import BatchLimits, Expert, ExpertRule
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.net.membership import OpenAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Refusal, Role, Stream
from colab_swarm.runtime import PauseGate
from colab_swarm.tensors import device
from colab_swarm.tensors.codecs import CODECS, Floats, codec_of
from tests.moe.local import Function, calls_of
from tests.moe.test_batching import RULE, SMALL, check_batching, received_call
from tests.net.swarm import peers, start, until

pytestmark = pytest.mark.real_time
DIM = 8


def expert(uid: str = "ffn.0", module: nn.Module | None = None, sample: tuple[int, ...] = (DIM,)) -> Expert:
    torch.manual_seed(0)
    return Expert(uid, module or FeedForward(DIM, 16), RULE, sample)


def samples(n: int, *shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, *(shape or (DIM,))), np.float32)


def info(host: Node, uid: str = "ffn.0", shape: tuple[int, ...] = (DIM,)) -> ExpertInfo:
    return ExpertInfo(uid, host.contact, shape, 0, 0.0)


def here(one: Expert, *tensors: Floats) -> Floats:
    function = one.backward if len(tensors) == 2 else one.forward
    return function(*map(torch.from_numpy, tensors)).cpu().numpy()


def admitted(server: ExpertServer) -> list[Call]:
    return list(server._batching._inside)


class Scene(NamedTuple):
    """Bob hosts experts, alice knows and calls him."""

    server: ExpertServer
    alice: Node
    bob: Node
    calls: expert_calls.ExpertCalls


@asynccontextmanager
async def hosting(*experts: Expert, events: EventLog | None = None, **settings: Any) -> AsyncIterator[Scene]:
    async with peers("alice", "bob") as (alice, bob):
        server = ExpertServer(bob, events or EventLog(), **settings)
        for one in experts or (expert(),):
            server.add(one)
        try:
            yield Scene(server, alice, bob, calls_of(alice))
        finally:
            await server.close()
            check_batching(server._batching, calls=0)


async def opened(scene: Scene, *, samples: int = 1) -> Stream:
    opening = ForwardExpert("ffn.0", samples, (DIM,), "float32")
    return await scene.alice.stream(scene.bob.id, opening, timeout_s=5)


class Gate(nn.Module):
    """Doubles its inputs, but only while it is open; remembers its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.entered, self.open = threading.Event(), threading.Event()
        self.open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        self.open.wait(10)
        self.batches.append(len(x))
        return 2 * x

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.batches.clear()
        self.entered.clear()
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()


@asynccontextmanager
async def occupied(gate: Gate, scene: Scene, uid: str = "ffn.0") -> AsyncIterator[None]:
    """Keep the device at a call of the gate, which is answered afterwards."""
    with gate.closed():
        first = asyncio.create_task(scene.calls.forward(info(scene.bob, uid), samples(1)))
        await until(gate.entered.is_set)
        yield
    assert np.array_equal(await first, 2 * samples(1))


async def queued(server: ExpertServer, count: int) -> None:
    await until(lambda: server.statistics()["ffn.0"].queued == count)


NEAR = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2, "onebit": 0.8, "topk:0.25": 0.8}


@pytest.mark.parametrize("codec", NEAR)
async def test_a_remote_expert_computes_as_a_local_one(codec: str) -> None:
    local, inputs, grads = expert(), samples(50), samples(50, seed=1)
    async with hosting() as (server, alice, bob, _):
        calls = calls_of(alice, codec=codec)
        assert np.abs((await calls.forward(info(bob), inputs)) - here(local, inputs)).mean() < NEAR[codec]
        back = await calls.backward(info(bob), inputs, grads)
        assert np.abs(back - here(local, inputs, grads)).mean() < NEAR[codec]
        counted = server.statistics()["ffn.0"]
        assert (counted.samples, counted.calls, counted.step, counted.queued) == (100, 2, 1, 0)
        assert 0 < counted.calls_per_s <= 2.0, "two calls are no thousand a second"
        assert counted.latency_s is not None and counted.batch_size == 50
        with pytest.raises(ExpertError, match=r"expert ffn\.0 .*not (finite|a number)"):
            await calls.forward(info(bob), np.full_like(inputs, np.nan))


async def test_tensors_of_many_parts_and_sequences_of_any_length_arrive_whole() -> None:
    block, gate = expert("text.0", TransformerBlock(DIM, 2), (-1, DIM)), expert("gate.0", Gate(), (1000,))
    async with hosting(block, gate) as (_, _, bob, calls):
        for length in (1, 3, 10):
            inputs = samples(2, length, DIM)
            outputs = await calls.forward(info(bob, "text.0"), inputs)
            assert np.allclose(outputs, here(block, inputs), atol=1e-6)
        large = samples(1500, 1000)
        assert np.array_equal(await calls.forward(info(bob, "gate.0"), large), 2 * large)


async def test_waiting_calls_are_merged_with_equal_results_and_kinds_never_mix() -> None:
    gate, local = Gate(), expert()
    async with hosting(expert("gate.0", gate), expert()) as scene:
        server, _, bob, calls = scene
        async with occupied(gate, scene, "gate.0"):
            inputs = [samples(n, seed=n) for n in range(1, 9)]
            forward = [asyncio.create_task(calls.forward(info(bob), x)) for x in inputs]
            await queued(server, 36)
            backward = [asyncio.create_task(calls.backward(info(bob), x, x)) for x in inputs]
            await queued(server, 72)
        for x, outputs in zip(inputs, await asyncio.gather(*forward), strict=True):
            assert np.allclose(outputs, here(local, x), atol=1e-6)
        together = np.concatenate(inputs)
        expected = here(local, together, together)
        assert np.allclose(np.concatenate(await asyncio.gather(*backward)), expected, atol=1e-6)
        counted = server.statistics()["ffn.0"]
        assert (counted.calls, counted.batch_size, counted.step) == (16, 36.0, 1)


async def test_each_device_computes_on_a_thread_of_its_own() -> None:
    gate, names = Gate(), set()

    def named(x: Tensor) -> Tensor:
        names.add(threading.get_ident())
        return 2 * x

    devices = [torch.device("cpu", index) for index in range(2)]
    slow = Expert("ffn.0", gate, RULE, (DIM,), devices[0])
    quick = Expert("ffn.1", Function(named), RULE, (DIM,), devices[1])
    async with hosting(slow, quick) as scene:
        async with occupied(gate, scene):
            outputs = await scene.calls.forward(info(scene.bob, "ffn.1"), samples(2))
            assert np.array_equal(outputs, 2 * samples(2)), "it waited for the other device"
        threads = [await scene.server.run(device, threading.get_ident) for device in devices]
        assert names == {threads[1]} != {threads[0]}


async def test_a_device_begins_the_next_batch_before_the_answers_of_the_last_are_copied_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            computed = function(*args)
            calls = args[1] if name == "begin" else [call for call, _ in computed]
            order.append(f"{name} {calls[0].key.uid}")
            return computed

        return call

    monkeypatch.setattr(device, "_MAIN_MEMORY", ())
    monkeypatch.setattr(expert_calls, "compute", noted("begin", compute))
    monkeypatch.setattr(expert_calls, "finished", noted("end", finished))
    gate = Gate()
    async with hosting(expert("gate.0", gate), expert("ffn.0"), expert("ffn.1")) as scene:
        async with occupied(gate, scene, "gate.0"):
            waiting = []
            for uid in ("ffn.0", "ffn.1"):
                waiting.append(asyncio.create_task(scene.calls.forward(info(scene.bob, uid), samples(2))))
                await until(lambda uid=uid: scene.server.statistics()[uid].queued == 2)
        for outputs in await asyncio.gather(*waiting):
            assert np.array_equal(outputs, here(expert(), samples(2)))
    assert order == ["begin gate.0", "begin ffn.0", "end gate.0", "begin ffn.1", "end ffn.0", "end ffn.1"]


async def test_one_callers_fault_in_a_batch_does_not_fail_the_others() -> None:
    gate, learner, fine, events = Gate(), expert(), samples(2), EventLog()
    async with hosting(expert("gate.0", gate), learner, events=events) as scene:
        async with occupied(gate, scene, "gate.0"):
            tasks = [
                asyncio.create_task(scene.calls.backward(info(scene.bob), fine, grads))
                for grads in (fine, np.full_like(fine, 3e38), fine * np.nan)
            ]
            await queued(scene.server, 6)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[0], np.ndarray) and learner.step == 1
        assert "lead to values that are not finite" in str(outcomes[1])
        assert "your tensors hold values that are not finite" in str(outcomes[2])
        assert all(value.isfinite().all() for value in learner.state_dict()["module"].values())
        (named,) = events.recent(PeerRefused)
        assert isinstance(named, PeerRefused)
        assert (named.peer, named.what) == (scene.alice.id.hex(), "a call for ffn.0")


async def test_an_error_in_the_experts_code_is_an_event_an_error_at_the_caller_and_ends_no_service() -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 3:
                raise KeyError("three")
            if len(x) == 4:
                raise SystemExit("four")
            return x

    events = EventLog()
    async with hosting(expert(module=Fragile()), events=events) as (_, _, bob, calls):
        for count, text in ((3, "KeyError: 'three'"), (4, "SystemExit: four")):
            with pytest.raises(ExpertError, match=rf"ffn\.0 failed: {text}"):
                await calls.forward(info(bob), samples(count))
        faults = events.recent(Fault)
        assert [fault.where for fault in faults if isinstance(fault, Fault)] == 2 * ["expert ffn.0"]
        assert np.array_equal(await calls.forward(info(bob), samples(2)), samples(2))


REFUSED = [
    (ForwardExpert("ffn.1", 1, (DIM,), "float32"), "ffn.1 is not hosted here"),
    (ForwardExpert("ffn.0", 312_500_000, (DIM,), "float32"), "split it"),  # 10 GB
    (ForwardExpert("text.0", 1 << 18, (LONGEST, DIM), "float32"), "split it"),
    (ForwardExpert("ffn.0", 1, (9,), "float32"), r"takes samples of shape \(8,\), not \(9,\)"),
    (ForwardExpert("ffn.0", -5, (DIM,), "float32"), "at least one"),
    (ForwardExpert("text.0", 1, (0, DIM), "float32"), "takes samples of shape"),
    (ForwardExpert("text.0", 1, (LONGEST + 1, DIM), "float32"), f"for 1 to {LONGEST}"),
    (ForwardExpert("text.0", 1, (-1, DIM), "float32"), "takes samples of shape"),
    (expert_calls.BackwardExpert("ffn.0", 1, (DIM,), "zip"), "unknown codec 'zip'"),
]


async def test_impossible_calls_are_refused_before_anything_is_received() -> None:
    async with hosting(expert(), expert("text.0", TransformerBlock(DIM, 2), (-1, DIM))) as scene:
        for opening, text in REFUSED:
            stream = await scene.alice.stream(scene.bob.id, opening, timeout_s=5)
            with pytest.raises(CallRefused, match=text):
                await stream.receive(Part)


async def test_parts_of_the_wrong_size_are_refused() -> None:
    gate = Gate()
    async with hosting(expert(module=gate)) as scene:
        for sizes, text in (
            ([31], "a part of 31 bytes, expected 32"),
            ([64], "a part of 64 bytes"),
            ([0], "a part of 0 bytes"),
            ([32, 32], "more parts"),
        ):
            with gate.closed():
                stream = await opened(scene)
                for size in sizes:
                    await stream.send(Part(), bytes(size))
                with pytest.raises(CallRefused, match=text):
                    await stream.receive(Part)


async def test_a_full_server_answers_busy_with_a_retry_delay() -> None:
    gate = Gate()
    limits = BatchLimits(max_batch_bytes=64, max_held_bytes=64)
    async with hosting(expert(module=gate), limits=limits) as scene:
        await scene.calls.forward(info(scene.bob), samples(1))
        async with occupied(gate, scene):
            with pytest.raises(ExpertError, match="busy: call again in") as caught:
                await scene.calls.attempt(ForwardExpert, info(scene.bob), [samples(2)])
            assert caught.value.retry_s is not None and 0 < caught.value.retry_s < 5
        await scene.calls.forward(info(scene.bob), samples(2))


async def test_a_cancelled_call_frees_its_memory_and_is_not_computed() -> None:
    gate = Gate()
    async with hosting(expert("gate.0", gate), expert()) as scene:
        server, _, bob, calls = scene
        async with occupied(gate, scene, "gate.0"):
            waiting = asyncio.create_task(calls.backward(info(bob), samples(3), samples(3)))
            await queued(server, 3)
            waiting.cancel()
            await queued(server, 0)
        await calls.forward(info(bob), samples(1))
        assert server.statistics()["ffn.0"].step == 0, "the cancelled backward was computed"


async def test_waiting_calls_of_a_removed_expert_and_of_a_closing_server_are_refused() -> None:
    gate, one = Gate(), expert()
    async with hosting(expert("gate.0", gate), one) as scene:
        server, _, bob, calls = scene
        async with occupied(gate, scene, "gate.0"):
            waiting = asyncio.create_task(calls.forward(info(bob), samples(3)))
            await queued(server, 3)
            assert server.remove("ffn.0") is one
        with pytest.raises(ExpertError, match=r"ffn\.0 is no longer hosted here"):
            await waiting
        server.add(one)
        await calls.forward(info(bob), samples(3))
        async with occupied(gate, scene, "gate.0"):  # the running call is answered
            waiting = asyncio.create_task(calls.forward(info(bob), samples(3)))
            await queued(server, 3)
            late = await opened(scene)
            await until(lambda: len(admitted(server)) == 3)
            closing = asyncio.create_task(server.close())
            await asyncio.sleep(0)
        with pytest.raises(ExpertError, match="no longer hosted"):
            await waiting
        await closing
        await late.send(Part(), bytes(4 * DIM))
        with pytest.raises(CallRefused, match="no longer hosted"):
            await late.receive(Part)
        with pytest.raises(ExpertError, match="ForwardExpert is not served"):
            await calls.forward(info(bob), samples(1))


async def test_only_workers_may_call_and_teach_an_expert() -> None:
    class Watching(OpenAdmission):
        def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
            return Role.VIEWER

    bob = await start("bob", admission=Watching())
    server = ExpertServer(bob, EventLog())
    one = expert()
    server.add(one)
    async with peers("alice") as (alice,):
        calls = calls_of(alice)
        for refused in (calls.forward(info(bob), samples(1)), calls.backward(info(bob), *[samples(1)] * 2)):
            with pytest.raises(ExpertError, match="needs the role worker"):
                await refused
        assert one.step == 0
    await server.close()
    await bob.close()


@cache
def small_expert() -> Expert:
    return Expert("ffn.0", FeedForward(SMALL, 8), ExpertRule(partial(torch.optim.SGD, lr=1e-3)), (SMALL,))


@given(
    st.booleans(),
    st.lists(st.sampled_from([*CODECS, "topk:0.25"]), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
def test_any_input_is_answered_or_refused_and_the_expert_stays_finite(
    backward: bool, codecs: list[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    calls = []
    for codec in codecs:
        parts = [rng.bytes(codec_of(codec).encoded_bytes(SMALL)) for _ in range(1 + backward)]
        calls.append(received_call(parts, codec, backward=backward))
    answers = finished(compute(small_expert(), calls))
    assert {id(one) for one, _ in answers} == {id(one) for one in calls}
    for one, answer in answers:
        if isinstance(answer, list):
            assert [len(part) for part in answer] == [one.codec.encoded_bytes(SMALL)]
        else:
            assert isinstance(answer, Refusal)
    assert all(value.isfinite().all() for value in small_expert().state_dict()["module"].values())


@pytest.mark.parametrize("backward", [False, True])
def test_after_a_bug_each_caller_is_answered_by_itself_but_none_teaches_twice(backward: bool) -> None:
    def fragile(x: Tensor) -> Tensor:
        if (x > 1).any():
            raise KeyError("a bug")
        return 2 * x

    parts = [np.full(SMALL, value, np.float32).tobytes() for value in (0, 2)]
    calls = [received_call([part] * (1 + backward), "float32", backward=backward) for part in parts]
    answers = finished(compute(Expert("ffn.0", Function(fragile), RULE, (SMALL,)), calls))
    assert [isinstance(answer, KeyError) for _, answer in answers] == [backward, True]


def test_outputs_that_a_codec_cannot_represent_fail_only_that_call() -> None:
    module = FeedForward(SMALL, 8)
    spoilt = Expert("ffn.0", module, RULE, (SMALL,))
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    ones = np.ones(SMALL, np.float32)
    calls = []
    for name in ("onebit", "topk:0.25", "float32"):
        calls.append(received_call([bytes(codec_of(name).encode(ones))], name, backward=False))
    *refused, (_, answered) = finished(compute(spoilt, calls))
    assert all(isinstance(answer, Refusal) and "not finite" in str(answer) for _, answer in refused)
    assert isinstance(answered, list)


async def test_a_paused_host_takes_no_calls_and_finishes_those_it_has_afterwards() -> None:
    gate = PauseGate()
    async with hosting(gate=gate) as scene:
        server, _, bob, calls = scene
        stream = await opened(scene, samples=2)
        await until(lambda: len(admitted(server)) == 1)
        gate.hold()
        await stream.send(Part(), samples(2).tobytes())
        with pytest.raises(ExpertError) as caught:
            await calls.attempt(ForwardExpert, info(bob), [samples(3)])
        assert caught.value.retry_s == LONGEST_RETRY_S
        await until(lambda: admitted(server)[0].parts != [])
        await asyncio.sleep(0)
        assert server.statistics()["ffn.0"].calls == 0
        gate.release()
        _, answer = await stream.receive(Part)
        assert len(answer) == 2 * DIM * 4 and server.statistics()["ffn.0"].calls == 1
