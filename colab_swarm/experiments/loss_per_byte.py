"""Loss per byte: one language model, trained on equal numbers of tokens with different ways to communicate.

A small GPT over bytes learns the sources of Python's standard library, at simulated peers that run the real
averaging. *loss* is the loss of the swarm's parameters in nats per byte, on text on which no peer has trained.
*bytes* are the bytes that a peer sent, without the protocol's own bytes. The ways are:

- synchronous gradients of 32, 16 and 8 bits;
- DiLoCo (arXiv 2311.08105), with a round every `LOCAL_STEPS` steps, in float32, and in int8 with error feedback;
- SparseLoCo (2508.15706), also with overlap, and with rounds ten times as *often*;
- SparseLoCo with these frequent rounds and Muon as the inner optimizer, as in MuLoCo (2505.23725).

In the quick preset, rounds come every 10 steps, and *often* is every 2 steps.

*waits* is the part of the time in which a peer does not compute. It is measured in other runs without a model:
gradients are noise, a step of all peers computes for `STEP_S`, and the connections are those of homes. For a large
model, its number of values and `STEP_S` are divided by the same factor. *lora* is one round of LoRA, rank 8 on q and v
of the shapes in `LORA`.

*adapted*: one process trains a model on the sources. Then peers train adapters of this model (LoRA, rank 8 on q, k and
v) on another text, Python's help pages in English. The figure is the loss on that text.
"""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

import colab_swarm as cs
from colab_swarm.events import Event, RoundFinished
from colab_swarm.experiments.report import Lines, Report, draw, reports
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.codecs import codec_of
from colab_swarm.training.communication import Communication
from colab_swarm.training.rounds import Rounds

LOCAL_STEPS = 30
STEP_S = 10.0
PEERS = 4
LORA = 22 * 8 * (2048 + 2048 + 2048 + 256)  # values, in a model of 1.1 billion (TinyLlama)
RANK = 8
# bytes of a text, and texts
LONG = 64
VALIDATION = 128
ROUNDS = 4  # rounds in `rest`; the first one is not measured
POINTS = 20  # points of a curve
LARGE = 350_000_000  # number of values of the large model


class Size(NamedTuple):
    layers: int
    width: int
    batch: int  # number of texts in a step
    steps: int
    local_steps: int
    rate: float


QUICK = Size(2, 64, 16, 40, 10, 2e-3)
FULL = Size(4, 128, 32, 600, LOCAL_STEPS, 2e-3)


def wait_trainers(swarm: Swarm, part: Rounds, count: int) -> None:
    while len(part.view.all) < count:
        swarm.runtime.call(part.refresh())


