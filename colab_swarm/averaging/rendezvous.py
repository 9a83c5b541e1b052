"""Where the groups of a collaboration form: a peer stands at the organizer, or is the organizer itself.

To stand at an organizer is to keep a stream to it open, step after step. On this stream the peer reports its `Share`,
and receives its grants. If the organizer is lost, all peers go to the next organizer in the last group's order. Before
the new organizer forms a group, it asks the other members whether they have already received the group of this step.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from msgspec.structs import replace

from colab_swarm.averaging.forming import MOST_TARGETS, Formation, FormationSettings, holders_of, order_of
from colab_swarm.averaging.grants import REPORT_S
from colab_swarm.averaging.group import Attend, Group, News, RoundRefused, StepReport, Whereabouts
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.averaging.share import Share
from colab_swarm.errors import PeerError, require
from colab_swarm.events import Fault, PeerRefused, Waited
from colab_swarm.net.patience import LeftOut, Patience
from colab_swarm.net.peers import Contact, PeerId, Role, Stream, StreamEnded, end_tasks, remember, short
from colab_swarm.runtime import loop_now, wait_until, wake

logger = logging.getLogger(__name__)

_DIAL_S = 5.0
_ANSWER_S = 3.0  # for the answer to a question; a busy notebook answers late
_SILENCE_S = 5.0  # if an organizer is silent for this time, this peer asks whether it is alive
_LOOK_S = 2.0  # between two searches for a better organizer, before the first group
_LOOK_IN_MEETING_S = 0.25
_PAUSE_S = 0.1  # before this peer goes to another organizer
_GONE_S = 15.0  # how long an organizer that failed for the first time is not tried again
_KEPT_GROUPS = 4
_AWAKE_S = 1.0  # a timer that is this late shows that the process was stopped


class Neighbourhood(Protocol):
    """The owner of a `Rendezvous`: it knows the other peers, and the rendezvous tells it of grants and groups."""

    async def organizers(self) -> Sequence[Contact]:
        """Return the peers that may organize, by their records, the best first; this peer is one of them."""
        ...

    def live(self) -> Collection[PeerId]:
        """Return the other trainers that are believed to be alive."""
        ...

    def helpers(self) -> Collection[PeerId]:
        """Return the assistants that are believed to be alive, and other organizers."""
        ...

    def on_group(self, group: Group, *, contributes: bool) -> None:
        """Take a new group of which this peer is a member; the `Share` of this peer has already begun the next step.

        ``contributes`` is True if the group uses this peer's present ticket. It is False if this peer withdrew that
        ticket too late, or had none. A meeting's group may lack this peer.
        """
        ...

    def on_granted(self) -> None:
        """Note that this peer's grant has changed, or that `Rendezvous.first_step` is known now."""
        ...


