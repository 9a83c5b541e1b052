"""The doctor as a user meets it: without a swarm, with one, and with an invitation."""

import copy
import ipaddress
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import colab_swarm as cs
from colab_swarm.cli.__main__ import main
from colab_swarm.notebook import platforms
from colab_swarm.runtime import free_ram_bytes
from colab_swarm.swarm import calibration, network
from colab_swarm.swarm import doctor as module
from colab_swarm.swarm.calibration import calibrate, calibrate_step
from colab_swarm.swarm.doctor import RED, Diagnosis, Gpus, doctor
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training import toy


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(x).square().mean())


BATCHES = itertools.repeat({"x": torch.ones(4, 8)})


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "internet", lambda: False)


@pytest.fixture
def swarm() -> Iterator[cs.Swarm]:
    with cs.create("examined", peer_name="alice") as swarm:
        yield swarm


def texts(diagnosis: Diagnosis) -> dict[str, str]:
    return {check.name: check.text for check in diagnosis.checks}


def test_without_a_swarm_the_machine_is_examined() -> None:
    found = doctor()
    assert set(texts(found)) >= {"platform", "internet", "versions", "compute", "reachability"}
    assert "swarm" not in texts(found)
    bundle = found._repr_mimebundle_()
    assert bundle["text/plain"] == str(found) and bundle["text/html"].startswith("<div")
    assert repr(found).startswith("Diagnosis(") and "\n" not in repr(found)


@pytest.mark.parametrize(
    ("ips", "here", "text"),
    [
        (["192.168.1.5", "203.0.113.7"], platforms.PLAIN, "others reach 203.0.113.7, unless"),
        (["127.0.0.1", "192.168.1.5", "fe80::1"], platforms.PLAIN, "no public address: "),
        (["203.0.113.7"], platforms.COLAB, "no public address: "),
    ],
)
def test_the_doctor_says_unasked_whether_others_reach_the_machine(
    ips: list[str], here: platforms.Platform, text: str
) -> None:
    check = module.check_addresses(here, map(ipaddress.ip_address, ips))
    assert check.text.startswith(text) and "cs.doctor('swarm://…')" in check.fix


@pytest.mark.slow
def test_a_size_shows_the_memory_it_needs() -> None:
    assert "of ALBERT-tiny at 64 tokens: " in texts(doctor(model="tiny"))["compute"]


@pytest.mark.slow
def test_an_invitation_is_joined_and_a_model_measured_for_the_examination(swarm: cs.Swarm) -> None:
    found = texts(doctor(swarm.invite(), model=Net(), batches=BATCHES))
    assert found["swarm"] == "examined: 1 peer connected, none training"
    assert "clock" in found and "bandwidth" in found
    assert "of Net: " in found["compute"] and found["compute"].endswith("samples/s")
    assert "alice" in repr(swarm) and "left" not in repr(swarm)


def test_an_invitation_that_cannot_be_used_is_a_red_light_and_the_command_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = doctor("swarm://mistyped#AAAA")
    (red,) = [check for check in found.checks if check.light is RED]
    assert (red.name, red.fix) == ("swarm", "fix that, join, and run cs.doctor(cs.join(…))")
    assert "mistyped" in red.text and not found.ready
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "swarm://mistyped#AAAA"])
    assert "✖ swarm" in capsys.readouterr().out


def test_a_model_is_not_tried_on_a_gpu_that_torch_was_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unusable(Net):
        def forward(self, x: Tensor) -> SimpleNamespace:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    p100 = Gpus("Tesla P100", 1, 10**9, 10**9, (6, 0), ["sm_75"], bfloat16=False)
    monkeypatch.setattr(module, "gpus_here", lambda: p100)
    found = doctor(model=Unusable(), batches=BATCHES)
    assert "not for Tesla P100" in texts(found)["GPU"] and not found.ready


def test_a_model_without_data_or_an_unknown_size_is_refused() -> None:
    wrong: dict[str, dict[str, Any]] = {"batches": {"model": Net()}, "tiny": {"model": "huge"}}
    for said, options in wrong.items():
        with pytest.raises(ValueError, match=said):
            doctor(**options)


