"""A kernel to kill: ``python -m tests.swarm.kept_process FOLDER [INVITATION]`` trains as the peer saved in FOLDER.

It says ``id HEX`` when it is in, and ``step NUMBER`` after each of the swarm's steps.
"""

import sys
import time
from itertools import count

import colab_swarm as cs
from colab_swarm.training import saving as saving_module
from tests.training.toy import join_training, loss_of, model


def main(folder: str, invitation: str = "") -> None:
    saving_module.SAVE_S = 0.2
    swarm = (
        cs.join(invitation, peer_name="bob", state_dir=folder) if invitation else cs.join(state_dir=folder)
    )
    print("id", swarm.id.hex(), flush=True)
    optimizer = join_training(swarm, net := model())
    print("step", optimizer.global_step, flush=True)
    for batch in count():
        loss_of(net, batch).backward()
        if optimizer.step(samples=5):
            print("step", optimizer.global_step, flush=True)
        time.sleep(0.02)  # not a wait for anything: a batch takes its time


if __name__ == "__main__":
    main(*sys.argv[1:])
