"""``python -m tests.workunits.store_process URL JOB NAME [pause]``: a parameter server that adds one per result.

It reports its first claim, waits for input, and continues until no result waits; ``pause``: stops in the first.
"""

import sys
import threading

from colab_swarm.workunits.store import open_store
from colab_swarm.workunits.weights import Floats


def main(url: str, job: str, name: str, pause: str = "") -> None:
    store = open_store(url, job)

    def update(values: Floats) -> Floats:
        print("in the middle", flush=True)
        if pause:
            threading.Event().wait()
        return values + values.dtype.type(1)

    claimed = store.claim(name, now=1.0, lease_s=60.0)
    print("claimed", flush=True)
    sys.stdin.readline()
    while claimed:
        store.assimilate(claimed, update, server=name, now=1.0)
        claimed = store.claim(name, now=1.0, lease_s=60.0)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
