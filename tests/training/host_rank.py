"""One rank of a host, as a process: ``python -m tests.training.host_rank SCENARIO[,SCENARIO] RANK FOLDER``.

Each of several scenarios has a folder of its own in that one.
"""

import copy
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.lr_scheduler import LambdaLR

import colab_swarm as cs
from colab_swarm.errors import HostError, StepError
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors import device
from colab_swarm.training.host import HostOptimizer, host_optimizer
from colab_swarm.training.layerwise import Lamb
from tests.training.toy import BATCH, ROWS, exchanged, loss_of, model, parameters_of, wait_for_peers

RANKS = 2
STEPS = 6
HALVES = [ROWS["alice"], ROWS["bob"]]  # rows of the batch, per rank
Net = torch.nn.Module


def begin(swarm: Swarm | None, net: Net, timeout_s: float = 40.0, **settings: Any) -> HostOptimizer:
    lamb = Lamb(net.parameters(), lr=0.01)
    return host_optimizer(swarm, lamb, target_batch_size=BATCH, timeout_s=timeout_s, **exchanged(settings))


def backward(net: Net, step: int, rows: slice) -> dict[str, float]:
    loss = loss_of(net, step, rows)
    loss.backward()
    return {"samples": rows.stop - rows.start, "loss": loss.item()}


def train(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Each rank takes its own rows of the batch; a peer outside takes the rest."""
    optimizer = begin(swarm, net)
    if swarm is not None:
        assert optimizer.lead is not None
        wait_for_peers(swarm, optimizer.lead, 2)
    while optimizer.global_step < STEPS:
        step = optimizer.global_step
        result = optimizer.step(**backward(net, step, HALVES[dist.get_rank()]))
        if optimizer.global_step == step:
            result = optimizer.wait_step(timeout_s=30.0)
        assert result is not None and len(result.group.members) == 2
    optimizer.save(folder / f"{dist.get_rank()}.checkpoint")
    optimizer.close()


def make_equal(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Unequal ranks become equal; a checkpoint is loaded by all; one rank has no samples, then none has."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[0].weight.zero_()
    optimizer = begin(swarm, net)
    optimizer.save(folder / "first")
    for step in range(2):
        samples = BATCH if dist.get_rank() else 0
        report = backward(net, step, slice(0, BATCH))
        optimizer.step(samples=samples, loss=report["loss"] if samples else None)
    assert optimizer.global_step == 2
    torch.save(parameters_of(net), folder / f"second {dist.get_rank()}")
    optimizer.load(folder / "first")
    assert optimizer.global_step == 0
    try:
        optimizer.step(samples=0)
    except (ValueError, HostError) as error:
        (folder / f"error {dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")


def delay(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Rank 0's parameters change at other moments than its global step."""
    optimizer = begin(swarm, net, overlap=True)
    seen = []
    while optimizer.global_step < STEPS:
        optimizer.step(**backward(net, optimizer.global_step, slice(0, BATCH)))
        seen.append(parameters_of(net))
    torch.save(torch.stack(seen), folder / f"seen {dist.get_rank()}")


def lose(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """The rank that the folder's name ends with dies in the second step; or hangs: does not come to it, and lives."""
    way, lost = folder.name.split()
    optimizer = begin(swarm, net, timeout_s=6.0 if way == "hangs" else 40.0)
    optimizer.step(**backward(net, 0, slice(0, BATCH)))
    output = folder / "error"
    if dist.get_rank() == int(lost):
        if way == "dies":
            os._exit(7)
        while not output.exists():
            time.sleep(0.05)
        return
    try:
        while True:
            optimizer.step(**backward(net, 1, slice(0, BATCH)))
    except HostError as error:
        output.write_text(str(error))


def with_batch_norm() -> Net:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))


def overflow(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Rank 1's gradient overflows at step 1, then both ranks' do; by `GradScaler.step` and by hand."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    rank, scaler, scales = dist.get_rank(), torch.amp.GradScaler("cpu", init_scale=1024.0), []
    rows = [slice(0, 4), slice(4, BATCH)][rank]
    optimizer = host_optimizer(
        swarm,
        sgd,
        target_batch_size=1,
        batch_size=rows.stop - rows.start,
        weight_unit="rows",
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd),
        timeout_s=40.0,
    )
    for call, overflows in enumerate(((), (1,), (0, 1), ())):
        loss = loss_of(net, call, rows)
        scaler.scale(loss).backward()
        if rank in overflows:
            net[0].weight.grad[0, 0] = torch.inf
        report: dict[str, Any] = {"weight": float(rows.stop - rows.start), "loss": loss.detach()}
        if call == 1:
            scaler.unscale_(sgd)
            optimizer.step(**report)
        else:
            scaler.step(optimizer, **report)
        scaler.update()
        scales.append(scaler.get_scale())
    seen = None if optimizer.lead is None else optimizer.lead.rounds.view.own.loss
    torch.save({"scales": scales, "step": optimizer.global_step, "loss": seen}, folder / f"seen {rank}")


