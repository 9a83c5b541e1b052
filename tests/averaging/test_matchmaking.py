"""Peers find one group, whatever they know and whichever fails."""

import asyncio
from collections.abc import Awaitable
from contextlib import nullcontext, suppress

import msgspec
import pytest

from colab_swarm.averaging import group as module
from colab_swarm.averaging.group import Group, Joined, JoinEta, JoinRound, RoundRefused, Ticket, rank
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.memory import REMEMBERED_S, SwarmView
from colab_swarm.averaging.router import SKIPPED_S, PrefixRouter
from colab_swarm.averaging.search import PASSED_S, check_group, holds_ticket
from colab_swarm.averaging.standing import BURST_S, Standing
from colab_swarm.errors import CallRefused
from colab_swarm.events import EventLog, PeerRefused
from colab_swarm.net.peers import Message, PeerId, Role, Stream
from colab_swarm.runtime import loop_now
from colab_swarm.sim import LAN, SimNetwork, SimPeers

TERMS = module.RoundTerms("run", 7, b"lineage", 100, b"schema")
TICKET = Ticket(TERMS, 10.0)


def ticket_of(**change: object) -> Ticket:
    """`TICKET` with other terms."""
    return Ticket(msgspec.structs.replace(TERMS, **change), 10.0)


class Trainer(SwarmView):
    """A peer with a matchmaker; ``followed``: whether the swarm follows the groups that it had."""

    def __init__(self, peers: SimPeers, settings: module.GroupFormationSettings | None = None) -> None:
        self.peers = peers
        self.candidates: list[PeerId] = []
        self.ready_in_s: float | None = 0.0  # its answer to a call
        self.ticket = TICKET
        self.followed = True
        self.usual_s = float("inf")  # in which it believes another peer can join
        self.own_s = 0.0  # what two of its micro-batches take
        self.awaited: list[PeerId] = []
        self.slowest_s = 0.0
        self.events = EventLog()
        standing = Standing(
            peers.id, heard_at=peers.read_at, events=self.events, longest_s=lambda: self.slowest_s
        )
        router = PrefixRouter(peers)
        self.matchmaker = Matchmaker(router, "run", self, standing=standing, settings=settings)

    async def expected(self, step: int, lineage: bytes) -> list[PeerId]:
        return self.candidates

    def on_called(self, terms: module.RoundTerms, caller: PeerId) -> float | None:
        return self.ready_in_s if terms.key == self.ticket.terms.key else None

    def believed_s(self, peer: PeerId) -> float:
        return self.own_s if peer == self.peers.id else self.usual_s

    def stands(self, step: int, lineage: bytes) -> bool:
        return self.followed

    async def join(self, *, after_s: float = 0.0, timeout_s: float = 30.0) -> Group:
        await asyncio.sleep(after_s)
        deadline = loop_now() + timeout_s
        return await self.matchmaker.join(self.ticket, self.candidates, deadline, awaited=self.awaited)


class Town:
    """Trainers on a simulated LAN, in the order in which they rank as organizers of step 7."""

    def __init__(
        self, count: int, *, clients: int = 0, settings: module.GroupFormationSettings | None = None
    ) -> None:
        self.network = SimNetwork(LAN, seed=5)
        names = ["alice", "bob", "carol", "dave", "erin", "frank"][:count]
        peers = {p.id: p for p in (self.network.peer(n, listen=i >= clients) for i, n in enumerate(names))}
        self.network.introduce()
        self.trainers = [Trainer(peers[peer], settings) for peer in rank("run", 7, peers)]
        for trainer in self.trainers:
            trainer.candidates = list(peers)

    def client_and_backbone(self) -> list[Trainer]:
        return sorted(self.trainers, key=lambda trainer: bool(trainer.peers.contact.addresses))


def joined(message: Message) -> bool:
    return isinstance(message, JoinRound)


def answered(message: Message) -> bool:
    return isinstance(message, Joined) and not message.forming


def lie(trainer: Trainer, answer: Joined, *, after_s: float = 0.0) -> list[JoinRound]:
    """Let it answer every ticket so; return these."""

    async def take(message: JoinRound, stream: Stream) -> None:
        taken.append(message)
        await asyncio.sleep(after_s)
        await stream.send(answer)

    taken: list[JoinRound] = []
    trainer.peers.unserve(JoinRound)
    trainer.peers.serve_stream(JoinRound, take)
    return taken


