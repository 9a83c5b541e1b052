"""What peers tell each other in the DHT: trainers their progress, assistants that they are there."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from colab_swarm.dht.search import is_sound
from colab_swarm.dht.service import DHT
from colab_swarm.net.peers import Contact, M, Message, PeerId, Peers
from colab_swarm.training.progress import ProgressRecord

logger = logging.getLogger(__name__)
MAX_ASSISTANTS = 16


class AssistantRecord(Message, frozen=True):
    """A peer that reduces and hands on the state for a run's collaborations; signed, under its own subkey.

    Attributes:
        name: for people.
        addresses: where it can be dialled.
        collaboration: prefix of the only one that it helps; empty: any of the run.
        told_at: its swarm time; a record that is not newer is no sign of life.
    """

    name: str
    addresses: tuple[str, ...]
    collaboration: str
    told_at: float


class Assistants:
    """A collaboration's assistants as one peer knows them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._records: dict[PeerId, AssistantRecord] = {}
        self._lost: dict[PeerId, float] = {}  # when it last told

    @property
    def records(self) -> Mapping[PeerId, AssistantRecord]:
        """Those believed alive."""
        return self._records

    def on_records(self, records: Mapping[PeerId, AssistantRecord]) -> None:
        """Take the live records just read; one from before its writer was lost does not count."""
        alive = {
            peer: record
            for peer, record in sorted(records.items())
            if record.addresses
            and record.collaboration in ("", self._prefix)
            and record.told_at > self._lost.get(peer, float("-inf"))
        }
        self._records = dict(list(alive.items())[:MAX_ASSISTANTS])
        self._lost = {peer: at for peer, at in self._lost.items() if peer in records and peer not in alive}

    def on_lost(self, peer: PeerId) -> None:
        """Its link broke: it does not count until it tells again."""
        if record := self._records.pop(peer, None):
            self._lost[peer] = record.told_at


def progress_key(prefix: str) -> str:
    """Where the trainers of a collaboration tell their progress."""
    return f"{prefix}/progress"


def assistants_key(prefix: str) -> str:
    """Where the assistants of a run tell that they are there; ``prefix``: of any of its collaborations."""
    return f"{prefix.partition('/')[0]}/assistants"


async def read_progress(dht: DHT, peers: Peers, prefix: str) -> dict[PeerId, ProgressRecord]:
    """The live progress records of a collaboration."""
    return await _read(dht, peers, progress_key(prefix), ProgressRecord)


async def read_assistants(dht: DHT, peers: Peers, prefix: str) -> dict[PeerId, AssistantRecord]:
    """The live records of a run's assistants."""
    return await _read(dht, peers, assistants_key(prefix), AssistantRecord)


async def _read(dht: DHT, peers: Peers, key: str, kind: type[M]) -> dict[PeerId, M]:
    """The records that are sound, by peer; what they say of addresses is learnt."""
    records: dict[PeerId, M] = {}
    for subkey, found in (await dht.get(key)).items():
        try:
            record = msgspec.convert(found.value, kind, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            logger.info("record of %s ignored: %s", subkey.hex()[:8], error)
            continue
        contact = Contact(PeerId(subkey), record.addresses)  # type: ignore[attr-defined]
        if is_sound(contact):
            peers.learn(contact)
            records[contact.id] = record
    return records
