"""Finding the group of a round: ask the organizer, or be it.

Organizers with different views are sorted out by rank: a peer that knows a live candidate before
itself redirects to it. Every member answers an organizer's call with the group, so it survives its
organizer. Only members pass a group on, or it would circulate forever, and no longer once their
round is over and the swarm did not follow it.
"""

import asyncio
import hashlib
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from colab_swarm.averaging.group import (
    Group,
    GroupFormation,
    GroupFormationSettings,
    Joined,
    JoinEta,
    JoinRound,
    RoundRefused,
    RoundTerms,
    Strategy,
    Ticket,
    bounded_weights,
    offer_of,
    rank,
    wrong_numbers,
)
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.averaging.standing import AWAKE_S, BURST_S, CHAINED, PART, Standing
from colab_swarm.averaging.strategy import adaptive_shares, follows
from colab_swarm.errors import PeerError, require
from colab_swarm.net.patience import Patience, allowance_s
from colab_swarm.net.peers import Contact, PeerId, Role, Stream, remember, short
from colab_swarm.runtime import loop_now, wait_until, wake

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Organized: TypeAlias = Group | Contact | None  # the group, another organizer, or nothing

_HEARTBEAT_S = 0.5  # of an organizer to a peer that has joined
# Of an answer to a call, and after a promise: at least, and before any is known.
_LEAST_USUAL_S = 0.1
_FIRST_USUAL_S = 2.0
IN_VAIN_S = 0.25  # what an answer without a group costs: the records are read, and peers called, once more
PASSED_S = 10.0  # an honest refusal of one step ends with the round that runs without us
_KEPT_GROUPS = 4
REMEMBERED_S = 180.0
_RETRY_S = 0.25


@dataclass
class _Search:
    """One peer's search for the group of a step, over all attempts."""

    key: tuple[int, bytes] | None = None
    candidates: Collection[PeerId] = ()
    passed: dict[PeerId, float] = field(default_factory=dict)  # organizers that it asked in vain, until when
    refusers: set[PeerId] = field(default_factory=set)  # that refused once
    promised: set[PeerId] = field(default_factory=set)  # that said to come
    few: bool = False  # a group of a minority was refused


