"""A program of the lab: the internet's core, where the kernel has no netem.

    python -m tests.netlab.core '{"NAMESPACE": "ADDRESS", …}' DELAY_S LOSS HOPS

Gives each namespace a TUN device ``wan`` and passes IPv4 packets between them, after ``DELAY_S``, without the share
``LOSS``, and without those that have fewer than ``HOPS`` left. About 45,000 packets a second.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

MTU = 1500
BATCH = 64
_TUNSETIFF, _IFF_TUN_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1001, 0x40000000


def open_wan(space: str, address: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        wan = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(wan, _TUNSETIFF, struct.pack("16sH", b"wan", _IFF_TUN_NO_PI))
        lines = f"addr add {address}/32 dev wan\nlink set wan mtu {MTU} up\nroute add default dev wan\n"
        subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
    finally:
        libc.setns(here, _CLONE_NEWNET)
        os.close(here)
        os.close(there)
    return wan


def forward(wans: dict[bytes, int], *, delay_s: float, loss: float, hops: int) -> None:
    poll = select.epoll()
    for wan in wans.values():
        poll.register(wan, select.EPOLLIN)
    under_way: deque[tuple[float, int, bytes]] = deque()  # all take equally long, so it is in order
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else -1
        for wan, _ in poll.poll(wait_s):
            for packet in read_some(wan):
                target = wans.get(packet[16:20])
                if target is not None and packet[8] > hops and random.random() >= loss:
                    under_way.append((time.monotonic() + delay_s, target, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, target, packet = under_way.popleft()
            try:
                os.write(target, packet)
            except BlockingIOError:
                continue  # a full queue drops


def read_some(wan: int) -> list[bytes]:
    packets: list[bytes] = []
    try:
        while len(packets) < BATCH:
            packets.append(os.read(wan, MTU))
    except BlockingIOError:
        pass
    return packets


def main() -> None:
    addresses, delay_s, loss, hops = json.loads(sys.argv[1]), *sys.argv[2:5]
    wans = {socket.inet_aton(address): open_wan(space, address) for space, address in addresses.items()}
    print(json.dumps({"ready": True}), flush=True)
    forward(wans, delay_s=float(delay_s), loss=float(loss), hops=int(hops))


if __name__ == "__main__":
    main()
