"""An expert's state as chunks: restored exactly, and checked if it comes from a stranger."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.moe.expert import Expert, ExpertRule, FeedForward
from colab_swarm.moe.saves import (
    CHUNK_BYTES,
    SavedExpert,
    SaveManifest,
    check_fit,
    cut,
    digest_of,
    freeze,
    thaw,
)

RULE = ExpertRule(
    lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
)


def expert(*, steps: int = 0, dim: int = 8, hidden: int = 16) -> Expert:
    made = Expert("ffn.0", FeedForward(dim, hidden), RULE, (dim,))
    for _ in range(steps):
        made.backward(torch.rand(4, dim), torch.rand(4, dim))
    return made


def saved(state: Any, step: int = 3) -> SavedExpert:
    return cut("ffn.0", step, freeze(state))


def replaced(whole: SavedExpert, **changes: Any) -> SavedExpert:
    return SavedExpert(msgspec.structs.replace(whole.manifest, **changes), whole.blob)


def test_an_expert_continues_from_its_save_with_equal_results() -> None:
    old = expert(steps=3)
    new = expert()
    new.load_state_dict(thaw(saved(old.state_dict())))
    inputs, grads = torch.rand(4, 8), torch.rand(4, 8)
    assert torch.equal(old.backward(inputs, grads), new.backward(inputs, grads))
    assert torch.equal(old.forward(inputs), new.forward(inputs)) and new.step == 4


def test_a_frozen_state_does_not_change_while_the_expert_learns() -> None:
    learning = expert(steps=1)
    before = saved(learning.state_dict())
    learning.backward(torch.rand(4, 8), torch.rand(4, 8))
    assert digest_of(before.head) != digest_of(saved(learning.state_dict()).head)
    assert before.manifest == cut("ffn.0", 3, freeze(thaw(before))).manifest


def test_a_save_names_chunks_that_tile_the_state_and_only_what_changed_is_new() -> None:
    state = {"frozen": torch.rand(200_000), "learnt": torch.rand(10), "step": 1}
    first = saved(state)
    state["learnt"] += 1
    second = saved(state)
    assert len(first.manifest.digests) == -(-first.blob.nbytes // CHUNK_BYTES) == 4
    assert len(second.chunks.keys() - first.chunks.keys()) == 2  # the manifest and the last chunk
    assert all(digest_of(piece) == digest for digest, piece in first.chunks.items())


def test_every_type_of_tensor_is_aligned_and_comes_back() -> None:
    state = {
        "a": torch.tensor([True]),
        "b": torch.rand(3).bfloat16(),
        "c": torch.arange(3),
        "d": torch.empty(0),
    }
    again = thaw(saved(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(state[key], again[key]) and state[key].dtype == again[key].dtype for key in state)


def test_a_state_that_is_not_finite_is_refused() -> None:
    with pytest.raises(StateError, match=r"NaN or infinite values in 'weight'"):
        thaw(saved({"weight": torch.tensor([1.0, float("nan")])}))


def test_a_manifest_that_lies_about_its_tensors_is_refused() -> None:
    whole = saved({"weight": torch.rand(100)})
    (place,) = whole.manifest.tensors
    lies = (
        {"shape": (10**9,)},
        {"shape": (0, 2**64 - 1)},
        {"shape": (-1,)},
        {"kind": "object"},
        {"kind": "load"},
        {"shape": (50,)},
    )
    for lie in lies:
        with pytest.raises(StateError):
            thaw(replaced(whole, tensors=(msgspec.structs.replace(place, **lie),)))
    empty = saved({"weight": torch.empty(0)})
    with pytest.raises(StateError, match="invalid tensor"):
        thaw(replaced(empty, tensors=(msgspec.structs.replace(place, shape=(0, 2**64 - 1)),)))


@given(st.binary(max_size=200))
def test_a_garbled_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="cannot be read"):
        SaveManifest.decode(data)


@given(
    st.lists(st.binary(min_size=31, max_size=32), max_size=3), st.integers(-5, 2**50), st.integers(-5, 2**50)
)
def test_a_manifest_whose_sizes_do_not_add_up_is_refused(digests: list[bytes], size: int, step: int) -> None:
    try:
        manifest = SaveManifest.decode(msgspec.msgpack.encode(["ffn.0", step, b"", (), size, digests]))
    except StateError:
        return
    assert -(-manifest.size_bytes // CHUNK_BYTES) == len(digests) and step >= 0
    assert {len(digest) for digest in digests} <= {32}


def test_a_state_fits_an_equal_expert_before_and_after_the_first_step() -> None:
    model = expert(steps=1).state_dict()
    check_fit(expert().state_dict(), model)
    check_fit(expert(steps=2).state_dict(), model)


def test_a_state_of_other_shapes_or_with_more_in_it_does_not_fit() -> None:
    model = expert(steps=1).state_dict()
    with pytest.raises(StateError, match=r"does not fit this expert at '/module/layers.0.weight'"):
        check_fit(expert(hidden=17).state_dict(), model)
    twisted = expert(steps=1).state_dict()
    twisted["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1 << 20)
    with pytest.raises(StateError, match="/optimizer/state/0/exp_avg"):
        check_fit(twisted, model)
    with pytest.raises(StateError):
        check_fit(model | {"more": 1}, model)
