"""An assistant (DeDLOC's auxiliary peer) trains nothing, and lets peers that only dial out train.

It organizes their rounds, reduces, and passes on the training state to late joiners. It needs no
torch, data or model, because the calling trainer's ticket describes the round.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial

from colab_swarm.averaging.group import MAX_TEXT, GroupFormationSettings, RoundTerms, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.memory import SwarmView
from colab_swarm.dht.service import BackgroundTasks
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import Runner, loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.progress import WATCHING, Progress
from colab_swarm.training.records import AssistantRecord, assistants_key
from colab_swarm.training.settings import HEAVIEST, ROUND_TIMEOUT_S, LinkBandwidth, PeerServices
from colab_swarm.training.state import Mirror

logger = logging.getLogger(__name__)

PUBLISH_S = 15.0
_TTL_S = 4 * PUBLISH_S
_FRESH_S = 1.0  # older records are read again before peers are invited to a round
IDLE_S = 900.0
_MAX_ROUNDS = 4  # of one collaboration at once
_MOST_OF_A_VOUCHER = 2  # of those, to which none but peers of one voucher call
_UNKNOWN_MEMORY_BYTES = 8 << 30
_VECTORS_IN_MEMORY = 4  # two rounds', and a reserve; a larger model is refused
_MATCHMAKING = GroupFormationSettings(window_s=5.0, slack_s=5.0, heaviest=HEAVIEST)


async def _nothing_stored(_prefix: str) -> Snapshot | None:
    return None


class Assistant:
    """Helps the collaborations of a run, or only the named one, as their first messages arrive.

    ``await stored(prefix)`` is a checkpoint of a backbone to give when no trainer is left.
    """

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        run_id: str,
        *,
        name: str,
        collaboration: str | None = None,
        stored: Callable[[str], Awaitable[Snapshot | None]] = _nothing_stored,
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._stored = stored
        self._run_id = run_id
        self._name = name
        self._only = "" if collaboration is None else f"{run_id}/{collaboration}"
        self.rounds = 0  # in which it reduced
        self._parts: dict[str, _Part] = {}
        self._tasks = BackgroundTasks("assisting", services.events, services.rng)
        self._stopped = False

    async def start(self) -> None:
        """Publish to the run that this peer assists; raises `ValueError` if it does so already."""
        self._services.router.assist(self.enter, self.leave)
        # No collaboration has the run's own name: this part serves the messages that lead to `enter`.
        self._parts[""] = _Part(self, self._services, self._run_id, self._stored)
        await self._publish(ttl_s=_TTL_S)
        self._tasks.every(PUBLISH_S, self._keep_publishing)

    async def withdraw(self) -> None:
        """Stop assisting, with a record that expires at once."""
        self.kill()
        await self._publish(ttl_s=0.5)

    def stop(self) -> None:
        if not self._stopped:
            self._runtime.call(self.withdraw())

    def kill(self) -> None:
        """Stop without notice; on the runtime's event loop."""
        self._stopped = True
        self._tasks.cancel()
        self._services.router.assistant = None
        for prefix in list(self._parts):
            self.leave(prefix)

    @property
    def collaborations(self) -> tuple[str, ...]:
        """Return the prefixes of the collaborations that it assists now."""
        return tuple(filter(None, list(self._parts)))

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"{len(self.collaborations)} collaborations now"
        return f"Assistant({state}, {self.rounds} rounds)"

    async def _keep_publishing(self) -> None:
        for prefix, part in list(self._parts.items()):
            if prefix and loop_now() - part.used_at > IDLE_S:
                self.leave(prefix)
        await self._publish(ttl_s=_TTL_S)

    async def _publish(self, *, ttl_s: float) -> None:
        peers = self._services.peers
        record = AssistantRecord(self._name, peers.contact.addresses, self._only, peers.time())
        await self._services.dht.publish(assistants_key(self._run_id), record, ttl_s=ttl_s)

    def enter(self, prefix: str) -> None:
        """Start to help a collaboration whose message arrived."""
        wanted = prefix == self._only if self._only else prefix.startswith(f"{self._run_id}/")
        if wanted and len(prefix) <= MAX_TEXT:
            if len(self._parts) > 16:
                self.leave(min(filter(None, self._parts), key=lambda other: self._parts[other].used_at))
            self._parts[prefix] = _Part(self, self._services, prefix, self._stored)

    def leave(self, prefix: str) -> None:
        part = self._parts.pop(prefix, None)
        if part is not None:
            part.close()


