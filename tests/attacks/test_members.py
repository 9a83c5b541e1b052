"""Attacks by members on votes, records and values, at real links."""

import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import Joined, JoinEta, JoinRound, RoundTerms, Ticket
from colab_swarm.dht.records import FindNear, FoundNear, Record
from colab_swarm.dht.routing import distance
from colab_swarm.dht.service import key_id
from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import RoundFinished, StateReceived, StepFinished
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Membership, MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Role, Stream
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot, pack, unpack
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.records import ProgressRecord, progress_key
from colab_swarm.training.settings import HEAVIEST
from colab_swarm.training.sketch import SKETCH_STEPS
from colab_swarm.trust.access import IssuedMembership
from colab_swarm.trust.authority import RequestMembership
from tests.attacks.town import HONEST, KNOWN_STEPS, Mallory, Town, Trainer, town
from tests.net.swarm import LOOPBACK, identity
from tests.training import toy
from tests.trust.run import Clock, Echo, Peer, run_with


def ground_near(key: bytes, folder: Path, honest: Iterable[Swarm]) -> cs.NetworkOptions:
    """Options with a random identity that is nearer to ``key`` than those of all ``honest`` peers."""
    nearest, secrets = min(distance(one.id, key) for one in honest), iter(lambda: os.urandom(32), b"")
    (folder / "key").write_bytes(next(one for one in secrets if distance(Identity(one).id, key) < nearest))
    (folder / "key").chmod(0o600)
    return cs.NetworkOptions(lan=False, identity=folder / "key")


def signed_record(peer: Swarm, key: bytes, value: object) -> Record:
    peers, now = peer.services.peers, peer.services.peers.time()
    data = msgspec.msgpack.encode(value)
    bare = Record(data, now + 30, int(now * 1e6), 30.0, peers.public_key, peers.membership)
    return msgspec.structs.replace(bare, signature=peers.sign(bare.signed_bytes(key)))


class Viewer:
    """Gives readers its own record, and tries every call of a trainer, a few times for each step."""

    def __init__(self, swarm: Swarm, honest: Town) -> None:
        self.swarm, self.peers, self._honest = swarm, swarm.services.peers, honest
        self.key = key_id(progress_key(honest.prefix))
        self._record: Record | None = None
        self.told, self.refused, self.joins = 0, 0, 0

    async def lie(self) -> None:
        self.peers.unserve(FindNear)
        self.peers.serve(FindNear, self._answer)
        self.peers.serve(RoundTerms, self._come, role=Role.GUEST)
        self.peers.serve_stream(JoinRound, self._organize, role=Role.GUEST)
        while True:
            prefix = self._honest.prefix
            found = await self.swarm.services.dht.published(progress_key(prefix), ProgressRecord)
            if found:
                top = max(found.values(), key=lambda one: one.step)
                own = msgspec.structs.replace(top, name="mallory", addresses=self.peers.contact.addresses)
                self._record = signed_record(self.swarm, self.key, own)
                await self._take_part(RoundTerms(prefix, top.step, top.lineage, 178))
            await asyncio.sleep(0.05)

    async def _take_part(self, terms: RoundTerms) -> None:
        opening = JoinRound(Ticket(terms, 1.0), self.peers.contact)
        for swarm in self._honest.swarms.values():
            try:
                await self.peers.call(swarm.id, terms, JoinEta, timeout_s=5)
            except CallRefused:
                self.refused += 1
            try:
                async with await self.peers.stream(swarm.id, opening, timeout_s=5) as stream:
                    await stream.receive(Joined)
            except CallRefused:
                self.refused += 1

    async def _answer(self, caller: PeerId, message: FindNear) -> FoundNear:
        found = await self.swarm.services.dht._on_find(caller, message)
        if message.key != self.key or not message.records or self._record is None:
            return found
        self.told += 1
        return FoundNear(found.contacts, (*found.records, self._record))

    async def _come(self, caller: PeerId, terms: RoundTerms) -> JoinEta:
        return JoinEta(0.0)

    async def _organize(self, opening: JoinRound, stream: Stream) -> None:
        self.joins += 1


