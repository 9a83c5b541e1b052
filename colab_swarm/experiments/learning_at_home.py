"""Figure 4 of Learning@home: throughput under delays, the cost of stale updates and failures.

*moe-throughput* (top): the throughput that remains when the answer of each block is delayed. A model is
a chain of blocks, each an expert behind an encrypted link on loopback. The answer of each block
waits for an exponentially distributed time, in real time. *Ours* has many batches in flight.
*Model-parallel* is one batch that goes from block to block with the same delays and no network.
Only the forward pass is measured, as in the paper; blocks are small, for a machine without a GPU.

Checkpointing (appendix C): batches go forward and backward through the Transformer blocks, at 100 ms. Our
hosts keep nothing between the two passes. A host that keeps activations can admit only as many batches as
its memory holds. This is emulated by limiting the batches in flight to this number. Their backward pass still computes
forward again, so the factor is too large, at most by a third. The paper does not say how many
batches fit ("a few"), so the factor is measured for several numbers.

*moe-convergence* (bottom): digits (8 x 8 pixels, scaled to [0, 1]) instead of MNIST, so the model
is smaller, too: Linear 64 -> 64, four layers of 64, LayerNorm, Linear 64 -> 10. A layer is a mixture of E
feed-forward experts of width 64, of which the top 4 are used. In the baseline, a layer is one such block of width 128,
which computes about as much. With low delay there are 16 trainers, and a batch takes 0.1 s on average; with high delay
there are 64 trainers, and a batch takes 1 s. Computing takes no virtual time, so only the number of trainers determines
the staleness.
Experts are the package's feed-forward block, and many are computed together.

All gradients of the baseline are computed with one copy and applied when the batch ends. With experts, the forward and
the backward pass of each layer take an eighth of the delay. An expert computes with its weights at that moment, and
steps immediately. Stem, gating and head are updated at the end. ``faithful=True`` follows the published emulator: the
gating is never trained, the experts' updates are never delayed, and the learning rate is constant.

*moe-transfers* (appendix D): the same with tensors of 8 bits between trainers and experts, in both
directions and both passes, encoded for each expert as in the package.
"""

import asyncio
import copy
import itertools
import math
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from colab_swarm.dht.service import DHT, RunServices
from colab_swarm.events import EventLog
from colab_swarm.experiments.report import Lines, Report, draw, reports
from colab_swarm.moe.blocks import FeedForward, TransformerBlock
from colab_swarm.moe.calls import ExpertCalls, ExpertServer
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import BatchLimits, Expert, ExpertRule
from colab_swarm.moe.grid import ExpertInfo
from colab_swarm.moe.layer import Gating, mixing_weights, priorities
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.recipes.classify import classification_job, shape_of
from colab_swarm.runtime import Runtime, own_loop
from colab_swarm.sim import run_virtual
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.tensors.device import to_host


@dataclass(frozen=True)
class Chain:
    """Blocks of one kind: how to make one, the shape of a sample, the samples per batch and per merged batch."""

    name: str
    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int
    merged: int
    blocks: int = 8
    in_flight: int = 240  # number of batches in flight
    seconds: float = 2.0  # duration of each measurement

    def samples_per_s(self, block_calls: int, seconds: float) -> float:
        return block_calls * self.batch / self.blocks / seconds


CHAINS = (
    Chain("ffn", partial(FeedForward, 256, 1024), (256,), batch=80, merged=320),
    Chain("transformer", partial(TransformerBlock, 64, 4), (48, 64), batch=6, merged=24),
)
RATIOS = (
    ("retained", "200ms", "0ms"),
    ("model_parallel_retained", "model_parallel_200ms", "model_parallel_0ms"),
    ("vs_model_parallel", "200ms", "model_parallel_200ms"),
)
"""Each ratio has a name, a rate, and the rate by which it is divided."""


