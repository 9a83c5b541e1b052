"""TCP hole punching: two peers behind NATs dial each other at once, from ports that a common peer saw from outside.

A NAT lets in what answers something that went out. So both ends send a SYN from the local port of their connection
to the common peer, which a NAT that keeps ports shows under the address the other end was told:

- Where an unsolicited SYN is dropped, the later one finds the hole open and meets a socket that waits for it
  (simultaneous open, RFC 9293 section 3.5). So a connect that is not refused is left alone: another socket would
  begin at another sequence number, which Linux's NAT then takes for an intruder's. For the same reason, opening the
  hole by a SYN that dies on its way (small TTL) is of no use: the ICMP error ends its socket.
- Where it is answered by RST, which closes the hole, the SYNs must cross in flight: both ends connect on a common
  beat, known to half a round trip, again and again.
- A full cone lets in everybody: a listener on the port takes the SYN.

Nothing helps if a NAT takes a new port for every connection, unless the other is a full cone.

Windows has no SO_REUSEPORT, and its SO_REUSEADDR lets any process take a port over: no punching there (`CAN_PUNCH`).
On macOS all sockets of a port need SO_REUSEPORT, which `bound_socket` sets everywhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import random
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated

import msgspec

from colab_swarm.net.peers import Message

CAN_PUNCH = hasattr(socket, "SO_REUSEPORT")
MAX_TARGETS = 8
_MIN_BEAT_S = 0.15
_LATE_S = 0.002
"""By how much an event loop may wake late."""
_BACKLOG = 8


class Endpoint(Message, frozen=True):
    """Where to punch: an IP address and a TCP port."""

    host: Annotated[str, msgspec.Meta(max_length=45)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    @property
    def usable(self) -> bool:
        """Whether one can connect there."""
        return self.family is not None and 0 < self.port < 1 << 16

    @property
    def family(self) -> socket.AddressFamily | None:
        """AF_INET or AF_INET6; None if the host is no address one can connect to (names are not looked up)."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return None
        if address.is_multicast or address.is_unspecified or address.is_link_local or "%" in self.host:
            return None  # what stands behind % names an interface of the other machine
        return socket.AF_INET if address.version == 4 else socket.AF_INET6


def plan_tries(
    now: float, until: float, *, rtt_s: float, asked: bool, rng: random.Random
) -> tuple[float, ...]:
    """When to connect, in loop time: beats that both ends share, further apart than a SYN and its refusal take.

    The end that asks measures the round trip on the connection that both have with the common peer, then sends the
    start signal and begins half a round trip later, when the other end receives it. As the way there may take longer
    than the way back, it moves every other beat at random, by about half a round trip at most.

    Args:
        now: when the signal was sent, or received; loop time, seconds.
        until: when to end; loop time, seconds.
        rtt_s: of the signal's path, seconds.
        asked: whether this end received the signal.
        rng: moves the beats.
    """
    beat_s = max(_MIN_BEAT_S, 2 * rtt_s)
    begin_at = now if asked else now + rtt_s / 2
    count = max(0, math.ceil((until - begin_at) / beat_s))
    spread_s = rtt_s / 2 + _LATE_S
    shifts_s = [0.0 if asked or k % 2 == 0 else rng.uniform(-spread_s, spread_s) for k in range(count)]
    return tuple(begin_at + k * beat_s + shift_s for k, shift_s in enumerate(shifts_s))


def bound_socket(family: int = socket.AF_INET, port: int = 0) -> socket.socket:
    """A TCP socket on a local port that further sockets made here may share; port 0 takes a free one.

    Every connection whose port is to be punched from later must be dialled from such a socket.

    Raises:
        OSError: the port is taken, or the machine does not have the family.
    """
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        if CAN_PUNCH:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    except OSError:
        bound.close()
        raise
    return bound


async def punch(
    port: int, targets: Sequence[Endpoint], tries: Sequence[float], *, until: float
) -> AsyncGenerator[socket.socket, None]:
    """Every connection that comes up from or to local ``port``, as it comes, until ``until`` (loop time).

    The two ends need not see the same one first, and a stranger may come in: greet all, keep the first that becomes
    a link. Wrap this in `contextlib.aclosing`: leaving ends the attempts. The sockets given are the caller's.

    Args:
        port: local port of a connection made with `bound_socket`, as seen by the common peer.
        targets: where the other end may be: seen from outside, and in its own network; 8 at most are tried.
        tries: when to connect, from `plan_tries`.
        until: no network fault is raised; there may be no connection until then.
    """
    loop = asyncio.get_running_loop()
    families = {target: target.family for target in targets[:MAX_TARGETS]}
    found: asyncio.Queue[socket.socket | None] = asyncio.Queue()
    jobs = [_accept_all(family, port, found) for family in {*families.values()} if family is not None]
    jobs += [
        _connect_often(target, family, port, tries, found)
        for target, family in families.items()
        if family is not None
    ]
    tasks = [loop.create_task(job) for job in jobs]
    end = loop.call_at(until, found.put_nowait, None)
    try:
        while (connected := await found.get()) is not None:
            yield connected
    finally:
        end.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not found.empty():
            unclaimed = found.get_nowait()
            if unclaimed is not None:
                unclaimed.close()


async def _accept_all(
    family: socket.AddressFamily, port: int, found: asyncio.Queue[socket.socket | None]
) -> None:
    with suppress(OSError), bound_socket(family, port) as listener:
        listener.listen(_BACKLOG)
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(listener)
            found.put_nowait(connected)


async def _connect_often(
    target: Endpoint,
    family: socket.AddressFamily,
    port: int,
    tries: Sequence[float],
    found: asyncio.Queue[socket.socket | None],
) -> None:
    loop = asyncio.get_running_loop()
    for at, following_at in pairwise((*tries, math.inf)):
        if following_at > loop.time():  # otherwise it was missed while the last connect was pending
            await asyncio.sleep(at - loop.time())
            with suppress(OSError):  # refused, unreachable, or the listener has the same connection already
                found.put_nowait(await _connect(target, family, port))


async def _connect(target: Endpoint, family: socket.AddressFamily, port: int) -> socket.socket:
    connecting = bound_socket(family, port)
    try:
        await asyncio.get_running_loop().sock_connect(connecting, (target.host, target.port))
        if connecting.getsockname() == connecting.getpeername():
            raise ConnectionRefusedError(f"{target} is this very socket")  # TCP connects to itself, too
    except BaseException:
        connecting.close()
        raise
    return connecting
