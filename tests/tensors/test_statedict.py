"""Any state through names and skeleton and as a file's bytes, which may be a stranger's."""

import errno
import json
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.files import write_file
from colab_swarm.tensors import statedict
from colab_swarm.tensors.statedict import KINDS, MAX_DEPTH, Blob, file_parts, flatten, pack, unflatten, unpack

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


bits = st.binary(max_size=60) | st.text(alphabet='{}[]":0x,dictensor', max_size=60).map(str.encode)


@settings(max_examples=250)
@given(
    skeletons.map(msgspec.json.encode) | bits,
    st.dictionaries(st.sampled_from(["a", "", "0"]), st.just(torch.zeros(1)), max_size=2),
)
def test_garbled_bytes_give_a_state_or_a_state_error(data: bytes, named: dict[str, torch.Tensor]) -> None:
    try:
        state = unflatten(named, data)
    except StateError as error:
        assert str(error)
    else:
        assert same(unflatten(*flatten(state)), state)


def test_paths_that_look_alike_get_different_names_and_tied_weights_are_sent_once() -> None:
    state = {0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    named, skeleton = flatten(state)
    assert len(named) == 4 and same(unflatten(named, skeleton), state)
    weight = torch.arange(6.0)
    tied = OrderedDict(embedding=weight.view(2, 3), decoder=weight.view(2, 3), row=weight[:3])
    named, skeleton = flatten({"model": tied})
    again = unflatten(named, skeleton)["model"]
    assert set(named) == {"model/embedding", "model/row"} and again["embedding"] is again["decoder"]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"groups": [{"names": {1, 2}}]}, TypeError, "'groups/0/names' is a set, not saved without pickle"),
        ({"gradient": torch.eye(2).to_sparse()}, TypeError, "sparse"),
        ({(1, 2): 3}, TypeError, "is a tuple, not a plain value"),
        (ENDLESS, ValueError, "too deep"),
        ([10**4300], ValueError, "4300 digits"),
        ([-(10**4300)], ValueError, "4300 digits"),
        ({"\ud800": 1}, ValueError, "surrogates"),
    ],
)
def test_a_state_that_no_file_can_hold_is_refused_with_its_place(
    state: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        flatten(state)


def test_the_largest_integers_come_back() -> None:
    largest = [10**4300 - 1, -(10**4300 - 1)]
    assert unflatten(*flatten(largest)) == largest


@pytest.mark.parametrize(
    ("skeleton", "reason"),
    [
        (b'{"tensor":"missing"}', "lacks a tensor"),
        (b'{"tensor":"a","tuple":[]}', "it has an unknown dict"),
        (b'{"pickle":"gASV"}', "it has an unknown dict"),
        (b'{"bytes":"?"}', "cannot be read"),
        (b'{"dict":[["a"]]}', "not a pair"),
        (b'{"dict":[[[],1]]}', "not a plain value"),
        (b'{"dict":[["a",1],["a",2]]}', "repeated"),
        (b"1", "does not name"),
        (b'"\xed\xa0\x80"', "cannot be read"),  # text that is no Unicode
        (b'"\\ud800"', "cannot be read"),
        ('"text"'.encode("utf-16"), "cannot be read"),
    ],
)
def test_a_bad_skeleton_is_refused_with_its_reason(skeleton: bytes, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        unflatten({"a": torch.zeros(1)}, skeleton)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}])
def test_a_skeleton_nested_too_deeply_is_refused(wrap: Callable[[Any], Any]) -> None:
    state: Any = 1
    for _ in range(MAX_DEPTH):
        state = wrap(state)
    named, skeleton = flatten(state)
    assert unflatten(named, skeleton) == state
    with pytest.raises(ValueError, match="too deep"):
        flatten(wrap(state))
    with pytest.raises(StateError, match="too deep"):
        unflatten({}, skeleton.replace(b"1", flatten(wrap(1))[1]))


def test_a_skeleton_with_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statedict, "MAX_NODES", 3)
    assert unflatten({}, b"[1,2]") == [1, 2]
    for data, words in (
        (b"[1,2,3]", "too large"),
        (b"[" * 1_000_000, "cannot be read"),
        (b"1" * 4301, "cannot be read"),
    ):
        with pytest.raises(StateError, match=words):
            unflatten({}, data)


