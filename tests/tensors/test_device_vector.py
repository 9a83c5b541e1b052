"""The vector of a round on devices sends and takes what one in main memory does, wherever its pieces lie.

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


@pytest.mark.parametrize("name", CODECS)
def test_a_vector_on_devices_sends_what_one_in_main_memory_does(name: str) -> None:
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


@pytest.mark.parametrize("name", CODECS)
def test_a_vector_on_devices_takes_a_mean_in_its_place_only(name: str) -> None:
    codec = codec_of(name)
    values = random_values()
    device = on_devices(values)
    mean = 2.0 * random_values()
    start, stop = 4096, 9000
    payload = codec.encode(mean[start:stop])
    device.take(start, stop, codec, payload, most_rms=10.0)
    values[start:stop] = codec.decode(payload, stop - start)
    np.testing.assert_array_equal(device.read(0, NUMEL), values)
    device.take(0, 4096, codec, codec.encode(mean[:4096]))
    assert np.array_equal(device.front, device.read(0, FRONT))
    assert not np.array_equal(device.front, values[:FRONT])


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
    vector = DeviceVector(
        np.zeros(3, np.float32), [torch.empty(5, device="meta"), torch.empty(4, device="meta")]
    )
    vector.values.write(1, torch.zeros(9))
    assert copied.in_bytes - before == 4 * (5 + 2)


@pytest.mark.parametrize("mean", [np.nan, np.inf, -2.0, 1e30])
def test_a_mean_that_nobody_can_have_sent_changes_nothing_on_devices(mean: float) -> None:
    device = on_devices(random_values())
    payload = np.full(4096, mean, np.float32).tobytes()
    with pytest.raises(ValueError, match="not finite, or far too large"):
        device.take(0, 4096, codec_of("float32"), payload, most_rms=2.0)
    np.testing.assert_array_equal(device.read(0, NUMEL), random_values())
    device.take(0, 4096, codec_of("float32"), np.zeros(4096, np.float32).tobytes(), most_rms=2.0)
    assert not device.read(0, 4096).any()