def test_free_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    assert free_ram_bytes(tmp_path / "nothing", tmp_path) is None
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert free_ram_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.current").write_text("1024000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_ram_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("2048000\n")
    assert free_ram_bytes(meminfo, tmp_path) == 1024000


@pytest.mark.parametrize("up", [0, 1, None])
def test_one_answering_host_means_internet(up: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(host: tuple[str, int], timeout_s: float) -> socket.socket:
        if up is None or host != network.HOSTS[up]:
            raise OSError("no route")
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(network, "CONNECT_TIMEOUT_S", 0.2)
    assert network.internet() is (up is not None)


def test_the_probes_work_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from colab_swarm.swarm import doctor; doctor.gpus_here()"
    subprocess.run([sys.executable, "-c", code], check=True)


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)
        noise = torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.5)
        self.layer = torch.nn.Sequential(self.first, *noise, self.last)


@pytest.mark.parametrize("training", [False, True])
def test_a_calibrated_model_is_unchanged(training: bool) -> None:
    net = Noisy().train(training)
    net.layer[1].eval()  # batch statistics that the user has frozen
    net.first.weight.grad = torch.full_like(net.first.weight, 7.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    chance = torch.get_rng_state()
    found = calibrate(net, BATCHES, seconds=0.01)
    assert found.samples_per_s > 0
    assert found.parameters == sum(parameter.numel() for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(net.first.weight.grad, torch.full_like(net.first.weight, 7.0))
    assert net.last.weight.grad is None
    assert net.training is net.layer[3].training is training and not net.layer[1].training
    assert torch.equal(torch.get_rng_state(), chance)


def test_saved_bytes_do_not_include_the_parameters() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=(x * self.scale).square().sum())

    found = calibrate(Scale(), itertools.repeat({"x": torch.ones(3, 1000)}), seconds=0.01)
    # x for the gradient of the scale, the product for that of its square
    assert found.sample_bytes == 2 * 4 * 1000


def test_too_few_batches_raise() -> None:
    with pytest.raises(ValueError, match="ran out"):
        calibrate(Noisy(), itertools.islice(BATCHES, 2), seconds=0.01)


def backward(net: Noisy) -> None:
    net(torch.rand(4, 8)).loss.backward()


def adamw(net: Noisy) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3), amsgrad=True)


