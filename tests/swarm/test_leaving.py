"""Leaving: at the end of the process, interrupted, paused, and from two sides at once."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.dht.records import FindNear
from colab_swarm.events import Fault
from colab_swarm.notebook.platforms import SessionClock
from colab_swarm.swarm.saved import PeerStore
from colab_swarm.training import trainer as trainer_module
from colab_swarm.trust.authority import IssuedMembership, ShareRevoked
from colab_swarm.trust.contributions import Contributions
from tests.swarm import leave_in, network_of
from tests.swarm.test_swarm import interrupt_after
from tests.training.toy import join_training, loss_of, model


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


def test_a_paused_cell_ends_when_its_peer_leaves() -> None:
    alice = cs.create("test-run")
    optimizer = join_training(alice, net := model())
    alice.pause()
    leaving = threading.Timer(0.1, alice.leave)
    leaving.start()
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match="has left its swarm"):
        optimizer.step(samples=10)
    leaving.join()


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
    alice = cs.create("test-run", state_dir=tmp_path)
    second, first = join_training(alice, model(), name="second"), join_training(alice, net := model())
    loss_of(net, 0).backward()
    first.step(samples=1)
    monkeypatch.setattr(first._trainer, "wait_step", lambda timeout_s: fail())
    with pytest.raises(ZeroDivisionError, match="a bug"):
        alice.leave(hand_over_s=1.0)
    assert first.hooks.closed.is_set() and second.hooks.closed.is_set()
    assert len([*tmp_path.glob("checkpoints/*/step-*")]) == 2
    assert alice.left and not (tmp_path / "in-use.json").exists()
    assert alice.network is not None and alice.network.node._closing is not None
    alice.leave()


def test_a_service_that_cannot_be_stopped_leaves_no_other_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_to_share(*_: object) -> None:
        fail()

    alice = cs.create("test-run")
    assert alice.network is not None
    monkeypatch.setattr(Contributions, "share_with_all", fail_to_share)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        alice.leave()
    stop_serving = {FindNear.__name__, ShareRevoked.__name__, IssuedMembership.__name__}
    assert alice.network.node._closing is not None
    assert not stop_serving & set(alice.network.node.services[0]._by_name)


def test_two_who_leave_at_once_both_return_when_it_is_done(tmp_path: Path) -> None:
    for _ in range(3):
        alice = cs.create("test-run", state_dir=tmp_path)
        optimizer = join_training(alice, model())
        with ThreadPoolExecutor(4) as threads:
            for leaving in [threads.submit(alice.leave) for _ in range(4)]:
                leaving.result(20.0)
                assert not (tmp_path / "in-use.json").exists()
        assert optimizer.hooks.closed.is_set()
