"""A kernel to kill: ``python -m tests.swarm.kept_process FOLDER [INVITATION]`` trains as the peer saved in FOLDER.

It prints its id when it is in, and the number of each of the swarm's steps.
"""

import json
import sys
import time
from itertools import count

import colab_swarm as cs
from colab_swarm.training import saving
from tests.training.toy import join_training, loss_of, model


def main(folder: str, *invitation: str) -> None:
    saving.SAVE_S = 0.2
    swarm = cs.join(*invitation, peer_name="bob" if invitation else "", state_dir=folder)
    print(json.dumps(swarm.id.hex()), flush=True)
    optimizer = join_training(swarm, net := model())
    print(optimizer.global_step, flush=True)
    for batch in count():
        loss_of(net, batch).backward()
        if optimizer.step(samples=5):
            print(optimizer.global_step, flush=True)
        time.sleep(0.02)  # not a wait for anything: a batch takes its time


if __name__ == "__main__":
    main(*sys.argv[1:])
