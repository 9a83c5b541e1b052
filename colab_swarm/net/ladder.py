"""How others reach this peer: the ladder of ways, tried from the top. Free of I/O.

Evidence comes in by the ``on_…`` verbs; `Ladder.decide` says on which rung this peer stands, why not higher,
and which addresses to tell others. Only addresses that another peer has dialled are told, except before anybody
could try: a peer that sees this one through a relay or a tunnel cannot, since it dials back only where it sees
the caller. An address of a private network that a neighbour reaches is no use to peers outside: once one of
these has tried in vain, this peer counts as behind a NAT.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from colab_swarm.net.addresses import host_of, is_local
from colab_swarm.net.peers import PeerId, short


class Rung(StrEnum):
    """Ways to be reached, best first."""

    DIRECT = "direct"
    LAN = "LAN"
    PUNCHED = "punched"
    RELAYED = "relayed"
    TUNNEL = "tunnel"
    UNVERIFIED = "listening, nobody has tried yet"
    OUTGOING = "outgoing only"


@dataclass(frozen=True)
class Reachability:
    """How others reach this peer.

    Attributes:
        rung: the best way that works.
        via: who relays, or the tunnel's address.
        addresses: what to tell others, the best first.
        reasons: for each higher rung why it does not work.
    """

    rung: Rung
    via: str = ""
    addresses: tuple[str, ...] = ()
    reasons: tuple[tuple[Rung, str], ...] = ()

    def __str__(self) -> str:
        if self.rung is Rung.TUNNEL:
            return f"tunnel {self.via}"
        if self.rung is Rung.UNVERIFIED and self.addresses and all(map(_is_local, self.addresses)):
            return "listening in the local network, nobody has tried yet"
        return f"{self.rung.value} by {self.via}" if self.via else self.rung.value

    def explain(self) -> str:
        """The rung, and a line for each higher one."""
        return "\n".join((str(self), *(f"  not {rung.value}: {why}" for rung, why in self.reasons)))


@dataclass(frozen=True)
class Report:
    """What a peer found that dialled back: where it sees us, and what became of each address ("" if it worked)."""

    seen_host: str
    outcomes: tuple[tuple[str, str], ...]

    @property
    def outside(self) -> bool:
        """Whether the peer sees us across the internet."""
        return not is_local(self.seen_host)


class Ladder:
    """Evidence of how this peer can be reached.

    Args:
        listening: addresses where this peer listens; none in client mode.
        trusted: whether the user has given them: they are told unverified.
    """

    def __init__(self, listening: tuple[str, ...], *, trusted: bool = False) -> None:
        self.listening, self._trusted = listening, trusted
        self._reports: dict[PeerId, Report] = {}
        self._circuits: tuple[str, ...] = ()
        self._relays: tuple[PeerId, ...] = ()
        self._no_relay = "no relay of the run is known"
        self._punched: set[PeerId] = set()
        self._no_punch = "no peer has been met through a relay yet"
        self._tunnel: str | None = None
        self._no_tunnel = "not asked for; tunnel='ngrok' opens one"

    @property
    def verifiers(self) -> frozenset[PeerId]:
        """Peers that have dialled back."""
        return frozenset(self._reports)

    def on_listening(self, addresses: tuple[str, ...]) -> None:
        """The network changed: what was found out about the old addresses is void."""
        self.listening = addresses
        self._reports.clear()

    def on_report(self, verifier: PeerId, report: Report) -> None:
        """A peer has dialled back."""
        self._reports[verifier] = report

    def on_places(self, relays: tuple[PeerId, ...], circuits: tuple[str, ...], why_none: str = "") -> None:
        """Places at relays have changed."""
        self._relays, self._circuits = relays, circuits
        self._no_relay = why_none or self._no_relay

    def on_punched(self, peer: PeerId, fault: str | None) -> None:
        """A relayed link to the peer became a better one, or did not."""
        if fault is None:
            self._punched.add(peer)
        else:
            self._punched.discard(peer)
            self._no_punch = fault

    def on_tunnel(self, address: str | None, why_none: str = "") -> None:
        """The tunnel is open at an address, or is not."""
        self._tunnel = address
        self._no_tunnel = why_none or self._no_tunnel

    @property
    def dialable(self) -> bool:
        """Whether others reach this peer without a relay or a tunnel."""
        rung = self.decide().rung
        return rung in (Rung.DIRECT, Rung.LAN) or (rung is Rung.UNVERIFIED and not self._reports)

    def decide(self) -> Reachability:
        """Where this peer stands."""
        public, local, outside = self._verified()
        if self._trusted and self.listening:
            return Reachability(Rung.DIRECT, addresses=self.listening)
        if public:
            return Reachability(Rung.DIRECT, addresses=(*public, *local))
        reasons = [(Rung.DIRECT, self._why_not(local=False))]
        if local and not outside:
            return Reachability(Rung.LAN, addresses=(*local, *self._circuits), reasons=tuple(reasons))
        if self.listening and not self._reports and not self._circuits and not self._tunnel:
            return Reachability(Rung.UNVERIFIED, addresses=self.listening, reasons=tuple(reasons))
        reasons.append((Rung.LAN, self._why_not(local=True)))
        untried = self._untried()
        addresses = (*self._circuits, *((self._tunnel,) if self._tunnel else ()), *untried)
        relays = ", ".join(map(short, self._relays))
        if self._circuits and self._punched:
            return Reachability(Rung.PUNCHED, addresses=addresses, reasons=tuple(reasons))
        reasons.append((Rung.PUNCHED, self._no_punch))
        if self._circuits:
            return Reachability(Rung.RELAYED, relays, addresses, tuple(reasons))
        reasons.append((Rung.RELAYED, self._no_relay))
        if self._tunnel:
            return Reachability(Rung.TUNNEL, self._tunnel, addresses, tuple(reasons))
        reasons.append((Rung.TUNNEL, self._no_tunnel))
        if untried:
            return Reachability(Rung.UNVERIFIED, addresses=(*untried, *local), reasons=tuple(reasons))
        return Reachability(Rung.OUTGOING, addresses=tuple(local), reasons=tuple(reasons))

    def _verified(self) -> tuple[list[str], list[str], bool]:
        """Public and private addresses that somebody has dialled, and whether somebody outside has tried."""
        worked = {one for report in self._reports.values() for one, fault in report.outcomes if not fault}
        known = [address for address in self.listening if address in worked]
        public = [address for address in known if not _is_local(address)]
        local = [address for address in known if _is_local(address)]
        return public, local, any(report.outside for report in self._reports.values())

    def _untried(self) -> tuple[str, ...]:
        """Public addresses of this peer, while all who were asked see it through a relay or a tunnel."""
        if not self._reports or any(report.seen_host for report in self._reports.values()):
            return ()
        return tuple(address for address in self.listening if not _is_local(address))

    def _why_not(self, *, local: bool) -> str:
        if not self.listening:
            return "this peer does not listen (listen=False)"
        tried = {
            one: fault
            for report in self._reports.values()
            for one, fault in report.outcomes
            if fault and _is_local(one) == local
        }
        if tried:
            address, fault = next(iter(tried.items()))
            return f"dialled back at {address}, {fault}; a NAT or firewall keeps it out"
        kind = "private" if local else "public"
        if not any(_is_local(address) == local for address in self.listening):
            return f"this machine has no {kind} address"
        if not local and self._untried():
            return "the peers that were asked see this one through a relay or a tunnel, and dial nothing back there"
        return "nobody has tried" if not self._reports else "no peer outside this network has tried"


def _is_local(address: str) -> bool:
    return is_local(host_of(address))
