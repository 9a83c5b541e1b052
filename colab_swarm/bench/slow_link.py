"""Two network namespaces and a slow link between them, for kernels without netem.

    python -m colab_swarm.bench.slow_link NAMESPACE NAMESPACE DELAY_S JITTER_S

gives each namespace a TUN device and passes packets between the two in order. Packets are large, so
that the program forwards about 1 GB/s. It needs root, iproute2 and setpriv.
"""

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "slow"
PREFIX = "swarmbench"
MTU = 65_000
_TUNSETIFF, _IFF_TUN_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1001, 0x40000000


def missing() -> str | None:
    """Return the reason why no slow link is possible here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    if absent := [tool for tool in ("ip", "setpriv") if shutil.which(tool) is None]:
        return f"needs {' and '.join(absent)}: apt-get install iproute2 util-linux"
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "needs /dev/net/tun"


@contextmanager
def slow_link(*, delay_s: float, jitter_s: float) -> Iterator[Callable[..., list[object]]]:
    """Make two namespaces, 0 and 1; the delay is that of a packet, one way.

    ``command(side, *words)`` is the command to run ``words`` in a namespace; it ends with this thread.
    """
    names, program = [f"{PREFIX}-{os.getpid()}-{side}" for side in range(2)], None

    def command(side: int, *words: object) -> list[object]:
        return ["ip", "netns", "exec", names[side], "setpriv", "--pdeathsig", "KILL", *words]

    try:
        for name in names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        words = ["nice", "-n", "-10", sys.executable, "-m", __name__, *names, str(delay_s), str(jitter_s)]
        program = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        if program.stdout.readline() != "ready\n":
            raise RuntimeError("the slow link did not start: see its error above")
        yield command
    finally:
        if program is not None:
            program.kill()
            program.communicate()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], capture_output=True, check=True)


def open_device(name: str, address: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN_NO_PI))
        _ip(f"addr add {address}/24 dev {DEVICE}")
        _ip(f"link set {DEVICE} mtu {MTU} txqueuelen 10000 up")
    finally:
        libc.setns(here, _CLONE_NEWNET)
    return device


def forward(devices: Sequence[int], *, delay_s: float, jitter_s: float) -> None:
    ways: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # from each side to the other
    while True:
        due = min((way[0][0] for way in ways if way), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(devices, [], [], wait_s)
        for device in readable:
            side = devices.index(device)
            packet = os.read(device, MTU)
            at = time.monotonic() + random.uniform(delay_s - jitter_s, delay_s + jitter_s)
            ways[side].append((max(at, ways[side][-1][0]) if ways[side] else at, packet))
        now = time.monotonic()
        for side, way in enumerate(ways):
            while way and way[0][0] <= now:
                with suppress(BlockingIOError):  # a full queue drops
                    os.write(devices[1 - side], way.popleft()[1])


if __name__ == "__main__":
    opened = [open_device(name, address) for name, address in zip(sys.argv[1:3], ADDRESSES, strict=True)]
    print("ready", flush=True)
    forward(opened, delay_s=float(sys.argv[3]), jitter_s=float(sys.argv[4]))
