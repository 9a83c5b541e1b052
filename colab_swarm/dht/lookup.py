"""Iterative lookup as a pure decider (Kademlia, section 2.3): whom to ask next for the nearest to a target.

Three rules keep silent peers from costing their timeout each. There is no barrier between rounds: as soon as
one query is answered the next goes out. A query older than ``patience_s`` is slow: it no longer takes one of
the ``alpha`` places, and its peer no longer counts among the nearest, until it does answer. The lookup is
done when the ``width`` nearest others have answered; only where there are fewer are slow ones given `GRACE`
times the patience.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from colab_swarm.dht.routing import distance
from colab_swarm.net.peers import Contact, PeerId

GRACE = 4
MIN_PATIENCE_S = 0.2
"""A notebook's busy cell delays honest answers by as much."""


class _State(Enum):
    NEW = auto()
    ASKED = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class _Candidate:
    contact: Contact
    hops: int
    state: _State = _State.NEW
    asked_at: float = 0.0


class Lookup:
    """One search for the ``width`` peers nearest to ``target``, with ``alpha`` queries in flight."""

    def __init__(
        self, target: bytes, seeds: Iterable[Contact], *, width: int, alpha: int, patience_s: float = 1.0
    ) -> None:
        self.target = target
        self.calls = 0
        self._width, self._alpha, self._patience_s = width, alpha, patience_s
        self._candidates: dict[PeerId, _Candidate] = {}
        self._by_distance: list[tuple[int, _Candidate]] = []
        self._add(seeds, hops=1)

    def _add(self, contacts: Iterable[Contact], *, hops: int) -> None:
        for contact in contacts:
            if contact.id not in self._candidates:
                candidate = self._candidates[contact.id] = _Candidate(contact, hops)
                entry = (distance(contact.id, self.target), candidate)
                bisect.insort(self._by_distance, entry, key=lambda entry: entry[0])

    def next_queries(self, now: float) -> list[Contact]:
        """Peers to ask now; each counts as asked until `on_answer`."""
        window = self._window(now)
        places = self._alpha - sum(candidate.state is _State.ASKED for candidate in window)
        chosen = [candidate for candidate in window if candidate.state is _State.NEW][: max(0, places)]
        for candidate in chosen:
            candidate.state, candidate.asked_at = _State.ASKED, now
        self.calls += len(chosen)
        return [candidate.contact for candidate in chosen]

    def on_answer(self, peer: PeerId, closer: Iterable[Contact] | None) -> None:
        """``peer`` answered and named ``closer`` peers; None: it did not answer and will not."""
        candidate = self._candidates[peer]
        candidate.state = _State.FAILED if closer is None else _State.ANSWERED
        self._add(closer or (), hops=candidate.hops + 1)

    def widen(self, width: int) -> None:
        """Go on until the ``width`` nearest have answered."""
        self._width = width

    def done(self, now: float) -> bool:
        """Whether nothing is left to ask or to wait for."""
        window = self._window(now)
        if any(candidate.state is not _State.ANSWERED for candidate in window):
            return False
        return len(window) == self._width or not self._worth_waiting(now, any_answer=bool(window))

    def _worth_waiting(self, now: float, *, any_answer: bool) -> bool:
        """Whether a slow query may still be answered; without any answer at all, every one may."""
        limit_s = self._patience_s * GRACE
        asked = [c for c in self._candidates.values() if c.state is _State.ASKED]
        return any(not any_answer or now < candidate.asked_at + limit_s for candidate in asked)

    def wake_at(self, now: float) -> float | None:
        """When a query gets slow or hopeless next; None if only a reply changes anything."""
        asked = [c.asked_at for c in self._candidates.values() if c.state is _State.ASKED]
        limits = [at + self._patience_s * factor for at in asked for factor in (1, GRACE)]
        return min((at for at in limits if at > now), default=None)

    def nearest(self, count: int) -> list[Contact]:
        """The peers nearest to the target that answered, nearest first."""
        answered = (c.contact for _, c in self._by_distance if c.state is _State.ANSWERED)
        return [contact for contact, _ in zip(answered, range(count), strict=False)]

    def hops(self, peer: PeerId) -> int:
        """How many queries in a row it took to hear the answer of ``peer``; 1 for a seed."""
        return self._candidates[peer].hops

    def known(self, peer: PeerId) -> Contact | None:
        """The contact of a peer that somebody named."""
        candidate = self._candidates.get(peer)
        return candidate.contact if candidate else None

    def _is_slow(self, candidate: _Candidate, now: float) -> bool:
        return candidate.state is _State.ASKED and now >= candidate.asked_at + self._patience_s

    def _window(self, now: float) -> list[_Candidate]:
        """The ``width`` nearest that neither failed nor are slow."""
        window: list[_Candidate] = []
        for _, candidate in self._by_distance:
            if candidate.state is not _State.FAILED and not self._is_slow(candidate, now):
                window.append(candidate)
                if len(window) == self._width:
                    break
        return window


class Patience:
    """How long an answer may take before its query is slow: mean plus four deviations (RFC 6298)."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def learn(self, rtt_s: float) -> None:
        """An answer took ``rtt_s``."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = rtt_s, rtt_s / 2
            return
        self._deviation_s += (abs(rtt_s - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (rtt_s - self._mean_s) / 8

    @property
    def seconds(self) -> float:
        """Before the first answer, 1 s."""
        if self._mean_s is None:
            return 1.0
        return max(MIN_PATIENCE_S, self._mean_s + 4 * self._deviation_s)