def test_the_bytes_for_late_joiners_are_the_file_and_share_their_memory_with_what_is_read() -> None:
    state = {kind: torch.ones(3).to(getattr(torch, kind)) for kind in KINDS}
    state |= {"empty": torch.empty(0, 2), "scalar": torch.tensor(0.5), "__metadata__": torch.zeros(2)}
    blob = pack({**state, "lr": 0.1})
    assert blob.tobytes() == b"".join(file_parts({**state, "lr": 0.1}))
    again = unpack(blob)
    assert again.pop("lr") == 0.1 and same(again, state)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in again.values())
    blob[-1] = 0  # of the last value of the smallest type
    assert not same(again, state)
    plain = torch.arange(4.0)
    _, values = file_parts(plain)
    plain[0] = 7.0
    assert np.frombuffer(values, np.float32)[0] == 7.0, "saving copies no tensor"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_stranger_s_state_that_is_not_finite_is_refused(kind: torch.dtype, value: float) -> None:
    with pytest.raises(StateError, match=r"NaN or infinite values in 'weight'"):
        unpack(pack({"weight": torch.tensor([1.0, value], dtype=kind)}))


WEIGHT = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def forged(
    *, head: str | None = None, values: bytes = bytes(16), skeleton: str = '{"tensor":"w"}', **changes: Any
) -> Blob:
    """A file of one tensor with changes of its entry, or with another head."""
    metadata = {"blake3": "0" * 64, "colab_swarm": statedict.VERSION, "skeleton": skeleton}
    entries = {"__metadata__": metadata, "w": {**WEIGHT, **changes}}
    text = (head or json.dumps(entries, separators=(",", ":"))).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + values), np.uint8)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"shape": [10**9]}, "not as large"),
        ({"shape": [2]}, "not as large"),
        ({"shape": [-4]}, "Expected `int` >= 0"),
        ({"shape": [4, *[1] * 64]}, "length <= 64"),
        ({"shape": [0, 2**64], "data_offsets": [0, 0], "values": b""}, "invalid tensor 'w'"),
        ({"dtype": "load"}, "'load'"),
        ({"dtype": "F64", "shape": [4]}, "not as large"),
        ({"data_offsets": [4, 20], "values": bytes(20)}, "is not where"),
        ({"data_offsets": [16, 0]}, "is not where"),
        ({"values": bytes(15)}, "by its head"),
        ({"values": bytes(17)}, "by its head"),
        ({"head": '{"w":' * 200_000}, "cannot be read"),
        ({"skeleton": '{"tensor":"v"}'}, "lacks a tensor"),
        ({"head": '{"__metadata__":{"blake3":"","colab_swarm":"1"}}', "values": b""}, "'skeleton'"),
        ({"head": '{"__metadata__":{"skeleton":""}}'}, "not a checkpoint of this version"),
    ],
)
def test_a_file_that_lies_about_its_tensors_is_refused(lie: dict[str, Any], reason: str) -> None:
    assert same(unpack(forged()), torch.zeros(4))
    with pytest.raises(StateError, match=reason):
        unpack(forged(**lie))


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_raise_only_state_error(data: bytes, as_head: bool) -> None:
    blob = forged(head=data.decode("latin1") or " ") if as_head else np.frombuffer(data, np.uint8)
    with pytest.raises(StateError):
        unpack(blob)


@pytest.mark.parametrize("code", [0, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO, errno.ENOSPC])
def test_a_file_is_synced_with_its_folder_where_a_mount_can_and_a_failing_disk_is_an_error(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_folders = list[bool]()

    def fsync(descriptor: int) -> None:
        synced_folders.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if code:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(tmp_path / "not synced", [b"x"])
    assert not synced_folders
    path = tmp_path / "new" / "file"
    if code in (errno.EIO, errno.ENOSPC):
        with pytest.raises(StateError, match="cannot write"):
            write_file(path, [b"x"], sync=True)
        assert synced_folders == [False] and not path.exists()
    else:
        write_file(path, [b"x"], sync=True)
        assert synced_folders == [False, True], "the file, then the folder with its name"
        assert path.read_bytes() == b"x"
