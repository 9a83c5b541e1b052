"""An assistant (DeDLOC's auxiliary peer) does not train: it helps peers to train together that cannot be dialled.

An assistant organizes the rounds of these peers, reduces in them (averages a part of the vector), and forwards the
training state to late joiners. It needs no torch, data or model, because the trainers' messages describe each round.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial

from colab_swarm.averaging.forming import FormationSettings
from colab_swarm.averaging.group import MAX_TEXT, Group, RoundTerms, Ticket
from colab_swarm.averaging.rendezvous import Rendezvous
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.runtime import BackgroundTasks, Runner, loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.records import AssistantRecord, assistants_key
from colab_swarm.training.settings import LinkBandwidth, PeerServices
from colab_swarm.training.state import Mirror
from colab_swarm.training.view import WATCHING, SwarmView

logger = logging.getLogger(__name__)

PUBLISH_S = 15.0
_TTL_S = 4 * PUBLISH_S
_FRESH_S = 1.0  # records that are older than this are read again
IDLE_S = 900.0
_MAX_ROUNDS = 4  # rounds of one collaboration that may run at the same time
_UNKNOWN_MEMORY_BYTES = 8 << 30
_VECTORS_IN_MEMORY = 4  # memory for two rounds, and a reserve; the assistant does not reduce a larger model


async def _nothing_stored(_prefix: str) -> Snapshot | None:
    return None


class Assistant(AbstractContextManager["Assistant"]):
    """Helps all collaborations of a run, or only the named collaboration, each from its first message on.

    ``await stored(prefix)`` returns a backbone's checkpoint, which late joiners get when no trainer is left.
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
        self.run_id = run_id
        self._name = name
        self._only = "" if collaboration is None else f"{run_id}/{collaboration}"
        self.rounds = 0  # number of rounds in which this assistant reduced
        self._parts: dict[str, _Part] = {}
        self._tasks = BackgroundTasks("assisting", services.events, services.rng)
        self._stopped = False

    async def start(self) -> None:
        """Publish to the run that this peer assists; raises `ValueError` if this peer assists already."""
        self._services.router.assist(self.enter, self.leave)
        # No collaboration is named like the run itself: this part only serves the messages that lead to `enter`.
        self._parts[""] = _Part(self, self._services, self.run_id, self._stored)
        await self._publish(ttl_s=_TTL_S)
        self._tasks.every(PUBLISH_S, self._keep_publishing)

    async def withdraw(self) -> None:
        """Stop assisting, and replace the published record by one that expires after 0.5 s."""
        self.kill()
        await self._publish(ttl_s=0.5)

    def close(self) -> None:
        if not self._stopped:
            self._runtime.call(self.withdraw())

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Stop without telling other peers. Call it on the runtime's event loop."""
        self._stopped = True
        self._tasks.cancel()
        self._services.router.assistant = None
        for prefix in list(self._parts):
            self.leave(prefix)

    @property
    def collaborations(self) -> tuple[str, ...]:
        """The prefixes of the collaborations that this assistant helps now."""
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
        await self._services.dht.publish(assistants_key(self.run_id), record, ttl_s=ttl_s)

    def enter(self, prefix: str) -> None:
        """Start to help a collaboration whose message arrived."""
        wanted = prefix == self._only if self._only else prefix.startswith(f"{self.run_id}/")
        if wanted and len(prefix) <= MAX_TEXT:
            if len(self._parts) > 16:
                self.leave(min(filter(None, self._parts), key=lambda other: self._parts[other].used_at))
            self._parts[prefix] = _Part(self, self._services, prefix, self._stored)

    def leave(self, prefix: str) -> None:
        part = self._parts.pop(prefix, None)
        if part is not None:
            part.close()


class _Part:
    """An assistant's part in one collaboration: it stands at the organizer, or organizes itself, and reduces."""

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
        self._view = SwarmView(services.peers.id, WATCHING, prefix)
        self._bandwidth = LinkBandwidth(services.peers)
        self._read_at = float("-inf")
        self._rounds: set[asyncio.Task[None]] = set()
        settings = FormationSettings(RoundTerms(prefix, 0, b"", 0), 0.0, AdaptiveShares())
        self._rendezvous = Rendezvous(services.router, prefix, settings, self)
        self._offer()
        self._mirror = Mirror(services.router, prefix, partial(stored, prefix), self._donors)
        self._stop_listening = services.peers.on_lost(self._on_lost)
        if prefix != assistant.run_id:
            self._rendezvous.start()

    def close(self) -> None:
        self._stop_listening()
        self._rendezvous.close()
        self._mirror.close()
        for task in self._rounds:
            task.cancel()
        self._services.averager.forget(self._view.prefix)

    def _offer(self) -> None:
        """Tell the organizer, by a ticket, that this peer can reduce, and with which bandwidth."""
        peers = self._services.peers
        terms = self._rendezvous.settings.terms
        reduces = bool(peers.contact.addresses)
        self._rendezvous.share.assistant = Ticket(
            terms, 0.0, reduces, *self._bandwidth.known(), assists=True, metered=peers.metered
        )

    async def organizers(self) -> list[Contact]:
        await self._read()
        return self._view.organizers(self._services.peers.contact)

    def live(self) -> set[PeerId]:
        return self._view.live(self._services.peers.linked())

    def helpers(self) -> set[PeerId]:
        return self._view.other_organizers

    def on_granted(self) -> None:
        """Do nothing, because an assistant computes no gradients."""

    def on_group(self, group: Group, *, contributes: bool) -> None:
        self.used_at = loop_now()
        own = group.index_of(self._services.peers.id)
        if own is None or not group.members[own].share:
            return
        too_large = _VECTORS_IN_MEMORY * 4 * group.terms.numel > _memory_bytes()
        if len(self._rounds) < _MAX_ROUNDS and not too_large:
            task = asyncio.create_task(self._reduce(group), name=f"assist {group.terms.step}")
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)

    async def _reduce(self, group: Group) -> None:
        began_at = loop_now()
        try:
            result = await self._services.averager.reduce(group)
        except (PeerError, MemoryError) as error:
            logger.debug("not in the round of step %d: %s", group.terms.step, error)
            return
        self._bandwidth.on_round(result)
        self._offer()
        self._assistant.rounds += 1
        self._services.events.emit(result.event(began_at=began_at, now=loop_now()))

    def _on_lost(self, peer: PeerId) -> None:
        self._view.on_lost(peer, swarm_now=self._services.peers.time())

    async def _donors(self) -> list[PeerId]:
        self.used_at = loop_now()
        await self._read()
        donors = sorted(self._view.branch().peers)
        # In the order of ids, the same peer would be asked first each time.
        self._services.rng.shuffle(donors)
        return donors

    async def _read(self) -> None:
        if loop_now() - self._read_at < _FRESH_S:
            return
        try:  # after a timeout, the records that were read before must do
            async with asyncio.timeout(3.0):
                await self._view.refresh(self._services.dht, self._services.peers)
            self._read_at = loop_now()
        except (PeerError, TimeoutError) as error:
            logger.info("records of %s not read: %s", self._view.prefix, error)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return _UNKNOWN_MEMORY_BYTES
