"""A group on the simulated network, in one call, and what its members end with."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from colab_swarm.averaging.group import Group, GroupMember, RoundTerms, Span
from colab_swarm.averaging.messages import AveragingSettings, Chunk
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.round import Averager
from colab_swarm.net.peers import Message
from colab_swarm.sim import LAN, ScriptedFault, SimNetwork, run_virtual
from colab_swarm.tensors.codecs import ErrorFeedback, Floats, mean_codec_for
from colab_swarm.tensors.vector import HostVector

BEGINS_AT = 9.0
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
SETTINGS = AveragingSettings(round_timeout_s=60)


@dataclass
class Outcome:
    """What a round did: per surviving peer its vector and result."""

    names: list[str]
    weights: list[float]
    contributions: dict[str, Floats]
    vectors: dict[str, Floats] = field(default_factory=dict)
    results: dict[str, GroupResult] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fired: list[ScriptedFault] = field(default_factory=list)
    spans: dict[str, Span] = field(default_factory=dict)

    def mean(self, *names: str) -> Floats:
        """The weighted mean of these peers' contributions (all, if none is named), in float64."""
        chosen = [n for n in self.names if not names or n in names]
        weights = [self.weights[self.names.index(n)] for n in chosen]
        vectors = np.array([self.contributions[n] for n in chosen], np.float64)
        return np.average(vectors, axis=0, weights=weights).astype(np.float32)

    def assert_mean(self, *names: str, atol: float = 1e-6) -> None:
        """All vectors have the same bits: this mean."""
        np.testing.assert_allclose(self.assert_equal_vectors(), self.mean(*names), rtol=1e-7, atol=atol)

    def assert_equal_vectors(self) -> Floats:
        first, *others = self.vectors.values()
        assert all(np.array_equal(first.view(np.uint32), other.view(np.uint32)) for other in others)
        return first


def contribution(message: Message) -> bool:
    return isinstance(message, Chunk) and not message.averaged


def vector(seed: int, numel: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def make_group(
    peers: Sequence[object],
    weights: Sequence[float],
    numel: int,
    *,
    codec: str = "float32",
    round_id: int = 1,
) -> Group:
    members = [
        GroupMember(p.id, p.contact.addresses, w, float(bool(p.contact.addresses)))
        for p, w in zip(peers, weights, strict=True)
    ]
    terms = RoundTerms("", 7, b"lineage", numel, b"", codec, mean_codec_for(codec))
    by_id = sorted(members, key=lambda member: member.id)
    return Group(round_id.to_bytes(16, "big"), terms, tuple(by_id))


def run_round(
    count: int = 4,
    numel: int = 200_000,
    *,
    weights: Sequence[float] | None = None,
    codec: str = "float32",
    clients: Sequence[str] = (),
    assistants: Sequence[str] = (),
    script: Callable[[SimNetwork], None] = lambda network: None,
    prepare: Callable[[dict[str, Floats]], None] = lambda contributions: None,
    delays: dict[str, float] | None = None,
    fine: int | None = None,
    feedbacks: dict[str, ErrorFeedback] | None = None,
    seed: int = 0,
) -> Outcome:
    """One round of ``count`` peers on a simulated LAN; crashed peers are left out of the outcome."""
    names = list(NAMES[:count])
    weights = list(weights or [0.0 if name in assistants else 1.0 + i for i, name in enumerate(names)])
    contributions = {name: vector(i, numel) for i, name in enumerate(names)}
    prepare(contributions)
    outcome = Outcome(names, weights, contributions)

    async def main() -> None:
        await asyncio.sleep(BEGINS_AT)
        network = SimNetwork(LAN, seed=seed)
        peers = [network.peer(name, listen=name not in clients) for name in names]
        network.introduce()
        averagers = {p.name: Averager(p, SETTINGS) for p in peers}
        group = make_group(peers, weights, numel, codec=codec)
        spans = group.spans()
        outcome.spans = {p.name: spans[group.index_of(p.id)] for p in peers}
        script(network)

        async def take_part(name: str) -> None:
            await asyncio.sleep((delays or {}).get(name, 0.0))
            if name in assistants:
                outcome.results[name] = await averagers[name].reduce(group)
                return
            values = contributions[name].copy()
            contribution = HostVector(values, (feedbacks or {}).get(name))
            result = await averagers[name].average(group, contribution, fine)
            outcome.vectors[name], outcome.results[name] = values, result
            outcome.seconds[name] = asyncio.get_running_loop().time() - BEGINS_AT

        await asyncio.gather(*map(take_part, names))
        outcome.fired = network.fired
        crashed = {fault.arguments[0] for fault in network.fired if fault.name == "crash"}
        for name in crashed & outcome.vectors.keys():
            del outcome.vectors[name], outcome.results[name], outcome.seconds[name]

    run_virtual(main())
    return outcome
