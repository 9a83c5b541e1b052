"""Find out how others reach this peer, check this again when the network changes, and report the addresses.

An address is reported to others if another peer has dialled it successfully, or as long as no peer could try. A peer
that is linked through a relay or a tunnel cannot try, because peers dial back only at the IP address from which they
see the caller. A private address that a neighbour reaches is of no use to peers outside the local network. So once a
peer from outside has failed to dial, this peer counts as behind a NAT.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Annotated

import msgspec

from colab_swarm.errors import PeerError, TunnelError, require
from colab_swarm.events import EventLog, ReachabilityChanged
from colab_swarm.net.addresses import host_of, ip_of, is_local, may_dial_back
from colab_swarm.net.carrier import Path
from colab_swarm.net.handshake import Address
from colab_swarm.net.node import Node
from colab_swarm.net.patience import VisitLimit
from colab_swarm.net.peers import MAX_ADDRESSES, Ack, Contact, Message, PeerId, Refusal, short
from colab_swarm.net.relay import Circuits
from colab_swarm.net.tunnels import Tunnel, TunnelSettings

logger = logging.getLogger(__name__)
# Maximum time for one address; an open port answers within three round trips.
PROBE_TIMEOUT_S = 1.5
_CALL_TIMEOUT_S = 5.0
VERIFIERS = 3
CHECK_EVERY_S = 5.0
_VERIFY_EVERY_S = 300.0
# Minimum time between two dial-backs for the same peer.
DIAL_BACK_GAP_S = 1.0
# Maximum number of dial-backs in this time for one host, however many peers run there, and for all hosts together.
_DIAL_BACKS = 8
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class DialBack(Message, frozen=True):
    """Asks a peer to dial the sender at these addresses, as a test."""

    addresses: Addresses


class DialledBack(Message, frozen=True):
    """The answer: the host at which the caller is seen and, for each address, why dialling failed ("" if it worked)."""

    seen_host: str
    outcomes: Annotated[tuple[tuple[Address, str], ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class Moved(Message, frozen=True):
    """The sender can be dialled at these addresses from now on, and nowhere else. Answered by `Ack`."""

    addresses: Addresses


class ReachabilityLevel(StrEnum):
    """Ways in which a peer can be reached, best first."""

    DIRECT = "direct"
    LAN = "LAN"
    IROH = "iroh"
    RELAYED = "relayed"
    TUNNEL = "tunnel"
    UNVERIFIED = "waiting for the first peer"
    OUTGOING = "outgoing only"
    BUCKET = "by the bucket"


@dataclass(frozen=True)
class Reachability:
    """How others reach this peer.

    Attributes:
        level: the best level that works.
        via: the relays or the tunnel that this level uses.
        addresses: the addresses to report to others, the best first.
        reasons: for each better level, the reason why it does not work.
    """

    level: ReachabilityLevel
    via: str = ""
    addresses: tuple[str, ...] = ()
    reasons: tuple[tuple[ReachabilityLevel, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.level.value} {self.via}".rstrip()

    def explain(self) -> str:
        """Return the level, and a line for each better level with the reason why it does not work."""
        lines = [str(self)]
        for level, reason in self.reasons:
            lines.append(f"  not {level.value}: {reason}")
        if self.level is ReachabilityLevel.BUCKET:
            lines.append(
                "  nobody needs to reach this peer: it dials out only. With a door, such as iroh='public',"
            )
            lines.append("  it would carry the rounds for members without the bucket's keys")
        elif self.level is ReachabilityLevel.OUTGOING:
            lines.append("  a run in a bucket needs none of them: cs.create(…, mailbox='s3://bucket/folder')")
        return "\n".join(lines)


@dataclass
class ReachabilityPolicy:
    """What is known about how a peer can be reached, and the level that follows from it.

    Attributes:
        listening: the addresses at which the peer listens.
        trusted: True if the user gave these addresses, so that they need no check.
        reports: the answers to dial-backs, by peer.
        places: the addresses of circuits, by relay.
        tunnel: the address of the peer's tunnel, or None.
        iroh: the peer's addresses at iroh.
        why_no_relay, why_no_tunnel: why these levels do not work.
    """

    listening: tuple[str, ...]
    trusted: bool = False
    reports: dict[PeerId, DialledBack] = field(default_factory=dict)
    places: Mapping[PeerId, tuple[str, ...]] = field(default_factory=dict)
    tunnel: str | None = None
    iroh: tuple[str, ...] = ()
    why_no_relay: str = "no relay of the run is known"
    why_no_tunnel: str = "not requested; tunnel='ngrok' opens one"

    @property
    def dialable(self) -> bool:
        """True if others reach this peer without a relay or a tunnel, or if no peer has tried yet."""
        level = self.decide().level
        untried = level is ReachabilityLevel.UNVERIFIED and not self.reports
        return untried or level in (ReachabilityLevel.DIRECT, ReachabilityLevel.LAN)

    def decide(self) -> Reachability:
        if self.trusted and self.listening:
            return Reachability(ReachabilityLevel.DIRECT, addresses=self.listening)
        reasons: list[tuple[ReachabilityLevel, str]] = []
        for level, via, addresses, why_not in self._levels():
            if addresses:
                return Reachability(level, via, tuple(addresses)[:MAX_ADDRESSES], tuple(reasons))
            reasons.append((level, why_not))
        if self.listening and not self.reports:
            return Reachability(ReachabilityLevel.UNVERIFIED, "", self.listening)
        return Reachability(ReachabilityLevel.OUTGOING, "", tuple(self._worked(local=True)), tuple(reasons))

    def _levels(self) -> Iterator[tuple[ReachabilityLevel, str, Sequence[str], str]]:
        """Yield the levels, best first.

        With each level come the relays or the tunnel that it uses, the addresses to report (empty if the level does not
        work), and the reason why it does not work.
        """
        public = self._worked(local=False)
        local = self._worked(local=True)
        untried = self._untried()
        circuits = list(chain.from_iterable(self.places.values()))
        tunnel = [self.tunnel] if self.tunnel else []
        carried = [*self.iroh, *circuits, *tunnel, *untried]
        yield ReachabilityLevel.DIRECT, "", public and [*public, *local], self._why_not(local=False)
        is_lan = local and all(is_local(report.seen_host) for report in self.reports.values())
        near = [*local, *self.iroh, *circuits] if is_lan else []
        yield ReachabilityLevel.LAN, "", near, self._why_not(local=True)
        at_iroh = self.iroh and [*carried, *self._own(local=True)]
        yield ReachabilityLevel.IROH, "", at_iroh, "not requested; iroh='public' uses its free relays"
        relays = f"by {', '.join(map(short, self.places))}"
        yield ReachabilityLevel.RELAYED, relays, circuits and carried, self.why_no_relay
        yield ReachabilityLevel.TUNNEL, self.tunnel or "", tunnel and carried, self.why_no_tunnel
        if untried:
            yield ReachabilityLevel.UNVERIFIED, "", [*untried, *local], ""

    def _outcomes(self) -> Iterator[tuple[str, str]]:
        return chain.from_iterable(report.outcomes for report in self.reports.values())

    def _own(self, *, local: bool) -> list[str]:
        return [address for address in self.listening if is_local(host_of(address)) == local]

    def _worked(self, *, local: bool) -> list[str]:
        worked = {address for address, fault in self._outcomes() if not fault}
        return [address for address in self._own(local=local) if address in worked]

    def _untried(self) -> list[str]:
        """Return the public addresses if all verifiers see this peer through a relay or a tunnel; else none."""
        seen_directly = any(report.seen_host for report in self.reports.values())
        if seen_directly or not self.reports:
            return []
        return self._own(local=False)

    def _why_not(self, *, local: bool) -> str:
        """Return why this peer cannot be dialled directly, at a ``local`` address or at a public one."""
        if not self.listening:
            return "this peer does not listen (listen=False)"
        for address, fault in self._outcomes():
            if fault and is_local(host_of(address)) == local:
                return f"dialled back at {address}, {fault}; a NAT or firewall blocks it"
        if not self._own(local=local):
            kind = "private" if local else "public"
            return f"this machine has no {kind} address"
        if local:
            return "nobody has tried"
        if self._untried():
            return "all verifiers see this peer through a relay or a tunnel, and cannot dial it back there"
        return "no peer outside this network has tried"


class ReachabilityWatch:
    """Keeps one peer reachable from `start` until its node closes; call `close` before the node closes."""

    def __init__(
        self,
        node: Node,
        relays: Callable[[], Awaitable[list[Contact]]],
        events: EventLog,
        rng: random.Random,
        *,
        trusted: tuple[str, ...] = (),
        use_relays: bool = True,
        tunnel: TunnelSettings | None = None,
    ) -> None:
        self._node = node
        self._events = events
        self._rng = rng
        self._trusted = trusted
        self._tunnel_settings = tunnel
        self._loop = asyncio.get_running_loop()
        self._policy = ReachabilityPolicy(trusted or node.listening(), trusted=bool(trusted))
        self._dial_backs = VisitLimit(1, DIAL_BACK_GAP_S)
        self._targets = VisitLimit(_DIAL_BACKS, DIAL_BACK_GAP_S)
        self._verified_at = float("-inf")
        self._tunnel: Tunnel | None = None
        self.current: Reachability = self._policy.decide()
        self._circuits: Circuits | None = None
        if use_relays:
            self._circuits = Circuits(node, relays, self._update, rng)
            self._policy.places = self._circuits.places
        else:
            self._policy.why_no_relay = "this peer uses no relay (use_relays=False)"
        node.serve(DialBack, self._on_dial_back)
        node.serve(Moved, self._on_moved)

    async def start(self) -> None:
        """Determine the level, which takes a few seconds at most; raises `TunnelError` if a tunnel does not open."""
        self._policy.iroh = self._node.iroh.addresses
        if self._tunnel_settings is not None:
            if self._node.port is None:
                raise TunnelError("a tunnel leads to a port, and this peer has none: remove listen=False")
            self._tunnel = await Tunnel(
                self._tunnel_settings,
                self._node.port,
                on_change=self._on_tunnel,
                events=self._events,
                sent_bytes=lambda: self._node.metering.tunnelled.total_bytes,
            ).open()
            self._policy.tunnel = self._tunnel.address
        await self.verify()
        if not self._policy.dialable and self._circuits is not None:
            self._circuits.start()
            await self._circuits.wait_looked(_CALL_TIMEOUT_S / 2)
        self._node.spawn(self._keep())

    async def close(self) -> None:
        if self._tunnel is not None:
            await self._tunnel.close()

    async def verify(self) -> None:
        """Ask linked peers to dial back, and determine the level again."""
        self._verified_at = self._loop.time()
        if self._policy.listening and not self._trusted:
            verifiers = sorted(self._node.linked(), key=self._verifier_rank)
            await asyncio.gather(*map(self._ask, verifiers[:VERIFIERS]))
        self._update()

    async def verify_anew(self) -> None:
        """Forget the reports of peers that have left, and verify again: this machine may have been too busy."""
        linked = self._node.linked()
        self._policy.reports = {peer: told for peer, told in self._policy.reports.items() if peer in linked}
        await self.verify()

    def _verifier_rank(self, peer: PeerId) -> tuple[bool, float]:
        """Rank peers across the internet before near ones, because an address that they reach is open to all peers."""
        path = self._node.path_to(peer) or Path()
        near = path.remote is None or is_local(path.remote[0])
        return near, self._rng.random()

    async def _ask(self, peer: PeerId) -> None:
        ask = DialBack(self._policy.listening[:MAX_ADDRESSES])
        try:
            report = await self._node.call(peer, ask, DialledBack, timeout_s=_CALL_TIMEOUT_S)
        except PeerError as error:
            logger.info("no dial-back: %s", error)
            return
        self._policy.reports[peer] = report

    async def _on_dial_back(self, peer: PeerId, ask: DialBack) -> DialledBack:
        path = self._node.path_to(peer) or Path()
        require(path.remote is not None, "no direct link shows your address", Refusal)
        admitted = self._dial_backs.admit(peer, self._loop.time())
        require(admitted, f"you were dialled back less than {DIAL_BACK_GAP_S:g} s ago", Refusal)
        targets = [address for address in ask.addresses if self._admits_target(address, path.seen_host)]
        faults = await asyncio.gather(*(self._probe(peer, address) for address in targets))
        outcomes = tuple(zip(targets, faults, strict=True))
        return DialledBack(path.seen_host, outcomes)

    def _admits_target(self, address: str, seen_host: str) -> bool:
        """Count an address to dial back; return True if dialling it is allowed."""
        if not may_dial_back(address, seen_host):
            return False
        now = self._loop.time()
        return self._targets.admit(ip_of(seen_host), now) and self._targets.admit("", now)

    async def _probe(self, peer: PeerId, address: str) -> str:
        try:
            await self._node.probe(peer, address, timeout_s=PROBE_TIMEOUT_S)
        except PeerError as error:
            return str(error).removeprefix(f"{address}: ").removeprefix(f"{address} ")[:200]
        return ""

    def _on_tunnel(self, address: str | None) -> None:
        self._policy.tunnel = address
        self._policy.why_no_tunnel = "it was lost and is being opened again"
        self._update()

    def _update(self) -> None:
        iroh = self._node.iroh
        self._policy.iroh = iroh.addresses
        before = self.current
        decided = self._policy.decide()
        self.current = decided
        if decided.level is ReachabilityLevel.IROH:
            self._node.metered = iroh.relayed
        else:
            self._node.metered = decided.level in (ReachabilityLevel.RELAYED, ReachabilityLevel.TUNNEL)
        if decided.addresses != self._node.contact.addresses:
            self._node.addresses = decided.addresses
            self._node.spawn(self._send_moved())
        if (decided.level, decided.via) != (before.level, before.via):
            logger.info("reachability: %s", decided.explain())
            self._events.emit(ReachabilityChanged(self._loop.time(), str(decided)))

    async def _send_moved(self) -> None:
        moved = Moved(self._node.contact.addresses)
        calls = [self._node.call(peer, moved, Ack, timeout_s=_CALL_TIMEOUT_S) for peer in self._node.linked()]
        # Errors are ignored: lost peers get the addresses when they link again.
        await asyncio.gather(*calls, return_exceptions=True)

    async def _on_moved(self, peer: PeerId, moved: Moved) -> Ack:
        self._node.book.replace(Contact(peer, moved.addresses))
        if self._circuits is not None:
            self._node.spawn(self._circuits.leave_relay(peer))
        return Ack()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S * self._rng.uniform(0.8, 1.2))
            listening = self._trusted or self._node.listening()
            if listening != self._policy.listening:
                self._policy.listening = listening
                # The reports are about the old addresses, so they are not valid any more.
                self._policy.reports.clear()
                self._verified_at = float("-inf")
            verifiers = self._policy.reports.keys()
            more_can_verify = len(verifiers) < VERIFIERS and self._node.linked() - verifiers
            if more_can_verify or self._loop.time() - self._verified_at > _VERIFY_EVERY_S:
                await self.verify()
            # The addresses at iroh change without an event.
            self._update()
            if self._circuits is not None:
                if self._policy.dialable:
                    self._circuits.stop()
                else:
                    self._circuits.start()