async def refusal(joining: Awaitable[Group]) -> str:
    with pytest.raises(RoundRefused) as caught:
        await joining
    return caught.value.reason


async def join_in_the_end(trainer: Trainer) -> Group:
    """After a refusal a peer reads the records, and joins again."""
    while True:
        with suppress(RoundRefused):
            return await trainer.join()


async def one_group(*joining: Awaitable[Group], size: int) -> Group:
    """The group of all these, with ``size`` members."""
    groups = await asyncio.gather(*joining)
    assert len(set(groups)) == 1 and len(groups[0].members) == size
    return groups[0]


async def test_all_who_join_get_the_same_group_with_weights_and_addresses() -> None:
    town = Town(4)
    group = await one_group(*(trainer.join() for trainer in town.trainers), size=4)
    assert all(m.weight == 10.0 and m.share == 1.0 and m.addresses for m in group.members)
    organizer, *others = town.trainers
    assert organizer.matchmaker.likely(8, b"") == {other.peers.id for other in others}
    assert organizer.matchmaker.likely(9, b"") == set()
    assert loop_now() < 0.1


async def test_the_organizer_calls_the_others_and_waits_as_long_as_they_said() -> None:
    town = Town(4)
    late = town.trainers[2]
    late.ready_in_s = town.trainers[0].slowest_s = 8.0
    early = [trainer.join() for trainer in town.trainers if trainer is not late]
    await one_group(*early, late.join(after_s=7.9), size=4)


async def test_a_late_peer_learns_that_the_group_was_formed() -> None:
    town = Town(4)
    late = town.trainers[2]
    late.ready_in_s = None
    early = [trainer.join() for trainer in town.trainers if trainer is not late]
    _, reason = await asyncio.gather(one_group(*early, size=3), refusal(late.join(after_s=5)))
    assert reason == "late"


async def test_a_run_that_returns_to_a_step_forgets_its_group_in_the_end() -> None:
    town = Town(3)
    asked, keeper, joiner = town.trainers
    await asyncio.gather(asked.join(after_s=REMEMBERED_S), keeper.join(after_s=REMEMBERED_S))
    keeper.ready_in_s = None  # it has a group in mind, but does not come again
    town.network.now().crash(asked.peers.name)
    joiner.candidates = [keeper.peers.id]
    assert await refusal(joiner.join()) == "late"
    group = await joiner.join(after_s=REMEMBERED_S)
    assert [member.id for member in group.members] == [joiner.peers.id]


async def go_on_alone(trainer: Trainer) -> Group:
    """It is its own group, and at the next step then."""
    candidates, trainer.candidates = trainer.candidates, []
    group = await trainer.join()
    assert len(group.members) == 1
    trainer.candidates, trainer.ticket = candidates, ticket_of(step=8)
    return group


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_a_group_that_the_swarm_did_not_follow_stops_no_peer_and_does_not_return(first: int) -> None:
    town = Town(3)
    alone = town.trainers[first]
    others = [trainer for trainer in town.trainers if trainer is not alone]
    old = await go_on_alone(alone)
    reasons = await asyncio.gather(*(refusal(other.join()) for other in others))
    assert set(reasons) == {"late"}  # its round may continue
    alone.followed = False
    await one_group(*(other.join() for other in others), size=2)
    alone.ticket = TICKET  # it has caught up, and takes the step once more
    alone.matchmaker.forget(*TERMS.key)
    assert await one_group(*(t.join() for t in town.trainers), size=3) != old


@pytest.mark.parametrize("doubter", [1, 2, 3])
async def test_a_peer_that_does_not_trust_the_organizer_follows_those_that_do(doubter: int) -> None:
    """Its own charges are its own: else a peer that was frozen once would part the others again and again."""
    town = Town(4)
    first, one = town.trainers[0], town.trainers[doubter]
    standing, everyone = one.matchmaker.standing, [trainer.peers.id for trainer in town.trainers]
    standing.settle("a freeze", {first.peers.id: 5.0}, everyone, loop_now())
    assert first.peers.id not in standing.trusted(everyone, loop_now())
    await one_group(*(trainer.join() for trainer in town.trainers), size=4)
    assert loop_now() < 1.0


async def test_no_peer_passes_on_a_group_of_others() -> None:
    town = Town(3)
    alone, *others = town.trainers
    await go_on_alone(alone)
    for other in others:  # each hears of the group
        assert await refusal(other.join()) == "late"
    town.network.now().crash(alone.peers.name)
    await one_group(*(other.join() for other in others), size=2)


