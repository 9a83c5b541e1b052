"""A run in a bucket, in virtual time: honest members train beside some that write what they like."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

import colab_swarm as cs
from colab_swarm.errors import PeerError, SwarmError
from colab_swarm.events import StateReceived
from colab_swarm.mailbox.branches import Branches
from colab_swarm.mailbox.contributions import Offer, encode
from colab_swarm.mailbox.reader import Reader
from colab_swarm.mailbox.rounds import ManifestEntry, PseudoGradient, RoundChain, RoundManifest, unseal
from colab_swarm.mailbox.view import RoundView
from colab_swarm.swarm.simulation import NAMES, Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training.toy import join_training, loss_of, model

CALM_S = 240.0  # of training before the attack
ATTACK_S = 330.0
BATCH = 4
SETTINGS: dict[str, Any] = {"target_batch_size": 40, "local_steps": 3}
MOST_LOST = 2  # rounds, by one attack
LEAST_WILD = 0.8  # of the rounds, beside members that write anything
USUAL_S = 22.0  # of a round of three
LEAST = 0.85  # of the rounds, where a member is late each time: each round lasts a usual one then


class Mallory:
    """A member that has trained with the others, and now writes what it likes; ``fired`` counts its objects."""

    def __init__(self, swarm: Swarm, optimizer: SwarmOptimizer, rng: random.Random) -> None:
        self.id = swarm.id
        self.rounds: Any = optimizer.rounds
        self.journal = self.rounds._journal
        self.chain: RoundChain = self.rounds._follower.chain
        self.rng = rng
        self.fired = 0

    async def look(self) -> Branches:
        """Follow the rounds, and return what is there."""
        async for closed in self.journal.follow(self.chain):
            self.chain = closed.after
        return await self.journal.look(self.chain)

    async def offers(self) -> list[Offer]:
        """Return what the open round may list."""
        view = RoundView(self.chain, await self.look())
        reader: Reader = self.journal.reader
        return await reader.answer(lambda: view.offers)

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
        if place:
            name = f"{name}-{place:08x}"
        await self.write(name, data)

    async def wait_round(self) -> None:
        """Return when another round has begun."""
        base = self.chain.base
        while self.chain.base == base:
            await asyncio.sleep(0.5)
            await self.look()


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

    def all(self, kind: type[Any]) -> list[Any]:
        """Return the events of a kind, of all members."""
        return [event for events in self.events.values() for event in events if isinstance(event, kind)]

    def named(self, kind: type[Any]) -> list[Any]:
        """Return those that name mallory."""
        return [event for event in self.all(kind) if event.peer == self.mallory]


class Lab:
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
    lab = Lab(attack, tuple(f"mallory-{index}" for index in range(hostile)), seed, wild=wild)
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
    assert not outcome.all(StateReceived)
    assert all(len(lineages) == 1 for lineages in outcome.lineages.values())


def unreadable(mallory: Mallory) -> tuple[ManifestEntry, ...]:
    """Return entries of contributions that nobody has."""
    chain = mallory.chain
    members = sorted({*chain.members, mallory.id})
    every = [ManifestEntry(each, chain.round, os.urandom(32), 1.0, 1.0, 1.0, 1.0) for each in members]
    return tuple(entry for entry in every if chain.may_count(entry.member, entry.round))


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