class _Part(SwarmView):
    def __init__(
        self,
        assistant: Assistant,
        services: PeerServices,
        prefix: str,
        stored: Callable[[str], Awaitable[Snapshot | None]],
    ) -> None:
        self.used_at = loop_now()
        self._assistant = assistant
        self._services = services
        self._prefix = prefix
        self._progress = Progress(services.peers.id, WATCHING, prefix)
        self._bandwidth = LinkBandwidth(services.peers)
        self._read_at = float("-inf")
        self._rounds: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        # Who called to each of these rounds.
        self._callers: dict[tuple[int, bytes], set[PeerId]] = {}
        self._matchmaker = Matchmaker(
            services.router,
            prefix,
            self,
            settings=_MATCHMAKING,
        )
        self._mirror = Mirror(services.router, prefix, partial(stored, prefix), self._donors)
        self._stop_listening = services.peers.on_lost(self._on_lost)

    def close(self) -> None:
        self._stop_listening()
        self._matchmaker.close()
        self._mirror.close()
        for task in self._rounds.values():
            task.cancel()
        self._services.averager.forget(self._prefix)

    def on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        self.used_at = loop_now()
        if terms.key not in self._rounds:
            self._make_room(caller)
            if len(self._rounds) >= _MAX_ROUNDS or _VECTORS_IN_MEMORY * 4 * terms.numel > _memory_bytes():
                return None
            self._rounds[terms.key] = asyncio.create_task(self._take_part(terms), name=f"assist {terms.step}")
        # Its own organizer asks as well.
        self._callers.setdefault(terms.key, set()).update({caller} - {self._services.peers.id})
        return 0.0

    def _make_room(self, caller: PeerId) -> None:
        """Leave rounds to which only the caller's voucher called: it may invent any number."""
        voucher_of = self._services.peers.voucher_of
        kin = []
        for key, callers in self._callers.items():
            if set(map(voucher_of, callers)) == {voucher_of(caller)}:
                kin.append(key)
        kin.sort(key=lambda key: len(self._callers[key]))
        for key in kin[: 1 - _MOST_OF_A_VOUCHER]:
            self._rounds.pop(key).cancel()
            del self._callers[key]

    async def _take_part(self, terms: RoundTerms) -> None:
        began_at = loop_now()
        reduces = bool(self._services.peers.contact.addresses)
        metered = self._services.peers.metered
        ticket = Ticket(terms, 0.0, reduces, *self._bandwidth.known(), assists=True, metered=metered)
        try:
            group = await self._matchmaker.join(ticket, self._known(*terms.key), loop_now() + ROUND_TIMEOUT_S)
            result = await self._services.averager.reduce(group)
            self._bandwidth.on_round(result)
        except (PeerError, MemoryError) as error:
            logger.debug("not in the round of step %d: %s", terms.step, error)
        else:
            self._assistant.rounds += 1
            self._services.events.emit(result.event(began_at=began_at, now=loop_now()))
        finally:
            if self._rounds.get(terms.key) is asyncio.current_task():
                del self._rounds[terms.key]
                del self._callers[terms.key]

    async def expected(self, step: int, lineage: bytes) -> list[PeerId]:
        await self._read()
        return self._known(step, lineage)

    def believed_s(self, peer: PeerId) -> float:
        return self._progress.forecast.believed_s(peer)

    def _known(self, step: int, lineage: bytes) -> list[PeerId]:
        assistants = self._progress.known.assistants.keys() & self._services.peers.linked()
        known = self._progress.known.participants(step, lineage)  # a record may be late
        return sorted(known | assistants | self._matchmaker.likely(step, lineage))

    def _on_lost(self, peer: PeerId) -> None:
        self._progress.known.on_lost(peer, now=loop_now())

    async def _donors(self) -> list[PeerId]:
        self.used_at = loop_now()
        await self._read()
        donors = sorted(self._progress.election.branch().peers)
        # In the order of ids, the same member would be asked each time.
        self._services.rng.shuffle(donors)
        return donors

    async def _read(self) -> None:
        if loop_now() - self._read_at < _FRESH_S:
            return
        try:  # after a timeout the old ones must do
            async with asyncio.timeout(3.0):
                await self._progress.refresh(self._services.dht, self._services.peers)
            self._read_at = loop_now()
        except (PeerError, TimeoutError) as error:
            logger.info("progress of %s not read: %s", self._prefix, error)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return _UNKNOWN_MEMORY_BYTES
