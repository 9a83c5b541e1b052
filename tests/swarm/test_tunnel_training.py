"""Training through a tunnel whose agent is killed again and again."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.events import Event, Notice, RoundFinished
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.swarm.swarm import Swarm
from tests.net.test_tunnels import agent_of, needs_posix, ngrok, running
from tests.net.test_tunnels import folder as folder
from tests.swarm import wait
from tests.training.toy import join_training, loss_of, model, wait_for_peers

pytestmark = needs_posix
DIALS_OUT = cs.NetworkOptions(listen=False, use_relays=False, lan=False)
KILLS = 3
BATCH_S = 0.05
"""What a batch takes; the toy model alone would make a hundred steps while one record travels."""


def _is_loss(event: object) -> bool:
    return isinstance(event, Notice) and event.text.startswith("tunnel lost")


def _is_round(event: object) -> bool:
    return isinstance(event, RoundFinished) and event.group_size == 2


@pytest.mark.slow
def test_training_continues_when_the_tunnels_agent_is_killed_three_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnelled = cs.NetworkOptions(
        identity=folder / "alice", tunnel=ngrok(folder), use_relays=False, lan=False
    )
    listening, hidden = Node.listening, set[bytes]()
    monkeypatch.setattr(Node, "listening", lambda node: () if node.id in hidden else listening(node))
    hidden.add(Identity.load_or_create(folder / "alice").id)  # nobody can dial her but through the tunnel
    stop = threading.Event()

    def train(swarm: Swarm) -> None:
        net = model()
        optimizer = join_training(swarm, net)
        wait_for_peers(swarm, optimizer, 2)
        while not stop.wait(BATCH_S):
            loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=5)

    with cs.create("tunnels", peer_name="carol", options=cs.NetworkOptions(lan=False)) as carol:
        invite = carol.invite()
        with (
            cs.join(invite, peer_name="alice", options=tunnelled) as alice,
            cs.join(invite, peer_name="bob", options=DIALS_OUT) as bob,
            ThreadPoolExecutor(2) as pool,
        ):
            levels = alice.reachability.level, bob.reachability.level
            assert levels == (ReachabilityLevel.TUNNEL, ReachabilityLevel.OUTGOING)
            rounds, lost = list[Event](), list[Event]()
            bob.events.listen(lambda event: rounds.append(event) if _is_round(event) else None)
            alice.events.listen(lambda event: lost.append(event) if _is_loss(event) else None)

            def three_more(goal: int) -> None:
                wait(lambda: len(rounds) >= goal, timeout_s=60)

            trainers = [pool.submit(train, swarm) for swarm in (alice, bob)]
            try:
                for kill in range(KILLS):
                    three_more(len(rounds) + 3)
                    address = alice.services.peers.contact.addresses
                    os.kill(agent_of(folder), signal.SIGKILL)
                    wait(lambda: alice.id not in bob.services.peers.linked(), timeout_s=10)
                    wait(lambda: alice.id in bob.services.peers.linked(), timeout_s=10)
                    assert alice.services.peers.contact.addresses != address, kill
                    assert alice.reachability.level is ReachabilityLevel.TUNNEL, kill
                three_more(len(rounds) + 3)
            finally:
                stop.set()
            for trainer in trainers:
                trainer.result(60)
            assert len(lost) == KILLS
    assert running(folder) == []
