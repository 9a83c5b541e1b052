"""One hivemind peer of ``bench averaging --vs hivemind``. A Python with hivemind runs it, without this package.

``python hivemind_worker.py NUMEL PEERS [INITIAL_PEER]`` answers JSON lines by JSON lines. It is
configured for speed: one group of all, matchmaking as short as its request timeout allows.
"""

# mypy: ignore-errors
import json
import multiprocessing as mp
import sys
import time

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression


class TimedAverager(DecentralizedAverager):
    def __init__(self, *args, **settings):
        self.reduced_s = mp.Value("d", 0.0)
        super().__init__(*args, **settings)

    async def _run_allreduce_inplace_(self, *args, **settings):
        began = time.perf_counter()
        try:
            return await super()._run_allreduce_inplace_(*args, **settings)
        finally:
            self.reduced_s.value = time.perf_counter() - began


def say(**message):
    print(json.dumps(message), flush=True)


def main(numel, peers, initial_peers):
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = TimedAverager(
        [torch.zeros(numel)],
        dht,
        start=True,
        prefix="bench",
        target_group_size=peers,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=Float16Compression(),
        initial_group_bits="",
    )
    say(contact=str(dht.get_visible_maddrs()[0]))
    for line in sys.stdin:
        value = json.loads(line)["value"]
        with averager.get_tensors() as tensors:
            tensors[0].fill_(value)
        say(ready=True)
        sys.stdin.readline()
        began = time.perf_counter()
        group = averager.step(timeout=60.0, allow_retries=True)
        seconds = time.perf_counter() - began
        with averager.get_tensors() as tensors:
            low, high = float(tensors[0].min()), float(tensors[0].max())
        say(seconds=seconds, reduced_s=averager.reduced_s.value, members=len(group or ()), low=low, high=high)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
