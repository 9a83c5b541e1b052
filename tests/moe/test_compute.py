"""The device thread's work on a batch, for any input of callers."""

from __future__ import annotations

import asyncio
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
from colab_swarm.moe.server import Answer, Call, Key, compute
from colab_swarm.net.peers import Refusal
from colab_swarm.tensors.codecs import CODECS, codec_of

DIM = 4


@cache
def expert() -> Expert:
    return Expert("ffn.0", FeedForward(DIM, 8), ExpertRule(partial(torch.optim.SGD, lr=1e-3)), (DIM,))


def call(parts: list[bytes], codec: str, *, backward: bool) -> Call:
    waiting: asyncio.Future[Answer] = asyncio.Future(loop=asyncio.new_event_loop())
    waiting.get_loop().close()
    views = [memoryview(part) for part in parts]
    key = Key("ffn.0", backward, (DIM,))
    return Call(key, b"alice", 1, 16, 0.0, codec_of(codec), waiting, views)


@given(
    st.booleans(),
    st.lists(st.sampled_from([*CODECS, "topk:0.25"]), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
@settings(deadline=None)  # the first call warms torch up
def test_any_input_is_answered_or_refused_and_the_expert_stays_finite(
    backward: bool, codecs: list[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    calls = [
        call(
            [rng.bytes(codec_of(codec).encoded_bytes(DIM)) for _ in range(1 + backward)],
            codec,
            backward=backward,
        )
        for codec in codecs
    ]
    answers = compute(expert(), calls)
    assert {id(one) for one, _ in answers} == {id(one) for one in calls}
    for one, answer in answers:
        if isinstance(answer, list):
            assert [len(part) for part in answer] == [one.codec.encoded_bytes(DIM)]
        else:
            assert isinstance(answer, Refusal)
    assert all(value.isfinite().all() for value in expert().state_dict()["module"].values())


@pytest.mark.parametrize("codec", ["onebit", "topk:0.25"])
def test_outputs_that_a_codec_cannot_represent_fail_only_that_call(codec: str) -> None:
    module = FeedForward(DIM, 8)
    spoilt = Expert("ffn.0", module, ExpertRule(partial(torch.optim.SGD, lr=1e-3)), (DIM,))
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    parts = [bytes(codec_of(name).encode(np.ones(DIM, np.float32))) for name in (codec, "float32")]
    calls = [call([part], name, backward=False) for part, name in zip(parts, (codec, "float32"), strict=True)]
    (_, refused), (_, answered) = compute(spoilt, calls)
    assert isinstance(refused, Refusal) and "not finite" in str(refused)
    assert isinstance(answered, list)
