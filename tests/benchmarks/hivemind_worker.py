"""One hivemind peer of ``bench averaging --vs hivemind``. A Python with hivemind runs it, without this package.

``python hivemind_worker.py NUMEL PEERS [INITIAL_PEER]`` answers JSON lines by JSON lines. It is
configured for speed: one group of all, matchmaking as short as its request timeout allows.
"""

# mypy: ignore-errors
import json
import sys
import time

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression


def main(numel, peers, initial_peers):
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DecentralizedAverager(
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
    print(json.dumps({"contact": str(dht.get_visible_maddrs()[0])}), flush=True)
    for line in sys.stdin:
        with averager.get_tensors() as tensors:
            tensors[0].fill_(json.loads(line)["value"])
        print("{}", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        averager.step(timeout=60.0, allow_retries=True)
        found = {"seconds": time.perf_counter() - began}
        with averager.get_tensors() as tensors:
            found |= {"low": float(tensors[0].min()), "high": float(tensors[0].max())}
        print(json.dumps(found), flush=True)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