async def test_an_accepted_peer_that_died_is_not_waited_for() -> None:
    town = Town(4)
    dying = town.trainers[2]
    dying.ready_in_s = town.trainers[0].slowest_s = 50.0
    town.network.at(1.0).crash(dying.peers.name)
    await one_group(*(t.join() for t in town.trainers if t is not dying), size=3)
    assert [fault.name for fault in town.network.fired] == ["crash"]
    assert loop_now() < 3.0


async def test_a_client_mode_peer_joins_and_reduces_nothing() -> None:
    town = Town(3, clients=1)
    for trainer in town.trainers:
        trainer.ticket = msgspec.structs.replace(TICKET, reduces=bool(trainer.peers.contact.addresses))
    group = await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    assert sorted(member.share for member in group.members) == [0, 1, 1]


async def test_an_organizer_that_sends_an_invalid_group_is_left_out_for_half_an_hour() -> None:
    liar, *honest = Town(3).trainers
    asked = lie(liar, Joined(Group(b"short", TERMS, ())))
    for wait_s, asks in ((0.0, True), (0.9 * SKIPPED_S, False), (0.2 * SKIPPED_S, True)):
        asked.clear()
        await one_group(*(trainer.join(after_s=wait_s) for trainer in honest), size=2)
        assert bool(asked) is asks
    for trainer in honest:
        first, second = trainer.events.recent(PeerRefused)
        assert first.peer == second.peer == liar.peers.id.hex() and first.what == "a group"
        assert first.why.endswith("; no round with it for 30 min")


async def test_organizers_that_send_a_peer_in_a_circle_are_passed_over() -> None:
    first, second, honest = Town(3).trainers
    for liar, other in ((first, second), (second, first)):
        liar.ready_in_s = None
        await honest.peers.call(liar.peers.id, TERMS, JoinEta, timeout_s=1)  # a link, so no call before
        lie(liar, Joined(organizer=other.peers.contact))
    await one_group(honest.join(), size=1)


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
async def test_an_organizer_may_vanish_before_or_while_peers_join(nth: int) -> None:
    town = Town(4)
    first, *others = town.trainers
    network, name = town.network, first.peers.name
    (network.when(joined, receiver=name, nth=nth) if nth else network.now()).crash(name)
    await one_group(*(trainer.join() for trainer in others), size=3)
    assert len(town.network.fired) == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_group_survives_the_organizer_that_vanishes_while_handing_it_out(nth: int) -> None:
    town = Town(4)
    first, *_others = town.trainers
    town.network.when(answered, sender=first.peers.name, nth=nth).crash(first.peers.name)
    going = [asyncio.create_task(trainer.join()) for trainer in town.trainers]
    await one_group(*going[1:], size=3 if nth == 1 else 4)
    assert len(town.network.fired) == 1
    going[0].cancel()


async def test_peers_that_know_different_candidates_still_form_one_group() -> None:
    town = Town(4)
    _first, second, third, fourth = town.trainers
    fourth.candidates = [third.peers.id, fourth.peers.id]
    third.candidates = [second.peers.id, third.peers.id, fourth.peers.id]
    await one_group(*(trainer.join() for trainer in town.trainers), size=4)


async def test_an_organizer_that_will_not_come_leaves_the_round_to_the_next() -> None:
    first, *others = Town(4).trainers
    first.ready_in_s = None
    await one_group(*(trainer.join() for trainer in others), size=3)


async def test_a_ticket_of_another_lineage_is_sent_to_resync() -> None:
    first, second, stray = Town(3).trainers
    second.ready_in_s = first.slowest_s = 3.0
    stray.ticket = ticket_of(lineage=b"stray")
    joining = one_group(first.join(), second.join(after_s=3), size=2)
    _, reason = await asyncio.gather(joining, refusal(stray.join(after_s=1)))
    assert reason == "resync"


async def test_a_retry_by_a_member_gets_the_same_group() -> None:
    town = Town(3)
    group = await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    assert await town.trainers[1].join(after_s=1) == group


@pytest.mark.parametrize("clients", [0, 1])
async def test_alone_a_peer_is_its_own_group_and_asking_again_gives_another_round(clients: int) -> None:
    (alone,) = Town(1, clients=clients).trainers
    first, second = await alone.join(), await alone.join(after_s=1)
    assert first.round_id != second.round_id and len(first.members) == len(second.members) == 1


