"""The caller gets finite values of the right shape or an `ExpertError`, whatever the host does."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import CallRefused, ExpertError, PeerError
from colab_swarm.events import EventLog, Notice
from colab_swarm.moe import calls as expert_calls
from colab_swarm.moe.batching import PART_BYTES, spans
from colab_swarm.moe.blocks import FeedForward
from colab_swarm.moe.expert import BatchLimits, Expert
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.net.peers import Contact, Message, Stream, short
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, SimNetwork
from colab_swarm.tensors.codecs import CODECS, codec_of
from tests.moe.local import calls_of
from tests.moe.test_batching import RULE, check_batching
from tests.net.swarm import peers

INPUTS = np.arange(12, dtype=np.float32).reshape(3, 4)


def info(host: Contact) -> ExpertInfo:
    return ExpertInfo("ffn.0", host, (4,), 0, 0.0)


class Other(Message, frozen=True):
    text: str


async def answer(what: Any, opening: expert_calls.ForwardExpert, stream: Stream) -> None:
    """Answer with bytes, a message or an error; else with nothing."""
    await stream.receive(expert_calls.Part)
    if isinstance(what, bytes):
        await stream.send(expert_calls.Part(), what)
    elif isinstance(what, Message):
        await stream.send(what)
    elif isinstance(what, PeerError):
        stream.reset(str(what))
    elif what is not None:
        raise what


FAULTY: list[tuple[Any, str]] = [
    (None, "sent 0 of 12 values"),
    (PeerError("no more"), "no more"),
    (bytes(44), "44 encoded bytes, 48 expected"),
    (np.full(12, np.nan, np.float32).tobytes(), "not finite"),
    (np.full(12, 1e30, np.float32).tobytes(), "norm inf, the limit is 2.6e"),
    (np.full(12, 1e5, np.float32).tobytes(), "norm 3.46e.05, the limit is 2.6e"),
    (Other("not a part"), "not a valid Part"),
    (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug"),
]


@pytest.mark.real_time
async def test_an_unusable_answer_is_an_error_that_names_the_expert() -> None:
    for what, text in FAULTY:
        async with peers("alice", "bob") as (alice, bob):
            bob.serve_stream(expert_calls.ForwardExpert, partial(answer, what))
            with pytest.raises(
                ExpertError, match=rf"expert ffn\.0 at {bob.id.hex()[:8]}: .*{text}"
            ) as caught:
                await calls_of(alice).forward(info(bob.contact), INPUTS)
            assert caught.value.retry_s is None


@pytest.mark.real_time
async def test_the_retry_hint_of_a_busy_host_is_bounded() -> None:
    large = np.zeros((1000, 10_000), np.float32)
    for said, heard in ((0.5, 0.5), (-1.0, 0.0), (1e9, 60.0), (float("nan"), 60.0)):
        async with peers("alice", "bob") as (alice, bob):
            busy = expert_calls.Part(busy_s=said)
            bob.serve_stream(expert_calls.ForwardExpert, partial(answer, busy))
            with pytest.raises(ExpertError, match="busy") as caught:
                await calls_of(alice).attempt(expert_calls.ForwardExpert, info(bob.contact), [large])
            assert caught.value.retry_s == heard
            assert alice.statistics(bob.id).sent_bytes < large.nbytes / 2, "a busy answer stops the sending"


@pytest.mark.real_time
async def test_a_link_that_takes_no_more_streams_is_busy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.mux.MAX_STREAMS", 1)
    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(expert_calls.ForwardExpert, partial(answer, None))
        first = await alice.stream(
            bob.id, expert_calls.ForwardExpert("ffn.0", 1, (4,), "float32"), timeout_s=5
        )
        with pytest.raises(ExpertError, match="1 streams are open") as caught:
            await calls_of(alice).attempt(expert_calls.ForwardExpert, info(bob.contact), [INPUTS])
        assert caught.value.retry_s == expert_calls.LINK_BUSY_RETRY_S
        first.reset()


async def test_calls_that_are_announced_and_never_sent_take_no_memory_and_their_callers_are_named() -> None:
    network, events = SimNetwork(LAN, seed=1), EventLog()
    alice, bob, *sybils = map(network.peer, ("alice", "bob", "carol", "dave", "erin"))
    network.introduce()
    server = expert_calls.ExpertServer(bob, events, BatchLimits(max_batch_bytes=64, max_held_bytes=64))
    server.add(Expert("ffn.0", FeedForward(4), RULE, (4,)))
    opening = expert_calls.ForwardExpert("ffn.0", 4, (4,), "float32")
    streams = [await sybil.stream(bob.id, opening, timeout_s=5) for sybil in sybils]
    await asyncio.sleep(1)
    check_batching(server._batching, calls=3)  # each of all the memory
    for _ in range(20):
        await calls_of(alice).attempt(expert_calls.ForwardExpert, info(bob.contact), [INPUTS])
    for stream in streams:
        with pytest.raises(CallRefused, match="took over 60 s"):
            await stream.receive(expert_calls.Part)
    check_batching(server._batching, calls=0)
    await server.close()
    assert loop_now() == pytest.approx(60, abs=0.1)
    texts = [str(event) for event in events.recent(Notice)]
    assert len(texts) == 3 and all(short(sybil.id) in "".join(texts) for sybil in sybils)


NAMES = [*CODECS, "topk:0.0001", "topk:0.01", "topk:0.5"]


@given(st.sampled_from(NAMES), st.integers(0, 1_000_000))
def test_spans_tile_a_tensor_and_fit_into_a_part(name: str, numel: int) -> None:
    codec = codec_of(name)
    found = list(spans(numel, codec))
    assert [span.start for span in found] == [0, *(span.stop for span in found)][: len(found)]
    assert not found or found[-1].stop == numel
    assert all(0 < codec.encoded_bytes(span.stop - span.start) <= PART_BYTES for span in found)