@reports("moe_throughput")
def run_throughput(report: Report) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # one core is for the network
    for chain in CHAINS:
        with asyncio.Runner(loop_factory=own_loop) as runner:
            runner.run(_measure_chain(report, chain))
    for key, text in (("retained", ">= 0.9 wanted"), ("vs_model_parallel", ">= 40 wanted; published 41.6")):
        worst = min(report.figures[f"{chain.name}_{key}_at_200ms"] for chain in CHAINS)
        report.add(f"{key}_at_200ms", worst, "times", f"{text}; the worse of both kinds")


async def _measure_chain(report: Report, chain: Chain) -> None:
    host, guest = [await Node.start(Identity(), NodeSettings(host="127.0.0.1")) for _ in range(2)]
    rule = ExpertRule(partial(torch.optim.SGD, lr=0.0))  # only forward is called, so the expert never steps
    experts = [Expert(f"{chain.name}.{i}", chain.make(), rule, chain.sample) for i in range(chain.blocks)]
    limits = BatchLimits(chain.merged, max_batch_bytes=512 << 20, max_held_bytes=4 << 30)
    server = ExpertServer(host, EventLog(), limits)
    for expert in experts:
        server.add(expert)
    infos = [ExpertInfo(expert.uid, host.contact, chain.sample, 0, 0.0) for expert in experts]
    calls = calls_of(guest, timeout_s=600.0)
    # a machine's speed drifts, so each turn measures all delays, and ratios are computed per turn
    turns = 1 if report.quick else 5
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        for ms in (0, 200) if report.quick else (0, 50, 100, 150, 200):
            rates[f"{ms}ms"].append(await _travelled(chain, calls, infos, ms / 1000))
            passed_on = await _passed_on(chain, server, experts, ms / 1000)
            rates[f"model_parallel_{ms}ms"].append(passed_on)
    if chain.name == "transformer":
        await _measure_checkpointing(report, chain, calls, infos)
    for closing in (server, host, guest):
        await closing.close()
    for name, measured in rates.items():
        note = f"{chain.in_flight} batches in flight, {turns} turns"
        report.add_seeds(f"{chain.name}_{name}_samples_per_s", measured, "samples/s", note)
    for key, rate, base in RATIOS:
        ratios = [one / other for one, other in zip(rates[rate], rates[base], strict=True)]
        report.add_seeds(f"{chain.name}_{key}_at_200ms", ratios, "times", f"{turns} turns")


async def _measure_checkpointing(
    report: Report, chain: Chain, calls: ExpertCalls, infos: list[ExpertInfo]
) -> None:
    whole = await _travelled(chain, calls, infos, 0.1, both_ways=True)
    report.add("transformer_both_ways_100ms_samples_per_s", whole, "samples/s")
    for room in (2, 4) if report.quick else (1, 2, 4, 16):
        rate = await _travelled(replace(chain, in_flight=room), calls, infos, 0.1, both_ways=True)
        note = f"with checkpointing, against memory for {room} batches; published: about 9 for 'a few'"
        report.add(f"checkpointing_factor_room_{room}", whole / rate, "times", note)


def calls_of(node: Node, *, timeout_s: float) -> ExpertCalls:
    dht = DHT(node, random.Random(0))
    rng = random.Random(0)
    directory = Directory(RunServices(node, dht, EventLog(), rng, ""))
    return ExpertCalls(node, directory, Runtime(), timeout_s=timeout_s)


