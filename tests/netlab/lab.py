"""A small internet in network namespaces: public hosts, and sites of hosts behind a router with a NAT.

    pub, pub2 … ── wan ──┐
                         core
    a ── router-a ── wan ┘

Root, iproute2 and iptables are needed. Every namespace is called ``swarmlab-PID-NUMBER-HOST``; the programs in them
die with the test.
"""

import functools
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self

PREFIX = "swarmlab"
ROOT = Path(__file__).parent.parent.parent
_numbers = itertools.count(1)


@functools.cache
def missing() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [tool for tool in ("ip", "iptables-restore", "setpriv") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install iproute2 iptables util-linux"
    name = f"{PREFIX}-{os.getpid()}-0-probe"
    try:
        _ip(f"netns add {name}")
        _inside(name, "iptables-restore", feed="*nat\n-A POSTROUTING -j MASQUERADE\nCOMMIT\n")
    except RuntimeError as error:
        return f"this kernel or container allows no NAT in a namespace: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass(frozen=True)
class Nat:
    """What a router does; in any case it lets in answers only, and drops the rest.

    Attributes:
        random: whether it takes a new port for every connection, not the source port.
        only_https: whether all that goes out is dropped but TCP to port 443.
    """

    random: bool = False
    only_https: bool = False

    def rules(self) -> str:
        nat = "-A POSTROUTING -o wan -j MASQUERADE" + " --random-fully" * self.random
        filters = ["-A FORWARD -i wan -m conntrack --ctstate NEW -j DROP", "-A INPUT -i wan -j DROP"]
        if self.only_https:
            filters += ["-A FORWARD -i lan -p tcp --dport 443 -j ACCEPT", "-A FORWARD -i lan -j DROP"]
        return "\n".join(["*nat", nat, "COMMIT", "*filter", *filters, "COMMIT", ""])


class Site:
    def __init__(self, *hosts: str, nat: Nat | None = None) -> None:
        self.hosts, self.nat = hosts, nat or Nat()


class Program:
    """A process on a host that prints JSON lines."""

    def __init__(self, host: str, process: subprocess.Popen[str]) -> None:
        self.process, self._host = process, host
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, timeout_s: float = 30.0) -> Any:
        """The next line; what the process writes to stderr is in pytest's captured output."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self._host} printed nothing for {timeout_s:.0f} s") from None
        assert line is not None, f"the program on {self._host} ended with status {self.process.wait()}"
        return json.loads(line)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Lab:
    """Hosts at sites behind NATs, and ``public`` ones with an address each. Use as a context manager."""

    def __init__(self, *sites: Site, public: Sequence[str] = ("pub",)) -> None:
        self.prefix = f"{PREFIX}-{os.getpid()}-{next(_numbers)}-"
        self._programs: list[Program] = []
        self._sites = {f"router-{site.hosts[0]}": site for site in sites}
        self._wans = {name: f"203.0.113.{k}" for k, name in enumerate((*public, *self._sites), 10)}
        self._addresses = {name: self._wans[name] for name in public}
        for k, site in enumerate(sites, 1):
            self._addresses |= {host: f"10.{k}.0.{n}" for n, host in enumerate(site.hosts, 2)}

    def run(self, host: str, argv: Sequence[str]) -> Program:
        at = ["ip", "netns", "exec", self.prefix + host, "setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen([*at, *argv], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
        self._programs.append(Program(host, process))
        return self._programs[-1]

    def python(self, host: str, module: str, *arguments: object) -> Program:
        return self.run(host, self.command(module, *arguments))

    @staticmethod
    def command(module: str, *arguments: object) -> list[str]:
        return [sys.executable, "-m", module, *map(str, arguments)]

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        for name in ("core", *self._sites, *self._addresses):
            _ip(f"netns add {self.prefix}{name}")
            self._configure(name, "link set lo up")
        self._forward("core")
        for k, (name, address) in enumerate(self._wans.items()):
            self._cable(name, "wan", "core", f"to{k}")
            self._configure("core", f"addr add 192.0.2.1/32 dev to{k}", f"link set to{k} up")
            self._configure("core", f"route add {address}/32 dev to{k}")
            self._configure(name, f"addr add {address}/32 dev wan", "link set wan up")
            self._configure(name, "route add default via 192.0.2.1 dev wan onlink")
        for k, (router, site) in enumerate(self._sites.items(), 1):
            self._configure(router, "link add lan type bridge", f"addr add 10.{k}.0.1/24 dev lan")
            self._configure(router, "link set lan up")
            self._forward(router)
            for n, host in enumerate(site.hosts):
                self._cable(host, "eth", router, f"port{n}")
                self._configure(router, f"link set port{n} master lan up")
                self._configure(host, f"addr add {self._addresses[host]}/24 dev eth", "link set eth up")
                self._configure(host, f"route add default via 10.{k}.0.1")
            _inside(self.prefix + router, "iptables-restore", feed=site.nat.rules())

    def _cable(self, here: str, name: str, there: str, far_name: str) -> None:
        ends = [f"name {name} netns {self.prefix}{here}", f"name {far_name} netns {self.prefix}{there}"]
        _ip(f"link add {ends[0]} type veth peer {ends[1]}")

    def _configure(self, name: str, *lines: str) -> None:
        _ip(*lines, space=self.prefix + name)

    def _forward(self, name: str) -> None:
        _inside(self.prefix + name, "tee", "/proc/sys/net/ipv4/ip_forward", feed="1")

    def _remove(self) -> None:
        for program in self._programs:
            program.kill()
        for name in (line.split()[0] for line in _call(["ip", "netns", "list"]).splitlines()):
            if name.startswith(self.prefix):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*lines: str, space: str | None = None) -> None:
    _call(["ip", *(["-n", space] if space else []), "-batch", "-"], "\n".join(lines) + "\n")


def _inside(space: str, *command: str, feed: str = "") -> None:
    _call(["ip", "netns", "exec", space, *command], feed)


def _call(command: list[str], feed: str = "") -> str:
    done = subprocess.run(command, input=feed, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} < {feed!r}: {done.stderr.strip()}")
    return done.stdout
