"""The pure core of a peer that forms groups for those that join it, and that others call to their rounds.

The first peer that joins opens a formation. Its organizer calls all candidates, and waits for each as long as that one
has promised and its standing allows. The formation closes when no peer is awaited any more, or ends at once when
the organizer hears of the step's group, or of an organizer of a better rank: all that came are sent there.

Every member of a group answers later calls and tickets with it, so that it survives its organizer. Only members
pass a group on, or it would circulate for ever, and no longer once the swarm did not follow it.
"""

import hashlib
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from colab_swarm.averaging.formation import GroupFormation, other_lineage
from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    Joined,
    JoinEta,
    JoinRound,
    RoundTerms,
    Strategy,
    rank,
)
from colab_swarm.averaging.memory import KEPT_ROUNDS, Contacts, RoundMemory, SwarmView
from colab_swarm.averaging.search import Search, check_group
from colab_swarm.averaging.standing import AWAKE_S, BURST_S, PART
from colab_swarm.net.peers import Contact, PeerId, Role, remember

Organized: TypeAlias = Group | Contact | None
"""What a formation ends with: the group, another organizer, or nothing."""


@dataclass(frozen=True)
class RoundInvitation:
    """A call to a candidate of a formation."""

    peer: PeerId
    called_at: float
    # Whether there was a link: else the time of the answer says nothing about the peer.
    linked: bool
    # An answer takes this long, usually.
    usual_s: float