class Matchmaker:
    """Forms groups among the peers of the collaboration ``prefix``.

    Args:
        expected: ``expected(step, lineage)``: peers believed to take part, with or without this one.
        on_called: ``on_called(terms, peer)``: seconds until this peer joins the caller, or None. Returns at once.
        believed_s: ``believed_s(peer)``: how long a peer may take until it can join a round.
        stands: ``stands(step, lineage)``: whether the swarm still follows the group that this peer had.
    """

    def __init__(
        self,
        router: PrefixRouter,
        prefix: str,
        *,
        expected: Callable[[int, bytes], Awaitable[Sequence[PeerId]]],
        on_called: Callable[[RoundTerms, PeerId], float | None],
        believed_s: Callable[[PeerId], float] = lambda peer: math.inf,
        stands: Callable[[int, bytes], bool] = lambda step, lineage: True,
        strategy: Strategy = adaptive_shares,
        settings: GroupFormationSettings | None = None,
    ) -> None:
        self._router = router
        self._peers = router.peers
        self._prefix = prefix
        self._expected = expected
        self._on_called = on_called
        self._stands = stands
        self._believed_s = believed_s
        self.standing = Standing(self._peers.id, heard_at=self._peers.read_at, events=router.events)
        self.own: Callable[[int, bytes], RoundTerms] | None = None  # else the first caller's terms
        self._strategy = strategy
        self._settings = settings or GroupFormationSettings()
        self._groups: dict[tuple[int, bytes], tuple[Group, float]] = {}  # and since when
        self._forming: dict[tuple[int, bytes], tuple[GroupFormation, asyncio.Task[_Organized]]] = {}
        self._changed = asyncio.Event()  # when a formation has changed
        self._callers: dict[tuple[int, bytes], set[PeerId]] = {}  # of rounds that this peer joins
        self._left_out = router.dishonest
        call_s = self._settings.call_timeout_s
        slack_s = self._settings.slack_s
        self._answers = Patience(_LEAST_USUAL_S, call_s, _FIRST_USUAL_S)  # to calls of linked peers
        self._lateness = Patience(_LEAST_USUAL_S, slack_s, _FIRST_USUAL_S)  # after a promise
        self._calls = set[asyncio.Task[Any]]()
        self._search = _Search()
        self._answered_at = float("-inf")  # by any organizer but this peer
        self._asked: PeerId | None = None  # an organizer, until it has answered
        self._silence: asyncio.Timeout | None = None  # of that one, which waits for its next heartbeat
        self._told: PeerId | None = None  # for whom it waits, by its last heartbeat
        self._stop_listening = self._peers.on_lost(self._on_lost)
        router.serve_stream(prefix, JoinRound, self._serve_join, Role.REDUCER)
        router.serve(prefix, RoundTerms, self._serve_call, Role.REDUCER)

    def close(self) -> None:
        self._stop_listening()
        self._router.unserve(self._prefix, JoinRound, RoundTerms)
        for task in (*self._calls, *(forming for _, forming in self._forming.values())):
            task.cancel()

    async def join(
        self,
        ticket: Ticket,
        candidates: Sequence[PeerId],
        deadline: float,
        *,
        awaited: Collection[PeerId] = (),
    ) -> Group:
        """Return the group of the ticket's step by ``deadline`` (loop time); all get the same.

        ``candidates`` are believed live; a group without most of the ``awaited`` ones among them, which
        compute for this step, is refused once. Raises RoundRefused if this peer cannot join.
        """
        if why := wrong_numbers(ticket):
            raise RoundRefused("invalid", why)
        key = ticket.terms.key
        self.forget(*key)  # a second call needs another group
        if self._search.key != key:
            self._search = _Search(key)
        self._search.candidates = candidates
        began = loop_now()
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    alone = loop_now() - max(began, self._answered_at) > self._settings.window_s
                    for asked in self._rank(ticket.terms.step, candidates, alone=alone):
                        if (found := await self._ask(asked, ticket)) is not None:
                            self._check_quorum(*found, awaited)
                            self._remember(found[0])
                            return found[0]
                    if self._answered_at > began and loop_now() - began > self._settings.window_s:
                        # The peers are at another step, or none can reduce: the caller reads the records again.
                        raise RoundRefused("unreachable", f"no group for step {key[0]} can be formed now")
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise RoundRefused("unreachable", f"no organizer of step {key[0]} answered in time") from None

    def _check_quorum(self, group: Group, organizer: PeerId, awaited: Collection[PeerId]) -> None:
        """Refuse, once a step, a group without most of the live peers."""
        alive = {self._peers.id, *awaited} - self.standing.suspects(loop_now())
        here = alive & {member.id for member in group.members}
        parted = len(here) == 1 and organizer != self._peers.id
        # A second time it stands: the others may have stopped training, and not said so yet.
        if 2 * len(here) > len(alive) or (self._search.few and not parted):
            return
        self.forget(*group.terms.key)
        self._search.few = True
        if parted:
            self._pass_over(organizer)
        missing = len(alive) - len(here)
        raise RoundRefused("unreachable", f"{missing} of {len(alive)} trainers are not in the group")

    def forget(self, step: int, lineage: bytes) -> None:
        """Forget the group of a step: this peer came back without the mean, and needs another."""
        self._groups.pop((step, lineage), None)

    def likely(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return linked callers of this round and members of the one before: records may be late."""
        before = (group.members for group, _ in self._groups.values() if group.terms.step == step - 1)
        members = {member.id for group in before for member in group}
        return (members | self._callers.get((step, lineage), set())) & self._peers.linked()

    def _rank(self, step: int, candidates: Sequence[PeerId], *, alone: bool) -> list[PeerId]:
        me = self._peers.contact
        others = [peer for peer in candidates if peer != me.id and self._may_organize(peer)]
        reachable = [peer for peer in others if self._peers.contact_of(peer).addresses]
        last = [me.id] if not me.addresses and (alone or not reachable) else []
        return [*rank(self._prefix, step, [*reachable, me.id] if me.addresses else reachable), *last]

    def _may_organize(self, peer: PeerId) -> bool:
        others = {*self._search.candidates, peer} - {self._peers.id}
        return self._is_usable(peer) and peer in self.standing.trusted(others, loop_now())

    def _is_usable(self, peer: PeerId) -> bool:
        now = loop_now()
        passed = now < self._search.passed.get(peer, now) or self._left_out.holds(peer, now)
        return not (passed or self.standing.suspected(peer, now))

    def _pass_over(self, organizer: PeerId, cost_s: float = IN_VAIN_S) -> None:
        """Do not ask it again for this step, and charge it for the lost time."""
        if organizer != self._peers.id:
            self._search.passed[organizer] = loop_now() + PASSED_S
        self._charge(organizer, cost_s)

    def _charge(self, organizer: PeerId, cost_s: float) -> None:
        if organizer != self._peers.id:
            awaited = {self._peers.id, organizer, *self._search.candidates}
            told = {organizer: self._told}
            self.standing.settle("to organize a round", {organizer: cost_s}, awaited, loop_now(), told)

    async def _answer_of(self, organizer: PeerId, ticket: Ticket) -> Joined | None:
        asked_at = loop_now()
        step = ticket.terms.step
        self._told = None
        self._asked = organizer
        believed_s = max(map(self._believed_s, self._search.candidates), default=math.inf)
        usual_s = min(believed_s + self._lateness.seconds, self._settings.max_window_s)
        usual_s += self._answers.seconds
        patience_s = self.standing.patience_s(organizer, asked_at)
        limit_s = usual_s + CHAINED * patience_s
        try:
            async with asyncio.timeout(None if organizer == self._peers.id else limit_s):
                joined = await self._join_at(organizer, ticket, patience_s)
            if joined.group is not None:
                check_group(joined.group, self._settings.heaviest)
                self._charge(organizer, loop_now() - asked_at - usual_s)
            return joined
        except TimeoutError:
            logger.info("%s organizes step %d and is silent", short(organizer), step)
            cost_s = loop_now() - asked_at
            self._pass_over(organizer, cost_s if cost_s < limit_s + AWAKE_S else 0.0)
        except ValueError as error:
            logger.warning("%s sent an invalid group and is left out: %s", short(organizer), error)
            self._left_out.fail(organizer, loop_now())
        except PeerError as error:
            logger.debug("organizer %s of step %d failed: %s", short(organizer), step, error)
            self._pass_over(organizer, max(IN_VAIN_S, loop_now() - asked_at))
        finally:
            self._asked = None
        return None

    async def _ask(self, organizer: PeerId, ticket: Ticket) -> tuple[Group, PeerId] | None:
        """Return a group and who formed it: the organizer may have sent this peer on."""
        if (joined := await self._answer_of(organizer, ticket)) is None:
            return None
        if organizer != self._peers.id or joined.reason is not None:
            self._answered_at = loop_now()
        if refusal := self._refusal(joined, ticket):
            if organizer in self._search.refusers:
                self._pass_over(organizer)
            self._search.refusers.add(organizer)
            raise RoundRefused(refusal.reason, f"{short(organizer)}: {refusal}")
        other = joined.organizer
        if joined.group is not None:
            return joined.group, organizer
        if other is None or other.id == self._peers.id:
            if (
                ticket.reduces and organizer in self._search.promised
            ):  # a client may hear that nobody can reduce
                self._pass_over(organizer)
            return None
        if rank(self._prefix, ticket.terms.step, [other.id, organizer])[0] == organizer:
            self._pass_over(organizer)  # it would send all round in circles
        elif self._is_usable(other.id):  # one that this peer trusts sent it there: else they would part
            self._peers.learn(other)
            return await self._ask(other.id, ticket)
        return None

    async def _join_at(self, organizer: PeerId, ticket: Ticket, patience_s: float) -> Joined:
        """Join and wait while there are heartbeats."""
        message = JoinRound(ticket, self._peers.contact)
        key = ticket.terms.key
        if organizer == self._peers.id:
            joined = await self._join_here(organizer, message)
            for _ in range(3):  # the others are told first: this peer's part of the round keeps a core busy
                await asyncio.sleep(0)
            return joined
        if organizer not in self._peers.linked():
            call = self._spawn(self._call(organizer, ticket.terms))
            await asyncio.wait([call], timeout=patience_s)
            require(call.done(), "no link to it yet", TimeoutError)
            if (answer := call.result()).ready_in_s is None:
                return Joined(answer.group)
        slow_s = 2 * _HEARTBEAT_S + allowance_s(self._peers, organizer)
        async with await self._peers.stream(
            organizer, message, timeout_s=self._settings.call_timeout_s
        ) as stream:
            require(self._peers.role_of(organizer) >= Role.REDUCER, "its role does not let it organize")
            joined = Joined()
            while joined.forming:
                hurried = self._callers.get(key, set()) - {organizer}  # it was silent to them as well
                silence_s = slow_s + (0.0 if hurried else patience_s)
                async with asyncio.timeout(silence_s) as limit:
                    self._silence = limit
                    try:
                        joined, _ = await stream.receive(Joined)
                    finally:
                        self._silence = None
                self._told = joined.waits_for or self._told
            return joined

    def _spawn(self, call: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Start a call that nobody may wait for to its end: a dial takes its time, and the next round has the link."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _call(self, peer: PeerId, terms: RoundTerms) -> JoinEta:
        """Ask a peer whether it comes."""
        answer = await self._peers.call(peer, terms, JoinEta, timeout_s=self._settings.call_timeout_s)
        if answer.ready_in_s is not None and terms.key == self._search.key:
            self._search.promised.add(peer)
        return answer

    def _refusal(self, joined: Joined, ticket: Ticket) -> RoundRefused | None:
        group = joined.group
        step = ticket.terms.step
        if group is None:
            reason = joined.reason
            return None if reason is None or reason == "unreachable" else RoundRefused(reason, joined.text)
        if group.index_of(self._peers.id) is None:
            return RoundRefused("late", f"the group of step {step} was formed without us")
        if not holds_ticket(group, self._peers.id, ticket):
            return RoundRefused("late", f"the group of step {step} was formed with another ticket of ours")
        if group.terms != ticket.terms:
            return RoundRefused("resync", f"the group of step {step} is of another lineage")
        return None

    def _remember(self, group: Group) -> None:
        if group.index_of(self._peers.id) is not None:  # only its members know whether it still stands
            for member in group.members:
                self._peers.learn(Contact(member.id, member.addresses))
            if group.terms.key in self._forming:  # those that came here hear of it
                self._forming[group.terms.key][0].elsewhere = group
                wake(self._changed)
            remember(self._groups, group.terms.key, (group, loop_now()), _KEPT_GROUPS)

    def _remembered(self, terms: RoundTerms) -> Group | None:
        group, since = self._groups.get(terms.key, (None, 0.0))
        recent = loop_now() - since < REMEMBERED_S
        return group if recent and self._stands(*terms.key) else None

    def _on_lost(self, peer: PeerId) -> None:
        for formation, _ in self._forming.values():
            formation.on_declined(peer)
        wake(self._changed)

    async def _serve_call(self, peer: PeerId, terms: RoundTerms) -> JoinEta:
        group = self._remembered(terms)
        if group is not None:
            return JoinEta(None, group)
        return JoinEta(self._ready_in_s(terms, peer), waits_for=self._asked)

    def _ready_in_s(self, terms: RoundTerms, caller: PeerId) -> float | None:
        if (ready_in_s := self._on_called(terms, caller)) is not None:
            remember(self._callers, terms.key, self._callers.get(terms.key, set()) | {caller}, _KEPT_GROUPS)
            if terms.key in self._forming:  # this peer organizes, as it did not know the caller yet
                self._defers(self._forming[terms.key][0], caller)
            limit = self._silence
            if limit is not None and self._asked != caller and not limit.expired():
                # That one was silent to the caller as well.
                limit.reschedule(min(limit.when() or math.inf, loop_now() + 2 * _HEARTBEAT_S))
                ready_in_s = max(ready_in_s, (limit.when() or 0.0) - loop_now())
            return ready_in_s
        return None

    async def _serve_join(self, message: JoinRound, stream: Stream) -> None:
        joining = asyncio.create_task(self._join_here(stream.peer, message))
        wait_s = _HEARTBEAT_S / 10
        try:
            async with stream:
                while not (await asyncio.wait([joining], timeout=wait_s))[0]:
                    forming = self._forming.get(message.ticket.terms.key)
                    await stream.send(Joined(waits_for=forming[0].waits_for if forming else None))
                    wait_s = _HEARTBEAT_S
                await stream.send(joining.result())
                await stream.end()
        finally:
            joining.cancel()

    async def _join_here(self, peer: PeerId, message: JoinRound) -> Joined:
        ticket = message.ticket
        contact = message.contact
        if contact.id != peer:
            return Joined(reason="invalid", text="a ticket is personal")
        if ticket.weight != 0 and self._peers.role_of(peer) < Role.WORKER:
            return Joined(reason="invalid", text="only a worker may contribute: ask for another invitation")
        if self._left_out.holds(peer, loop_now()):
            return Joined(reason="late", text="this peer was dishonest, and is left out for half an hour")
        if group := self._remembered(ticket.terms):
            return _hand_out(group, peer)
        own = self._forming.get(ticket.terms.key) or self._organize(ticket.terms, peer)
        if isinstance(own, Joined):
            return own
        formation, task = own
        refusal = formation.on_join(ticket, contact, now=loop_now())
        wake(self._changed)
        if refusal is not None:
            formation.on_declined(peer)
            return refusal
        try:
            organized = await asyncio.shield(task)
        except asyncio.CancelledError:  # the caller gave up
            if not task.done():
                formation.on_lost(peer)
                wake(self._changed)
            raise
        return _hand_out(organized, peer)

    def _organize(
        self, terms: RoundTerms, peer: PeerId
    ) -> tuple[GroupFormation, asyncio.Task[_Organized]] | Joined:
        if (ready_in_s := self._ready_in_s(terms, peer)) is None:
            if all(step != terms.step for step, _ in self._forming):
                return Joined(reason="unreachable", text="not at this step")
            text = f"step {terms.step} here is of another lineage: load the state from a peer"
            return Joined(reason="resync", text=text)
        terms = self.own(*terms.key) if self.own else terms  # another may come first, with another model
        settings = replace(self._settings, slack_s=self._lateness.seconds)
        formation = GroupFormation(terms, now=loop_now(), settings=settings)
        own_s = ready_in_s + settings.slack_s + BURST_S / PART  # a group without its organizer is of no use
        formation.expect(self._peers.id, due=math.inf, until=loop_now() + own_s)
        task = asyncio.create_task(self._form(formation), name=f"organize step {terms.step}")
        self._forming[terms.key] = formation, task
        return formation, task

    async def _form(self, formation: GroupFormation) -> _Organized:
        terms = formation.terms
        me = self._peers.id
        candidates = list[PeerId]()
        try:
            candidates = [peer for peer in await self._expected(*terms.key) if peer != me]
            for peer in candidates:
                self._spawn(self._invite(formation, peer))
            await asyncio.sleep(0)  # the calls begin, so every called peer is awaited
            while formation.elsewhere is None and (closes_at := formation.closes_at()) > loop_now():
                await wait_until(closes_at, self._changed)
            seed = f"{self._prefix}|{terms.step}|{loop_now()}|".encode() + terms.lineage + me
            organized = formation.elsewhere or formation.form(
                hashlib.sha256(seed).digest()[:16], self._strategy
            )
        except ValueError as error:
            logger.info("no group for step %d: %s", terms.step, error)
            return None
        finally:
            if (now := loop_now()) - formation.closes_at() < AWAKE_S and formation.elsewhere is None:
                late_s = {peer: seconds for peer, seconds in formation.late_s(now).items() if peer != me}
                self.standing.settle("to join a round", late_s, [me, *candidates], now, formation.told)
                # The median peer's, of each round: a few liars do not set what is usual.
                for usual, took_s in (
                    (self._answers, formation.answers_s),
                    (self._lateness, formation.after_s),
                ):
                    if took_s:
                        usual.learn(statistics.median_low(took_s))
            del self._forming[terms.key]
        if isinstance(organized, Group):
            self._remember(organized)
        return organized

    async def _invite(self, formation: GroupFormation, peer: PeerId) -> None:
        terms = formation.terms
        now = loop_now()
        linked = peer in self._peers.linked()
        usual_s = allowance_s(self._peers, peer)
        patience_s = self.standing.patience_s(peer, now)
        if linked and not self.standing.suspected(peer, now):
            usual_s += self._answers.seconds
        formation.expect(peer, due=now + usual_s, until=now + usual_s + patience_s)
        try:
            answer = await self._call(peer, terms)
            if linked:
                formation.answers_s.append(loop_now() - now)
            if answer.group is not None:
                # It would be passed on, and peers would leave this organizer out.
                check_group(answer.group, self._settings.heaviest)
        except (PeerError, ValueError) as error:
            if isinstance(error, ValueError) or self._peers.contact_of(peer).addresses:
                formation.on_declined(peer)  # else it may join by itself
        else:
            ready_in_s = answer.ready_in_s
            formation.told[peer] = answer.waits_for
            if answer.group is not None and answer.group.terms.key == terms.key:
                formation.elsewhere = answer.group
            elif (
                ready_in_s is None
                or ready_in_s > usual_s + self.standing.credit_s(peer)
                or self._left_out.holds(peer, loop_now())
            ):
                formation.on_declined(peer)
            elif not (self._defers(formation, peer) or self._follows(formation, peer, answer.waits_for)):
                formation.on_coming(peer, ready_in_s, now=loop_now())
        wake(self._changed)

    def _follows(self, formation: GroupFormation, peer: PeerId, asked: PeerId | None) -> bool:
        """Defer to the organizer that a trusted peer has asked, or the two would part."""
        if asked is None or asked == self._peers.id or asked not in self._search.candidates:
            return False
        return self._may_organize(peer) and self._defers(formation, asked, trusted=True)

    def _defers(self, formation: GroupFormation, peer: PeerId, *, trusted: bool = False) -> bool:
        """Send all that came here on to a better organizer, which has called or answered; return whether it is."""
        contact = self._peers.contact_of(peer)
        step = formation.terms.step
        usable = self._is_usable(peer) if trusted else self._may_organize(peer)
        if (
            better := usable
            and bool(contact.addresses)
            and rank(self._prefix, step, [peer, self._peers.id])[0] == peer
        ):
            formation.elsewhere = contact
            wake(self._changed)
        return better


def check_group(group: Group, heaviest: float = math.inf) -> None:
    """Raise ValueError if no honest organizer would form this group.

    Its shares must be equal, or those of a fastest round by all tickets: a sole reducer could dictate the mean.
    """
    group.check()
    claims = [(member.weight, member.samples) for member in group.members]
    bounded = bounded_weights(group.members, heaviest)
    require(bounded == claims, "a member counts far too much")
    trainers = sum(not member.assists for member in group.members)
    tickets = [Ticket(group.terms, one.weight, *offer_of(one)) for one in group.members]
    shares = [member.share for member in group.members]
    require(trainers > 1 or len(shares) == 1, "a trainer that is alone needs no assistant")
    require(trainers < 2 or follows(tickets, shares), "its shares do not follow from its tickets")


def holds_ticket(group: Group, peer: PeerId, ticket: Ticket) -> bool:
    """Return True if the peer's entry says what its ticket said; weight and samples may be bounded."""
    mine = next(member for member in group.members if member.id == peer)
    most = (max(claims) for claims in zip(*((one.weight, one.samples) for one in group.members), strict=True))
    told = zip((mine.weight, mine.samples), (ticket.weight, ticket.samples), most, strict=True)
    return offer_of(mine) == offer_of(ticket) and all(
        entry == claim or heaviest == entry < claim for entry, claim, heaviest in told
    )


def _hand_out(group: _Organized, peer: PeerId) -> Joined:
    if group is None:
        return Joined(reason="unreachable", text="no peer here can reduce")
    if isinstance(group, Contact):
        return Joined(organizer=group)
    if group.index_of(peer) is None:
        return Joined(reason="late", text=f"the group of step {group.terms.step} was formed without you")
    return Joined(group)
