"""Members, and a viewer, that mean harm: what a peer can check by itself, it refuses, and the others train on."""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.exchange import Round
from colab_swarm.averaging.group import Attend, News, RoundTerms, Whereabouts
from colab_swarm.averaging.recovery import Recovery
from colab_swarm.dht.records import FindNear, FoundNear, Record
from colab_swarm.dht.service import key_id
from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import Fault, PeerRefused, RoundFinished, StateReceived, StepFinished
from colab_swarm.net.membership import Membership, MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.swarm.simulation import NAMES
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.training.records import ProgressRecord, progress_key
from colab_swarm.trust.access import IssuedMembership
from colab_swarm.trust.authority import RequestMembership
from tests.net.swarm import LOOPBACK, identity
from tests.training import toy
from tests.trust.run import Clock, Echo, Peer, run_with

CALM_S, ATTACK_S = 20.0, 40.0  # of simulated training before an attack, and beside it
SAMPLES, SAMPLES_PER_S, HONEST = 2, 4.0, 3
STEP_S = 4.0  # that the honest take for a step of theirs alone
BATCH = HONEST * SAMPLES_PER_S * STEP_S
Attack: TypeAlias = Callable[[Swarm, Any, Counter[str]], object]
"""Takes a hostile member, its optimizer, and counts how often it fires. It trains on after a return."""


@dataclass
class Aftermath:
    """What an attack left to the honest.

    Attributes:
        kept: the part of their steps, as if they were alone.
        events: what they were told since the attack began.
        held: by peer the digests of its parameters, by step and lineage.
    """

    kept: float = 0.0
    events: list[Any] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    nets: dict[str, Any] = field(default_factory=dict)
    hostile: set[str] = field(default_factory=set)
    held: dict[PeerId, dict[tuple[int, bytes], bytes]] = field(default_factory=lambda: defaultdict(dict))

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def attacked(attacks: Sequence[Attack], *, seed: int = 1, viewer: bool = False, **more: Any) -> Aftermath:
    """Train on the virtual clock beside a hostile peer for each attack; no honest loop may raise."""
    after = Aftermath()
    steps = Counter[str]()

    def work(swarm: Swarm) -> None:
        net = toy.model()
        number = NAMES.index(swarm.name) - HONEST
        if number >= 0:
            after.hostile.add(swarm.id.hex())
            if viewer:
                attacks[number](swarm, None, after.fired)
        optimizer = toy.join_training(swarm, net, target_batch_size=int(BATCH), **more)

        def hear(event: Any) -> None:
            if event.at > CALM_S:
                after.events.append(event)
                steps[swarm.name] += isinstance(event, StepFinished)
            if isinstance(event, StepFinished):
                state = optimizer.global_step, optimizer.lineage
                after.held[swarm.id][state] = toy.parameters_of(net).numpy().tobytes()

        if number < 0:
            after.nets[swarm.name] = net
            swarm.events.listen(hear)
        while number < 0 or simulation.time < CALM_S:
            toy.take(optimizer, net, optimizer.global_step, slice(0, SAMPLES))
        with contextlib.suppress(Exception):  # it gets what it gives
            attacks[number](swarm, optimizer, after.fired)
            while True:
                toy.take(optimizer, net, optimizer.global_step, slice(0, SAMPLES))

    everybody = HONEST + len(attacks)
    with cs.simulate(everybody, network="lan", seed=seed, samples_per_s=SAMPLES_PER_S) as simulation:
        if viewer:
            simulation.network.by_name[NAMES[HONEST]].role = Role.VIEWER
        simulation.run(work, seconds=CALM_S + ATTACK_S)
    after.kept = min(steps[name] for name in NAMES[:HONEST]) * STEP_S / ATTACK_S
    assert not after.told(Fault)
    return after


async def claim_a_later_step(rounds: Any, fired: Counter[str]) -> None:
    """Say in records, and to the organizer, that it is ahead on a lineage of its own, and give no state."""

    async def never() -> Snapshot:
        fired["asked for its state"] += 1
        await asyncio.Event().wait()
        raise AssertionError

    rounds._states._provide = never
    while True:
        step = max(record.step for record in rounds.view.others.values()) + 3
        rounds.view.leap(step, rounds.view.me[:16], syncing=False)
        rounds.share.step, rounds.share.lineage = step, rounds.view.me[:16]
        rounds._rendezvous.tell()
        fired["lies"] += 1
        with contextlib.suppress(PeerError):
            await rounds._exchange()
        await asyncio.sleep(0.5)


def be_ahead_of_all(swarm: Swarm, optimizer: Any, fired: Counter[str]) -> None:
    swarm.runtime.call(claim_a_later_step(optimizer.rounds, fired))


@pytest.mark.slow
def test_a_minority_that_claims_a_later_step_moves_nobody() -> None:
    after = attacked([be_ahead_of_all] * 2)
    assert after.fired["lies"] >= 100 and not after.fired["asked for its state"]
    assert after.kept >= 0.7
    assert not after.told(StateReceived)