def test_a_viewer_near_the_progress_key_neither_counts_nor_organizes(tmp_path: Path) -> None:
    with town() as honest:
        honest.train()
        key = key_id(progress_key(honest.prefix))
        invite = honest.swarms["alice"].invite(role="viewer")
        viewer = Viewer(
            honest.join("mallory", invite, ground_near(key, tmp_path, honest.swarms.values())), honest
        )
        everyone = [viewer.swarm, *honest.swarms.values()]
        assert min((swarm.id for swarm in everyone), key=lambda id: distance(id, key)) == viewer.swarm.id
        with honest.meanwhile(viewer.lie()):
            honest.wait(lambda: viewer.told >= 3 and viewer.refused >= 6, "attack")
            honest.go_on(20)
        assert viewer.joins == 0
        assert not any(viewer.swarm.id in trainer.progress.known.all for trainer in honest.trainers)
        honest.stop()
    honest.assert_held(least_shared=20)


def poisoned(trainer: Trainer, poison: float) -> Snapshot:
    """The state of a trainer, at step 5000, with other parameters and a learning rate that ruins a model."""
    held = trainer.optimizer.rounds.model.snapshot()
    state = unpack(held.manifest.layout, held.blob.copy())
    state["step"], state["lineage"] = 5000, b"m" * 16
    state["parameters"] = {name: torch.full_like(one, poison) for name, one in state["parameters"].items()}
    for group in state["optimizer"]["param_groups"]:
        group["lr"] = 9.9e5
    return Snapshot.of(b"m" * 16, 5000, *pack(state))


@pytest.mark.parametrize("poison", [100.0, float("nan")])
def test_four_identities_of_one_invitation_move_nobody_to_their_step(poison: float) -> None:
    with town() as honest, ExitStack() as stack:
        honest.train()
        invite, sybils = honest.swarms["alice"].invite(), list[Mallory]()
        for index in range(4):
            sybil = Mallory(honest.join(f"mallory-{index}", invite), honest.prefix)
            sybil.record = lambda one: msgspec.structs.replace(one, step=5000, lineage=b"m" * 16)
            stack.enter_context(sybil)
            sybil.swarm.runtime.call(sybil.serve_state(poisoned(honest.trainers[0], poison)))
            sybils.append(sybil)

        def fired(trainer: Trainer) -> bool:
            records = trainer.progress.known.all
            return all(getattr(records.get(one.swarm.id), "step", 0) == 5000 for one in sybils)

        honest.wait(lambda: all(map(fired, honest.trainers)), "attack")
        honest.go_on(20)
        joiner = honest.trainer(honest.join("dave"))
        joiner.thread.start()
        honest.trainers.append(joiner)
        honest.go_on(10)
        honest.stop()
    assert honest.steps < 5000 and len(honest.trainers[0].results) >= 20
    honest.assert_held(least_shared=5)


def test_a_donor_that_gives_another_state_under_the_honest_lineage_is_outvoted() -> None:
    async def forge() -> Snapshot:
        forged.append(forger.optimizer.rounds.model.snapshot())
        honest_one = forged[-1].manifest
        state = unpack(honest_one.layout, forged[-1].blob.copy())
        state["parameters"] = {name: one + 1.0 for name, one in state["parameters"].items()}
        return Snapshot.of(honest_one.subject, honest_one.step, *pack(state))

    forged: list[Snapshot] = []
    with town() as honest:
        honest.train()
        forger = honest.trainer(honest.join("mallory"))
        forger.thread.start()
        honest.wait(lambda: forger.steps >= KNOWN_STEPS, "attack")
        forger.optimizer.rounds._states._provide = forge
        joiners: list[Trainer] = []
        branch = honest.trainers[0].progress.election.branch
        while not forged and len(joiners) < 6:
            # A member that is a step behind just now is no donor.
            honest.wait(lambda: forger.swarm.id in branch().peers, "forger on the branch")
            joiners.append(honest.trainer(honest.join(f"dave-{len(joiners)}")))
            joiners[-1].thread.start()
            honest.wait(joiners[-1].ready.is_set, "late joiner")
        honest.trainers += joiners
        honest.go_on(3 * SKETCH_STEPS)  # who was taken in finds out, and loads another
        honest.stop()
        forger.stopped.set()
        loads = [one.swarm.events.recent(StateReceived)[-1] for one in joiners]
    assert forged and not any(load.donors == (forger.swarm.id.hex(),) for load in loads)
    shared = set.intersection(*(set(trainer.states) for trainer in honest.trainers))
    held = {trainer.states[max(shared)] for trainer in honest.trainers}
    assert max(shared)[0] > 2 * SKETCH_STEPS and len(held) == 1


