import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colab_swarm.errors import ExpertError, NoExpertsError
from colab_swarm.moe.grid import ExpertInfo, Grid
from colab_swarm.moe.layer import MixtureOfExperts, RemoteExpert, balance_loss, priorities
from colab_swarm.net.node import Node
from tests.moe.local import HOST, LR, Function, LocalExperts, calls_of

GRID = Grid("ffn", (2, 3))
DIM = 4


def make(
    *, living: Sequence[tuple[int, int]] | None = None, timeout_s: float = 5.0, **settings: Any
) -> tuple[MixtureOfExperts, LocalExperts]:
    experts = LocalExperts(GRID, living=living, timeout_s=timeout_s)
    return MixtureOfExperts(experts, GRID, DIM, **{"k": 2} | settings), experts


def prefer_the_first_row_if_positive(layer: MixtureOfExperts) -> None:
    with torch.no_grad():
        layer.gating.maps.weight.zero_()
        layer.gating.maps.bias.zero_()
        layer.gating.maps.weight[:2, 0] = torch.tensor([1.0, -1.0])


def locally(layer: MixtureOfExperts, modules: dict[str, nn.Module], x: Tensor, k: int) -> Tensor:
    """Compute equation 1 literally, sample by sample."""
    rows = []
    for sample in x:
        scores = layer.gating((sample.mean(0) if layer.sequences else sample)[None])
        logits = {uid: priorities(scores, torch.tensor([[GRID.index(uid)]]))[0, 0] for uid in sorted(modules)}
        top = sorted(logits, key=lambda uid: -logits[uid].item())[:k]
        weights = torch.stack([logits[uid] for uid in top]).softmax(0)
        rows.append(sum(w * modules[uid](sample[None])[0] for w, uid in zip(weights, top, strict=True)))
    return torch.stack(rows)


def test_values_and_all_gradients_are_those_of_local_modules() -> None:
    layer, experts = make()
    replica = {uid: copy.deepcopy(module) for uid, module in experts.modules.items()}
    x, target = torch.randn(7, DIM, requires_grad=True), torch.randn(7, DIM)
    expected = locally(layer, replica, x, k=2)
    (expected * target).sum().backward()
    wanted = [x.grad, *(p.grad for p in layer.gating.parameters())]
    x.grad = None
    layer.zero_grad()
    mixed = layer(x)
    (mixed * target).sum().backward()
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=0)
    for found, want in zip([x.grad, *(p.grad for p in layer.gating.parameters())], wanted, strict=True):
        assert want is not None and want.any()
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    for uid, module in replica.items():  # each has taken the step of its own gradient
        for there, here in zip(experts.modules[uid].parameters(), module.parameters(), strict=True):
            step = here - LR * here.grad if here.grad is not None else here
            torch.testing.assert_close(there, step, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(DIM,), (3, DIM), (2, 3, DIM), (2, 1, 3, DIM), (0, DIM)])
def test_any_leading_shape_comes_back(shape: tuple[int, ...]) -> None:
    layer, _ = make()
    x = torch.randn(shape)
    assert layer(x).shape == shape
    torch.testing.assert_close(layer(x).reshape(-1, DIM), layer(x.reshape(-1, DIM)))


