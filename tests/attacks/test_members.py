"""Attacks by members on votes, records and values: at real links, and on the virtual clock."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import Attend, News, RoundTerms, Whereabouts
from colab_swarm.dht.records import FindNear, FoundNear, Record
from colab_swarm.dht.routing import distance
from colab_swarm.dht.service import key_id
from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import PeerRefused, RoundFinished, StateReceived, StepFinished
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Membership, MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Role, Stream
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import pack, unpack
from colab_swarm.training.records import SKETCH_STEPS, ProgressRecord, progress_key
from colab_swarm.trust.access import IssuedMembership
from colab_swarm.trust.authority import RequestMembership
from tests.attacks.town import KNOWN_STEPS, SAMPLES, SAMPLES_PER_S, STEP_S, Town, Trainer, attacked, town
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
        self.swarm = swarm
        self.peers = swarm.services.peers
        self.honest = honest
        self.key = key_id(progress_key(honest.prefix))
        self.record: Record | None = None
        self.told = Counter[str]()

    async def lie(self) -> None:
        self.peers.unserve(FindNear)
        self.peers.serve(FindNear, self._answer)
        self.peers.serve_stream(Attend, self._organize, role=Role.GUEST)
        while True:
            found = await self.swarm.services.dht.published(progress_key(self.honest.prefix), ProgressRecord)
            if found:
                top = max(found.values(), key=lambda one: one.step)
                own = msgspec.structs.replace(top, name="mallory", addresses=self.peers.contact.addresses)
                self.record = signed_record(self.swarm, self.key, own)
                await self._take_part(RoundTerms(self.honest.prefix, top.step, top.lineage, 178))
            await asyncio.sleep(0.05)

    async def _take_part(self, terms: RoundTerms) -> None:
        for trainer in self.honest.trainers:
            try:
                await self.peers.call(trainer.swarm.id, Whereabouts(terms.prefix, b""), News, timeout_s=5)
            except CallRefused:
                self.told["calls refused"] += 1
            try:
                opening = Attend(self.peers.contact, b"", terms, 10.0)
                async with await self.peers.stream(trainer.swarm.id, opening, timeout_s=5) as stream:
                    await stream.receive(News)
            except CallRefused:
                self.told["streams refused"] += 1

    async def _answer(self, caller: PeerId, message: FindNear) -> FoundNear:
        found = await self.swarm.services.dht._on_find(caller, message)
        if message.key != self.key or not message.records or self.record is None:
            return found
        self.told["records"] += 1
        return FoundNear(found.contacts, (*found.records, self.record))

    async def _organize(self, opening: Attend, stream: Stream) -> None:
        self.told["stood here"] += 1


@pytest.mark.slow
def test_a_viewer_near_the_progress_key_neither_counts_nor_organizes(tmp_path: Path) -> None:
    with town() as honest:
        honest.train()
        key = key_id(progress_key(honest.prefix))
        swarms = [trainer.swarm for trainer in honest.trainers]
        options = ground_near(key, tmp_path, swarms)
        viewer = Viewer(honest.join("mallory", honest.alice.invite(role="viewer"), options), honest)
        assert distance(viewer.swarm.id, key) < min(distance(swarm.id, key) for swarm in swarms)
        kinds = ("records", "calls refused", "streams refused")
        with honest.meanwhile(viewer.lie()):
            honest.wait(lambda: all(viewer.told[kind] >= 3 for kind in kinds), "attack")
            honest.go_on(20)
        assert not viewer.told["stood here"]
        assert not any(viewer.swarm.id in trainer.rounds.view.all for trainer in honest.trainers)
        honest.stop()
    honest.assert_held(least_shared=20)


@pytest.mark.slow
def test_a_fast_member_that_organizes_and_forms_no_group_stops_the_run_until_you_remove_it() -> None:
    with town() as honest:
        honest.train()
        liar = honest.trainer(honest.join("mallory"))
        liar.thread.start()
        honest.wait(lambda: liar.steps >= KNOWN_STEPS, "fourth trainer")
        share = liar.rounds.share
        report = share.report
        share.report = lambda now: msgspec.structs.replace(report(now), batch_s=1e-6)  # so it organizes
        rendezvous = liar.rounds._rendezvous
        honest.wait(lambda: rendezvous.formation is not None, "organizer")
        rendezvous.formation._has_quorum = lambda *_: False
        honest.wait(lambda: all(each.rounds.share.ticket for each in honest.trainers), "standstill")
        assert rendezvous.formation is not None
        honest.alice.remove_peer(liar.swarm.id)
        honest.go_on(10)
        honest.stop()
    honest.assert_held(least_shared=10)


def forged(trainer: Trainer) -> Snapshot:
    """Return a trainer's state under its lineage, with other parameters."""
    held = trainer.rounds.model.snapshot()
    state = unpack(held.blob.copy())
    state["parameters"] = {name: one + 1.0 for name, one in state["parameters"].items()}
    return Snapshot.of(held.manifest.subject, held.manifest.step, pack(state))


