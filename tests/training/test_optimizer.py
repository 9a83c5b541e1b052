"""`SwarmOptimizer` in simulated swarms: the same parameters as one process, whatever happens to single peers."""

import asyncio
import inspect
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic.steps import ElasticSettings
from colab_swarm.errors import StateError
from colab_swarm.events import Fault, RoundFinished, StepFinished
from colab_swarm.sim import SimPeers
from colab_swarm.sim.profiles import PROFILES, HostProfile
from colab_swarm.swarm.elastic import SwarmElastic
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.statedict import write_state
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import TrainingSettings
from colab_swarm.training.state import load_checkpoint
from tests.training import toy


def simulation(peers: int = 4, network: str = "lan") -> Simulation:
    return cs.simulate(peers, network=network, seed=1, samples_per_s=10.0)


@pytest.mark.slow
def test_unequal_batches_of_four_peers_equal_one_process_with_the_joined_batch() -> None:
    with simulation(4, "home") as sim:
        results = sim.run(lambda swarm: toy.train_own_rows(swarm, 20))
    assert len(results) == 4 and len(toy.lineages(results)) == 1
    for parameters, _ in results.values():
        torch.testing.assert_close(parameters, toy.joint_reference(20), rtol=0, atol=1e-5)


def test_a_peer_alone_trains_like_plain_torch() -> None:
    with simulation(1) as sim:
        results = sim.run(lambda swarm: toy.train_freely(swarm, 5, samples=10))
        steps = sim.swarms["alice"].events.recent(StepFinished)
    assert [(step.step, step.samples) for step in steps] == [(number, 10.0) for number in range(1, 6)]
    assert steps[0].loss == pytest.approx(toy.loss_of(toy.model(), 0).item())
    torch.testing.assert_close(results["alice"][0], toy.joint_reference(5))


@pytest.mark.parametrize("samples", [0, -1, float("nan"), float("inf"), "16", 10**9])
def test_a_senseless_number_of_samples_raises_at_once(samples: object) -> None:
    def train(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, toy.model())
        with pytest.raises(ValueError, match=r"pass the size of the batch|over 100 times target_batch_size"):
            optimizer.step(samples=samples)  # type: ignore[arg-type]

    toy.alone(train)


@pytest.mark.parametrize(
    "settings", [{"target_batch_size": 0}, {"target_batch_size": None}, {"compression": "float12"}]
)
def test_senseless_settings_raise_at_once(settings: dict[str, object]) -> None:
    with simulation(1) as sim, pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        sim.run(lambda swarm: toy.join_training(swarm, toy.model(), **settings))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Swarm.optimizer, TrainingSettings),
        (SwarmElastic.optimizer, ElasticSettings),
    ],
)
def test_docstrings_list_the_options(method: Callable[..., object], settings: type) -> None:
    """The method's own names the settings, and theirs every option."""
    assert f"see `{settings.__name__}`" in method.__doc__
    options = {one.name for one in fields(settings)} - {"prefix", "peers", "target_batch_size"}
    assert len(options) >= 4
    assert not [name for name in options if f"\n        {name}: " not in settings.__doc__]


def test_the_signature_spells_the_options_out() -> None:
    options = {one.name: one.default for one in fields(TrainingSettings)}
    del options["prefix"]
    parameters = inspect.signature(Swarm.optimizer).parameters
    assert options.keys() <= parameters.keys() and "options" not in parameters
    del options["target_batch_size"], options["communication"]
    assert parameters["communication"].default == "synchronous"
    assert all(parameters[name].default == default for name, default in options.items())


def test_clipping_comes_after_averaging_and_the_scheduler_counts_global_steps() -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
        optimizer = swarm.optimizer(inner, target_batch_size=10, scheduler=scheduler, max_grad_norm=0.1)
        toy.train_rows(optimizer, net, slice(0, 3) if swarm.name == "alice" else slice(3, 10), 4)
        return toy.parameters_of(net)

    net = toy.model()
    for step in range(4):
        net.zero_grad()
        toy.loss_of(net, step).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= parameter.grad / (1 + step)
    with simulation(2) as sim:
        for parameters in sim.run(train).values():
            torch.testing.assert_close(parameters, toy.parameters_of(net), rtol=0, atol=1e-6)


