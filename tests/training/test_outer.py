"""Local steps with error feedback, sparse codecs and overlap equal a straight single-process reference.

Processors sum in different orders, so a value that lies between two codes may get either, and what it got
changes all that follows. So the reference goes on from what each peer did: its contributions and the swarm's
parameters must agree with the reference to `EXACT`, and then take its place. What is encoded is the peer's own,
but for the residual: where a nudge of the rounding's size changes what a value decodes to, the mean may differ by
as much.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import Group, chunk_values, cut_chunks
from colab_swarm.averaging.result import RoundResult
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import Codec, Floats, codec_of
from colab_swarm.tensors.sparse import Sparse
from colab_swarm.training.flat import FlatValues
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.settings import RoundInput
from tests.training.toy import ROWS, join_training, loss_of, model, parameters_of, wait_for_peers

ROUNDS, STEPS, TARGET = 5, 3, 40  # a peer's micro-batches are a tenth to four tenths of `TARGET` samples
SPARSE = ("sparseloco", "topk:0.05")
EXACT = 1e-5
NUDGE = 2e-6  # of the largest value; float32 rounds by 6e-8 of each
NUDGES = 16  # random ones, besides all values up and all down


@dataclass
class Told:
    """What a peer did, in order: take a batch, step alone, give its contribution, or show the swarm's parameters."""

    acts: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    # The swarm's parameters when each contribution was given, and that pseudo-gradient.
    shared: list[Floats] = field(default_factory=list)
    given: list[Floats] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    def listen(self, optimizer: SwarmOptimizer) -> None:
        gathered, replica = optimizer._gathered, optimizer._replica

        def noted(owner: object, name: str, act: str, when: Callable[[], bool] = lambda: True) -> None:
            method = getattr(owner, name)

            def instead(*given: Any, **named: Any) -> Any:
                if when():
                    self.acts.append(act)
                return method(*given, **named)

            setattr(owner, name, instead)

        noted(gathered, "step", "step", lambda: gathered._since > 0)
        noted(replica, "pseudo_gradient", "give")
        pseudo_gradient = replica.pseudo_gradient

        def given(out: FlatValues) -> None:
            self.shared.append(flat(replica.parameters))
            pseudo_gradient(out)
            self.given.append(np.concatenate([part.numpy().ravel() for part in out.parts]))

        replica.pseudo_gradient = given  # type: ignore[method-assign]
        noted(replica, "land", "show")
        if not optimizer.rule.delayed:
            noted(replica, "show", "show")
        average = optimizer._trainer._average

        async def averaged(given: RoundInput, *, aside: bool = False) -> RoundResult | None:
            weight = given.weight
            if (result := await average(given, aside=aside)) is not None:
                self.weights.append(weight)
                self.groups.append(result.group)
            return result

        optimizer._trainer._average = averaged  # type: ignore[method-assign]


def flat(parameters: list[torch.Tensor]) -> Floats:
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).numpy().copy()


def at_a_tie(codec: Codec, values: Floats) -> Floats:
    """Return by how much each decoded value changes where rounding decides between two codes; elsewhere 0."""
    decoded = codec.decode(codec.encode(values), len(values)).copy()
    rng = np.random.default_rng(0)
    nudges = [np.ones_like(values), -np.ones_like(values)]
    nudges += [rng.uniform(-1, 1, len(values)).astype(np.float32) for _ in range(NUDGES)]
    most = np.zeros_like(values)
    for nudge in nudges:
        nudged = values + np.float32(NUDGE) * np.abs(values).max() * nudge
        change = np.abs(codec.decode(codec.encode(nudged), len(values)) - decoded)
        np.maximum(most, change, out=most)
    return np.where(most > 50 * NUDGE * np.abs(values).max(), most, 0).astype(np.float32)