async def _travelled(
    chain: Chain, calls: ExpertCalls, infos: list[ExpertInfo], delay_s: float, *, both_ways: bool = False
) -> float:
    """Return the throughput of many batches that go through the chain together, and back if ``both_ways``."""
    inputs = np.random.default_rng(0).standard_normal((chain.batch, *chain.sample), np.float32)
    done = 0
    # always the first inputs, because the output of the block before would grow without end
    path = [partial(calls.forward, info, inputs) for info in infos]
    if both_ways:
        path += [partial(calls.backward, info, inputs, inputs) for info in reversed(infos)]

    async def travel(rng: random.Random) -> None:
        nonlocal done
        for call in itertools.islice(itertools.cycle(path), rng.randrange(len(path)), None):
            await call()
            done += 1
            await asyncio.sleep(_exponential(delay_s, rng))

    async with asyncio.TaskGroup() as group:
        travels = [group.create_task(travel(random.Random(seed))) for seed in range(chain.in_flight)]
        await asyncio.sleep(max(1.0, 5 * delay_s))  # wait until the batches are spread over the chain
        before = done
        began = time.perf_counter()
        await asyncio.sleep(chain.seconds)
        rate = chain.samples_per_s(done - before, time.perf_counter() - began) * len(infos) / len(path)
        for task in travels:
            task.cancel()
    return rate


async def _passed_on(chain: Chain, server: ExpertServer, experts: list[Expert], delay_s: float) -> float:
    """Return the throughput of one batch that goes from block to block."""
    rng = random.Random(0)
    inputs = torch.randn(chain.batch, *chain.sample)
    done = 0
    began = time.perf_counter()
    luck_s = 0.0
    while time.perf_counter() - began < 2 * chain.seconds:
        expert = experts[done % len(experts)]
        to_host(await server.run(expert.device, partial(expert.forward, inputs)))
        done += 1
        wait_s = _exponential(delay_s, rng)
        luck_s += delay_s - wait_s  # there are only a few dozen random delays, so their mean is used instead
        await asyncio.sleep(wait_s)
    return chain.samples_per_s(done, time.perf_counter() - began + luck_s)


def _exponential(mean_s: float, rng: random.Random) -> float:
    return rng.expovariate(1 / mean_s) if mean_s else 0.0


DIM = 64
LAYERS = 4
K = 4
CLASSES = 10
BATCH = 4
LR = 1e-3
TEST_SAMPLES = 360  # the first ones


@dataclass(frozen=True)
class ConvergenceScene:
    """Settings of one run; ``sides`` is the grid of each layer, empty for the baseline."""

    sides: tuple[int, ...]
    trainers: int
    delay_s: float
    failures: float = 0.0
    batches: int = 1600
    evaluations: int = 20
    faithful: bool = False
    data: str = "digits"
    codec: str = "float32"  # of tensors between trainers and experts


DELAYS = {"low": (16, 0.1, 0.0), "failures": (16, 0.1, 0.1), "high": (64, 1.0, 0.0)}
"""Number of trainers, mean delay of a batch in seconds, and fraction of calls that fail."""
MODELS: dict[str, tuple[int, ...]] = {"ffn": (), "e16": (4, 4), "e64": (8, 8), "e1024": (32, 32)}


