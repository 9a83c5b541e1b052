"""iroh carries links to peers that no port leads to: QUIC between keys, hole punching, relays.

An address is ``iroh://ENDPOINT_ID@HOST``: an IP address with a port is dialled directly, a name is
the iroh relay where the endpoint waits. iroh tries to replace the relay's path by a direct one. It
carries and is not trusted: the handshake, the sealed frames and the credit of links run unchanged
inside one stream of its connection, framed as in `colab_swarm.net.websocket`. A peer of iroh that
was killed sends no reset: its links end by the keep-alive.

The generated code of iroh 1.2 copies each byte in Python; `_copy_fast` replaces that one method,
where it is the expected one.
"""

import asyncio
import ctypes
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from colab_swarm.errors import PeerError, PeerUnreachable, require
from colab_swarm.events import EventLog, Notice
from colab_swarm.net.addresses import host_of, ip_of, is_iroh, network_of
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.handshake import HandshakeReceiver
from colab_swarm.net.identity import Identity
from colab_swarm.net.websocket import WebSocket
from colab_swarm.runtime import loop_now

logger = logging.getLogger(__name__)
ALPN = b"colab_swarm/1"
VERSION = "1.2."  # of iroh, whose copying is replaced
PUBLIC_RELAYS = (".iroh.link", ".iroh.network")  # domains of the relays that n0 runs
QUOTA_BYTES = 1e9  # both ways through public relays, in a session
ONLINE_S = 10.0  # until a relay has answered
WATCH_S = 2.0
STREAM_BYTES = 1 << 20  # of one call of iroh, which costs some 0.1 ms
LINGER_S = 1.0  # for the other end to read the last bytes
NO_RELAY = "no relay of iroh answers: only peers that reach this machine's own addresses can join"
_prepared: dict[Any, bool] = {}  # whether it copies fast


def is_at_public_relay(address: str) -> bool:
    return is_iroh(address) and host_of(address).endswith(PUBLIC_RELAYS)


def _copy_fast(iroh_ffi: Any, version: str) -> bool:
    """Replace the byte-by-byte copy by one `memmove`; return False, and change nothing, where it does not fit."""
    builder: Any = getattr(iroh_ffi, "_UniffiRustBufferBuilder", None)
    if not version.startswith(VERSION) or not hasattr(builder, "write") or not hasattr(builder, "_reserve"):
        return False

    def write(self: Any, value: Any) -> None:
        data = bytes(value)
        with self._reserve(len(data)):
            ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, data, len(data))

    slow, sample = builder.write, bytes(range(256)) * 3
    try:
        written = []
        for one in (slow, write):
            trial = builder()
            one(trial, b"head")
            one(trial, sample)
            written.append(trial.rbuf.data[: trial.rbuf.len])
            trial.discard()
    except Exception as error:
        logger.info("iroh copies slowly: %s", error)
        return False
    if written[0] != written[1] or bytes(written[1]) != b"head" + sample:
        return False
    builder.write = write
    return True


def _load() -> Any:
    """Import iroh; raises `PeerUnreachable` where it is missing or broken."""
    try:
        import iroh
        from iroh import iroh_ffi
    except (ImportError, OSError) as error:  # OSError: its library is of another platform
        raise PeerUnreachable(f"iroh cannot be used here ({error}): pip install iroh") from error
    if iroh_ffi not in _prepared:
        _prepared[iroh_ffi] = _copy_fast(iroh_ffi, version("iroh"))
    return iroh


