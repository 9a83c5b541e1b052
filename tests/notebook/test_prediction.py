"""What the doctor predicts is what then happens: on a simulated network, and with two real peers as in the demo."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import StepFinished
from colab_swarm.net.carrier import Speed
from colab_swarm.recipes.batches import MixedBatches
from colab_swarm.sim import HostProfile, NetworkProfile
from colab_swarm.swarm.doctor import UNKNOWN, Prediction, Subject, doctor, predict

TARGET = 96
STEPS = 20
NEAR = 0.3
STEADY = 0.2
ATTEMPTS = 4


def simulated_step_s(peers: int, subject: Subject, target: int, line: Speed) -> float:
    """Seconds of a step of peers that compute 10 samples/s each, start-up left out."""
    profile = NetworkProfile("test", line.rtt_s / 2, hosts=(HostProfile(line.upload_bps, line.download_bps),))

    def train(swarm: cs.Swarm) -> list[float]:
        weights = torch.nn.Parameter(torch.zeros(subject.parameters))
        optimizer = swarm.optimizer(torch.optim.SGD([weights], lr=0.1), target_batch_size=target)
        while optimizer.global_step < 12:
            weights.sum().backward()
            optimizer.step(samples=subject.micro_batch)
        return [event.at for event in swarm.events.recent(StepFinished) if isinstance(event, StepFinished)]

    with cs.simulate(peers, network=profile, seed=1, samples_per_s=10.0) as simulation:
        ends = simulation.run(train)["alice"]
    return (ends[-1] - ends[3]) / (len(ends) - 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peers", "parameters", "line"),
    [
        (1, 1_000, UNKNOWN),
        (2, 1_000, replace(UNKNOWN, rtt_s=0.1)),
        (4, 1_000, replace(UNKNOWN, rtt_s=0.1)),
        (2, 250_000, Speed(8e6, 8e6, 0.002)),
        (4, 250_000, Speed(8e6, 8e6, 0.1)),
        (4, 100_000, Speed(2e6, 20e6, 0.06)),
    ],
)
def test_a_simulated_step_takes_as_long_as_predicted(peers: int, parameters: int, line: Speed) -> None:
    subject, target = Subject("model", parameters, 1.0, micro_batch=8, samples_per_s=10.0), 48 * peers
    predicted = predict(subject, target, 4 * parameters, (10.0,) * (peers - 1), line)
    assert predicted.step_s == pytest.approx(simulated_step_s(peers, subject, target, line), rel=NEAR)


@contextmanager
def bob_trains(invite: str) -> Iterator[IO[str]]:
    command = [sys.executable, "-m", "colab_swarm.cli", "peer", invite, "--json-lines", "--peer-name", "bob"]
    command += ["--target-batch-size", str(TARGET), "--compression", "float16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    bob = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert bob.stdout is not None
    try:
        yield bob.stdout
    finally:
        bob.kill()
        bob.wait()
        bob.stdout.close()


def trial() -> tuple[bool, bool]:
    """Alice asks while bob trains, trains with him, and asks again: was the prediction near, and the machine steady?"""
    with cs.create("prediction", peer_name="alice") as swarm, bob_trains(swarm.invite()) as output:
        steps = (line for line in output if json.loads(line)["event"] == "step")
        assert len(list(itertools.islice(steps, 5))) == 5  # his speed has settled
        model, batches = cs.recipes.albert("tiny", text="python-docs", swarm=swarm)

        def ask() -> Prediction:
            settings = {"target_batch_size": TARGET, "compression": "float16"}
            found = doctor(swarm, model=model, batches=batches, **settings)
            assert found.prediction is not None
            return found.prediction

        before, happened, after = ask(), train(swarm, model, batches), ask()
        print(before, happened, after)
        near = (before.step_s, before.samples_per_s) == pytest.approx(happened, rel=NEAR)
        return near, after.samples_per_s == pytest.approx(before.samples_per_s, rel=STEADY)


def train(swarm: cs.Swarm, model: torch.nn.Module, batches: MixedBatches) -> tuple[float, float]:
    lamb = cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2)
    optimizer = swarm.optimizer(lamb, target_batch_size=TARGET, compression="float16")
    ends: list[float] = []
    speeds: list[float] = []
    for batch in batches:
        model(**batch).loss.backward()
        if optimizer.step(samples=len(batch["input_ids"])) is not None:
            ends.append(time.monotonic())
            speeds.append(optimizer.collaboration.progress.own.samples_per_s)
        if len(ends) == STEPS:
            break
    optimizer.close()
    return (ends[-1] - ends[4]) / (STEPS - 5), sum(speeds[5:]) / (STEPS - 5)


@pytest.mark.slow
@pytest.mark.ordeal
def test_two_peers_train_as_fast_as_the_doctor_predicted() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a core for each of the two
    trials = []
    try:
        while not any(near for near, _ in trials) and len(trials) < ATTEMPTS:
            trials.append(trial())
    finally:
        torch.set_num_threads(threads)
    if not any(near or steady for near, steady in trials):
        pytest.skip("other work on this machine slows training down and lets go of it again")
    assert any(near for near, _ in trials), trials
