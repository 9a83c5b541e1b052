"""Whose turn an optimizer is: pauses, interrupts, and the end that another thread requested."""

import _weakrefset
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.runtime import POLL_S, uninterrupted
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.records import Mean
from colab_swarm.training.replica import Replica
from tests.training.toy import join_training, joint_reference, loss_of, model, parameters_of, take


@contextmanager
def interrupted_soon() -> Iterator[None]:
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_the_trainer_closes_on_request_and_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_by: list[tuple[float, int]] = []
    close = SwarmOptimizer.close

    def closes(optimizer: SwarmOptimizer, *, hand_over_s: float = 0.0) -> None:
        closed_by.append((hand_over_s, threading.get_ident()))
        close(optimizer)

    with cs.create("test-run") as swarm:
        optimizer = join_training(swarm, net := model())
        monkeypatch.setattr(SwarmOptimizer, "close", closes)
        other = threading.Thread(
            target=optimizer.end, args=("the session ends",), kwargs={"hand_over_s": 9.0}
        )
        other.start()
        other.join()
        loss_of(net, 0).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the session ends"):
                optimizer.step(samples=10)
        # the requested end comes after the step, and once
        assert optimizer.global_step == 1 and closed_by == [(9.0, threading.get_ident())]


def test_closing_waits_for_the_trainers_call_to_end() -> None:
    inside, order = threading.Event(), []
    with cs.create("test-run") as swarm:
        optimizer = join_training(swarm, model())

        def close() -> None:
            inside.wait()
            optimizer.close()
            order.append("closed")

        closer = threading.Thread(target=close)
        closer.start()
        with optimizer._trainer_call():
            inside.set()
            closer.join(0.05)
            order.append("trained")
        closer.join()
    assert order == ["trained", "closed"]


def test_an_interrupt_ends_a_wait_or_a_pause_and_samples_count_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with cs.create("test-run") as swarm:
        optimizer = join_training(swarm, net := model())
        assert take(optimizer, net, 0, slice(0, 4)) is None
        with interrupted_soon(), pytest.raises(KeyboardInterrupt):
            optimizer.wait_step()
        output = capsys.readouterr().out
        assert output.count("Interrupted at step 0") == 1 and "4 samples" in output
        result = take(optimizer, net, 0, slice(4, 10))
        assert result is not None and [member.weight for member in result.group.members] == [10.0]
        swarm.pause()
        loss_of(net, 0).backward()
        with interrupted_soon(), pytest.raises(KeyboardInterrupt):
            optimizer.step(samples=10)
        swarm.unpause()
        assert optimizer.step(samples=10) is not None


def test_an_interrupt_while_the_mean_is_applied_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Replica.apply

    def interrupted(replica: Replica, mean: Mean) -> bytes:
        signal.raise_signal(signal.SIGINT)
        time.sleep(2 * POLL_S)  # the trainer notices meanwhile
        return apply(replica, mean)

    monkeypatch.setattr(Replica, "apply", interrupted)
    with cs.create("test-run") as swarm:
        optimizer = join_training(swarm, net := model())
        for step in range(2):
            loss_of(net, step).backward()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(samples=10)
            assert optimizer.collaboration.progress.known.own.step == optimizer.global_step == step + 1
        torch.testing.assert_close(parameters_of(net), joint_reference(2))


def calls_if_interrupted(line: int) -> tuple[int, bool]:
    """How often `uninterrupted` did its work, and whether it was interrupted, at this line that it ran."""
    calls, lines = 0, 0

    def work() -> None:
        nonlocal calls
        calls += 1

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        # Python prints and drops what a weak reference's callback raises, so an interrupt there reaches nobody.
        if frame.f_code.co_filename == _weakrefset.__file__:
            return None
        lines += event == "line"
        if lines == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        uninterrupted(work)
    except KeyboardInterrupt:
        return calls, True
    finally:
        sys.settrace(before)
    return calls, False


def test_an_interrupt_at_any_line_neither_hangs_nor_repeats_the_work_and_is_raised() -> None:
    handler = signal.getsignal(signal.SIGINT)
    for line in itertools.count(1):
        calls, interrupted = calls_if_interrupted(line)
        assert calls <= 1 and signal.getsignal(signal.SIGINT) is handler
        if not interrupted:
            break
    assert line > 10 and calls == 1
