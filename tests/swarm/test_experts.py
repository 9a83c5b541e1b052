"""Experts by the public face: one peer hosts, another trains through them."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import colab_swarm as cs
from colab_swarm.moe.calls import MixtureStatistics
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import wait

GRID, DIM = (3, 3), 8
OPTIONS = cs.NetworkOptions(lan=False)


@pytest.fixture
def alice() -> Iterator[Swarm]:
    with cs.create("experts", options=OPTIONS) as swarm:
        yield swarm


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()) for x in torch.randn(count, 16, DIM)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
def test_one_peer_hosts_and_another_trains_through_its_experts(alice: Swarm, tmp_path: Path) -> None:
    host = alice.experts.host("ffn", lambda: cs.moe.FeedForward(DIM), grid=GRID, count=4, folder=tmp_path)
    with cs.join(alice.invite(), peer_name="bob", options=OPTIONS) as bob:
        layer = bob.experts.mixture("ffn", DIM, grid=GRID, k=2)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 4))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        first, *_, last = (step(model, optimizer, batch) for batch in batches(40))
        assert last < 0.6 * first and sum(layer.utilisation.values()) == pytest.approx(1.0)
        told = layer.statistics()
        assert told.batches == 40 and told.answers >= 40 and not told.lost_gradients
        trainer = bob.experts.trainer(model, loss_of, optimizer, concurrency=3, progress=False)
        assert trainer.fit(batches(6)).updates == 6
        one = bob.experts.expert(host.uids[0], grid=GRID)
        assert one(torch.ones(2, DIM)).shape == (2, DIM) and one.info().host.id == alice.id
        # the first look at a swarm does not wait for the answers
        wait(lambda: "4 of 9 places live on 1 host" in repr(bob.experts.panel("ffn", grid=GRID)))
        wait(lambda: "ffn." in host.panel()._repr_mimebundle_()["text/plain"])
        with pytest.raises(cs.errors.NoExpertsError, match="no expert of other"):
            bob.experts.mixture("other", DIM, grid=GRID)(torch.ones(1, DIM))
    steps = {uid: one.step for uid, one in host.statistics().items()}
    assert sum(steps.values()) > 40 and "4 of 4 experts" in repr(host)
    host.close()
    again = alice.experts.host("ffn", lambda: cs.moe.FeedForward(DIM), grid=GRID, count=4, folder=tmp_path)
    worked = {uid: step for uid, step in steps.items() if step}
    assert {uid: one.step for uid, one in again.statistics().items() if one.step} == worked


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_users_own_mistakes_raise_at_once_and_say_how_to_fix_them(alice: Swarm, tmp_path: Path) -> None:
    feed_forward, linear = partial(cs.moe.FeedForward, DIM), partial(nn.Linear, DIM)
    hosting: dict[str, tuple[Any, dict[str, Any]]] = {
        "1 to 4 dimensions": (feed_forward, {"grid": ()}),
        "Say sample=": (partial(linear, DIM), {}),
        "same shape": (partial(linear, 2), {"sample": (DIM,)}),
        r"ffn\.9\.9": (feed_forward, {"count": ["ffn.9.9"]}),
    }
    for said, (make, options) in hosting.items():
        with pytest.raises(ValueError, match=said):
            alice.experts.host("ffn", make, **{"grid": GRID, **options})
    with pytest.raises(ValueError, match="letters, digits"):
        alice.experts.mixture("not a name", DIM, grid=GRID)
    with pytest.raises(ValueError, match="unknown codec"):
        alice.experts.mixture("ffn", DIM, grid=GRID, compression="float8")


@pytest.mark.slow
def test_experts_of_simulated_peers_are_served_on_virtual_time() -> None:
    def work(swarm: Swarm) -> MixtureStatistics | None:
        if swarm.name == "alice":
            with swarm.experts.host("ffn", lambda: cs.moe.FeedForward(DIM), grid=GRID, count=3) as host:
                host.wait(60.0)
            return None
        layer = swarm.experts.mixture("ffn", DIM, grid=GRID, k=2)
        model = nn.Sequential(layer, nn.Linear(DIM, 4))
        with pytest.raises(RuntimeError, match="write the training loop yourself"):
            swarm.experts.trainer(model, loss_of, torch.optim.SGD(model.parameters(), 0.1))
        swarm.runtime.call(asyncio.sleep(20.0))
        for batch in batches(5):
            step(model, torch.optim.SGD(model.parameters(), 0.1), batch)
        return layer.statistics()

    with cs.simulate(2, network="home", seed=0) as simulation:
        told = simulation.run(work)["bob"]
    assert told is not None and told.batches == 5 and told.answers >= 10
    assert (told.failures, told.lost_gradients, told.unanswered) == (0, 0, 0)