def test_autocast_keeps_the_outer_dtype_and_float32_inside_and_half_precision_works() -> None:
    layer, _ = make()
    x = torch.randn(3, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x.bfloat16())
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, layer(x.bfloat16().float()).bfloat16())
    halves = layer.bfloat16()(x.bfloat16())
    assert halves.dtype == torch.bfloat16 and halves.shape == x.shape and halves.isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    def grads(forward: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layer, _ = make()
            first, x = nn.Linear(DIM, DIM), torch.randn(5, DIM)
        model = nn.Sequential(first, layer)
        forward(model, x.requires_grad_()).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = grads(lambda model, x: model(x))
    saved = grads(lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert len(plain) == 4
    torch.testing.assert_close(saved, plain)


def test_checkpointing_works_if_other_experts_answer_the_second_time() -> None:
    torch.manual_seed(0)
    layer, experts = make()
    x = torch.randn(5, DIM, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False).sum()
    experts.dead = set(list(experts.modules)[:4])
    loss.backward()
    assert layer.statistics().failures > 0 and x.grad is not None


def test_a_layer_may_be_used_twice_in_one_graph_and_inputs_changed_after_it_are_an_error() -> None:
    layer, experts = make(k=6)
    x = torch.randn(3, DIM, requires_grad=True)
    layer(layer(x)).sum().backward()
    assert len(experts.backwards) == 12 and x.grad is not None and x.grad.any()
    y = torch.randn(3, DIM)
    y += layer(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert len(experts.backwards) == 12, "no wrong gradient was sent"


def test_silent_experts_are_masked_and_the_rest_renormalised() -> None:
    layer, experts = make(k=6)
    experts.dead = set(list(experts.modules)[:3])
    x = torch.randn(4, DIM)
    living = {uid: module for uid, module in experts.modules.items() if uid not in experts.dead}
    torch.testing.assert_close(layer(x), locally(layer, living, x, k=3), atol=1e-5, rtol=0)
    assert {uid for uid, _ in experts.failures} == experts.dead
    assert layer.statistics().failures == 3


LATER, SILENT = "0.02 s later than others", "expert ffn.0.0 at 00000000 did not answer in 0.05 s"
FOUR = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("settings", "dead", "late", "failure"),
    [
        ({"k": 6, "k_min": 5, "grace_s": 0.02}, set(), "ffn.0.0", LATER),
        # with fewer than k_min the time limit ends the wait
        ({"k": 6, "k_min": 6, "grace_s": 0.0, "timeout_s": 0.05}, set(), "ffn.0.0", SILENT),
        # a sample whose experts all failed does not prolong it
        ({"k": 2, "grace_s": 0.02, "living": FOUR}, {"ffn.0.0", "ffn.0.1"}, "ffn.1.1", LATER),
    ],
    ids=["grace", "time limit", "failed"],
)
def test_a_late_expert_is_dropped_and_reported(
    settings: dict[str, Any], dead: set[str], late: str, failure: str
) -> None:
    layer, experts = make(**settings)
    prefer_the_first_row_if_positive(layer)
    experts.dead, experts.late = dead, {late}
    layer(torch.tensor([[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]))[1].sum().backward()
    assert (late, failure) in experts.failures and {uid for uid, _ in experts.failures} == {late, *dead}
    assert late not in experts.backwards and layer.statistics().failures == 1 + len(dead)


def test_a_busy_expert_is_called_again() -> None:
    layer, experts = make(k=6)
    experts.busy = dict.fromkeys(experts.modules, 2)
    layer(torch.randn(4, DIM))
    assert not experts.failures and layer.statistics().answers == 6
    assert len(experts.forwards) == 18


def test_an_expert_that_fails_in_backward_counts_as_zero_and_the_gating_still_learns() -> None:
    layer, experts = make(k=6)
    x = torch.randn(4, DIM, requires_grad=True)
    experts.dead_backward = set(experts.modules)
    layer(x).square().sum().backward()
    assert len(experts.backwards) == 6 == layer.statistics().lost_gradients
    assert x.grad is not None and layer.gating.maps.weight.grad is not None
    frozen = {uid: Function(lambda x, m=m: m(x).detach()) for uid, m in experts.modules.items()}
    (through_gating,) = torch.autograd.grad(locally(layer, frozen, x, 6).square().sum(), x)
    torch.testing.assert_close(x.grad, through_gating, atol=1e-5, rtol=0)


def test_an_unanswered_sample_is_tried_with_another_expert_then_passes_unchanged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer, experts = make(k=1, living=[(0, 0), (0, 1), (1, 0)])
    prefer_the_first_row_if_positive(layer)
    experts.dead = {"ffn.0.0", "ffn.0.1"}
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]], requires_grad=True)
    mixed = layer(x)
    mixed[0].sum().backward()
    assert torch.equal(mixed[0], x[0]) and not torch.equal(mixed[1], x[1])
    assert x.grad is not None and torch.equal(x.grad[0], torch.ones(4))
    assert experts.forwards.count("ffn.0.0") == experts.forwards.count("ffn.0.1") == 1
    assert layer.statistics().unanswered == 1 and "1 samples pass ffn[2 x 3] unchanged" in caplog.text
    layer(x)
    assert layer.statistics().unanswered == 1, "the second batch was answered"


