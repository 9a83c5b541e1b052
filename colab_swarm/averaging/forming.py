"""The pure core of an organizer: which peers stand at it, whose state counts, and the group once the batch is full.

A peer *stands at* an organizer while its stream to the organizer is open. All these peers become members of the next
group. Members that *hold* the state of the branch (its step and lineage) contribute by their tickets. The other members
*follow*: they take part with weight 0. `Batch` decides which peer computes how many samples.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from colab_swarm.averaging.grants import Batch, Participant
from colab_swarm.averaging.group import (
    MAX_TEXT,
    Attend,
    Group,
    GroupMember,
    RoundTerms,
    StepReport,
    Strategy,
    Ticket,
    offer_of,
    wrong_numbers,
    wrong_terms,
)
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import MAX_ADDRESSES, Contact, PeerId

# In target batches: a report of a larger micro-batch, or of more samples beyond a grant, is a mistake or a lie.
MOST_TARGETS = 100.0


def branch_of(
    states: Mapping[PeerId, tuple[int, bytes]], first: Callable[[PeerId], bool]
) -> tuple[int, bytes]:
    """Return the highest step that at least half of the peers have reached, and the lineage most common at this step.

    If lineages are equally common, the lineage of a peer for which ``first(peer)`` is true wins. If there is no such
    peer, the lineage of the peer with the smallest id wins.
    """
    steps = sorted((step for step, _ in states.values()), reverse=True)
    step = steps[(len(steps) - 1) // 2]
    votes = Counter(lineage for reached, lineage in states.values() if reached == step)
    holders = [peer for peer, (reached, _) in states.items() if reached == step]
    leader = min(holders, key=lambda peer: (-votes[states[peer][1]], not first(peer), peer))
    return step, states[leader][1]


def order_of(group_key: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """Return the order in which peers succeed one another as organizer after a group; it is equal at all peers."""
    return sorted(set(peers), key=lambda peer: hashlib.sha256(group_key + peer).digest())


def elect(
    tickets: Mapping[PeerId, Ticket], agree: Callable[[Ticket, Ticket], bool], first: PeerId
) -> tuple[Ticket | None, tuple[int, ...]]:
    """Return the witness, a ticket with which the tickets of most peers agree, and the indices of these peers.

    `elect` chooses the largest set of peers with equal learning rates, and within it the largest set with equal
    sketches. Of two sets of equal size, a set with a sketch wins, then a set in which a peer reports no change outside
    a step, then the set with the peer ``first``. ``agree`` compares two tickets; it compares their sketches only if
    both have one. Without two tickets that have a weight and rates, the witness is None.
    """
    shown = {peer: ticket for peer, ticket in tickets.items() if ticket.weight and ticket.rates}
    if len(shown) < 2:
        return None, ()

    def rank(peers: list[PeerId]) -> tuple[object, ...]:
        has_sketch = any(shown[peer].sketch for peer in peers)
        is_changed = all(shown[peer].changed for peer in peers)
        return -len(peers), not has_sketch, is_changed, first not in peers, min(peers)

    bare = {peer: msgspec.structs.replace(ticket, sketch=()) for peer, ticket in shown.items()}
    best = min(_alike(bare, agree), key=rank)
    sketched = {peer: shown[peer] for peer in best if shown[peer].sketch}
    if sketched:
        best = min(_alike(sketched, agree), key=rank)
    witness = min(best, key=lambda peer: (shown[peer].changed, peer))
    order = list(tickets)
    return msgspec.structs.replace(shown[witness], unused=b""), tuple(map(order.index, best))


def _alike(tickets: Mapping[PeerId, Ticket], agree: Callable[[Ticket, Ticket], bool]) -> list[list[PeerId]]:
    """Divide the peers into sets whose tickets agree."""
    classes: list[list[PeerId]] = []
    for peer, ticket in tickets.items():
        for peers in classes:
            if agree(tickets[peers[0]], ticket):
                peers.append(peer)
                break
        else:
            classes.append([peer])
    return classes


def holders_of(group: Group) -> set[PeerId]:
    """Return the members that hold the parameters of the branch; the other members follow."""
    return {group.members[index].id for index in group.holders}


def step_after(group: Group) -> int:
    """Return the step that the members are at after a group's round; without a weight, the round takes no step."""
    return group.terms.step + any(member.weight for member in group.members)


