"""24 hours in which no process lives longer than one, and often nobody is online."""

import random

import torch

import colab_swarm as cs
from colab_swarm.mailbox.objects import PLACE, RoundManifest, content_digest, unseal
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model

HOUR = 3600.0
LATEST = 2  # rounds in which a contribution may still be listed


def test_a_run_goes_on_for_a_day_though_no_process_lives_for_more_than_an_hour() -> None:
    """Each is killed; the rounds follow each other, and each contribution counts once."""
    losses, alive, rng = list[float](), list[float](), random.Random(1)

    def train(swarm: Swarm) -> None:
        settings = {"target_batch_size": 1500, "local_steps": 4, "compression": "sparseloco"}
        optimizer = join_training(swarm, net := model(), **settings)
        while True:
            loss_of(net, optimizer.global_step % 8).backward()
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
        states = [path for path in sim.bucket.objects if "/states/" in path]

    assert len(alive) - to_come > 24 and gaps > 5
    assert losses[-1] < losses[0]
    assert len(states) == 2 and sum("/states/" in path for path, _ in log) >= 3
    written = set[tuple[PeerId, int]]()
    listed = list[tuple[PeerId, int]]()
    round = 0
    base = b""
    for path, data in log:
        place = PLACE.search(path)
        if place is None:
            continue
        if place[2]:
            written.add((PeerId(bytes.fromhex(place[2])), int(place[1])))
            continue
        manifest = unseal(data, RoundManifest)[0]
        assert manifest.round == round and manifest.base == (base or manifest.base)
        listed += [(entry.member, entry.round) for entry in manifest.entries]
        round += 1
        base = content_digest(data)
    assert round > 40 and len({member for member, _ in listed}) > 20
    assert len(listed) == len(set(listed)) and set(listed) <= written
    assert all(lost_round >= round - LATEST for _, lost_round in written - set(listed))
