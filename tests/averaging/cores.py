"""Peers as pure cores, driven against each other by a script: no socket, no event loop, no clock.

`Script` keeps what is going to happen, in the order of time. `CorePeer` does for its two cores what
`colab_swarm.averaging.matchmaking` does, and checks on the way what must hold in every order of events.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

from colab_swarm.averaging.formation import GroupFormation
from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    Joined,
    JoinEta,
    JoinRound,
    RoundRefused,
    RoundTerms,
    Ticket,
    equal_shares,
    rank,
)
from colab_swarm.averaging.memory import RoundMemory, SwarmView
from colab_swarm.averaging.organizer import Organized, Organizer, hand_out
from colab_swarm.averaging.router import SKIPPED_S
from colab_swarm.averaging.search import HEARTBEAT_S, Pause, Question, Search
from colab_swarm.averaging.standing import Standing
from colab_swarm.errors import PeerLost
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import Contact, PeerId, Role

TERMS = RoundTerms("run", 7, b"lineage", 100, b"schema")
SETTINGS = GroupFormationSettings()
PEERS = [PeerId(bytes([i]) * 32) for i in range(1, 6)]
LONGEST_S = 120.0  # one attempt of a search
AGAIN_S = 0.5  # a refused peer reads the records, and joins again
TRIES = 40  # then the round runs without it, and it catches up


class Book:
    """Everybody's addresses, at one peer; peers of ``clients`` have none."""

    def __init__(self, me: PeerId, clients: Sequence[PeerId] = ()) -> None:
        self.id = me
        self._clients = clients

    @property
    def contact(self) -> Contact:
        return self.contact_of(self.id)

    def contact_of(self, peer: PeerId) -> Contact:
        return Contact(peer, () if peer in self._clients else ("ws://somewhere",))


def memory_of(me: PeerId) -> RoundMemory:
    left_out = LeftOut[PeerId](SKIPPED_S, SKIPPED_S)
    return RoundMemory(Standing(me), left_out, call_timeout_s=10.0, slack_s=1.0)


class Script:
    """What is going to happen; ``latest_s`` is the longest way of a message."""

    def __init__(self, rng: random.Random, latest_s: float) -> None:
        self.now = 1000.0
        self.rng = rng
        self._latest_s = latest_s
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), act))

    def send(self, act: Callable[[], None]) -> None:
        self.at(self.now + self.rng.uniform(0.0, self._latest_s), act)

    def run(self, most: int = 20_000) -> None:
        """Let everything happen. A script that never ends fails."""
        for _ in range(most):
            if not self._events:
                return
            self.now, _, act = heapq.heappop(self._events)
            act()
        raise AssertionError(f"{most} events, and still no end")


