"""The pure core of a peer that looks for the group of a step: whom it asks next, and what an answer means.

A search goes over the candidates in their rank, again and again. Each pass asks one after the other, itself where
its own rank comes. An answer gives the group, refuses this peer, or sends it on to an organizer of a better rank.
Redirects only lead up the rank, so they end. A peer that was asked in vain is passed over for `PASSED_S`.

The driver calls `Search.begin` for each attempt at the step, does what `Search.next_ask` says, and reports what came of
it by one of ``on_answer``, ``on_timeout``, ``on_failed`` and ``on_invalid``. It drops the stream of a remote organizer
at `Question.silent_at`.
"""

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass

from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    Joined,
    JoinEta,
    RoundRefused,
    Ticket,
    bounded_weights,
    offer_of,
    rank,
)
from colab_swarm.averaging.memory import Contacts, RoundMemory, SwarmView
from colab_swarm.averaging.standing import AWAKE_S, CHAINED
from colab_swarm.averaging.strategy import follows
from colab_swarm.errors import PeerError, require
from colab_swarm.events import PeerRefused
from colab_swarm.net.peers import Contact, PeerId, short

logger = logging.getLogger(__name__)

# An organizer sends one to each peer that waits for its group.
HEARTBEAT_S = 0.5
# The price of an answer without a group: the records are read, and peers called, once more.
IN_VAIN_S = 0.25
# An honest refusal of one step ends with the round that runs without this peer.
PASSED_S = 10.0
_RETRY_S = 0.25
# What an answer takes at least until it is here.
_ON_THE_WAY_S = 0.1


@dataclass
class Question:
    """An organizer that this peer asks for the group of a step; it may be this peer itself.

    The search makes one in `Search.next_ask`. While the driver waits for the answer, the question takes what arrives.
    """

    organizer: PeerId
    asked_at: float
    # An answer usually takes this long. Beyond it this peer waits for ``patience_s`` in one silence.
    usual_s: float
    patience_s: float
    # Where the organizer is, if another one sent this peer there.
    contact: Contact | None = None
    # When the organizer has been silent for too long; None while no heartbeat is due.
    # `expect_heartbeat` sets it, `hurry` brings it forward, and a message resets it.
    silent_at: float | None = None

    @property
    def limit_s(self) -> float:
        """How long to wait for the group, heartbeats or not: the organizer may wait for another peer itself."""
        return self.usual_s + CHAINED * self.patience_s

    def left_s(self, now: float) -> float:
        """Return for how long an organizer with a quorum may still wait: no longer than this peer for another."""
        return self.asked_at + self.usual_s + self.patience_s - now - _ON_THE_WAY_S

    def slept(self, now: float) -> bool:
        """Return whether this peer's own timer was late: it slept itself."""
        return now >= self.asked_at + self.limit_s + AWAKE_S

    def expect_heartbeat(self, slow_s: float, callers: Collection[PeerId], now: float) -> float:
        """Return when to give up an organizer that stays silent.

        Args:
            slow_s: what a slow line may add.
            callers: peers that called this one to the same round: the organizer was silent to them as well.
        """
        silence_s = 2 * HEARTBEAT_S + slow_s
        if not set(callers) - {self.organizer}:
            silence_s += self.patience_s
        self.silent_at = now + silence_s
        return self.silent_at

    def hurry(self, caller: PeerId, ready_in_s: float, now: float) -> float:
        """Return when this peer can join a caller, which it can in ``ready_in_s`` where it asks no other.

        The organizer was silent to the caller as well, so it has two heartbeats left.
        """
        if self.silent_at is None or self.silent_at <= now or self.organizer == caller:
            return ready_in_s
        self.silent_at = min(self.silent_at, now + 2 * HEARTBEAT_S)
        return max(ready_in_s, self.silent_at - now)


@dataclass(frozen=True)
class Pause:
    """All were asked in vain: wait before the next pass."""

    seconds: float


@dataclass
class _Attempt:
    """What one attempt at the step has done so far. Only the search reads and changes it."""

    ticket: Ticket
    # Peers that compute for this step: a group without most of the live ones is refused once.
    awaited: Collection[PeerId]
    began_at: float
    # The last answer of an organizer other than this peer, or the beginning.
    answered_at: float
    # Organizers left in this pass, best first; None before a pass.
    left: list[PeerId] | None = None
    # The organizer that the last answer named, to be asked before those left.
    redirect: Contact | None = None


