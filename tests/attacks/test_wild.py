"""Members that delay, are silent and refuse at random, at every wait of the protocol: attacks nobody wrote down."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.averaging.group import JoinRound, RoundRefused, RoundTerms
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.member import RecallSpan, ReduceSpan
from colab_swarm.averaging.span_server import SpanServer
from colab_swarm.averaging.upload import Upload
from colab_swarm.events import StepFinished, Waited
from colab_swarm.net.peers import PeerId, Refusal, Role
from colab_swarm.swarm.simulation import NAMES
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.state import DescribeState, FetchState
from tests.training.toy import join_training, loss_of, model

CALM_S = 30.0  # of training before the attack
SAMPLES, SAMPLES_PER_S = 2, 4.0
LEAST = 0.85  # of the steps of the honest alone
MOODS = ("delay", "silence", "refusal")


class Wild:
    """What a hostile member does at each wait that others have on its account."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.begins_at, self.fired = rng, CALM_S, Counter[str]()
        self._honest = rng.choice((0.0, 0.3, 0.7))  # the rate of honest acts
        self._moods = rng.choices(MOODS, k=3)

    async def hesitate(self, where: str) -> None:
        """Raises `Refusal`."""
        if asyncio.get_running_loop().time() < self.begins_at or self._rng.random() < self._honest:
            return
        mood = self._rng.choice(self._moods)
        self.fired[f"{mood}: {where}"] += 1
        if mood == "refusal":
            raise Refusal("no")
        # Its own part in a round it only puts off, or it would soon do nothing any more.
        silence_s = 20.0 if where == "join" else 1e6
        await asyncio.sleep(silence_s if mood == "silence" else 10 ** self._rng.uniform(-1.5, 1.5))

    def before(self, handler: Callable[..., Any], where: str) -> Callable[..., Any]:
        async def wildly(*message: Any) -> Any:
            await self.hesitate(where)
            return await handler(*message)

        return wildly

    def infect(self, swarm: Swarm, prefix: str) -> None:
        handlers, averager = swarm.services.router._handlers, swarm.services.averager
        for kind in (RoundTerms, JoinRound, DescribeState, FetchState):
            handlers[kind][prefix] = self.before(handlers[kind][prefix], kind.__name__)
        for kind, serve in ((ReduceSpan, averager._serve_reduce), (RecallSpan, averager._serve_recall)):
            swarm.services.peers.unserve(kind)
            swarm.services.peers.serve_stream(kind, self.before(serve, kind.__name__), role=Role.REDUCER)


def hesitant(method: Callable[..., Any], wild: dict[PeerId, Wild], own_id: str) -> Callable[..., Any]:
    """The method, before which a hostile member hesitates; ``own_id``: where its object has the peer."""

    async def wildly(self: Any, *given: Any, **named: Any) -> Any:
        if member := wild.get(attrgetter(own_id)(self).id):
            try:
                await member.hesitate(method.__name__)
            except Refusal:
                raise RoundRefused("late", "no") from None
        return await method(self, *given, **named)

    return wildly


def train_with(
    honest: int, hostile: int, seed: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Counter[str], float]:
    """Return the steps of the honest during the attack, what the hostile did, and the waits by the events."""
    rng, wild, steps, cost_s = random.Random(seed), dict[PeerId, Wild](), Counter[str](), Counter[str]()
    for owner, name, own_id in (
        (Upload, "_send_chunks", "own.peers"),
        (SpanServer, "_return_means", "own.peers"),
        (Matchmaker, "join", "_peers"),
    ):
        monkeypatch.setattr(owner, name, hesitant(getattr(owner, name), wild, own_id))

    def work(swarm: Swarm) -> None:
        def hear(event: object) -> None:
            if isinstance(event, StepFinished) and event.at > CALM_S:
                steps[swarm.name] += 1
            elif isinstance(event, Waited) and PeerId(bytes.fromhex(event.peer)) in wild:
                cost_s[swarm.name] += event.seconds

        net = model()
        optimizer = join_training(swarm, net, target_batch_size=8 * honest)
        if swarm.name in NAMES[honest:]:
            member = wild[swarm.id] = Wild(random.Random(rng.random()))
            member.infect(swarm, optimizer.collaboration.progress.prefix)
        else:
            swarm.events.listen(hear)
        while True:
            loss_of(net, optimizer.global_step, slice(0, SAMPLES)).backward()
            optimizer.step(samples=SAMPLES)

    with cs.simulate(honest + hostile, network="lan", seed=seed, samples_per_s=SAMPLES_PER_S) as simulation:
        simulation.run(work, seconds=CALM_S + seconds)
    fired = sum((member.fired for member in wild.values()), Counter[str]())
    return min(steps.values()), fired, max(cost_s.values(), default=0.0)


def kept(seed: int, monkeypatch: pytest.MonkeyPatch, seconds: float) -> float:
    """Return the part of the steps that one, two or four of a swarm leave the honest majority."""
    hostile = (1, 2, 4)[seed % 3]
    honest = max(3, hostile + 1)
    with monkeypatch.context() as patch:
        undisturbed, none, _ = train_with(honest, 0, seed, seconds / 4, patch)  # it steps evenly
    clean = 4 * undisturbed
    with monkeypatch.context() as patch:
        steps, fired, cost_s = train_with(honest, hostile, seed, seconds, patch)
    told = f"{steps} of {clean} steps with {hostile} of {honest + hostile}, waited {cost_s:.1f} s"
    print(f"seed {seed}: {told}, {fired}")
    assert not none and len(fired) >= 5 and fired.total() >= 15
    assert cost_s > 0  # the events tell whom the honest waited for
    return steps / clean


@pytest.mark.slow
def test_a_wild_member_leaves_the_others_most_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(0, monkeypatch, 400.0) >= LEAST


@pytest.mark.slow
@pytest.mark.ordeal
@pytest.mark.parametrize("seed", range(6))
def test_wild_members_leave_the_others_most_of_their_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(seed, monkeypatch, 600.0) >= LEAST