@pytest.mark.slow
def test_a_donor_that_gives_another_state_under_the_honest_lineage_is_outvoted() -> None:
    given: list[Snapshot] = []

    async def forge() -> Snapshot:
        given.append(forged(forger))
        return given[-1]

    with town() as honest:
        honest.train()
        forger = honest.trainer(honest.join("mallory"))
        forger.thread.start()
        honest.wait(lambda: forger.steps >= KNOWN_STEPS, "attack")
        forger.rounds._states._provide = forge
        joiners: list[Trainer] = []
        while not given and len(joiners) < 6:
            joiners.append(honest.trainer(honest.join(f"dave-{len(joiners)}")))
            joiners[-1].thread.start()
            honest.wait(joiners[-1].ready.is_set, "late joiner")
        honest.trainers += joiners
        honest.go_on(3 * SKETCH_STEPS)  # who was taken in finds out, and loads another
        honest.stop()
        forger.stopped.set()
        loads = [one.swarm.events.recent(StateReceived)[-1] for one in joiners]
    assert given and not any(load.donors == (forger.swarm.id.hex(),) for load in loads)
    # who has no part in a batch sees it pass: a step is seen by some
    last = {
        key for trainer in honest.trainers for key in trainer.states if key[0] > honest.steps - SKETCH_STEPS
    }
    seen = {key: [one.states[key] for one in honest.trainers if key in one.states] for key in last}
    assert sum(len(digests) > 1 for digests in seen.values()) >= SKETCH_STEPS // 2
    assert all(len(set(digests)) == 1 for digests in seen.values())


async def claim_a_later_step(rounds: Any, fired: Counter[str], *, ahead: int) -> None:
    """Say in records, and to the organizer, that it is ahead on a lineage of its own, and give no state."""

    async def never() -> Snapshot:
        fired["asked for its state"] += 1
        await asyncio.Event().wait()
        raise AssertionError

    rounds._states._provide = never
    while True:
        step = max(record.step for record in rounds.view.others.values()) + ahead
        rounds.view.leap(step, rounds.view.me[:16], syncing=False)
        rounds.share.step, rounds.share.lineage = step, rounds.view.me[:16]
        rounds._rendezvous.tell()
        fired["lies"] += 1
        with suppress(PeerError):
            await rounds._exchange()
        await asyncio.sleep(0.5)


def ahead_of_all(swarm: Swarm, optimizer: Any, fired: Counter[str], *, ahead: int) -> None:
    swarm.runtime.call(claim_a_later_step(optimizer.rounds, fired, ahead=ahead))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [3, pytest.param(5000, marks=pytest.mark.ordeal)])
def test_a_minority_that_claims_a_later_step_moves_nobody(ahead: int) -> None:
    after = attacked([partial(ahead_of_all, ahead=ahead)] * 2, seed=1, seconds=60.0)
    assert after.fired["lies"] >= 100 and not after.fired["asked for its state"]
    assert after.kept >= 0.7
    assert not [event for _, event in after.events if isinstance(event, StateReceived)]


def shout(swarm: Swarm, optimizer: Any, fired: Counter[str]) -> None:
    """Contribute 1e30 for each value."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    while True:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e30)
        fired["rounds"] += optimizer.step(samples=SAMPLES) is not None


@pytest.mark.slow
def test_a_contribution_of_huge_values_freezes_no_optimizer() -> None:
    after = attacked([shout], seed=1, seconds=60.0)
    assert after.fired["rounds"] >= 3 and after.kept >= 0.7
    assert not any(peer in after.hostile for finished in after.rounds for peer in finished.contributors)
    for net in after.nets.values():
        assert toy.parameters_of(net).abs().max() < 10.0


def claim_samples(swarm: Swarm, optimizer: Any, fired: Counter[str]) -> None:
    """Count a hundred million samples for each micro-batch."""
    count = optimizer.rounds.count

    def claim(samples: float, now: float) -> None:
        fired["claims"] += 1
        count(1e8, now)

    optimizer.rounds.count = claim


@pytest.mark.slow
def test_samples_that_nobody_computed_are_refused_by_name_and_do_not_fill_the_batch() -> None:
    after = attacked([claim_samples], seed=2, seconds=60.0)
    assert after.fired["claims"] and after.kept >= 0.7
    batch = 3 * SAMPLES_PER_S * STEP_S
    samples = [event.samples for _, event in after.events if isinstance(event, StepFinished)]
    assert min(samples) >= 0.9 * batch and max(samples) < 2 * batch
    refused = {event.peer for _, event in after.events if isinstance(event, PeerRefused)}
    assert refused == after.hostile


async def keep_silent(rounds: Any, fired: Counter[str]) -> None:
    """Its record says that it computes, as the links stay open."""
    fired["lies"] += 100


AMONG_CLIENTS = {
    "silent": (False, keep_silent),
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
            toy.take(optimizer, net, optimizer.global_step, slice(0, SAMPLES))
        swarm.runtime.call(lie(optimizer.rounds))

    async def lie(rounds: Any) -> None:
        rounds._tasks.cancel()
        await attack(rounds, fired)
        await asyncio.Event().wait()

    with cs.simulate(1, network="lan", seed=1, samples_per_s=SAMPLES_PER_S) as simulation:
        for name in ("bob", "carol", "dave"):
            simulation.join(name, listen=False)
        simulation.join("mallory", listen=listens)
        simulation.run(work, seconds=begins_at + seconds)
    # Three of them take a step each 4 s.
    assert fired["lies"] >= 100
    assert min(steps[name] for name in ("bob", "carol", "dave")) >= 0.7 * seconds / 4
    assert sizes[3] >= 0.8 * sizes.total()


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
                await mallory.link_to(target.node.id, 5.0)
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