class Experts:
    """The experts of one layer and their optimizers. Only experts that are used have a gradient and step."""

    def __init__(self, count: int, codec: str = "float32") -> None:
        self.sent_bytes = 0  # from trainers to experts and back
        self._codec = codec_of(codec)
        self.blocks = [FeedForward(DIM, DIM) for _ in range(count)]
        self.optimizers = []
        for block in self.blocks:
            self.optimizers.append(torch.optim.Adam(block.parameters(), lr=LR, amsgrad=True, foreach=True))

    def forward(self, x_ND: Tensor, experts_N: Tensor) -> Tensor:
        """Return (N, D), the output of each sample's expert."""
        return self._sent(self._outputs(self._sent(x_ND, experts_N), experts_N), experts_N)

    def _outputs(self, x_ND: Tensor, experts_N: Tensor) -> Tensor:
        y_ND = torch.empty_like(x_ND)
        for expert in set(experts_N.tolist()):
            y_ND[experts_N == expert] = self.blocks[expert](x_ND[experts_N == expert])
        return y_ND

    def _sent(self, values_ND: Tensor, experts_N: Tensor) -> Tensor:
        """Return the values after encoding and decoding, if the samples of each expert are sent in one message."""
        if self._codec.name == "float32":
            self.sent_bytes += values_ND.nbytes
            return values_ND
        arrived_ND = torch.empty_like(values_ND)
        for expert in set(experts_N.tolist()):
            values = values_ND[experts_N == expert]
            payload = self._codec.encode(values.detach().numpy().ravel())
            self.sent_bytes += len(payload)
            decoded = self._codec.decode(payload, values.numel())
            arrived_ND[experts_N == expert] = torch.tensor(decoded).view(values.shape)
        return arrived_ND

    def backward(
        self, x_BD: Tensor, experts_BK: Tensor, grads_BKD: Tensor, used_BK: Tensor, lr: float = LR
    ) -> Tensor:
        """Return the gradient of the inputs; only the experts in ``used_BK`` learn, the gradient of others is zero."""
        sample, slot = used_BK.nonzero(as_tuple=True)
        experts_N = experts_BK[sample, slot]
        x_ND = self._sent(x_BD[sample], experts_N).requires_grad_()
        changes_BD = torch.zeros_like(x_BD)
        if len(sample):
            outputs_ND = self._outputs(x_ND, experts_N)
            outputs_ND.backward(self._sent(grads_BKD[sample, slot], experts_N))  # type: ignore[no-untyped-call]
            assert x_ND.grad is not None
            changes_BD.index_add_(0, sample, self._sent(x_ND.grad, experts_N))
        for expert in set(experts_BK[used_BK].tolist()):
            self.optimizers[expert].param_groups[0]["lr"] = lr
            self.optimizers[expert].step()
            self.optimizers[expert].zero_grad()
        return changes_BD


class Trunk(nn.Module):
    def __init__(self, pixels: int, sides: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Linear(pixels, DIM)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))
        self.blocks = nn.Sequential()
        self.gates = nn.ModuleList()
        for _ in range(LAYERS):
            if sides:
                self.gates.append(Gating(DIM, sides))
            else:
                self.blocks.append(FeedForward(DIM, 2 * DIM))


class Mixing:
    def __init__(self, gate: nn.Module, experts: Experts, sides: tuple[int, ...], x_BD: Tensor) -> None:
        self._experts = experts
        self._x_BD = x_BD.detach().requires_grad_()
        every = torch.cartesian_prod(*(torch.arange(side) for side in sides)).view(-1, len(sides))
        all_BE = priorities(gate(self._x_BD), every.expand(len(x_BD), -1, -1))
        self._logits_BK, self._chosen_BK = all_BE.topk(min(K, len(every)), dim=1)

    def forward(self, failed: Tensor) -> Tensor:
        """Return the mixture of the experts that answer, which are those not in ``failed`` (a flag per expert)."""
        self._answered_BK = ~failed[self._chosen_BK]
        with torch.no_grad():
            x_ND = self._x_BD.repeat_interleave(self._chosen_BK.shape[1], 0)
            outputs_ND = self._experts.forward(x_ND, self._chosen_BK.ravel())
        self._outputs_BKD = outputs_ND.view(*self._chosen_BK.shape, DIM).requires_grad_()
        weights_BK = mixing_weights(self._logits_BK, self._answered_BK)
        mixed_BD = (self._outputs_BKD * weights_BK[:, :, None]).sum(1)
        self.mixed_BD = torch.where(self._answered_BK.any(1, keepdim=True), mixed_BD, self._x_BD)
        return self.mixed_BD.detach().requires_grad_()

    def experts_backward(self, failed: Tensor, lr: float) -> Tensor:
        grads_BKD = self._outputs_BKD.grad
        x_grads_BD = self._x_BD.grad
        assert grads_BKD is not None and x_grads_BD is not None
        used_BK = self._answered_BK & ~failed[self._chosen_BK]
        return x_grads_BD + self._experts.backward(
            self._x_BD.detach(), self._chosen_BK, grads_BKD, used_BK, lr
        )


