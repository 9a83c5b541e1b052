"""Finding the group of a round: ask the organizer, or be it. The driver of two pure cores.

`search` decides whom this peer asks and what an answer means. `organizer` decides what this peer answers to calls and
tickets, and when its own formations close. This module carries their decisions to other peers: it holds the
streams, tasks and timers, and tells the cores what came of them.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from colab_swarm.averaging.formation import GroupFormation
from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    Joined,
    JoinEta,
    JoinRound,
    RoundRefused,
    RoundTerms,
    Strategy,
    Ticket,
    wrong_numbers,
)
from colab_swarm.averaging.memory import RoundMemory, SwarmView
from colab_swarm.averaging.organizer import Organized, Organizer, hand_out
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.averaging.search import HEARTBEAT_S, Pause, Question, Search
from colab_swarm.averaging.standing import Standing
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.errors import PeerError, require
from colab_swarm.net.patience import allowance_s
from colab_swarm.net.peers import Contact, PeerId, Role, Stream
from colab_swarm.runtime import loop_now, wait_until, wake

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Matchmaker:
    """Forms groups among the peers of the collaboration ``prefix``.

    Args:
        swarm: what the owner knows about its swarm.
        standing: how far this peer trusts others, if the owner keeps account of it; by default, one of its own.
    """

    def __init__(
        self,
        router: PrefixRouter,
        prefix: str,
        swarm: SwarmView,
        *,
        standing: Standing | None = None,
        strategy: Strategy = adaptive_shares,
        settings: GroupFormationSettings | None = None,
    ) -> None:
        self._router = router
        self._peers = router.peers
        self._prefix = prefix
        self._swarm = swarm
        if standing is None:
            standing = Standing(self._peers.id, heard_at=self._peers.read_at, events=router.events)
        self.standing = standing
        self._settings = settings or GroupFormationSettings()
        self._memory = RoundMemory(
            standing,
            router.dishonest,
            call_timeout_s=self._settings.call_timeout_s,
            slack_s=self._settings.slack_s,
        )
        self._organizer = Organizer(self._peers, swarm, self._memory, self._settings, strategy)
        # The last search that `join` began. The organizer asks it whom this peer trusts.
        self._search = Search(self._peers, swarm, self._memory, self._settings)
        # The task of each open formation, from its first ticket to its end; `_join_here` starts it.
        self._forming: dict[tuple[int, bytes], asyncio.Task[Organized]] = {}
        # Woken whenever a formation may have changed.
        self._changed = asyncio.Event()
        # The calls to candidates and organizers that have no answer yet.
        self._calls: set[asyncio.Task[Any]] = set()
        # The timer of the organizer's next heartbeat, while `_converse` waits for it.
        self._silence: asyncio.Timeout | None = None
        self._stop_listening = self._peers.on_lost(self._on_lost)
        router.serve_stream(prefix, JoinRound, self._serve_join, Role.REDUCER)
        router.serve(prefix, RoundTerms, self._serve_call, Role.REDUCER)

    def close(self) -> None:
        self._stop_listening()
        self._router.unserve(self._prefix, JoinRound, RoundTerms)
        for task in (*self._calls, *self._forming.values()):
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
        # A second call needs another group.
        self.forget(*key)
        if self._search.key != key:
            self._search = Search(self._peers, self._swarm, self._memory, self._settings, key)
        search = self._search
        search.begin(ticket, candidates, awaited, loop_now())
        try:
            async with asyncio.timeout_at(deadline):
                return await self._find(search, ticket)
        except TimeoutError:
            text = f"no organizer of step {ticket.terms.step} answered in time"
            raise RoundRefused("unreachable", text) from None
        finally:
            search.end()

    def forget(self, step: int, lineage: bytes) -> None:
        """Forget the group of a step: this peer came back without the mean, and needs another."""
        self._memory.forget(step, lineage)

    def likely(self, step: int, lineage: bytes) -> set[PeerId]:
        """Return linked callers of this round and members of the one before: records may be late."""
        return self._organizer.likely(step, lineage) & self._peers.linked()

    # As one that looks for a group.

    async def _find(self, search: Search, ticket: Ticket) -> Group:
        while True:
            question = search.next_ask(loop_now())
            if isinstance(question, Pause):
                await asyncio.sleep(question.seconds)
                continue
            group = await self._ask(search, question, ticket)
            if group is not None:
                self._on_group(group)
                return group

    async def _ask(self, search: Search, question: Question, ticket: Ticket) -> Group | None:
        try:
            if question.organizer == self._peers.id:
                joined = await self._join_self(ticket)
            else:
                async with asyncio.timeout(question.limit_s):
                    joined = await self._join_at(question, ticket)
        except TimeoutError:
            search.on_timeout(loop_now())
        except ValueError as error:
            search.on_invalid(error, loop_now())
        except PeerError as error:
            search.on_failed(error, loop_now())
        else:
            return search.on_answer(joined, loop_now())
        return None

    async def _join_self(self, ticket: Ticket) -> Joined:
        joined = await self._join_here(self._peers.id, JoinRound(ticket, self._peers.contact))
        # The others hear of the group first: this peer's part of the round keeps a core busy.
        for _ in range(3):
            await asyncio.sleep(0)
        return joined

    async def _join_at(self, question: Question, ticket: Ticket) -> Joined:
        organizer = question.organizer
        if question.contact is not None:
            self._peers.learn(question.contact)
        if organizer not in self._peers.linked():
            call = self._spawn(self._call(organizer, ticket.terms))
            await asyncio.wait([call], timeout=question.patience_s)
            require(call.done(), "no link to it yet", TimeoutError)
            answer = call.result()
            if answer.ready_in_s is None:
                # It will not organize; it may know the group.
                return Joined(answer.group)
        slow_s = allowance_s(self._peers, organizer)
        timeout_s = self._settings.call_timeout_s
        patience_s = max(0.0, question.left_s(loop_now()) - slow_s)
        message = JoinRound(ticket, self._peers.contact, patience_s)
        async with await self._peers.stream(organizer, message, timeout_s=timeout_s) as stream:
            require(self._peers.role_of(organizer) >= Role.REDUCER, "its role does not let it organize")
            return await self._converse(stream, question, ticket.terms.key, slow_s)

    async def _converse(
        self, stream: Stream, question: Question, key: tuple[int, bytes], slow_s: float
    ) -> Joined:
        """Return the organizer's answer, which comes after its heartbeats."""
        joined = Joined()
        while joined.forming:
            callers = self._organizer.callers_of(key)
            silent_at = question.expect_heartbeat(slow_s, callers, loop_now())
            async with asyncio.timeout_at(silent_at) as timer:
                self._silence = timer
                try:
                    joined, _ = await stream.receive(Joined)
                finally:
                    self._silence = None
            question.silent_at = None
        return joined

    async def _call(self, peer: PeerId, terms: RoundTerms) -> JoinEta:
        """Ask a peer whether it comes."""
        answer = await self._peers.call(peer, terms, JoinEta, timeout_s=self._settings.call_timeout_s)
        self._search.on_eta(peer, terms.key, answer)
        return answer

    def _spawn(self, call: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Start a call in the background: a slow dial still leaves a link for the next round."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _on_group(self, group: Group) -> None:
        if self._organizer.on_group(group, loop_now()):
            for member in group.members:
                self._peers.learn(Contact(member.id, member.addresses))
            wake(self._changed)

    # As one that others call and join.

    async def _serve_call(self, peer: PeerId, terms: RoundTerms) -> JoinEta:
        answer = self._organizer.on_call(peer, terms, self._search, loop_now())
        self._on_called()
        return answer

    def _on_called(self) -> None:
        """Carry out what a call may have changed: a formation, or the patience with the asked organizer."""
        wake(self._changed)
        question = self._search.asked
        timer = self._silence
        if question is None or timer is None or timer.expired():
            return
        if question.silent_at != timer.when():
            timer.reschedule(question.silent_at)

    async def _serve_join(self, message: JoinRound, stream: Stream) -> None:
        joining = asyncio.create_task(self._join_here(stream.peer, message))
        # A quick group is not preceded by a heartbeat.
        wait_s = HEARTBEAT_S / 10
        try:
            async with stream:
                while not (await asyncio.wait([joining], timeout=wait_s))[0]:
                    await stream.send(Joined())
                    wait_s = HEARTBEAT_S
                await stream.send(joining.result())
                await stream.end()
        finally:
            joining.cancel()

    async def _join_here(self, peer: PeerId, message: JoinRound) -> Joined:
        key = message.ticket.terms.key
        role = self._peers.role_of(peer)
        answer = self._organizer.on_join(peer, role, message, self._search, loop_now())
        formation = self._organizer.formations.get(key)
        if formation is not None and key not in self._forming:
            self._forming[key] = asyncio.create_task(
                self._form(formation), name=f"organize step {formation.terms.step}"
            )
        self._on_called()
        if answer is not None:
            return answer
        assert formation is not None
        forming = self._forming[key]
        try:
            organized = await asyncio.shield(forming)
        except asyncio.CancelledError:
            # The peer gave up.
            if not forming.done():
                formation.on_gave_up(peer, message.ticket)
                wake(self._changed)
            raise
        return hand_out(organized, peer)

    # As one that organizes.

    async def _form(self, formation: GroupFormation) -> Organized:
        organized: Organized = None
        try:
            expected = await self._swarm.expected(*formation.terms.key)
            for peer in self._organizer.on_expected(formation, expected):
                self._spawn(self._invite(formation, peer))
            # The calls begin, so every called peer is awaited.
            await asyncio.sleep(0)
            while (closes_at := formation.closes_at()) > loop_now():
                await wait_until(closes_at, self._changed)
            organized = self._organizer.form(formation, loop_now())
        except ValueError as error:
            logger.info("no group for step %d: %s", formation.terms.step, error)
        finally:
            self._organizer.close(formation, loop_now())
            del self._forming[formation.terms.key]
        if isinstance(organized, Group):
            self._on_group(organized)
        return organized

    async def _invite(self, formation: GroupFormation, peer: PeerId) -> None:
        linked = peer in self._peers.linked()
        slow_s = allowance_s(self._peers, peer)
        invitation = self._organizer.invite(formation, peer, linked=linked, slow_s=slow_s, now=loop_now())
        try:
            answer = await self._call(peer, formation.terms)
        except PeerError:
            self._organizer.on_unreachable(formation, peer)
        else:
            self._organizer.on_eta(formation, invitation, answer, self._search, loop_now())
        wake(self._changed)

    def _on_lost(self, peer: PeerId) -> None:
        self._organizer.on_lost(peer)
        wake(self._changed)
