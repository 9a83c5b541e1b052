"""What a peer costs its GPU: two peers, as processes on one device over loopback, and the bare loop in both before.

Each case trains a language model twice with the same batches: as a loop without a swarm, at both
processes at once, and as two peers. The note of a ratio says which value is wanted on a GPU. Without
a GPU a tiny model runs on the CPU, whose tensors pass for those of a device: bytes copied are counted.

*step_share*: a micro-batch's ``step()`` without a round, by its forward and backward pass.
*local_vs_bare*: a batch with its local step, by the bare loop's batch with its step.
*round_vs_wire*: a round after its group was formed, by its bytes over the measured speed of loopback.
*idle_share*: the share of time, rounds included, that the bare loop would not have needed.
*memory_vectors*: the peak of the device's memory beyond the bare loop's, in float32 vectors of all trained values.
*copied_vectors*: bytes copied out of and into the device by a ``step()`` without a round, in such vectors;
*round_copied_vectors*: by a round.

*stress*: delayed updates with gradients whose memory is freed and filled with garbage at once. The
gradients are integers, so that parameters are known exactly: the digest must be the CPU's.
"""

import gc
import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import colab_swarm as cs
from colab_swarm.events import RoundFinished
from colab_swarm.experiments.loss_per_byte import wait_trainers
from colab_swarm.experiments.report import Report, reports
from colab_swarm.net.speed import MAX_SIZE_BYTES, measure
from colab_swarm.tensors import device as copies
from tests.benchmarks.harness import Channel, Crew, call_all, enter
from tests.training.toy import exchanged

PEERS = 2
MICRO_BATCHES = 4  # of each peer for a synchronous step
ROUNDS = 3
RANK = 8
STRESS_LR = 2.0**-10
GARBAGE = 1e30


class Case(NamedTuple):
    model: str
    way: str
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.model}_{self.way}_{self.dtype}"


class Batch(NamedTuple):
    """What a batch took."""

    pass_s: float  # forward and backward
    step_s: float
    copied_bytes: int  # by the step, in and out of the device
    round_ended: bool


# the settings of `Swarm.optimizer`
WAYS: dict[str, dict[str, Any]] = {
    "int8": {"compression": "int8"},
    "lora": {"compression": "int8"},
    "sparse": {"compression": "sparseloco", "local_steps": 10},
    "overlap": {"compression": "sparseloco", "local_steps": 10, "overlap": True},
}
# width, layers, heads, words and positions
SHAPES = {
    "tiny": (32, 1, 2, 128, 32),
    "16m": (256, 4, 8, 50257, 512),
    "124m": (768, 12, 12, 50257, 1024),
}


def models(quick: bool) -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ("tiny",)
    if quick:
        return ("16m",)
    return ("16m", "124m")


def cases(names: tuple[str, ...]) -> list[Case]:
    chosen = []
    for model in names:
        chosen.append(Case(model, "int8", "float16"))
        chosen += [Case(model, way) for way in WAYS]
    return chosen


@reports("gpu")
def run(report: Report) -> None:
    with Crew() as crew:
        invite = crew.start(train_as_peer, grace_s=10.0).receive()["invite"]
        crew.start(train_as_peer, invite, grace_s=10.0).receive()
        wire_bps = min(answer["wire_bps"] for answer in call_all(crew, measure="wire"))
        report.add("wire_mb_s", wire_bps / 8e6, "MB/s", "of loopback, both peers at once")
        for case in cases(models(report.quick)):
            bare = call_all(crew, measure="bare", case=case)
            peers = call_all(crew, measure="peer", case=case, rounds=ROUNDS)
            _compare(report, case, bare, peers, wire_bps)
        stress = call_all(crew, measure="stress", steps=5 * ROUNDS)
    report.add("stress_equal", all(answer["equal"] for answer in stress), "", "1: the digests are the CPU's")


