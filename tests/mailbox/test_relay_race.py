"""24 hours in which no process lives longer than one, and often nobody is online."""

import random

import torch

import colab_swarm as cs
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.history import rounds_of
from tests.training.toy import join_training, loss_of, model

HOUR = 3600.0
LATEST = 2  # rounds in which a contribution may still be listed


def test_a_run_goes_on_for_a_day_though_no_process_lives_for_more_than_an_hour() -> None:
    losses, alive, rng = list[float](), list[float](), random.Random(1)

    def train(swarm: Swarm) -> None:
        settings = {"target_batch_size": 1500, "local_steps": 4, "compression": "sparseloco"}
        optimizer = join_training(swarm, net := model(), **settings)
        while True:
            loss = loss_of(net, optimizer.global_step % 8)
            loss.backward()
            if optimizer.step(samples=250) is not None:
                with torch.no_grad():
                    losses.append(sum(loss_of(net, step).item() for step in range(8)))

    with cs.simulate(1, mailbox=True, samples_per_s=5.0) as sim:
        log, create = list[tuple[str, bytes]](), sim.bucket.create

        async def logged(path: str, data: bytes) -> bool:
            if written := await create(path, data):
                log.append((path, bytes(data)))
            return written

        sim.bucket.create = logged  # type: ignore[method-assign, assignment]
        name, begin, gaps = "alice", 0.0, 0
        while begin < 24 * HOUR:
            alive.append(end := begin + rng.uniform(0.5, 1.0) * HOUR)
            sim.network.at(end).crash(name)
            begin += rng.uniform(0.5, 1.2) * HOUR
            gaps += begin > max(alive)
            if begin < 24 * HOUR:
                sim.join(name := f"runner{len(alive)}", at=begin)
        sim.run(train, seconds=24 * HOUR)
        to_come = len(sim.network.coming)  # after the end

    manifests, unlisted = rounds_of(log)
    assert len(alive) - to_come > 24 and gaps > 5
    assert len(manifests) > 40
    assert all(round > manifests[-1].round - LATEST for _, round in unlisted)
    assert len({entry.member for one in manifests for entry in one.entries}) > 20
    assert losses[-1] < losses[0]
    states = [path for path, _ in log if "/states/" in path]
    assert len(states) >= 3 and len([path for path in sim.bucket.objects if "/states/" in path]) == 2
