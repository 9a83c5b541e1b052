"""Who was there when, and as what. A pure core over what peers tell; bounded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from colab_swarm.net.peers import PeerId, short
from colab_swarm.training.progress import ProgressRecord
from colab_swarm.training.records import AssistantRecord

MAX_PEERS = 256
MAX_SPANS = 64
"""Of one peer."""
MAX_NAME_CHARS = 40


class PeerSpan(msgspec.Struct, frozen=True):
    """A peer was there as ``role`` from ``since`` to ``until``, seconds since the epoch."""

    role: str
    since: float
    until: float


class PeerLine(msgspec.Struct, frozen=True):
    """A peer and when it was there.

    Attributes:
        name: what it calls itself; not to be trusted.
        id: in hex.
        here: whether it is there now.
        step, samples_per_s: what it told last.
        spans: oldest first.
    """

    name: str
    id: str
    here: bool
    step: int
    samples_per_s: float
    spans: tuple[PeerSpan, ...]


class Roster:
    """The peers that were seen, by what they told."""

    def __init__(self) -> None:
        self._lines: dict[PeerId, PeerLine] = {}  # who was seen last is last
        self._stayed: set[PeerId] = set()  # here at the last look and at this one

    def on_records(
        self,
        trainers: Mapping[PeerId, ProgressRecord],
        assistants: Mapping[PeerId, AssistantRecord],
        *,
        at: float,
    ) -> None:
        """Take the live records; who has none is not here now. ``at``: seconds since the epoch."""
        before = {peer for peer, line in self._lines.items() if line.here}
        for peer in before:
            self._lines[peer] = msgspec.structs.replace(self._lines[peer], here=False, samples_per_s=0.0)
        self._stayed = before & (trainers.keys() | assistants.keys())
        for peer, assistant in assistants.items():
            if peer not in trainers:
                self._see(peer, assistant.name, "assistant", at)
        for peer, record in trainers.items():
            role = "catching up" if record.syncing else "trainer"
            self._see(peer, record.name, role, at, record.step, record.samples_per_s)
        while len(self._lines) > MAX_PEERS:
            del self._lines[next(iter(self._lines))]

    def _see(
        self, peer: PeerId, name: str, role: str, at: float, step: int = 0, samples_per_s: float = 0.0
    ) -> None:
        known = self._lines.pop(peer, None)
        spans = known.spans if known is not None else ()
        if spans and spans[-1].role == role and peer in self._stayed:
            spans = (*spans[:-1], msgspec.structs.replace(spans[-1], until=at))
        else:
            spans = (*spans[1 - MAX_SPANS :], PeerSpan(role, at, at))
        shown = name[:MAX_NAME_CHARS] or short(peer)
        self._lines[peer] = PeerLine(shown, peer.hex(), True, step, samples_per_s, spans)

    def name_of(self, peer: PeerId) -> str | None:
        """What a peer called itself; None if it was never seen."""
        return self._lines[peer].name if peer in self._lines else None

    def lines(self) -> tuple[PeerLine, ...]:
        """The peers, those that are here first, by when they came."""
        return tuple(sorted(self._lines.values(), key=lambda line: (not line.here, line.spans[0].since)))