def _compare(
    report: Report,
    case: Case,
    bare: list[dict[str, float]],
    peers: list[dict[str, float]],
    wire_bps: float,
) -> None:
    """Report the worse of the two peers."""

    def worst(ratio: Callable[[dict[str, float], dict[str, float]], float]) -> float:
        return max(ratio(mine, alone) for mine, alone in zip(peers, bare, strict=True))

    name = case.name
    numel = peers[0]["numel"]
    vector = 4 * numel
    note = (
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, {numel:,.0f} trained values"
    )
    report.add(f"{name}_batch_ms", 1e3 * worst(lambda mine, alone: alone["batch_s"]), "ms", note)
    if "local_steps" in WAYS[case.way]:
        ratio = worst(lambda mine, alone: (mine["pass_s"] + mine["step_s"]) / alone["batch_s"])
        report.add(f"{name}_local_vs_bare", ratio, "times", "at most 1.05 wanted")
        share = worst(lambda mine, alone: 1 - mine["batches"] * alone["batch_s"] / mine["wall_s"])
        wanted = 0.0 if case.way == "overlap" else 0.1
        report.add(f"{name}_idle_share", max(0.0, share), "", f"at most {wanted:g} wanted")
    else:
        share = worst(lambda mine, alone: mine["step_s"] / mine["pass_s"])
        report.add(f"{name}_step_share", share, "", "at most 0.05 wanted")
        wire = worst(lambda mine, alone: mine["round_s"] * wire_bps / (8 * mine["round_bytes"]))
        report.add(f"{name}_round_vs_wire", wire, "times", "at most 1.5 wanted")
    if case.way != "overlap":
        report.add(
            f"{name}_equal", peers[0]["digest"] == peers[1]["digest"], "", "1: peers have equal digests"
        )
    report.add(
        f"{name}_round_s", worst(lambda mine, alone: mine["round_s"]), "s", "after its group was formed"
    )
    copied = worst(lambda mine, alone: mine["copied_bytes"] / vector)
    report.add(f"{name}_copied_vectors", copied, "vectors", "a step without a round; 0 wanted")
    copied = worst(lambda mine, alone: mine["round_copied_bytes"] / vector)
    report.add(f"{name}_round_copied_vectors", copied, "vectors", "a round, out and in")
    if torch.cuda.is_available():
        beyond = worst(lambda mine, alone: (mine["peak_bytes"] - alone["peak_bytes"]) / vector)
        wanted = 3 if case.way == "sparse" else 1
        report.add(f"{name}_memory_vectors", beyond, "vectors", f"at most {wanted} wanted")
        times = worst(lambda mine, alone: mine["peak_bytes"] / alone["peak_bytes"])
        report.add(f"{name}_memory_vs_bare", times, "times")


def train_as_peer(parent: Channel, *invites: str) -> None:
    """Worker: do what each message asks for."""
    swarm = enter(*invites, name=f"peer-{len(invites)}")
    if not torch.cuda.is_available():
        copies._MAIN_MEMORY = ()  # the CPU plays a device
    kinds: dict[str, Callable[..., dict[str, Any]]] = {
        "wire": _wire,
        "bare": _train,
        "peer": _train_together,
        "stress": _stress,
    }
    figures: dict[str, Any] = {"invite": "" if invites else str(swarm.invite())}
    while True:
        order = parent.call(**figures)
        kind = order.pop("measure")
        if "case" in order:
            order["case"] = Case(*order["case"])
        figures = kinds[kind](swarm, **order)


def _wire(swarm: "cs.Swarm") -> dict[str, Any]:
    peers = swarm.services.peers
    (other,) = peers.linked()
    speed = swarm.runtime.call(measure(peers, other, size_bytes=MAX_SIZE_BYTES))
    return {"wire_bps": min(speed.upload_bps, speed.download_bps)}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class LowRank(nn.Module):
    """A frozen layer and a trained product of two small matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, frozen: nn.Module, width: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, 3 * width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        y_BLK: torch.Tensor = self.frozen(x_BLD) + self.up(self.down(x_BLD))
        return y_BLK


class TrainingLoop:
    """A language model and its batches, on the device; random texts are as good as any for the time."""

    def __init__(self, case: Case, seed: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        width, layers, heads, words, positions = SHAPES[case.model]
        config = GPT2Config(
            vocab_size=words, n_positions=positions, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        with device():
            self.model = GPT2LMHeadModel(config)
            if case.way == "lora":
                self.model.requires_grad_(False)
                for block in self.model.transformer.h:
                    block.attn.c_attn = LowRank(block.attn.c_attn, width)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.bare = torch.optim.AdamW(self.trained, lr=1e-4)
        self.samples = 8 if case.model != "tiny" else 2
        self.length = min(512, positions)
        self._words = words
        self._dtype = getattr(torch, case.dtype)
        self._random = torch.Generator().manual_seed(seed)
        # at the usual first scale of 65536 the first batches would overflow and be dropped
        enabled = case.dtype == "float16"
        self.scaler = torch.amp.GradScaler(device().type, init_scale=256.0, enabled=enabled)

    def backward(self) -> tuple[float, torch.Tensor]:
        """Compute a batch's gradient; return the seconds, and the loss."""
        shape = self.samples, self.length
        words_BL = torch.randint(self._words, shape, generator=self._random).to(device())
        wait_device()
        began = time.perf_counter()
        with torch.autocast(device().type, self._dtype):
            loss = self.model(words_BL, labels=words_BL).loss
        self.scaler.scale(loss).backward()
        wait_device()
        return time.perf_counter() - began, loss.detach()

    def step_alone(self) -> float:
        """Step the bare optimizer; return the seconds."""
        began = time.perf_counter()
        self.scaler.step(self.bare)
        self.scaler.update()
        self.bare.zero_grad()
        wait_device()
        return time.perf_counter() - began

    def step_together(self, optimizer: Any) -> Batch:
        """Train on a batch as a peer."""
        pass_s, loss = self.backward()
        before = copied_bytes()
        began = time.perf_counter()
        result = self.scaler.step(optimizer, samples=self.samples, loss=loss)
        self.scaler.update()
        wait_device()
        step_s = time.perf_counter() - began
        return Batch(pass_s, step_s, copied_bytes() - before, result is not None)


