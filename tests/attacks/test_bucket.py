"""Attacks by one member on a run in a bucket, in virtual time. It has the bucket's keys, and only adds objects."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import BucketError, PeerError, SwarmError
from colab_swarm.events import BatchDropped, PeerRefused, StateReceived, Waited
from colab_swarm.mailbox.branches import Branches, Step, Unsettled
from colab_swarm.mailbox.reader import Reader
from colab_swarm.mailbox.rounds import (
    Card,
    ManifestEntry,
    PseudoGradient,
    ReadContribution,
    RoundChain,
    RoundManifest,
    StateHead,
    content_digest,
    encode,
    entries_of,
    folder_of,
    numbered,
    seal,
    unseal,
)
from colab_swarm.mailbox.view import RoundView
from colab_swarm.net.identity import Identity
from colab_swarm.swarm.simulation import NAMES, Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot, pack, unpack
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.records import LINEAGE_BYTES
from colab_swarm.training.sketch import SKETCH_STEPS, StateSketch
from tests.training.toy import join_training, loss_of, model

CALM_S = 240.0  # of training before the attack
ATTACK_S = 330.0
BATCH = 4
SETTINGS: dict[str, Any] = {"target_batch_size": 40, "local_steps": 3}
MOST_LOST = 2  # rounds, by one attack
LEAST_WILD = 0.8  # of the rounds, beside members that write anything
USUAL_S = 35.0  # of a round
LEAST = 0.85  # of the rounds, where a member is late each time: each round lasts a usual one then


class Mallory:
    """A member that has trained with the others, and now writes what it likes; ``fired`` counts its objects."""

    def __init__(self, swarm: Swarm, optimizer: SwarmOptimizer, rng: random.Random) -> None:
        self.id = swarm.id
        self.rounds: Any = optimizer.collaboration.rounds
        self.journal = self.rounds._journal
        self.chain: RoundChain = self.rounds._follower.chain
        self.rng = rng
        self.fired = 0

    async def look(self) -> Branches:
        """Follow the rounds, and return what is there."""
        async for closed in self.journal.follow(self.chain):
            self.chain = closed.after
        return await self.journal.look(self.chain)

    async def offers(self) -> list[ReadContribution]:
        """Return what the open round may list."""
        view = RoundView(self.chain, await self.look())
        reader: Reader = self.journal.reader
        return await reader.answer(lambda: _contributions(view))

    async def write(self, path: str, data: bytes) -> None:
        self.fired += await self.journal.bucket.create(path, data)

    async def close(self, entries: tuple[ManifestEntry, ...], chain: RoundChain | None = None) -> None:
        """Write a manifest to the next place."""
        chain = chain or self.chain
        listing = (await self.journal.look(chain)).listing
        data = self.journal.signed(RoundManifest, round=chain.round, base=chain.base, entries=entries)
        await self.write(listing.next_attempt(chain.folder), data)

    async def contribute(self, round: int, values: Any, place: int = 0, **fields: Any) -> None:
        chain = self.chain
        content = encode(self.journal.codec, HostVector(np.asarray(values, np.float32)))
        figures = {"weight": 4.0, "samples": 4.0, "samples_per_s": 1.0, "seconds": 1.0, "name": "mallory"}
        position = {"round": round, "base": chain.digests[round]}
        data = self.journal.signed(PseudoGradient, content, **(figures | position | fields))
        name = f"{chain.folders[round]}/{self.id.hex()}"
        await self.write(f"{name}-{place:08x}" if place else name, data)

    async def wait_round(self) -> None:
        """Return when another round has begun."""
        base = self.chain.base
        while self.chain.base == base:
            await asyncio.sleep(0.5)
            await self.look()


def _contributions(view: RoundView) -> list[ReadContribution] | Step:
    try:
        return view.contributions
    except Unsettled as unsettled:
        return unsettled.step


Attack = Callable[[Mallory], Coroutine[Any, Any, None]]


@dataclass
class Outcome:
    """What the honest members saw; lists are by member."""

    steps: dict[str, list[float]] = field(default_factory=dict)  # times, since the attack began
    lineages: dict[int, set[bytes]] = field(default_factory=dict)  # by step, of all
    losses: dict[str, list[float]] = field(default_factory=dict)
    events: dict[str, list[Any]] = field(default_factory=dict)  # since then
    fired: int = 0
    moods: Counter[str] = field(default_factory=Counter)
    mallory: str = ""  # id
    hostile: set[str] = field(default_factory=set)  # ids

    @property
    def fewest(self) -> int:
        return min(map(len, self.steps.values()))

    @property
    def loss(self) -> float:
        """The highest of all members at the end."""
        return max(losses[-1] for losses in self.losses.values())

    def named(self, kind: type[Any]) -> list[Any]:
        """Return the events of a kind that name mallory."""
        every = [event for events in self.events.values() for event in events]
        return [one for one in every if isinstance(one, kind) and one.peer == self.mallory]


class _Lab:
    def __init__(self, attack: Attack | None, hostile: tuple[str, ...], seed: int, *, wild: bool) -> None:
        self.attack = attack
        self.wild = wild
        self.hostile = hostile
        self.seed = seed
        self.outcome = Outcome()
        self.sim: Simulation

    def life(self, swarm: Swarm) -> None:
        net = model()
        if swarm.name not in self.hostile:
            events = self.outcome.events.setdefault(swarm.name, [])
            swarm.events.listen(lambda event: events.append(event) if event.at > CALM_S else None)
        optimizer = join_training(swarm, net, **SETTINGS)
        if swarm.name in self.hostile:
            self._train_until(CALM_S, net, optimizer)
            mallory = Mallory(swarm, optimizer, random.Random(f"{self.seed} {swarm.name}"))
            self.outcome.mallory = swarm.id.hex()
            self.outcome.hostile.add(swarm.id.hex())
            if self.attack is not None:
                swarm.runtime.call(self._attack(mallory))
            if not self.wild:
                return
            mallory.journal.bucket.create = Wild(mallory, self.outcome.moods).create
            with suppress(SwarmError):
                self._train_until(CALM_S + ATTACK_S, net, optimizer)
            return
        self._train(swarm, net, optimizer)

    def _train_until(self, end: float, net: torch.nn.Module, optimizer: SwarmOptimizer) -> None:
        while self.sim.time < end:
            loss_of(net, optimizer.global_step, slice(0, BATCH)).backward()
            optimizer.step(samples=BATCH)

    async def _attack(self, mallory: Mallory) -> None:
        assert self.attack is not None
        try:
            await self.attack(mallory)
        finally:
            self.outcome.fired += mallory.fired

    def _train(self, swarm: Swarm, net: torch.nn.Module, optimizer: SwarmOptimizer) -> None:
        steps = self.outcome.steps.setdefault(swarm.name, [])
        while True:
            loss_of(net, optimizer.global_step, slice(0, BATCH)).backward()
            before = optimizer.global_step
            optimizer.step(samples=BATCH)
            if optimizer.global_step == before:
                continue
            self.outcome.lineages.setdefault(optimizer.global_step, set()).add(optimizer.lineage)
            if self.sim.time > CALM_S:
                steps.append(self.sim.time)
                with torch.no_grad():
                    loss = torch.stack([loss_of(net, step) for step in range(10)]).mean()
                self.outcome.losses.setdefault(swarm.name, []).append(float(loss))


def run(
    attack: Attack | None,
    honest: int = 3,
    hostile: int = 1,
    *,
    late: str = "",
    seed: int = 0,
    wild: bool = False,
) -> Outcome:
    """Let honest members train beside hostile ones, which attack after the calm; ``late`` joins at the end of it."""
    names = NAMES[:honest]
    lab = _Lab(attack, tuple(f"mallory-{index}" for index in range(hostile)), seed, wild=wild)
    with cs.simulate(honest, mailbox=True, samples_per_s=2.0, seed=seed) as lab.sim:
        for name in lab.hostile:
            lab.sim.join(name)
        if late:
            lab.sim.join(late, at=CALM_S + ATTACK_S / 2)
        lab.sim.run(lab.life, seconds=CALM_S + ATTACK_S)
    assert set(names) <= set(lab.outcome.steps)
    return lab.outcome


@cache
def undisturbed(honest: int = 3, hostile: int = 1) -> Outcome:
    """Return what honest members do beside others that stop training, without a word."""
    return run(None, honest, hostile)


def assert_held(outcome: Outcome, honest: int = 3, *, least_fired: int = 3) -> None:
    """The attack fired, cost two rounds at most, and moved nobody."""
    assert outcome.fired >= least_fired, outcome.fired
    calm = undisturbed(honest)
    assert outcome.fewest >= min(calm.fewest - MOST_LOST, LEAST * calm.fewest), (outcome.fewest, calm.fewest)
    assert outcome.loss < 1.2 * calm.loss, (outcome.loss, calm.loss)
    every = [event for events in outcome.events.values() for event in events]
    assert not any(isinstance(event, StateReceived) for event in every)
    assert all(len(lineages) == 1 for lineages in outcome.lineages.values())


def unreadable(mallory: Mallory) -> tuple[ManifestEntry, ...]:
    """Return entries of contributions that nobody has."""
    chain = mallory.chain
    members = sorted({*chain.members, mallory.id})
    every = [ManifestEntry(each, chain.round, os.urandom(32), 1.0, 1.0, 1.0, 1.0) for each in members]
    return tuple(entry for entry in every if chain.may_count(entry.member, entry.round))


async def ghosts_all_the_time(mallory: Mallory) -> None:
    """Each second another manifest that nobody can follow."""
    while True:
        await mallory.look()
        await mallory.close(unreadable(mallory))
        await asyncio.sleep(1.0)


async def ghosts_once_a_round(mallory: Mallory) -> None:
    while True:
        await mallory.look()
        await mallory.close(unreadable(mallory))
        await mallory.wait_round()


async def ghosts_before_another_one(mallory: Mallory) -> None:
    """A manifest just before another peer may replace the last one, each time."""
    while True:
        manifests = (await mallory.look()).listing.manifests.get(mallory.chain.folder, [])
        newest = max((place.modified_at for place in manifests), default=-1e9)
        if mallory.journal.bucket.now() >= newest + mallory.chain.missing_s - 0.6:
            await mallory.close(unreadable(mallory))
        await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(ghosts_all_the_time, marks=pytest.mark.ordeal),
        pytest.param(ghosts_once_a_round, marks=pytest.mark.ordeal),
        ghosts_before_another_one,
    ],
)
def test_manifests_that_nobody_can_follow_cost_two_rounds(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert outcome.named(Waited)


def forged(mallory: Mallory, chain: RoundChain) -> Snapshot:
    """The state of this member with other parameters."""
    held = mallory.rounds.model.snapshot()
    state = unpack(held.manifest.layout, held.blob.copy())
    state["step"] = chain.round
    state["parameters"] = [torch.full_like(one, 7.0) for one in state["parameters"]]
    state["lineage"] = lineage = chain.base[:LINEAGE_BYTES]
    return Snapshot.of(lineage, chain.round, *pack(state))


async def write_state(mallory: Mallory, chain: RoundChain, place: int = 0) -> None:
    state = forged(mallory, chain)
    blob = memoryview(state.blob.data)
    data = mallory.journal.signed(StateHead, blob, chain=chain, manifest=state.head)
    await mallory.write(numbered(f"states/{chain.round:08d}", place), data)


async def later_run_of_its_own(mallory: Mallory) -> None:
    """A state of round 9000 with other parameters, contributions and manifests to the rounds after it."""
    while True:
        await mallory.look()
        own = mallory.chain
        other = RoundChain.begin(9000 + own.round, os.urandom(32), now=mallory.journal.bucket.now())
        await write_state(mallory, other)
        mallory.chain = other
        await mallory.contribute(other.round, np.zeros(mallory.journal.numel))
        await mallory.close(entries_of(mallory.chain, await mallory.offers()))
        mallory.chain = own
        await mallory.wait_round()


async def false_states_of_this_run(mallory: Mallory) -> None:
    """Each round a state of it with other parameters, of the true chain."""
    while True:
        await mallory.look()
        await write_state(mallory, mallory.chain)
        await mallory.wait_round()


async def next_round_built_on_a_ghost(mallory: Mallory) -> None:
    """A manifest that nobody can follow, and the manifest of the next round upon it."""
    while True:
        await mallory.look()
        chain = mallory.chain
        entries = unreadable(mallory)
        await mallory.close(entries)
        listing = (await mallory.journal.look(chain)).listing
        for place in listing.manifests.get(chain.folder, []):
            data = await mallory.journal.bucket.read(place.path)
            head, _ = unseal(data, RoundManifest)
            if head.member == mallory.id:
                digest = content_digest(data)
                after = chain.after(head, digest, closed_at=place.modified_at)
                mallory.chain = after
                await mallory.contribute(after.round, np.zeros(mallory.journal.numel))
                await mallory.close(entries_of(mallory.chain, await mallory.offers()), after)
        mallory.chain = chain
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack",
    [
        later_run_of_its_own,
        pytest.param(false_states_of_this_run, marks=pytest.mark.ordeal),
        pytest.param(next_round_built_on_a_ghost, marks=pytest.mark.ordeal),
    ],
)
def test_a_state_moves_nobody_that_can_follow_the_rounds(attack: Attack) -> None:
    assert_held(run(attack))


async def garbage_for_states(mallory: Mallory) -> None:
    await mallory.write("card/a", mallory.journal.signed(Card, schema=b"another", agreement=()))
    await mallory.write("card/0", b"colab_swarm\x63 of another version")
    for round in range(0, 400, 16):
        for place in range(3):
            await mallory.write(numbered(f"states/{round:08d}", place), b"garbage")
            fields = {"chain": RoundChain.begin(round, os.urandom(32), now=0.0), "manifest": b"junk"}
            data = mallory.journal.signed(StateHead, b"x", **fields)
            await mallory.write(numbered(f"states/{round:08d}", 3 + place), data)


async def later_run(mallory: Mallory) -> None:
    await later_run_of_its_own(mallory)


async def false_chains(mallory: Mallory) -> None:
    """Garbage, and each round states whose chain says something false."""
    await garbage_for_states(mallory)
    while True:
        await mallory.look()
        chain = mallory.chain
        members = tuple(os.urandom(32) for _ in range(50))
        listed = tuple(
            (each, round) for each in chain.members for round in range(chain.round, chain.round + 200)
        )
        lies: tuple[dict[str, Any], ...] = (
            {"digests": {**chain.digests, chain.round: os.urandom(32)}},
            {"members": members, "pace_s": 6 * 3600.0},
            {"listed": listed, "closed_at": 9e11},
        )
        for place, lie in enumerate(lies, 9):
            await write_state(mallory, msgspec.structs.replace(chain, **lie), place)
        await mallory.wait_round()


async def first_states_amid_the_rounds(mallory: Mallory) -> None:
    """States of true rounds, which say that nothing was before them: with them, any lineage would do."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await write_state(mallory, msgspec.structs.replace(chain, digests={chain.round: chain.base}), 9)
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel))
        await mallory.wait_round()