class Candidates:
    """The peers that may organize the round of a step, and how far this peer trusts them."""

    def __init__(self, me: PeerId, memory: RoundMemory) -> None:
        self._me = me
        self._memory = memory
        # As the owner named them at the beginning of the last attempt. `Search.begin` writes it. They stay when the
        # attempt is over, because this peer's own organizer asks about them too.
        self.peers: Collection[PeerId] = ()
        # Organizers that were asked in vain, and until when they are passed over. `pass_over` writes it.
        self._passed: dict[PeerId, float] = {}

    def may_organize(self, peer: PeerId, now: float) -> bool:
        """Return whether this peer would ask ``peer`` by itself: its delays have cost no more than others'."""
        others = {*self.peers, peer} - {self._me}
        return self.is_usable(peer, now) and peer in self._memory.standing.trusted(others, now)

    def is_usable(self, peer: PeerId, now: float) -> bool:
        """Return whether this peer would ask ``peer`` if one that it trusts sent it there."""
        if now < self._passed.get(peer, now):
            return False
        dishonest = self._memory.dishonest.holds(peer, now)
        return not dishonest and not self._memory.standing.suspected(peer, now)

    def pass_over(self, question: Question, now: float, cost_s: float = IN_VAIN_S) -> None:
        """Do not ask this organizer for `PASSED_S`, and charge it for the lost time."""
        if question.organizer != self._me:
            self._passed[question.organizer] = now + PASSED_S
        self.charge(question, now, cost_s)

    def charge(self, question: Question, now: float, cost_s: float) -> None:
        """Charge an organizer for time beyond the usual, whomever it waited for itself; less than 0 is free."""
        organizer = question.organizer
        if organizer != self._me:
            awaited = {self._me, organizer, *self.peers}
            self._memory.standing.settle("to organize a round", {organizer: cost_s}, awaited, now)

    def leave_out(self, organizer: PeerId, error: ValueError, now: float) -> None:
        left_out_s = self._memory.dishonest.fail(organizer, now) or 0.0
        why = f"{error}; no round with it for {left_out_s / 60:.0f} min"
        self._memory.standing.events.emit(PeerRefused(now, organizer.hex(), "a group", why))