class Rendezvous:
    """A peer's part in the groups of the collaboration ``prefix``.

    Attributes:
        share: this peer's part of the present step. After a change, call `tell`, which reports it.
        group: the last group of which this peer was a member; its id is the ``key``.
        organizer: the organizer at which this peer stands; None while this peer looks for an organizer.
        first_step: step of the first group that will include this peer at this organizer; -1 if not known.
        formation: forms the groups while this peer organizes, else None.
    """

    def __init__(
        self, router: PrefixRouter, prefix: str, settings: FormationSettings, neighbourhood: Neighbourhood
    ) -> None:
        self._router = router
        self._peers = router.peers
        self._events = router.events
        self._prefix = prefix
        self.settings = settings
        self._neighbourhood = neighbourhood
        self.share = Share()
        self.group: Group | None = None
        self.organizer: Contact | None = None
        self.first_step = -1
        self.formation: Formation | None = None  # while this peer organizes
        self._patience = Patience[PeerId](60.0)
        # In a meeting all peers come at the same time, so a peer may come a moment before the organizer is ready.
        meets = settings.window_s is not None
        self._gone = LeftOut[PeerId](_LOOK_IN_MEETING_S if meets else _GONE_S, 60.0)
        self._groups: dict[bytes, Group] = {}  # by the id of the group before
        self._queues: dict[PeerId, asyncio.Queue[News]] = {}  # news for each peer that stands here
        self._told: PeerId | None = None  # an organizer that another peer named, to which this peer goes
        self._moved = asyncio.Event()  # set with ``_told``
        self._succeeds = b""  # the key when this peer began to organize; it knows all groups after that
        self._refused = b""  # the key of the last group after which this peer refused a minority
        self._changed = asyncio.Event()  # the formation may have something to do
        self._report_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        router.serve_stream(prefix, Attend, self._serve_attend, Role.REDUCER)
        router.serve(prefix, Whereabouts, self._serve_whereabouts, Role.REDUCER)

    @property
    def key(self) -> bytes:
        return self.group.round_id if self.group else b""

    @property
    def me(self) -> PeerId:
        return self._peers.id

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._stand(), name="rendezvous")

    def close(self) -> None:
        self._router.unserve(self._prefix, Attend, Whereabouts)
        for task in (self._task, *self._tasks):
            if task is not None:
                task.cancel()

    async def leave(self) -> None:
        """End the stream to the organizer, so that the organizer knows that this peer leaves."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)

    def tell(self) -> None:
        """Report the share to the organizer now."""
        self._report_due.set()

    def move(self, organizer: Contact) -> None:
        """Go to another organizer, whose swarm is on another branch."""
        if self.organizer is not None and self.organizer.id != organizer.id:
            self.group = None
            self.first_step = -1
            self._peers.learn(organizer)
            self._go(organizer.id)

    def begin_again(self) -> None:
        """Forget the last group, because this peer now holds a state that comes from no group."""
        self.group = None
        self.first_step = -1
        if self.organizer is not None:
            self._go(self.organizer.id)

    async def has_begun(self, organizer: Contact) -> bool:
        """Return True if a group has formed at this organizer, or if the organizer does not answer."""
        if organizer.id == self.me:
            return self.group is not None
        self._peers.learn(organizer)
        ask = Whereabouts(self._prefix, self.key)
        try:
            return bool((await self._peers.call(organizer.id, ask, News, timeout_s=_ANSWER_S)).key)
        except PeerError:
            return True

    def _go(self, organizer: PeerId) -> None:
        self._gone.forgive(organizer)  # another peer named it, so it is alive
        self._told = organizer
        self._moved.set()

    # As a peer that stands at an organizer.

    async def _stand(self) -> None:
        while True:
            contact = await self._choose()
            self._moved.clear()
            work = self._organize() if contact.id == self.me else self._attend(contact)
            standing = asyncio.create_task(work, name=f"stand at {short(contact.id)}")
            moving = asyncio.create_task(self._moved.wait())
            try:
                await asyncio.wait([standing, moving], return_when=asyncio.FIRST_COMPLETED)
                if standing.done():
                    standing.result()
            except (PeerError, TimeoutError, ValueError) as error:
                logger.info("the organizer %s is lost: %s", short(contact.id), error)
                self._gone.fail(contact.id, loop_now())
                if isinstance(error, ValueError):
                    self._events.emit(PeerRefused(loop_now(), contact.id.hex(), "a group", str(error)))
            except Exception as error:  # caught broadly: without this loop, this peer would train no more
                logger.exception("at the organizer")
                self._events.emit(Fault.of(loop_now(), "at the organizer", error))
            finally:
                await end_tasks(standing, moving)
                self.organizer = None
                self.first_step = -1
            await asyncio.sleep(_PAUSE_S)

    async def _choose(self) -> Contact:
        """Return the organizer to go to: the peer that the last group names, else the next peer in its order.

        A peer that another organizer named comes before both, and the peers by their records come last.
        """
        while True:
            order = [self._told] if self._told else []
            self._told = None
            order += self._order()
            now = loop_now()
            for peer in order:
                if peer == self.me or not self._gone.holds(peer, now):
                    return self._peers.contact_of(peer)
            for contact in await self._neighbourhood.organizers():
                self._peers.learn(contact)
                if contact.id == self.me or not self._gone.holds(contact.id, now):
                    return contact
            await asyncio.sleep(_PAUSE_S)

    def _order(self) -> list[PeerId]:
        """Return the peers that may organize after the last group, the best first."""
        if self.group is None:
            return []
        addresses = {member.id: member.addresses for member in self.group.members}
        holders = [peer for peer in holders_of(self.group) if addresses[peer]]
        assistants = [member.id for member in self.group.members if member.assists]
        order = [self.group.organizer, *order_of(self.key, holders), *order_of(self.key, assistants)]
        return list(dict.fromkeys(order))

    def _is_better(self, peer: PeerId, other: PeerId) -> bool:
        """Return True if ``peer`` comes before ``other`` in the order of organizers after the last group."""
        order = self._order()
        return peer in order and (other not in order or order.index(peer) < order.index(other))

    async def _attend(self, organizer: Contact) -> None:
        """Stand at an organizer until it names another organizer; raises `PeerError` if the organizer is lost."""
        async with await self._peers.stream(organizer.id, self._opening(), timeout_s=_DIAL_S) as stream:
            require(self._peers.role_of(organizer.id) >= Role.REDUCER, "its role does not let it organize")
            self.organizer = organizer
            self.first_step = -1
            reports = asyncio.create_task(self._send_reports(stream.send))
            try:
                while await self._hear(stream):
                    pass
            finally:
                await end_tasks(reports)

    def _opening(self) -> Attend:
        settings = self.settings
        return Attend(self._peers.contact, self.key, settings.terms, settings.target, self.share.assistant)

    async def _hear(self, stream: Stream) -> bool:
        """Take the next news; return False if another peer organizes."""
        try:
            async with asyncio.timeout(_SILENCE_S):
                news, _ = await stream.receive(News)
        except TimeoutError:
            # If bytes arrived, the organizer is alive. Its news may be slow, because a round keeps the line busy.
            asked_at = loop_now()
            if asked_at - self._peers.read_at(stream.peer) < _SILENCE_S:
                return True
            # The organizer may have no news, or be frozen.
            ask = Whereabouts(self._prefix, self.key)
            try:
                news = await self._peers.call(stream.peer, ask, News, timeout_s=_ANSWER_S)
            except PeerError:
                if self._peers.read_at(stream.peer) > asked_at:
                    return True
                waited_s = _SILENCE_S + _ANSWER_S
                self._events.emit(Waited(loop_now(), stream.peer.hex(), "the organizer's answer", waited_s))
                # The organizer may have sent a meeting's group meanwhile, and left.
                async with asyncio.timeout(0):
                    news, _ = await stream.receive(News)
        self._on_news(news)
        if news.organizer is not None and news.organizer.id != stream.peer:
            self._peers.learn(news.organizer)
            self._go(news.organizer.id)
            return False
        if news == News(news.key):
            # Empty news mean that this peer does not organize any more.
            return False
        return self.group is None or news.group is None or self.group.organizer == stream.peer

    async def _send_reports(self, send: Callable[[StepReport], Awaitable[None]]) -> None:
        """Report the share when it has changed, and each second while this peer computes."""
        while True:
            self._report_due.clear()
            report = self.share.report(loop_now())
            await send(replace(report, key=self.key))
            await wait_until(loop_now() + REPORT_S if self._computes() else None, self._report_due)

    def _computes(self) -> bool:
        share = self.share
        return share.averages or (share.ticket is None and not share.away and share.granted > 0)

    def _on_news(self, news: News) -> None:
        """Take the organizer's news.

        Raises PeerError if the organizer refuses this peer, ValueError if no honest organizer would send these news,
        RoundRefused if the group has too few members.
        """
        require(not news.refusal, news.refusal, PeerError)
        if news.step >= 0:
            self.first_step = news.step
            self._neighbourhood.on_granted()
        if news.group is not None and self._concerns(news.group):
            self._on_group(news.group)
        elif news.granted is not None:
            # A stream keeps the order of messages, so the grant is for the present step, even if the keys differ.
            self._check_grant(news.granted)
            self.share.granted = news.granted
            self._report_due.set()
            self._neighbourhood.on_granted()

    def _check_grant(self, granted: float) -> None:
        most = self.share.counted + MOST_TARGETS * self.settings.target + self.share.samples
        require(0 <= granted <= most, f"a grant of {granted:g} samples of {self.settings.target:g}")

    def _concerns(self, group: Group) -> bool:
        return self.settings.window_s is not None or group.index_of(self.me) is not None

    def _check(self, group: Group) -> None:
        """Raise ValueError if no honest organizer of this collaboration would form this group."""
        group.check()
        own = self.settings.terms
        terms = replace(group.terms, step=own.step, lineage=own.lineage)
        # An assistant does not know the model until a trainer comes.
        same = terms == own if own.numel else terms.prefix == own.prefix
        require(same and len(group.grants) == len(group.members), "a group of another collaboration")

    def _on_group(self, group: Group) -> None:
        self._check(group)
        if self.group is not None and group.round_id == self.group.round_id:
            # This group is known already. The first organizer may have been lost while it sent the group, so that a
            # second one sends it again; or the answer to `Whereabouts` contained it.
            return
        index = group.index_of(self.me)
        if index is None and self.settings.window_s is not None:
            self._neighbourhood.on_group(group, contributes=False)
            return
        require(index is not None, "a group without this peer")
        assert index is not None
        ticket = self.share.ticket
        counted = group.members[index].weight, group.members[index].samples
        # A ticket of weight 0 counts, too: its samples are used, although all their targets are masked.
        contributes = ticket is not None and ticket.samples > 0 and counted == (ticket.weight, ticket.samples)
        self._check_grant(group.grants[index])
        self._check_quorum(group)
        remember(self._groups, self.key, group, _KEPT_GROUPS)
        for member in group.members:
            if member.addresses:
                self._peers.learn(Contact(member.id, member.addresses))
        self._gone.forgive(group.organizer)
        self.group = group
        self.share.begin(group.grants[index])
        self._neighbourhood.on_group(group, contributes=contributes)

    def _check_quorum(self, group: Group) -> None:
        """Raise RoundRefused if a group has at most half of the last group's live holders.

        After each group this peer refuses only once. But it always refuses a group with at most one of these holders.
        """
        if self.group is None:
            return
        before = holders_of(self.group)
        here = before & {member.id for member in group.members}
        alive = here | before.intersection(self._neighbourhood.live())
        if not alive or 2 * len(here) > len(alive) or (len(here) > 1 and self._refused == self.key):
            return
        self._refused = self.key
        missing = len(alive) - len(here)
        raise RoundRefused("unreachable", f"{missing} of {len(alive)} trainers are not in the group")

    # As the organizer.

    async def _organize(self) -> None:
        """Form groups until another peer organizes."""
        formation = Formation(self.settings, self.me, self.group, self._patience, loop_now())
        self.formation = formation
        self._succeeds = self.key
        self.organizer = self._peers.contact
        formation.on_attend(self.me, self._opening())
        asking = asyncio.create_task(self._look_for_others(formation))
        reports = asyncio.create_task(self._send_reports(self._report_here))
        wake(self._changed)
        try:
            before = self.group
            while self.group is before or self.group is None or self.group.organizer == self.me:
                now = loop_now()
                formation.on_linked(self._peers.linked())
                action = formation.next_action(now, self._neighbourhood.live())
                for peer, granted in action.grants.items():
                    self._send(peer, News(formation.key, granted))
                if action.group is not None:
                    self._announce(formation, action.group)
                    await asyncio.sleep(0)
                    continue
                look_at = max(now, min(action.look_at, now + _LOOK_S))
                await wait_until(look_at, self._changed)
                if loop_now() > look_at + _AWAKE_S:
                    # This process was stopped, so it could receive no reports.
                    formation.batch.excuse(formation.contacts, loop_now())
        finally:
            self.formation = None
            await end_tasks(asking, reports)
            for queue in self._queues.values():
                queue.put_nowait(News(self.key, organizer=self._contact_of_next()))
            self._queues = {}

    def _contact_of_next(self) -> Contact | None:
        if self._told is not None:
            return self._peers.contact_of(self._told)
        if self.group is None or self.group.organizer == self.me:
            return None
        return self._peers.contact_of(self.group.organizer)

    def _announce(self, formation: Formation, group: Group) -> None:
        """Send the group to all peers that stand here; this peer comes last, because its round keeps a core busy."""
        news = News(formation.key, group=group)
        formation.on_group(group, loop_now())
        for peer in self._queues:
            self._send(peer, news)
        if self._concerns(group):
            self._on_group(group)

    def _send(self, peer: PeerId, news: News) -> None:
        if peer == self.me:
            self._on_news(news)
        elif peer in self._queues:
            self._queues[peer].put_nowait(news)

    async def _report_here(self, report: StepReport) -> None:
        formation = self.formation
        if formation is not None:
            now = loop_now()
            formation.on_report(self.me, report, now)
            if report.averages:
                # Reports of the others come late while the round keeps their lines busy, but bytes still arrive.
                heard = [peer for peer in formation.contacts if now - self._peers.read_at(peer) < _SILENCE_S]
                formation.batch.excuse(heard, now)
            wake(self._changed)

    async def _look_for_others(self, formation: Formation) -> None:
        """Ask the live members of the last group that do not stand here, because one may have the group of this step.

        Before the first group, check whether another peer organizes.
        """
        while True:
            for helper in set(self._neighbourhood.helpers()) - formation.contacts.keys():
                if self._gone.holds(helper, loop_now()):
                    continue
                # The question tells an assistant of this collaboration, and then the assistant comes here.
                task = asyncio.create_task(self._ask(formation, helper))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if self.group is None:
                await asyncio.sleep(_LOOK_S if self.settings.window_s is None else _LOOK_IN_MEETING_S)
                await self._look_for_better()
                continue
            missing = (
                holders_of(self.group).intersection(self._neighbourhood.live()) - formation.contacts.keys()
            )
            formation.missing = missing
            await asyncio.gather(*(self._ask(formation, peer) for peer in sorted(missing)))
            await wait_until(loop_now() + 1.0, self._changed)

    async def _look_for_better(self) -> None:
        """Go to the first peer that answers and is a better organizer than this peer."""
        for contact in await self._neighbourhood.organizers():
            if contact.id == self.me:
                return
            if self._gone.holds(contact.id, loop_now()):
                continue
            self._peers.learn(contact)
            ask = Whereabouts(self._prefix, self.key)
            try:
                await self._peers.call(contact.id, ask, News, timeout_s=_ANSWER_S)
            except PeerError:
                self._gone.fail(contact.id, loop_now())
                continue
            self._go(contact.id)
            return

    async def _ask(self, formation: Formation, peer: PeerId) -> None:
        step, _ = formation.branch or (-1, b"")
        ask = Whereabouts(self._prefix, formation.key, max(1, len(formation.holders)), step)
        try:
            answer = await self._peers.call(peer, ask, News, timeout_s=_ANSWER_S)
            if answer.group is not None:
                self._check(answer.group)
        except PeerError:
            self._gone.fail(peer, loop_now())
            answer = News(b"")
        except ValueError as error:
            self._events.emit(PeerRefused(loop_now(), peer.hex(), "a group", str(error)))
            answer = News(b"")
        formation.missing = set(formation.missing) - {peer}
        is_missed = answer.group is not None and answer.group.index_of(self.me) is not None
        if answer.group is not None and is_missed and formation.key == self.key == self._succeeds:
            self._announce(formation, answer.group)
        elif answer.organizer is not None and not self._gone.holds(answer.organizer.id, loop_now()):
            other = answer.organizer.id
            parted = answer.key != self.key
            if (other == peer and self.group is not None) if parted else self._is_better(other, self.me):
                self._peers.learn(answer.organizer)
                self._go(other)
        wake(self._changed)

    async def _serve_whereabouts(self, peer: PeerId, ask: Whereabouts) -> News:
        organizer = self.organizer
        if ask.members and self._yields(peer, ask):
            self._go(peer)
            organizer = self._peers.contact_of(peer)
        return News(self.key, group=self._group_after(ask.key), organizer=organizer)

    def _yields(self, peer: PeerId, ask: Whereabouts) -> bool:
        """Return True if this peer should go to ``peer``, which organizes, too.

        If both peers have the same last group, this group's order of organizers decides. If the swarms have separated,
        a peer that can be dialled is the better organizer, then the peer with more members, then the later step.
        """
        if self.organizer is None or self.organizer.id == peer:
            return False
        if ask.key == self.key:
            return self._is_better(peer, self.organizer.id)
        formation = self.formation
        if formation is None:
            return False
        step, _ = formation.branch or (-1, b"")
        mine = bool(self._peers.contact.addresses), len(formation.holders), step
        theirs = bool(self._peers.contact_of(peer).addresses), ask.members, ask.step
        return theirs > mine or (theirs == mine and peer < self.me)

    def _group_after(self, key: bytes) -> Group | None:
        """Return the group after the group ``key``; without a key, as in a new process, only the newest group."""
        group = self._groups.get(key)
        return group if key or group is self.group else None

    async def _serve_attend(self, message: Attend, stream: Stream) -> None:
        if self.formation is None and (message.key != self.key or self.organizer is None):
            # The other peer may have received the group before this peer did.
            await wait_until(loop_now() + 1.0, self._changed)
        async with stream:
            formation = self.formation
            group = self._group_after(message.key)
            if formation is None or (group is not None and group.index_of(stream.peer) is not None):
                await stream.send(News(self.key, group=group, organizer=self.organizer))
                return
            if message.key not in (b"", formation.key) and self.settings.window_s is None:
                # The other peer may already have the group of this step, which this peer has not received.
                await self._ask(formation, stream.peer)
            refusal = "only a worker may train: ask for another invitation"
            if message.assistant is not None or self._peers.role_of(stream.peer) >= Role.WORKER:
                refusal = formation.on_attend(stream.peer, message)
            if refusal:
                await stream.send(News(self.key, refusal=refusal))
                return
            self._gone.forgive(stream.peer)
            queue = self._queues[stream.peer] = asyncio.Queue[News]()
            granted = formation.granted_before(stream.peer) if message.key == formation.key else None
            queue.put_nowait(News(formation.key, granted, step=formation.next_step))
            sending = asyncio.create_task(self._send_news(stream, queue))
            try:
                await self._take_reports(stream, formation, queue)
            finally:
                await end_tasks(sending)

    async def _send_news(self, stream: Stream, queue: asyncio.Queue[News]) -> None:
        while True:
            await stream.send(await queue.get())

    async def _take_reports(self, stream: Stream, formation: Formation, queue: asyncio.Queue[News]) -> None:
        peer = stream.peer
        left = False
        try:
            while self.formation is formation and self._queues.get(peer) is queue:
                report, _ = await stream.receive(StepReport)
                problem = formation.on_report(peer, report, loop_now())
                if problem:
                    self._events.emit(PeerRefused(loop_now(), peer.hex(), "a ticket", problem))
                wake(self._changed)
        except StreamEnded:
            left = True
        except PeerError as error:
            logger.info("%s stands here no more: %s", short(peer), error)
        finally:
            if self._queues.get(peer) is queue and self.formation is formation:
                del self._queues[peer]
                if left:
                    formation.on_left(peer)
                else:
                    formation.on_lost(peer)
                if peer not in self._peers.linked():
                    formation.awaited.discard(peer)
                wake(self._changed)