async def crowd(mallory: Mallory) -> None:
    """Garbage of hundreds of names in the folder of each round, and a later run of its own."""
    own = asyncio.create_task(later_run_of_its_own(mallory))
    base = b""
    try:
        while True:
            await asyncio.sleep(0.5)
            chain = mallory.rounds._follower.chain if mallory.chain.round >= 9000 else mallory.chain
            if chain.base == base:
                continue
            base = chain.base
            for number in range(260):
                name = number.to_bytes(4, "big") + base[:28]
                await mallory.write(f"{chain.folder}/{name.hex()}", b"x")
    finally:
        own.cancel()


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_late_joiner_that_got_a_false_state_of_the_true_rounds_finds_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.attacks.test_bucket.ATTACK_S", 1500.0)
    outcome = run(false_states_of_this_run, late="zoe")
    received = [event for event in outcome.events["zoe"] if isinstance(event, StateReceived)]
    assert len(received) == 2, "a false one, then a true one"
    assert received[0].donors == (outcome.mallory,) and received[1].donors != (outcome.mallory,)
    assert outcome.losses["zoe"][-1] == outcome.losses["alice"][-1]
    assert all(len(lineages) == 1 for lineages in outcome.lineages.values())


@pytest.mark.parametrize(
    "attack",
    [
        false_chains,
        pytest.param(later_run, marks=pytest.mark.ordeal),
        pytest.param(crowd, marks=[pytest.mark.slow, pytest.mark.ordeal]),
        pytest.param(first_states_amid_the_rounds, marks=[pytest.mark.slow, pytest.mark.ordeal]),
    ],
)
def test_a_late_joiner_finds_the_state_of_most_members(attack: Attack) -> None:
    outcome = run(attack, late="zoe")
    received = [event for event in outcome.events["zoe"] if isinstance(event, StateReceived)]
    assert outcome.mallory not in [donor for event in received for donor in event.donors]
    assert len(outcome.steps["zoe"]) >= 5 and received
    del outcome.steps["zoe"], outcome.events["zoe"]
    assert_held(outcome)


