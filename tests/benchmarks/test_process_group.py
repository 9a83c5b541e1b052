"""The same schedulers over `torch.distributed`: two gloo processes on loopback."""

import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.elastic_rank import DIES_AT, RANKS, STEPS, sgd
from tests.benchmarks.process_group import HEADER, ProcessGroupExchange, group_optimizer
from tests.elastic.group import reference
from tests.training.toy import model, run_ranks

pytestmark = pytest.mark.slow
RANK = "tests.benchmarks.elastic_rank"


def test_with_beta_1_ranks_equal_ddp_and_one_process_with_the_large_batch(tmp_path: Path) -> None:
    assert run_ranks(RANK, "equal", tmp_path) == [0, 0]
    elastic = [torch.load(tmp_path / f"elastic {rank}") for rank in range(RANKS)]
    assert torch.equal(*elastic)
    torch.testing.assert_close(elastic[0], reference(STEPS), rtol=0, atol=1e-5)
    torch.testing.assert_close(elastic[0], torch.load(tmp_path / "ddp 0"), rtol=0, atol=1e-5)


@pytest.mark.ordeal
def test_the_other_rank_continues_when_one_dies(tmp_path: Path) -> None:
    assert run_ranks(RANK, "die", tmp_path) == [0, -signal.SIGKILL]
    assert (tmp_path / "lost").read_text() == f"{2 * DIES_AT - 1} (1,)"


@pytest.mark.ordeal
def test_different_settings_are_reported_to_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(RANK, "differ", tmp_path) == [0, 0]
    for rank in range(RANKS):
        text = (tmp_path / f"error {rank}").read_text()
        assert "float16" in text and "int8" in text and "give all the same" in text


def test_a_missing_process_group_is_reported_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        group_optimizer(sgd(model()))


@pytest.mark.parametrize("squares", [-1.0, math.nan])
def test_a_rank_with_an_impossible_norm_is_lost(squares: float, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, reported = ProcessGroupExchange.__new__(ProcessGroupExchange), list[Any]()
    loop = SimpleNamespace(call_soon_threadsafe=lambda *call: reported.append(call))
    vars(exchange).update(
        _frame_bytes=HEADER.size, _group=None, _loop=loop, steps=SimpleNamespace(on_piece=None)
    )

    def receive(frame: torch.Tensor, *_: object, **__: object) -> None:
        assert not reported
        HEADER.pack_into(frame.numpy().data, 0, 0, 0, squares, 0.0, 0)

    monkeypatch.setattr(dist, "recv", receive)
    exchange._receive_from(1)
    ((lose, rank, reason),) = reported
    assert (lose, rank) == (exchange.lose, 1) and ">= 0" in reason


def test_an_unknown_option_of_a_group_of_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(TypeError, match="'compresion'"):
        group_optimizer(torch.optim.SGD(model().parameters()), compresion="int8")
