"""Elastic groups over real links: a user who interrupts, and a member that leaves."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic.schedulers import Synchronous
from tests.elastic.group import join_group, reference, rows_of, take
from tests.training.toy import loss_of, model, parameters_of

pytestmark = pytest.mark.slow
OPTIONS = cs.NetworkOptions(lan=False, use_relays=False)


def test_an_interrupted_step_can_be_repeated_and_a_waiting_one_ends_when_its_member_leaves() -> None:
    interrupted, parted = threading.Event(), threading.Event()

    def follow(invite: str) -> torch.Tensor:
        with cs.join(invite, peer_name="bob", options=OPTIONS) as bob:
            net = model(seed=1)
            optimizer = join_group(bob, net, 2, scheduler=Synchronous())
            for step in range(3):
                if step == 1:
                    interrupted.wait(30)
                take(optimizer, net, step)
            parted.wait(30)
            optimizer.close()
            return parameters_of(net)

    with cs.create("elastic", peer_name="alice", options=OPTIONS) as alice, ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, str(alice.invite()))
        net = model(seed=1)
        optimizer = join_group(alice, net, 2, scheduler=Synchronous())
        for step in range(3):
            loss_of(net, step, rows_of(optimizer.member, 2)).backward()
            if step == 1:
                threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                interrupted.set()
                with pytest.raises(RuntimeError, match="already being sent"):
                    loss_of(net, step).backward()
            assert optimizer.step().step == step
        loss_of(net, 3, rows_of(optimizer.member, 2)).backward()
        threading.Timer(0.3, optimizer.close).start()
        with pytest.raises(RuntimeError, match="left its group"):
            optimizer.step()  # bob's gradient never comes
        parted.set()
        torch.testing.assert_close(following.result(30), parameters_of(net), rtol=0, atol=0)
    torch.testing.assert_close(parameters_of(net), reference(3, seed=1), rtol=0, atol=1e-5)