async def garbage_for_contributions(mallory: Mallory) -> None:
    """Objects in the places where the others contribute, as soon as a round begins."""
    while True:
        await mallory.look()
        for member in mallory.chain.members:
            if member != mallory.id:
                await mallory.write(f"{mallory.chain.folder}/{member.hex()}", b"garbage")
                await mallory.write(f"{mallory.chain.folder}/{member.hex()}-00000000", b"garbage")
        await mallory.wait_round()


async def contributions_of_others(mallory: Mallory) -> None:
    """Its own contribution, in the others' places."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await mallory.contribute(chain.round, np.zeros(mallory.journal.numel))
        data = await mallory.journal.bucket.read(f"{chain.folder}/{mallory.id.hex()}")
        for member in chain.members:
            await mallory.write(f"{chain.folder}/{member.hex()}", data)
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack", [garbage_for_contributions, pytest.param(contributions_of_others, marks=pytest.mark.ordeal)]
)
def test_garbage_in_the_place_of_a_contribution_blocks_nobody(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    every = [event for events in outcome.events.values() for event in events]
    assert not any(isinstance(event, BatchDropped) for event in every)


async def triple(mallory: Mallory, **fields: Any) -> None:
    """A contribution to each round that is open, in three places each."""
    scale = fields.pop("scale", 1e-3)
    while True:
        await mallory.look()
        for round in mallory.chain.folders:
            values = scale * np.random.default_rng(round).standard_normal(mallory.journal.numel)
            for place in range(3):
                with suppress(BucketError):
                    await mallory.contribute(round, values, place, **fields)
        await mallory.wait_round()


async def huge(mallory: Mallory) -> None:
    await triple(mallory, scale=1e6, weight=1000.0)


async def zero(mallory: Mallory) -> None:
    await triple(mallory, scale=0.0, weight=1e-6)


async def slow_pace(mallory: Mallory) -> None:
    await triple(mallory, seconds=9e11)


async def fast_pace(mallory: Mallory) -> None:
    await triple(mallory, seconds=0.0)


@pytest.mark.parametrize(
    "attack",
    [
        huge,
        pytest.param(zero, marks=pytest.mark.ordeal),
        pytest.param(slow_pace, marks=pytest.mark.ordeal),
        pytest.param(fast_pace, marks=pytest.mark.ordeal),
    ],
)
@pytest.mark.parametrize("honest", [pytest.param(2, marks=pytest.mark.ordeal), 3])
def test_a_member_has_one_vote_and_one_entry(attack: Attack, honest: int) -> None:
    assert_held(run(attack, honest), honest)


async def copies_of_manifests(mallory: Mallory) -> None:
    """Two old manifests of each member in the folder of each new round."""
    bucket = mallory.journal.bucket
    copies = dict[bytes, bytes]()
    while True:
        listing = (await mallory.look()).listing
        chain = mallory.chain
        for place in listing.manifests.get(folder_of(chain.round - 1, chain.digests[chain.round - 1]), ()):
            data = await bucket.read(place.path)
            head, _ = unseal(data, RoundManifest)
            if head.round == chain.round - 1:
                copies[head.member] = data
        for number, data in enumerate(2 * list(copies.values())):
            await mallory.write(f"{chain.folder}/manifest-{number:02d}", data)
        await mallory.wait_round()


async def copies_of_contributions(mallory: Mallory) -> None:
    """Each contribution in each place of the others."""
    while True:
        await mallory.look()
        await asyncio.sleep(0.7 * mallory.chain.pace_s)
        listing = (await mallory.look()).listing
        chain = mallory.chain
        for place in listing.contributions.get(chain.folder, ())[:5]:
            data = await mallory.journal.bucket.read(place.path)
            for folder in chain.folders.values():
                for member in chain.members:
                    await mallory.write(f"{folder}/{member.hex()}-{os.urandom(4).hex()}", data)
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack", [copies_of_manifests, pytest.param(copies_of_contributions, marks=pytest.mark.ordeal)]
)
def test_copies_of_what_others_wrote_are_not_theirs(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    every = [event for events in outcome.events.values() for event in events]
    assert not any(isinstance(event, PeerRefused) for event in every)


async def fewest_members(mallory: Mallory) -> None:
    """Contributes at once, and closes each round with the fewest members that make a quorum."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel))
        while mallory.chain.base == chain.base:
            offers = sorted(await mallory.offers(), key=lambda each: each.head.member != mallory.id)
            most = len(chain.members) // 2 + 1
            if len(offers) >= most:
                await mallory.close(entries_of(mallory.chain, offers[:most]))
            await asyncio.sleep(0.3)