def _samples(data: str) -> tuple[Tensor, Tensor]:
    """Return pixels (n, pixels), 0 to 1, and labels (n,); the first `TEST_SAMPLES` are for the test."""
    if data == "digits":
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # always the same
        return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    job = classification_job(data, shape=shape_of(data))
    both = zip(job.validation(), job.data(), strict=True)
    pixels, labels = (np.concatenate([test[:TEST_SAMPLES], train]) for test, train in both)
    return torch.tensor(pixels).flatten(1) / 255, torch.tensor(labels)


class ConvergenceEmulation:
    def __init__(self, scene: ConvergenceScene, seed: int) -> None:
        torch.manual_seed(seed)
        self._scene = scene
        self._rng = random.Random(seed)
        self._chance = torch.Generator().manual_seed(seed)
        self._inputs, self._labels = _samples(scene.data)
        self._trunk = Trunk(self._inputs.shape[1], scene.sides)
        self._experts = math.prod(scene.sides)
        self._trunk.gates.requires_grad_(not scene.faithful)
        self.layers = [Experts(self._experts, scene.codec) for _ in self._trunk.gates]
        trained = [parameter for parameter in self._trunk.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=LR, amsgrad=True, foreach=True)
        self._taken = self._applied = 0
        self._accuracies: list[float] = []

    async def run(self) -> list[float]:
        """Train until no batch is left; return accuracies on unseen digits, measured at equal intervals."""
        await asyncio.gather(*(self._trainer() for _ in range(self._scene.trainers)))
        return self._accuracies

    async def _trainer(self) -> None:
        replica = copy.deepcopy(self._trunk)
        while self._taken < self._scene.batches:
            self._taken += 1
            replica.load_state_dict(self._trunk.state_dict())
            rows = torch.tensor([self._rng.randrange(TEST_SAMPLES, len(self._labels)) for _ in range(BATCH)])
            x = self._inputs[rows]
            y = self._labels[rows]
            if self.layers:
                await self._through_experts(replica, x, y)
            else:
                cross_entropy(replica.head(replica.blocks(replica.stem(x))), y).backward()  # type: ignore[no-untyped-call]
                await self._delay(1.0)
            for parameter, copied in zip(self._trunk.parameters(), replica.parameters(), strict=True):
                parameter.grad = copied.grad
                copied.grad = None
            self._update()

    async def _through_experts(self, replica: Trunk, x: Tensor, y: Tensor) -> None:
        share = 0.0 if self._scene.faithful else 1 / (2 * LAYERS)
        h = stem = replica.stem(x)
        passed: list[Mixing] = []
        for gate, experts in zip(replica.gates, self.layers, strict=True):
            passed.append(Mixing(gate, experts, self._scene.sides, h))
            await self._delay(share)
            h = passed[-1].forward(self._failed())
        cross_entropy(replica.head(h), y).backward()  # type: ignore[no-untyped-call]
        grads = h.grad
        for mixing in reversed(passed):
            mixing.mixed_BD.backward(grads)  # type: ignore[no-untyped-call]
            await self._delay(share)
            grads = mixing.experts_backward(self._failed(), self._optimizer.param_groups[0]["lr"])
        stem.backward(grads)
        if self._scene.faithful:
            await self._delay(1.0)

    def _failed(self) -> Tensor:
        return torch.rand(self._experts, generator=self._chance) < self._scene.failures

    async def _delay(self, share: float) -> None:
        if share:
            await asyncio.sleep(_exponential(share * self._scene.delay_s, self._rng))

    def _update(self) -> None:
        self._optimizer.step()
        self._applied += 1
        if (
            not self._scene.faithful
        ):  # with a constant rate, single evaluations at the end would vary too much
            self._optimizer.param_groups[0]["lr"] = LR * (1 - self._applied / self._scene.batches)
        if self._applied % (self._scene.batches // self._scene.evaluations) == 0:
            self._accuracies.append(self._evaluate())

    @torch.no_grad()
    def _evaluate(self) -> float:
        h = self._trunk.blocks(self._trunk.stem(self._inputs[:TEST_SAMPLES]))
        for gate, experts in zip(self._trunk.gates, self.layers, strict=True):
            nothing_failed = torch.zeros(self._experts, dtype=torch.bool)
            h = Mixing(gate, experts, self._scene.sides, h).forward(nothing_failed)
        return float((self._trunk.head(h).argmax(1) == self._labels[:TEST_SAMPLES]).float().mean())


@reports("moe_convergence")
def run_convergence(report: Report, faithful: bool = False, data: str = "digits") -> None:
    """Report accuracies; ``data`` may be an ``.npz`` file of images, such as MNIST, see `classification_job`."""
    seeds = 3
    batches = 1600
    evaluations = 20
    models = dict(MODELS)
    if report.quick:
        seeds = 1
        batches = 240
        evaluations = 6
        del models["e1024"]
    scenes = {}
    for delay, times in DELAYS.items():
        for model, sides in models.items():
            # a model without experts has no experts that fail
            if sides or delay != "failures":
                scenes[f"{model}_{delay}"] = ConvergenceScene(
                    sides, *times, batches, evaluations, faithful, data
                )
    # tensors are tiny
    torch.set_num_threads(1)
    for name, scene in scenes.items():
        curves = [run_virtual(ConvergenceEmulation(scene, seed).run()) for seed in range(seeds)]
        report.curves[name] = curves
        # a single evaluation is noisy
        for kind, begin in (("final", -max(1, evaluations // 6)), ("mean", 0)):
            percents = 100 * np.array(curves)[:, begin:].mean(1)
            report.add_seeds(f"{name}_{kind}_accuracy", percents.tolist(), "%")


@reports("moe_transfers")
def run_transfers(report: Report, data: str = "digits") -> None:
    """Report accuracy and bytes of a mixture whose tensors are sent in 32 and in 8 bits (appendix D)."""
    seeds = 1 if report.quick else 3
    batches = 100 if report.quick else 1600
    evaluations = 2 if report.quick else 20
    torch.set_num_threads(1)
    for codec in ("float32", "int8"):
        scene = ConvergenceScene(MODELS["e16"], *DELAYS["low"], batches, evaluations, data=data, codec=codec)
        emulations = [ConvergenceEmulation(scene, seed) for seed in range(seeds)]
        accuracies = [100 * statistics.mean(run_virtual(emulation.run())) for emulation in emulations]
        sent_bytes = sum(layer.sent_bytes for layer in emulations[0].layers)
        report.add_seeds(f"e16_low_{codec}_mean_accuracy", accuracies, "%")
        report.add(f"e16_low_{codec}_sent", sent_bytes / 1e6, "MB", f"{batches} batches, evaluations too")
    figures = report.figures
    lost = figures["e16_low_float32_mean_accuracy"] - figures["e16_low_int8_mean_accuracy"]
    report.add("int8_accuracy_drop", lost, "points", "of the mean accuracy, of 8 against 32 bits")
    saved = figures["e16_low_float32_sent"] / figures["e16_low_int8_sent"]
    report.add("int8_bytes_saved", saved, "times", "fewer bytes than in 32 bits")


def plot_convergence(report: Report, path: str) -> None:
    panels = []
    for delay in DELAYS:
        lines: Lines = {}
        for model in MODELS:
            curves = report.curves.get(f"{model}_{delay}")
            if curves:
                lines[model] = range(len(curves[0])), torch.tensor(curves).mean(0), "-"
        settings = {"title": delay, "xlabel": "part of the run", "ylabel": "accuracy on unseen digits"}
        panels.append((settings, lines))
    draw(path, panels)
