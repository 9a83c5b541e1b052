"""Whoever calls at about the same time comes together: all of them get the same group, without a fixed membership.

A peer that is ready tells so in the DHT, with the number of the meeting it waits for: swarm time, milliseconds. The
lowest number told is everybody's. The meeting begins when the first has waited for the window, or as soon as all of
the last meeting are back; its organizer calls the others, and a call ends their waiting too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundRefused, Ticket, equal_shares
from colab_swarm.averaging.matchmaking import Matchmaker, PrefixRouter
from colab_swarm.dht.service import DHT, is_sound
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Contact, Message, PeerId

logger = logging.getLogger(__name__)

LOOK_S = 0.25
TTL_S = 30.0
TIMEOUT_S = 60.0
SKEW_MS = 600_000
"""A number further from this peer's own time is nobody's who means well."""


class WaitingPeer(Message, frozen=True):
    """Told in the DHT, signed, under the peer's own subkey: I wait for the meeting ``number``."""

    number: int
    addresses: tuple[str, ...]


class Assembly:
    """One peer's way into the meetings of a name.

    Args:
        window_s: how long the first to come waits for others.

    Attributes:
        number: of the meeting this peer waits for or was in last.
    """

    def __init__(self, rooms: PrefixRouter, dht: DHT, prefix: str, *, window_s: float) -> None:
        self._peers, self._dht = rooms.peers, dht
        self._prefix, self._window_s = prefix, window_s
        self._matchmaker = Matchmaker(
            rooms,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            strategy=equal_shares,  # nothing is averaged here
            settings=GroupFormationSettings(window_s=2.0, slack_s=1.0, call_timeout_s=5.0),
        )
        self.number = self._last = 0
        self._terms: Ticket | None = None  # while this peer waits
        self._called = asyncio.Event()
        self._joining = False
        self._before: frozenset[PeerId] = frozenset()
        self._withdrawing: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Meet no more."""
        self._matchmaker.close()
        if self._withdrawing is not None:
            self._withdrawing.cancel()

    async def meet(self, numel: int, schema: bytes, vote: Callable[[int], int]) -> Group:
        """Wait for the others; the group is the same at all its members.

        Args:
            numel, schema: what is to be averaged; it has to be the same for all.
            vote: ``vote(peers)``: a number that all members are told: it is this peer's weight in the group.

        Raises:
            RoundRefused: nobody to meet, or the others average something else.
        """
        deadline = _now() + self._window_s + TIMEOUT_S
        try:
            while True:
                try:
                    group = await self._meet_once(numel, schema, vote, deadline)
                except RoundRefused as refusal:
                    if refusal.reason != "late" or _now() >= deadline:
                        raise
                    logger.info("too late for meeting %d: %s", self.number, refusal)
                else:
                    self._before = frozenset(member.id for member in group.members)
                    return group
        finally:
            self._withdrawing = asyncio.create_task(self._tell(ttl_s=0.5))

    async def _meet_once(
        self, numel: int, schema: bytes, vote: Callable[[int], int], deadline: float
    ) -> Group:
        self._last, own = self.number, max(int(self._peers.time() * 1000), self.number + 1)
        self.number, reduces = own, bool(self._peers.contact.addresses)
        self._terms = Ticket(self._prefix, own, b"", 1.0, numel, schema, reduces)
        self._called.clear()
        try:
            others = await self._wait(own)
            self._joining = True
            weight = float(vote(len(others) + 1))
            ticket = msgspec.structs.replace(self._terms, step=self.number, weight=weight)
            return await self._matchmaker.join(ticket, others, deadline)
        finally:
            self._terms, self._joining = None, False

    async def _wait(self, own: int) -> list[PeerId]:
        """Until the meeting begins; returns who else waits for one."""
        begun, told = _now(), 0
        while True:
            if told != self.number:
                told = self.number
                await self._tell(ttl_s=self._window_s + TTL_S)
            waiting = await self._read()
            if not self._called.is_set():
                self.number = min([own, *waiting.values()])
            back = self._before and self._before <= {*waiting, self._peers.id}
            if self._called.is_set() or back or _now() - begun >= self._window_s:
                return sorted(waiting)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._called.wait()

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        own = self._terms
        if own is None or (own.numel, own.schema) != (terms.numel, terms.schema):
            return None
        if terms.step != self.number:
            if self._joining or self._called.is_set() or not self._plausible(terms.step):
                return None
            self.number = terms.step
        self._called.set()
        return 0.0

    async def _expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        """Who says that it waits, and who was here last time: a record may be late."""
        return sorted({*await self._read(), *self._before & self._peers.linked()})

    def _plausible(self, number: int) -> bool:
        return number > self._last and abs(number - self._peers.time() * 1000) < SKEW_MS

    async def _tell(self, *, ttl_s: float) -> None:
        record = WaitingPeer(self.number, self._peers.contact.addresses)
        try:
            await self._dht.store(self._prefix, record, subkey=self._peers.id, ttl_s=ttl_s, signed=True)
        except PeerError as error:
            logger.info("could not tell that this peer waits: %s", error)

    async def _read(self) -> dict[PeerId, int]:
        """Who else waits, and for which meeting."""
        try:
            found = await self._dht.get(self._prefix)
        except PeerError as error:
            logger.info("could not read who waits: %s", error)
            return {}
        waiting: dict[PeerId, int] = {}
        for subkey, record in found.items():
            try:
                told = msgspec.convert(record.value, WaitingPeer, strict=False)
            except (msgspec.ValidationError, ValueError):
                continue
            contact = Contact(PeerId(subkey), told.addresses)
            sound = is_sound(contact) and self._plausible(told.number)
            if sound and contact.id != self._peers.id:
                self._peers.learn(contact)
                waiting[contact.id] = told.number
        return waiting


def _now() -> float:
    return asyncio.get_running_loop().time()
