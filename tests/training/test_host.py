"""A peer of two gloo processes, on loopback."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

import colab_swarm as cs
from colab_swarm.errors import HostError
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.host import HostOptimizer, host_optimizer
from colab_swarm.training.layerwise import Lamb
from tests.training import toy
from tests.training.host_rank import NAN_STEP, RAGGED_STEPS, RANKS, STEPS, ragged_rows

pytestmark = pytest.mark.slow
ALONE_STEPS, RANK = 2, "tests.training.host_rank"
Alive: TypeAlias = Callable[[], bool]
Places: TypeAlias = list[tuple[str, int]]


def check_train(folder: Path) -> None:
    """In a swarm, whose other peer takes the other rows."""
    for rank in range(RANKS):
        parameters = torch.load(folder / f"parameters {rank}")
        torch.testing.assert_close(parameters, toy.joint_reference(STEPS), rtol=0, atol=1e-5)
    assert (folder / "0.checkpoint").exists() and not (folder / "1.checkpoint").exists()


def check_equal(folder: Path) -> None:
    """Ranks are made equal, a rank may lack samples, and the lead's errors reach all."""
    for rank in range(RANKS):
        torch.testing.assert_close(torch.load(folder / f"second {rank}"), toy.joint_reference(2))
        assert torch.equal(torch.load(folder / f"parameters {rank}"), toy.parameters_of(toy.model()))
    assert (folder / "error 0").read_text().startswith("StepError: samples=0.0")
    error = (folder / "error 1").read_text()
    assert error.startswith("HostError: rank 0, which talks to the swarm, failed: ")


def check_overflow(folder: Path) -> None:
    """A rank whose gradient overflows adds nothing, halves its scale, and all continue."""
    seen = [torch.load(folder / f"seen {rank}") for rank in range(RANKS)]
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
        torch.testing.assert_close(torch.load(folder / f"parameters {rank}"), toy.parameters_of(net))


def check_accelerated(folder: Path) -> None:
    """A rank has an optimizer of torch, which accelerate steps."""
    lead, other = (torch.load(folder / f"seen {rank}") for rank in range(RANKS))
    for seen in (lead, other):
        assert seen["is an optimizer"] and seen["shown"] and seen["zeros"] and seen["none"]
        assert seen["step"] == (4, 4) and seen["skipped"] == [False] * 4 and seen["lr"] == 0.01
        assert seen["schedule"].startswith(
            "ValueError: a scheduler here would count this peer's micro-batches"
        )
        assert seen["group"].startswith("TypeError: the peers have agreed on the parameters")
        assert seen["copy"].startswith("TypeError: a HostOptimizer cannot be copied")
    assert (lead["scales"], other["scales"]) == ([8.0] * 4, [8.0, 4.0, 4.0, 4.0])
    assert torch.equal(*(torch.load(folder / f"parameters {rank}") for rank in range(RANKS)))
    # Only rank 0's optimizer steps, and so has hooks that are called, and moments.
    assert (lead["stepped"], other["stepped"]) == (4, 0) and (lead["moments"], other["moments"]) == (4, 0)


def check_buffers(folder: Path) -> None:
    """Ranks get the buffers of rank 0, and no batch counts without a gradient."""
    lead, other = (torch.load(folder / f"seen {rank}") for rank in range(RANKS))
    assert torch.equal(other["first"], torch.zeros(16)) and lead["step"] == other["step"] == 1
    assert not torch.equal(lead["before"], other["before"])
    assert all(torch.equal(*pair) for pair in zip(lead["after"], other["after"], strict=True))
    torch.testing.assert_close(lead["after"][0], lead["before"])
    for rank in range(RANKS):
        assert "call loss.backward() before" in (folder / f"error {rank}").read_text()


def check_delay(folder: Path) -> None:
    """Ranks have equal parameters at every moment, though updates come late."""
    seen = [torch.load(folder / f"seen {rank}") for rank in range(RANKS)]
    assert torch.equal(*seen) and len(seen[0].unique(dim=0)) > 3


