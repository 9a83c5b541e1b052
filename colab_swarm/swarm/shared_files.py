"""Files that all peers of a run need, such as its tokenizer. An invitation names each file by its hash.

Each peer that has downloaded a file serves it to others, so the peer that began the run need not be online. In a run
over links, peers find the holders of a file in the DHT. In a run with a bucket, the file is an object in the bucket.
"""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from colab_swarm.errors import JoinError, PeerError, StateError, require
from colab_swarm.files import write_file
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.net.peers import Contact, Message, PeerId, Refusal, Stream
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import ChunkDownload, FetchChunks, Manifest, Snapshot, send_chunks
from colab_swarm.training.settings import PeerServices

PREFIX = "file:"
MAX_BYTES = 64 << 20
FIND_S = 60.0
"""How long to search for a holder of a file that answers."""
FileName = Annotated[str, msgspec.Meta(max_length=64)]
_RETRY_S = 2.0
_CALL_S = 10.0
_HASH_HEX = 32
_MOST_ASKED = 16
_ANNOUNCE_S = 60.0


class DescribeFile(Message, frozen=True):
    """Request the manifest of a file by its name."""

    name: FileName


class FetchFile(FetchChunks, frozen=True):
    """Opens a stream of chunks of the file with this name."""

    name: FileName


class SharedFiles:
    """The run's files at this peer, in ``folder``. The methods run on the event loop."""

    def __init__(self, services: PeerServices, folder: Path, bucket: Bucket | None) -> None:
        self._services = services
        self._peers = services.peers
        self._folder = folder
        self._bucket = bucket
        self._held: dict[str, Snapshot] = {}
        self._peers.serve(DescribeFile, self._describe)
        self._peers.serve_stream(FetchFile, self._send)

    async def share(self, data: bytes) -> str:
        """Serve a file to the others from now on; return its name, which is `PREFIX` and 128 bits of its hash."""
        require(
            len(data) <= MAX_BYTES, f"a file of {len(data):,} bytes is too large to share: {MAX_BYTES:,} fit"
        )
        file = _snapshot(data)
        name = _name_of(file.manifest)
        await self._write(name, file)
        await self._hold(name, file)
        return name

    async def path_of(self, name: str) -> Path:
        """Return the local path of a file of the run; download the file from its holders if it is missing.

        Raises JoinError if no peer that is online holds it.
        """
        path = self._folder / name.removeprefix(PREFIX)
        with suppress(OSError):
            file = _snapshot(path.read_bytes())
            if _name_of(file.manifest) == name:
                await self._hold(name, file)
                return path
        file = await self._found(name)
        await self._write(name, file)
        await self._hold(name, file)
        return path

    async def _write(self, name: str, file: Snapshot) -> None:
        path = self._folder / name.removeprefix(PREFIX)
        await asyncio.to_thread(write_file, path, [memoryview(file.blob.data)])

    async def _hold(self, name: str, file: Snapshot) -> None:
        if name in self._held:
            return
        self._held[name] = file
        if self._bucket is not None:
            await self._bucket.create(_object(name), memoryview(file.blob.data))
            return
        self._peers.spawn(self._announce(name))

    async def _announce(self, name: str) -> None:
        while True:
            with suppress(PeerError):
                await self._services.dht.publish(self._key(name), self._peers.contact, ttl_s=3 * _ANNOUNCE_S)
            await asyncio.sleep(_ANNOUNCE_S)

    async def _found(self, name: str) -> Snapshot:
        until = loop_now() + FIND_S
        text = f"no peer that is online has {name} of this invitation: the peer that invited you has it, ask it to join"
        while True:
            with suppress(PeerError, StateError):
                return await self._fetch(name)
            require(loop_now() < until, text, JoinError)
            await asyncio.sleep(_RETRY_S)

    async def _fetch(self, name: str) -> Snapshot:
        """Fetch a file from its present holders. Raises StateError if none of them sends the whole file."""
        if self._bucket is not None:
            file = _snapshot(await self._bucket.read(_object(name), MAX_BYTES) or b"")
            require(_name_of(file.manifest) == name, f"{name} is not in the bucket", StateError)
            return file
        found = await self._services.dht.published(self._key(name), Contact)
        holders = [
            peer for peer in {**found, **dict.fromkeys(self._peers.linked())} if peer != self._peers.id
        ]
        donors: list[PeerId] = []
        manifest: Manifest | None = None

        async def ask(holder: PeerId) -> None:
            nonlocal manifest
            with suppress(PeerError):
                answer = await self._peers.call(holder, DescribeFile(name), Manifest, timeout_s=_CALL_S)
                # a holder that offers a file with another hash is lying
                if _name_of(answer) == name and answer.size_bytes <= MAX_BYTES:
                    manifest = answer
                    donors.append(holder)

        await asyncio.gather(*map(ask, holders[:_MOST_ASKED]))
        if manifest is None:
            raise StateError(f"no holder of {name} answers")
        download = ChunkDownload(
            self._peers, manifest, partial(FetchFile, name=name), title="a file of the run"
        )
        await download.run(donors)
        return Snapshot(manifest, download.blob)

    async def _describe(self, _peer: PeerId, ask: DescribeFile) -> Manifest:
        if ask.name not in self._held:
            raise Refusal("that file is not here")
        return self._held[ask.name].manifest

    async def _send(self, ask: FetchFile, stream: Stream) -> None:
        if ask.name not in self._held:
            raise Refusal("that file is not here")
        await send_chunks(ask, stream, self._held[ask.name].read)

    def _key(self, name: str) -> str:
        return f"{self._services.run_id}/files/{name}"


def _snapshot(data: bytes) -> Snapshot:
    return Snapshot.of(b"file", 0, np.frombuffer(data, np.uint8))


def _name_of(manifest: Manifest) -> str:
    return PREFIX + manifest.root.hex()[:_HASH_HEX]


def _object(name: str) -> str:
    return f"files/{name.removeprefix(PREFIX)}"
