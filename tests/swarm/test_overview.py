"""What panels are told of a peer: by a run in simulation."""

import threading

import msgspec
import pytest

import colab_swarm as cs
from colab_swarm.events import BatchDropped, Bottleneck, PeerLeft, RoundFinished, StepFinished, Waited
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.swarm.overview import Background
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import wait
from tests.training.toy import join_training, loss_of, model, train_freely

ALICE, BOB, EVE = "a11ce000" * 8, "b0b00000" * 8, "e5e00000" * 8


@pytest.mark.slow
def test_a_trainer_sees_links_speeds_its_share_and_the_last_rounds() -> None:
    def train(swarm: Swarm) -> SwarmSnapshot:
        train_freely(swarm, 6, target_batch_size=12)
        return swarm.snapshot()

    with cs.simulate(peers=3, network="lan") as simulation:
        shown = simulation.run(train)["alice"]
    assert len(shown.peers) == 3
    for row in (row for row in shown.peers if not row.me):
        assert row.rtt_s is not None and 0 < row.rtt_s < 0.1 and row.connected == "direct"
    assert 0 < shown.own_samples_per_s < shown.samples_per_s
    assert shown.eta_s is not None and 0 <= shown.eta_s < 5
    assert shown.last_share is not None and 0.1 < shown.last_share < 0.9
    assert [one.step for one in shown.rounds] == [0, 1, 2, 3, 4, 5]
    assert all(len(one.members) == one.group_size for one in shown.rounds)
    assert not shown.paused
    counted = sum(one.samples for one in shown.rounds)  # at once, before any tally is read
    assert [row.me for row in shown.leaderboard].count(True) == 1
    assert sum(row.samples for row in shown.leaderboard) == counted > 0


def test_a_peer_that_computes_nothing_is_no_trainer() -> None:
    with cs.simulate(peers=1, network="lan") as simulation:
        swarm = simulation.swarms["alice"]
        view = join_training(swarm, model()).rounds.view
        view.own = msgspec.structs.replace(view.own, samples_per_s=5.0)
        assert [(row.role, row.compute_samples_per_s) for row in swarm.snapshot().peers] == [("trainer", 5.0)]
        view.own = msgspec.structs.replace(view.own, paused=True)
        assert [(row.role, row.compute_samples_per_s) for row in swarm.snapshot().peers] == [("paused", 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["crash", "partition"])
def test_a_missing_peer_is_named_in_the_log_within_five_seconds(fault: str) -> None:
    logs: list[str] = []

    def until_bob_is_missed(swarm: Swarm) -> None:
        net = model()
        optimizer = join_training(swarm, net, target_batch_size=12)
        while not logs:
            loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=2)
            logs.extend(line for line in swarm.snapshot().log if line.startswith("bob is gone: "))

    with cs.simulate(peers=3, network="lan") as simulation:
        names = {"crash": ("bob",), "partition": ({"bob"}, {"alice", "carol"})}[fault]
        getattr(simulation.network.at(4.0), fault)(*names)
        simulation.run(until_bob_is_missed, seconds=60.0)
        assert [fired.name for fired in simulation.network.fired] == [fault] and logs
        events = [swarm.events.recent() for swarm in simulation.swarms.values()]
        news = [one.at for log in events for one in log if isinstance(one, PeerLeft | Waited)]
        assert 4.0 <= min(news) < 4.0 + 5.0


@pytest.mark.slow
def test_a_reducer_sees_the_trainers() -> None:
    with cs.create("test-run", peer_name="alice") as alice:
        alice.reduce()
        with cs.join(alice.invite(), peer_name="bob", options=cs.NetworkOptions(lan=False)) as bob:
            net = model()
            optimizer = join_training(bob, net, target_batch_size=4)

            def roles() -> dict[str, str]:
                loss_of(net, optimizer.global_step).backward()
                optimizer.step(samples=1)
                rows = alice.snapshot().peers
                return {row.name: row.role for row in rows if row.step or row.role != "trainer"}

            wait(lambda: roles() == {"alice": "assistant", "bob": "trainer"}, timeout_s=30.0)


def test_slow_readings_run_in_the_background_and_a_failure_keeps_the_last() -> None:
    go_on, readings = threading.Semaphore(0), iter([1, 2])

    def read() -> int:
        go_on.acquire()
        return next(readings)

    def finish() -> None:
        go_on.release()
        background._thread.join(10)

    background = Background(read, every_s=30.0)
    assert background.look(0.0) is None and background.look(31.0) is None  # the first one still reads
    finish()
    assert background.look(1.0) == 1
    background.look(40.0)
    finish()
    assert background.look(41.0) == 2
    background.look(80.0)
    finish()  # nothing left to read: it fails
    assert background.look(81.0) == 2


def test_the_log_tells_each_bottleneck_and_each_loss_of_a_peer_once() -> None:
    with cs.simulate(peers=1) as simulation:
        alice = simulation.swarms["alice"]

        def finish(step: int, bottleneck: Bottleneck, explanation: str) -> None:
            facts = {"explanation": explanation, "bottleneck": bottleneck}
            alice.events.emit(RoundFinished(5.0, step, 1, (), 0.0, 0, 0, 0, 0, 1.0, **facts))

        alice.events.emit(Waited(simulation.time, BOB, "its mean", 3.0))
        assert alice.snapshot().silent == "peer-b0b00000, for 3 s"
        for step, rate in enumerate(("18.8", "19.1", "12 to 14")):
            finish(step, "download", f"the downloads are slow ({rate} Mbit/s)")
        finish(3, "upload and download", "all transfers are slow")
        finish(4, "download", "the downloads are slow (20 Mbit/s)")
        finish(5, "none", "nobody is slow")
        finish(6, "", "a peer alone needs no averaging")
        assert alice.snapshot().silent == "", "the round has ended"
        for event in (
            PeerLeft(5.0, BOB, "it left"),
            PeerLeft(5.1, BOB, "its link broke"),  # another service says so too
            BatchDropped(5.0, "nan"),
            PeerLeft(60.0, BOB, "it left"),
        ):
            alice.events.emit(event)
        for step in range(50):
            alice.events.emit(StepFinished(61.0 + step, step, 12.0, 1.0))
        assert alice.snapshot().log[-6:] == (
            "round 0: the downloads are slow (18.8 Mbit/s)",
            "round 3: all transfers are slow",
            "round 5: nobody is slow",
            "b0b00000 is gone: it left",
            "batch dropped: nan",
            "b0b00000 is gone: it left",
        )
        assert len(alice.snapshot().loss_history) == 50, "which pushed nothing out"


def test_a_name_that_is_another_peers_id_does_not_rename_that_peer() -> None:
    with cs.simulate(peers=1) as simulation:
        alice = simulation.swarms["alice"]
        overview = alice._overview
        overview._names = {EVE[:8]: BOB[:8], BOB[:8]: "bob", "c0ffee00": "carol"}
        for at, peer in enumerate((EVE, BOB, ALICE)):
            alice.events.emit(PeerLeft(float(at), peer, "it left (c0ffee00)"))
        assert list(alice.snapshot().log) == [
            "b0b00000 is gone: it left (carol)",  # eve's name, and no one else's
            "bob is gone: it left (carol)",
            "a11ce000 is gone: it left (carol)",
        ]
