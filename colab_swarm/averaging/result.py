"""The result of a round, as one peer saw it, and the event that describes the round."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from colab_swarm.averaging.group import Group, Span
from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.net.peers import PeerId

LEFT_OUT = "a reducer did not receive its whole contribution"


class RoundTrace:
    """Records when the ``sent``, ``received`` and ``means`` of each member began and ended, and counts bytes.

    `MemberTrace` explains these three kinds of traffic.
    """

    def __init__(self, group: Group, *, now: float) -> None:
        self.began_at = now
        self.sent_bytes = 0
        self.received_bytes = 0
        self._group = group
        self._times: dict[tuple[str, int], tuple[float, float]] = {}
        self.dropped: dict[int, str] = {}

    def on_traffic(self, kind: str, member: int, now: float) -> None:
        since = now - self.began_at
        began, _ = self._times.get((kind, member), (since, since))
        self._times[kind, member] = began, since

    def on_dropped(self, member: int, reason: str) -> None:
        self.dropped.setdefault(member, reason[:200])

    def took_s(self) -> dict[int, float]:
        """Return, for each member that was not dropped, when its contribution had arrived, in seconds.

        If a member contributed nothing here, the time is that of its means.
        """
        took_s = {}
        for kind in ("means", "received"):
            for (traffic, member), (_, end_s) in self._times.items():
                if traffic == kind and member not in self.dropped:
                    took_s[member] = end_s
        return took_s

    def members(self, incomplete: Container[int]) -> tuple[MemberTrace, ...]:
        """Return the traces of all members.

        Some reducer left out each member in ``incomplete``; only that reducer knows why.
        """
        total = sum(member.share for member in self._group.members) or 1.0
        traces = []
        for index, member in enumerate(self._group.members):
            dropped = self.dropped.get(index, "")
            if not dropped and index in incomplete:
                dropped = LEFT_OUT
            trace = MemberTrace(
                peer=member.id.hex(),
                samples=member.samples,
                share=member.share / total,
                sent=self._times.get(("sent", index)),
                received=self._times.get(("received", index)),
                means=self._times.get(("means", index)),
                dropped=dropped,
            )
            traces.append(trace)
        return tuple(traces)


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Result of one averaging round, as seen by this peer."""

    step: int
    announced: Mapping[PeerId, float]  # samples of each planned member
    contributors: tuple[PeerId, ...]  # members whose values are in every mean that arrived here
    spans_lost: tuple[Span, ...] = ()  # spans whose reducer was lost before all of its means arrived
    kept_local: tuple[Span, ...] = ()  # spans without a mean, which keep this peer's own values
    sent_bytes: int  # payload only
    received_bytes: int
    seconds: float
    exchange_s: float  # seconds until every other reducer was done or lost
    members: tuple[MemberTrace, ...]  # when each member sent and received

    def __repr__(self) -> str:
        peers = f"{len(self.contributors)} of {len(self.announced)} peers"
        text = f"step {self.step}, {peers}, {self.seconds:.2f} s"
        if self.spans_lost:
            text += f", {len(self.spans_lost)} spans lost"
        return f"RoundResult({text})"

    @property
    def samples(self) -> dict[PeerId, float]:
        """Samples of each contributor."""
        return {peer: self.announced[peer] for peer in self.announced if peer in self.contributors}

    def event(self, *, began_at: float, now: float) -> RoundFinished:
        """Return the event that this round has ended; ``began_at`` is the time from which its seconds count."""
        return RoundFinished(
            at=now,
            step=self.step,
            group_size=len(self.announced),
            contributors=tuple(peer.hex() for peer in self.contributors),
            samples=sum(self.announced.get(peer, 0.0) for peer in self.contributors),
            spans_lost=len(self.spans_lost),
            kept_local=sum(span.numel for span in self.kept_local),
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            seconds=now - began_at,
            averaging_s=self.seconds,
            members=self.members,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class GroupResult(RoundResult):
    """Result of a round of a group over links."""

    group: Group  # the group as it was planned
    gaps: tuple[tuple[Span, tuple[int, ...]], ...] = ()  # `SpanLedger.gaps`
    digest: bytes = b""  # `SpanLedger.digest`

    def event(self, *, began_at: float, now: float) -> RoundFinished:
        group = self.group
        return replace(
            super().event(began_at=began_at, now=now),
            predicted_s=group.predicted_s,
            explanation=group.explanation,
            bottleneck=group.bottleneck,
        )
