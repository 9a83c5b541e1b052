"""One round's group while it forms: who is awaited until when, who has joined, and the group of these. Pure."""

import math
from collections.abc import Sequence

import msgspec

from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    GroupMember,
    Joined,
    RoundTerms,
    SharePlan,
    Strategy,
    Ticket,
    bounded_weights,
    offer_of,
    wrong_numbers,
)
from colab_swarm.errors import require
from colab_swarm.net.peers import Contact, PeerId


class GroupFormation:
    """Collects the members of one round, whose tickets must agree with ``terms``. Pure.

    Attributes:
        elsewhere: the step's group, formed by others, or a better organizer. The organizer sets it once it hears.
        candidates: the peers that the organizer calls; `Organizer.on_expected` sets them once.
        blamed: the peer for which a candidate waits itself, by its answer to the call. The organizer writes it.
        answers_s: how long linked candidates took to answer a call; the organizer adds to it.
        after_s: how long after their promise candidates have joined; `on_join` adds to it.

    ``usual_s``: how long it usually takes until a group is formed.
    """

    def __init__(
        self,
        terms: RoundTerms,
        *,
        now: float,
        settings: GroupFormationSettings,
        usual_s: float = math.inf,
    ) -> None:
        self.terms = terms
        self.settings = settings
        self.opened_at = now
        self.usual_s = usual_s
        self.elsewhere: Group | Contact | None = None
        self.candidates: Sequence[PeerId] = ()
        self.blamed: dict[PeerId, PeerId | None] = {}
        self.answers_s: list[float] = []
        self.after_s: list[float] = []
        # Until when each candidate is awaited. `expect` adds one; joining, declining and a lost link remove it.
        self._awaited: dict[PeerId, float] = {}
        # When a candidate that takes its usual time has come; `expect` writes it.
        self._due: dict[PeerId, float] = {}
        # When each candidate said that it would come; `on_coming` writes it.
        self._promised: dict[PeerId, float] = {}
        # Who has joined. `on_join` adds, `on_gave_up` removes.
        self._joined: dict[PeerId, tuple[Ticket, Contact]] = {}
        # When each peer that has joined waits no longer; `on_join` writes it.
        self._leaves_at: dict[PeerId, float] = {}
        self._last_joined_at = now
        # How long each peer that joined was awaited alone, beyond its usual time; `on_join` writes it.
        self._late_s: dict[PeerId, float] = {}

    def expect(self, peer: PeerId, *, due: float, until: float) -> None:
        """Wait for a candidate that has not joined, until ``until``; its usual time ends at ``due``."""
        if peer not in self._joined:
            self._due[peer] = due
            self._awaited[peer] = until

    def on_coming(self, peer: PeerId, ready_in_s: float, *, now: float) -> None:
        """Wait until a candidate comes as it promised, and as long as for its answer at least."""
        wait_s = max(0.0, ready_in_s)
        promised_at = now + wait_s
        self._promised[peer] = promised_at
        until = promised_at + self.settings.slack_s
        due = self._due.get(peer, now) + wait_s + self.settings.slack_s
        self.expect(peer, due=due, until=max(until, self._awaited.get(peer, until)))

    def on_declined(self, peer: PeerId) -> None:
        """Stop waiting for a candidate that declined or is unreachable; if it has joined, it stays."""
        self._awaited.pop(peer, None)

    def on_gave_up(self, peer: PeerId, ticket: Ticket) -> None:
        """Drop a peer that joined with this ticket and gave up, unless it joined again since."""
        entry = self._joined.get(peer)
        if entry is None or entry[0] is ticket:
            self._awaited.pop(peer, None)
            self._joined.pop(peer, None)

    def on_join(
        self, ticket: Ticket, contact: Contact, *, patience_s: float = math.inf, now: float
    ) -> Joined | None:
        """Add a peer, which waits for ``patience_s``; return the answer if it is refused."""
        refusal = self._refusal(ticket)
        if refusal is not None:
            return refusal
        peer = contact.id
        self._awaited.pop(peer, None)
        if peer in self._promised:
            self.after_s.append(max(0.0, now - self._promised[peer]))
        if peer not in self._joined:
            awaited_alone_since = max(self._due.get(peer, now), self._last_joined_at)
            self._late_s[peer] = now - awaited_alone_since
            self._last_joined_at = now
        self._joined[peer] = (ticket, contact)
        self._leaves_at[peer] = now + patience_s
        return None

    def _refusal(self, ticket: Ticket) -> Joined | None:
        mine = self.terms
        theirs = ticket.terms
        if why := wrong_numbers(ticket):
            return Joined(reason="invalid", text=why)
        if mine.key != theirs.key:
            return other_lineage(theirs.step)
        if mine != theirs:
            text = f"model or codec differs: {mine.numel} values as {mine.codec} are averaged here"
            return Joined(reason="invalid", text=text)
        return None

    def late_s(self, now: float) -> dict[PeerId, float]:
        """Return for how long each peer alone was awaited: in vain, or beyond its usual time."""
        late_s = dict(self._late_s)
        for peer, until in self._awaited.items():
            late_s[peer] = min(until, now) - self._last_joined_at
        return {peer: seconds for peer, seconds in late_s.items() if seconds > 0}

    def closes_at(self) -> float:
        """Return when to close the formation if nothing else happens; a past time means now."""
        if self.elsewhere is not None:
            return -math.inf
        latest = max(self._awaited.values(), default=-math.inf)
        return min(latest, self._quorum_leaves_at(), self.opened_at + self.settings.max_window_s)

    def _quorum_leaves_at(self) -> float:
        """Return when the first peer of a quorum leaves, but not before the usual time; infinite without a quorum.

        The organizer may have more patience with a late candidate than those that have joined have with the organizer.
        """
        if 2 * len(self._joined) <= len(self.candidates) + 1:
            return math.inf
        leaves_at = min(self._leaves_at[peer] for peer in self._joined)
        return max(leaves_at, self.opened_at + self.usual_s)

    def form(self, seed: bytes, strategy: Strategy) -> Group:
        """Return the group of all joined peers; a trainer that is alone needs no assistant.

        Raises ValueError without a trainer or a reducer, or with fewer peers than a fixed size.
        """
        size = self.settings.size
        entries = sorted(self._joined.items())[:size]
        require(len(entries) >= (size or 0), f"{len(entries)} of {size} joined")
        trainers = [(peer, entry) for peer, entry in entries if not entry[0].assists]
        require(trainers, "no trainer has joined")
        if len(trainers) == 1:
            entries = trainers
        tickets = [ticket for _, (ticket, _) in entries]
        plan = SharePlan((1.0,)) if len(trainers) == 1 else strategy(tickets)
        bounds = bounded_weights(tickets, self.settings.heaviest)
        members = []
        for (peer, (ticket, contact)), (weight, samples), share in zip(
            entries, bounds, plan.shares, strict=True
        ):
            offer = offer_of(ticket)
            members.append(GroupMember(peer, contact.addresses, weight, share, *offer, samples=samples))
        predicted_s = plan.averaging_s or None
        group = Group(seed, self.terms, tuple(members), predicted_s, plan.explanation, plan.bottleneck)
        # As its members decode it: a weight may be an int, and all must compute the same round id.
        group = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=Group)
        group.check()
        return group


def other_lineage(step: int) -> Joined:
    return Joined(reason="resync", text=f"step {step} here is of another lineage: load the state from a peer")