async def wrong_weights(mallory: Mallory) -> None:
    """Three hundred readable manifests a round with wrong samples."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel))
        offers = await mallory.offers()
        entries = entries_of(mallory.chain, offers) if offers else ()
        lies = tuple(msgspec.structs.replace(entry, samples=entry.samples + 1) for entry in entries)
        for _ in range(100):
            if lies:
                await mallory.close(lies)
        await mallory.wait_round()


@pytest.mark.parametrize("attack", [fewest_members, pytest.param(wrong_weights, marks=pytest.mark.ordeal)])
def test_a_manifest_that_leaves_members_out_or_lies_does_not_count(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert outcome.named(PeerRefused)
    every = [event for events in outcome.events.values() for event in events]
    assert not any(isinstance(event, BatchDropped) for event in every)


async def late_each_time(mallory: Mallory) -> None:
    """Contributes after one and a half usual rounds."""
    while True:
        await mallory.look()
        await asyncio.sleep(1.5 * mallory.chain.pace_s)
        await mallory.look()
        for round in mallory.chain.folders:
            await mallory.contribute(round, 1e-3 * np.ones(mallory.journal.numel))


async def another_member_each_round(mallory: Mallory) -> None:
    """Contributes once under each of many identities."""
    journal = mallory.journal
    figures: dict[str, Any] = {
        "weight": 4.0,
        "samples": 4.0,
        "samples_per_s": 1.0,
        "seconds": 1.0,
        "name": "new",
    }
    content = encode(journal.codec, HostVector(np.full(journal.numel, 1e-3, np.float32)))
    while True:
        await mallory.look()
        chain = mallory.chain
        member = Identity(os.urandom(32))
        head = PseudoGradient(
            prefix=journal._prefix,
            key=member.public_key,
            membership=journal._services.peers.membership,
            content=content_digest(content),
            round=chain.round,
            base=chain.base,
            **figures,
        )
        path = f"{chain.folder}/{member.id.hex()}"
        await mallory.write(path, seal(head.signed(member.sign), content))
        await mallory.wait_round()


@pytest.mark.ordeal
def test_members_that_come_for_one_round_are_not_awaited() -> None:
    outcome = run(another_member_each_round)
    assert_held(outcome)
    waited = [event for events in outcome.events.values() for event in events if isinstance(event, Waited)]
    assert {event.peer for event in waited} <= outcome.hostile


async def each_second_round(mallory: Mallory) -> None:
    while True:
        await mallory.look()
        await mallory.contribute(mallory.chain.round, 1e-3 * np.ones(mallory.journal.numel))
        await mallory.wait_round()
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack", [late_each_time, pytest.param(each_second_round, marks=pytest.mark.ordeal)]
)
def test_a_member_that_is_late_again_and_again_is_not_awaited(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert outcome.named(Waited)


MOODS = ("delay", "drop", "garble", "truncate", "replay", "equivocate", "elsewhere", "ghost")


class Wild:
    """Writes what a member writes, but not as it should: some objects, in some of these moods."""

    def __init__(self, mallory: Mallory, fired: Counter[str]) -> None:
        self.fired = fired
        self._mallory = mallory
        self._rng = mallory.rng
        self._rate = self._rng.choice((0.3, 0.6, 1.0))
        self._moods = self._rng.sample(MOODS, 5)
        self._create = mallory.journal.bucket.create
        self._written: list[bytes] = []

    async def create(self, path: str, data: bytes) -> bool:
        self._written.append(data)
        if self._rng.random() > self._rate:
            return bool(await self._create(path, data))
        mood = self._rng.choice(self._moods)
        self.fired[mood] += 1
        if mood == "delay":
            await asyncio.sleep(10 ** self._rng.uniform(0.0, 2.0))
        elif mood == "drop":
            return True
        elif mood == "equivocate":
            await self._create(f"{path}-00000001", self._other(data))
        elif mood == "elsewhere":
            await self._write_elsewhere(path, data)
        elif mood == "ghost":
            self._mallory.chain = self._mallory.rounds._follower.chain or self._mallory.chain
            await self._mallory.close(unreadable(self._mallory))
        else:
            data = self._spoilt(mood, data)
        return bool(await self._create(path, data))

    def _spoilt(self, mood: str, data: bytes) -> bytes:
        if mood == "truncate":
            return data[: self._rng.randrange(len(data))]
        if mood == "replay":
            return self._rng.choice(self._written)
        changed = bytearray(data)
        for _ in range(3):
            changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _other(self, data: bytes) -> bytes:
        """Return the same statement with other values, signed."""
        with suppress(PeerError):
            head, content = unseal(data, PseudoGradient)
            values = -3 * np.frombuffer(content, np.float32)
            fields = {name: getattr(head, name) for name in ("round", "base", "weight", "samples")}
            figures = {"samples_per_s": 1.0, "seconds": 1.0, "name": "mallory"}
            return self._mallory.journal.signed(PseudoGradient, values.tobytes(), **(fields | figures))
        return data

    async def _write_elsewhere(self, path: str, data: bytes) -> None:
        """Take the place of another member's contribution, or the next place."""
        member = self._rng.choice(self._mallory.chain.members)
        await self._create(f"{path.rpartition('/')[0]}/{member.hex()}", data)


