"""What a donor's state may not do to the replica that loads it."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from colab_swarm.errors import StateError
from colab_swarm.tensors import device
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.flat import SMALL_VALUES, FlatValues, clear_gradients, only_reads, set_gradients
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.layerwise import Lamb, Lars
from colab_swarm.training.names import check_options
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.state import check_snapshot
from tests.training.toy import loss_of, mean_of, model, parameters_of


def adam(net: torch.nn.Module) -> Replica:
    replica = Replica(UpdateRule(torch.optim.Adam(net.parameters(), lr=0.1)))
    loss_of(net, 0).backward()
    replica.rule.optimizer.step()
    return replica


def test_cleared_gradients_are_zero_or_gone() -> None:
    loss_of(net := model(), 0).backward()
    clear_gradients(net.parameters(), set_to_none=False)
    assert not any(torch.count_nonzero(p.grad) for p in net.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in net.parameters())
    clear_gradients(net.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_a_loaded_state_of_the_optimizer_is_no_change_from_outside() -> None:
    replica = adam(model())
    state = {
        **replica.rule.optimizer.state_dict(),
        "param_groups": [{**replica.rule.optimizer.param_groups[0]}],
    }
    state["param_groups"][0] |= {"lr": 0.2, "params": [*range(4)]}
    lineage = replica.lineage
    replica.load_optimizer(state)
    assert replica.lineage != lineage and not replica.digests.changed
    with torch.no_grad():
        replica.model[0] += 1.0
    assert replica.digests.changed


def poison_parameter(replica: Replica) -> None:
    with torch.no_grad():
        replica.parameters[0][0, 0] = float("nan")


def poison_moment(replica: Replica) -> None:
    replica.rule.optimizer.state[replica.parameters[0]]["exp_avg"][0, 0] = float("inf")


def setting(name: str, value: object) -> Callable[[Replica], None]:
    def change(replica: Replica) -> None:
        replica.rule.optimizer.param_groups[0][name] = value

    return change


@pytest.mark.parametrize(
    "poison",
    [
        *(poison_parameter, poison_moment, setting("lr", float("nan")), setting("lr", 1e30)),
        *(setting("lr", -0.1), setting("weight_decay", float("inf"))),
    ],
)
def test_a_state_that_would_ruin_the_model_is_refused(poison: Callable[[Replica], Any]) -> None:
    donor, joiner = adam(model(seed=1)), adam(net := model(seed=2))
    before = parameters_of(net)
    poison(donor)
    with pytest.raises(StateError, match=r"the state holds NaN|which nobody trains with"):
        joiner.load_snapshot(donor.snapshot())
    assert torch.equal(parameters_of(net), before) and joiner.step == 0
    assert joiner.rule.optimizer.param_groups[0]["lr"] == 0.1


def test_a_sound_state_of_any_usual_kind_is_taken() -> None:
    donor, joiner = adam(model(seed=1)), adam(net := model(seed=2))
    setting("lr", torch.tensor(0.01))(donor)
    joiner.load_snapshot(donor.snapshot())
    assert torch.equal(parameters_of(net), torch.cat([p.detach().flatten() for p in donor.parameters]))


def test_a_snapshot_is_of_the_step_that_it_claims() -> None:
    whole = (replica := adam(model())).snapshot()
    check_snapshot(whole)
    lie = Snapshot(msgspec.structs.replace(whole.manifest, step=9), whole.blob)
    with pytest.raises(StateError, match="not of the step that it claims"):
        check_snapshot(lie)
    for wrong in (-1, True):
        replica.step = wrong
        with pytest.raises(StateError, match="does not say its step"):
            check_snapshot(replica.snapshot())


def test_the_state_of_another_kind_of_optimizer_is_refused_and_changes_nothing() -> None:
    lamb = Lamb((net := model()).parameters(), lr=0.01)
    sgd = torch.optim.SGD((other := model(seed=1)).parameters(), lr=0.5)
    kept, mine = (Replica(UpdateRule(one, StepLR(one, step_size=2))) for one in (lamb, sgd))
    kept.rule.scheduler.last_epoch = 7
    before = parameters_of(other).clone()
    with pytest.raises(
        StateError, match=r"another optimizer: it lacks the settings .*momentum.* and has .*betas"
    ):
        mine.load(kept.state())
    assert sgd.param_groups[0]["lr"] == 0.5 and torch.equal(parameters_of(other), before)
    assert mine.rule.scheduler.last_epoch == 0
    loss_of(net, 0).backward()
    mine.rule.optimizer.step()


def test_an_error_names_three_parameters_of_other_shapes_and_counts_the_rest() -> None:
    def replica(width: int, depth: int = 3) -> Replica:
        net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        return Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=1.0), model=net))

    told = r"0\.weight: \(4, 4\) there, \(3, 3\) here; 0\.bias: .*; 1\.weight: .* here; and 3 more; build the model"
    with pytest.raises(StateError, match=told):
        replica(3).load(replica(4).state())
    with pytest.raises(StateError, match=r"2\.weight: only there; 2\.bias: only there"):
        replica(3, depth=2).load(replica(3).state())
    replica(3).load(replica(3).state())


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]


def sgd(parameters: list[torch.nn.Parameter]) -> Replica:
    return Replica(UpdateRule(torch.optim.SGD(parameters, lr=1.0)))


def test_gradients_add_up_by_weight_and_absent_ones_count_as_zero() -> None:
    first, second = both = parameters()
    gathered = Gradients(sgd(both), lambda values: False)
    first.grad = torch.arange(6.0).view(2, 3)
    gathered.add(8.0, 2.0, 1.0)
    assert first.grad is None
    first.grad, second.grad = torch.arange(6.0).view(2, 3), torch.full((4,), 0.5, dtype=torch.bfloat16)
    gathered.add(8.0, 3.0, float("nan"))
    assert gathered.loss.value == 1.0
    gathered.add(8.0, 6.0, torch.tensor(5.0))
    assert gathered.loss.value == 4.0 and not gathered.dropped
    given = gathered.contribution()
    assert (given.samples, given.weight, given.loss) == (24.0, 11.0, 4.0)
    np.testing.assert_allclose(
        11 * given.vector.values, [0, 5, 10, 15, 20, 25, 1.5, 1.5, 1.5, 1.5], rtol=1e-6
    )


def test_a_flat_vector_becomes_gradients_in_the_parameters_own_dtype() -> None:
    first, second = both = parameters()
    set_gradients(both, FlatValues(both, np.arange(10, dtype=np.float32)))
    assert first.grad is not None and first.grad.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.grad is not None and second.grad.dtype == torch.bfloat16
    assert second.grad.tolist() == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="flat vector of 10 values"):
        set_gradients(both, FlatValues(both, np.zeros(9, np.float32)))


def test_small_tensors_are_at_the_front_of_a_flat_vector() -> None:
    large, small = both = [torch.nn.Parameter(torch.zeros(SMALL_VALUES)), torch.nn.Parameter(torch.zeros(2))]
    set_gradients(both, FlatValues(both, np.arange(SMALL_VALUES + 2, dtype=np.float32)))
    assert small.grad is not None and small.grad.tolist() == [0, 1]
    assert large.grad is not None and large.grad[0] == 2
    assert (sgd(both).fine, sgd(both).numel) == (2, SMALL_VALUES + 2)


def test_another_model_has_another_schema() -> None:
    first, second = both = parameters()
    assert sgd(both).schema == sgd(parameters()).schema
    assert sgd(both).schema != sgd([second, first]).schema
    assert Replica(UpdateRule(torch.optim.SGD(both), local=True)).schema != sgd(both).schema


def test_options_of_an_own_optimizer_may_be_infinite_and_those_of_others_not() -> None:
    own = {"lr": 0.1, "growth_rate": float("inf"), "params": [0], "scale": torch.ones(2)}
    check_options(own, dict(own))
    for wrong in ({"lr": -0.1}, {"lr": float("inf")}, {"growth_rate": 1e7}):
        with pytest.raises(ValueError, match="which nobody trains with"):
            check_options(own, own | wrong)


def test_delayed_updates_keep_the_dtype_of_the_state_and_the_groups() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 1.001)}
    (group,) = optimizer.param_groups
    replica = Replica(UpdateRule(optimizer, delayed=True))
    (copy,) = replica.parameters
    assert replica.groups()[0]["params"][0] is replica.model[0] is parameter
    assert optimizer.param_groups[0] is group and group["params"][0] is copy is not parameter
    assert {*optimizer.state} == {copy}
    assert torch.equal(optimizer.state[copy]["exp_avg"], torch.full((3,), 1.001))


@pytest.mark.parametrize("caught_up", [False, True])
def test_a_delayed_round_keeps_the_local_steps_unless_a_state_was_loaded_meanwhile(caught_up: bool) -> None:
    sgd = torch.optim.SGD((net := model()).parameters(), lr=0.1)
    replica = Replica(UpdateRule(sgd, delayed=True, local=True))
    before = parameters_of(net)
    replica.depart()
    gradient = np.ones(replica.numel, np.float32)
    replica.step_alone(FlatValues(replica.model, gradient.copy()), ())
    replica.apply(mean_of(gradient))
    if caught_up:
        replica.load(replica.state())
    replica.land()
    swarms = torch.cat([one.detach().flatten() for one in replica.parameters])
    assert not torch.equal(swarms, before)
    torch.testing.assert_close(parameters_of(net), swarms if caught_up else swarms - 0.1)
    replica.land()  # once
    torch.testing.assert_close(parameters_of(net), swarms if caught_up else swarms - 0.1)


def test_a_gradient_that_is_not_finite_adds_nothing() -> None:
    first, second = both = parameters()
    gathered = Gradients(sgd(both), lambda values: False)
    first.grad, second.grad = torch.ones(2, 3), torch.full((4,), float("nan"), dtype=torch.bfloat16)
    gathered.add(3.0, 1.0, None)
    assert gathered.dropped == 3.0 and second.grad is None
    assert not gathered.samples and not gathered.contribution().vector.values.any()


SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
MEAN = np.linspace(-1, 1, 10, dtype=np.float32)


class Writer(SGD):
    """An optimizer that changes the gradients in place."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(2)
        super().step()


