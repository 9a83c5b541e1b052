"""Finding the group of a round: ask the organizer, or be it.

Every member of a group hands it out to its fellow members, and answers an organizer's call with it: a group
that was formed survives the loss of its organizer. Organizers whose views differ are sorted out by rank: who
is asked but knows a live candidate before itself redirects there, so redirections only ever lead up.

A group is history once its round is over and the swarm did not follow: the peer that took that step alone, or among
few, no longer tells of it, so that the others can take the step together. Nobody tells of a group of others: such
news would be passed on among them for ever.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from colab_swarm.averaging.group import (
    Group,
    GroupFormation,
    GroupFormationSettings,
    Joined,
    JoinEta,
    JoinRound,
    RefusalReason,
    RoundCall,
    RoundRefused,
    Strategy,
    Ticket,
    rank,
    valid_weight,
)
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Contact, Message, PeerId, Peers, Refusal, Role, Stream, short

REFUSALS_S = 60.0

"""An honest refusal (the round runs without us) is over after a round; a step refused for longer is kept up."""

BARRED_S = 1800.0


class Bars:
    """What organizers did to this peer."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}
        self._refused: dict[PeerId, tuple[int, float]] = {}  # which step, since when

    def bar(self, peer: PeerId, *, now: float) -> None:
        """Pass the peer over for `BARRED_S`: it sent nonsense."""
        self._until[peer] = now + BARRED_S

    def barred(self, peer: PeerId, *, now: float) -> bool:
        """Whether to pass the peer over."""
        return self._until.get(peer, now) > now

    def on_refusal(self, peer: PeerId, step: int, *, now: float) -> bool:
        """The peer refused this peer a part in ``step``; True if it has done so for too long and is barred."""
        if self._refused.get(peer, (None, now))[0] != step:
            self._refused[peer] = (step, now)
        if now - self._refused[peer][1] < REFUSALS_S:
            return False
        del self._refused[peer]
        self.bar(peer, now=now)
        return True


Handler = Callable[..., Awaitable[Any]]


class DefaultHandler(Protocol):
    """Whoever serves collaborations that are not this peer's own."""

    def enter(self, prefix: str) -> None:
        """A message came for ``prefix``, and nobody serves it: begin to, if you like."""

    def leave(self, prefix: str) -> None:
        """Serve ``prefix`` no more, if you do."""