def sgd(net: Noisy) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def frozen(value: Any) -> Any:
    """A copy that is equal to another one bit for bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.shape, value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    return [frozen(one) for one in value] if isinstance(value, list | tuple) else copy.deepcopy(value)


def state_of(optimizer: SwarmOptimizer, net: Noisy) -> Any:
    """All that a measurement could change."""
    gathered = optimizer._gathered
    total = gathered._sum
    if total is not None and total.factor is None:
        # Its memory holds anything.
        total = None
    inner = optimizer.rule.optimizer
    state = {
        "model": net.state_dict(),
        "modes": [module.training for module in net.modules()],
        "versions": [parameter._version for parameter in net.parameters()],
        "gradients": [parameter.grad for parameter in net.parameters()],
        "optimizer": inner.state_dict(),
        "places": [parameter.data_ptr() for group in inner.param_groups for parameter in group["params"]],
        "counts": (gathered.samples, gathered.weight, gathered.loss.value, gathered._unused),
        "sum": total and (total.factor, total.values.segments),
        "swarm": optimizer.hooks.checkpoint.state(),
        "step": (optimizer.global_step, optimizer.lineage, optimizer._replica.digests.changed),
        "turns": list(optimizer.times.turns),
        "chance": torch.get_rng_state(),
    }
    return frozen(state)


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": True}, {"local_steps": 3}, {"local_steps": 3, "overlap": True}]
)
@pytest.mark.parametrize("make", [cs.recipes.muon, adamw, sgd])
@pytest.mark.parametrize("steps", [1, 7])
def test_a_measured_step_changes_nothing(
    make: Any, settings: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_CALIBRATION_S", 0.001)
    calls: list[str] = []

    def train(swarm: cs.Swarm) -> None:
        torch.manual_seed(1)
        net = Noisy()
        inner = make(net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        inner.register_step_pre_hook(lambda *_: calls.append("hook"))
        optimizer = swarm.optimizer(
            inner, target_batch_size=8, model=net, scheduler=schedule, **toy.exchanged(settings)
        )
        for _ in range(steps):
            backward(net)
            optimizer.step(samples=4, loss=1.0)
        # a gradient that is not counted yet
        backward(net)
        before, hooks = state_of(optimizer, net), len(calls)
        assert calibrate_step(optimizer, lambda: backward(net)) > 0
        assert state_of(optimizer, net) == before and len(calls) == hooks
        # and the next step is what it would have been
        optimizer.step(samples=4, loss=1.0)

    toy.alone(train)


@pytest.mark.parametrize(("local_steps", "alone_s"), [(1, 0.25), (2, 0.25 + 0.25)])
def test_the_optimizers_step_counts_where_each_peer_takes_it(
    local_steps: int, alone_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(work: Any, seconds: float, min_passes: int) -> float:
        work()
        return 4.0

    def train(swarm: cs.Swarm) -> float:
        net = Noisy()
        way = cs.Communication(local_steps=local_steps)
        optimizer = swarm.optimizer(adamw(net), target_batch_size=8, model=net, communication=way)
        monkeypatch.setattr(calibration, "_measure", measure)
        return calibrate_step(optimizer, lambda: backward(net))

    assert toy.alone(train) == alone_s


@pytest.mark.parametrize("does", ["nothing", "a step", "a step after backward()", "all, without its model"])
def test_a_measured_step_without_a_gradient_or_its_model_is_refused(does: str) -> None:
    def train(swarm: cs.Swarm) -> None:
        net = Noisy()
        has_model = does != "all, without its model"
        said = "left no gradient: end it with" if has_model else r"pass model=… to swarm.optimizer"
        optimizer = swarm.optimizer(adamw(net), target_batch_size=8, model=net if has_model else None)

        def compute() -> None:
            if does.endswith("backward()"):
                backward(net)
                optimizer.step(samples=1)
            elif does == "a step":
                backward(net)
                optimizer.zero_grad()

        with pytest.raises(ValueError, match=said):
            calibrate_step(optimizer, compute)

    toy.alone(train)


def test_a_step_is_compared_only_with_a_loop_that_trains_in_real_time(swarm: cs.Swarm) -> None:
    net = Noisy()

    def refused(where: cs.Swarm | str | None) -> None:
        with pytest.raises(ValueError, match=r"train first, then cs.doctor\(swarm, step=…\)"):
            doctor(where, step=lambda: backward(net))

    refused(None)
    refused(swarm)
    optimizer = swarm.optimizer(adamw(net), target_batch_size=4, model=net)
    refused(swarm)
    backward(net)
    optimizer.step(samples=4)
    # one call has no turn before it
    refused(swarm)

    def train(simulated: cs.Swarm) -> None:
        twin = Noisy()
        optimizer = simulated.optimizer(adamw(twin), target_batch_size=4, model=twin)
        for _ in range(3):
            backward(twin)
            optimizer.step(samples=4)
        refused(simulated)

    toy.alone(train)


@pytest.mark.slow
def test_the_doctor_compares_a_step_with_the_loop(swarm: cs.Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_CALIBRATION_S", 0.01)
    net = Noisy()
    optimizer = swarm.optimizer(adamw(net), target_batch_size=12, model=net)
    for _ in range(7):
        backward(net)
        optimizer.step(samples=4)
    assert 0.0 < swarm.snapshot().computing < 1.0
    found = texts(doctor(swarm, step=lambda: backward(net)))
    assert found["vectors"] == "the swarm's vectors lie in main memory"
    assert found["step"].startswith("a step here takes ")
    assert found["rounds"].startswith("a round takes ") and found["rounds"].endswith(
        "copies 0 B to and from devices"
    )
