"""Gradients stay where the model is: on torch's meta device, which has no values to copy, and on one that counts.

The CPU plays the counting device: its tensors pass for those of a device, and all that is copied out or in is counted.
"""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import BatchDropped
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors import device
from colab_swarm.tensors.device import Flag, copied
from colab_swarm.tensors.device_vector import DeviceFeedback, DeviceVector
from colab_swarm.training import flat, placement
from colab_swarm.training import replica as replicas
from colab_swarm.training.flat import FlatValues, GradientSum, move_state
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.host import RankSum
from colab_swarm.training.layerwise import Lamb, Lars
from colab_swarm.training.placement import Placement
from colab_swarm.training.records import Mean
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.rounds import RoundOutcome
from colab_swarm.training.settings import RoundInput
from tests.training import toy


@pytest.fixture
def meta_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flag, "read", lambda flag: True)


def moved_to_meta(net: torch.nn.Module) -> None:
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.empty_like(parameter, device="meta")))


def backward(net: torch.nn.Module) -> None:
    net(torch.empty(4, 8, device="meta")).square().mean().backward()


@pytest.mark.usefixtures("meta_flags")
@pytest.mark.parametrize("make", [torch.optim.AdamW, Lamb, Lars])
@pytest.mark.parametrize("scale", [None, torch.empty((), device="meta")])
def test_sums_and_local_steps_copy_nothing(make: Any, scale: torch.Tensor | None) -> None:
    net = toy.model()
    rule = UpdateRule(make(net.parameters(), lr=0.1), local=True, max_grad_norm=1.0)
    gathered = Gradients(Replica(rule), lambda vector: False)
    moved_to_meta(net)
    before = copied.out_bytes, copied.in_bytes
    for _ in range(3):
        for _ in range(2):
            backward(net)
            gathered.add(4.0, 4.0, torch.empty((), device="meta"), scale=scale)
        gathered.read_checks()
        gathered.step()
    assert (copied.out_bytes, copied.in_bytes) == before
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(parameter.device.type == "meta" for parameter in net.parameters())


@pytest.mark.usefixtures("meta_flags")
@pytest.mark.parametrize(
    ("loss", "scale"), [(0.5, None), (torch.empty((), device="meta"), torch.empty((), device="meta"))]
)
def test_a_rank_of_a_host_copies_nothing(loss: float | torch.Tensor, scale: torch.Tensor | None) -> None:
    net = toy.model()
    moved_to_meta(net)
    ranks = RankSum(list(net.parameters()), rank=1)
    for _ in range(3):
        backward(net)
        ranks.gather(4.0, 4.0, loss, scale)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(values.device.type == "meta" for values in ranks.tensors)
    # Only rank 0 reads.
    with pytest.raises(NotImplementedError, match="meta"):
        ranks.to_gradients()


