"""An assistant (DeDLOC's auxiliary peer) trains nothing and lets trainers that only dial out train together.

Such trainers cannot reach each other; all of them can reach the assistant. It organizes their rounds, reduces, and
hands on the training state to newcomers. It has no torch, no data and no model: what it needs to know of a round
stands in the ticket of the trainer that calls it. Where trainers reduce themselves, it is one more reducer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from colab_swarm.averaging.group import MAX_TEXT, Group, GroupFormationSettings, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.round import RoundResult
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import Runner
from colab_swarm.training.progress import (
    AssistantRecord,
    ProgressRecord,
    assistants_key,
    branch_of,
    participants_of,
    read_assistants,
    read_progress,
)
from colab_swarm.training.rounds import LinkBandwidth
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import Mirror, Snapshot

logger = logging.getLogger(__name__)

ROUND_TIMEOUT_S = 180.0
TELL_S = 15.0
TTL_S = 4 * TELL_S
FRESH_S = 1.0
"""Records older than this are read again before peers are invited to a round."""
READ_TIMEOUT_S = 3.0
IDLE_S = 900.0
MAX_COLLABORATIONS = 16
MAX_ROUNDS = 4
"""Of one collaboration at once."""
UNKNOWN_MEMORY_BYTES = 8 << 30
VECTORS_IN_MEMORY = 4
"""A round's own and the last one's, with room to spare; a model too large for that is not helped."""
MATCHMAKING = GroupFormationSettings(window_s=5.0, slack_s=5.0)


@dataclass(frozen=True)
class AssistedRound:
    """A round that an assistant reduced in: of which collaboration, when its group began to form and stood (loop time),
    and what became of it."""

    prefix: str
    began_at: float
    formed_at: float
    result: RoundResult


@dataclass(frozen=True)
class Memory:
    """What an assistant may do beyond the present: ``stored(prefix)`` is a checkpoint to give when no trainer is left,
    ``on_round`` hears of each round."""

    stored: Callable[[str], Awaitable[Snapshot | None]]
    on_round: Callable[[AssistedRound], None]


async def _nothing(prefix: str) -> Snapshot | None:
    return None


NO_MEMORY = Memory(_nothing, lambda helped: None)


@dataclass
class AssistantTally:
    """What an assistant has done.

    Attributes:
        collaborations: prefixes of those it helps now.
        rounds: rounds it reduced in.
        reduced_bytes: payload it received and sent in them.
        mirrored_bytes: training state it handed on.
    """

    collaborations: tuple[str, ...] = ()
    rounds: int = 0
    reduced_bytes: int = 0
    mirrored_bytes: int = 0


class Assistant:
    """Helps the collaborations of a run, as they show up.

    Args:
        run_id: of the run.
        name: this peer's, for people.
        collaboration: the name of the only collaboration to help; None: all.
        memory: of a backbone.
    """

    def __init__(
        self,
        services: PeerServices,
        run_id: str,
        *,
        name: str,
        collaboration: str | None = None,
        memory: Memory = NO_MEMORY,
    ) -> None:
        self._services = services
        self._memory = memory
        self._run_id = run_id
        self._name = name
        self._only = "" if collaboration is None else f"{run_id}/{collaboration}"
        self._tally = AssistantTally()
        self._parts: dict[str, _Part] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Tell the run that this peer assists.

        Raises:
            ValueError: this peer assists the run already.
        """
        self._services.rooms.welcome(self)
        # The run's own name is no collaboration's: this part keeps the messages served that lead to `enter`.
        self._parts[""] = _Part(self._services, self._run_id, self._tally, self._memory)
        await self._tell(ttl_s=TTL_S)
        self._tasks.append(asyncio.create_task(self._keep_telling(), name="assist"))

    async def stop(self) -> None:
        """Help no more, and say so."""
        self.kill()
        await self._tell(ttl_s=0.5)

    def kill(self) -> None:
        """Help no more, without a word."""
        for task in self._tasks:
            task.cancel()
        self._services.rooms.welcome(None)
        for prefix in list(self._parts):
            self.leave(prefix)

    def tally(self) -> AssistantTally:
        """What was done so far; safe from any thread."""
        return replace(self._tally, collaborations=tuple(filter(None, list(self._parts))))

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            for prefix, part in list(self._parts.items()):
                if prefix and _now() - part.used_at > IDLE_S:
                    self.leave(prefix)
            try:
                await self._tell(ttl_s=TTL_S)
            except PeerError as error:
                logger.info("could not tell that this peer assists: %s", error)

    async def _tell(self, *, ttl_s: float) -> None:
        peers, key = self._services.peers, assistants_key(self._run_id)
        record = AssistantRecord(self._name, peers.contact.addresses, self._only, peers.time())
        await self._services.dht.store(key, record, subkey=peers.id, ttl_s=ttl_s, signed=True)

    def enter(self, prefix: str) -> None:
        """A message came for a collaboration that is new here: help it."""
        wanted = prefix == self._only if self._only else prefix.startswith(f"{self._run_id}/")
        if wanted and len(prefix) <= MAX_TEXT:
            if len(self._parts) > MAX_COLLABORATIONS:
                self.leave(min(filter(None, self._parts), key=lambda other: self._parts[other].used_at))
            self._parts[prefix] = _Part(self._services, prefix, self._tally, self._memory)

    def leave(self, prefix: str) -> None:
        """Help this collaboration no more, for now."""
        if part := self._parts.pop(prefix, None):
            part.close()


