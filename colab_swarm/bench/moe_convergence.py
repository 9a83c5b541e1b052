"""Figure 4 (bottom) of Learning@home: the cost of stale updates and failures, with few and with many experts.

Digits (scikit-learn's, 8 x 8 pixels, scaled to [0, 1]) instead of MNIST, so everything is smaller:
Linear 64 -> 64, four layers of 64, LayerNorm, Linear 64 -> 10. A layer is a mixture, top 4 of E
feed-forward experts of width 64, or for the baseline one such block of width 128, which computes
about as much. Low delay: 16 trainers whose batch takes 0.1 s on average; high: 64 and 1 s.
Computing takes no virtual time, so the number of trainers alone determines the staleness.

Experts are the product's feed-forward block, computed many at a time. The baseline's gradients are
all taken from one copy and applied when the batch ends. With experts, each layer's forward and
backward takes an eighth of the delay, an expert computes with its weights at that moment and steps
at once; stem, gating and head are updated at the end. ``--faithful`` follows the published
emulator: the gating is never trained, experts' updates are never delayed, and the learning rate is
constant instead of falling to 0.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from colab_swarm.bench.harness import BenchReport, drawn, torch_threads
from colab_swarm.moe.expert import FeedForward, free_bytes
from colab_swarm.moe.layer import Gating, mixing_weights, priorities
from colab_swarm.sim import run_virtual

DIM, LAYERS, K, CLASSES = 64, 4, 4, 10
BATCH, LR, BETAS, EPS = 4, 1e-3, (0.9, 0.999), 1e-8
TEST_SAMPLES = 360


@dataclass(frozen=True)
class ConvergenceScene:
    """One run; ``sides`` is the grid of each layer, empty for the baseline."""

    sides: tuple[int, ...]
    trainers: int
    delay_s: float
    failures: float = 0.0
    batches: int = 1600
    evaluations: int = 20
    faithful: bool = False


DELAYS = {"low": (16, 0.1), "high": (64, 1.0)}
MODELS: dict[str, tuple[int, ...]] = {"ffn": (), "e16": (4, 4), "e64": (8, 8), "e1024": (32, 32)}
MOST_BYTES = 4 << 30


def digits() -> tuple[Tensor, Tensor]:
    """Return all digits in a random order that is always the same; the first `TEST_SAMPLES` are for tests."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


class Experts:
    """One layer's experts, a row of parameters each with its own Adam (amsgrad)."""

    def __init__(self, count: int) -> None:
        made = [FeedForward(DIM, DIM) for _ in range(count)]
        self._block = made[0]
        rows = [nn.utils.parameters_to_vector(one.parameters()) for one in made]
        self._rows_EP = torch.stack(rows).detach()
        self._mean_EP, self._square_EP, self._most_EP = (torch.zeros_like(self._rows_EP) for _ in range(3))
        self._steps_E = torch.zeros(count)
        self.lr = LR

    def _compute(self, row_P: Tensor, x_D: Tensor) -> Tensor:
        parameters = dict(self._block.named_parameters())
        parts = torch.split(row_P, [one.numel() for one in parameters.values()])
        mine = {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}
        y_D: Tensor = functional_call(self._block, mine, (x_D,))
        return y_D

    def forward(self, x_BD: Tensor, experts_BK: Tensor) -> Tensor:
        """Return (B, K, D), the outputs of each sample's experts."""
        batch, k = experts_BK.shape
        with torch.no_grad():
            rows = self._rows_EP[experts_BK.ravel()]
            return vmap(self._compute)(rows, x_BD.repeat_interleave(k, 0)).view(batch, k, DIM)

    def backward(self, x_BD: Tensor, experts_BK: Tensor, grads_BKD: Tensor, used_BK: Tensor) -> Tensor:
        """Return the inputs' gradient; only the experts in ``used_BK`` learn, the others count as zero."""
        sample, slot = used_BK.nonzero(as_tuple=True)
        if not len(sample):
            return torch.zeros_like(x_BD)
        experts = experts_BK[sample, slot]
        rows, x = self._rows_EP[experts].requires_grad_(), x_BD[sample].requires_grad_()
        outputs = vmap(self._compute)(rows, x)
        row_grads, x_grads = torch.autograd.grad(outputs, (rows, x), grads_BKD[sample, slot])
        unique, place = torch.unique(experts, return_inverse=True)
        self._step(unique, torch.zeros(len(unique), rows.shape[1]).index_add_(0, place, row_grads))
        return torch.zeros_like(x_BD).index_add_(0, sample, x_grads)

    def _step(self, rows: Tensor, grads: Tensor) -> None:
        self._steps_E[rows] += 1
        steps = self._steps_E[rows, None]
        mean = self._mean_EP[rows].lerp(grads, 1 - BETAS[0])
        square = self._square_EP[rows].lerp(grads.square(), 1 - BETAS[1])
        most = torch.maximum(self._most_EP[rows], square)
        self._mean_EP[rows], self._square_EP[rows], self._most_EP[rows] = mean, square, most
        scale = (most / (1 - BETAS[1] ** steps)).sqrt() + EPS
        self._rows_EP[rows] -= self.lr * mean / (1 - BETAS[0] ** steps) / scale


