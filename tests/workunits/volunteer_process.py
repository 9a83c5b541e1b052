"""A volunteer in a process of its own, to be killed: ``python -m tests.workunits.volunteer_process URL FOLDER``."""

import asyncio
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from colab_swarm.net.identity import Identity
from colab_swarm.workunits import volunteering as module
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.job import cross_entropy
from colab_swarm.workunits.messages import Token
from tests.workunits.digits import digits_job
from tests.workunits.stand_in import RUN

SEED = b"a" * 32


def _slow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(0.1)  # gives the test time to kill this process
    return cross_entropy(model, batch)


async def _main(url: str, folder: Path) -> None:
    async with aclosing(CoordinatorClient(url, Token(Identity(SEED)), run_id=RUN, authority=None)) as client:
        job = replace(digits_job(), loss=_slow)
        module.SAVE_S = 0.0
        volunteering = module.Volunteer(client, job, await client.card(), folder)
        await volunteering.begin()
        await volunteering.wait_over()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2])))