def digest(tensors: list[Any]) -> str:
    values = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        values.update(tensor.detach().cpu().numpy().tobytes())
    return values.hexdigest()


def forget_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def copied_bytes() -> int:
    return copies.copied.out_bytes + copies.copied.in_bytes


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 0


def _train(swarm: "cs.Swarm", case: Case) -> dict[str, Any]:
    """Train without the swarm; return the median seconds of a batch with its step."""
    forget_peak()
    loop = TrainingLoop(case, seed=1)
    took_s = []
    for _ in range(15):
        pass_s, _loss = loop.backward()
        took_s.append(pass_s + loop.step_alone())
    return {"batch_s": statistics.median(took_s[3:]), "peak_bytes": peak_bytes()}


def _train_together(swarm: "cs.Swarm", case: Case, rounds: int) -> dict[str, Any]:
    """Train until the end of so many rounds after the first, which warms up."""
    forget_peak()
    loop = TrainingLoop(case, seed=int(swarm.id.hex()[:8], 16))
    settings = {"name": case.name, "model": loop.model, **WAYS[case.way]}
    target = loop.samples
    if "local_steps" not in settings:
        target *= PEERS * MICRO_BATCHES
    optimizer = swarm.optimizer(loop.bare, target_batch_size=target, **exchanged(settings))
    wait_trainers(swarm, optimizer.rounds, PEERS)
    rounds_done = 0
    while not rounds_done:
        rounds_done += loop.step_together(optimizer).round_ended
    began = time.perf_counter()
    before = copied_bytes()
    batches = []
    while rounds_done <= rounds:
        batches.append(loop.step_together(optimizer))
        rounds_done += batches[-1].round_ended
    wall_s = time.perf_counter() - began
    figures = {
        "numel": sum(parameter.numel() for parameter in loop.trained),
        "batches": len(batches),
        "wall_s": wall_s,
        "round_copied_bytes": (copied_bytes() - before) / rounds,
        "digest": digest(loop.trained),
        "peak_bytes": peak_bytes(),
    }
    optimizer.close()
    plain = [batch for batch in batches if not batch.round_ended]
    for key in ("pass_s", "step_s", "copied_bytes"):
        figures[key] = statistics.median(getattr(batch, key) for batch in plain)
    finished = [event for event in swarm.events.recent(RoundFinished) if isinstance(event, RoundFinished)]
    figures["round_s"] = statistics.median(event.averaging_s for event in finished[-rounds:])
    figures["round_bytes"] = max(max(event.sent_bytes, event.received_bytes) for event in finished[-rounds:])
    return figures


def _stress(swarm: "cs.Swarm", steps: int) -> dict[str, Any]:
    """Train with delayed updates, and spoil the memory of each gradient right after its step."""
    sizes = [1 + 20_011 * index % 300_007 for index in range(60)]
    wanted = [(torch.arange(size) % 509 + index).float() for index, size in enumerate(sizes)]
    gradients = [values.to(device()) for values in wanted]
    parameters = [nn.Parameter(torch.zeros(size, device=device())) for size in sizes]
    bare = torch.optim.SGD(parameters, lr=STRESS_LR)
    settings: dict[str, Any] = {"overlap": True, "name": "stress"}
    optimizer = swarm.optimizer(bare, target_batch_size=PEERS * MICRO_BATCHES, **exchanged(settings))
    wait_trainers(swarm, optimizer.rounds, PEERS)
    while optimizer.global_step < steps:
        loss = torch.zeros((), device=device())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            loss = loss + (parameter * gradient).sum()
        torch.autograd.backward(loss)
        optimizer.step(samples=1)
        optimizer.zero_grad(set_to_none=True)
        for size in sizes:
            torch.full((size,), GARBAGE, device=device())
    optimizer.wait_step()
    # in units of the learning rate, values are integers on any device
    moved = [(-parameter.detach() / STRESS_LR).round().int() for parameter in parameters]
    expected = [(optimizer.global_step * values).int() for values in wanted]
    figures = {"equal": digest(moved) == digest(expected)}
    optimizer.close()
    return figures