class Trunk(nn.Module):
    def __init__(self, sides: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, DIM), nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))
        blocks = 0 if sides else LAYERS
        self.blocks = nn.Sequential(*(FeedForward(DIM, 2 * DIM) for _ in range(blocks)))
        self.gates = nn.ModuleList(Gating(DIM, sides) for _ in range(LAYERS if sides else 0))


class Mixing:
    """One layer's forward and backward pass for one batch."""

    def __init__(self, gate: nn.Module, experts: Experts, sides: tuple[int, ...], x_BD: Tensor) -> None:
        self._experts = experts
        self._x_BD = x_BD.detach().requires_grad_()
        scores = gate(self._x_BD)
        every = torch.cartesian_prod(*(torch.arange(side) for side in sides)).view(-1, len(sides))
        all_BE = priorities(scores, every.expand(len(x_BD), -1, -1))
        self._logits_BK, self._chosen_BK = all_BE.topk(min(K, len(every)), dim=1)

    def forward(self, failed: Tensor) -> Tensor:
        """Return the mixture of the experts that answer, i.e. not ``failed`` (one flag per expert of the layer)."""
        self._answered_BK = ~failed[self._chosen_BK]
        outputs_BKD = self._experts.forward(self._x_BD.detach(), self._chosen_BK)
        self._outputs_BKD = outputs_BKD.requires_grad_()
        weights_BK = mixing_weights(self._logits_BK, self._answered_BK)
        mixed_BD = (self._outputs_BKD * weights_BK[:, :, None]).sum(1)
        self.mixed_BD = torch.where(self._answered_BK.any(1, keepdim=True), mixed_BD, self._x_BD)
        return self.mixed_BD.detach().requires_grad_()

    def experts_backward(self, failed: Tensor) -> Tensor:
        """Go back through the experts, which learn; return the inputs' whole gradient."""
        grads_BKD, x_grads_BD = self._outputs_BKD.grad, self._x_BD.grad
        assert grads_BKD is not None and x_grads_BD is not None
        used_BK = self._answered_BK & ~failed[self._chosen_BK]
        return x_grads_BD + self._experts.backward(self._x_BD.detach(), self._chosen_BK, grads_BKD, used_BK)


