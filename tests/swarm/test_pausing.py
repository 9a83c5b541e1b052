"""Pausing: background work stands still, nobody waits for this peer, and afterwards it catches up."""

import asyncio
import threading

import pytest

import colab_swarm as cs
from colab_swarm.events import RoundFinished
from colab_swarm.runtime import LOOK_S, PauseGate, loop_now
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model, train_freely


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


def test_a_training_cell_waits_while_the_button_is_pressed(capsys: pytest.CaptureFixture[str]) -> None:
    with cs.create("test-run") as swarm:
        optimizer = join_training(swarm, net := model())
        swarm.pause()
        loss_of(net, 0).backward()
        timer = threading.Timer(0.1, swarm.unpause)
        timer.start()
        assert optimizer.step(samples=10) is not None
        timer.join()
        assert capsys.readouterr().out.count("This peer is paused") == 1
        assert not optimizer.rounds.view.own.paused


def test_leaving_inside_a_block_is_fine() -> None:
    swarm = cs.create("test-run")
    optimizer = join_training(swarm, net := model())
    loss_of(net, 0).backward()
    optimizer.step(samples=1)
    with swarm.paused():
        swarm.leave(hand_over_s=60.0)
    assert swarm.left
