import asyncio
import random
from functools import partial

import numpy as np
import pytest
import torch

from colab_swarm.averaging.moshpit import ArrayAverages, flatten
from colab_swarm.events import EventLog
from colab_swarm.sim import LAN, SimNetwork
from colab_swarm.swarm.network import assemble, find_others


def test_a_mean_has_the_shape_and_kind_of_its_input() -> None:
    for values in (torch.ones(2, 3, dtype=torch.float16), torch.ones(4, requires_grad=True)):
        flat, restore = flatten(values)
        mean = restore(flat * 2)
        assert (mean.dtype, mean.shape, mean.requires_grad) == (values.dtype, values.shape, False)
        torch.testing.assert_close(mean, 2 * values.detach())
    array = np.ones((2, 3))
    flat, restore = flatten(array)
    assert flat.shape == (6,) and flat.dtype == np.float32
    assert restore(flat).dtype == array.dtype and restore(flat).shape == array.shape


def test_numbers_and_lists_are_arrays_too() -> None:
    flat, restore = flatten(3)
    assert restore(flat / 2) == pytest.approx(1.5) and restore(flat).shape == ()
    assert flatten([1, 2])[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("values", ["text", [1j], None])
def test_values_without_a_mean_are_refused(values: object) -> None:
    with pytest.raises(ValueError, match="real numbers"):
        flatten(values)


def test_a_vector_of_ones_own_is_left_as_it_is() -> None:
    values = np.ones(3, np.float32)
    flatten(values)[0][:] = 5
    assert values.tolist() == [1, 1, 1]


async def two_peers() -> list[ArrayAverages]:
    network = SimNetwork(LAN)
    peers = [network.peer(name) for name in ("alice", "bob")]
    services = [assemble(one, "run", EventLog(), random.Random(one.name)) for one in peers]
    await find_others(services[1], [peers[0].contact])
    return [ArrayAverages(one.router, one.dht, one.averager, "run") for one in services]


async def test_peers_average_several_arrays_at_once_by_name() -> None:
    averages = await two_peers()
    results = await asyncio.gather(
        *(
            one.average(np.full((2, 2), value), weight=weight, group_size=None, name=name)
            for name in ("losses", "weights")
            for one, value, weight in zip(averages, (1.0, 4.0), (2.0, 1.0), strict=True)
        )
    )
    for mean, result in results:
        np.testing.assert_allclose(mean, np.full((2, 2), 2.0))
        assert len(result.peers) == 2 and result.complete
    for one in averages:
        await one.close()


async def test_a_name_keeps_the_codec_that_its_values_began_with() -> None:
    alice, bob = await two_peers()
    average = partial(alice.average, np.ones(3), weight=1.0, group_size=None)
    await average(name="losses", compression="topk:0.5")
    with pytest.raises(ValueError, match=r"'losses' is averaged as topk:0\.5 here: choose another name"):
        await average(name="losses", compression="int8")
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        await average(name="others", compression="zip")
    await alice.close()
    await bob.close()


async def test_few_large_values_among_small_ones_are_averaged_as_topk() -> None:
    averages, values = await two_peers(), np.where(np.arange(10_000) % 50 == 0, 4.0, 0.001)
    options = {"weight": 1.0, "group_size": None, "name": "x", "compression": "topk:0.02"}
    results = await asyncio.gather(*(one.average(values, **options) for one in averages))
    for mean, result in results:
        np.testing.assert_allclose(mean, values, atol=1e-3)
        assert sum(one.sent_bytes for one in result.rounds if one) < 0.7 * 4 * len(values)
    for one in averages:
        await one.close()