@pytest.fixture
def counting_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "_MAIN_MEMORY", ())
    monkeypatch.setattr(device, "copied", device.Copied())
    yield


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize("nan_at", [None, 0, 1, 2])
def test_a_sum_on_a_device_leaves_out_what_is_not_finite(nan_at: int | None) -> None:
    net = toy.model()
    gathered = Gradients(Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1))), lambda vector: False)
    total = torch.zeros(gathered._replica.numel)
    for index in range(3):
        toy.loss_of(net, index).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad[0] = torch.nan if index == nan_at else parameter.grad[0]
        if index != nan_at:
            total += (index + 1.0) * torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
        gathered.add(10.0, index + 1.0, None)
        # The newest is not read yet.
        assert gathered.dropped == 10.0 * (nan_at is not None and nan_at < index)
        assert device.copied.out_bytes == 0
    gathered.read_checks()
    contribution = gathered.contribution()
    counted = 3 - (nan_at is not None)
    assert (gathered.dropped, contribution.samples) == (10.0 * (nan_at is not None), 10.0 * counted)
    assert contribution.weight == 6.0 - (0 if nan_at is None else nan_at + 1.0)
    torch.testing.assert_close(
        torch.from_numpy(contribution.vector.read(0, len(total))) * contribution.weight, total
    )


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize("nan_at", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("scale", [None, 1024.0])
@torch.no_grad()
def test_ranks_sum_on_their_devices_and_only_the_counts_are_read(
    nan_at: tuple[int, ...], scale: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    nets = [toy.model(), toy.model()]
    ranks = [RankSum(list(net.parameters()), rank) for rank, net in enumerate(nets)]
    expected = torch.zeros(len(toy.parameters_of(nets[0])))
    for rank, net in enumerate(nets):
        with torch.enable_grad():
            loss = toy.loss_of(net, rank)
            (loss * (scale or 1.0)).backward()
        # Neither rank uses the last bias.
        net[2].bias.grad = None
        if rank in nan_at:
            net[0].weight.grad[0, 0] = torch.nan
        else:
            gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
            expected[:-2] += (rank + 1.0) * torch.cat(gradients) / (scale or 1.0)
        ranks[rank].gather(10.0, rank + 1.0, loss, None if scale is None else torch.tensor(scale))
    for total, values in zip(ranks[0].tensors, ranks[1].tensors, strict=True):
        total.add_(values)
    assert device.copied.out_bytes == 0 and not caplog.records
    samples, weight, mean_loss = ranks[0].to_gradients()
    assert device.copied.out_bytes == 4 * (5 + 4) and device.copied.in_bytes == 0
    finite = {0, 1} - set(nan_at)
    assert (samples, weight) == (10.0 * (len(finite) or 2), sum(rank + 1.0 for rank in finite))
    if finite:
        losses = [(rank + 1.0) * toy.loss_of(nets[rank], rank).item() for rank in finite]
        assert mean_loss == pytest.approx(sum(losses) / weight)
        assert nets[0][2].bias.grad is None
        means = torch.cat([p.grad.flatten() for p in nets[0].parameters() if p.grad is not None])
        torch.testing.assert_close(means, expected[:-2] / weight)
    else:
        assert mean_loss is not None and all(p.grad.isnan().all() for p in nets[0].parameters())
    for rank_sum in ranks:
        rank_sum.read_check()
    assert [record.args for record in caplog.records] == [(rank, 10.0) for rank in nan_at]


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": 0.5, "compression": "onebit", "error_feedback": True},
        {"overlap": True, "compression": "int8", "error_feedback": True},
        {"local_steps": 2, "overlap": True},
        {"device_memory": 0},
        {"device_memory": 800, "compression": "int8", "error_feedback": True},
        {"mailbox": True, "local_steps": 2, "compression": "topk:0.5"},
    ],
)
def test_peers_on_a_device_train_as_on_the_cpu(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(settings)
    mailbox = options.pop("mailbox", False)

    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, **options)
        toy.train_to(8, optimizer, net, toy.ROWS[swarm.name])
        return toy.parameters_of(net)

    def run() -> dict[str, torch.Tensor]:
        with cs.simulate(2, network="lan", seed=3, samples_per_s=20.0, mailbox=mailbox) as sim:
            return dict(sim.run(train))

    on_device = run()
    rounds_bytes = device.copied.out_bytes, device.copied.in_bytes
    assert rounds_bytes[0] > 0
    assert rounds_bytes[1] > 0 or "device_memory" in settings
    monkeypatch.setattr(device, "_MAIN_MEMORY", ("cpu",))
    for name, parameters in run().items():
        torch.testing.assert_close(on_device[name], parameters, rtol=1e-5, atol=1e-6)
    assert (device.copied.out_bytes, device.copied.in_bytes) == rounds_bytes


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize(
    "settings", [{}, {"compression": "int8", "error_feedback": True}, {"local_steps": 2}]
)
def test_a_sum_on_a_device_is_taken_back_if_no_round_took_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, **settings)
        rounds = optimizer.rounds
        contribute = rounds.contribute

        async def contribute_twice(contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
            failures.append(len(failures))
            if len(failures) % 2:
                return
            async for outcome in contribute(contribution):
                yield outcome

        failures: list[int] = []
        monkeypatch.setattr(rounds, "contribute", contribute_twice)
        while (step := optimizer.global_step) < 6:
            if optimizer._gathered.samples >= toy.BATCH * settings.get("local_steps", 1):
                optimizer.wait_step()
            else:
                toy.take(optimizer, net, step)
        assert len(failures) == 12
        return toy.parameters_of(net)

    on_device = toy.alone(train)
    monkeypatch.setattr(device, "_MAIN_MEMORY", ("cpu",))
    torch.testing.assert_close(on_device, toy.alone(train), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("counting_device")
def test_a_local_step_copies_nothing_and_a_round_only_what_a_member_reduces() -> None:
    def train(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, local_steps=5)
        numel_bytes = 4 * optimizer._replica.numel
        for index in range(30):
            toy.loss_of(net, index).backward()
            step = optimizer.global_step
            device.copied.out_bytes = device.copied.in_bytes = 0
            optimizer.step(samples=10)
            rounds = optimizer.global_step - step
            # Alone in the group it reduces all, in main memory.
            assert device.copied.out_bytes == rounds * numel_bytes
            assert device.copied.in_bytes == rounds * numel_bytes
        assert optimizer.global_step == 6

    toy.alone(train)


@pytest.mark.usefixtures("counting_device")
def test_a_round_copies_encoded_values_but_for_the_own_span() -> None:
    def train(swarm: Swarm) -> int:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, compression="int8", error_feedback=True)
        toy.train_to(8, optimizer, net, toy.ROWS[swarm.name])
        return optimizer._replica.numel

    with cs.simulate(2, network="lan", seed=3, samples_per_s=20.0) as sim:
        numel = sim.run(train)["alice"]
    # One byte a value and a scale, by two peers in eight rounds; and the residuals once, which begin in main memory.
    assert device.copied.in_bytes < 2 * 8 * 1.2 * numel + 2 * 4 * numel
    # The own half is reduced exactly.
    assert device.copied.out_bytes < 2 * 8 * (1 + 4) / 2 * 1.2 * numel


@pytest.mark.usefixtures("meta_flags")
@pytest.mark.parametrize(
    "rule", [{"local": True}, {"local": True, "sparse": True, "delayed": True}, {"delayed": True}]
)
def test_what_a_round_needs_lies_beside_the_model(rule: dict[str, Any]) -> None:
    net = toy.model()
    replica = Replica(UpdateRule(torch.optim.AdamW(net.parameters(), lr=0.1), **rule))
    gathered = Gradients(replica, lambda vector: False, error_feedback=True)
    moved_to_meta(net)
    for _ in range(2):
        backward(net)
        gathered.add(4.0, 4.0, None)
        given = gathered.contribution()
        assert isinstance(given.vector, DeviceVector)
        replica.depart()
        replica.apply(Mean(given.vector, b"digest"))
        gathered.on_delivered(given)
        replica.land()
        gathered.forget()
    kept = [*replica.parameters]
    for state in replica.stepping.state.values():
        kept.extend(value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
    assert isinstance(gathered.feedback, DeviceFeedback)
    kept.extend(gathered.feedback.body)
    assert {tensor.device.type for tensor in kept} == {"meta"}


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize(
    ("of", "method", "leaves", "settings"),
    [
        (Placement, "_sum_there", True, {"overlap": True}),
        (Placement, "_sum_there", True, {"local_steps": 2}),
        (DeviceFeedback, "begin", True, {}),
        (Replica, "place", True, {"local_steps": 2, "overlap": True}),
        (Replica, "_update", True, {}),
        (Replica, "_update", True, {"local_steps": 2, "overlap": True}),
        # One chunk takes another way.
        (DeviceVector, "_encoded_there", False, {"local_steps": 2}),
        (DeviceVector, "_take_there", False, {"overlap": True}),
    ],
)
def test_a_peer_goes_on_in_main_memory_when_its_devices_memory_ends(
    of: type, method: str, leaves: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(swarm: Swarm) -> bytes:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, compression="int8", error_feedback=True, **settings)
        while optimizer.global_step < 12:
            toy.take(optimizer, net, optimizer.global_step, toy.ROWS[swarm.name])
            if optimizer.global_step > 3:
                armed.append(True)
        places.append(optimizer._gathered.placement.where)
        return optimizer.lineage

    def ends_once(*values: Any, **options: Any) -> Any:
        if armed and not fired:
            fired.append(True)
            raise torch.OutOfMemoryError("the device's memory has ended")
        return works(*values, **options)

    armed: list[bool] = []
    fired: list[bool] = []
    places: list[str] = []
    works = getattr(of, method)
    monkeypatch.setattr(of, method, ends_once)
    with cs.simulate(2, network="lan", seed=3, samples_per_s=20.0) as sim:
        lineages = sim.run(train)
    assert fired
    assert lineages["alice"] == lineages["bob"]
    assert sorted(place.startswith("in main memory") for place in places) == [False, leaves]


@pytest.mark.usefixtures("meta_flags")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"amsgrad": True}])
def test_the_state_of_a_scalar_lies_where_the_scalar_does(options: dict[str, Any]) -> None:
    scalar = torch.nn.Parameter(torch.empty((), device="meta"))
    optimizer = torch.optim.AdamW([scalar], **options)
    for _ in range(2):
        scalar.grad = torch.empty((), device="meta")
        optimizer.step()
        move_state(optimizer)
    places = {name: value.device.type for name, value in optimizer.state[scalar].items()}
    assert places.pop("step") == "cpu"
    assert {*places.values()} == {"meta"}


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_sum_that_leaves_its_device_keeps_what_it_takes_back(
    error_feedback: bool, delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(place: Placement) -> FlatValues:
        raise torch.OutOfMemoryError("the device's memory has ended")

    weight = torch.nn.Parameter(torch.zeros(2))
    replica = Replica(UpdateRule(torch.optim.SGD([weight], lr=0.1), delayed=delayed))
    gathered = Gradients(replica, lambda vector: False, error_feedback=error_feedback, device_memory=8)
    weight.grad = torch.tensor([1.0, 2.0])
    gathered.add(1.0, 1.0, None)
    given = gathered.contribution()
    monkeypatch.setattr(Placement, "_sum_there", no_memory)
    if delayed:
        gathered.forget()
        gathered.on_returned(given)
    weight.grad = torch.tensor([5.0, 2.0])
    gathered.add(1.0, 1.0, None)
    assert gathered.contribution().vector.read(0, 2).tolist() == [3.0, 2.0]
    assert not gathered.placement.on_devices


@pytest.mark.parametrize("places", [("meta", "cpu"), ("cpu", "meta"), ("meta", "meta")])
def test_a_vector_taken_back_needs_no_memory_of_a_device(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ones(tensor.shape) if tensor.is_meta else tensor

    def copy_in(source: torch.Tensor, target: torch.Tensor) -> None:
        copies.append((source, target.device.type))

    copies: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(flat, "to_host", to_host)
    monkeypatch.setattr(flat, "copy_in", copy_in)
    values, addend = (FlatValues([torch.nn.Parameter(torch.ones(3, device=place))]) for place in places)
    for part in (*values.parts, *addend.parts):
        part.fill_(1.0)
    GradientSum(values, 2.0).add(addend, 4.0)
    sums = [(source.tolist(), place) for source, place in copies]
    assert sums == ([] if places[0] == places[1] else [([3.0, 3.0, 3.0], places[0])])


@pytest.mark.parametrize("rule", [{}, {"delayed": True}, {"local": True}, {"local": True, "delayed": True}])
def test_the_model_is_handed_over_after_its_last_change(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(tensors: list[torch.Tensor]) -> None:
        if tensors is replica.model:
            handed_over.append(toy.parameters_of(net))

    handed_over: list[torch.Tensor] = []
    monkeypatch.setattr(replicas, "hand_over", note)
    net = toy.model()
    replica = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1), **rule))
    replica.apply(toy.mean_of(torch.full((178,), 0.1).numpy()))
    replica.show()
    before = toy.parameters_of(toy.model())
    assert torch.equal(handed_over[-1], toy.parameters_of(net)) and not torch.equal(handed_over[-1], before)