class ConvergenceEmulation:
    """Trainers of one model on the virtual clock."""

    def __init__(self, scene: ConvergenceScene, seed: int) -> None:
        torch.manual_seed(seed)
        self._scene, self._rng = scene, random.Random(seed)
        self._chance = torch.Generator().manual_seed(seed)
        self._inputs, self._labels = digits()
        self._trunk, self._experts = Trunk(scene.sides), math.prod(scene.sides)
        self._trunk.gates.requires_grad_(not scene.faithful)
        self._layers = [Experts(self._experts) for _ in self._trunk.gates]
        trained = [parameter for parameter in self._trunk.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=LR, amsgrad=True, foreach=True)
        self._taken = self._applied = 0
        self._accuracies: list[float] = []

    def run(self) -> list[float]:
        """Train until no batch is left; return the accuracy on unseen digits, at equal distances over the run."""
        run_virtual(self._run())
        return self._accuracies

    async def _run(self) -> None:
        await asyncio.gather(*(self._trainer() for _ in range(self._scene.trainers)))

    async def _trainer(self) -> None:
        replica = copy.deepcopy(self._trunk)
        while self._taken < self._scene.batches:
            self._taken += 1
            replica.load_state_dict(self._trunk.state_dict())
            rows = torch.tensor([self._rng.randrange(TEST_SAMPLES, len(self._labels)) for _ in range(BATCH)])
            x, y = self._inputs[rows], self._labels[rows]
            if self._layers:
                await self._through_experts(replica, x, y)
            else:
                cross_entropy(replica.head(replica.blocks(replica.stem(x))), y).backward()  # type: ignore[no-untyped-call]
                await self._delay(1.0)
            for parameter, copied in zip(self._trunk.parameters(), replica.parameters(), strict=True):
                parameter.grad, copied.grad = copied.grad, None
            self._update()

    async def _through_experts(self, replica: Trunk, x: Tensor, y: Tensor) -> None:
        share = 0.0 if self._scene.faithful else 1 / (2 * LAYERS)
        h = stem = replica.stem(x)
        passed: list[Mixing] = []
        for gate, experts in zip(replica.gates, self._layers, strict=True):
            passed.append(Mixing(gate, experts, self._scene.sides, h))
            await self._delay(share)
            h = passed[-1].forward(self._failed())
        cross_entropy(replica.head(h), y).backward()  # type: ignore[no-untyped-call]
        grads = h.grad
        for mixing in reversed(passed):
            mixing.mixed_BD.backward(grads)  # type: ignore[no-untyped-call]
            await self._delay(share)
            grads = mixing.experts_backward(self._failed())
        stem.backward(grads)
        if self._scene.faithful:
            await self._delay(1.0)

    def _failed(self) -> Tensor:
        return torch.rand(self._experts, generator=self._chance) < self._scene.failures

    async def _delay(self, share: float) -> None:
        if share:
            await asyncio.sleep(self._rng.expovariate(1 / (share * self._scene.delay_s)))

    def _update(self) -> None:
        self._optimizer.step()
        self._applied += 1
        if not self._scene.faithful:  # at a constant rate, single evaluations at the end vary too much
            lr = LR * (1 - self._applied / self._scene.batches)
            for one in (*self._optimizer.param_groups, *map(vars, self._layers)):
                one["lr"] = lr
        if self._applied % (self._scene.batches // self._scene.evaluations) == 0:
            self._accuracies.append(self._evaluate())

    @torch.no_grad()
    def _evaluate(self) -> float:
        h = self._trunk.blocks(self._trunk.stem(self._inputs[:TEST_SAMPLES]))
        for gate, experts in zip(self._trunk.gates, self._layers, strict=True):
            nothing_failed = torch.zeros(self._experts, dtype=torch.bool)
            h = Mixing(gate, experts, self._scene.sides, h).forward(nothing_failed)
        return float((self._trunk.head(h).argmax(1) == self._labels[:TEST_SAMPLES]).float().mean())


@dataclass
class ConvergenceCurves(BenchReport):
    """The report, and per scene the accuracy of each seed over the run."""

    curves: dict[str, list[list[float]]] = field(default_factory=dict)


def scenes(like: ConvergenceScene, most_experts: int) -> Iterator[tuple[str, ConvergenceScene]]:
    models = {model: sides for model, sides in MODELS.items() if math.prod(sides) <= most_experts}
    for delay, (trainers, delay_s) in DELAYS.items():
        for model, sides in models.items():
            scene = replace(like, sides=sides, trainers=trainers, delay_s=delay_s)
            yield f"{model}_{delay}", scene
            if delay == "low" and sides:
                yield f"{model}_failures", replace(scene, failures=0.1)


def run(quick: bool = False, faithful: bool = False) -> ConvergenceCurves:
    report = ConvergenceCurves("moe-convergence", quick, "moe")
    seeds, batches, evaluations = (1, 240, 6) if quick else (3, 1600, 20)
    most_experts = 64 if quick or free_bytes() < MOST_BYTES else 1024
    like, last = ConvergenceScene((), 1, 0.0, 0.0, batches, evaluations, faithful), max(1, evaluations // 6)
    with torch_threads(1):  # tensors are tiny
        for name, scene in scenes(like, most_experts):
            curves = [ConvergenceEmulation(scene, seed).run() for seed in range(seeds)]
            report.curves[name] = curves
            for kind, begin in (("final", -last), ("mean", 0)):  # a single evaluation is noisy
                percent = [100 * statistics.mean(curve[begin:]) for curve in curves]
                report.add(f"{name}_{kind}_accuracy", statistics.mean(percent), "%", f"{seeds} seeds")
                if seeds > 1:
                    report.add(f"{name}_{kind}_deviation", statistics.stdev(percent), "points")
    _compare(report)
    return report


def _compare(report: ConvergenceCurves) -> None:
    values = report.figures
    for model, sides in MODELS.items():
        if f"{model}_low" in report.curves:
            lost = values[f"{model}_low_mean_accuracy"] - values[f"{model}_high_mean_accuracy"]
            report.add(f"{model}_lost_to_delay", lost, "points", "of the mean accuracy over the run")
            if sides:
                lost = values[f"{model}_low_final_accuracy"] - values[f"{model}_failures_final_accuracy"]
                report.add(f"{model}_lost_to_failures", lost, "points", "10 % of calls fail; <= 2 wanted")


def plot(report: BenchReport, path: str) -> None:
    assert isinstance(report, ConvergenceCurves)
    with drawn(path, (12, 4), 3, sharey=True) as panels:
        for axes, scene in zip(panels, ("low", "high", "failures"), strict=True):
            axes.set(title=scene, xlabel="part of the run", ylabel="accuracy on unseen digits")
            for model in MODELS:
                if curves := report.curves.get(f"{model}_{scene}"):
                    axes.plot(torch.tensor(curves).mean(0), label=model)