def check_ragged(folder: Path) -> None:
    """Devices with ragged batches equal one process, and copy nothing."""
    lead, other = (torch.load(folder / f"seen {rank}") for rank in range(RANKS))
    assert lead["step"] == other["step"] == RAGGED_STEPS
    assert other["warnings"] == ["rank 1: a gradient of 4 samples is not finite (NaN or Inf)"]
    assert lead["warnings"] == [] and other["copied"] == (0, 0) < lead["copied"]
    net = toy.model()
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(RAGGED_STEPS):
        ranks = [0] if step == NAN_STEP else [0, 1]
        batches = [ragged_rows(rank, step) for rank in ranks]
        batches = [rows for rows in batches if rows.stop > rows.start]
        counts = [rows.stop - rows.start for rows in batches]
        for rows, count in zip(batches, counts, strict=True):
            (toy.loss_of(net, step, rows) * count / sum(counts)).backward()
        adam.step()
        adam.zero_grad()
    for rank in range(RANKS):
        parameters = torch.load(folder / f"parameters {rank}")
        torch.testing.assert_close(parameters, toy.parameters_of(net), rtol=0, atol=1e-5)


CHECKS = {
    "train": check_train,
    "equal": check_equal,
    "overflow": check_overflow,
    "accelerated": check_accelerated,
    "buffers": check_buffers,
    "delay": check_delay,
    # This one counts copies until its process ends.
    "ragged": check_ragged,
}


def test_two_ranks_of_a_host_equal_one_process_in_each_scenario(tmp_path: Path) -> None:
    """Alone, and in a swarm: all scenarios in one run of two processes."""
    for scenario in CHECKS:
        (tmp_path / scenario).mkdir()
    net = toy.model()
    with cs.create("host", peer_name="carol", options=cs.NetworkOptions(lan=False)) as carol:
        (tmp_path / "train" / "invite").write_text(carol.invite())
        optimizer = toy.join_training(carol, net)
        for step in range(ALONE_STEPS):  # so that the host has something to catch up with
            toy.take(optimizer, net, step)

        def take_the_other_rows(alive: Alive) -> None:
            while len(optimizer.rounds.view.all) < 2 and alive():
                carol.runtime.call(optimizer.rounds.refresh())
            if alive():
                toy.train_rows(optimizer, net, slice(3, 10), STEPS)

        assert toy.run_ranks(RANK, ",".join(CHECKS), tmp_path, take_the_other_rows) == [0, 0]
    assert (toy.ROWS["alice"].start, toy.ROWS["bob"].stop) == (0, 3)
    torch.testing.assert_close(toy.parameters_of(net), toy.joint_reference(STEPS), rtol=0, atol=1e-5)
    for scenario, check in CHECKS.items():
        check(tmp_path / scenario)


@pytest.mark.ordeal
@pytest.mark.parametrize(
    ("lost", "status", "texts"),
    [
        ("dies 0", 7, ["at rank 1 a rank is missing that has died"]),
        ("dies 1", 7, ["at rank 0 a rank is missing that has died"]),
        ("hangs 1", 0, ["did not respond within 6 s", "Rank 1 failed"]),
    ],
)
def test_when_a_rank_dies_or_does_not_come_the_other_one_says_so(
    tmp_path: Path, lost: str, status: int, texts: list[str]
) -> None:
    folder = tmp_path / lost
    folder.mkdir()
    statuses = toy.run_ranks(RANK, "lose", folder)
    assert statuses.pop(int(lost[-1])) == status and statuses == [0]
    assert all(text in (folder / "error").read_text() for text in texts)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group_the_call_says_what_to_do() -> None:
    lamb = Lamb(toy.model().parameters())
    with pytest.raises(RuntimeError, match="init_process_group"):
        host_optimizer(None, lamb, target_batch_size=10)


@pytest.mark.usefixtures("one_rank")
def test_with_a_swarm_at_the_wrong_rank_the_call_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="give it the swarm"):
        host_optimizer(None, Lamb(toy.model().parameters()), target_batch_size=10)