class CorePeer(SwarmView):
    """One honest peer, which joins the round at ``joins_at``."""

    def __init__(self, me: PeerId, town: "CoreTown", joins_at: float) -> None:
        self.id = me
        self.town = town
        self.script = town.script
        self.joins_at = joins_at
        self.alive = True
        self.ticket = Ticket(TERMS, 10.0)
        self.candidates = town.everybody
        self.memory = memory_of(me)
        self.book = Book(me)
        self.organizer = Organizer(self.book, self, self.memory, SETTINGS, equal_shares)
        self.search = Search(self.book, self, self.memory, SETTINGS)
        self.group: Group | None = None
        self.refusals: list[RoundRefused] = []
        # The peers that wait for a formation, and how each gets its answer.
        self.waiting: dict[tuple[int, bytes], list[tuple[PeerId, Callable[[Joined], None]]]] = {}
        self.passed_until: dict[PeerId, float] = {}
        self.formed: list[Group] = []
        self.script.at(joins_at, self.join)

    # What the cores ask their owner.

    async def expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        raise AssertionError("the driver reads it, no core")

    def on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        return max(0.0, self.joins_at - self.script.now) if terms.key == TERMS.key else None

    def believed_s(self, peer: PeerId) -> float:
        return 2.0

    # A search.

    def join(self) -> None:
        if not self.alive:
            return
        self.memory.forget(*TERMS.key)
        if self.search.key != TERMS.key:
            self.search = Search(self.book, self, self.memory, SETTINGS, TERMS.key)
        awaited = [peer.id for peer in self.town.honest()]
        self.search.begin(self.ticket, self.candidates, awaited, self.script.now)
        self.began_at = self.script.now
        self.before: PeerId | None = None
        self.go_on()

    def go_on(self) -> None:
        if not self.alive:
            return
        now = self.script.now
        assert now - self.began_at < LONGEST_S, "an attempt ends in time"
        try:
            question = self.search.next_ask(now)
        except RoundRefused as refusal:
            self.on_refused(refusal)
            return
        if isinstance(question, Pause):
            self.script.at(now + question.seconds, self.go_on)
            return
        self.check(question)
        if question.organizer == self.id:
            self.take_ticket(self.id, self.ticket, lambda joined: self.on_joined(question, joined))
            return
        self.script.at(now + question.limit_s, lambda: self.give_up(question))
        other = self.town.peer(question.organizer)
        question.expect_heartbeat(0.0, self.organizer.callers_of(TERMS.key), now)
        self.watch(question)
        self.script.send(
            lambda: other.take_ticket(self.id, self.ticket, lambda joined: self.receive(question, joined))
        )

    def check(self, question: Question) -> None:
        """No organizer within the time for which it is passed over, and no redirect down the rank."""
        assert self.script.now >= self.passed_until.get(question.organizer, 0.0)
        if question.contact is not None:
            assert self.before is not None
            assert rank("run", 7, [self.before, question.organizer])[0] == question.organizer
        self.before = question.organizer

    def receive(self, question: Question, joined: Joined) -> None:
        self.script.send(lambda: self.on_joined(question, joined))

    def on_joined(self, question: Question, joined: Joined) -> None:
        if not self.alive or self.search.asked is not question:
            return
        question.silent_at = None
        if joined.forming:
            question.expect_heartbeat(0.0, self.organizer.callers_of(TERMS.key), self.script.now)
            self.watch(question)
            return
        try:
            group = self.search.on_answer(joined, self.script.now)
        except RoundRefused as refusal:
            self.on_refused(refusal)
            return
        self.note_passed()
        if group is None:
            self.go_on()
            return
        assert group.index_of(self.id) is not None
        self.group = group
        self.organizer.on_group(group, self.script.now)
        self.look()

    def on_refused(self, refusal: RoundRefused) -> None:
        self.search.end()
        self.note_passed()
        self.refusals.append(refusal)
        tries = len(self.refusals)
        if tries < TRIES:
            self.script.at(self.script.now + AGAIN_S, self.join)
        else:
            assert refusal.reason == "late", refusal

    def watch(self, question: Question) -> None:
        """Give up the organizer at ``silent_at``, wherever that moves."""
        silent_at = question.silent_at
        if silent_at is None:
            return

        def look() -> None:
            if question.silent_at is not None and question.silent_at <= self.script.now:
                self.give_up(question)

        self.script.at(silent_at, look)

    def give_up(self, question: Question) -> None:
        if self.alive and self.search.asked is question:
            self.search.on_timeout(self.script.now)
            self.leave(question)

    def on_lost(self, peer: PeerId) -> None:
        """The link to a peer broke."""
        if not self.alive:
            return
        self.organizer.on_lost(peer)
        self.look()
        question = self.search.asked
        if question is not None and question.organizer == peer:
            self.search.on_failed(PeerLost("gone"), self.script.now)
            self.leave(question)

    def leave(self, question: Question) -> None:
        other = self.town.peer(question.organizer)
        self.script.send(lambda: other.on_given_up(self.id))
        self.note_passed()
        self.go_on()

    def note_passed(self) -> None:
        """Remember who is passed over, and that the time of one never gets shorter."""
        for peer, until in self.search.candidates._passed.items():
            assert until >= self.passed_until.get(peer, until)
            self.passed_until[peer] = until

    # An organizer.

    def take_ticket(self, peer: PeerId, ticket: Ticket, reply: Callable[[Joined], None]) -> None:
        if not self.alive:
            return
        message = JoinRound(ticket, Book(peer).contact)
        answer = self.organizer.on_join(peer, Role.WORKER, message, self.search, self.script.now)
        if answer is not None:
            reply(answer)
            return
        key = ticket.terms.key
        begins = key not in self.waiting
        self.waiting.setdefault(key, []).append((peer, reply))
        if begins:
            formation = self.organizer.formations[key]
            for candidate in self.organizer.on_expected(formation, self.candidates):
                self.call(formation, candidate)
            self.beat(formation)
        self.look()

    def call(self, formation: GroupFormation, peer: PeerId) -> None:
        invitation = self.organizer.invite(formation, peer, linked=True, slow_s=0.0, now=self.script.now)
        other = self.town.peer(peer)

        def answered(answer: JoinEta) -> None:
            if self.alive:
                self.search.on_eta(peer, TERMS.key, answer)
                self.organizer.on_eta(formation, invitation, answer, self.search, self.script.now)
                self.look()

        def asked() -> None:
            answer = other.answer_call(self.id)
            if answer is not None:
                self.script.send(lambda: answered(answer))

        self.script.send(asked)

    def answer_call(self, caller: PeerId) -> JoinEta | None:
        if not self.alive:
            return None
        answer = self.organizer.on_call(caller, TERMS, self.search, self.script.now)
        self.look()
        if self.search.asked is not None:
            self.watch(self.search.asked)
        return answer

    def beat(self, formation: GroupFormation) -> None:
        if self.alive and self.organizer.formations.get(TERMS.key) is formation:
            for peer, reply in self.waiting[TERMS.key]:
                if peer != self.id:
                    reply(Joined())
            self.script.at(self.script.now + HEARTBEAT_S, lambda: self.beat(formation))

    def on_given_up(self, peer: PeerId) -> None:
        formation = self.organizer.formations.get(TERMS.key)
        if self.alive and formation is not None:
            entries = self.waiting[TERMS.key]
            self.waiting[TERMS.key] = [entry for entry in entries if entry[0] != peer]
            formation.on_gave_up(peer, self.town.peer(peer).ticket)
            self.look()

    def look(self) -> None:
        """Close the formation if it is time; else look again when it will be."""
        formation = self.organizer.formations.get(TERMS.key)
        if not self.alive or formation is None:
            return
        closes_at = formation.closes_at()
        if closes_at > self.script.now:
            self.script.at(closes_at, self.look)
            return
        organized: Organized = None
        with suppress(ValueError):
            organized = self.organizer.form(formation, self.script.now)
        self.organizer.close(formation, self.script.now)
        if isinstance(organized, Group):
            if formation.elsewhere is None:
                self.formed.append(organized)
            self.organizer.on_group(organized, self.script.now)
        for peer, reply in self.waiting.pop(TERMS.key):
            reply(hand_out(organized, peer))


