"""One expert by itself: what changes it, and what must not."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from colab_swarm.errors import StateError
from colab_swarm.moe import PAPER_RULE, ExpertRule, FeedForward, PaperTransformerBlock, TransformerBlock
from colab_swarm.moe.expert import MOST, Expert, ExpertModel, devices_named, dtype_named, measure
from colab_swarm.tensors.statedict import pack, unpack
from tests.moe.local import Function

ADAM = ExpertRule(
    partial(torch.optim.Adam, lr=0.01),
    scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    max_grad_norm=0.5,
)


def expert(
    module: nn.Module | None = None, rule: ExpertRule = ADAM, sample: tuple[int, ...] = (4,)
) -> Expert:
    torch.manual_seed(0)
    return Expert("ffn.0", module or FeedForward(4, 8), rule, sample)


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (5, 4), generator=torch.Generator().manual_seed(seed))


def values(one: Expert) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in one.state_dict()["module"].items()}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("rule", [ADAM, replace(ADAM, max_grad_norm=0.0), PAPER_RULE])
def test_backward_steps_as_a_training_loop_would(rule: ExpertRule, scale: float) -> None:
    ours = expert(rule=rule)
    torch.manual_seed(0)
    module = FeedForward(4, 8).to(ours.device)
    if rule is PAPER_RULE:
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, amsgrad=True)
    else:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(5):
        inputs, grads = batch(step), scale * batch(100 + step)
        leaf = inputs.to(ours.device, copy=True).requires_grad_()
        outputs = module(leaf)
        assert torch.equal(outputs, leaf + module.layers(leaf))
        outputs.backward(grads.to(ours.device))
        if rule.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), rule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if rule.scheduler is not None and step % 2:
            optimizer.param_groups[0]["lr"] /= 2
        assert leaf.grad is not None and torch.equal(ours.backward(inputs, grads), leaf.grad)
    assert ours.step == 5 and equal(values(ours), dict(module.state_dict()))


def test_an_expert_continues_from_its_save_with_equal_results_and_refuses_one_of_another_kind() -> None:
    old, new = expert(), expert()
    for step in range(3):
        old.backward(batch(step), batch(100 + step))
    new.load_state_dict(unpack(pack(old.state_dict())))
    assert torch.equal(old.backward(batch(0), batch(1)), new.backward(batch(0), batch(1)))
    assert equal(values(old), values(new)) and new.step == 4
    for part, name in (("module", "layers.0.weight"), ("", "step")):
        state = old.state_dict()
        (state[part] if part else state).pop(name)
        with pytest.raises(StateError, match=r"does not fit ffn\.0"):
            new.load_state_dict(state)


def test_forward_changes_nothing_not_even_batch_statistics() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.register_buffer("mask", torch.tensor(-torch.inf))  # may hold infinities: it stays as it is
    one = expert(module)
    before = values(one)
    one.forward(batch(0))
    assert equal(values(one), before) and one.step == 0
    one.backward(batch(0), batch(1))
    assert values(one)["1.num_batches_tracked"] == 1, "one backward is one batch"
    assert not torch.equal(values(one)["1.running_mean"], before["1.running_mean"])


def test_gradients_that_overflow_leave_the_expert_as_it_was() -> None:
    one = expert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    before = values(one)
    for inputs, grads in ((1e30, 1.0), (1.0, 3e38)):
        with pytest.raises(FloatingPointError, match=r"ffn\.0: .* not finite"):
            one.backward(inputs * batch(0), grads * batch(1).sign())
        assert equal(values(one), before) and one.step == 0
    one.backward(batch(0), batch(1))
    assert one.step == 1 and all(value.isfinite().all() for value in values(one).values())


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Linear(4, 3), "became torch.float32 of shape \\(2, 3\\)"),
        (nn.Linear(5, 5), "on a batch of shape \\(2, 4\\)"),
        (nn.Linear(4, 4).double(), "dtype"),
        (Function(lambda x: (x, x)), "became tuple"),
        (Function(lambda x: x.detach()), "does not require grad"),
        (
            Function(lambda x: torch.ones(4, device=x.device, requires_grad=True).expand_as(x)),
            "do not depend on its inputs",
        ),
    ],
)
def test_a_module_that_cannot_be_an_expert_is_refused_at_once(module: nn.Module, why: str) -> None:
    with pytest.raises(ValueError, match=f"{type(module).__name__} failed.*{why}.*an expert maps"):
        measure(expert(module))


def reference_of(block: PaperTransformerBlock) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    pairs = {
        "self_attn.in_proj_": block.attend_in,
        "self_attn.out_proj.": block.attend_out,
        "linear1.": block.widen,
        "linear2.": block.narrow,
        "norm1.": block.attend_norm,
        "norm2.": block.norm,
    }
    state = {}
    for name, part in pairs.items():
        state |= {f"{name}weight": part.weight, f"{name}bias": part.bias}
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("length", [1, 3, 7])
def test_the_published_block_is_the_post_norm_encoder_layer_of_torch(length: int) -> None:
    inputs = batch(0, 4, length, 8)
    without = PaperTransformerBlock(8, 2)
    without.dropout = 0.0
    torch.testing.assert_close(without(inputs), reference_of(without)(inputs))
    block = PaperTransformerBlock(8, 2)
    dropped = block(inputs)
    torch.testing.assert_close(block.eval()(inputs), reference_of(block)(inputs))
    assert not torch.allclose(dropped, block(inputs)), "nothing was dropped in training"
    with pytest.raises(ValueError, match="heads=3: the number of heads must divide"):
        PaperTransformerBlock(8, 3)


def test_the_published_block_drops_its_share_alike_for_equal_samples_of_an_expert() -> None:
    block, inputs = PaperTransformerBlock(8, 2), batch(0, 2, 5, 8)
    torch.manual_seed(1)
    alone = block(inputs)
    torch.manual_seed(2)
    merged = block(torch.cat([batch(1, 3, 5, 8), inputs]))
    torch.testing.assert_close(merged[3:], alone)
    assert not torch.allclose(block(inputs[:1] + 1e-3), alone[:1], atol=0.05), "another input, another mask"

    def outputs(uid: str) -> Tensor:
        torch.manual_seed(0)
        module = nn.Sequential(PaperTransformerBlock(8, 2))
        return Expert(uid, module, PAPER_RULE, (-1, 8)).forward(inputs)

    torch.testing.assert_close(outputs("ffn.0"), outputs("ffn.0"))  # as of a host that takes over
    assert not torch.allclose(outputs("ffn.0"), outputs("ffn.1"), atol=0.05)
    drop = block._drop_of(batch(0, 50, 3, 8))
    first, second = drop(torch.ones(50, 400)), drop(torch.ones(50, 400))
    assert (first == 0).float().mean() == pytest.approx(0.1, abs=0.02)
    assert first.mean() == pytest.approx(1.0, abs=0.03) and not torch.equal(first, second)


def test_backward_uses_the_masks_of_the_forward_pass() -> None:
    """The gradient w.r.t. the inputs is that of the very outputs that forward returned."""
    block = expert(PaperTransformerBlock(8, 2), PAPER_RULE, (-1, 8))
    inputs, grads = batch(0, 3, 5, 8), batch(1, 3, 5, 8)
    leaf = inputs.to(block.device, copy=True).requires_grad_()
    torch.testing.assert_close(outputs := block.module(leaf), block.forward(inputs))
    (expected,) = torch.autograd.grad(outputs, leaf, grads.to(block.device))
    torch.manual_seed(7)
    torch.testing.assert_close(block.backward(inputs, grads), expected.cpu())


RULE = ExpertRule(partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize(
    ("module", "sample", "samples"),
    [
        *((FeedForward(8), (8,), (8,)), (FeedForward(8, 3), (8,), (8,))),
        *((TransformerBlock(8, 2), (-1, 8), (7, 8)), (TransformerBlock(8, 2, 5), (4, 8), (4, 8))),
    ],
)
def test_blocks_are_experts_and_compute_the_same_twice(
    module: nn.Module, sample: tuple[int, ...], samples: tuple[int, ...]
) -> None:
    one = Expert("block.0", module, RULE, sample)
    inputs, grads = torch.randn(3, *samples), torch.randn(3, *samples)
    outputs = one.forward(inputs)
    assert outputs.shape == inputs.shape and torch.equal(one.forward(inputs), outputs)
    back = one.backward(inputs, grads)
    assert back.shape == inputs.shape and one.step == 1


MODEL = ExpertModel(each=30_000_000, gradients=10_000_000, sample=10_000)


@pytest.mark.parametrize(
    ("model", "free_bytes", "batch_size", "fit"),
    [
        (MODEL, 10**9, 1000, 25),  # 0.8 * 1 GB - (10 MB + 30 MB + 1000 * 10 kB) = 750 MB: 25 experts of 30 MB
        (MODEL, 10**9, 31_000, 15),
        (ExpertModel(0, 0, 0), 1 << 40, 1, MOST),
        (MODEL, 50_000_000, 1000, 0),
    ],
)
def test_memory_of_one_batch_is_subtracted_and_the_rest_divided(
    model: ExpertModel, free_bytes: int, batch_size: int, fit: int
) -> None:
    assert model.experts_that_fit(free_bytes, max_batch_size=batch_size)[0] == fit
    assert MODEL.experts_that_fit(2_000_000_000, max_batch_size=1000)[1] == (
        "80% of 2 GB free, less 50 MB to compute a batch of 1,000, divided by 30 MB an expert"
    )


def test_an_experts_memory_counts_adams_values_and_kept_inputs() -> None:
    model = measure(expert(nn.Linear(64, 64), ExpertRule(torch.optim.Adam), (64,)))
    weights = 4 * (64 * 64 + 64)
    assert model.gradients == weights and 3 * weights <= model.each <= 3 * weights + 16
    assert model.kinds["module/weight"] == (torch.float32, (64, 64)) and model.state_bytes >= 3 * weights
    shallow, deep = (
        measure(expert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(n))), RULE, (32,))).sample
        for n in (1, 9)
    )
    assert deep - shallow == 8 * 32 * 4  # each layer keeps its input


def test_a_batch_that_exceeds_the_memory_is_computed_in_halves_with_equal_results() -> None:
    for fits in (1, 2, 7):
        whole, parted = expert(), expert(memory := Memory(fits))
        memory.load_state_dict(whole.state_dict()["module"])
        inputs, grads = batch(0, 8, 4), batch(1, 8, 4)
        torch.testing.assert_close(parted.forward(inputs), whole.forward(inputs))
        torch.testing.assert_close(parted.backward(inputs, grads), whole.backward(inputs, grads))
        assert memory.refused > 0 and parted.step == 1
        torch.testing.assert_close(values(parted), values(whole))
        before = memory.refused
        parted.backward(inputs, grads)
        assert memory.refused == before, "the largest batch is remembered"
    none = expert(Memory(0))
    unchanged = values(none)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 1 samples"):
        none.backward(inputs, grads)
    assert equal(values(none), unchanged) and none.step == 0


class Memory(FeedForward):
    """Has memory for so many samples at once."""

    def __init__(self, fits: int) -> None:
        super().__init__(4, 8)
        self.fits, self.refused = fits, 0

    def forward(self, x_BD: Tensor) -> Tensor:
        if len(x_BD) > self.fits:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no memory for {len(x_BD)} samples")
        return super().forward(x_BD)


def test_the_memory_that_ends_in_the_middle_of_a_backward_pass_counts_no_gradient_twice() -> None:
    class Later(Memory):
        def forward(self, x_BD: Tensor) -> Tensor:
            self.fits = 2 if self.refused or x_BD[0, 0] > 0 else 4
            return super().forward(x_BD)

    whole, parted = expert(), expert(later := Later(4))
    later.load_state_dict(whole.state_dict()["module"])
    inputs, grads = batch(0, 8, 4), batch(1, 8, 4)
    inputs[:4, 0], inputs[4:, 0] = -1.0, 1.0
    parted._part_bytes = 4 * inputs[0].nbytes  # the first part is computed, the second is not
    torch.testing.assert_close(parted.backward(inputs, grads), whole.backward(inputs, grads))
    assert later.refused == 1
    torch.testing.assert_close(values(parted), values(whole))


SGD = ExpertRule(partial(torch.optim.SGD, lr=1.0))


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.03), (torch.float16, 0.003)])
def test_an_expert_computes_in_16_bits_and_learns_in_32(dtype: torch.dtype, near: float) -> None:
    seen = []
    exact, one = expert(rule=SGD), Expert("ffn.0", FeedForward(4, 8), SGD, (4,), dtype=dtype)
    one.module.load_state_dict(exact.state_dict()["module"])
    one.module.get_submodule("layers.0").register_forward_hook(lambda *found: seen.append(found[2].dtype))
    assert (one.forward(batch(0)) - exact.forward(batch(0))).abs().max() < near
    changes = one.backward(batch(0), batch(1))
    assert (
        changes.dtype == torch.float32 and (changes - exact.backward(batch(0), batch(1))).abs().max() < near
    )
    torch.testing.assert_close(values(one), values(exact), atol=10 * near, rtol=0)
    assert seen == [dtype, dtype] and one.step == 1


@pytest.mark.parametrize("size", [1e-9, 1e-30, 1e4])
def test_gradients_that_float16_rounds_to_zero_or_infinity_are_scaled(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, one = expert(rule=SGD), Expert("ffn.0", FeedForward(4, 8), SGD, (4,), dtype=torch.float16)
    one.module.load_state_dict(exact.state_dict()["module"])
    grads = size * batch(1)
    wanted = exact.backward(batch(0), grads) / size
    assert (one.backward(batch(0), grads) / size - wanted).abs().max() < 0.01
    moved = {name: value.clone() for name, value in values(one).items()}
    for name, value in values(exact).items():
        assert (moved[name] - value).abs().max() < 0.1 * size + 1e-6
    monkeypatch.setattr(one, "_loss_scale", lambda grads: 1.0)
    if size < 1:
        inner = values(one)["layers.0.weight"]
        one.backward(batch(0), grads)
        assert torch.equal(values(one)["layers.0.weight"], inner), "unscaled, nothing is left of it"


def test_a_gradient_that_is_not_finite_in_float16_is_no_step() -> None:
    one = Expert("ffn.0", nn.Linear(4, 4), SGD, (4,), dtype=torch.float16)
    before = values(one)
    for inputs, grads in ((1e6 * batch(0), batch(1)), (batch(0), 3e38 * batch(1).sign())):
        with pytest.raises(FloatingPointError, match="not finite"):
            one.backward(inputs, grads)
        assert equal(values(one), before) and one.step == 0
    assert one.backward(batch(0), 0 * batch(1)).abs().max() == 0


def test_auto_is_bfloat16_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for has, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert dtype_named("auto", gpu) == dtype
        assert dtype_named("auto", torch.device("cpu")) == dtype_named("float32", gpu) == torch.float32


def test_devices_are_all_gpus_or_those_with_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_named(["cpu", "cpu"]) == (torch.device("cpu"),)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [*map(str, devices_named("all"))] == ["cuda:0", "cuda:1"]
    assert [*map(str, devices_named(["cuda:1", "cpu"]))] == ["cuda:1", "cpu"]
    for wrong in ("cuda:0", ["cuda:2"], [], ["cuda"]):
        with pytest.raises(
            ValueError, match=r"pass \"all\", or a list of some of \['cpu', 'cuda:0', 'cuda:1'\]"
        ):
            devices_named(wrong)
    with pytest.raises(ValueError, match="dtype='int8': pass"):
        dtype_named("int8", torch.device("cpu"))
