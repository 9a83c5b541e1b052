"""Finding the group of a round: ask the organizer, or be it.

Organizers with different views are sorted out by rank: a peer that knows a live candidate before
itself redirects to it. Every member answers an organizer's call with the group, so it survives its
organizer. Only members pass a group on, or it would circulate forever, and no longer once their
round is over and the swarm did not follow it.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

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
from colab_swarm.averaging.router import SKIPPED_S, PrefixRouter
from colab_swarm.averaging.standing import Standing
from colab_swarm.averaging.strategy import adaptive_shares, follows
from colab_swarm.errors import PeerError, require
from colab_swarm.events import PeerSilent
from colab_swarm.net.peers import (
    Contact,
    LeftOut,
    Patience,
    PeerId,
    Role,
    Stream,
    allowance_s,
    remember,
    short,
)
from colab_swarm.runtime import loop_now, wait_until, wake

logger = logging.getLogger(__name__)

Organized: TypeAlias = Group | Contact | None  # the group, another organizer, or nothing
FORMING = Joined()  # an organizer's heartbeat

REFUSALS_S = 60.0  # an honest refusal of one step ends with the round that runs without us
LATE_S = 10.0  # and a peer, at first, that was silent or came later than it had promised
LATE_GRACE_S = 0.5  # how long a round waits for a peer whose `LATE_S` is about to end
BLAMED_S = 0.1  # a silent peer is blamed before the group is formed without it
HEARTBEAT_S = 0.5  # of an organizer to a peer that has joined
HURRIED_S = 0.75  # heartbeat timeout once another organizer has called
MIN_SILENCE_S, FIRST_SILENCE_S = 2.0, 4.0  # of a peer that is left out: at least, and before any answered
AWAKE_S = 1.0  # a timer of a running process is not so late
KEPT_GROUPS = 4
REMEMBERED_S = 180.0
RETRY_S = 0.25


class Matchmaker:
    """Forms groups among the peers of the collaboration ``prefix``.

    Args:
        expected: ``expected(step, lineage)``: peers believed to take part, with or without this one.
        on_called: ``on_called(terms, peer)``: seconds until this peer joins the caller, or None. Returns at once.
        believed_s: ``believed_s()``: the longest ETA accepted; a peer that needs longer is not waited for.
        stands: ``stands(step, lineage)``: whether the swarm still follows the group that this peer had.
    """

    def __init__(
        self,
        router: PrefixRouter,
        prefix: str,
        *,
        expected: Callable[[int, bytes], Awaitable[Sequence[PeerId]]],
        on_called: Callable[[RoundTerms, PeerId], float | None],
        believed_s: Callable[[], float] = lambda: math.inf,
        stands: Callable[[int, bytes], bool] = lambda step, lineage: True,
        strategy: Strategy = adaptive_shares,
        settings: GroupFormationSettings | None = None,
    ) -> None:
        self._router, self._peers, self._prefix = router, router.peers, prefix
        self._expected, self._on_called, self._stands = expected, on_called, stands
        self._believed_s = believed_s
        self.standing = Standing(lambda peer: peer)  # of strangers: peers that are known by a record only
        self.own: Callable[[int, bytes], RoundTerms] | None = None  # else the first caller's terms
        self._strategy = strategy
        self._settings = settings or GroupFormationSettings()
        self._groups: dict[tuple[int, bytes], tuple[Group, float]] = {}  # and since when
        self._forming: dict[tuple[int, bytes], tuple[GroupFormation, asyncio.Task[Organized]]] = {}
        self._changed = asyncio.Event()  # when a formation has changed
        self._callers: dict[tuple[int, bytes], set[PeerId]] = {}  # of rounds that this peer joins
        self._left_out = router.dishonest
        self._late = LeftOut[PeerId](LATE_S, SKIPPED_S)  # nobody waits for them
        self._silent = LeftOut[PeerId](LATE_S, SKIPPED_S)  # nor lets them organize
        call_s, slack_s = self._settings.call_timeout_s, self._settings.slack_s
        self._answers, self._heartbeats = (Patience(MIN_SILENCE_S, call_s, FIRST_SILENCE_S) for _ in range(2))
        self._dials, self._blamed_at = Patience(MIN_SILENCE_S, call_s), dict[PeerId, float]()  # when last
        self._lateness = Patience(min(slack_s, max(MIN_SILENCE_S, 0.4 * slack_s)), slack_s)  # after a promise
        self._alone: tuple[int, bytes] | None = None  # the step for which a group of one was refused
        self._ready: tuple[object, set[PeerId]] = (None, set())  # a step, and who said to come to it
        self._refused: dict[PeerId, tuple[int, float]] = {}  # step, and since when
        self._asked: dict[PeerId, tuple[int, bytes]] = {}  # in vain for this step
        self._answered_at = float("-inf")  # by any organizer but this peer
        self._asks: tuple[PeerId | None, float] = None, 0.0  # an organizer, and when it is given up
        self._stop_listening = self._peers.on_lost(self._on_lost)
        router.serve_stream(prefix, JoinRound, self._serve_join, Role.REDUCER)
        router.serve(prefix, RoundTerms, self._serve_call, Role.REDUCER)

    def close(self) -> None:
        self._stop_listening()
        self._router.unserve(self._prefix, JoinRound, RoundTerms)
        for _, task in self._forming.values():
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

        ``candidates`` are believed live. A group of one is refused once while ``awaited`` peers are
        linked. Raises RoundRefused if this peer cannot join.
        """
        if why := wrong_numbers(ticket):
            raise RoundRefused("invalid", why)
        step = ticket.terms.step
        self.forget(*ticket.terms.key)  # a second call needs another group
        began, slack_s = loop_now(), self._settings.slack_s
        limit_s = min(self._settings.max_window_s, self._believed_s() + slack_s)
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    alone = loop_now() - max(began, self._answered_at) > self._settings.window_s
                    for asked in self._rank(step, candidates, alone=alone):
                        if (found := await self._ask(asked, ticket, limit_s)) is None:
                            continue
                        group, organizer = found
                        if len(group.members) == 1 and awaited and self._alone != ticket.terms.key:
                            # Alone this peer would leave the swarm: first it reads the records again.
                            self.forget(*ticket.terms.key)
                            if organizer == self._peers.id:
                                self._alone = ticket.terms.key
                            else:
                                self._silent.fail(organizer, loop_now())
                            raise RoundRefused("unreachable", f"{len(awaited)} trainers did not come")
                        self._remember(group)
                        return group
                    if self._answered_at > began and loop_now() - began > self._settings.window_s:
                        # The peers are at another step, or none can reduce: the caller reads the records again.
                        raise RoundRefused("unreachable", f"no group for step {step} can be formed now")
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise RoundRefused("unreachable", f"no organizer of step {step} answered in time") from None

    def forget(self, step: int, lineage: bytes) -> None:
        """Forget the group of a step: this peer came back without the mean, and needs another."""
        self._groups.pop((step, lineage), None)

    def mute(self) -> set[PeerId]:
        """Return the peers that were silent, and from which nothing has come since: frozen or cut off."""
        known = self._peers.linked() | self._blamed_at.keys()
        return {peer for peer in known if self._peers.read_at(peer) < self._blamed_at.get(peer, 0.0)}

    def likely(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return linked callers of this round and members of the one before: records may be late."""
        before = (group.members for group, _ in self._groups.values() if group.terms.step == step - 1)
        members = {member.id for group in before for member in group}
        return (members | self._callers.get((step, lineage), set())) & self._peers.linked()

    def _rank(self, step: int, candidates: Sequence[PeerId], *, alone: bool) -> list[PeerId]:
        me = self._peers.contact
        others = [peer for peer in candidates if peer != me.id and not self._skipped(peer)]
        reachable = [peer for peer in others if self._peers.contact_of(peer).addresses]
        last = [me.id] if not me.addresses and (alone or not reachable) else []
        return [*rank(self._prefix, step, [*reachable, me.id] if me.addresses else reachable), *last]

    async def _answer_of(self, organizer: PeerId, ticket: Ticket, limit_s: float) -> Joined | None:
        try:
            joined = await self._join_at(organizer, ticket, limit_s)
            if joined.group is not None:
                check_group(joined.group, self._settings.heaviest)
                self._late.forgive(organizer)
                self._silent.forgive(organizer)
        except TimeoutError:
            logger.info("%s organizes step %d and is silent", short(organizer), ticket.terms.step)
            remember(self._asked, organizer, ticket.terms.key, 256)
            return None
        except ValueError as error:
            logger.warning("%s sent an invalid group and is left out: %s", short(organizer), error)
            self._left_out.fail(organizer, loop_now())
            return None
        except PeerError as error:
            logger.debug("organizer %s of step %d failed: %s", short(organizer), ticket.terms.step, error)
            self._doubt(organizer, ticket.terms)
            return None
        finally:
            self._asks = None, 0.0
        return joined

    async def _ask(self, organizer: PeerId, ticket: Ticket, limit_s: float) -> tuple[Group, PeerId] | None:
        """Return a group and who formed it: the organizer may have sent this peer on."""
        if (joined := await self._answer_of(organizer, ticket, limit_s)) is None:
            return None
        if organizer != self._peers.id or joined.reason is not None:
            self._answered_at = loop_now()
        if refusal := self._refusal(joined, ticket):
            if organizer != self._peers.id and self._keeps_refusing(organizer, ticket.terms.step):
                return None
            raise RoundRefused(refusal.reason, f"{short(organizer)}: {refusal}")
        other = joined.organizer
        if joined.group is not None:
            return joined.group, organizer
        if other is None or other.id == self._peers.id:
            if ticket.reduces:  # otherwise it may be right that no peer can
                self._doubt(organizer, ticket.terms)
            return None
        if rank(self._prefix, ticket.terms.step, [other.id, organizer])[0] == organizer:
            self._silent.fail(organizer, loop_now())  # it would send all round in circles
        elif not self._skipped(other.id):
            self._peers.learn(other)
            return await self._ask(other.id, ticket, limit_s)
        return None

    def _doubt(self, organizer: PeerId, terms: RoundTerms) -> None:
        """Do not wait for a peer that said to come to a step, and then organizes nothing; no redirect to it either."""
        if self._ready[0] == terms.key and organizer in self._ready[1]:
            self._silent.fail(organizer, loop_now())

    async def _join_at(self, organizer: PeerId, ticket: Ticket, limit_s: float) -> Joined:
        """Join and wait, while there are heartbeats, for ``limit_s`` and as long as dialling may take."""
        message = JoinRound(ticket, self._peers.contact)
        if organizer == self._peers.id:
            joined = await self._join_here(organizer, message)
            for _ in range(3):  # the others are told first: this peer's part of the round keeps a core busy
                await asyncio.sleep(0)
            return joined
        if organizer not in self._peers.linked():
            answer = await self._call(organizer, ticket.terms)
            if answer.ready_in_s is None:
                return Joined(answer.group)
        async with (
            self._within(organizer, limit_s + self._dials.seconds),
            await self._peers.stream(organizer, message, timeout_s=self._settings.call_timeout_s) as stream,
        ):
            require(self._peers.role_of(organizer) >= Role.REDUCER, "its role does not let it organize")
            while True:
                again = self._asked.get(organizer) == ticket.terms.key  # its silence is no accident
                hurried = not again and self._callers.get(ticket.terms.key, set()) - {organizer}
                asked_at, silence_s = loop_now(), HURRIED_S if hurried else self._heartbeats.seconds
                self._asks = organizer, asked_at + silence_s
                async with self._within(organizer, silence_s):
                    joined, _ = await stream.receive(Joined)
                self._heartbeats.learn(loop_now() - asked_at)
                if joined != FORMING:
                    return joined

    async def _call(self, peer: PeerId, terms: RoundTerms) -> JoinEta:
        """Ask a peer whether it comes; TimeoutError if it is silent."""
        asked_at, patience = loop_now(), self._answers if peer in self._peers.linked() else self._dials
        async with self._within(peer, patience.seconds):
            answer = await self._peers.call(peer, terms, JoinEta, timeout_s=2 * self._settings.call_timeout_s)
        patience.learn(loop_now() - asked_at)
        if answer.ready_in_s is not None:
            if self._ready[0] != terms.key:
                self._ready = terms.key, set()
            self._ready[1].add(peer)
        return answer

    @contextlib.asynccontextmanager
    async def _within(self, peer: PeerId, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after ``seconds`` of silence, and do not wait for the peer for a while.

        In a hurry nobody is blamed, nor by a process that was itself stopped meanwhile, as its late timer shows.
        """
        began, limit_s = loop_now(), seconds + allowance_s(self._peers, peer)
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError:
            if seconds >= MIN_SILENCE_S and limit.expired() and loop_now() - began < limit_s + AWAKE_S:
                self._silent.fail(peer, loop_now())
                remember(self._blamed_at, peer, loop_now(), 256)
                if peer in self._peers.linked():  # a lost link has an event of its own
                    self._router.events.emit(PeerSilent(loop_now(), peer.hex(), limit_s))
            raise

    def _refusal(self, joined: Joined, ticket: Ticket) -> RoundRefused | None:
        group, step = joined.group, ticket.terms.step
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

    def _skipped(self, peer: PeerId) -> bool:
        return self._left_out.holds(peer, loop_now()) or self._silent.holds(peer, loop_now())

    def _keeps_refusing(self, organizer: PeerId, step: int) -> bool:
        now = loop_now()
        if self._refused.get(organizer, (None, now))[0] != step:
            remember(self._refused, organizer, (step, now), 256)
        if now - self._refused[organizer][1] < REFUSALS_S:
            return False
        logger.warning("%s keeps refusing step %d and is left out", short(organizer), step)
        del self._refused[organizer]
        self._left_out.fail(organizer, now)
        return True

    def _remember(self, group: Group) -> None:
        if group.index_of(self._peers.id) is not None:  # only its members know whether it still stands
            for member in group.members:
                self._peers.learn(Contact(member.id, member.addresses))
            remember(self._groups, group.terms.key, (group, loop_now()), KEPT_GROUPS)

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
        return JoinEta(None, group) if group else JoinEta(self._ready_in_s(terms, peer))

    def _ready_in_s(self, terms: RoundTerms, caller: PeerId) -> float | None:
        if (ready_in_s := self._on_called(terms, caller)) is not None:
            remember(self._callers, terms.key, self._callers.get(terms.key, set()) | {caller}, KEPT_GROUPS)
            if terms.key in self._forming:  # this peer organizes, as it did not know the caller yet
                self._defers(self._forming[terms.key][0], caller)
            asked, until = self._asks
            return max(ready_in_s, min(until - loop_now(), self._believed_s()) if asked != caller else 0.0)
        return None

    async def _serve_join(self, message: JoinRound, stream: Stream) -> None:
        joining, wait_s = asyncio.create_task(self._join_here(stream.peer, message)), HEARTBEAT_S / 10
        try:
            async with stream:
                while not (await asyncio.wait([joining], timeout=wait_s))[0]:
                    await stream.send(FORMING)
                    wait_s = HEARTBEAT_S
                await stream.send(joining.result())
                await stream.end()
        finally:
            joining.cancel()

    async def _join_here(self, peer: PeerId, message: JoinRound) -> Joined:
        ticket, contact = message.ticket, message.contact
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
        refusal = formation.on_join(ticket, contact)
        wake(self._changed)
        if refusal is not None:
            formation.on_declined(peer)
            return refusal
        formation.joined_at = loop_now()
        self._late.forgive(peer)
        if peer in formation.promised:
            self._lateness.learn(max(0.0, loop_now() - formation.promised[peer]))
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
    ) -> tuple[GroupFormation, asyncio.Task[Organized]] | Joined:
        if (ready_in_s := self._ready_in_s(terms, peer)) is None:
            if all(step != terms.step for step, _ in self._forming):
                return Joined(reason="unreachable", text="not at this step")
            text = f"step {terms.step} here is of another lineage: load the state from a peer"
            return Joined(reason="resync", text=text)
        terms = self.own(*terms.key) if self.own else terms  # another may come first, with another model
        settings = replace(self._settings, slack_s=self._lateness.seconds)
        formation = GroupFormation(terms, now=loop_now(), settings=settings)
        formation.on_coming(self._peers.id, ready_in_s, now=loop_now())
        task = asyncio.create_task(self._form(formation), name=f"organize step {terms.step}")
        self._forming[terms.key] = formation, task
        return formation, task

    async def _form(self, formation: GroupFormation) -> Organized:
        terms, me = formation.terms, self._peers.id
        calls, candidates = list[asyncio.Task[None]](), list[PeerId]()
        try:
            candidates = [peer for peer in await self._expected(*terms.key) if peer != me]
            calls = [asyncio.create_task(self._invite(formation, peer)) for peer in candidates]
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
            for call in calls:
                call.cancel()
            if loop_now() - formation.closes_at() < AWAKE_S:
                self._settle(formation, [me, *candidates])
                for peer in formation.broken_promises(loop_now()) - {me}:
                    logger.info("%s promised to come and did not: no one waits for it now", short(peer))
                    self._late.fail(peer, loop_now())
            del self._forming[terms.key]
        if isinstance(organized, Group):
            self._remember(organized)
        return organized

    async def _invite(self, formation: GroupFormation, peer: PeerId) -> None:
        terms, now, linked = formation.terms, loop_now(), peer in self._peers.linked()
        patience_s = (self._answers if linked else self._dials).seconds + BLAMED_S
        late_s = max(one.ends(now).get(peer, now) for one in (self._late, self._silent, self._left_out)) - now
        if late_s:  # of a frozen peer nothing comes at all; to one late again, nobody listens for long
            answers = now - self._peers.read_at(peer) < MIN_SILENCE_S
            patience_s = LATE_GRACE_S * (answers and late_s <= LATE_S)
        until = math.inf if linked else formation.opened_at + self.standing.credit_s(peer)
        formation.expect(peer, min(now + patience_s + allowance_s(self._peers, peer), until))
        try:
            answer = await self._call(peer, terms)
            if answer.group is not None:
                # It would be passed on, and peers would leave this organizer out.
                check_group(answer.group, self._settings.heaviest)
        except (PeerError, TimeoutError, ValueError) as error:
            formation.on_declined(peer)
            if isinstance(error, PeerError) and not self._peers.contact_of(peer).addresses:
                # It joins by itself.
                formation.expect(peer, min(formation.opened_at + self._settings.window_s, until))
        else:
            if answer.group is not None and answer.group.terms.key == terms.key:
                formation.elsewhere = answer.group
            elif (
                answer.ready_in_s is None
                or answer.ready_in_s > self._believed_s()
                or self._left_out.holds(peer, loop_now())
            ):
                formation.on_declined(peer)
            elif not (
                self._defers(formation, peer) or self._late.holds(peer, now)
            ):  # a silent one is heard again
                formation.on_coming(peer, answer.ready_in_s, now=loop_now())
        wake(self._changed)

    def _settle(self, formation: GroupFormation, awaited: Sequence[PeerId]) -> None:
        """Charge the strangers that this peer waited for in vain."""
        now = loop_now()
        absent = formation.absent(now)
        strangers = absent.keys() - self._peers.linked() - formation.promised.keys()
        charged = self.standing.settle({peer: absent[peer] for peer in strangers}, awaited, now)
        for peer, seconds in charged.items():
            self._router.events.emit(PeerSilent(now, peer.hex(), seconds))

    def _defers(self, formation: GroupFormation, peer: PeerId) -> bool:
        """Send all that came here on to a better organizer, which has called or answered; return whether it is."""
        contact, step = self._peers.contact_of(peer), formation.terms.step
        usable = not self._skipped(peer) and bool(contact.addresses)
        if better := usable and rank(self._prefix, step, [peer, self._peers.id])[0] == peer:
            formation.elsewhere = contact
            wake(self._changed)
        return better