class Organizer:
    """Forms groups among the peers of one collaboration.

    Its methods take this peer's last ``search``: a peer defers to the organizers that it trusts, and says whom it asks.

    Attributes:
        formations: those that are open, by step and lineage. `on_join` opens one, `close` removes it.
    """

    def __init__(
        self,
        peers: Contacts,
        swarm: SwarmView,
        memory: RoundMemory,
        settings: GroupFormationSettings,
        strategy: Strategy,
    ) -> None:
        self.formations: dict[tuple[int, bytes], GroupFormation] = {}
        self._peers = peers
        self._swarm = swarm
        self._memory = memory
        self._settings = settings
        self._strategy = strategy
        # Callers of the rounds that this peer joins, by step and lineage. `_take_call` adds them.
        self._callers: dict[tuple[int, bytes], set[PeerId]] = {}

    # As one that is called.

    def on_call(self, caller: PeerId, terms: RoundTerms, search: Search, now: float) -> JoinEta:
        """Answer a peer that organizes a round: with its group if there was one, or with when this peer comes."""
        group = self._group_of(terms, now)
        if group is not None:
            return JoinEta(None, group)
        ready_in_s = self._take_call(caller, terms, search, now)
        asked = None if search.asked is None else search.asked.organizer
        return JoinEta(ready_in_s, waits_for=asked)

    def callers_of(self, key: tuple[int, bytes]) -> set[PeerId]:
        return self._callers.get(key, set())

    def likely(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return the callers of this round and the members of the step before: records may be late."""
        return self._memory.members_of(step - 1) | self.callers_of((step, lineage))

    def _group_of(self, terms: RoundTerms, now: float) -> Group | None:
        group = self._memory.group_of(*terms.key, now)
        if group is None or not self._swarm.stands(*terms.key):
            return None
        return group

    def _take_call(self, caller: PeerId, terms: RoundTerms, search: Search, now: float) -> float | None:
        """Note a caller, and give way to it if it outranks this peer's own formation.

        Return the seconds until this peer can join the caller, or None if it will not come.
        """
        ready_in_s = self._swarm.on_called(terms, caller)
        if ready_in_s is None:
            return None
        remember(self._callers, terms.key, self.callers_of(terms.key) | {caller}, KEPT_ROUNDS)
        formation = self.formations.get(terms.key)
        if formation is not None and search.candidates.may_organize(caller, now):
            # This peer organizes because it did not know the caller yet.
            self._defer(formation, caller)
        return search.on_called(caller, ready_in_s, now)

    # As one that others join.

    def on_join(
        self, peer: PeerId, role: Role, message: JoinRound, search: Search, now: float
    ) -> Joined | None:
        """Take a ticket. Return the answer, or None: the peer waits for the formation of its round, which is open."""
        ticket = message.ticket
        if message.contact.id != peer:
            return Joined(reason="invalid", text="a ticket is personal")
        if ticket.weight != 0 and role < Role.WORKER:
            return Joined(reason="invalid", text="only a worker may contribute: ask for another invitation")
        if self._memory.dishonest.holds(peer, now):
            return Joined(reason="late", text="this peer was dishonest, and is left out for half an hour")
        group = self._group_of(ticket.terms, now)
        if group is not None:
            return hand_out(group, peer)
        formation = self.formations.get(ticket.terms.key)
        if formation is None:
            ready_in_s = self._take_call(peer, ticket.terms, search, now)
            if ready_in_s is None:
                # A formation of the same step is open: this peer averages, but another model state.
                parted = any(step == ticket.terms.step for step, _ in self.formations)
                if parted:
                    return other_lineage(ticket.terms.step)
                return Joined(reason="unreachable", text="not at this step")
            formation = self._open(ticket.terms, ready_in_s, now)
        refusal = formation.on_join(ticket, message.contact, patience_s=message.patience_s, now=now)
        if refusal is not None:
            formation.on_declined(peer)
        return refusal

    def _open(self, terms: RoundTerms, ready_in_s: float, now: float) -> GroupFormation:
        # Another peer may come first, with another model: its terms do not count.
        own = self._swarm.terms(*terms.key) or terms
        settings = replace(self._settings, slack_s=self._memory.lateness.seconds)
        formation = GroupFormation(own, now=now, settings=settings, usual_s=self._memory.forming.seconds)
        # A group without its organizer is of no use.
        wait_s = ready_in_s + settings.slack_s + BURST_S / PART
        formation.expect(self._peers.id, due=math.inf, until=now + wait_s)
        self.formations[terms.key] = formation
        return formation

    def on_lost(self, peer: PeerId) -> None:
        """Wait no longer for a peer whose link broke."""
        for formation in self.formations.values():
            formation.on_declined(peer)

    # As one that calls the candidates.

    def on_expected(self, formation: GroupFormation, peers: Collection[PeerId]) -> Sequence[PeerId]:
        """Return whom to call."""
        formation.candidates = [peer for peer in peers if peer != self._peers.id]
        return formation.candidates

    def invite(
        self, formation: GroupFormation, peer: PeerId, *, linked: bool, slow_s: float, now: float
    ) -> RoundInvitation:
        """Await a candidate that is called now; ``slow_s``: what its slow line may add."""
        standing = self._memory.standing
        patience_s = standing.patience_s(peer, now)
        usual_s = slow_s
        if linked and not standing.suspected(peer, now):
            usual_s += self._memory.answers.seconds
        formation.expect(peer, due=now + usual_s, until=now + usual_s + patience_s)
        return RoundInvitation(peer, now, linked, usual_s)

    def on_unreachable(self, formation: GroupFormation, peer: PeerId) -> None:
        """A candidate could not be called; one without addresses may still join by itself."""
        if self._peers.contact_of(peer).addresses:
            formation.on_declined(peer)

    def on_eta(
        self,
        formation: GroupFormation,
        invitation: RoundInvitation,
        answer: JoinEta,
        search: Search,
        now: float,
    ) -> None:
        """Take a candidate's answer: it knows the group, comes, declines, or asks a better organizer."""
        peer = invitation.peer
        group = answer.group
        if invitation.linked:
            formation.answers_s.append(now - invitation.called_at)
        if group is not None:
            try:
                # An invalid one would be passed on, and peers would leave this organizer out.
                check_group(group, self._settings.heaviest)
            except ValueError:
                formation.on_declined(peer)
                return
        formation.blamed[peer] = answer.waits_for
        if group is not None and group.terms.key == formation.terms.key:
            formation.elsewhere = group
        elif answer.ready_in_s is None or not self._believes(invitation, answer.ready_in_s, now):
            formation.on_declined(peer)
        elif not self._gives_way(formation, peer, answer.waits_for, search, now):
            formation.on_coming(peer, answer.ready_in_s, now=now)

    def _believes(self, invitation: RoundInvitation, ready_in_s: float, now: float) -> bool:
        """Return whether the credit of a peer covers its promise; NaN counts as now."""
        credit_s = self._memory.standing.credit_s(invitation.peer)
        dishonest = self._memory.dishonest.holds(invitation.peer, now)
        return not ready_in_s > invitation.usual_s + credit_s and not dishonest

    def _gives_way(
        self, formation: GroupFormation, peer: PeerId, asked: PeerId | None, search: Search, now: float
    ) -> bool:
        """Send all that came to a candidate of a better rank, or to the better organizer that it has asked.

        Return whether there is one. Without following a trusted candidate, this peer and that one would part.
        """
        if not search.candidates.may_organize(peer, now):
            return False
        if self._defer(formation, peer):
            return True
        if asked is None or asked == self._peers.id or asked not in search.candidates.peers:
            return False
        return search.candidates.is_usable(asked, now) and self._defer(formation, asked)

    def _defer(self, formation: GroupFormation, peer: PeerId) -> bool:
        """Send all that came to ``peer``, which has called or answered, if it outranks this one."""
        contact = self._peers.contact_of(peer)
        terms = formation.terms
        outranks = rank(terms.prefix, terms.step, [peer, self._peers.id])[0] == peer
        if not outranks or not contact.addresses:
            return False
        formation.elsewhere = contact
        return True

    # The end of a formation.

    def form(self, formation: GroupFormation, now: float) -> Group | Contact:
        """Return the group, or where to find it. Raises ValueError if these peers are none."""
        if formation.elsewhere is not None:
            return formation.elsewhere
        terms = formation.terms
        seed = f"{terms.prefix}|{terms.step}|{now}|".encode() + terms.lineage + self._peers.id
        return formation.form(hashlib.sha256(seed).digest()[:16], self._strategy)

    def close(self, formation: GroupFormation, now: float) -> None:
        """Forget the formation. Charge the peers that were late, and learn what is usual."""
        del self.formations[formation.terms.key]
        on_time = now - formation.closes_at() < AWAKE_S
        if not on_time or formation.elsewhere is not None:
            return
        me = self._peers.id
        late_s = formation.late_s(now)
        late_s.pop(me, None)
        awaited = [me, *formation.candidates]
        self._memory.standing.settle("to join a round", late_s, awaited, now, formation.blamed)
        # The median peer's times, of each round: a few liars do not set what is usual.
        if formation.answers_s:
            self._memory.answers.learn(statistics.median_low(formation.answers_s))
        if formation.after_s:
            self._memory.lateness.learn(statistics.median_low(formation.after_s))

    def on_group(self, group: Group, now: float) -> bool:
        """Take a group that this peer found or formed; return whether it is a member, and knows that it stands."""
        if group.index_of(self._peers.id) is None:
            return False
        formation = self.formations.get(group.terms.key)
        if formation is not None:
            formation.elsewhere = group
        self._memory.keep(group, now)
        return True


def hand_out(organized: Organized, peer: PeerId) -> Joined:
    """Return the answer to a peer that waited for a formation."""
    if organized is None:
        return Joined(reason="unreachable", text="no peer here can reduce")
    if isinstance(organized, Contact):
        return Joined(organizer=organized)
    if organized.index_of(peer) is None:
        step = organized.terms.step
        return Joined(reason="late", text=f"the group of step {step} was formed without you")
    return Joined(organized)
