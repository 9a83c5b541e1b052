"""A member that gives another one false means, which it recalls as their reducer withholds them, moves nobody."""

import asyncio
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

import colab_swarm as cs
from colab_swarm.averaging.exchange import Round
from colab_swarm.averaging.recovery import Recovery
from colab_swarm.events import Fault, StepFinished
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import codec_of
from tests.training import toy

CALM_S = 16.0  # of virtual time
ATTACK_S = 30.0


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "factor"), [("float32", 1 + 1e-6), ("int8", -3.0), ("float32", 1e6)])
def test_equal_lineages_stay_equal_parameters(
    monkeypatch: pytest.MonkeyPatch, codec: str, factor: float
) -> None:
    who: dict[str, PeerId] = {}
    fired = Counter[str]()
    return_means = Round._return_means
    serve = Recovery.serve

    async def withhold(own: Round, stream: Any) -> None:
        if now() > CALM_S and own.peers.id == who["reducer"] and stream.peer == who["victim"]:
            fired["withheld"] += 1
            await asyncio.sleep(1e6)
        await return_means(own, stream)

    async def lie(recovery: Recovery, opening: Any, stream: Any) -> None:
        own = recovery.own
        if now() < CALM_S or own.peers.id != who["liar"] or stream.peer != who["victim"]:
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
    held: dict[PeerId, dict[tuple[int, bytes], bytes]] = defaultdict(dict)

    def train(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=20, compression=codec)
        on_loaded = optimizer.rounds.on_loaded

        def note() -> None:
            state = optimizer.global_step, optimizer.lineage
            held[swarm.id][state] = toy.parameters_of(net).numpy().tobytes()

        def load(*args: Any) -> None:
            on_loaded(*args)
            note()

        optimizer.rounds.on_loaded = load
        swarm.events.listen(lambda event: note() if isinstance(event, StepFinished) else None)
        while True:
            toy.take(optimizer, net, optimizer.global_step, slice(0, 2))

    with cs.simulate(4, network="lan", seed=0, samples_per_s=4.0) as simulation:
        ids = sorted(swarm.id for swarm in simulation.swarms.values())
        who |= {"reducer": ids[0], "liar": ids[1], "victim": ids[3]}
        simulation.run(train, seconds=CALM_S + ATTACK_S)
        victims = [swarm for swarm in simulation.swarms.values() if swarm.id == who["victim"]]
        assert not victims[0].events.recent(Fault)
    assert fired["withheld"] >= 2 and fired["lied"] >= 2
    # A false mean has another digest: the victim sees that it has another lineage, and loads the state.
    shared = held[ids[2]].keys() & held[ids[3]].keys()
    assert len(shared) >= 10
    assert all(held[ids[2]][key] == held[ids[3]][key] for key in shared)