def test_copies_leave_a_device_though_the_failed_step_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Viewing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            views = [parameter.view(-1) for parameter in self.param_groups[0]["params"]]
            raise torch.OutOfMemoryError(f"no memory for {len(views)} views")

    replica = Replica(UpdateRule(Viewing(toy.model().parameters(), lr=0.1), delayed=True))
    place = Placement(replica, lambda vector: False, error_feedback=False, limit_bytes=None)
    monkeypatch.setattr(replicas, "moved", lambda tensor, device: torch.empty_like(tensor, device="meta"))
    left = False
    try:
        replica.apply(toy.mean_of(torch.zeros(178).numpy()))
    except torch.OutOfMemoryError as error:
        left = place.leave_devices(error)
    assert left
    assert {copy.device.type for copy in replica.parameters} == {"meta"}


@pytest.mark.usefixtures("counting_device")
@pytest.mark.parametrize(
    ("memory", "feedback", "sums", "vectors"),
    [
        (None, True, True, True),
        (0, True, False, False),
        # The sum, and the vector of the last round.
        (712, False, True, False),
        (2 * 712, False, True, True),
        (2 * 712, True, True, False),
    ],
)
def test_the_swarm_takes_no_more_of_a_devices_memory_than_it_may(
    memory: float | None, feedback: bool, sums: bool, vectors: bool
) -> None:
    net = toy.model()
    replica = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1)))
    assert 4 * replica.numel == 712
    gathered = Gradients(replica, lambda vector: False, error_feedback=feedback, device_memory=memory)
    toy.loss_of(net, 0).backward()
    gathered.add(10.0, 10.0, None)
    assert gathered.placement.on_devices is sums
    assert isinstance(gathered.contribution().vector, DeviceVector) is vectors


