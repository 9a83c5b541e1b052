"""The caller gets finite values of the right shape or an `ExpertError`, whatever the host does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import CallRefused, ExpertError
from colab_swarm.events import EventLog
from colab_swarm.moe import calls as expert_calls
from colab_swarm.moe.batching import PART_BYTES, spans
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.expert import Expert, ExpertRule
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.net.peers import Contact, Message, Stream
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, SimNetwork, SimPeers
from colab_swarm.tensors.codecs import CODECS, codec_of
from tests.moe.local import calls_of
from tests.moe.test_batching import check_batching
from tests.net.swarm import peers

RULE = ExpertRule(partial(torch.optim.SGD, lr=0.1))
INPUTS = np.arange(12, dtype=np.float32).reshape(3, 4)
Answering = Callable[[expert_calls.ForwardExpert, Stream], Awaitable[None]]


def info(host: Contact) -> ExpertInfo:
    return ExpertInfo("ffn.0", host, (4,), 0, 0.0)


def pair() -> tuple[SimNetwork, SimPeers, SimPeers]:
    network = SimNetwork(LAN, seed=1)
    return network, network.peer("alice"), network.peer("bob")


@contextlib.asynccontextmanager
async def hosted(bob: SimPeers) -> AsyncIterator[tuple[expert_calls.ExpertServer, Expert]]:
    """An expert that bob hosts."""
    server, expert = expert_calls.ExpertServer(bob, EventLog()), Expert("ffn.0", FeedForward(4), RULE, (4,))
    server.add(expert)
    yield server, expert
    await server.close()


class Other(Message, frozen=True):
    text: str


async def truncates(opening: expert_calls.ForwardExpert, stream: Stream) -> None:
    await stream.receive(expert_calls.Part)


async def breaks_off(opening: expert_calls.ForwardExpert, stream: Stream) -> None:
    await stream.receive(expert_calls.Part)
    stream.reset("no more")


async def gives(payload: bytes, opening: expert_calls.ForwardExpert, stream: Stream) -> None:
    await stream.receive(expert_calls.Part)
    await stream.send(expert_calls.Part(), payload)


async def says(message: Message, opening: expert_calls.ForwardExpert, stream: Stream) -> None:
    await stream.send(message)


async def crashes(opening: expert_calls.ForwardExpert, stream: Stream) -> None:
    raise ZeroDivisionError("a bug")


FAULTY: dict[str, tuple[Answering, str]] = {
    "truncated": (truncates, "sent 0 of 12 values"),
    "reset": (breaks_off, "no more"),
    "short": (partial(gives, bytes(44)), "44 encoded bytes, 48 expected"),
    "not a number": (partial(gives, np.full(12, np.nan, np.float32).tobytes()), "not finite"),
    "huge": (partial(gives, np.full(12, 1e30, np.float32).tobytes()), "norm inf, the limit is 2.6e"),
    "large": (partial(gives, np.full(12, 1e5, np.float32).tobytes()), "norm 3.46e.05, the limit is 2.6e"),
    "garbled": (partial(says, Other("not a part")), "not a valid Part"),
    "crashed": (crashes, "ZeroDivisionError: a bug"),
}


@pytest.mark.parametrize("case", FAULTY)
@pytest.mark.real_time
async def test_an_unusable_answer_is_an_error_that_names_the_expert(case: str) -> None:
    async with peers("alice", "bob") as (alice, bob):
        answer, text = FAULTY[case]
        bob.serve_stream(expert_calls.ForwardExpert, answer)
        with pytest.raises(ExpertError, match=rf"expert ffn\.0 at {bob.id.hex()[:8]}: .*{text}") as caught:
            await calls_of(alice).forward(info(bob.contact), INPUTS)
        assert caught.value.retry_s is None


@pytest.mark.parametrize(
    ("said", "heard"), [(0.5, 0.5), (-1.0, 0.0), (1e9, 60.0), (float("nan"), 60.0), (float("inf"), 60.0)]
)
@pytest.mark.real_time
async def test_the_retry_hint_of_a_busy_host_is_bounded(said: float, heard: float) -> None:
    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(expert_calls.ForwardExpert, partial(says, expert_calls.Part(busy_s=said)))
        calls, large = calls_of(alice), np.zeros((1000, 10_000), np.float32)
        with pytest.raises(ExpertError, match="busy") as caught:
            await calls.attempt(expert_calls.ForwardExpert, info(bob.contact), [large])
        assert caught.value.retry_s == heard
        assert alice.statistics(bob.id).sent_bytes < large.nbytes / 2, "a busy answer stops the sending"


@pytest.mark.real_time
async def test_a_link_that_takes_no_more_streams_is_busy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.mux.MAX_STREAMS", 1)
    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(expert_calls.ForwardExpert, truncates)
        first = await alice.stream(
            bob.id, expert_calls.ForwardExpert("ffn.0", 1, (4,), "float32"), timeout_s=5
        )
        with pytest.raises(ExpertError, match="1 streams are open") as caught:
            await calls_of(alice).attempt(expert_calls.ForwardExpert, info(bob.contact), [INPUTS])
        assert caught.value.retry_s == expert_calls.LINK_BUSY_RETRY_S
        first.reset()


@pytest.mark.parametrize("codec", ["onebit", "topk:0.25"])
async def test_an_expert_answers_and_learns_with_lossy_codecs(codec: str) -> None:
    _, alice, bob = pair()
    calls = calls_of(alice, codec=codec)
    async with hosted(bob) as (_, expert):
        answer = await calls.forward(info(bob.contact), INPUTS)
        assert answer.shape == INPUTS.shape and np.isfinite(answer).all() and answer.any()
        assert np.isfinite(await calls.backward(info(bob.contact), INPUTS, INPUTS)).all()
        assert expert.step == 1
        with pytest.raises(ExpertError, match=r"expert ffn\.0 .*not finite"):
            await calls.forward(info(bob.contact), np.full_like(INPUTS, np.nan))
        assert loop_now() < 1  # no wait for values that could not be sent


async def test_a_host_killed_between_forward_and_backward_is_an_error_and_comes_back() -> None:
    network, alice, bob = pair()
    calls, there = calls_of(alice), info(bob.contact)
    async with hosted(bob) as (_, expert):
        await calls.forward(there, INPUTS)
        network.now().crash("bob")
        with pytest.raises(ExpertError, match=r"expert ffn\.0 at"):
            await calls.backward(there, INPUTS, INPUTS)
        assert [fault.name for fault in network.fired] == ["crash"] and expert.step == 0
        network.now().restart("bob")
        await calls.backward(there, INPUTS, INPUTS)
        assert expert.step == 1


async def test_a_caller_that_never_sends_its_tensors_times_out() -> None:
    network, alice, bob = pair()
    network.introduce()
    async with hosted(bob) as (server, _):
        stream = await alice.stream(
            bob.id, expert_calls.ForwardExpert("ffn.0", 4096, (4,), "float32"), timeout_s=5
        )
        await asyncio.sleep(59)
        with pytest.raises(CallRefused, match="took over 60 s"):
            await stream.receive(expert_calls.Part)
        check_batching(server._batching, calls=0)
    assert loop_now() == pytest.approx(60, abs=0.1)


NAMES = [*CODECS, "topk:0.0001", "topk:0.01", "topk:0.5"]


@given(st.sampled_from(NAMES), st.integers(0, 1_000_000))
def test_spans_tile_a_tensor_and_fit_into_a_part(name: str, numel: int) -> None:
    codec = codec_of(name)
    found = list(spans(numel, codec))
    assert [span.start for span in found] == [0, *(span.stop for span in found)][: len(found)]
    assert not found or found[-1].stop == numel
    assert all(0 < codec.encoded_bytes(span.stop - span.start) <= PART_BYTES for span in found)
