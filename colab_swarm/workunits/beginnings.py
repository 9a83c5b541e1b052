"""The parameters that volunteers begin with, as the files that they fetch."""

from __future__ import annotations

import asyncio

from colab_swarm.workunits.entries import Unit
from colab_swarm.workunits.logbook import Logbook
from colab_swarm.workunits.store import Store
from colab_swarm.workunits.weights import Schema


def base_blob(unit: Unit) -> str:
    """Name of the blob with the parameters that all replicas of a unit begin with."""
    return f"base-{unit}"


class Beginnings:
    """Files of parameters (`Schema.encode`). The newest one is held in memory, for many ask at once."""

    def __init__(self, store: Store, schema: Schema, log: Logbook) -> None:
        self._store, self._schema, self._log = store, schema, log
        self._loading = asyncio.Lock()
        self._version, self._file = -1, memoryview(b"")

    async def newest(self) -> tuple[int, memoryview]:
        """Version and file of the newest parameters.

        Raises:
            StoreError: later perhaps.
        """
        async with self._loading:
            if self._version < self._log.version:
                found = await asyncio.to_thread(self._store.parameters)
                self._file = memoryview(await asyncio.to_thread(self._schema.encode, found.values))
                self._version = found.version
            return self._version, self._file

    async def of_unit(self, unit: Unit) -> memoryview:
        """File of those that the replicas of a unit begin with.

        Raises:
            KeyError: it is not open.
            StoreError: later perhaps.
        """
        return memoryview(self._schema.head() + await asyncio.to_thread(self._store.blob, base_blob(unit)))