@pytest.mark.usefixtures("counting_device")
def test_vectors_lie_on_a_device_if_they_fit_beside_what_a_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last round's vector and two of error feedback; before the first step also two of the optimizer.
    cases = ((5, 0, True), (4.9, 0, False), (3, 1, True), (2.9, 1, False), (-1, 1, False))
    for free_vectors, step, fits in cases:
        monkeypatch.setattr(placement, "spare_bytes", lambda device, free=free_vectors: free * 712.0)
        net = toy.model()
        replica = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1)))
        replica.step = step
        gathered = Gradients(replica, lambda vector: False, error_feedback=True)
        toy.loss_of(net, 0).backward()
        gathered.add(10.0, 10.0, None)
        assert isinstance(gathered.contribution().vector, DeviceVector) is fits


@pytest.mark.usefixtures("counting_device")
def test_a_gradient_that_is_not_finite_is_told_of_one_call_later() -> None:
    def train(swarm: Swarm) -> list[float]:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=40)
        counts = []
        for index in range(4):
            toy.loss_of(net, index).backward()
            if index == 1:
                next(net.parameters()).grad.fill_(torch.inf)
            optimizer.step(samples=10)
            counts.append(optimizer.rounds.share.counted)
            dropped.append(len(swarm.events.recent(BatchDropped)))
        return counts

    dropped: list[int] = []
    assert toy.alone(train) == [10, 20, 20, 30]
    assert dropped == [0, 0, 1, 1]