class Shouter(Trainer):
    """Sends 1e30 in place of each value."""

    shout = 1e30

    def take_batch(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = torch.full_like(parameter, self.shout)
        self.stopped.wait(0.05)
        self.optimizer.step(samples=3)


def test_a_contribution_of_huge_values_freezes_no_optimizer() -> None:
    with town() as honest:
        honest.train()
        honest.go_on(10)
        mallory = honest.trainer(honest.join("mallory"), Shouter)
        mallory.thread.start()

        def rounds_with_it() -> int:
            groups = [result.group for result in honest.trainers[0].results]
            return sum(any(m.id == mallory.swarm.id and m.weight for m in one.members) for one in groups)

        honest.wait(lambda: rounds_with_it() >= 2, "attack")
        before = toy.parameters_of(honest.trainers[0].net)
        honest.go_on(10)
        honest.stop()
        assert not torch.equal(before, toy.parameters_of(honest.trainers[0].net))
        for trainer in honest.trainers:
            for state in trainer.optimizer.state.values():
                assert all(torch.isfinite(one).all() for one in state.values() if torch.is_tensor(one))
            assert torch.isfinite(toy.parameters_of(trainer.net)).all()
        mallory.stopped.set()
    honest.assert_held(least_shared=20, loss=False)


class Heavy(Trainer):
    """Claims a made-up number of samples for each micro-batch."""

    def take_batch(self) -> None:
        toy.loss_of(self.net, self.optimizer.global_step, slice(0, 3)).backward()
        self.stopped.wait(0.05)
        self.optimizer.step(samples=4e8)


def test_a_huge_weight_counts_no_more_than_its_bound() -> None:
    with town() as honest:
        honest.train()
        mallory = honest.trainer(honest.join("mallory"), Heavy)
        mallory.thread.start()

        def groups() -> list[dict[PeerId, float]]:
            every = [{m.id: m.weight for m in one.group.members} for one in honest.trainers[0].results]
            return [one for one in every if one.get(mallory.swarm.id)]

        honest.wait(lambda: len(groups()) >= 10, "attack")
        honest.stop()
        mallory.stopped.set()
        for weights in groups():
            median = statistics.median_low([one for one in weights.values() if one])
            assert weights[mallory.swarm.id] <= HEAVIEST * median
    honest.assert_held(least_shared=10)


def test_samples_that_nobody_computed_do_not_fill_the_batch() -> None:
    def counted() -> list[float]:
        steps = honest.trainers[0].swarm.events.recent(StepFinished)
        return [one.samples for one in steps if isinstance(one, StepFinished)]

    with town() as honest:
        honest.train()
        honest.go_on(10)
        before = statistics.mean(counted()[-10:])
        with Mallory(honest.join("mallory"), honest.prefix) as mallory:
            mallory.record = lambda one: msgspec.structs.replace(one, samples=9e11, samples_per_s=9e11)
            honest.go_on(5)
            honest.wait(
                lambda: all(
                    getattr(trainer.progress.known.all.get(mallory.swarm.id), "samples", 0) == 9e11
                    for trainer in honest.trainers
                ),
                "attack",
            )
            honest.go_on(30)
            during = statistics.mean(counted()[-20:])
        honest.stop()
    assert during >= 0.75 * before, (before, during)
    honest.assert_held(least_shared=20)


@pytest.mark.real_time
async def test_an_invitation_that_has_ended_admits_nobody_with_a_back_dated_membership() -> None:
    async with run_with("bob") as (run, (authority, bob)):
        invite, ended_s = run.invite(hours=1), 3600.0 + 720.0
        grant, key = invite.grant, invite.key
        assert grant is not None and key is not None

        async def admitted(name: str, target: Peer, clock: Clock) -> Role | str:
            own = identity(name)
            shown = Membership.by_invitation(
                grant, key, key=own.public_key, now=min(clock(), grant.join_until - 60)
            )
            assert shown.expires_at > clock()
            admission = MembershipAdmission(
                grant.run_id, authority=authority.node.public_key, own=own.public_key
            )
            admission.membership = shown.encode()
            settings = replace(LOOPBACK, run_id=grant.run_id)
            mallory = await Node.start(own, settings, admission=admission, wall_clock=clock)
            mallory.learn(target.node.contact)
            try:
                await mallory.linker.link_to(target.node.id, 5.0)
                if target is authority:
                    renew = RequestMembership(admission.membership)
                    await mallory.call(target.node.id, renew, IssuedMembership, timeout_s=5)
                await mallory.call(target.node.id, Echo(), Echo, timeout_s=5)
                return target.node.role_of(mallory.id)
            except PeerError as error:
                return str(error)
            finally:
                await mallory.close()

        assert await admitted("early", bob, Clock()) is Role.WORKER  # its membership is otherwise valid
        for peer in run.peers:
            peer.sleep(ended_s)
        late = [await admitted(f"late {peer.node.id!r}", peer, Clock(ended_s)) for peer in (bob, authority)]
        assert all(isinstance(one, str) and "invitation" in one for one in late), late


def test_a_member_that_calls_rounds_early_does_not_make_batches_small() -> None:
    def counted(caller: str) -> float:
        def work(swarm: Swarm) -> None:
            net = toy.model()
            optimizer = toy.join_training(swarm, net, target_batch_size=64)
            if swarm.name == caller:
                optimizer.rounds.view.forecast.batch_full = lambda now, _: not called.append(now)  # type: ignore
            while True:
                toy.loss_of(net, optimizer.global_step, slice(0, 2)).backward()
                optimizer.step(samples=2)

        with cs.simulate(4, seed=1, samples_per_s=2.0) as simulation:
            simulation.run(work, seconds=240.0)  # the first rounds are short
            steps = simulation.swarms["alice"].events.recent(StepFinished)
        return statistics.mean(one.samples for one in steps)

    called: list[float] = []
    usual = counted("nobody")
    assert not called and counted("dave") > 0.55 * usual and len(called) > 20


@cache
def honest_steps(ahead: int, seconds: float) -> int:
    """Steps of three honest trainers, beside four that train with them for ten steps, then lie if ``ahead``.

    Each of these claims a step so far ahead, on a lineage of its own, and never gives its state.
    """

    def train(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=24)
        while swarm.name in HONEST or optimizer.global_step < 10:
            toy.loss_of(net, optimizer.global_step, slice(0, 2)).backward()
            optimizer.step(samples=2)
        swarm.runtime.call(lie(swarm, optimizer.rounds))

    async def lie(swarm: Swarm, liar: Collaboration) -> None:
        async def never() -> Snapshot:
            asked.append(swarm.name)
            await asyncio.Event().wait()
            raise AssertionError

        liar.rounds._states._provide = never
        liar.rounds.throughput.wait()  # nor does it seem idle
        while True:
            steps = [one.step for one in liar.progress.known.all.values() if one.name in HONEST]
            liar.progress.leap(max(steps) + ahead, swarm.name.encode(), syncing=False)
            await liar.rounds._records.exchange()
            await asyncio.sleep(0.5)

    asked = list[str]()
    with cs.simulate(7 if ahead else 3, seed=1, samples_per_s=2.0) as simulation:
        simulation.run(train, seconds=seconds)
        alice = simulation.swarms["alice"]
        progress = alice.optimizers["model"].rounds.view
        liars = {peer: r for peer, r in progress.known.all.items() if r.name not in HONEST}
        assert all(
            r.step > progress.known.own.step and progress.election.account_of(peer) == peer
            for peer, r in liars.items()
        )
        # A step so far ahead is not believed.
        assert len(liars) == (4 if ahead else 0) and bool(asked) == (ahead == 3)
        return int(progress.known.own.step)


@pytest.mark.parametrize(
    ("ahead", "seconds"),
    [
        (3, 120.0),
        pytest.param(3, 200.0, marks=pytest.mark.ordeal),
        pytest.param(5000, 400.0, marks=pytest.mark.ordeal),
    ],
)
def test_four_members_that_trained_and_then_claim_a_later_step_stop_nobody_for_long(
    ahead: int, seconds: float
) -> None:
    steps = honest_steps(ahead, seconds)
    alone = honest_steps(0, 50.0) * seconds / 50.0
    # What the lies cost does not grow with the time.
    lost_s = seconds * (alone - steps) / alone
    assert lost_s <= 60.0, (steps, alone)


async def claim_a_later_step(liar: Collaboration, fired: Counter[str], *, ahead: int) -> None:
    while True:
        others = [one for one in liar.progress.known.all.values() if one.name != "mallory"]
        liar.progress.leap(max(one.step for one in others) + ahead, b"mallory", syncing=False)
        fired["lies"] += 1
        with suppress(PeerError):
            await liar.rounds._records.exchange()
        await asyncio.sleep(0.3)


async def keep_silent(liar: Collaboration, fired: Counter[str]) -> None:
    """Its record still says that it computes."""
    fired["lies"] += 100


async def call_to_rounds_that_are_none(liar: Collaboration, fired: Counter[str]) -> None:
    (assistant,) = liar.progress.known.assistants
    while True:
        terms = liar.rounds._meetings.terms(liar.progress.known.own.step, os.urandom(16))
        with suppress(PeerError):
            await liar.rounds.services.peers.call(assistant, terms, JoinEta, timeout_s=2.0)
            fired["lies"] += 1
        await asyncio.sleep(0.2)


AMONG_CLIENTS = {
    "silent": (False, keep_silent),
    "calls to rounds that are none": (False, call_to_rounds_that_are_none),
    "one step ahead, can be dialled": (True, partial(claim_a_later_step, ahead=1)),
    "three steps ahead, can be dialled": (True, partial(claim_a_later_step, ahead=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["silent", *(pytest.param(kind, marks=pytest.mark.ordeal) for kind in [*AMONG_CLIENTS][1:])]
)
def test_peers_that_only_dial_out_train_on_together_by_their_assistant(kind: str) -> None:
    begins_at, seconds = 15.0, 60.0
    steps, fired, sizes = Counter[str](), Counter[str](), Counter[int]()
    listens, attack = AMONG_CLIENTS[kind]

    def hear(name: str, event: object) -> None:
        if isinstance(event, RoundFinished) and event.at > begins_at and name != "mallory":
            steps[name] += 1
            sizes[len(event.contributors)] += 1

    def work(swarm: Swarm) -> None:
        if swarm.name == "alice":
            swarm.serve_as_reducer()
            return
        swarm.events.listen(partial(hear, swarm.name))
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=48)
        while swarm.name != "mallory" or swarm.runtime.time() < begins_at:
            toy.loss_of(net, optimizer.global_step, slice(0, 2)).backward()
            optimizer.step(samples=2)
        swarm.runtime.call(lie(optimizer.rounds))

    async def lie(liar: Collaboration) -> None:
        liar.rounds.throughput.wait()
        liar.rounds._tasks.cancel()
        await attack(liar, fired)
        await asyncio.Event().wait()

    with cs.simulate(1, network="lan", seed=1, samples_per_s=4.0) as simulation:
        for name in ("bob", "carol", "dave"):
            simulation.join(name, listen=False)
        simulation.join("mallory", listen=listens)
        simulation.run(work, seconds=begins_at + seconds)
    # Three of them take a step each 4 s.
    assert fired["lies"] >= 100 and min(steps[name] for name in ("bob", "carol", "dave")) >= 0.8 * seconds / 4
    assert sizes[3] >= 0.9 * sizes.total()