class _Part:
    """What an assistant does for one collaboration."""

    def __init__(self, services: PeerServices, prefix: str, tally: AssistantTally, memory: Memory) -> None:
        self.used_at = _now()
        self._services = services
        self._prefix = prefix
        self._tally = tally
        self._memory = memory
        self._records: Mapping[PeerId, ProgressRecord] = {}
        self._lost: dict[PeerId, ProgressRecord] = {}  # what they told last before their links broke
        self._assistants: Collection[PeerId] = ()
        self._last: Group | None = None  # of the last round here
        self._line = LinkBandwidth()
        self._read_at = float("-inf")
        self._rounds: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        self._callers: dict[tuple[int, bytes], set[PeerId]] = {}  # of these rounds
        self._matchmaker = Matchmaker(
            services.rooms, prefix, expected=self._expected, on_called=self._on_called, settings=MATCHMAKING
        )
        self._mirror = Mirror(
            services.rooms,
            prefix,
            donors=self._donors,
            on_sent=self._on_sent,
            stored=partial(memory.stored, prefix),
        )
        self._stop_listening = services.peers.on_lost(self._on_lost)

    def close(self) -> None:
        """Serve this collaboration no more."""
        self._stop_listening()
        self._matchmaker.close()
        self._mirror.close()
        for task in self._rounds.values():
            task.cancel()
        self._services.averager.forget(self._prefix)

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        """Take part in whatever round is called, as far as memory goes."""
        self.used_at = _now()
        key = (terms.step, terms.lineage)
        self._callers.setdefault(key, set()).add(caller)
        if key not in self._rounds:
            if len(self._rounds) >= MAX_ROUNDS or VECTORS_IN_MEMORY * 4 * terms.numel > _memory_bytes():
                del self._callers[key]
                return None
            self._rounds[key] = asyncio.create_task(self._take_part(terms), name=f"assist {terms.step}")
        return 0.0

    async def _take_part(self, terms: Ticket) -> None:
        began_at = _now()
        try:
            candidates = self._known(terms.step, terms.lineage)
            group = await self._matchmaker.join(self._ticket(terms), candidates, _now() + ROUND_TIMEOUT_S)
            self._last, formed_at = group, _now()
            result = await self._services.averager.reduce(group)
            self._line.on_round(result)
        except (PeerError, MemoryError) as error:
            logger.debug("no part in step %d: %s", terms.step, error)
        else:
            self._tally.rounds += 1
            self._tally.reduced_bytes += result.sent_bytes + result.received_bytes
            self._services.events.emit(result.event(began_at=began_at, now=_now()))
            self._memory.on_round(AssistedRound(self._prefix, began_at, formed_at, result))
        finally:
            del self._rounds[terms.step, terms.lineage]
            self._callers.pop((terms.step, terms.lineage), None)

    def _ticket(self, terms: Ticket) -> Ticket:
        links, addresses = self._services.peers.statistics(), self._services.peers.contact.addresses
        return msgspec.structs.replace(
            terms,
            weight=0.0,
            reduces=bool(addresses),
            upload_bps=self._line.upload.known(links.upload_bps),
            download_bps=self._line.download.known(links.download_bps),
            assists=True,
        )

    async def _expected(self, step: int, lineage: bytes) -> list[PeerId]:
        await self._read()
        return self._known(step, lineage)

    def _known(self, step: int, lineage: bytes) -> list[PeerId]:
        """Who should come: by the records, who called, and who was there a step before: records may be older."""
        linked = self._services.peers.linked()
        others = {*self._assistants, *self._callers.get((step, lineage), ())}
        if self._last is not None and self._last.step == step - 1:
            others |= {member.id for member in self._last.members}
        here = participants_of(self._records, step, lineage)
        alive = (peer for peer in here if peer in linked or self._lost.get(peer) != self._records[peer])
        return sorted((others & linked).union(alive))  # who is gone would be waited for

    def _on_lost(self, peer: PeerId) -> None:
        if record := self._records.get(peer):
            self._lost[peer] = record

    async def _donors(self) -> list[PeerId]:
        self.used_at = _now()
        await self._read()
        branch = branch_of(self._records)
        return sorted(branch.peers) if branch else []

    def _on_sent(self, size_bytes: int) -> None:
        self._tally.mirrored_bytes += size_bytes

    async def _read(self) -> None:
        """Read the trainers' records if they are not fresh; what is known must do if that takes too long."""
        if _now() - self._read_at < FRESH_S:
            return
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                peers, dht = self._services.peers, self._services.dht
                self._records, self._assistants = await asyncio.gather(
                    read_progress(dht, peers, self._prefix), read_assistants(dht, peers, self._prefix)
                )
            self._lost = {peer: told for peer, told in self._lost.items() if peer in self._records}
            self._read_at = _now()
        except (PeerError, TimeoutError) as error:
            logger.info("progress of %s not read: %s", self._prefix, error)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return UNKNOWN_MEMORY_BYTES


def _now() -> float:
    return asyncio.get_running_loop().time()


class Assistance:
    """What `Swarm.assist` began; `stop` ends it."""

    def __init__(self, runtime: Runner, assistant: Assistant) -> None:
        """Use `Swarm.assist`."""
        self._runtime = runtime
        self._assistant = assistant
        self._stopped = False
        runtime.call(assistant.start())

    def snapshot(self) -> AssistantTally:
        """What was done so far; safe from any thread."""
        return self._assistant.tally()

    def stop(self) -> None:
        """Help no more. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._runtime.call(self._assistant.stop())

    def kill(self) -> None:
        """End like a process that is killed, on the runtime's loop."""
        self._stopped = True
        self._assistant.kill()

    def __repr__(self) -> str:
        tally = self.snapshot()
        moved_mb = (tally.reduced_bytes + tally.mirrored_bytes) / 1e6
        state = "stopped" if self._stopped else f"{len(tally.collaborations)} collaborations now"
        return f"Assistance({state}, {tally.rounds} rounds, {moved_mb:.1f} MB)"
