"""Local steps (DiLoCo) and traffic budgets: fewer rounds, the same training for all."""

from types import SimpleNamespace

import pytest
import torch

from colab_swarm.net.carrier import NodeSettings, Path
from colab_swarm.net.peers import PeerId
from colab_swarm.net.traffic import REMEMBERED_RATES, Metering
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training import settings as module
from tests.training import toy
from tests.training.toy import join_training, model, parameters_of, take

STEPS = 4


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
