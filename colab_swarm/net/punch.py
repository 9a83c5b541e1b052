"""TCP hole punching: two peers behind NATs dial each other at once, from ports that a common peer saw from outside.

A NAT lets in what answers something that went out. So both ends send a SYN from the same local port as their
connection to the common peer: a NAT that keeps ports gives it the address the other end was told. Where an
unsolicited SYN is dropped, the one that comes second finds the hole open. Where it is answered by RST, the RST closes
the hole again, and there are two ways:

- the SYNs cross in flight: both ends begin at the same moment, known to half a round trip;
- each end first sends a *quiet* SYN that dies after a few hops, behind its own NAT and before the other's. An ICMP
  error does not close the hole (RFC 5382, REQ-10).

Each try does both. Guha and Francis, "Characterization and Measurement of TCP Traversal through NATs and Firewalls"
(IMC 2005), compare these ways. Nothing helps if a NAT takes a new port for every connection, unless the other is a
full cone.

Windows has no SO_REUSEPORT, and its SO_REUSEADDR lets any process take a port over: no punching there (`CAN_PUNCH`).
On macOS all sockets of a port need SO_REUSEPORT, which `bound_socket` sets everywhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from colab_swarm.net.peers import Message

CAN_PUNCH = hasattr(socket, "SO_REUSEPORT")
MAX_TARGETS = 8
QUIET_HOPS = (5, 3, 8, 2)
"""Routers a quiet SYN passes, try by try: more than up to one's own NAT (1 to 4), fewer than up to the other's."""
_MIN_LEAD_S = 0.05
_MIN_TRY_S = 0.25
_BACKLOG = 8


class Endpoint(Message, frozen=True):
    """Where to punch: an IP address and a TCP port."""

    host: Annotated[str, msgspec.Meta(max_length=45)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    @property
    def family(self) -> socket.AddressFamily | None:
        """AF_INET or AF_INET6; None if the host is no address one can connect to (names are not looked up)."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return None
        if address.is_multicast or address.is_unspecified or address.is_link_local:
            return None
        return socket.AF_INET if address.version == 4 else socket.AF_INET6


@dataclass(frozen=True)
class Try:
    """One connect to each target.

    Attributes:
        begin_at, end_at: when to connect, and when to give it up; loop time, seconds.
        hops: how many routers the first SYN passes; None lets it go all the way.
    """

    begin_at: float
    end_at: float
    hops: int | None


def plan_tries(now: float, until: float, *, rtt_s: float, asked: bool, rng: random.Random) -> tuple[Try, ...]:
    """When to connect: pairs of a quiet SYN and, a little later, a loud one.

    The end that asks measures the round trip on the connection both have in common, then sends the start signal. It
    begins half a round trip later, when the other end receives it. As the way there may take longer than the way
    back, the asking end moves its later tries at random, by up to half a round trip.

    Args:
        now: when the signal was sent, or received; loop time, seconds.
        until: when to end; loop time, seconds.
        rtt_s: of the signal's path, seconds.
        asked: whether this end received the signal.
        rng: moves the tries.
    """
    lead_s = _MIN_LEAD_S + rtt_s / 2
    whole_s = (
        lead_s + _MIN_TRY_S + 2 * rtt_s
    )  # a loud SYN has time for its answer, also if the signal came late
    begin_at = now if asked else now + rtt_s / 2
    tries: list[Try] = []
    while begin_at + len(tries) / 2 * whole_s < until:
        number = len(tries) // 2
        quiet_at = begin_at + number * whole_s
        shift_s = 0.0 if asked or number == 0 else rng.uniform(-rtt_s / 2, rtt_s / 2)
        loud_at = quiet_at + lead_s + shift_s
        tries.append(Try(quiet_at, loud_at, QUIET_HOPS[number % len(QUIET_HOPS)]))
        tries.append(Try(loud_at, quiet_at + whole_s, None))
    return tuple(tries)


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
    port: int, targets: Sequence[Endpoint], tries: Sequence[Try], *, until: float
) -> AsyncGenerator[socket.socket, None]:
    """Every connection that comes up from or to local ``port``, as it comes, until ``until`` (loop time).

    The two ends need not see the same one first, and a stranger may come in: greet all, keep the first that becomes
    a link. Wrap this in `contextlib.aclosing`: leaving ends the tries. The sockets given are the caller's to close.

    Args:
        port: local port of a connection made with `bound_socket`, as seen by the common peer.
        targets: where the other end may be: seen from outside, and in its own network; 8 at most are tried.
        tries: from `plan_tries`.
        until: no network fault is raised; there may be no connection until then.
    """
    loop = asyncio.get_running_loop()
    usable = [target for target in targets[:MAX_TARGETS] if target.family is not None]
    found: asyncio.Queue[socket.socket | None] = asyncio.Queue()
    jobs = [_accept_all(target, port, found) for target in {one.family: one for one in usable}.values()]
    jobs += [_connect_often(target, port, tries, found) for target in usable]
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


async def _accept_all(target: Endpoint, port: int, found: asyncio.Queue[socket.socket | None]) -> None:
    """Where the other end's SYN gets through by itself there is a plain connection and no crossing."""
    loop = asyncio.get_running_loop()
    assert target.family is not None
    with suppress(OSError), bound_socket(target.family, port) as listener:
        listener.listen(_BACKLOG)
        while True:
            connected, _ = await loop.sock_accept(listener)
            found.put_nowait(connected)


async def _connect_often(
    target: Endpoint, port: int, tries: Sequence[Try], found: asyncio.Queue[socket.socket | None]
) -> None:
    loop = asyncio.get_running_loop()
    for attempt in tries:
        await asyncio.sleep(attempt.begin_at - loop.time())
        with suppress(OSError):  # refused, unreachable, timed out, or the connection is there already
            async with asyncio.timeout_at(attempt.end_at):
                connected = await _connect(target, port, attempt.hops)
                found.put_nowait(connected)


async def _connect(target: Endpoint, port: int, hops: int | None) -> socket.socket:
    """Connect from ``port``; with ``hops``, only what is sent after the first SYN goes all the way."""
    assert target.family is not None
    address = (target.host, target.port)
    connecting = bound_socket(target.family, port)
    try:
        if hops is not None:
            option = (
                (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS)
                if target.family == socket.AF_INET6
                else (socket.IPPROTO_IP, socket.IP_TTL)
            )
            usual_hops = connecting.getsockopt(*option)
            connecting.setsockopt(*option, hops)
            connecting.connect_ex(address)  # sends the SYN; what becomes of it is seen below
            connecting.setsockopt(*option, usual_hops)
        await asyncio.get_running_loop().sock_connect(connecting, address)
        if connecting.getsockname() == connecting.getpeername():
            raise ConnectionRefusedError(f"{address} is this very socket")  # TCP connects to itself, too
    except BaseException:
        connecting.close()
        raise
    return connecting
