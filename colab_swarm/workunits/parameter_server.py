"""A parameter server: takes results from the store's queue and makes them part of the parameters.

Any number of them works on one store, each on a thread or in a process of its own. They know nothing of each other,
of the coordinator, or of what they did before: all that counts is in the store.
"""

from __future__ import annotations

import logging
import random
import threading
import time

import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.workunits.assimilator import assimilate
from colab_swarm.workunits.backoff import Backoff, BackoffSettings
from colab_swarm.workunits.entries import Measured
from colab_swarm.workunits.store import Store
from colab_swarm.workunits.unit_training import Evaluator
from colab_swarm.workunits.weights import Floats

logger = logging.getLogger(__name__)
LEASE_S = 120.0
"""A result whose server died goes to another after that."""
IDLE = BackoffSettings(first_s=0.01, most_s=0.1)
TROUBLE = BackoffSettings(first_s=0.1, most_s=30.0)


class ParameterServer:
    """Assimilates results until it is stopped.

    Args:
        store: of the job.
        evaluator: measures the parameters after each result.
        name: of this server, for people.
    """

    def __init__(self, store: Store, evaluator: Evaluator, name: str) -> None:
        self._store, self._evaluator, self._name = store, evaluator, name
        self._measured: list[Measured] = []  # and not in the log yet

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set; the update at hand is finished. Faults of the store are waited out."""
        idle, trouble = Backoff(IDLE, random.Random()), Backoff(TROUBLE, random.Random())
        wait_s = 0.0
        while not stop.wait(wait_s):
            try:
                busy = self.run_once(time.time())
            except StoreError as error:
                wait_s = trouble.failed()
                logger.warning("%s waits %.1f s for the store: %s", self._name, wait_s, error)
            else:
                trouble.succeeded()
                if busy:
                    idle.succeeded()
                wait_s = 0.0 if busy else idle.failed()

    def run_once(self, now: float) -> bool:
        """Assimilate one result; False if none waits.

        Args:
            now: seconds since the epoch.

        Raises:
            StoreError: the store failed; what was not written will be taken again, here or elsewhere.
        """
        self._log()
        accepted = self._store.claim(self._name, now=now, lease_s=LEASE_S)
        if accepted is None:
            return False
        try:
            result = np.frombuffer(self._store.blob(accepted.result), "<f4")
        except KeyError:
            return True  # this took so long that another has assimilated it
        updated = result

        def update(server: Floats) -> Floats:
            nonlocal updated
            updated = assimilate(server, result, accepted.alpha)
            return updated

        if self._store.assimilate(accepted, update, server=self._name, now=now) is not None:
            accuracy = self._evaluator.accuracy(updated)
            self._measured.append(Measured(at=now, unit=accepted.unit, accuracy=accuracy))
            self._log()
        return True

    def _log(self) -> None:
        if self._measured:
            self._store.append(self._measured)
            self._measured = []