class Search:
    """One peer's search for the group of a step, over all attempts.

    Args:
        key: step and lineage; None: this peer has not looked for any group.

    Attributes:
        asked: the open question, None between two. `next_ask` sets it; what came of it, or `end`, resets it.
    """

    def __init__(
        self,
        peers: Contacts,
        swarm: SwarmView,
        memory: RoundMemory,
        settings: GroupFormationSettings,
        key: tuple[int, bytes] | None = None,
    ) -> None:
        self.key = key
        self.candidates = Candidates(peers.id, memory)
        self.asked: Question | None = None
        self._peers = peers
        self._swarm = swarm
        self._memory = memory
        self._settings = settings
        # The last attempt; `begin` replaces it.
        self._attempt: _Attempt | None = None
        # Organizers that refused this peer once; a second refusal passes them over. `on_answer` adds them.
        self._refusers: set[PeerId] = set()
        # Peers that answered a call for this step with a time; `on_eta` adds them.
        self._promised: set[PeerId] = set()
        # A group of a minority was refused. `_check_quorum` sets it, and then accepts the next one.
        self._refused_minority = False

    # An attempt.

    def begin(
        self, ticket: Ticket, candidates: Collection[PeerId], awaited: Collection[PeerId], now: float
    ) -> None:
        """Begin an attempt; what earlier ones at this step have learned still counts."""
        self.candidates.peers = candidates
        self._attempt = _Attempt(ticket, awaited, now, now)

    def next_ask(self, now: float) -> Question | Pause:
        """Return whom to ask now, or how long to wait.

        Raises RoundRefused if peers have answered for the whole window, and none gave a group. They are at
        another step, or none can reduce: the caller reads the records again.
        """
        attempt = self._current()
        if attempt.redirect is not None:
            contact = attempt.redirect
            attempt.redirect = None
            return self._question(contact.id, now, contact)
        if attempt.left is None:
            attempt.left = self._order(attempt, now)
        if attempt.left:
            return self._question(attempt.left.pop(0), now)
        tried_s = now - attempt.began_at
        if attempt.answered_at > attempt.began_at and tried_s > self._settings.window_s:
            step = attempt.ticket.terms.step
            raise RoundRefused("unreachable", f"no group for step {step} can be formed now")
        attempt.left = None
        return Pause(_RETRY_S)

    def end(self) -> None:
        """End the attempt, whether a question is open or not."""
        self.asked = None

    def _current(self) -> _Attempt:
        assert self._attempt is not None
        return self._attempt

    def _order(self, attempt: _Attempt, now: float) -> list[PeerId]:
        """Return whom to ask in one pass.

        A peer without addresses organizes last, and only if no other can or none has answered for the window. It asks
        one that has kept it waiting too, if there is no other: alone it would train for itself.
        """
        me = self._peers.contact
        terms = attempt.ticket.terms
        usable = self._usable(now)
        reachable = [peer for peer in usable if self.candidates.may_organize(peer, now)]
        if not reachable and not me.addresses:
            reachable = usable
        if me.addresses:
            return rank(terms.prefix, terms.step, [*reachable, me.id])
        order = rank(terms.prefix, terms.step, reachable)
        alone = now - attempt.answered_at > self._settings.window_s
        if alone or not reachable:
            order.append(me.id)
        return order

    def _usable(self, now: float) -> list[PeerId]:
        usable = []
        for peer in self.candidates.peers:
            if peer == self._peers.id or not self.candidates.is_usable(peer, now):
                continue
            if self._peers.contact_of(peer).addresses:
                usable.append(peer)
        return usable

    def _question(self, organizer: PeerId, now: float, contact: Contact | None = None) -> Question:
        believed_s = max(map(self._swarm.believed_s, self.candidates.peers), default=math.inf)
        claimed_s = min(believed_s + self._memory.lateness.seconds, self._settings.max_window_s)
        # What the others claim counts until this peer has measured it. Two micro-batches of its own are usual, too.
        measured_s = max(self._memory.forming.seconds, self._swarm.believed_s(self._peers.id))
        usual_s = min(claimed_s + self._memory.answers.seconds, measured_s)
        patience_s = self._memory.standing.patience_s(organizer, now)
        self.asked = Question(organizer, now, usual_s, patience_s, contact)
        return self.asked

    # What others say meanwhile.

    def on_called(self, caller: PeerId, ready_in_s: float, now: float) -> float:
        """Return when this peer can join a caller, which it can in ``ready_in_s`` where it asks no other."""
        if self.asked is None:
            return ready_in_s
        return self.asked.hurry(caller, ready_in_s, now)

    def on_eta(self, peer: PeerId, key: tuple[int, bytes], answer: JoinEta) -> None:
        """Take the answer to a call, whether this search or the organizer made it."""
        if answer.ready_in_s is not None and key == self.key:
            self._promised.add(peer)

    # What came of the question.

    def on_answer(self, joined: Joined, now: float) -> Group | None:
        """Return the group if the answer has one that this peer takes. Raises RoundRefused if it is refused."""
        attempt = self._current()
        question = self._close()
        organizer = question.organizer
        group = joined.group
        if group is not None:
            try:
                check_group(group, self._settings.heaviest)
            except ValueError as error:
                self.candidates.leave_out(organizer, error, now)
                return None
        self._settle(question, joined, now)
        if organizer != self._peers.id or joined.reason is not None:
            attempt.answered_at = now
        refusal = self._refusal(joined, attempt.ticket)
        if refusal is not None:
            # This peer takes no part, so it passes the group on to no other either.
            self._memory.forget(*attempt.ticket.terms.key)
            if organizer in self._refusers:
                self.candidates.pass_over(question, now)
            self._refusers.add(organizer)
            raise RoundRefused(refusal.reason, f"{short(organizer)}: {refusal}")
        if group is None:
            self._follow(question, joined.organizer, now)
        else:
            self._check_quorum(question, group, now)
        return group

    def _settle(self, question: Question, joined: Joined, now: float) -> None:
        """Charge the organizer for an answer that took long; learn what is usual from a group."""
        took_s = now - question.asked_at
        usual_s = question.usual_s
        if joined.group is None and joined.organizer is None:
            # Nothing came of the wait, which should have ended at once.
            usual_s = self._memory.answers.seconds
        is_own = question.organizer == self._peers.id
        if joined.group is not None and (is_own or not question.slept(now)):
            self._memory.forming.learn(took_s)
        self.candidates.charge(question, now, took_s - usual_s)

    def on_timeout(self, now: float) -> None:
        """The organizer was silent, or did not answer within its limit."""
        question = self._close()
        step = self._current().ticket.terms.step
        logger.info("%s organizes step %d and is silent", short(question.organizer), step)
        cost_s = now - question.asked_at
        if question.slept(now):
            cost_s = 0.0
        self.candidates.pass_over(question, now, cost_s)

    def on_failed(self, error: PeerError, now: float) -> None:
        """The organizer cannot be reached, or broke off."""
        question = self._close()
        step = self._current().ticket.terms.step
        logger.debug("organizer %s of step %d failed: %s", short(question.organizer), step, error)
        self.candidates.pass_over(question, now, max(IN_VAIN_S, now - question.asked_at))

    def on_invalid(self, error: ValueError, now: float) -> None:
        """The organizer did what no honest one does."""
        self.candidates.leave_out(self._close().organizer, error, now)

    def _close(self) -> Question:
        question = self.asked
        assert question is not None
        self.asked = None
        return question

    def _refusal(self, joined: Joined, ticket: Ticket) -> RoundRefused | None:
        """Return why the answer is no good for this ticket, or None."""
        group = joined.group
        step = ticket.terms.step
        if group is None:
            # An organizer that cannot form a group now may be asked again.
            if joined.reason is None or joined.reason == "unreachable":
                return None
            return RoundRefused(joined.reason, joined.text)
        if group.index_of(self._peers.id) is None:
            return RoundRefused("late", f"the group of step {step} was formed without us")
        if not holds_ticket(group, self._peers.id, ticket):
            return RoundRefused("late", f"the group of step {step} was formed with another ticket of ours")
        if group.terms != ticket.terms:
            return RoundRefused("resync", f"the group of step {step} is of another lineage")
        return None

    def _follow(self, question: Question, other: Contact | None, now: float) -> None:
        """Take an answer without a group: it may name another organizer."""
        attempt = self._current()
        terms = attempt.ticket.terms
        organizer = question.organizer
        if other is None or other.id == self._peers.id:
            # A client is not to blame it: it may hear that no peer can reduce.
            if attempt.ticket.reduces and organizer in self._promised:
                self.candidates.pass_over(question, now)
        elif rank(terms.prefix, terms.step, [other.id, organizer])[0] == organizer:
            # Down the rank: it would send all peers round in circles.
            self.candidates.pass_over(question, now)
        elif self.candidates.is_usable(other.id, now):
            # An organizer that this peer trusts sent it there. Without following, the two would part.
            attempt.redirect = other

    def _check_quorum(self, question: Question, group: Group, now: float) -> None:
        """Refuse a group without most of the live peers once, and one that holds this peer alone each time.

        The second time the others may have stopped training, and not said so yet.
        """
        me = self._peers.id
        awaited = set(self._current().awaited)
        trainers = {member.id for member in group.members if not member.assists}
        # The records of some that came may be late. Strangers do not count: one organizer may name many.
        here = {me} | trainers & (awaited | set(self.candidates.peers))
        alive = here | (awaited - self._memory.standing.suspects(now))
        if 2 * len(here) > len(alive):
            return
        parted = len(here) == 1 and question.organizer != me
        if self._refused_minority and not parted:
            return
        self._memory.forget(*group.terms.key)
        self._refused_minority = True
        # What it took beyond the usual is charged already. An honest organizer may not train yet, so no more is.
        if parted:
            self.candidates.pass_over(question, now)
        missing = len(alive) - len(here)
        raise RoundRefused("unreachable", f"{missing} of {len(alive)} trainers are not in the group")