def test_peers_that_begin_with_different_parameters_agree_on_one() -> None:
    def train(swarm: Swarm) -> bytes:
        optimizer = toy.join_training(swarm, net := toy.model(seed=len(swarm.name)))
        toy.train_to(3, optimizer, net, slice(0, 2))
        return optimizer.lineage

    with simulation(3) as sim:
        assert len(set(sim.run(train).values())) == 1


@pytest.mark.parametrize(("skew_s", "begin_s"), [(3600.0, 0.0), (-3600.0, 20.0)])
def test_a_clock_that_is_set_an_hour_off_costs_no_steps_and_is_no_fault(
    skew_s: float, begin_s: float
) -> None:
    def train(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=12)
        while True:
            toy.take(optimizer, net, optimizer.global_step, slice(0, 2))

    with cs.simulate(3, network="lan", samples_per_s=3.0) as sim:
        sim.network.at(begin_s).skew("bob", skew_s)
        sim.run(train, seconds=45.0)
        bob = sim.swarms["bob"].services.peers
        assert len(sim.network.fired) == 1 and isinstance(bob, SimPeers)
        assert bob.clock.behind_s == pytest.approx(-skew_s, abs=1.0)
        for swarm in sim.swarms.values():
            assert not swarm.events.recent(Fault)
            assert len(swarm.events.recent(StepFinished)) >= 25  # of 34 that the samples are enough for


def test_many_peers_that_only_dial_out_stay_with_the_one_that_listens() -> None:
    with cs.simulate(1, network="home", seed=1) as sim:
        for name in ("bob", "carol", "dave", "erin"):
            sim.join(name, listen=False)
        results = sim.run(lambda swarm: toy.train_freely(swarm, 8))
    assert len(results) == 5 and len(toy.lineages(results)) == 1


def test_a_state_that_cannot_be_loaded_raises_and_the_peer_catches_up_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, refused = Replica.load_snapshot, []

    def thrice_bad(self: Replica, snapshot: Snapshot) -> None:
        refused.append(snapshot)
        if len(refused) <= 3:  # the first of these states may be a bad donor's
            raise StateError("nonsense")
        load(self, snapshot)

    def train(swarm: Swarm) -> tuple[torch.Tensor, bytes]:
        if swarm.name == "bob":
            with pytest.raises(StateError, match="nonsense"):
                toy.join_training(swarm, toy.model())
        return toy.train_freely(swarm, 12)

    monkeypatch.setattr(Replica, "load_snapshot", thrice_bad)
    with simulation(1) as sim:
        sim.join("bob", at=2.0)
        results = sim.run(train)
    assert len(refused) > 3 and len(toy.lineages(results)) == 1


def test_an_update_waits_until_a_save_by_another_thread_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow_write(path: Path, parts: Sequence[memoryview]) -> None:
        writing.set()
        assert go_on.wait(10)
        write_state(path, parts)

    def train(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, net := toy.model())
        saver = threading.Thread(target=optimizer.save, args=(tmp_path / "saved",))
        saver.start()
        assert writing.wait(10)
        toy.loss_of(net, 0).backward()
        threading.Timer(0.1, go_on.set).start()
        optimizer.step(samples=10)
        saver.join()
        assert load_checkpoint(tmp_path / "saved")["step"] == 0 and optimizer.global_step == 1

    monkeypatch.setattr("colab_swarm.training.saving.write_state", slow_write)
    toy.alone(train)


def test_a_trainer_waits_for_a_step_until_its_time_is_over() -> None:
    def train(swarm: Swarm) -> float:
        optimizer = toy.join_training(swarm, net := toy.model())
        toy.take(optimizer, net, 0, slice(0, 4))
        began = swarm.runtime.time()
        assert optimizer.wait_step(timeout_s=25.0) is None
        toy.join_training(swarm, toy.model(), name="other").close(hand_over_s=60.0)  # it has no samples
        return swarm.runtime.time() - began

    assert toy.alone(train) == pytest.approx(25.0)


def test_after_leaving_every_call_says_so() -> None:
    with simulation(1) as sim:
        swarm = sim.swarms["alice"]
        optimizer = toy.join_training(swarm, toy.model())
        swarm.leave()
        swarm.leave()
        with pytest.raises(RuntimeError, match="has left its swarm"):
            optimizer.step(samples=1)
        with pytest.raises(RuntimeError, match="has left its swarm"):
            toy.join_training(swarm, toy.model())