def test_a_batch_that_no_expert_answers_is_an_error_at_once() -> None:
    for living in ([(0, 0)], None):  # its only one, or all that it chose
        layer, experts = make(k=6, living=living)
        x = torch.randn(8, DIM)
        if living:
            torch.testing.assert_close(layer(x), experts.modules["ffn.0.0"](x))  # fewer than k are enough
        experts.forwards.clear()
        experts.dead = set(experts.modules)
        words = r"answered this batch of 8 \(ffn\.\d\.\d is dead\): try it again"
        with pytest.raises(NoExpertsError, match=words):
            layer(x)
        assert set(experts.forwards) == experts.dead and layer.statistics().unanswered == 0
        with pytest.raises(NoExpertsError, match="is alive"):
            layer(x)  # nor is any in the directory now
        experts.dead.clear()
        experts.gone.clear()
        assert not torch.equal(layer(x), x)
    late, experts = make(k=6, timeout_s=0.05)
    experts.late = set(experts.modules)
    with pytest.raises(NoExpertsError, match=r"did not answer in 0\.05 s"):
        late(x)


@pytest.mark.parametrize(
    ("shape", "sequences", "words"),
    [
        ((32,), False, "experts of ffn have width 32, this layer has 4"),
        ((-1, 32), True, "experts of ffn have width 32, this layer has 4"),
        ((-1, DIM), False, r"shape \(-1, 4\), this layer sends \(4,\): sequences=True"),
        ((DIM,), True, r"shape \(4,\), this layer sends \(5, 4\)"),
    ],
)
def test_experts_of_another_shape_are_refused_at_each_call(
    shape: tuple[int, ...], sequences: bool, words: str
) -> None:
    layer, experts = make(sequences=sequences)
    experts.shape = shape
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            layer(torch.randn(3, 5, DIM))
    assert not experts.forwards and not experts.failures


def test_a_host_that_announces_a_false_shape_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, experts = make(k=1)
    prefer_the_first_row_if_positive(layer)
    false = {"ffn.0.0"}
    shapes = {uid: (32,) if uid in false else (DIM,) for uid in experts.modules}
    monkeypatch.setattr(experts, "info", lambda uid: ExpertInfo(uid, HOST, shapes[uid], 0, 1e9))
    experts.dead = false  # its host refuses the call
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert not torch.equal(layer(x), x)
    assert {uid for uid, _ in experts.failures} == false


def test_a_compiled_model_calls_each_expert_once_per_direction() -> None:
    layer, experts = make(k=6)
    model = nn.Sequential(nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 1))
    x = torch.randn(50, DIM)
    with torch.no_grad():
        plain = model(x).sum()
        assert not layer(x).requires_grad
    experts.forwards.clear()
    loss = torch.compile(model, backend="eager")(x).sum()
    torch.testing.assert_close(loss, plain)
    assert not experts.backwards
    loss.backward()
    assert sorted(experts.forwards) == sorted(experts.backwards) == sorted(experts.modules)
    assert layer.gating.maps.weight.grad is not None


def test_an_expert_that_replaces_another_still_gets_one_backward_call() -> None:
    layer, experts = make(k=1, living=[(0, 0), (1, 2)])
    prefer_the_first_row_if_positive(layer)
    x = torch.randn(6, DIM)
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    experts.dead = {"ffn.1.2"}
    layer(x)
    assert experts.forwards == ["ffn.0.0", "ffn.1.2", "ffn.0.0"]
    torch.testing.assert_close(layer(x), experts.modules["ffn.0.0"](x))
    experts.gone.clear()
    expected = torch.autograd.grad(experts.modules["ffn.0.0"](x.requires_grad_()).square().sum(), x)[0]
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert experts.backwards == ["ffn.0.0"] and sum(layer.utilisation.values()) == pytest.approx(1)


def test_values_that_are_not_finite_never_reach_an_expert() -> None:
    layer, experts = make()
    with pytest.raises(ValueError, match="not finite"):
        layer(torch.full((3, DIM), torch.nan))
    x = torch.randn(3, DIM, requires_grad=True)
    (layer(x) * torch.inf).sum().backward()
    assert not experts.backwards and x.grad is not None and x.grad.isnan().all()
    assert not experts.failures


def test_sequences_are_sent_whole_and_scored_by_their_mean() -> None:
    layer, experts = make(k=2, sequences=True)
    experts.shape = (-1, DIM)
    x = torch.randn(3, 5, DIM)
    torch.testing.assert_close(layer(x), locally(layer, experts.modules, x, k=2), atol=1e-5, rtol=0)


def test_the_balance_loss_reaches_the_gating_and_utilisation_is_reported() -> None:
    layer, experts = make()
    layer(torch.randn(20, DIM))
    layer.balance_loss.backward()
    assert layer.balance_loss > 0 and layer.gating.maps.weight.grad is not None
    assert not experts.backwards, "the experts have no part in it"
    assert sum(layer.utilisation.values()) == pytest.approx(1)
    assert layer.utilisation.keys() <= experts.modules.keys()


