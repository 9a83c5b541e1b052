"""The vector of a round, in main memory and on devices: what is sent, kept as feedback, and overwritten by a mean.

The CPU is the device here.
"""

import numpy as np
import pytest
import torch

from colab_swarm.tensors.codecs import ErrorFeedback, Floats, codec_of
from colab_swarm.tensors.device import copied
from colab_swarm.tensors.device_vector import DeviceFeedback, DeviceVector
from colab_swarm.tensors.vector import HostVector

FRONT = 100
LENGTHS = (4096, 5000, 7)
NUMEL = FRONT + sum(LENGTHS)
CHUNKS = ((0, 4096), (4096, 8192), (8192, NUMEL))
CODECS = ("float32", "float16", "bfloat16", "int8", "onebit", "sparseloco", "topk:0.01")


def random_values() -> Floats:
    return np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)


def on_devices(values: Floats) -> DeviceVector:
    """A copy, in a front and three pieces."""
    body = torch.split(torch.tensor(values[FRONT:]), LENGTHS)
    return DeviceVector(values[:FRONT].copy(), [piece.clone() for piece in body])


places = pytest.mark.parametrize("place", [HostVector, on_devices], ids=["host", "device"])


def test_a_piece_is_encoded_as_its_codec_does_and_only_what_a_codec_cuts_off_is_kept() -> None:
    values = random_values()
    feedback = ErrorFeedback(NUMEL)
    vector = HostVector(values, feedback)
    int8 = codec_of("int8")
    encoded = bytes(vector.encode(4096, 9000, int8))
    assert encoded == bytes(int8.encode(values[4096:9000]))
    assert bytes(vector.encode(0, 4096, codec_of("float32"))) == values[:4096].tobytes()
    feedback.settle()
    np.testing.assert_array_equal(
        feedback.residual[4096:9000], values[4096:9000] - int8.decode(encoded, 4904)
    )
    assert not feedback.residual[:4096].any() and not feedback.residual[9000:].any()


@pytest.mark.parametrize("name", CODECS)
def test_a_vector_on_devices_sends_and_keeps_what_one_in_main_memory_does(name: str) -> None:
    codec = codec_of(name)
    device, host = on_devices(random_values()), HostVector(random_values())
    before = ErrorFeedback(NUMEL)
    before.residual[:] = 0.1 * random_values()[::-1]
    feedback = DeviceFeedback(device, before)
    for vector, kept in ((device, feedback), (host, before)):
        kept.begin()
        vector.begin(kept, adds=True)
    for start, stop in CHUNKS:
        np.testing.assert_allclose(device.read(start, stop), host.read(start, stop))
        sent = codec.decode(device.encode(start, stop, codec), stop - start)
        wanted = codec.decode(host.encode(start, stop, codec), stop - start)
        np.testing.assert_allclose(sent, wanted, rtol=1e-6, atol=1e-6)
    for kept in (before, feedback):
        kept.settle(0.5)
    np.testing.assert_allclose(feedback.state_dict()["residual"].numpy(), before.residual, atol=1e-6)
    again = DeviceFeedback(device, ErrorFeedback(NUMEL, feedback.state_dict()))
    assert torch.equal(again.state_dict()["residual"], feedback.state_dict()["residual"])
    assert sum(len(piece) for piece in feedback.body) == NUMEL - FRONT


@places
@pytest.mark.parametrize("name", CODECS)
def test_a_vector_takes_a_mean_in_its_place_only(name: str, place: type[HostVector]) -> None:
    codec = codec_of(name)
    expected = random_values()
    vector = place(random_values())
    mean = 2.0 * random_values()
    for start, stop in ((4096, 9000), (0, 4096)):
        payload = codec.encode(mean[start:stop])
        vector.take(start, stop, codec, payload, most_rms=10.0)
        expected[start:stop] = codec.decode(payload, stop - start)
        np.testing.assert_array_equal(vector.read(0, NUMEL), expected)
    if isinstance(vector, DeviceVector):
        assert np.array_equal(vector.front, expected[:FRONT])


@places
@pytest.mark.parametrize("mean", [np.nan, np.inf, -2.0, 1e30])
def test_a_mean_that_nobody_can_have_sent_changes_nothing(mean: float, place: type[HostVector]) -> None:
    vector = place(random_values())
    payload = np.full(4096, mean, np.float32).tobytes()
    with pytest.raises(ValueError, match="not finite, or far too large"):
        vector.take(0, 4096, codec_of("float32"), payload, most_rms=2.0)
    np.testing.assert_array_equal(vector.read(0, NUMEL), random_values())
    vector.take(0, 4096, codec_of("float32"), np.zeros(4096, np.float32).tobytes(), most_rms=2.0)
    assert not vector.read(0, 4096).any()


@pytest.mark.parametrize("name", ["float32", "int8", "sparseloco"])
def test_values_in_several_pieces_are_sent_where_a_device_has_no_memory_to_join_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(pieces: object) -> torch.Tensor:
        tried.append(pieces)
        raise torch.OutOfMemoryError("the device's memory has ended")

    tried: list[object] = []
    monkeypatch.setattr(torch, "cat", no_memory)
    codec = codec_of(name)
    device = on_devices(random_values())
    np.testing.assert_array_equal(device.read(0, NUMEL), random_values())
    assert not tried
    sent = device.encode(0, NUMEL, codec)
    assert tried
    wanted = codec.encode(random_values())
    np.testing.assert_array_equal(codec.decode(sent, NUMEL), codec.decode(wanted, NUMEL))


def test_what_is_written_from_main_memory_to_a_device_is_counted() -> None:
    before = copied.in_bytes
    pieces = [torch.empty(5, device="meta"), torch.empty(4, device="meta")]
    DeviceVector(np.zeros(3, np.float32), pieces).values.write(1, torch.zeros(9))
    assert copied.in_bytes - before == 4 * (5 + 2)


@pytest.mark.parametrize("values", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_a_vector_of_another_form_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float32 values are needed"):
        HostVector(values)