def check_group(group: Group, heaviest: float = math.inf) -> None:
    """Raise ValueError if no honest organizer would form this group.

    Its shares must be equal, or those of a fastest round by all tickets: a sole reducer could dictate the mean.
    """
    group.check()
    claims = [(member.weight, member.samples) for member in group.members]
    require(bounded_weights(group.members, heaviest) == claims, "a member counts far too much")
    trainers = sum(not member.assists for member in group.members)
    require(trainers > 1 or len(group.members) == 1, "a trainer that is alone needs no assistant")
    tickets = [Ticket(group.terms, member.weight, *offer_of(member)) for member in group.members]
    shares = [member.share for member in group.members]
    require(trainers < 2 or follows(tickets, shares), "its shares do not follow from its tickets")


def holds_ticket(group: Group, peer: PeerId, ticket: Ticket) -> bool:
    """Return True if the peer's entry says what its ticket said; weight and samples may be bounded."""
    entry = next(member for member in group.members if member.id == peer)
    heaviest = max(member.weight for member in group.members)
    most_samples = max(member.samples for member in group.members)
    return (
        offer_of(entry) == offer_of(ticket)
        and _is_claim(entry.weight, ticket.weight, heaviest)
        and _is_claim(entry.samples, ticket.samples, most_samples)
    )


def _is_claim(entry: float, claim: float, most: float) -> bool:
    """Return whether an entry is what a peer claimed, or the bound of the group."""
    return entry == claim or most == entry < claim
