"""One rank of an elastic group over gloo: ``python -m tests.benchmarks.elastic_rank SCENARIO RANK FOLDER``."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from colab_swarm.elastic.schedulers import NormBounded, Synchronous
from tests.benchmarks.process_group import group_optimizer
from tests.elastic.group import LR, rows_of, take
from tests.training.toy import loss_of, model, parameters_of

RANKS = 2
STEPS = 50
DIES_AT = 5


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def equal(rank: int, folder: Path) -> None:
    """Train elastically with beta = 1, and the same with DDP."""
    net = model(seed=rank)  # rank 0's count
    optimizer = group_optimizer(sgd(net), scheduler=NormBounded(1.0))
    assert optimizer.member == rank
    for step in range(STEPS):
        take(optimizer, net, step)
    optimizer.close()
    torch.save(parameters_of(net), folder / f"elastic {rank}")
    theirs = DistributedDataParallel(model())
    plain = sgd(theirs)
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(theirs, step, rows_of(rank, RANKS)).backward()
        plain.step()
    torch.save(parameters_of(theirs), folder / f"ddp {rank}")


def die(rank: int, folder: Path) -> None:
    """Rank 1 is killed; rank 0 continues."""
    net = model()
    optimizer = group_optimizer(sgd(net), scheduler=Synchronous())
    for step in range(2 * DIES_AT):
        if rank == 1 and step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        result = take(optimizer, net, step)
    optimizer.close()
    (folder / "lost").write_text(f"{result.step} {result.lost}")
    os._exit(0)  # gloo may wait for the dead at exit


def differ(rank: int, folder: Path) -> None:
    """The ranks have different settings."""
    try:
        group_optimizer(sgd(model()), compression=("float16", "int8")[rank])
    except ValueError as error:
        (folder / f"error {rank}").write_text(str(error))


if __name__ == "__main__":
    scenario, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    globals()[scenario](rank, folder)
    dist.destroy_process_group()