def test_a_record_has_the_peers_present_addresses() -> None:
    def train(swarm: Swarm) -> list[tuple[str, ...]]:
        optimizer, published = toy.join_training(swarm, net := toy.model()), []
        for listen in (True, False, True):
            sim.network.by_name[swarm.name].addresses = ("ws://alice:1",) if listen else ()
            toy.take(optimizer, net, optimizer.global_step)
            swarm.runtime.call(asyncio.sleep(5.0))
            published.append(optimizer.rounds.view.own.addresses)
        return published

    with simulation(1) as sim:
        there = ("ws://alice:1",)
        assert sim.run(train)["alice"] == [there, (), there]


def test_a_record_is_published_again_after_an_error_that_is_no_peers() -> None:
    broken = [ValueError("this loss cannot be read")]

    def train(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, toy.model())
        rounds = optimizer.rounds

        def loss() -> float | None:
            if broken:
                raise broken.pop()
            return 7.0

        rounds.model = replace(rounds.model, loss=loss)
        while optimizer.loss != 7.0:
            swarm.runtime.call(asyncio.sleep(1.0))
        [fault] = swarm.events.recent(Fault)
        assert (fault.where, fault.text) == ("progress", "ValueError: this loss cannot be read")

    with simulation(1) as sim:
        sim.run(train, seconds=600.0)
    assert not broken


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_a_leaving_trainer_hands_over_its_samples(delayed: bool) -> None:
    def train(swarm: Swarm) -> float:
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=40, overlap=delayed)
        toy.wait_for_peers(swarm, optimizer, 3)
        if swarm.name == "carol":
            for _ in range(3):
                toy.loss_of(net, 0).backward()
                optimizer.step(samples=2)
            swarm.leave(hand_over_s=60.0)
            return optimizer.global_step
        while optimizer.global_step < 4:
            toy.loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=2)
        return optimizer.global_step

    with simulation(3, "home") as sim:
        assert sim.run(train) == {"alice": 4, "bob": 4, "carol": 1}
        first = sim.swarms["alice"].events.recent(RoundFinished)[0]
    assert isinstance(first, RoundFinished) and len(first.contributors) == 3


@pytest.mark.parametrize(
    ("batches", "network"), [((16, 16, 16, 16), "lan"), ((4, 8, 16, 32), "home"), ((8, 64), "lan")]
)
def test_a_step_has_the_samples_that_it_should(batches: tuple[int, ...], network: str) -> None:
    target = 256

    def train(swarm: Swarm) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = swarm.optimizer(torch.optim.SGD([weight], lr=0.1), target_batch_size=target)
        samples = batches[sorted(simulation.swarms).index(swarm.name)]
        while optimizer.global_step < 10:
            weight.grad = torch.ones(4)
            optimizer.step(samples=samples)
        return [step.samples for step in swarm.events.recent(StepFinished)]

    with cs.simulate(len(batches), network=network, seed=0, samples_per_s=16.0) as simulation:
        # In the first steps the peers learn each other's speed.
        steps = simulation.run(train)["alice"][2:]
    assert abs(statistics.mean(steps) / target - 1) < 0.02
    assert min(steps) >= 0.98 * target


@pytest.mark.slow
def test_a_round_over_slow_lines_is_not_called_too_early() -> None:
    """The fast peers have the means seconds before the slow ones, and could nearly fill the batch alone."""
    mbit_s = (12, 6, 6, 3, 12, 6, 6, 3)
    lines = tuple(HostProfile(1e6 * rate, 1e6 * rate) for rate in mbit_s)
    target = 64 * len(lines)

    def train(swarm: Swarm) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1_000_000))
        sgd = torch.optim.SGD([weight], lr=0.1)
        optimizer = swarm.optimizer(sgd, target_batch_size=target, communication="float16")
        while optimizer.global_step < 4:
            weight.grad = torch.ones_like(weight)
            optimizer.step(samples=8)
        return [step.samples for step in swarm.events.recent(StepFinished)]

    network = replace(PROFILES["home"], name="slow", hosts=lines)
    with cs.simulate(len(lines), network=network, seed=0, samples_per_s=16.0) as simulation:
        steps = simulation.run(train)["alice"]
        rounds = simulation.swarms["alice"].events.recent(RoundFinished)
    assert min(one.averaging_s for one in rounds) > 64 / 16
    assert len(steps) == 4 and min(steps) >= 0.98 * target