def after_two_steps(make: Callable[..., Any], *, copies: bool = False, **rule: Any) -> list[torch.Tensor]:
    """The parameters that follow from `MEAN`, which stays as it is; ``copies``: as the optimizer takes them."""
    both, mean = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))], MEAN.copy()
    replica = Replica(UpdateRule(make(both), **rule))
    for _ in range(2):
        if copies:
            set_gradients(both, FlatValues(both, mean))
            if (limit := rule.get("max_grad_norm")) is not None:
                torch.nn.utils.clip_grad_norm_(both, limit)
            replica.rule.optimizer.step()
        else:
            replica.apply(mean_of(mean))
            assert all(parameter.grad is None for parameter in both)
        np.testing.assert_array_equal(mean, MEAN)
    return both


READERS: list[Callable[..., Any]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True, weight_decay=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    lambda p: Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, maximize=True),
    lambda p: Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    lambda p: AdamW(p, lr=0.1, maximize=True),
    lambda p: AdamW(p, lr=0.1, fused=True, amsgrad=True),
    lambda p: Lamb(p, lr=0.1, weight_decay=0.1),
    lambda p: Lars(p, lr=0.1, weight_decay=0.1),
]
WRITERS: list[Callable[..., Any]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    lambda p: Writer(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
]


@pytest.mark.parametrize("make", READERS + WRITERS)
@pytest.mark.parametrize("rule", [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 100.0}], ids=str)
def test_no_optimizer_changes_a_mean_that_others_may_recover(
    make: Callable[..., Any], rule: dict[str, Any]
) -> None:
    assert only_reads(make(parameters())) == (make in READERS)
    for mine, expected in zip(
        after_two_steps(make, **rule), after_two_steps(make, copies=True, **rule), strict=True
    ):
        assert torch.equal(mine, expected)