def ways(local_steps: int) -> dict[str, Communication]:
    often = Communication("sparseloco", local_steps=max(local_steps // 10, 2))
    return {
        "float32": Communication(),
        "float16": Communication("float16"),
        "int8": Communication("int8"),
        "diloco": Communication(local_steps=local_steps),
        "int8_diloco": Communication("int8", error_feedback=True, local_steps=local_steps),
        "sparse": Communication("sparseloco", local_steps=local_steps),
        "overlap": Communication("sparseloco", local_steps=local_steps, overlap=True),
        "often": often,
        "muon": often,  # with Muon as the inner optimizer, see `inner`
    }


def inner(way: str, net: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    if way == "muon":
        return cs.recipes.muon(net, lr=rate)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, weight_decay=0.1)


class GPT(torch.nn.Module):
    """A causal transformer over bytes (Radford 2019)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = torch.nn.Embedding(256, size.width)
        self.places = torch.nn.Embedding(LONG, size.width)
        heads = size.width // 32
        wide = 4 * size.width
        layer = torch.nn.TransformerEncoderLayer(
            size.width, heads, wide, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(size.width)
        self.head = torch.nn.Linear(size.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def loss(self, texts_BL: torch.Tensor) -> torch.Tensor:
        given_BL = texts_BL[:, :-1]
        wanted_BL = texts_BL[:, 1:]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LONG, device=given_BL.device)
        hidden = self.bytes(given_BL) + self.places.weight
        hidden = self.blocks(hidden, mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), wanted_BL.flatten())


@cache
def text() -> torch.Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = bytearray()
    for file in files:
        data += file.read_bytes()
    return torch.frombuffer(data, dtype=torch.uint8)


@cache
def help_pages() -> torch.Tensor:
    pages = "".join(topics.topics.values())
    return torch.frombuffer(bytearray(pages.encode()), dtype=torch.uint8)


def texts(seed: int, count: int, *, unseen: bool = False, of: torch.Tensor | None = None) -> torch.Tensor:
    """Return texts (count, LONG + 1) from the first nine tenths of the data or, if ``unseen``, from the last tenth."""
    of = text() if of is None else of
    cut = len(of) * 9 // 10
    low, high = (cut, len(of) - LONG) if unseen else (0, cut - LONG)
    begins = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed))
    return of[begins[:, None] + torch.arange(LONG + 1)].long()


class LowRank(torch.nn.Module):
    """A frozen matrix plus a trained one of rank 8 (LoRA, arXiv 2106.09685), with alpha = 16."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(RANK, matrix.shape[1]) / math.sqrt(matrix.shape[1]))
        self.up = torch.nn.Parameter(torch.zeros(matrix.shape[0], RANK))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix + 2.0 * self.up @ self.down


@cache
def base(size: Size) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that one process has trained on the sources."""
    net = GPT(size)
    adam = inner("adamw", net, size.rate)
    for step in range(size.steps):
        adam.zero_grad()
        net.loss(texts(step, size.batch)).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return net.state_dict()


def adapter(size: Size) -> GPT:
    net = GPT(size)
    net.load_state_dict(base(size))
    net.requires_grad_(False)
    for layer in net.blocks.layers:
        weights = layer.self_attn.in_proj_weight
        torch.nn.utils.parametrize.register_parametrization(
            layer.self_attn, "in_proj_weight", LowRank(weights)
        )
    return net


class Outcome(NamedTuple):
    loss: float
    sent_bytes: float  # by a peer, mean
    curve: list[tuple[int, float, float]]  # steps, bytes sent and loss, `POINTS` times, of one peer


def train(way: str, size: Size, peers: int, seed: int, of: torch.Tensor | None = None) -> Outcome:
    """Train on the sources or, with an adapter only, on another text."""
    communication = ways(size.local_steps)[way]
    micro = size.batch // peers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unseen = texts(0, VALIDATION, unseen=True, of=of).to(device)

    def work(swarm: Swarm) -> Outcome:
        events = list[Event]()
        swarm.events.listen(events.append)
        net = (GPT if of is None else adapter)(size).to(device)
        optimizer = swarm.optimizer(
            inner(way, net, size.rate),
            target_batch_size=size.batch,
            batch_size=micro,
            communication=communication,
        )
        wait_trainers(swarm, optimizer.rounds, peers)
        own = 1000 * int.from_bytes(swarm.id[:4], "big") + 10**15 * seed
        batch = 0
        steps = 0
        curve = list[tuple[int, float, float]]()

        def look() -> None:
            sent = sent_bytes(events)
            with torch.no_grad():
                curve.append((steps, sent, net.loss(unseen).item()))

        while steps < size.steps:
            loss = net.loss(texts(own + batch, micro, of=of).to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(loss=loss.detach())
            batch += 1
            steps = optimizer.global_step * communication.local_steps
            if steps >= (len(curve) + 1) * size.steps / POINTS:
                look()
        # this removes the peer's own steps since the last round
        optimizer.close()
        look()
        return Outcome(curve[-1][2], curve[-1][1], curve)

    with cs.simulate(peers, network="lan", seed=seed, samples_per_s=micro / STEP_S) as simulation:
        outcomes = list(simulation.run(work).values())
    return mean_outcome(outcomes)


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the means of the outcomes, and the curve of the first one."""
    loss = statistics.mean(outcome.loss for outcome in outcomes)
    sent = statistics.mean(outcome.sent_bytes for outcome in outcomes)
    return Outcome(loss, sent, outcomes[0].curve)


def sent_bytes(events: Iterable[Event]) -> int:
    """Return the bytes that a peer sent in its rounds."""
    return sum(event.sent_bytes for event in events if isinstance(event, RoundFinished))


def rest(communication: Communication, numel: int, scale: int = 1) -> tuple[float, float]:
    """Return the part of the time in which a peer does not compute, and the bytes that it sends per round."""
    numel = numel // scale
    step_s = STEP_S / scale

    def work(swarm: Swarm) -> tuple[float, int]:
        net = torch.nn.Linear(numel // 8, 8, bias=False)
        # equal at all peers, so that no peer loads the state of another
        torch.nn.init.zeros_(net.weight)
        sgd = torch.optim.SGD(net.parameters(), lr=1e-6)
        noise = np.random.default_rng(swarm.id[0])
        optimizer = swarm.optimizer(sgd, target_batch_size=PEERS, communication=communication)
        wait_trainers(swarm, optimizer.rounds, PEERS)
        gradient = torch.from_numpy(noise.normal(size=numel).astype(np.float32))
        batches = 0
        began = 0.0
        begun = 0
        while optimizer.global_step < ROUNDS:
            if optimizer.global_step == 1 and not began:
                began = swarm.runtime.time()
                begun = batches
            net.weight.grad = gradient.view_as(net.weight)
            optimizer.step(samples=1)
            batches += 1
        return (batches - begun) * step_s / (swarm.runtime.time() - began), batches

    with cs.simulate(PEERS, network="home", samples_per_s=1 / step_s) as simulation:
        computed = [share for share, _ in simulation.run(work).values()]
        sent = []
        for swarm in simulation.swarms.values():
            # without the first round, which waits until all peers have joined
            sent += [event.sent_bytes for event in swarm.events.recent(RoundFinished)[1:]]
    return 1 - statistics.mean(computed), statistics.mean(sent)


@reports("loss_per_byte")
def run(report: Report) -> None:
    size = FULL
    counts: tuple[int, ...] = (4, 8)
    seeds = 3
    if report.quick:
        size = QUICK
        counts = (4,)
        seeds = 1
    for peers in counts:
        for name in ways(size.local_steps):
            outcomes = [train(name, size, peers, seed) for seed in range(seeds)]
            mean = mean_outcome(outcomes)
            spread = ""
            if seeds > 1:
                losses = [outcome.loss for outcome in outcomes]
                spread = f"{min(losses):.3f} to {max(losses):.3f}"
            report.add(f"{name}_{peers}_loss", mean.loss, "nats a byte", spread)
            report.add(f"{name}_{peers}_mb", mean.sent_bytes / 1e6, "MB")
            report.curves[f"{name}, {peers} peers"] = mean.curve
    figures = report.figures
    for name in ("sparse", "often", "muon", "int8_diloco"):
        fewer = figures[f"float32_{PEERS}_mb"] / figures[f"{name}_{PEERS}_mb"]
        loss = figures[f"{name}_{PEERS}_loss"] / figures[f"float32_{PEERS}_loss"]
        report.add(f"{name}_vs_float32_bytes", fewer, "times fewer", ">= 100 wanted")
        report.add(f"{name}_vs_float32_loss", loss, "", "<= 1.02 wanted")
    smaller = 4 * LARGE / codec_of("sparseloco").encoded_bytes(LARGE)
    report.add("sparse_contribution_smaller", smaller, "times", "than float32, one way")
    net = adapter(size)
    with torch.no_grad():
        before = net.loss(texts(0, VALIDATION, unseen=True, of=help_pages())).item()
    report.add("adapted_before_loss", before, "nats a byte")
    for name in ("float32", "diloco", "sparse"):
        outcome = train(name, size, PEERS, 0, help_pages())
        sent = f"{outcome.sent_bytes / 1000:,.0f} kB"
        report.add(f"adapted_{name}_loss", outcome.loss, "nats a byte", sent)
    report_waits(report)


def report_waits(report: Report) -> None:
    """Report the waits of models of 350 M values on home connections, of a smaller one in dense rounds, and of LoRA."""
    scale = 200 if report.quick else 20
    of = ways(LOCAL_STEPS)
    for name in ("float32", "sparse", "overlap"):
        waits, _ = rest(of[name], 350_000_000, scale)
        report.add(f"waits_350m_{name}", waits, "of the time", "" if name == "float32" else "<= 0.1 wanted")
    dense = of["int8_diloco"]
    shown, _ = rest(dense, 70_000_000, scale)
    hidden, _ = rest(replace(dense, overlap=True), 70_000_000, scale)
    report.add("overlap_hidden", 1 - hidden / shown, "of a round", f"70 M, int8: waits {shown:.0%} without")
    _, lora_bytes = rest(of["sparse"], LORA)
    report.add("lora_round_kb", lora_bytes / 1000, "kB", "sent by a peer; <= 100 wanted")


def plot(report: Report, path: str) -> None:
    lines: Lines = {}
    for label, curve in report.curves.items():
        _, sent, losses = np.transpose(curve)
        lines[label] = sent / 1e6, losses, "-"
    style = {"xlabel": "MB sent by a peer", "ylabel": "loss, nats a byte", "xscale": "log"}
    draw(path, [(style, lines)])
