import math
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.tensors.statedict import KINDS, MAX_DEPTH, flatten, unflatten

kinds = st.sampled_from([getattr(torch, kind) for kind in sorted(KINDS)])
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda shape, kind: torch.randint(0, 2, shape).to(kind), shapes, kinds)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
keys = plain | st.binary(max_size=4)
states = st.recursive(
    keys | st.just(math.nan) | tensors,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
marks = st.sampled_from(["tensor", "bytes", "int", "float", "tuple", "dict", "?"])
garbled = st.text(alphabet="0x-aZ=", max_size=6)
skeletons = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(marks, inner | garbled, max_size=2),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


@pytest.mark.slow
@settings(max_examples=100)
@given(states)
def test_any_state_survives_json_unchanged(state: Any) -> None:
    named, skeleton = flatten(state)
    assert same(unflatten(named, skeleton), state)


@settings(max_examples=150)
@given(skeletons, st.dictionaries(st.sampled_from(["a", "", "0"]), st.just(torch.zeros(1)), max_size=2))
def test_a_strangers_skeleton_gives_a_state_or_a_state_error(
    skeleton: Any, named: dict[str, torch.Tensor]
) -> None:
    try:
        state = unflatten(named, msgspec.json.encode(skeleton))
    except StateError:
        return
    assert same(unflatten(*flatten(state)), state)


@settings(max_examples=100)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":0x,dictensor', max_size=60).map(str.encode))
def test_garbled_bytes_give_a_state_or_a_state_error(data: bytes) -> None:
    try:
        unflatten({}, data)
    except StateError as error:
        assert str(error)


@pytest.mark.slow
def test_tensors_of_an_optimizer_state_have_readable_names() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    named, _ = flatten({"optimizer": optimizer.state_dict()})
    assert set(named) == {f"optimizer/state/0/{name}" for name in ("step", "exp_avg", "exp_avg_sq")}


def test_paths_that_look_alike_get_different_names() -> None:
    state = {0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    named, skeleton = flatten(state)
    assert len(named) == 4 and same(unflatten(named, skeleton), state)


def test_tied_weights_are_sent_once_and_stay_tied() -> None:
    weight = torch.arange(6.0)
    tied = OrderedDict(embedding=weight.view(2, 3), decoder=weight.view(2, 3), row=weight[:3])
    named, skeleton = flatten(tied)
    state = unflatten(named, skeleton)
    assert set(named) == {"embedding", "row"} and state["embedding"] is state["decoder"]


def test_a_state_that_only_pickle_could_save_is_refused_with_its_place() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for state, words in (
        ({"groups": [{"names": {1, 2}}]}, "'groups/0/names' is a set, not saved without pickle"),
        ({"gradient": torch.eye(2).to_sparse()}, "sparse"),
        ({(1, 2): 3}, "is a tuple, not a plain value"),
        (endless, "too deep"),
    ):
        with pytest.raises(ValueError if state is endless else TypeError, match=words):
            flatten(state)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_integers_come_back_and_larger_ones_are_refused(sign: int) -> None:
    largest = sign * (10**4300 - 1)
    assert unflatten(*flatten(largest)) == largest
    with pytest.raises(ValueError, match="4300 digits"):
        flatten(sign * 10**4300)


@pytest.mark.parametrize(
    ("skeleton", "reason"),
    [
        ({"tensor": "missing"}, "lacks a tensor"),
        ({"tensor": "a", "tuple": []}, "it has an unknown dict"),
        *(({"pickle": "gASV"}, "it has an unknown dict"), ({"bytes": "?"}, "cannot be read")),
        *(({"dict": [["a"]]}, "not a pair"), ({"dict": [[[], 1]]}, "not a plain value")),
        *(({"dict": [["a", 1], ["a", 2]]}, "repeated"), (1, "does not name")),
    ],
)
def test_a_bad_skeleton_is_refused_with_its_reason(skeleton: Any, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        unflatten({"a": torch.zeros(1)}, msgspec.json.encode(skeleton))


def test_a_skeleton_nested_too_deeply_is_refused() -> None:
    with pytest.raises(StateError, match="too deep"):
        unflatten({}, b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2))
    for endless in (b"[" * 1_000_000, b"1" * 4301):
        with pytest.raises(StateError, match="cannot be read"):
            unflatten({}, endless)


@pytest.mark.slow
def test_a_backbone_starts_without_torch() -> None:
    program = "import sys, colab_swarm.backbone.backbone, colab_swarm.tensors.statedict; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("data", [b'"\xed\xa0\x80"', b'"\\ud800"', '"text"'.encode("utf-16")])
def test_text_that_no_file_can_hold_is_refused(data: bytes) -> None:
    with pytest.raises(StateError):
        unflatten({}, data)
    with pytest.raises(ValueError, match="surrogates"):
        flatten({"\ud800": 1})