def test_copies_have_their_own_gating_and_share_the_experts() -> None:
    layer, experts = make()
    layer(torch.randn(2, DIM))
    twin = copy.deepcopy(layer)
    twin(torch.randn(2, DIM)).sum().backward()
    assert twin.gating.maps.weight.data_ptr() != layer.gating.maps.weight.data_ptr()
    assert layer.gating.maps.weight.grad is None and experts.backwards
    assert layer.statistics().batches == 2
    assert repr(layer).startswith("MixtureOfExperts(\n  ffn[2 x 3], k=2")


def test_invalid_settings_and_inputs_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"k": 0}, {"k": 2, "k_min": 3}, {"grace_s": -1.0}]
    for settings in wrong:
        with pytest.raises(ValueError):
            make(**settings)
    layer, _ = make()
    with pytest.raises(ValueError, match=r"\(\.\.\., 4\)"):
        layer(torch.randn(3, DIM + 1))


def test_the_loss_is_the_squared_coefficient_of_variation() -> None:
    importance = torch.tensor([3.0, 1.0, 2.0])
    everyone = torch.tensor([3.0, 1.0, 2.0, 0.0, 0.0])
    expected = everyone.var(correction=0) / everyone.mean() ** 2
    assert torch.allclose(balance_loss(importance, 2), expected)
    assert balance_loss(torch.full((4,), 2.5), 0) == 0 == balance_loss(torch.zeros(0), 3)


def test_shares_follow_the_work_sum_to_one_and_are_forgotten() -> None:
    calls = calls_of(cast(Node, None))
    for _ in range(300):
        calls.on_batch({"a": 3.0, "b": 1.0})
    assert calls.shares() == pytest.approx({"a": 0.75, "b": 0.25})
    assert calls.on_batch({"c": 1.0}) == 2  # a and b were idle
    assert calls.on_batch({}) == 3
    assert sum(calls.shares().values()) == pytest.approx(1)
    for _ in range(1000):
        calls.on_batch({"a": 1.0})
    assert list(calls.shares()) == ["a"], "the others are forgotten"


LINE = Grid("ffn", (3,))


@pytest.fixture
def experts() -> LocalExperts:
    return LocalExperts(LINE, living=[(1,)])


@pytest.fixture
def remote(experts: LocalExperts) -> RemoteExpert:
    return RemoteExpert(experts, LINE, "ffn.1")


def test_it_computes_as_the_expert_and_both_learn(experts: LocalExperts, remote: RemoteExpert) -> None:
    local, x = copy.deepcopy(experts.modules["ffn.1"]), torch.randn(2, 3, 4, requires_grad=True)
    y = remote(x)
    torch.testing.assert_close(y, local(x))
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(local(x).square().sum(), x)[0])
    assert experts.backwards == ["ffn.1"]
    assert not torch.equal(experts.modules["ffn.1"](x), local(x)), "the expert has taken its step"
    compiled = torch.compile(nn.Sequential(remote, nn.Linear(4, 1)), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):  # as the first layer, whose inputs need no gradient
        compiled(torch.randn(3, 4).bfloat16()).sum().backward()
    assert experts.backwards == ["ffn.1"] * 2


def test_failures_are_raised_in_forward_and_backward(experts: LocalExperts, remote: RemoteExpert) -> None:
    y = remote(torch.randn(1, 4))
    experts.dead_backward = experts.dead = {"ffn.1"}
    with pytest.raises(ExpertError, match="dead"):
        y.sum().backward()
    with pytest.raises(ExpertError, match="dead"):
        remote(torch.randn(1, 4))
    assert len(experts.failures) == 2
    with pytest.raises(ExpertError, match=r"no peer hosts ffn\.2"):
        RemoteExpert(experts, LINE, "ffn.2")(torch.randn(1, 4))


def test_invalid_names_and_inputs_are_refused(experts: LocalExperts, remote: RemoteExpert) -> None:
    with pytest.raises(ValueError, match="not an expert of"):
        RemoteExpert(experts, LINE, "gfn.1")
    for wrong in [torch.randn(3), torch.randn(2, 5), torch.tensor(1.0)]:
        with pytest.raises(ValueError, match="takes samples of shape"):
            remote(wrong)
    assert remote(torch.randn(0, 4)).shape == (0, 4) and remote(torch.randn(4)).shape == (4,)
    assert repr(remote) == "RemoteExpert(ffn.1)"