@dataclass(frozen=True)
class FormationSettings:
    """The settings of a collaboration, on which all its peers agree.

    Attributes:
        terms: the terms of its rounds; the organizer fills in step and lineage from the branch.
        target: number of samples in a step.
        strategy: decides how much each member reduces.
        least: minimum number of members before the first grant.
        agree: returns True if two tickets show equal learning rates and equal states.
        window_s: time from a meeting's first ticket until the meeting closes, in seconds. A meeting has a single group;
            None stands for a training, which has one group per step.
        size: exact number of members of a meeting; None for any number.
        awaited: if there is no size, the meeting closes as soon as these peers have a ticket.
    """

    terms: RoundTerms
    target: float
    strategy: Strategy
    least: int = 1
    agree: Callable[[Ticket, Ticket], bool] = lambda one, other: True
    window_s: float | None = None
    size: int | None = None
    awaited: frozenset[PeerId] = frozenset()


@dataclass
class Action:
    """What the organizer does now: it sends these grants or the group, and looks again at ``look_at``."""

    grants: dict[PeerId, float] = field(default_factory=dict)
    group: Group | None = None
    look_at: float = math.inf


class Formation:
    """Forms the groups of an organizer, step after step; ``now`` is monotonic seconds.

    Attributes:
        key: id of the last group; empty at the beginning.
        contacts: contacts of the peers that stand here.
        batch: the batch of the present step.
        awaited: peers for which a meeting waits; `Rendezvous` removes a peer whose link is lost.
        next_step: step of the next group. It is 0 before the first group here, because a late joiner may then load
            the state of any step.
        missing: live holders of the last group that do not stand here, and may already have a group of this step.
            `Rendezvous` asks each of them, and then removes it. No group is formed until ``missing`` is empty.
    """

    def __init__(
        self,
        settings: FormationSettings,
        me: PeerId,
        last: Group | None,
        patience: Patience[PeerId],
        now: float,
    ) -> None:
        self.settings = settings
        self.key = last.round_id if last else b""
        self.contacts: dict[PeerId, Contact] = {}
        self.missing: Collection[PeerId] = ()
        self.awaited = set(settings.awaited)
        self._closes_at = math.inf  # when a meeting closes
        self._me = me
        self._patience = patience
        self._assistants: dict[PeerId, Ticket] = {}
        self._before = holders_of(last) if last else set()
        self._before_state = last.terms.key if last else None  # their state until their round is over
        self.next_step = step_after(last) if last else 0
        # Members of the last group: their reports that name an older group come late, and are ignored.
        self._told: set[PeerId] = set()
        self.batch = Batch(settings.target, self.key, patience, now)
        if last is not None:
            granted = {
                member.id: Participant(member.id, samples=grant)
                for member, grant in zip(last.members, last.grants, strict=True)
                if grant
            }
            self._carry_on(last, granted, now)

    # What peers say.

    def on_attend(self, peer: PeerId, message: Attend) -> str:
        """Let a peer stand here; return an empty text, or the reason for which the peer is refused."""
        addresses = message.contact.addresses
        if message.contact.id != peer:
            return "a contact is personal"
        if len(addresses) > MAX_ADDRESSES or any(len(address) > MAX_TEXT for address in addresses):
            return "too many addresses for a group"
        terms = self.settings.terms
        if not terms.numel and message.assistant is None:
            problem = wrong_terms(message.terms, message.target)
            if problem:
                return problem
            # An assistant knows no model until a trainer comes.
            terms = message.terms
            self.settings = replace(self.settings, terms=terms, target=message.target)
            self.batch.target = message.target
        if message.assistant is not None:
            if message.assistant.weight or message.assistant.samples:
                return "an assistant contributes nothing"
            self._assistants[peer] = message.assistant
        elif (message.terms, message.target) != (terms, self.settings.target):
            return "it trains another model, or with other settings"
        self.contacts[peer] = message.contact
        return ""

    def on_report(self, peer: PeerId, report: StepReport, now: float) -> str:
        """Take a report; return why it is refused, or an empty text."""
        if peer in self._told and report.key != self.key:
            return ""  # it belongs to the step before
        ticket = report.ticket
        one = self.batch.participants.get(peer)
        granted = one.granted if one else 0.0
        samples = max(report.counted, report.granted, ticket.samples if ticket else 0.0)
        if max(samples - granted, report.batch_samples) > MOST_TARGETS * self.settings.target:
            samples = max(samples, report.batch_samples)
            return f"it counts {samples:g} samples of {self.settings.target:g}"
        problem = wrong_numbers(ticket) if ticket else ""
        if problem:
            return problem
        self.batch.on_report(peer, report, now)
        if report.averages:
            self.batch.excuse([peer], now)
        self._judge()
        return ""

    def on_lost(self, peer: PeerId) -> None:
        """Forget a peer whose stream has ended."""
        self.batch.on_lost(peer)
        self.contacts.pop(peer, None)
        self._assistants.pop(peer, None)
        self._told.discard(peer)
        self._judge()

    def on_linked(self, linked: Collection[PeerId]) -> None:
        """Forget members of the last group that neither stand here nor have a link to this peer."""
        for peer in self.batch.participants.keys() - self.contacts.keys() - set(linked):
            self.batch.on_lost(peer)

    def granted_before(self, peer: PeerId) -> float | None:
        """Return the grant that the last group gave a peer, while the peer has not reported here; else None."""
        one = self.batch.participants.get(peer)
        return one.granted if one is not None and one.report is None else None

    def on_left(self, peer: PeerId) -> None:
        """Forget a peer that leaves; it no longer counts as a live member of the last group."""
        self.on_lost(peer)
        self._before.discard(peer)

    @property
    def branch(self) -> tuple[int, bytes] | None:
        """Step and lineage of the branch, whose state counts here; None if no peer here has a state."""
        states = {}
        for peer, one in self.batch.participants.items():
            report = one.report
            if report is None or report.step < 0 or self._averages(peer, report) or self._follows(report):
                continue
            states[peer] = report.step, report.lineage
        if not states:
            return None
        return branch_of(states, self._organized)

    @property
    def holders(self) -> list[Participant]:
        """The peers here that hold the state of the branch."""
        return [one for one in self.batch.participants.values() if one.holds and one.report]

    def _averages(self, peer: PeerId, report: StepReport) -> bool:
        """Return True if a holder of the last group still has that group's state, because its round is not over."""
        state = report.step, report.lineage
        return report.ticket is None and peer in self._before and state == self._before_state

    def _follows(self, report: StepReport) -> bool:
        """Return True if a peer only follows, because its trainer is idle: it keeps the means, its state is older."""
        return (
            self._before_state is not None and report.key == self.key and report.step < self._before_state[0]
        )

    def _organized(self, peer: PeerId) -> bool:
        return peer == self._me

    def _judge(self) -> None:
        """Note for each peer whether it holds the state of the branch."""
        branch = self.branch
        for peer, one in self.batch.participants.items():
            if one.report is not None:
                state = one.report.step, one.report.lineage
                one.holds = state == branch or self._averages(peer, one.report)

    # What comes of it.

    def next_action(self, now: float, live: Collection[PeerId]) -> Action:
        """Return the next action; ``live`` are the peers that are believed to be alive, here or elsewhere."""
        if self.settings.window_s is not None:
            return self._meet(now, self.settings.window_s)
        if not self.key and len(self.holders) < self.settings.least:
            return Action()
        action = Action(self.batch.next_grants(now), look_at=self.batch.look_at(now))
        if not action.grants and self.batch.full and not self.missing and self._has_quorum(live):
            action.group = self._form(now)
        return action

    def _meet(self, now: float, window_s: float) -> Action:
        """Close a meeting when all awaited peers have a ticket, or at its closing time."""
        here = self._ready()
        if not here:
            return Action()
        self._closes_at = min(self._closes_at, now + window_s)
        if self.settings.size is not None:
            complete = len(here) == self.settings.size
        else:
            complete = bool(self.awaited) and self.awaited.issubset(here)
        if complete or now >= self._closes_at:
            return Action(group=self._form(now))
        return Action(look_at=self._closes_at)

    def _ready(self) -> list[PeerId]:
        """Return the peers that have a ticket, in the order in which they came, at most ``settings.size`` peers."""
        ready = []
        for peer in self.contacts:
            one = self.batch.participants.get(peer)
            if one is not None and one.ready:
                ready.append(peer)
        return ready[: self.settings.size]

    def _has_quorum(self, live: Collection[PeerId]) -> bool:
        """Return True if more than half of the live holders of the last group stand here."""
        here = self._before & self.contacts.keys()
        alive = here | self._before.intersection(live)
        return 2 * len(here) > len(alive) or not alive

    def _form(self, now: float) -> Group:
        step, lineage = self.branch or (0, b"")
        terms = msgspec.structs.replace(self.settings.terms, step=step, lineage=lineage)
        tickets: dict[PeerId, Ticket] = {}
        members_here: Iterable[PeerId] = self.contacts
        if self.settings.window_s is not None:
            members_here = self._ready()
        for peer in sorted(members_here):
            contact = self.contacts[peer]
            one = self.batch.participants.get(peer)
            ticket = Ticket(terms, 0.0, reduces=False)
            if one is not None and one.ready and one.report is not None and one.report.ticket is not None:
                ticket = one.report.ticket
            elif peer in self._assistants:
                ticket = self._assistants[peer]
            tickets[peer] = msgspec.structs.replace(
                ticket, terms=terms, reduces=ticket.reduces and bool(contact.addresses)
            )
        trainers = [peer for peer, ticket in tickets.items() if not ticket.assists]
        if len(trainers) == 1:
            # A single trainer needs no reducer, and no other member must reach it.
            for peer, ticket in tickets.items():
                tickets[peer] = msgspec.structs.replace(ticket, reduces=not ticket.assists)
        elif not any(ticket.reduces for ticket in tickets.values()):
            # All peers that stand here can reach the organizer, so it reduces.
            tickets[self._me] = msgspec.structs.replace(tickets[self._me], reduces=True)
        plan = self.settings.strategy(list(tickets.values()))
        grants = self.batch.next_shares(now)
        members = []
        holders = []
        for index, (peer, ticket) in enumerate(tickets.items()):
            offer = offer_of(ticket)
            contact = self.contacts[peer]
            members.append(
                GroupMember(
                    peer, contact.addresses, ticket.weight, plan.shares[index], *offer, samples=ticket.samples
                )
            )
            one = self.batch.participants.get(peer)
            if one is not None and one.holds:
                holders.append(index)
        order = list(tickets)
        late = tuple(
            (order.index(peer), seconds) for peer, seconds in self.batch.late.items() if peer in tickets
        )
        witness, agreeing = elect(tickets, self.settings.agree, self._me)
        seed = hashlib.sha256(repr((now, self._me, self.key)).encode()).digest()[:16]
        return Group(
            seed,
            terms,
            tuple(members),
            plan.averaging_s or None,
            plan.explanation,
            plan.bottleneck,
            grants=tuple(grants.get(peer, 0.0) for peer in tickets),
            holders=tuple(holders),
            organizer=self._next_organizer(),
            late=late,
            witness=witness,
            agreeing=agreeing,
        )

    def _next_organizer(self) -> PeerId:
        """Return this peer, if it can be dialled and is at least half as fast as the fastest other such holder.

        Else return that holder. If this peer cannot be dialled and there is no such holder, return an assistant.
        """
        others = []
        for peer, one in self.batch.participants.items():
            if peer != self._me and one.holds and one.seconds and self.contacts[peer].addresses:
                others.append(one)
        best = min(others, key=lambda one: one.seconds, default=None)
        contact = self.contacts.get(self._me)
        if contact is not None and not contact.addresses:
            assistants = [peer for peer in self._assistants if self.contacts[peer].addresses]
            return best.peer if best else min(assistants, default=self._me)
        own = self.batch.participants.get(self._me)
        if best is None or own is None or not own.seconds:
            return self._me
        return best.peer if 2 * best.seconds < own.seconds else self._me

    def on_group(self, group: Group, now: float) -> None:
        """Begin the next step: all peers that stand here stay, with the grants of the group."""
        before = self.batch.participants
        self.key = group.round_id
        self._before = holders_of(group)
        self._before_state = group.terms.key
        self.next_step = step_after(group)
        self._told = {member.id for member in group.members}
        self.batch = Batch(self.settings.target, self.key, self._patience, now)
        self._carry_on(group, before, now)

    def _carry_on(self, group: Group, before: Mapping[PeerId, Participant], now: float) -> None:
        """Await the members of a group, with the group's grants and with their participants of the step ``before``."""
        for member, granted in zip(group.members, group.grants, strict=True):
            if member.id in before:
                one = before[member.id]
                late_at = one.late_at
                if one.ready or now < late_at:
                    late_at = now + self.batch.limit_s(one) + (group.predicted_s or 0.0)
                self.batch.participants[member.id] = Participant(
                    member.id, granted, granted, None, one.holds, late_at, one.seconds, one.samples, now
                )