class Carried:
    """A connection whose stream is pumped from and to a socket; closing either end closes both."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def relayed(self) -> bool:
        """Whether a relay carries the bytes now."""
        return any(path.is_relay and path.is_selected for path in self._connection.paths())

    @property
    def relayed_bytes(self) -> int:
        paths = (path.stats for path in self._connection.paths() if path.is_relay)
        return sum(path.udp_tx_bytes + path.udp_rx_bytes for path in paths)

    def abort(self) -> None:
        self._connection.close(0, b"")

    async def pump(self, stream: Any, near: socket.socket) -> None:
        """Return when both directions have ended."""
        loop, receive, send = asyncio.get_running_loop(), stream.recv(), stream.send()

        async def read() -> None:
            while data := await receive.read(STREAM_BYTES):
                await loop.sock_sendall(near, data)
            near.shutdown(socket.SHUT_WR)

        async def write() -> None:
            while data := await loop.sock_recv(near, STREAM_BYTES):
                await send.write_all(data)
            await send.finish()

        with near, suppress(Exception):  # IrohError, OSError: one end is gone
            async with asyncio.TaskGroup() as both:
                both.create_task(read())
                both.create_task(write())
            async with asyncio.timeout(LINGER_S):  # the other end reads the last bytes
                await self._connection.closed()
        self.abort()


class IrohEndpoint:
    """This peer's endpoint: dials when asked to, and accepts if the settings' ``iroh`` says how.

    Its id follows from the ``identity``. ``receive`` makes the receiver of a new connection, or refuses it by a
    `PeerError`. Through n0's public relays go `QUOTA_BYTES` at most; ``events`` get a `Notice` near the end.
    """

    def __init__(
        self,
        identity: Identity,
        settings: NodeSettings,
        events: EventLog,
        scratch: memoryview,
        receive: Callable[[], HandshakeReceiver],
    ) -> None:
        self._identity, self._settings, self._events = identity, settings, events
        self._scratch, self._receive = scratch, receive
        relay = settings.iroh or "direct"
        self._public, self._relay = relay == "public", "" if relay in ("public", "direct") else relay
        self._loop = asyncio.get_running_loop()
        self._iroh: Any = None
        self._endpoint: Any = None
        self._starting = asyncio.Lock()
        self._carried: dict[Carried, int] = {}  # with the bytes that its relay has carried
        self._spent_bytes = 0
        self._fresh: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind the endpoint once; raises `PeerUnreachable` if iroh is not there or its relay does not answer."""
        async with self._starting:
            if self._endpoint is not None:
                return
            self._iroh = _load()
            try:
                self._endpoint = await self._iroh.Endpoint.bind(self._options())
            except self._iroh.IrohError as error:
                raise PeerUnreachable(f"iroh cannot open a port: {error.message()}") from error
            if self._settings.iroh:
                self._spawn(self._accept())
            if self._public:
                self._spawn(self._watch())
            if self._public or self._relay:
                try:
                    async with asyncio.timeout(ONLINE_S):
                        await self._endpoint.online()
                except TimeoutError:
                    logger.warning(NO_RELAY)
                    self._events.emit(Notice(loop_now(), NO_RELAY))

    def _options(self) -> Any:
        iroh, host = self._iroh, self._settings.host
        own = iroh.RelayMode.custom_from_urls([self._relay] if self._relay else [])
        return iroh.EndpointOptions(
            preset=iroh.preset_n0() if self._public else iroh.preset_minimal(),
            relay_mode=iroh.RelayMode.default_mode() if self._public else own,
            secret_key=self._identity.derive(b"iroh endpoint"),
            alpns=[ALPN] if self._settings.iroh else [],
            bind_addr=f"{f'[{host}]' if ':' in host else host}:0" if host else None,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial this endpoint: at its relay, then at each of its IP addresses."""
        if self._endpoint is None or not self._settings.iroh:
            return ()
        found, name = self._endpoint.addr(), str(self._endpoint.id())
        relay = host_of(url) if (url := found.relay_url()) else ""
        hosts = [*([relay.rstrip(".")] if relay else []), *sorted(found.direct_addresses())]
        return tuple(f"iroh://{name}@{host}" for host in hosts)

    @property
    def relayed(self) -> bool:
        """Whether others come through a relay, as far as they have come."""
        return bool(self._public or self._relay) and all(one.relayed for one in self._carried)

    async def connect(self, address: str, receiver: HandshakeReceiver) -> WebSocket:
        """Open a stream to ``iroh://ID@HOST``; raises `PeerUnreachable`."""
        host, at = host_of(address), address.rpartition("@")[2]
        relayed = ip_of(host) is None
        public = is_at_public_relay(address)
        agreed, left = self._public or not public, self._spent_bytes < QUOTA_BYTES or not public
        require(agreed, f"{host} is a public iroh relay, which only iroh='public' allows", PeerUnreachable)
        require(left, f"{host} may carry {QUOTA_BYTES / 1e9:g} GB, which are used up", PeerUnreachable)
        await self.start()
        iroh, url = self._iroh, f"https://{at}" if relayed else None
        try:
            if url is not None:
                await self._endpoint.insert_relay(iroh.RelayConfig(url=url))
            target = iroh.EndpointId.from_string(address.removeprefix("iroh://").partition("@")[0])
            to = iroh.EndpointAddr(target, url, [] if relayed else [at])
            connection = await self._endpoint.connect(to, ALPN)
            return await self._carry(connection, await connection.open_bi(), receiver, client=True)
        except iroh.IrohError as error:
            raise PeerUnreachable(f"{address}: {error.message()}") from error

    async def close(self) -> None:
        for one in [*self._carried]:
            one.abort()
        for task in [*self._tasks]:
            task.cancel()
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _carry(
        self, connection: Any, stream: Any, receiver: HandshakeReceiver, *, client: bool
    ) -> WebSocket:
        carried, (near, far) = Carried(connection), socket.socketpair()
        near.setblocking(False)
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
        self._carried[carried] = 0
        pumping = self._spawn(carried.pump(stream, near))
        pumping.add_done_callback(lambda _: self._carried.pop(carried))
        transport, _ = await self._loop.create_connection(asyncio.Protocol, sock=far)
        return WebSocket(transport, scratch=self._scratch, client=client, receiver=receiver)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        most = self._settings.max_handshakes
        while (incoming := await self._endpoint.accept_next()) is not None:
            source = network_of(host_of(f"//{getattr(await incoming.remote_addr(), 'addr', '')}"))
            # those of one network take no room from others; all that come by relays are one
            if self._fresh.total() >= most or self._fresh[source] >= max(1, most // 4):
                await incoming.ignore()
            else:
                self._spawn(self._take(incoming, source))

    async def _take(self, incoming: Any, source: str) -> None:
        self._fresh[source] += 1
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                connection = await (await incoming.accept()).connect()
                stream, receiver = await connection.accept_bi(), self._receive()
                websocket = await self._carry(connection, stream, receiver, client=False)
                receiver.use(websocket)
                try:
                    await receiver.link
                except (PeerError, asyncio.CancelledError) as error:
                    websocket.close(str(error) or "the handshake stalled")
                    raise
        except (PeerError, TimeoutError, self._iroh.IrohError) as error:
            logger.info("an iroh connection became no link: %s", error)
        finally:
            self._fresh[source] -= 1

    async def _watch(self) -> None:
        """Count the bytes that public relays carry, tell of the last fifth, and stop at the quota."""
        told = 0.8
        while True:
            await asyncio.sleep(WATCH_S)
            for one, before in self._carried.items():
                self._carried[one] = total = one.relayed_bytes
                self._spent_bytes += max(0, total - before)
            if (part := self._spent_bytes / QUOTA_BYTES) >= told:
                told = 1.0 if part < 1.0 else math.inf
                text = f"{part:.0%} of {QUOTA_BYTES / 1e9:g} GB went through iroh's public relays"
                self._events.emit(Notice(loop_now(), text))
            for one in self._carried if part >= 1.0 else ():
                if one.relayed:
                    one.abort()