class Liar(CorePeer):
    """A peer that never joins, and answers each ticket as ``answers`` says; None: it is silent."""

    def __init__(self, me: PeerId, town: "CoreTown", answers: Callable[[PeerId], Joined | None]) -> None:
        super().__init__(me, town, town.script.now)
        self._answers = answers

    def join(self) -> None:
        pass

    def take_ticket(self, peer: PeerId, ticket: Ticket, reply: Callable[[Joined], None]) -> None:
        answer = self._answers(peer)
        if answer is not None:
            reply(answer)


class CoreTown:
    """Peers that all know each other."""

    def __init__(self, script: Script, count: int) -> None:
        self.script = script
        self.everybody = PEERS[:count]
        self.peers: dict[PeerId, CorePeer] = {}

    def add(self, peer: CorePeer) -> None:
        self.peers[peer.id] = peer

    def peer(self, peer: PeerId) -> CorePeer:
        return self.peers[peer]

    def crash(self, peer: PeerId) -> None:
        self.peers[peer].alive = False
        for other in self.peers.values():
            if other.id != peer:
                self.script.send(lambda other=other: other.on_lost(peer))

    def honest(self) -> list[CorePeer]:
        return [peer for peer in self.peers.values() if peer.alive and not isinstance(peer, Liar)]

    def check_groups(self) -> None:
        """Assert that honest peers have the groups that were formed, one at least; others were refused each time."""
        formed = {group.seed: group for peer in self.peers.values() for group in peer.formed}
        groups = [peer.group for peer in self.honest() if peer.group is not None]
        assert groups
        for group in groups:
            assert formed[group.seed] == group
        for peer in self.honest():
            assert peer.group is not None or len(peer.refusals) == TRIES
