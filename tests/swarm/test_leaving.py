"""Leaving: at the end of the process, interrupted, paused, and from two sides at once."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.dht.records import FindNear
from colab_swarm.events import Fault, RoundFinished
from colab_swarm.notebook.platforms import SessionClock
from colab_swarm.runtime import LOOK_S, PauseGate, loop_now
from colab_swarm.swarm.saved import PeerStore
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training import trainer as trainer_module
from colab_swarm.trust.authority import IssuedMembership, ShareRevoked
from colab_swarm.trust.contributions import Contributions
from tests.swarm import leave_in, network_of
from tests.swarm.test_swarm import interrupt_after
from tests.training.toy import join_training, loss_of, model, train_freely


@pytest.mark.slow
def test_a_script_that_ends_leaves_its_folder_and_says_farewell(tmp_path: Path) -> None:
    with cs.create("test-run") as alice:
        script = f"import colab_swarm as cs; cs.join({str(alice.invite())!r}, state_dir={str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
        assert not alice.services.peers.linked()
    assert (tmp_path / "peer.json").exists() and not (tmp_path / "in-use.json").exists()


def test_an_interrupt_while_leaving_leaves_the_folder_free_and_no_link_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = cs.create("test-run", state_dir=tmp_path)
    drive_is_back, asked, moment = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        asked.set()
        drive_is_back.wait()

    with monkeypatch.context() as slow_drive:
        slow_drive.setattr(PeerStore, "write", hang)
        with pytest.raises(KeyboardInterrupt), interrupt_after(0.1):
            alice.leave()
    assert asked.is_set()
    drive_is_back.set()
    alice.leave()
    while (tmp_path / "in-use.json").exists():
        moment.wait(0.01)
    with cs.join(state_dir=tmp_path) as again:
        assert again.id == alice.id and again is not alice


def test_a_cell_that_waits_for_the_others_ends_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_LOOK_S", 0.1)
    with cs.create("test-run") as alice:
        optimizer = join_training(alice, model())
        leave_in(alice, 2.0)
        with pytest.raises(RuntimeError, match="before its session ends"):
            optimizer.wait_step(timeout_s=20.0)


def fail() -> None:
    raise ZeroDivisionError("a bug")


def test_a_stop_that_fails_at_the_sessions_end_skips_neither_the_others_nor_leaving() -> None:
    alice, stopped = cs.create("test-run"), threading.Event()
    network = network_of(alice)
    network.stops += [fail, stopped.set]
    network.end_session(SessionClock("Binder", alice.runtime.time(), 2.0, 1.9), {}, alice.leave)
    assert stopped.is_set() and alice.left
    faults = [(fault.where, fault.text) for fault in alice.events.recent(Fault)]
    assert faults == [("leaving at the session's end", "ZeroDivisionError: a bug")]


def test_a_part_that_fails_leaves_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_to_share(*_: object) -> None:
        fail()

    alice = cs.create("test-run", state_dir=tmp_path)
    node = network_of(alice).node
    second, first = join_training(alice, model(), name="second"), join_training(alice, net := model())
    loss_of(net, 0).backward()
    first.step(samples=1)
    monkeypatch.setattr(first._trainer, "wait_step", lambda timeout_s: fail())
    monkeypatch.setattr(Contributions, "share_with_all", fail_to_share)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        alice.leave(hand_over_s=1.0)
    assert first.hooks.closed.is_set() and second.hooks.closed.is_set()
    assert len([*tmp_path.glob("checkpoints/*/step-*")]) == 2
    assert alice.left and not (tmp_path / "in-use.json").exists()
    stop_serving = {FindNear.__name__, ShareRevoked.__name__, IssuedMembership.__name__}
    assert node._closing is not None and not stop_serving & set(node.services[0]._by_name)
    alice.leave()


def test_two_who_leave_at_once_both_return_when_it_is_done(tmp_path: Path) -> None:
    for _ in range(3):
        alice = cs.create("test-run", state_dir=tmp_path)
        optimizer = join_training(alice, model())
        with ThreadPoolExecutor(4) as threads:
            for leaving in [threads.submit(alice.leave) for _ in range(4)]:
                leaving.result(20.0)
                assert not (tmp_path / "in-use.json").exists()
        assert optimizer.hooks.closed.is_set()


def test_blocks_nest_end_by_an_exception_too_and_a_hold_outlasts_them() -> None:
    gate = PauseGate()
    elsewhere: list[bool] = []
    with pytest.raises(KeyError), gate.block():
        gate.hold()
        with gate.block():
            assert gate.closed and gate.closed_by_this_thread
        assert gate.closed_by_this_thread
        thread = threading.Thread(target=lambda: elsewhere.append(gate.closed_by_this_thread))
        thread.start()
        thread.join()
        raise KeyError
    assert gate.closed and not gate.closed_by_this_thread and elsewhere == [False]
    gate.release()
    assert not gate.closed and repr(gate) == "PauseGate(open)"


async def test_a_waiting_task_continues_soon_after_the_gate_opens() -> None:
    gate = PauseGate()
    gate.hold()
    asyncio.get_running_loop().call_later(5.0, gate.release)
    await gate.wait_open()
    assert 5.0 <= loop_now() <= 5.0 + 2 * LOOK_S


def pause_after_five_steps(swarm: Swarm, pause_s: float) -> tuple[int, int]:
    optimizer = join_training(swarm, net := model())

    def train_to(step: int) -> None:
        while optimizer.global_step < step:
            loss_of(net, optimizer.global_step, slice(0, 2)).backward()
            optimizer.step(samples=2)

    train_to(5)
    before = optimizer.global_step
    with swarm.paused():
        with pytest.raises(RuntimeError, match="outside of it"):
            optimizer.step(samples=2)
        swarm.runtime.call(asyncio.sleep(pause_s))
    train_to(before + 1)
    return before, optimizer.global_step


def test_other_peers_continue_without_a_paused_peer_and_it_catches_up() -> None:
    with cs.simulate(3, network="lan", seed=1, samples_per_s=10.0) as simulation:
        first, *others = simulation.swarms

        def train(swarm: Swarm) -> object:
            return pause_after_five_steps(swarm, 6.0) if swarm.name == first else train_freely(swarm, 20)

        results = simulation.run(train)
        rounds = simulation.swarms[others[0]].events.recent(RoundFinished)
    without = [one.seconds for one in rounds if len(one.contributors) == 2]
    assert len(without) > 8 and max(without[:8]) < 0.5  # nobody waited for the paused one to come
    before, after = results[first]
    assert after - before > 6  # 6 s of two others at 10 samples/s make 12 steps of 10 samples
    assert len({results[other][1] for other in others}) == 1


def test_a_late_joiner_gets_its_state_from_a_paused_swarm() -> None:
    with cs.simulate(2, network="lan", seed=1, samples_per_s=10.0) as simulation:
        alice, bob = simulation.swarms

        def train(swarm: Swarm) -> int:
            if swarm.name == alice:
                return pause_after_five_steps(swarm, 30.0)[0]
            swarm.runtime.call(asyncio.sleep(15.0))
            return join_training(swarm, model(seed=1)).global_step

        assert simulation.run(train)[bob] >= 5


def test_a_training_cell_waits_while_the_button_is_pressed_and_ends_when_its_peer_leaves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    swarm = cs.create("test-run")
    optimizer = join_training(swarm, net := model())

    def step_while(swarm_does: Callable[[], None]) -> object:
        loss_of(net, 0).backward()
        swarm.pause()
        timer = threading.Timer(0.1, swarm_does)
        timer.start()
        try:
            return optimizer.step(samples=10)
        finally:
            timer.join()

    assert step_while(swarm.unpause) is not None
    assert capsys.readouterr().out.count("This peer is paused") == 1
    assert not optimizer.rounds.view.own.paused
    with pytest.raises(RuntimeError, match="has left its swarm"):
        step_while(swarm.leave)


def test_leaving_inside_a_block_is_fine() -> None:
    swarm = cs.create("test-run")
    optimizer = join_training(swarm, net := model())
    loss_of(net, 0).backward()
    optimizer.step(samples=1)
    with swarm.paused():
        swarm.leave(hand_over_s=60.0)
    assert swarm.left
