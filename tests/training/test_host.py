"""A peer of two gloo processes, on loopback."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist

import colab_swarm as cs
from colab_swarm.errors import HostError
from colab_swarm.training.host import HostOptimizer, host_optimizer
from colab_swarm.training.layerwise import Lamb
from tests.training import toy
from tests.training.host_rank import RANKS, STEPS

pytestmark = pytest.mark.slow
ALONE_STEPS, RANK = 2, "tests.training.host_rank"
Alive: TypeAlias = Callable[[], bool]


def test_a_host_of_two_ranks_in_a_swarm_equals_one_process_with_the_joined_batch(tmp_path: Path) -> None:
    net = toy.model()
    with cs.create("host", peer_name="carol", options=cs.NetworkOptions(lan=False)) as carol:
        (tmp_path / "invite").write_text(carol.invite())
        optimizer = toy.join_training(carol, net, matchmaking_timeout_s=20.0)
        for step in range(ALONE_STEPS):  # so that the host has something to catch up with
            toy.take(optimizer, net, step)

        def take_the_other_rows(alive: Alive) -> None:
            while len(optimizer.collaboration.progress.known.all) < 2 and alive():
                carol.runtime.call(optimizer.collaboration.rounds.refresh())
            if alive():
                toy.train_rows(optimizer, net, slice(3, 10), STEPS)

        assert toy.run_ranks(RANK, "train", tmp_path, take_the_other_rows) == [0, 0]
    assert (toy.ROWS["alice"].start, toy.ROWS["bob"].stop) == (0, 3)
    for parameters in (
        toy.parameters_of(net),
        *(torch.load(tmp_path / f"parameters {rank}") for rank in range(RANKS)),
    ):
        torch.testing.assert_close(parameters, toy.joint_reference(STEPS), rtol=0, atol=1e-5)
    assert (tmp_path / "0.checkpoint").exists() and not (tmp_path / "1.checkpoint").exists()


@pytest.mark.ordeal
def test_ranks_are_made_equal_a_rank_may_lack_samples_and_the_leads_errors_reach_all(tmp_path: Path) -> None:
    assert toy.run_ranks(RANK, "equal", tmp_path) == [0, 0]
    for rank in range(RANKS):
        torch.testing.assert_close(torch.load(tmp_path / f"second {rank}"), toy.joint_reference(2))
        assert torch.equal(torch.load(tmp_path / f"parameters {rank}"), toy.parameters_of(toy.model()))
    assert (tmp_path / "error 0").read_text().startswith("SampleCountError: samples=0.0")
    error = (tmp_path / "error 1").read_text()
    assert error.startswith("HostError: rank 0, which talks to the swarm, failed: ")


def test_a_rank_whose_gradient_overflows_adds_nothing_halves_its_scale_and_all_continue(
    tmp_path: Path,
) -> None:
    assert toy.run_ranks(RANK, "overflow", tmp_path) == [0, 0]
    seen = [torch.load(tmp_path / f"seen {rank}") for rank in range(RANKS)]
    assert [one["scales"] for one in seen] == [[1024, 1024, 512, 512], [1024, 512, 256, 256]]
    net = toy.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for call, rows in ((0, slice(0, toy.BATCH)), (1, slice(0, 4)), (3, slice(0, toy.BATCH))):
        sgd.zero_grad()
        loss = toy.loss_of(net, call, rows)
        loss.backward()
        sgd.step()
    assert [one["step"] for one in seen] == [3, 3]
    assert seen[0]["loss"] == pytest.approx(loss.item())
    for rank in range(RANKS):
        torch.testing.assert_close(torch.load(tmp_path / f"parameters {rank}"), toy.parameters_of(net))


@pytest.mark.ordeal
def test_ranks_get_the_buffers_of_rank_0_and_no_batch_counts_without_a_gradient(tmp_path: Path) -> None:
    assert toy.run_ranks(RANK, "buffers", tmp_path) == [0, 0]
    lead, other = (torch.load(tmp_path / f"seen {rank}") for rank in range(RANKS))
    assert torch.equal(other["first"], torch.zeros(16)) and lead["step"] == other["step"] == 1
    assert not torch.equal(lead["before"], other["before"])
    assert all(torch.equal(*pair) for pair in zip(lead["after"], other["after"], strict=True))
    torch.testing.assert_close(lead["after"][0], lead["before"])
    for rank in range(RANKS):
        assert "call loss.backward() before" in (tmp_path / f"error {rank}").read_text()


@pytest.mark.ordeal
def test_ranks_have_equal_parameters_at_every_moment_though_updates_come_late(tmp_path: Path) -> None:
    assert toy.run_ranks(RANK, "delay", tmp_path) == [0, 0]
    seen = [torch.load(tmp_path / f"seen {rank}") for rank in range(RANKS)]
    assert torch.equal(*seen) and len(seen[0].unique(dim=0)) > 3


@pytest.mark.ordeal
@pytest.mark.parametrize("victim", range(RANKS))
def test_the_other_rank_fails_at_once_when_a_rank_dies(tmp_path: Path, victim: int) -> None:
    folder = tmp_path / f"victim {victim}"
    folder.mkdir()
    statuses = toy.run_ranks(RANK, "die", folder)
    assert statuses[victim] == 7 and statuses[1 - victim] == 0
    output = (folder / f"error {1 - victim}").read_text()
    assert f"at rank {1 - victim} a rank is missing that has died" in output


@pytest.mark.ordeal
def test_a_rank_that_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    assert toy.run_ranks(RANK, "hang", tmp_path) == [0, 0]
    output = (tmp_path / "error 0").read_text()
    assert "did not respond within 6 s" in output and "Rank 1 failed" in output


def test_without_a_process_group_or_with_a_swarm_at_the_wrong_rank_the_call_says_what_to_do(
    tmp_path: Path,
) -> None:
    lamb = Lamb(toy.model().parameters())
    with pytest.raises(RuntimeError, match="init_process_group"):
        host_optimizer(None, lamb, target_batch_size=10)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with pytest.raises(ValueError, match="give it the swarm"):
            host_optimizer(None, lamb, target_batch_size=10)
    finally:
        torch.distributed.destroy_process_group()


def test_a_failed_exchange_sends_again_and_hides_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostOptimizer.__new__(HostOptimizer)
    vars(host).update(lead=SimpleNamespace(lineage=b"1", global_step=1), _parameters=[], _sent=None)

    def lose(_own: object) -> None:
        raise HostError("a rank is missing")

    def fail() -> None:
        raise ZeroDivisionError("of the user")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(host, "_exchange", lose)
    with pytest.raises(HostError):
        host._follow_lead(lambda: None)
    assert host._sent is None
    with pytest.raises(HostError) as caught:
        host._follow_lead(fail)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
