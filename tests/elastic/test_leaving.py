"""A member that leaves on another thread, as at the end of a session, does not hang in its step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import colab_swarm as cs
from colab_swarm.elastic.schedulers import Synchronous
from tests.elastic.group import join_group, rows_of
from tests.training.toy import loss_of, model


@pytest.mark.slow
def test_a_waiting_step_ends_when_its_member_leaves() -> None:
    with cs.create("elastic") as alice, cs.join(alice.invite(), peer_name="bob") as bob:
        with ThreadPoolExecutor(2) as pool:
            nets = model(), model()
            joining = [
                pool.submit(join_group, swarm, net, 2, scheduler=Synchronous())
                for swarm, net in zip((alice, bob), nets, strict=True)
            ]
            optimizer = joining[0].result(30)
            joining[1].result(30)
        loss_of(nets[0], 0, rows_of(0, 2)).backward()
        leaving = threading.Timer(0.3, optimizer.close)
        leaving.start()
        with pytest.raises(RuntimeError, match="left its group"):
            optimizer.step()  # bob's gradient never comes
        leaving.join()