def put_beside(monkeypatch: pytest.MonkeyPatch, places_of_own: Callable[[Places], list[Places]]) -> list[str]:
    """Let a rank see these devices and sizes of all ranks; returns the backends of the groups that it makes."""

    def gather(ranks: list[Places], own: Places, group: object) -> None:
        ranks[:] = places_of_own(own)

    def group_of(*, backend: str, timeout: timedelta) -> None:
        backends.append(backend)

    backends: list[str] = []
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "new_group", group_of)
    return backends


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("devices", "has_nccl", "backends"),
    [
        (["cuda", "cuda"], True, ["gloo", "nccl"]),
        (["cuda", "cuda"], False, ["gloo"]),
        (["cuda", "cpu"], True, ["gloo"]),
        (["cpu", "cpu"], True, ["gloo"]),
    ],
)
def test_sums_go_by_nccl_where_all_ranks_have_theirs_on_gpus(
    devices: list[str], has_nccl: bool, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        seen = put_beside(monkeypatch, lambda own: [[(place, size) for _, size in own] for place in devices])
        optimizer = host_optimizer(swarm, Lamb(net.parameters(), lr=0.01), target_batch_size=toy.BATCH)
        assert seen == backends
        for step in range(2):
            optimizer.step(lambda step=step: backward(net, step), samples=toy.BATCH)
        return toy.parameters_of(net)

    def backward(net: torch.nn.Module, step: int) -> torch.Tensor:
        loss = toy.loss_of(net, step)
        loss.backward()
        return loss

    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    torch.testing.assert_close(toy.alone(train), toy.joint_reference(2))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("size", [1, 177, 179])
def test_ranks_with_unequal_models_are_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put_beside(monkeypatch, lambda own: [own, [("cpu", size), own[1]]])
    with pytest.raises(ValueError, match="give all ranks equal models"):
        toy.alone(lambda swarm: host_optimizer(swarm, Lamb(toy.model().parameters()), target_batch_size=10))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "refused", [{"samples": 0}, {"samples": toy.BATCH}, {"samples": 3, "weight": 2.0}], ids=str
)
def test_a_gradient_after_an_error_of_the_lead_counts_whole(refused: dict[str, float]) -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        lamb = Lamb(net.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(lamb)
        optimizer = host_optimizer(
            swarm, lamb, target_batch_size=toy.BATCH, scheduler=plateau, weight_unit="rows"
        )
        toy.loss_of(net, 0).backward()
        # No rank has samples, or none a loss.
        with pytest.raises(ValueError, match=r"samples=0|goes by the swarm's loss"):
            optimizer.step(**{"weight": 1.0, **refused})
        for step in range(2):
            loss = toy.loss_of(net, step)
            loss.backward()
            optimizer.step(samples=toy.BATCH, weight=1.0, loss=loss)
        return toy.parameters_of(net)

    torch.testing.assert_close(toy.alone(train), toy.joint_reference(2))


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_that_no_rank_uses_stays() -> None:
    def train(swarm: Swarm) -> None:
        net = toy.model()
        inner = AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        optimizer = host_optimizer(swarm, inner, target_batch_size=toy.BATCH)
        before = net[2].weight.detach().clone()
        toy.loss_of(net, 0).backward()
        net[2].weight.grad = None
        optimizer.step(samples=toy.BATCH)
        assert optimizer.global_step == 1 and torch.equal(net[2].weight, before)
        assert not torch.equal(net[0].weight, toy.model()[0].weight)

    toy.alone(train)


@pytest.mark.usefixtures("one_rank")
def test_the_modes_of_a_schedule_free_optimizer_reach_it_through_the_lead() -> None:
    def train(swarm: Swarm) -> list[str]:
        modes: list[str] = []
        inner = SGD(toy.model().parameters(), lr=0.1)
        optimizer = host_optimizer(swarm, inner, target_batch_size=toy.BATCH)
        with pytest.raises(AttributeError, match="not schedule-free"):
            optimizer.eval()
        inner.train = lambda: modes.append("train")
        inner.eval = lambda: modes.append("eval")
        optimizer.eval()
        optimizer.train()
        return modes

    assert toy.alone(train) == ["eval", "train"]


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