RAGGED_STEPS = 20
NAN_STEP = 7  # at rank 1


def ragged_rows(rank: int, step: int) -> slice:
    """Two to five rows at rank 0; none to four at rank 1."""
    if rank:
        return slice(5, 5 + (step + 2) % 5)
    return slice(0, 2 + step % 4)


def ragged(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Micro-batches of any length, one of them not finite; the CPU passes for a device, and counts what it copies."""
    rank = dist.get_rank()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("colab_swarm.training.host").addHandler(handler)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    device._MAIN_MEMORY = ()
    optimizer = host_optimizer(swarm, adam, target_batch_size=1, timeout_s=40.0)
    for step in range(RAGGED_STEPS):
        rows = ragged_rows(rank, step)
        samples = rows.stop - rows.start
        loss = None
        if samples:
            loss = loss_of(net, step, rows)
            loss.backward()
            if rank and step == NAN_STEP:
                net[2].weight.grad[0, 0] = torch.nan
        optimizer.step(samples=samples, loss=loss)
    copied = device.copied.out_bytes, device.copied.in_bytes
    torch.save(
        {"step": optimizer.global_step, "warnings": warnings, "copied": copied}, folder / f"seen {rank}"
    )


def refusal(attempt: Callable[[], object]) -> str:
    """Return how a call is refused."""
    try:
        attempt()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no refusal"


def accelerated(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Accelerate wraps it at each rank, and rank 1's gradient overflows at step 1."""
    rank = dist.get_rank()
    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer = host_optimizer(swarm, inner, target_batch_size=1, batch_size=BATCH // 2, timeout_s=40.0)
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(optimizer.global_step))
    skipped = []
    scales = []
    for step in range(4):
        scaler.scale(loss_of(net, step, slice(5 * rank, 5 * rank + 5))).backward()
        if rank and step == 1:
            net[0].bias.grad.fill_(torch.inf)
        wrapped.step()
        wrapped.zero_grad()
        skipped.append(wrapped.step_was_skipped)
        scales.append(scaler.get_scale())
    state = optimizer.state_dict()
    before = optimizer.global_step
    optimizer.load_state_dict(state)
    seen = {
        "is an optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "step": (before, optimizer.global_step),
        "stepped": len(stepped),
        "skipped": skipped,
        "scales": scales,
        "moments": len(state["state"]),
        "shown": optimizer.param_groups[0]["params"][0] is net[0].weight
        and optimizer.state is inner.state
        and optimizer.defaults is inner.defaults,
        "schedule": refusal(lambda: LambdaLR(optimizer, lambda epoch: 0.5)),
        "group": refusal(lambda: optimizer.add_param_group({"params": []})),
        "copy": refusal(lambda: copy.deepcopy(optimizer)),
        "lr": inner.param_groups[0]["lr"],
    }
    loss_of(net, 4).backward()
    optimizer.zero_grad(set_to_none=False)
    seen["zeros"] = all(not parameter.grad.any() for parameter in net.parameters())
    optimizer.zero_grad()
    seen["none"] = all(parameter.grad is None for parameter in net.parameters())
    torch.save(seen, folder / f"seen {rank}")


def buffers(swarm: Swarm | None, net: Net, folder: Path) -> None:
    """Ranks with other statistics get rank 0's; a batch without a gradient is refused before the exchange."""
    net, rank = with_batch_norm(), dist.get_rank()
    net[1].running_mean.fill_(float(rank))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = host_optimizer(
        swarm, inner, target_batch_size=BATCH, batch_size=BATCH // 2, model=net, timeout_s=40.0
    )
    first = net[1].running_mean.clone()
    try:
        optimizer.step()
    except StepError as error:
        (folder / f"error {rank}").write_text(str(error))
    loss_of(net, 0, slice(5 * rank, 5 * rank + 5)).backward()
    before = net[1].running_mean.clone()
    optimizer.step()
    seen = {"first": first, "before": before, "after": list(net.buffers()), "step": optimizer.global_step}
    torch.save(seen, folder / f"seen {rank}")


Scenario: TypeAlias = Callable[[Swarm | None, Net, Path], None]
SCENARIOS: dict[str, Scenario] = {
    "equal": make_equal,
    **{one.__name__: one for one in (train, delay, lose, overflow, ragged, accelerated, buffers)},
}


def play(scenario: str, rank: int, folder: Path) -> None:
    net = model()
    if rank:
        SCENARIOS[scenario](None, net, folder)
    else:
        options, invite = cs.NetworkOptions(lan=False), folder / "invite"
        swarm = (
            cs.join(invite.read_text(), peer_name="host", options=options)
            if invite.exists()
            else cs.create("host", peer_name="host", options=options)
        )
        with swarm:
            SCENARIOS[scenario](swarm, net, folder)
    torch.save(parameters_of(net), folder / f"parameters {rank}")


if __name__ == "__main__":
    scenarios, rank, place = sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=RANKS)
    for scenario in scenarios:
        play(scenario, rank, place / scenario if len(scenarios) > 1 else place)
