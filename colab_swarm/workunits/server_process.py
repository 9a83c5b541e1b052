"""A parameter server as a process: ``python -m colab_swarm.workunits.server_process``, started by a coordinator.

The first line of its standard input is the store's address, which may hold a password and so is no argument: those
are seen by everybody on the machine. SIGTERM ends it after the update at hand. When its input ends, whoever started
it is dead, and it ends at once: what it was about to write is taken up by the next server.
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
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.training import Evaluator


def main(arguments: list[str] | None = None) -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description="Assimilates results of work units.")
    parser.add_argument("--name", required=True, help="of the job")
    parser.add_argument("--code", required=True, help="file that defines the job")
    parser.add_argument("--server", required=True, help="name of this server")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    url = sys.stdin.readline().strip()
    threading.Thread(target=_watch_parent, name="parent watch", daemon=True).start()
    torch.set_num_threads(1)  # servers are added until all processors have work
    store = open_store(url, options.name)
    ParameterServer(store, Evaluator(Job.load(options.code)), options.server).run(stop)
    store.close()


def _watch_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
