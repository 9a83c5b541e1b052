"""Reads the objects of a run's rounds, each once, and checks what members wrote. Each fault is reported once."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from colab_swarm.errors import PeerError, ProtocolError, require
from colab_swarm.events import Fault
from colab_swarm.mailbox.branches import Read, Readings, Reject
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.rounds import (
    HEADER_BYTES,
    LEFT,
    MANIFEST,
    MANIFEST_BYTES,
    Farewell,
    H,
    PseudoGradient,
    ReadContribution,
    RoundManifest,
    content_digest,
    encoded_bytes,
    folder_of,
    norm_of,
    round_of,
    unseal,
)
from colab_swarm.net.peers import Role
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Codec
from colab_swarm.training.settings import PeerServices

logger = logging.getLogger(__name__)
T = TypeVar("T")


def existing(data: bytes | None) -> bytes:
    """Return an object; raises `ProtocolError` if there is none."""
    if data is None:
        raise ProtocolError("it is not there")
    return data


class Reader:
    """What this peer has read of a model's rounds; ``fetch`` returns the object at a path."""

    def __init__(
        self,
        fetch: Callable[[str], Coroutine[Any, Any, bytes | None]],
        services: PeerServices,
        prefix: str,
        codec: Codec,
        numel: int,
    ) -> None:
        self.readings = Readings()
        self._fetch = fetch
        self._services = services
        self._prefix = prefix
        self._codec = codec
        self._numel = numel

    async def answer(self, question: Callable[[], T | Read | Reject]) -> T:
        """Ask until the answer is no step, and do each step. Raises `BucketError`."""
        while True:
            answer = question()
            if isinstance(answer, Read):
                await asyncio.gather(*map(self._read, answer.places))
            elif isinstance(answer, Reject):
                self._reject(answer.place, answer.fault)
            else:
                return answer

    def opened(self, data: bytes, kind: type[H], written_at: float) -> tuple[H, memoryview]:
        """Return a member's statement about this model, and its content; raises `ProtocolError` if it is none."""
        statement, content = unseal(data, kind)
        require(statement.prefix == self._prefix, "it is of another model", ProtocolError)
        role = self._services.peers.role_by(statement.key, statement.membership, written_at)
        require(role >= Role.WORKER, "its writer is no member that trains", ProtocolError)
        return statement, content

    def tell_fault(self, place: StoredObject, fault: str) -> None:
        text = f"{place.path} does not count: {fault}"
        logger.info("%s", text)
        self._services.events.emit(Fault(loop_now(), "the bucket", text))

    def _reject(self, place: StoredObject, fault: str) -> None:
        self.readings.faults[place] = fault
        self.tell_fault(place, fault)

    async def _read(self, place: StoredObject) -> None:
        name = place.path.rpartition("/")[2]
        try:
            if name.startswith(MANIFEST):
                await self._read_manifest(place)
            elif name.endswith(LEFT):
                await self._read_farewell(place)
            else:
                await self._read_contribution(place)
        except (PeerError, ValueError) as error:
            self._reject(place, str(error))

    async def _read_manifest(self, place: StoredObject) -> None:
        data = await self._bounded(place, MANIFEST_BYTES)
        manifest, _ = self.opened(data, RoundManifest, place.modified_at)
        self.readings.manifests[place] = manifest, content_digest(data)

    async def _read_farewell(self, place: StoredObject) -> None:
        data = await self._bounded(place, HEADER_BYTES)
        farewell, _ = self.opened(data, Farewell, place.modified_at)
        folder = folder_of(round_of(place.path), farewell.base)
        named = place.path == f"{folder}/{farewell.member.hex()}{LEFT}"
        require(named, "it is another member's, or another round's", ProtocolError)
        self.readings.farewells.add(place)

    async def _read_contribution(self, place: StoredObject) -> None:
        data = await self._bounded(place, HEADER_BYTES + encoded_bytes(self._codec, self._numel))
        head, content = self.opened(data, PseudoGradient, place.modified_at)
        named = place.path == f"{folder_of(head.round, head.base)}/{head.member.hex()}"
        require(named, "it is another member's, or another round's", ProtocolError)
        require(head.weight > 0, "it has no weight", ProtocolError)
        norm = await asyncio.to_thread(norm_of, self._codec, content, self._numel)
        self.readings.contributions[place] = ReadContribution(head, content, content_digest(data), norm)

    async def _bounded(self, place: StoredObject, most_bytes: int) -> bytes:
        """Return an object of at most this size; raises `ProtocolError` if there is none."""
        require(place.size_bytes <= most_bytes, "it is too large", ProtocolError)
        return existing(await self._fetch(place.path))
