"""The store's log, and the dispatcher that is made of it, kept together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from colab_swarm.errors import StoreError
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.entries import Accepted, AnyEntry, Assimilated, Measured, encode_entry
from colab_swarm.workunits.store import Store
from colab_swarm.workunits.validator import Validator

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Logbook:
    """Used by one coordinator, on one event loop. Whoever decides holds the `lock` and has called `settle` before.

    Attributes:
        lock: of the log and of what is made of it.
        version: of the newest parameters.
        fault: what is wrong with the store now, for people; empty while all is well.
        finished: set when the job is done.
    """

    def __init__(
        self, store: Store, dispatcher: Dispatcher, validator: Validator, clock: Callable[[], float]
    ) -> None:
        self.lock, self.finished = asyncio.Lock(), asyncio.Event()
        self.version, self.fault = 0, ""
        self._store, self._dispatcher, self._validator, self._clock = store, dispatcher, validator, clock
        self._position = 0
        self._mine: set[bytes] = set()  # entries written here and not read back yet
        self._up_to_date = False

    async def settle(self) -> None:
        """Read what is new, and write what is due by now: deadlines that passed, the end of an epoch.

        Raises:
            StoreError: the store fails, or another coordinator uses it; nothing is lost.
        """
        await self._read()
        self._up_to_date = True
        await self.write(self._dispatcher.expired(now=self._clock()))
        while due := self._dispatcher.advance(now=self._clock()):
            await self.write(due)

    async def write(
        self,
        entries: Sequence[AnyEntry],
        *,
        put: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
    ) -> None:
        """Append a decision, with blobs, and read it back.

        Raises:
            StoreError: the store fails. Whether it was written is known after the next `settle`.
        """
        if entries:
            self._mine.update(map(encode_entry, entries))
            await self._ask(lambda: self._store.append(entries, put=put or {}, drop=drop))
            await self._read()

    async def waiting(self) -> int:
        """Results that wait for a parameter server.

        Raises:
            StoreError: the store fails.
        """
        return await self._ask(self._store.waiting)

    async def _read(self) -> None:
        for position, entry in await self._ask(lambda: self._store.entries(self._position)):
            if not isinstance(entry, Assimilated | Measured):
                self._check_mine(entry)
            self._dispatcher.apply(entry)
            self._position = position
            if isinstance(entry, Accepted):
                self._validator.learn(entry.change)
            elif isinstance(entry, Assimilated):
                self.version = max(self.version, entry.version)
        if self._dispatcher.finished is not None:
            self.finished.set()

    def _check_mine(self, entry: AnyEntry) -> None:
        """Two coordinators would decide without knowing of each other; the one that began later goes on."""
        written = encode_entry(entry)
        if self._up_to_date and written not in self._mine:
            self.fault = "another coordinator has taken over this job: stop this one, or rename its job"
            raise StoreError(self.fault)
        self._mine.discard(written)

    async def _ask(self, call: Callable[[], T]) -> T:
        try:
            answer = await asyncio.to_thread(call)
        except StoreError as error:
            if not self.fault:
                logger.warning("the store fails, volunteers wait: %s", error)
            self.fault = str(error)
            raise
        self.fault = ""
        return answer