async def test_a_peer_that_gives_up_waiting_is_left_out() -> None:
    first, second, third = Town(3).trainers
    third.ready_in_s = first.slowest_s = 6.0
    impatient = asyncio.create_task(second.join(timeout_s=2.0))
    await one_group(first.join(), third.join(after_s=5.9), size=2)
    assert await refusal(impatient) == "unreachable"


async def test_a_call_for_another_lineage_or_step_is_declined_and_one_for_another_prefix_refused() -> None:
    first, second = Town(2).trainers
    for change in ({"lineage": b"other"}, {"step": 8}):
        call = ticket_of(**change).terms
        answer = await first.peers.call(second.peers.id, call, JoinEta, timeout_s=1)
        assert answer.ready_in_s is None and answer.group is None
    stray = ticket_of(prefix="other").terms
    with pytest.raises(CallRefused, match="no part in 'other'"):
        await first.peers.call(second.peers.id, stray, JoinEta, timeout_s=1)


@pytest.mark.parametrize("reason", ["late", "resync", "invalid"])
async def test_an_organizer_that_refuses_twice_is_not_asked_for_the_same_step_again(
    reason: module.RefusalReason,
) -> None:
    liar, *honest = Town(3).trainers
    lie(liar, Joined(reason=reason, text="no"))

    async def insist(trainer: Trainer) -> Group:
        for _ in range(100):
            try:
                return await trainer.join()
            except RoundRefused as error:
                refusals.append(error)
                await asyncio.sleep(1.0)
        raise AssertionError("refused indefinitely")

    refusals: list[RoundRefused] = []
    await one_group(*map(insist, honest), size=2)
    assert len(refusals) == 4 and loop_now() < 8  # it promises to come, too


@pytest.mark.parametrize(("count", "facts"), [(2, {"reduces": False}), (1, {"assists": True})])
async def test_without_a_reducer_or_a_trainer_peers_give_up_after_the_window(
    count: int, facts: dict[str, bool]
) -> None:
    town = Town(count)
    for trainer in town.trainers:
        trainer.ticket = msgspec.structs.replace(TICKET, **facts)
    reasons = await asyncio.gather(*(refusal(trainer.join(after_s=9.0)) for trainer in town.trainers))
    assert set(reasons) == {"unreachable"}
    assert 11 < loop_now() < 12  # the window is 2 s


async def test_contributing_needs_the_role_of_a_worker() -> None:
    first, second = Town(2).trainers
    second.peers.role = Role.REDUCER
    with pytest.raises(RoundRefused, match="only a worker") as caught:
        await second.join()
    assert caught.value.reason == "invalid"
    second.ticket = msgspec.structs.replace(TICKET, weight=0.0)
    joining = asyncio.create_task(second.join(after_s=PASSED_S))
    await asyncio.sleep(PASSED_S + 0.01)
    assert await first.join() == await joining


async def test_a_client_without_its_only_organizer_continues_alone_after_a_while() -> None:
    town = Town(2, clients=1)
    client, backbone = town.client_and_backbone()
    town.network.now().crash(backbone.peers.name)
    group = await client.join(after_s=9.0)
    assert town.network.fired and len(group.members) == 1
    assert loop_now() < 13  # the window is 2 s


async def test_a_candidate_that_cannot_be_called_has_the_window_to_join_by_itself() -> None:
    client, backbone = Town(2, clients=1).client_and_backbone()
    await one_group(backbone.join(), client.join(after_s=1.5), size=2)


async def test_a_client_gives_up_after_a_while_if_its_only_organizer_is_at_another_step() -> None:
    client, backbone = Town(2, clients=1).client_and_backbone()
    backbone.ready_in_s = None
    assert await refusal(client.join(after_s=9.0)) == "unreachable"
    assert 11 < loop_now() < 13


@pytest.mark.parametrize("weight", [1e9, 1e-10, -1.0, float("nan")])
async def test_a_weight_out_of_range_is_refused_before_anybody_is_called(weight: float) -> None:
    first, second = Town(2).trainers
    second.ticket = msgspec.structs.replace(TICKET, weight=weight)
    began = loop_now()
    with pytest.raises(RoundRefused, match="neither 0 nor in") as caught:
        await second.join()
    assert caught.value.reason == "invalid" and loop_now() == began
    assert not first.peers.linked()


