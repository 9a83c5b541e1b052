"""Rounds in a bucket: how long they take beyond the last member, and how many requests.

`PEERS` peers of one process contribute a megabyte each, to a folder and, if moto is installed, to its S3 server.
"""

import os
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest.mock import patch

import torch

import colab_swarm as cs
from colab_swarm.experiments.report import Report, reports
from colab_swarm.mailbox.bucket_rounds import BucketRounds
from colab_swarm.swarm.swarm import Swarm

PEERS = 4
NUMEL = 250_000
COMPUTES_S = 0.02  # a micro-batch


@contextmanager
def local_s3() -> Iterator[str]:
    """The address of a bucket at a server of this process; raises ImportError without moto."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    try:
        with patch.dict(os.environ, keys):
            yield f"s3://bucket/run?endpoint={url}&region=us-east-1"
    finally:
        server.stop()


def rounds(address: str, count: int) -> tuple[list[float], float]:
    """Return the seconds of each round from the last member's contribution to the last mean, and requests a peer."""
    begun = defaultdict[int, list[float]](list)
    ended = defaultdict[int, list[float]](list)
    requests = list[float]()

    def train(swarm: Swarm) -> None:
        net = torch.nn.Linear(NUMEL // 8, 8, bias=False)
        sgd = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = swarm.optimizer(
            sgd, target_batch_size=PEERS, communication=cs.Communication(local_steps=4)
        )
        while optimizer.global_step < count:
            time.sleep(COMPUTES_S)
            net.weight.grad = torch.randn_like(net.weight)
            began = time.monotonic()
            if (result := optimizer.step(samples=1)) is not None and len(result.contributors) == PEERS:
                begun[optimizer.global_step].append(began)
                ended[optimizer.global_step].append(time.monotonic())
        part = optimizer.rounds
        assert isinstance(part, BucketRounds)
        requests.append(part._journal.bucket.requests / count)

    with ExitStack() as stack:
        swarms = [stack.enter_context(cs.create("bench-mailbox", mailbox=address, peer_name="peer-0"))]
        invitation = str(swarms[0].invite())
        for number in range(1, PEERS):
            swarm = cs.join(invitation, mailbox=address, peer_name=f"peer-{number}")
            swarms.append(stack.enter_context(swarm))
        threads = [threading.Thread(target=train, args=(swarm,)) for swarm in swarms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    whole = [step for step, ends in ended.items() if len(ends) == PEERS]
    return [max(ended[step]) - max(begun[step]) for step in whole], max(requests)


@reports("mailbox")
def run(report: Report) -> None:
    count = 6 if report.quick else 20
    with ExitStack() as stack:
        places = {"folder": f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/box"}
        with suppress(ImportError):  # it is for development only
            places["s3"] = stack.enter_context(local_s3())
        for name, address in places.items():
            beyond, requests = rounds(address, count)
            report.add(f"{name}_beyond_s", max(beyond), "s", f"of {len(beyond)} rounds; <= 1 wanted")
            report.add(f"{name}_requests", requests, "a round", "of a peer; <= 20 wanted")
