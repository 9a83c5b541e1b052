"""Local steps (DiLoCo) and traffic budgets: fewer rounds, the same training for all."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import RoundFinished
from colab_swarm.net.carrier import NodeSettings, Path
from colab_swarm.net.peers import PeerId
from colab_swarm.net.traffic import REMEMBERED_RATES, Metering
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training import settings as module
from tests.training import toy
from tests.training.toy import join_training, model, parameters_of, take, train_freely

STEPS = 4
BOTH = {"overlap": True, "compression": "sparseloco"}


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_in_vain_loses_no_local_step(overlap: bool) -> None:
    def train(swarm: Swarm) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer = join_training(swarm, net := model(), local_steps=STEPS, overlap=overlap)
        take(optimizer, net, 0)
        before = parameters_of(net).clone()
        assert optimizer.wait_step(timeout_s=1.0) is None
        return before, parameters_of(net)

    before, after = toy.alone(train)
    assert torch.equal(before, after) and not torch.equal(before, parameters_of(model()))


def train_to_the_end(swarm: Swarm, steps: int, **settings: Any) -> tuple[torch.Tensor, bytes]:
    """As `train_freely`; the parameters after the end, without local steps."""
    _, lineage = train_freely(swarm, steps, **settings)
    (optimizer,) = swarm.optimizers.values()
    optimizer.close()
    return torch.cat([one.detach().flatten() for one in optimizer.param_groups[0]["params"]]), lineage


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"compression": "sparseloco"}, BOTH], ids=str)
def test_peers_agree_though_one_joins_late_and_one_is_killed(settings: dict[str, Any]) -> None:
    with cs.simulate(3, network="home", seed=3, samples_per_s=10.0) as sim:
        sim.join("erin", at=8.5)
        # Between two rounds: in one its part would be lost.
        sim.network.at(10.5 if settings.get("overlap") else 9.8).crash("carol")
        sim.join("carol", at=12.5)
        options = {"target_batch_size": 20, "local_steps": STEPS, **settings}
        results = sim.run(lambda swarm: train_to_the_end(swarm, 6, **options))
        rounds = sim.swarms["alice"].events.recent(RoundFinished)
        assert len(rounds) == 6 and [fault.name for fault in sim.network.fired] == ["crash"]
        assert all(r.samples >= 20 * STEPS for r in rounds if isinstance(r, RoundFinished))
    assert len(results) == 4 and len({lineage for _, lineage in results.values()}) == 1
    first, *others = [parameters for parameters, _ in results.values()]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, "auto"])
def test_a_senseless_number_of_local_steps_raises_at_once(steps: object) -> None:
    def train(swarm: Swarm) -> None:
        with pytest.raises(ValueError, match="pass 1 to 1000"):
            join_training(swarm, model(), local_steps=steps)

    toy.alone(train)


MB = 1_000_000


class Rounds:
    """Rounds that upload, and this peer's estimate of its upload; ``measured_bps`` is that of its links."""

    def __init__(self) -> None:
        self.measured_bps: float | None = None
        self._bandwidth = module.LinkBandwidth(self)  # type: ignore[arg-type]

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(upload_bps=self.measured_bps, download_bps=7e6)

    def upload(self, size_bytes: int, seconds: float, times: int = 1) -> float | None:
        result = SimpleNamespace(sent_bytes=size_bytes, received_bytes=0, exchange_s=seconds)
        for _ in range(times):
            self._bandwidth.on_round(result)  # type: ignore[arg-type]
        known, download_bps = self._bandwidth.known()
        assert download_bps == 7e6  # of which rounds say nothing here
        return known


def test_a_round_shorter_than_a_second_shows_the_bandwidth() -> None:
    rounds = Rounds()
    assert rounds.upload(0, 1.0) is None
    rounds.measured_bps = 5e6
    assert rounds.upload(2 * MB, 10.0) == 5e6  # a round may have waited for anything
    assert rounds.upload(2 * MB, 0.1) == 160e6
    rounds.measured_bps = None
    assert rounds.upload(1000, 1e-6, times=100) == 160e6  # a few bytes say nothing
    rounds.upload(2 * MB, 0.0)
    assert rounds.upload(2 * MB, 1.0, times=REMEMBERED_RATES - 1) == 160e6
    assert rounds.upload(2 * MB, 1.0) == 16e6  # a lower one is believed in the end


def test_before_its_links_and_rounds_have_carried_enough_a_peer_reports_no_bandwidth() -> None:
    metering = Metering(NodeSettings(), lambda: 0.0)
    peers = SimpleNamespace(statistics=lambda: metering.statistics(None, ()))
    bandwidth = module.LinkBandwidth(peers)  # type: ignore[arg-type]
    for step in range(200):  # a join, then records of the DHT
        for traffic in metering.traffic(PeerId(b"bob"), Path(), dialled=True):
            traffic.count(30_000 if step < 10 else 2_000, now=step / 10)
    small = SimpleNamespace(sent_bytes=1000, received_bytes=1000, exchange_s=0.5)
    for _ in range(8):
        bandwidth.on_round(small)  # type: ignore[arg-type]
    assert bandwidth.known() == (None, None)