def kept(honest: int, hostile: int, seed: int) -> float:
    """Return the part of the rounds that wild members leave the honest ones."""
    outcome = run(None, honest, hostile, seed=seed, wild=True)
    calm = undisturbed(honest, hostile)
    part = outcome.fewest / calm.fewest
    charged_s = Counter[str]()
    for events in outcome.events.values():
        for event in events:
            if isinstance(event, Waited) and event.peer not in outcome.hostile:
                charged_s[event.peer] += event.seconds
    print(f"seed {seed}: {part:.2f} with {hostile} of {honest + hostile}, {outcome.moods}, {charged_s}")
    assert outcome.moods.total() >= 3
    assert all(len(lineages) == 1 for lineages in outcome.lineages.values())
    assert max(charged_s.values(), default=0.0) <= USUAL_S
    return part


@pytest.mark.slow
@pytest.mark.parametrize(("honest", "hostile"), [pytest.param(2, 1, marks=pytest.mark.ordeal), (3, 2)])
def test_wild_members_leave_the_others_most_of_their_rounds(honest: int, hostile: int) -> None:
    assert kept(honest, hostile, 0) >= LEAST_WILD


@pytest.mark.slow
@pytest.mark.ordeal
@pytest.mark.parametrize("seed", range(1, 40))
def test_wild_members_of_any_kind_leave_the_others_most_of_their_rounds(seed: int) -> None:
    honest, hostile = ((2, 1), (3, 2))[seed % 2]
    assert kept(honest, hostile, seed) >= LEAST_WILD


async def false_sketches(mallory: Mallory) -> None:
    """Trains no more, and says each ten steps that its state is another."""
    sketch: StateSketch | None = None
    while True:
        await mallory.look()
        chain = mallory.chain
        if chain.round % SKETCH_STEPS == 0:
            sketch = StateSketch(chain.round, chain.base[:LINEAGE_BYTES], (9.0,) * 15)
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel), sketch=sketch)
        await mallory.wait_round()


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_minority_that_says_to_hold_another_state_moves_nobody() -> None:
    assert_held(run(false_sketches, 3, 2))