class Straight:
    """DiLoCo (arXiv 2311.08105), SparseLoCo (2508.15706), and both one round behind, in one process."""

    def __init__(self, names: list[str], codec: str, feedback: bool, delayed: bool) -> None:
        self.nets = {name: model() for name in names}
        self.inner = {name: Lamb(net.parameters(), lr=0.01) for name, net in self.nets.items()}
        self.theta = parameters_of(model()).numpy()
        self.velocity = np.zeros_like(self.theta)
        self.rest = {name: np.zeros_like(self.theta) for name in names}
        self.sparse = codec in SPARSE
        self.codec, self.feedback, self.delayed = codec, feedback or self.sparse, delayed
        self.given: dict[str, Floats] = {}
        self.left: dict[str, Floats] = {}
        self.ties = np.zeros_like(self.theta)  # in the means of all rounds, as `at_a_tie`

    def of(self, name: str) -> Floats:
        return parameters_of(self.nets[name]).numpy().copy()

    def put(self, name: str, values: Floats) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), self.nets[name].parameters())

    def work(self, name: str, acts: Iterator[str]) -> Iterator[str]:
        """Do what the peer did; yields "give" and "show", when all peers have to be there."""
        batch = weight = 0
        rows = ROWS[name]
        gradients = [torch.zeros_like(one) for one in self.nets[name].parameters()]
        for act in acts:
            parameters = list(self.nets[name].parameters())
            if act == "take":
                loss = loss_of(self.nets[name], batch, rows)
                batch, weight = batch + 1, weight + rows.stop - rows.start
                for total, one in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                    total += one * (rows.stop - rows.start)
            elif act == "step":
                for total, parameter in zip(gradients, parameters, strict=True):
                    parameter.grad = total / weight
                    total.zero_()
                self.inner[name].step()
                weight = 0
            else:
                if act == "give":
                    self.given[name] = self.theta - self.of(name)
                    self.left[name] = self.of(name)
                yield act
                if act == "show":
                    moved = self.of(name) - self.left[name] if self.delayed else np.float32(0)
                    self.put(name, self.theta + moved)

    def follow(self, name: str, given: Floats) -> None:
        """Compare a peer's contribution, and go on from it."""
        np.testing.assert_allclose(given, self.given[name], rtol=0.0, atol=EXACT)
        self.given[name] = given
        self.left[name] = self.theta - given
        self.put(name, self.left[name])

    def average(self, group: Group, names: dict[bytes, str], weights: dict[str, float]) -> None:
        mean, mean_codec = np.zeros_like(self.theta), codec_of(group.terms.mean_codec)
        decay, total = 0.95 if self.sparse else 1.0, sum(weights.values())
        assert len(group.members) == len(self.given) == len(weights)
        wanted = {name: one + self.rest[name] for name, one in self.given.items()}
        for reducer, span in enumerate(group.spans()):
            for chunk in cut_chunks(span, chunk_values(self.codec, group.terms.mean_codec)):
                here = slice(chunk.start, chunk.stop)
                for member in group.members:
                    name, own = names[member.id], member.id == group.members[reducer].id
                    codec = codec_of(self.codec)
                    codec = codec if isinstance(codec, Sparse) or not own else codec_of("float32")
                    arrived = codec.decode(codec.encode(wanted[name][here]), chunk.numel)
                    mean[here] += np.float32(weights[name] / total) * arrived
                    self.ties[here] += np.float32(weights[name] / total) * at_a_tie(codec, wanted[name][here])
                    if self.feedback:
                        self.rest[name][here] = decay * (wanted[name][here] - arrived)
                self.ties[here] += at_a_tie(mean_codec, mean[here])
                mean[here] = mean_codec.decode(mean_codec.encode(mean[here]), chunk.numel)
        self.given.clear()
        if self.sparse:
            self.theta = self.theta - mean
        else:
            self.velocity = 0.9 * self.velocity + mean
            self.theta = self.theta - np.float32(0.7) * (mean + np.float32(0.9) * self.velocity)

    def compare(self, theta: Floats) -> None:
        """Compare with the swarm's parameters, and go on from those.

        A tie's difference is in the mean, in the momentum (0.7 + 0.7 * 0.9 of it and less from round to
        round), and with the other sign in the residual, so in the next mean.
        """
        allowed = EXACT + 2 * self.ties
        assert np.mean(self.ties > 0) < 0.15, "too many values are at a tie: this compares little"
        difference = np.abs(theta - self.theta)
        assert (difference <= allowed).all(), f"{difference.max()} at {difference.argmax()}"
        self.theta = theta


def train(swarm: Swarm, count: int, told: dict[str, Told], **settings: Any) -> torch.Tensor:
    optimizer = join_training(
        swarm,
        net := model(),
        target_batch_size=TARGET,
        local_steps=STEPS,
        **settings,
    )
    wait_for_peers(swarm, optimizer, count)
    told[swarm.name].listen(optimizer)
    rows, batch = ROWS[swarm.name], 0
    while optimizer.global_step < ROUNDS:
        loss_of(net, batch, rows).backward()
        told[swarm.name].acts.append("take")
        optimizer.step(samples=rows.stop - rows.start)
        batch += 1
    return torch.from_numpy(flat(optimizer._replica.parameters))


@pytest.mark.parametrize(
    ("codec", "feedback", "count", "delayed"),
    [
        ("float32", False, 2, False),
        ("float32", False, 4, True),
        ("int8", True, 2, True),
        ("int8", True, 4, False),
        ("sparseloco", True, 2, True),
        ("sparseloco", True, 4, False),
        ("topk:0.05", True, 2, False),
    ],
)
def test_combinations_equal_the_published_algorithm(
    count: int, codec: str, feedback: bool, delayed: bool
) -> None:
    told: dict[str, Told] = defaultdict(Told)
    settings = {"compression": codec, "error_feedback": feedback, "overlap": delayed}
    with cs.simulate(count, network="lan", seed=1, samples_per_s=20.0) as sim:
        results = sim.run(lambda swarm: train(swarm, count, told, **settings))
        names = {bytes(swarm.id): name for name, swarm in sim.swarms.items()}
    straight = Straight(list(results), codec, feedback, delayed)
    working = {name: straight.work(name, iter(told[name].acts)) for name in results}
    for number in range(ROUNDS):
        assert {next(work) for work in working.values()} == {"give"}
        for name, one in told.items():
            straight.follow(name, one.given[number])
        weights = {name: one.weights[number] for name, one in told.items()}
        straight.average(told["alice"].groups[number], names, weights)
        last = number == ROUNDS - 1
        shared = (
            [result.numpy() for result in results.values()]
            if last
            else [one.shared[number + 1] for one in told.values()]
        )
        for parameters in shared:
            np.testing.assert_array_equal(parameters, shared[0])
        straight.compare(shared[0])
        if not last:
            assert {next(work) for work in working.values()} == {"show"}
    assert sum(one.acts.count("step") for one in told.values()) > count * ROUNDS * (STEPS - 1)