@pytest.mark.parametrize(("heartbeats", "answers_in_s"), [(False, 1e6), (True, 1e6), (True, 3.0)])
async def test_a_slow_organizer_costs_each_of_three_a_burst(heartbeats: bool, answers_in_s: float) -> None:
    """And then it organizes nothing any more."""
    liar, *honest = Town(4).trainers

    async def keep_silent(message: JoinRound, stream: Stream) -> None:
        asked.append(stream.peer)
        until = loop_now() + answers_in_s
        while loop_now() < until:
            await asyncio.sleep(0.5)
            if heartbeats:
                await stream.send(Joined())
        await liar.matchmaker._serve_join(message, stream)

    asked: list[PeerId] = []
    liar.peers.unserve(JoinRound)
    liar.peers.serve_stream(JoinRound, keep_silent)
    for trainer in honest:
        trainer.usual_s = 0.5
    began, waits = loop_now(), list[float]()
    for _ in range(30):
        waits.append(-loop_now())
        await one_group(*(join_in_the_end(trainer) for trainer in honest), size=3)
        waits[-1] += loop_now()
    assert sorted({*asked}) == sorted(trainer.peers.id for trainer in honest) and len(asked) <= 6
    assert max(waits[1:]) < BURST_S and loop_now() - began < 3 * BURST_S and max(waits[8:]) < 0.2


@pytest.mark.parametrize("answers_in_s", [3.0, 4.0, 6.0, 1e6])
async def test_an_organizer_pays_for_more_than_was_usual_whatever_the_others_claim(
    answers_in_s: float,
) -> None:
    """They say that they may take 5 s, and took less so far."""
    liar, *honest = Town(4).trainers
    for trainer in honest:
        trainer.usual_s, trainer.own_s = 5.0, 0.5
    for _ in range(5):
        await one_group(liar.join(), *(trainer.join() for trainer in honest), size=4)
    liar.matchmaker.forget(*TERMS.key)
    began, fired = loop_now(), list[float]()

    async def put_off(message: JoinRound, stream: Stream) -> None:
        fired.append(loop_now())
        while loop_now() < fired[-1] + answers_in_s:
            await stream.send(Joined())
            await asyncio.sleep(0.5)
        await liar.matchmaker._serve_join(message, stream)

    liar.peers.unserve(JoinRound)
    liar.peers.serve_stream(JoinRound, put_off)
    for _ in range(30):
        await one_group(*(join_in_the_end(trainer) for trainer in honest), size=3)
    assert len(fired) == 3 and loop_now() - began < 3 * BURST_S
    for trainer in honest:
        standing = trainer.matchmaker.standing
        assert standing.credit_s(liar.peers.id) < BURST_S / 2
        assert all(standing.credit_s(other.peers.id) > BURST_S / 2 for other in honest)


async def test_a_promise_that_is_broken_costs_two_bursts_at_most_and_one_beyond_belief_nothing() -> None:
    for promise_s in (1e9, 1.9):
        first, liar, *others = Town(4).trainers
        liar.ready_in_s, first.usual_s = promise_s, 2.0
        began, honest = loop_now(), (first, *others)
        for _ in range(100):
            await one_group(*(trainer.join() for trainer in honest), size=3)
            await asyncio.sleep(0.1)  # nothing of it counts, so it earns nothing
        lost_s = loop_now() - began - 10.0
        assert lost_s < 1.0 if promise_s > 2 else 1.9 < lost_s < 2 * BURST_S


async def test_a_peer_that_was_late_once_still_organizes() -> None:
    first, *others = Town(4).trainers
    late = {first.peers.id: 2.0}
    everyone = [one.peers.id for one in (first, *others)]
    others[0].matchmaker.standing.settle("to join", late, everyone, loop_now())
    await one_group(*(trainer.join() for trainer in (*others, first)), size=4)


def suspects(trainer: Trainer) -> set[PeerId]:
    return trainer.matchmaker.standing.suspects(loop_now())


async def test_a_frozen_peer_is_suspected_until_something_comes_from_it() -> None:
    town = Town(3)
    first, frozen, last = town.trainers
    await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    await last.peers.call(frozen.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)  # now it has a link, too
    town.network.now().freeze(frozen.peers.name, 60.0)
    await one_group(first.join(), last.join(), size=2)
    assert suspects(first) | suspects(last) == {frozen.peers.id} and town.network.fired
    began = loop_now()
    await one_group(first.join(), last.join(), size=2)
    # The last one knows only that the first kept it waiting, and organizes itself.
    assert loop_now() - began < 1.2
    await asyncio.sleep(60.0)
    for trainer in (first, last):
        await frozen.peers.call(trainer.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)
        assert not suspects(trainer)