def check_group(group: Group, heaviest: float = math.inf) -> None:
    """Raise ValueError if no honest organizer would form this group.

    Its shares must be equal, or those of a fastest round by all tickets: a sole reducer could dictate the mean.
    """
    group.check()
    claims = [(member.weight, member.samples) for member in group.members]
    bounded = bounded_weights(group.members, group.terms, heaviest)
    require(bounded == claims, "a member counts far too much")
    trainers = sum(not member.assists for member in group.members)
    tickets = [Ticket(group.terms, one.weight, *offer_of(one)) for one in group.members]
    shares = [member.share for member in group.members]
    require(trainers < 2 or follows(tickets, shares), "its shares do not follow from its tickets")


def holds_ticket(group: Group, peer: PeerId, ticket: Ticket) -> bool:
    """Return True if the peer's entry says what its ticket said; weight and samples may be bounded."""
    mine = next(member for member in group.members if member.id == peer)
    most = (max(claims) for claims in zip(*((one.weight, one.samples) for one in group.members), strict=True))
    told = zip((mine.weight, mine.samples), (ticket.weight, ticket.samples), most, strict=True)
    return offer_of(mine) == offer_of(ticket) and all(
        entry == claim or heaviest == entry < claim for entry, claim, heaviest in told
    )


def _hand_out(group: Organized, peer: PeerId) -> Joined:
    if group is None:
        return Joined(reason="unreachable", text="no peer here can reduce")
    if isinstance(group, Contact):
        return Joined(organizer=group)
    if group.index_of(peer) is None:
        return Joined(reason="late", text=f"the group of step {group.terms.step} was formed without you")
    return Joined(group)