def test_an_optimizer_whose_gradients_a_hook_changes_gets_copies() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *arguments: None)
    assert not only_reads(optimizer)


def test_after_a_step_that_failed_no_parameter_has_a_mean_as_its_gradient() -> None:
    optimizer = Lamb(both := parameters(), lr=0.1)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        Replica(UpdateRule(optimizer)).apply(mean_of(MEAN.copy()))
    assert all(parameter.grad is None for parameter in both)


def test_a_fused_step_on_strided_parameters_is_torchs() -> None:
    """Fused kernels read parameter and gradient by the strides of one."""
    ours, theirs = (torch.nn.Conv2d(3, 4, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    inner = AdamW(ours.to(memory_format=torch.channels_last).parameters(), lr=0.1, fused=True)
    replica = Replica(UpdateRule(inner))
    mean = np.linspace(-1, 1, replica.numel, dtype=np.float32)
    replica.apply(mean_of(mean))
    plain = AdamW(theirs.parameters(), lr=0.1)
    set_gradients([*theirs.parameters()], FlatValues([*theirs.parameters()], mean))
    plain.step()
    torch.testing.assert_close(parameters_of(ours), parameters_of(theirs))


@pytest.mark.parametrize("rule", [{}, {"delayed": True}, {"local": True}])
def test_a_fused_step_after_a_loaded_state_is_the_same(rule: dict[str, bool]) -> None:
    """A state arrives with the strides of a file."""

    def stepped(net: torch.nn.Module) -> Replica:
        replica = Replica(UpdateRule(AdamW(net.parameters(), lr=0.1, fused=True), **rule))
        step(replica)
        return replica

    def step(replica: Replica) -> None:
        mean = np.linspace(-1, 1, replica.numel, dtype=np.float32)
        replica.apply(mean_of(mean))
        replica.step_alone(FlatValues(replica.model, mean.copy()), ())

    nets = [torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    donor, loading = map(stepped, nets)
    loading.load_snapshot(donor.snapshot())
    for mine, theirs in zip(loading.model, donor.model, strict=True):
        mine.data.copy_(theirs.data)
    step(donor)
    step(loading)
    torch.testing.assert_close(parameters_of(nets[1]), parameters_of(nets[0]))
    for mine, theirs in zip(loading.parameters, donor.parameters, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_are_summed_in_float32_whatever_the_default_and_conjugates_by_value() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
    gathered = Gradients(sgd([weight]), lambda vector: False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        weight.grad = torch.tensor([1.0 + 2.0j, 3.0 + 4.0j], dtype=torch.complex64).conj()
        assert weight.grad.is_conj()
        gathered.add(1.0, 1.0, None)
        values = gathered.contribution().vector.values
        assert all(part.dtype == torch.float32 for part in FlatValues([weight]).segments)
    finally:
        torch.set_default_dtype(torch.float32)
    assert values.tolist() == [1.0, -2.0, 3.0, -4.0]


def test_nesterovs_lists_on_a_gpu_do_not_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    nesterov = SGD([weight], lr=0.1, momentum=0.9, nesterov=True)
    assert only_reads(nesterov)
    monkeypatch.setattr(device, "_MAIN_MEMORY", ())
    assert not only_reads(nesterov) and only_reads(SGD([weight], lr=0.1, momentum=0.9))


@pytest.mark.parametrize("mode", [{}, {"delayed": True}, {"local": True}], ids=str)
def test_a_replica_begins_anew_with_what_the_model_has_by_then(mode: dict[str, bool]) -> None:
    """The optimizer that it replaces brings its newest parameters to the model as it closes."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    replica = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1), model=net, **mode))
    before = replica.lineage
    with torch.no_grad():
        net[0].weight.add_(1.0)
        net[1].running_mean.add_(1.0)
    replica.begin()
    other = Replica(UpdateRule(torch.optim.SGD(net.parameters(), lr=0.1), model=net, **mode))
    assert replica.lineage == other.lineage != before
    assert all(torch.equal(*pair) for pair in zip(replica.parameters, net.parameters(), strict=True))
    assert torch.equal(replica.buffers.shared[0], net[1].running_mean)


@pytest.mark.parametrize("forged", [5, "text", torch.ones(3), torch.ones(1, 2, dtype=torch.int64)], ids=str)
def test_a_changed_frozen_parameter_of_another_kind_is_left_out(forged: object) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).requires_grad_(False))
    replica = Replica(UpdateRule(torch.optim.SGD(net[0].parameters(), lr=0.1), model=net))
    before = net[1].weight.clone()
    bias = torch.full((1,), 7.0)
    replica.load({**replica.state(), "frozen": {"1.weight": forged, "1.bias": bias, "0.weight": bias}})
    assert torch.equal(net[1].weight, before) and torch.equal(net[1].bias, bias)