async def test_an_organizer_gives_way_to_a_better_one_that_it_had_not_heard_of() -> None:
    best, second, third, fourth = (town := Town(4)).trainers
    for late in (second, third):
        late.candidates = [one.peers.id for one in (second, third, fourth)]
    joins = [trainer.join(after_s=0.01 * (trainer is best)) for trainer in town.trainers]
    began = loop_now()
    await one_group(*joins, size=4)
    assert loop_now() - began < 0.5  # two would share the others, and wait for each other


async def test_a_peer_that_asks_an_organizer_is_ready_for_it_and_soon_for_others() -> None:
    best, second, third = (town := Town(3)).trainers
    await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    asked = lie(best, Joined(reason="unreachable"), after_s=3.0)
    second.usual_s, second.followed = 1.0, False
    waiting = asyncio.create_task(second.join())
    await asyncio.sleep(0.5)
    for caller, ready_in_s in (best, 0.0), (third, 1.0):
        answer = await caller.peers.call(second.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)
        assert asked and answer.ready_in_s == pytest.approx(ready_in_s)
    waiting.cancel()


async def test_a_group_without_the_others_that_wait_is_refused() -> None:
    liar, *honest = Town(3).trainers

    async def part(message: JoinRound, stream: Stream) -> None:
        parted.append(stream.peer)
        ticket, contact = message.ticket, message.contact
        member = module.GroupMember(contact.id, contact.addresses, ticket.weight, 1.0)
        await stream.send(Joined(Group(bytes(16), ticket.terms, (member,))))

    parted: list[PeerId] = []
    liar.peers.unserve(JoinRound)
    liar.peers.serve_stream(JoinRound, part)
    for one, other in (honest, reversed(honest)):
        one.awaited = [other.peers.id]
    assert [await refusal(trainer.join()) for trainer in honest] == ["unreachable"] * 2
    assert len(parted) == 2
    await one_group(*(trainer.join() for trainer in honest), size=2)


@pytest.mark.parametrize(
    "change", [{"weight": 5.0}, {"weight": 11.0}, {"reduces": False}, {"upload_bps": 1.0}, {"assists": True}]
)
def test_a_group_holds_each_members_ticket_but_for_a_bound_on_its_weight(change: dict[str, object]) -> None:
    ids = sorted(bytes([i]) * 32 for i in range(3))
    members = tuple(module.GroupMember(PeerId(one), (), 10.0, 1.0) for one in ids)
    assert holds_ticket(Group(bytes(16), TERMS, members), members[0].id, TICKET)
    changed = (msgspec.structs.replace(members[0], **change), *members[1:])
    assert not holds_ticket(Group(bytes(16), TERMS, changed), members[0].id, TICKET)
    heavy = msgspec.structs.replace(TICKET, weight=160.0)
    assert holds_ticket(Group(bytes(16), TERMS, members), members[0].id, heavy)


@pytest.mark.parametrize(
    ("shares", "upload_bps", "weight", "fault"),
    [
        ((1, 1, 1), (None, None, None), 10.0, None),
        ((0, 0, 1), (None, None, None), 10.0, "shares"),  # a sole reducer dictates the mean
        ((0.01, 0.01, 1), (1e6, 1e6, 1e6), 10.0, "shares"),
        ((0, 0, 1), (1e6, 1e6, 16e6), 10.0, None),  # as the linear program says
        ((1, 1, 1), (1e6, 1e6, 16e6), 10.0, None),
        ((1, 1, 1), (None, None, None), 1e8, "far too much"),
    ],
)
def test_a_group_is_dishonest_where_shares_or_weights_do_not_follow_from_its_tickets(
    shares: tuple[float, ...], upload_bps: tuple[float | None, ...], weight: float, fault: str | None
) -> None:
    members = tuple(
        module.GroupMember(PeerId(bytes([i]) * 32), (), 10.0 if i else weight, share, True, bps, bps)
        for i, (share, bps) in enumerate(zip(shares, upload_bps, strict=True))
    )
    with pytest.raises(ValueError, match=fault) if fault else nullcontext():
        check_group(Group(bytes(16), TERMS, members), heaviest=16.0)
