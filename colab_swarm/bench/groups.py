"""Averaging in groups that alternate (DeDLOC section 3.2, Appendix C): how exact, how robust, how large a group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from colab_swarm.averaging.exchange import Chunk, Sending
from colab_swarm.averaging.group import Group
from colab_swarm.averaging.moshpit import MAX_ROUNDS, GridAverager, GridResult
from colab_swarm.averaging.rooms import Rooms
from colab_swarm.averaging.round import Averager, RoundResult
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.net.peers import Message
from colab_swarm.sim import LAN, FiredFault, NetworkProfile, SimNetwork, run_virtual
from colab_swarm.tensors.codecs import Floats


@dataclass
class Town:
    """Peers ``p0``, ``p1``, … that average a vector each, on the simulated network.

    Attributes:
        count: of the peers.
        numel: length of their vectors.
        clients: how many of them, the last, cannot be dialled.
        weights: one each; 1 if not given.
        doomed: ``doomed(name, round)``: whether the peer crashes while it sends in that round, counted from 0.
        liars: peers that vote for groups of a million and send values that are no numbers.
        group_size: vote of all; None: what they measured.
    """

    count: int
    numel: int = 500
    clients: int = 0
    weights: Sequence[float] = ()
    doomed: Callable[[str, int], bool] = lambda name, round_: False
    liars: Collection[str] = ()
    group_size: int | None = None
    profile: NetworkProfile = LAN
    seed: int = 0

    def names(self) -> list[str]:
        """Of the peers."""
        return [f"p{i}" for i in range(self.count)]

    def vector(self, name: str) -> Floats:
        """What a peer brings."""
        seed = [self.seed, int(name[1:])]
        return np.random.default_rng(seed).standard_normal(self.numel, dtype=np.float32)

    def mean(self, names: Sequence[str] = ()) -> Floats:
        """The weighted mean of what these peers (all, if none is named) bring, in float64."""
        chosen = list(names) or self.names()
        weights = [self.weights[int(n[1:])] if self.weights else 1.0 for n in chosen]
        vectors = [self.vector(n).astype(np.float64) for n in chosen]
        return np.average(vectors, axis=0, weights=weights)


@dataclass
class Story:
    """What happened in a `Town`.

    Attributes:
        history: what every peer held before the first and after each round.
        results: of the last pass.
        votes: the group size that each would choose next.
        seconds: on the virtual clock, for all passes.
    """

    history: list[dict[str, Floats]] = field(default_factory=list)
    results: dict[str, GridResult] = field(default_factory=dict)
    votes: dict[str, int] = field(default_factory=dict)
    fired: list[FiredFault] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def means(self) -> dict[str, Floats]:
        """What every peer holds in the end."""
        return self.history[-1]

    def spread(self) -> list[float]:
        """Mean square distance of the peers from their common mean: before the first and after each round."""
        held = [np.stack(list(vectors.values())).astype(np.float64) for vectors in self.history]
        return [float(((vectors - vectors.mean(0)) ** 2).mean()) for vectors in held]


class _Observed(Averager):
    """Tells when a round begins, and what is held when it has ended."""

    def watch(self, begins: Callable[[int, Floats], None], ended: Callable[[int, Floats], None]) -> None:
        self._begins, self._ended = begins, ended

    async def average(self, group: Group, values: Floats, sending: Sending | None = None) -> RoundResult:
        self._begins(group.step % MAX_ROUNDS, values)
        result = await super().average(group, values, sending)
        self._ended(group.step % MAX_ROUNDS, values.copy())
        return result


class _Player:
    """One peer of the town."""

    def __init__(self, town: Town, network: SimNetwork, name: str, *, listen: bool) -> None:
        self.peers = network.peer(name, listen=listen)
        self._town, self._network, self._name = town, network, name
        self._dht = DHT(self.peers, DHTSettings(), random.Random(name))
        averager = _Observed(self.peers)
        averager.watch(self._begins, self._ended)
        self.averager = GridAverager(Rooms(self.peers), self._dht, averager, "town/average")
        self.held = {0: town.vector(name)}  # by rounds done
        self.result: GridResult | None = None
        self._done = 0

    def _begins(self, axis: int, values: Floats) -> None:
        if self._name in self._town.liars:
            values[:] = np.nan
        if self._town.doomed(self._name, self._done + axis):
            self._network.when(is_contribution, sender=self._name).crash(self._name)

    def _ended(self, axis: int, values: Floats) -> None:
        self.held[self._done + axis + 1] = values

    async def enter(self, entry: _Player) -> None:
        """Get to know the others."""
        if entry is not self:
            await self._dht.bootstrap([entry.peers.contact])
        self._dht.start()

    async def play(self, passes: int) -> None:
        """Average so often."""
        weight = self._town.weights[int(self._name[1:])] if self._town.weights else 1.0
        values = self.held[0]
        group_size = 1_000_000 if self._name in self._town.liars else self._town.group_size
        for _ in range(passes):
            values, self.result = await self.averager.average(values, weight=weight, group_size=group_size)
            self._done += len(self.result.sides)
            self.held[self._done] = values
            weight = 1.0


def play(
    town: Town, *, passes: int = 1, script: Callable[[SimNetwork], None] = lambda network: None
) -> Story:
    """Let the town average; crashed peers are not in the story."""
    return run_virtual(_play(town, passes, script))


async def _play(town: Town, passes: int, script: Callable[[SimNetwork], None]) -> Story:
    network = SimNetwork(town.profile, seed=town.seed)
    listening = town.count - town.clients
    players = {n: _Player(town, network, n, listen=i < listening) for i, n in enumerate(town.names())}
    for player in players.values():
        await player.enter(players["p0"])
    script(network)
    begun = asyncio.get_running_loop().time()
    tasks = {name: asyncio.create_task(player.play(passes)) for name, player in players.items()}
    for name, player in players.items():
        player.peers.when_down(partial(_cancel, tasks[name]))
    await asyncio.wait(tasks.values())
    there = {
        name: players[name] for name, task in tasks.items() if not task.cancelled() and task.result() is None
    }
    return Story(
        history=_history({name: player.held for name, player in there.items()}),
        results={name: player.result for name, player in there.items() if player.result is not None},
        votes={name: p.averager.meter.choose_group_size(town.count) for name, p in there.items()},
        fired=network.fired,
        seconds=asyncio.get_running_loop().time() - begun,
    )


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _history(held: Mapping[str, Mapping[int, Floats]]) -> list[dict[str, Floats]]:
    """By rounds done; who missed a round still holds what it held before."""
    rounds = max((max(of) for of in held.values()), default=0)
    return [
        {name: of[max(done for done in of if done <= now)] for name, of in held.items()}
        for now in range(rounds + 1)
    ]


def is_contribution(message: Message) -> bool:
    """Whether a message carries values to be averaged."""
    return isinstance(message, Chunk) and not message.averaged