class PrefixRouter:
    """Shares a peer's message types among its collaborations; messages have a ``prefix``.

    A kind of message is served as long as somebody serves it, with the role that its first server asked for.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._handlers: dict[type[Message], dict[str, Handler]] = {}
        self._guest: DefaultHandler | None = None

    def serve(
        self,
        prefix: str,
        kind: type[Message],
        handler: Callable[[PeerId, Any], Awaitable[Message]],
        role: Role,
    ) -> None:
        """Answer calls of ``kind`` to the collaboration ``prefix`` by peers of ``role`` or above.

        Raises:
            ValueError: another collaboration of this name is there.
        """

        async def answer(peer: PeerId, message: Any) -> Message:
            reply: Message = await self._find(kind, message.prefix)(peer, message)
            return reply

        if self._add(prefix, kind, handler):
            self.peers.serve(kind, answer, role=role)

    def serve_stream(
        self, prefix: str, kind: type[Message], handler: Callable[[Any, Stream], Awaitable[None]], role: Role
    ) -> None:
        """Run ``handler`` for streams to the collaboration ``prefix`` opened with ``kind``; like `serve`."""

        async def converse(opening: Any, stream: Stream) -> None:
            await self._find(kind, opening.prefix)(opening, stream)

        if self._add(prefix, kind, handler):
            self.peers.serve_stream(kind, converse, role=role)

    def unserve(self, prefix: str, kind: type[Message]) -> None:
        """Stop answering ``kind`` for ``prefix``."""
        handlers = self._handlers.get(kind, {})
        handlers.pop(prefix, None)
        if not handlers and self._handlers.pop(kind, None) is not None:
            self.peers.unserve(kind)

    def welcome(self, guest: DefaultHandler | None) -> None:
        """Let ``guest`` serve what nobody else serves.

        Raises:
            ValueError: there is one.
        """
        if guest is not None and self._guest is not None:
            raise ValueError("this peer assists already: stop() that first")
        self._guest = guest

    def make_room(self, prefix: str) -> None:
        """Ask the guest, if it serves ``prefix``, to leave that to its owner."""
        if self._guest is not None:
            self._guest.leave(prefix)

    def _add(self, prefix: str, kind: type[Message], handler: Handler) -> bool:
        """Returns whether ``kind`` is new here."""
        handlers = self._handlers.setdefault(kind, {})
        if prefix in handlers:
            raise ValueError(f"this peer takes part in {prefix!r} already: close that first")
        handlers[prefix] = handler
        return len(handlers) == 1

    def _find(self, kind: type[Message], prefix: str) -> Handler:
        handlers = self._handlers.get(kind, {})
        if prefix not in handlers and self._guest is not None:
            self._guest.enter(prefix)
        if prefix not in handlers:
            raise Refusal(f"this peer takes no part in {prefix[:80]!r}")
        return handlers[prefix]


logger = logging.getLogger(__name__)

REMEMBERED_GROUPS = 4

REMEMBERED_S = 180.0

RETRY_S = 0.25


class Matchmaker:
    """Forms groups among the peers of one collaboration.

    Args:
        prefix: name of the collaboration.
        expected: ``expected(step, lineage)``: peers believed to take part, this one included or not.
        on_called: ``on_called(terms, peer)``: in how many seconds this peer joins whom calls; None: it will not.
            Returns at once.
        stands: ``stands(step, lineage)``: whether the group that this peer had then still is the swarm's.
        strategy: who reduces how much.
    """

    def __init__(
        self,
        rooms: PrefixRouter,
        prefix: str,
        *,
        expected: Callable[[int, bytes], Awaitable[Sequence[PeerId]]],
        on_called: Callable[[Ticket, PeerId], float | None],
        stands: Callable[[int, bytes], bool] = lambda step, lineage: True,
        strategy: Strategy = adaptive_shares,
        settings: GroupFormationSettings | None = None,
    ) -> None:
        self._rooms, self._peers = rooms, rooms.peers
        self._prefix = prefix
        self._expected = expected
        self._on_called = on_called
        self._stands = stands
        self._strategy = strategy
        self._settings = settings or GroupFormationSettings()
        self._groups: dict[tuple[int, bytes], tuple[Group, float]] = {}  # and since when
        self._leading: dict[tuple[int, bytes], _Leading] = {}
        self._bars = Bars()
        self._answered_at = float("-inf")  # by any organizer but this peer
        self._stop_listening = self._peers.on_lost(self._on_lost)
        rooms.serve(prefix, JoinRound, self._serve_join, Role.REDUCER)
        rooms.serve(prefix, RoundCall, self._serve_call, Role.REDUCER)

    def close(self) -> None:
        """Organize nothing more."""
        self._stop_listening()
        self._rooms.unserve(self._prefix, JoinRound)
        self._rooms.unserve(self._prefix, RoundCall)
        for leading in self._leading.values():
            leading.task.cancel()

    async def join(self, ticket: Ticket, candidates: Sequence[PeerId], deadline: float) -> Group:
        """The group of the ticket's step; the same at all its members.

        Args:
            candidates: peers believed live at this step; oneself need not be among them.
            deadline: loop time.

        Raises:
            RoundRefused: this peer has no part in the round; see its ``reason``.
        """
        if not valid_weight(ticket.weight):
            raise RoundRefused("invalid", f"weight {ticket.weight} is neither 0 nor in [1e-9, 1e9)")
        self.forget(ticket.step, ticket.lineage)  # whoever asks again wants another
        began = _now()
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    silent_s = _now() - max(began, self._answered_at)
                    alone = silent_s > self._settings.window_s
                    for organizer in self._rank(ticket.step, candidates, alone=alone):
                        if group := await self._ask(organizer, ticket, hops=len(candidates)):
                            self._accept(group)
                            return group
                    if self._answered_at > began and _now() - began > self._settings.window_s:
                        # they are elsewhere, or nobody can reduce: look at the records and oneself again
                        raise RoundRefused(
                            "unreachable", f"no group for step {ticket.step} can be formed now"
                        )
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            text = f"no organizer of step {ticket.step} among {len(candidates)} candidates answered in time"
            raise RoundRefused("unreachable", text) from None

    # --- asking ---------------------------------------------------------------------------------------------

    def _rank(self, step: int, candidates: Sequence[PeerId], *, alone: bool) -> list[PeerId]:
        """Candidates that can be dialled, in order, this peer included if it can; if not, last if left ``alone``."""
        me = self._peers.contact
        others = [peer for peer in candidates if peer != me.id and not self._barred(peer)]
        reachable = [peer for peer in others if self._peers.contact_of(peer).addresses]
        if me.addresses:
            return rank(self._prefix, step, [*reachable, me.id])
        return [*rank(self._prefix, step, reachable), *([me.id] if alone or not reachable else [])]

    async def _ask(self, organizer: PeerId, ticket: Ticket, *, hops: int) -> Group | None:
        """Join at ``organizer`` or where it points; None if there is no group to be had from it."""
        try:
            joined = await self._join_at(organizer, ticket)
            if joined.group is not None:
                joined.group.check()
        except ValueError as error:
            logger.warning("%s sent a group that is none, and is passed over: %s", short(organizer), error)
            self._bars.bar(organizer, now=_now())
            return None
        except PeerError as error:
            logger.debug("organizer %s of step %d is out: %s", short(organizer), ticket.step, error)
            return None
        if organizer != self._peers.id or joined.reason is not None:
            self._answered_at = _now()
        if refusal := self._refusal(joined, ticket):
            if organizer != self._peers.id and self._bars.on_refusal(organizer, ticket.step, now=_now()):
                logger.warning(
                    "%s refuses step %d for ever, and is passed over", short(organizer), ticket.step
                )
                return None
            raise RoundRefused(refusal[0], f"{short(organizer)}: {refusal[1]}")
        if joined.group is not None:
            return joined.group
        if joined.organizer is None or hops <= 0 or joined.organizer.id == self._peers.id:
            return None
        if self._barred(joined.organizer.id):
            return None
        self._peers.learn(joined.organizer)
        return await self._ask(joined.organizer.id, ticket, hops=hops - 1)

    async def _join_at(self, organizer: PeerId, ticket: Ticket) -> Joined:
        message = JoinRound(ticket, self._peers.contact)
        if organizer == self._peers.id:
            return await self._serve_join(organizer, message)
        if organizer not in self._peers.linked():  # a long call to a silent address would eat the deadline
            answer = await self._call(organizer, ticket)
            if answer.ready_in_s is None:
                return Joined(answer.group)
        patience_s = 2 * (self._settings.max_window_s + self._settings.call_timeout_s)
        return await self._peers.call(organizer, message, Joined, timeout_s=patience_s)

    async def _call(self, peer: PeerId, terms: Ticket) -> JoinEta:
        return await self._peers.call(
            peer, RoundCall(terms), JoinEta, timeout_s=self._settings.call_timeout_s
        )

    def _refusal(self, joined: Joined, ticket: Ticket) -> tuple[RefusalReason, str] | None:
        """Why the answer gives this peer no part in the round; None if it does, or if another must be asked."""
        group = joined.group
        if group is None:
            told = joined.reason
            return None if told is None or told == "unreachable" else (told, joined.text)
        if group.index_of(self._peers.id) is None:
            return "late", f"the group of step {ticket.step} was formed without us"
        if (group.prefix, group.step, group.lineage, group.numel) != (
            ticket.prefix,
            ticket.step,
            ticket.lineage,
            ticket.numel,
        ):
            return "resync", f"the group of step {ticket.step} is of another lineage"
        return None

    def _accept(self, group: Group) -> None:
        for member in group.members:
            if member.addresses and member.id != self._peers.id:
                self._peers.learn(Contact(member.id, member.addresses))
        self._remember(group)

    def _barred(self, peer: PeerId) -> bool:
        return self._bars.barred(peer, now=_now())

    def forget(self, step: int, lineage: bytes) -> None:
        """This peer came back to the step without what the group's round made of it: it wants another."""
        self._groups.pop((step, lineage), None)

    def _remember(self, group: Group) -> None:
        if group.index_of(self._peers.id) is None:  # its members know it, and whether it still stands
            return
        self._groups[group.step, group.lineage] = group, _now()
        while len(self._groups) > REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]

    def _remembered(self, terms: Ticket) -> Group | None:
        """The group of this step, unless the swarm did not follow it, or it is long over: a run may come back to a
        step from a checkpoint."""
        group, since = self._groups.get((terms.step, terms.lineage), (None, 0.0))
        if group is None or _now() - since >= REMEMBERED_S:
            return None
        return group if self._stands(terms.step, terms.lineage) else None

    def _on_lost(self, peer: PeerId) -> None:
        """Its link broke: whoever said that it was coming is not waited for; who is here already is in."""
        for leading in self._leading.values():
            leading.gathering.on_declined(peer)
            leading.changed.set()

    # --- being asked ----------------------------------------------------------------------------------------

    async def _serve_call(self, peer: PeerId, call: RoundCall) -> JoinEta:
        if group := self._remembered(call.terms):
            return JoinEta(None, group)
        return JoinEta(self._on_called(call.terms, peer))

    async def _serve_join(self, peer: PeerId, message: JoinRound) -> Joined:
        ticket, contact = message.ticket, message.contact
        if contact.id != peer:
            return Joined(reason="invalid", text="a ticket is personal")
        if ticket.weight != 0 and self._peers.role_of(peer) < Role.WORKER:
            return Joined(reason="invalid", text="only a worker may contribute: ask for another invitation")
        if group := self._remembered(ticket):
            return _hand_out(group, peer)
        leading = self._leading.get((ticket.step, ticket.lineage))
        if leading is None:
            ready_in_s = self._on_called(ticket, peer)
            if ready_in_s is None:
                return self._decline(ticket)
            leading = self._lead(ticket, ready_in_s)
        if refusal := leading.gathering.on_join(ticket, contact):
            return Joined(reason=refusal[0], text=refusal[1])
        leading.changed.set()
        return await self._outcome(leading, peer)

    def _decline(self, ticket: Ticket) -> Joined:
        if any(step == ticket.step for step, _ in self._leading):
            text = f"step {ticket.step} here is of another lineage: load the state from a peer"
            return Joined(reason="resync", text=text)
        return Joined(reason="unreachable", text="not at this step")

    async def _outcome(self, leading: _Leading, peer: PeerId) -> Joined:
        try:
            outcome = await asyncio.shield(leading.task)
        except asyncio.CancelledError:  # the caller gave up; whoever is gone is not waited for
            if not leading.task.done():
                leading.gathering.on_lost(peer)
                leading.changed.set()
            raise
        if isinstance(outcome, Contact):
            return Joined(organizer=outcome)
        return (
            _hand_out(outcome, peer)
            if outcome
            else Joined(reason="unreachable", text="nobody here can reduce")
        )

    # --- organizing -----------------------------------------------------------------------------------------

    def _lead(self, terms: Ticket, ready_in_s: float) -> _Leading:
        now = _now()
        gathering = GroupFormation(terms, now=now, settings=self._settings)
        gathering.on_coming(self._peers.id, ready_in_s, now=now)
        leading = _Leading(gathering)
        self._leading[terms.step, terms.lineage] = leading
        leading.task = asyncio.create_task(self._organize(leading), name=f"organize step {terms.step}")
        return leading

    async def _organize(self, leading: _Leading) -> Group | Contact | None:
        """Form the group, or find it or its organizer elsewhere; None if no group is possible."""
        terms, me = leading.gathering.terms, self._peers.id
        calls: list[asyncio.Task[None]] = []
        try:
            candidates = [peer for peer in await self._expected(terms.step, terms.lineage) if peer != me]
            calls = [asyncio.create_task(self._invite(leading, peer)) for peer in candidates]
            await self._wait_closing(leading)
            group = leading.elsewhere or leading.gathering.form(self._round_id(terms), self._strategy)
        except ValueError as error:
            logger.info("no group for step %d: %s", terms.step, error)
            return None
        finally:
            for call in calls:
                call.cancel()
            del self._leading[terms.step, terms.lineage]
        if isinstance(group, Group):
            self._remember(group)
        return group

    async def _invite(self, leading: _Leading, peer: PeerId) -> None:
        """Call one candidate and tell the gathering what came of it."""
        gathering, terms = leading.gathering, leading.gathering.terms
        gathering.on_called(peer, now=_now())
        try:
            answer = await self._call(peer, terms)
        except PeerError:
            dialable = bool(self._peers.contact_of(peer).addresses)
            (gathering.on_declined if dialable else gathering.on_silent)(peer)
        else:
            try:
                if answer.group is not None:
                    answer.group.check()
                self._on_answer(leading, peer, answer)
            except ValueError:  # nothing that others would bar this organizer for is handed on
                gathering.on_declined(peer)
        leading.changed.set()

    def _on_answer(self, leading: _Leading, peer: PeerId, answer: JoinEta) -> None:
        contact, terms = self._peers.contact_of(peer), leading.gathering.terms
        group = answer.group
        if group is not None and (group.step, group.lineage) == (terms.step, terms.lineage):
            leading.elsewhere = group
        elif answer.ready_in_s is None or self._barred(peer):
            leading.gathering.on_declined(peer)
        elif contact.addresses and rank(self._prefix, terms.step, [peer, self._peers.id])[0] == peer:
            leading.elsewhere = contact
        else:
            leading.gathering.on_coming(peer, answer.ready_in_s, now=_now())

    async def _wait_closing(self, leading: _Leading) -> None:
        """Return when the gathering is to be closed, or somebody else has the group."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # let the calls begin, so that everyone called is awaited
        while leading.elsewhere is None and (closes_at := leading.gathering.closes_at()) > loop.time():
            leading.changed.clear()
            try:
                async with asyncio.timeout_at(closes_at):
                    await leading.changed.wait()
            except TimeoutError:
                pass

    def _round_id(self, terms: Ticket) -> bytes:
        now = struct.pack("<d", _now())
        seed = f"{self._prefix}|{terms.step}|".encode() + terms.lineage + self._peers.id + now
        return hashlib.sha256(seed).digest()[:16]


class _Leading:
    """One round this peer organizes."""

    task: asyncio.Task[Group | Contact | None]

    def __init__(self, gathering: GroupFormation) -> None:
        self.gathering = gathering
        self.changed = asyncio.Event()
        self.elsewhere: Group | Contact | None = None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _hand_out(group: Group, peer: PeerId) -> Joined:
    if group.index_of(peer) is None:
        return Joined(reason="late", text=f"the group of step {group.step} was formed without you")
    return Joined(group)