def shout(swarm: Swarm, optimizer: Any, fired: Counter[str]) -> None:
    """Contribute 1e30 for each value."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    while True:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e30)
        fired["rounds"] += optimizer.step(samples=SAMPLES) is not None


@pytest.mark.slow
def test_a_contribution_of_huge_values_freezes_no_optimizer() -> None:
    after = attacked([shout])
    assert after.fired["rounds"] >= 3 and after.kept >= 0.7
    assert not any(peer in after.hostile for done in after.told(RoundFinished) for peer in done.contributors)
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
    after = attacked([claim_samples], seed=2)
    assert after.fired["claims"] and after.kept >= 0.7
    samples = [event.samples for event in after.told(StepFinished)]
    assert min(samples) >= 0.9 * BATCH and max(samples) < 2 * BATCH
    assert {event.peer for event in after.told(PeerRefused)} == after.hostile


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "factor"), [("float32", 1 + 1e-6), ("int8", -3.0)])
def test_false_means_that_a_member_lets_another_recall_part_no_equal_lineages(
    monkeypatch: pytest.MonkeyPatch, codec: str, factor: float
) -> None:
    """A false mean has another digest: the victim sees that it has another lineage, and loads the state."""
    fired = Counter[str]()
    return_means = Round._return_means
    serve = Recovery.serve

    def calm() -> bool:
        return asyncio.get_running_loop().time() < CALM_S

    async def withhold(own: Round, stream: Any) -> None:
        reducer, *_, victim = sorted(member.id for member in own.group.members)
        if not calm() and own.peers.id == reducer and stream.peer == victim:
            fired["withheld"] += 1
            await asyncio.sleep(1e6)
        await return_means(own, stream)

    async def lie(recovery: Recovery, opening: Any, stream: Any) -> None:
        own = recovery.own
        _, liar, *_, victim = sorted(member.id for member in own.group.members)
        if calm() or own.peers.id != liar or stream.peer != victim:
            return await serve(recovery, opening, stream)
        await own.settled[opening.reducer].wait()
        for index in opening.wanted:
            message, payload = recovery._answer(opening, index)
            if message.averaged and len(payload):
                fired["lied"] += 1
                mean_codec = codec_of(message.codec)
                mean = mean_codec.decode(payload, own.ledger.chunk(opening.reducer, index).numel)
                payload = mean_codec.encode(mean * np.float32(factor))
            await stream.send(message, bytes(payload))
        await stream.end()

    monkeypatch.setattr(Round, "_return_means", withhold)
    monkeypatch.setattr(Recovery, "serve", lie)
    after = attacked([lambda swarm, optimizer, fired: None], compression=codec)
    assert fired["withheld"] >= 2 and fired["lied"] >= 2
    states = defaultdict[tuple[int, bytes], list[bytes]](list)
    for held in after.held.values():
        for key, parameters in held.items():
            states[key].append(parameters)
    assert sum(len(each) > 1 for each in states.values()) >= 10
    assert all(len(set(each)) == 1 for each in states.values())


async def pretend_to_train(swarm: Swarm, fired: Counter[str]) -> None:
    """Give readers a record of its own, and try every call of a trainer."""
    peers = swarm.services.peers
    prefix = f"{swarm.run_id}/model"
    key = key_id(progress_key(prefix))
    own: list[Record] = []

    async def answer(caller: PeerId, message: FindNear) -> FoundNear:
        found = await swarm.services.dht._on_find(caller, message)
        fired["records"] += len(own)
        return FoundNear(found.contacts, (*found.records, *own) if message.key == key else found.records)

    async def organize(opening: Attend, stream: object) -> None:
        fired["stood here"] += 1

    for link in [*peers.table]:
        link.abort("the next ones are a viewer's")
    peers.unserve(FindNear)
    peers.serve(FindNear, answer)
    peers.serve_stream(Attend, organize, role=Role.GUEST)
    while True:
        await asyncio.sleep(1.0)
        found = await swarm.services.dht.published(progress_key(prefix), ProgressRecord)
        if not found:
            continue
        top = max(found.values(), key=lambda record: record.step)
        data = msgspec.msgpack.encode(msgspec.structs.replace(top, name="mallory"))
        now = peers.time()
        bare = Record(data, now + 30, int(now * 1e6), 30.0, peers.public_key, peers.membership)
        own[:] = [msgspec.structs.replace(bare, signature=peers.sign(bare.signed_bytes(key)))]
        opening = Attend(peers.contact, b"", RoundTerms(prefix, top.step, top.lineage, 178), 10.0)
        for trainer in found:
            with contextlib.suppress(CallRefused):
                await peers.call(trainer, Whereabouts(prefix, b""), News, timeout_s=5)
                fired["answers"] += 1
            with contextlib.suppress(CallRefused):
                async with await peers.stream(trainer, opening, timeout_s=5) as stream:
                    await stream.receive(News)
                fired["answers"] += 1
            fired["tries"] += 2


@pytest.mark.slow
def test_a_viewer_neither_counts_nor_organizes() -> None:
    after = attacked(
        [lambda swarm, _, fired: swarm.runtime.call(pretend_to_train(swarm, fired))], viewer=True
    )
    assert after.fired["records"] >= 3 and after.fired["tries"] >= 20
    assert not after.fired["answers"] and not after.fired["stood here"]
    assert after.kept >= 0.9
    assert not any(peer in after.hostile for done in after.told(RoundFinished) for peer in done.contributors)


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
