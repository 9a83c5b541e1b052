"""A parameter server as a process: ``python -m colab_swarm.workunits.server_process``, started by a coordinator.

The first line of its standard input is the store's address. It may hold a password, and arguments are visible to every
user of the machine. SIGTERM ends the process after its current update. When its input closes, its parent is dead and it
exits at once: the next server takes up the result that it had claimed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading

import torch

from colab_swarm.workunits.assimilation import ParameterServer
from colab_swarm.workunits.job import Evaluator, Job
from colab_swarm.workunits.store import open_store


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="Assimilates results of work units.")
    parser.add_argument("--name", required=True, help="name of the job")
    parser.add_argument("--code", required=True, help="file that defines the job")
    parser.add_argument("--server", required=True, help="name of this server")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    url = sys.stdin.readline().strip()
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    torch.set_num_threads(1)  # the coordinator adds servers until all processors are busy
    store = open_store(url, options.name)
    ParameterServer(store, Evaluator(Job.load(options.code)), options.server).run(stop)
    store.close()


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
