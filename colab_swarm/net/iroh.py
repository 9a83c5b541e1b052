"""iroh carries links to peers that accept no connections on a port: QUIC between keys, hole punching, relays.

An address is ``iroh://ENDPOINT_ID@HOST``. If HOST is an IP address with a port, it is dialled directly. If HOST is a
name, it is the iroh relay where the endpoint waits, and iroh tries to replace the path through the relay by a direct
one. iroh is not trusted: the handshake, the encrypted frames and the flow control of links run unchanged
inside one stream of an iroh connection, framed as in `colab_swarm.net.websocket`. A killed peer
sends no reset over iroh, so its links end by the keep-alive.

The generated code of iroh 1.2 copies each byte in Python. `_copy_fast` replaces this one method if the replacement
writes the same bytes.
"""

import asyncio
import ctypes
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from colab_swarm.errors import PeerError, PeerUnreachable, require
from colab_swarm.events import EventLog, Notice
from colab_swarm.net.addresses import host_of, ip_of, is_iroh, network_of
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.handshake import HANDSHAKE_TIMEOUT_S, MAX_HANDSHAKES, HandshakeReceiver
from colab_swarm.net.identity import Identity
from colab_swarm.net.websocket import WebSocket
from colab_swarm.runtime import loop_now

logger = logging.getLogger(__name__)
_ALPN = b"colab_swarm/1"
# The version of iroh whose copying is replaced.
VERSION = "1.2."
# Domains of the relays that n0 runs.
_PUBLIC_RELAYS = (".iroh.link", ".iroh.network")
# Maximum bytes in both directions through public relays, in a session.
QUOTA_BYTES = 1e9
# Part of the quota at which the user is warned; when all of it is used, the peer stops using public relays.
_WARNED_SHARE = 0.8
# A relay has this time to answer.
ONLINE_S = 10.0
WATCH_S = 2.0
# A call of iroh costs about 0.1 ms, so each call transfers many bytes.
_STREAM_BYTES = 1 << 20
# The other end has this time to read the last bytes.
_LINGER_S = 1.0
NO_RELAY = "no relay of iroh answers: only peers that reach this machine's own addresses can join"
# For each loaded module of iroh, True if it copies fast.
_prepared: dict[Any, bool] = {}


def is_at_public_relay(address: str) -> bool:
    return is_iroh(address) and host_of(address).endswith(_PUBLIC_RELAYS)


def _copy_fast(iroh_ffi: Any, version: str) -> bool:
    """Replace the byte-by-byte copy by one `memmove`; return False, with nothing changed, if the code is different."""
    builder: Any = getattr(iroh_ffi, "_UniffiRustBufferBuilder", None)
    has_methods = hasattr(builder, "write") and hasattr(builder, "_reserve")
    if not has_methods or not version.startswith(VERSION):
        return False

    def write(self: Any, value: Any) -> None:
        data = bytes(value)
        with self._reserve(len(data)):
            ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, data, len(data))

    sample = bytes(range(256)) * 3
    try:
        outputs = []
        for method in (builder.write, write):
            trial = builder()
            method(trial, b"head")
            method(trial, sample)
            outputs.append(trial.rbuf.data[: trial.rbuf.len])
            trial.discard()
    except Exception as error:
        logger.info("iroh copies slowly: %s", error)
        return False
    slow_output, fast_output = outputs
    if slow_output != fast_output or bytes(fast_output) != b"head" + sample:
        return False
    builder.write = write
    return True


def _load() -> Any:
    """Import iroh; raises `PeerUnreachable` if it is missing or broken."""
    try:
        import iroh
        from iroh import iroh_ffi
    except (ImportError, OSError) as error:
        # An OSError means that iroh's library is for another platform.
        raise PeerUnreachable(f"iroh cannot be used here ({error}): pip install iroh") from error
    if iroh_ffi not in _prepared:
        _prepared[iroh_ffi] = _copy_fast(iroh_ffi, version("iroh"))
    return iroh


@dataclass(eq=False)
class _Carried:
    """An iroh connection whose bytes are copied from and to a socket; closing either end closes both."""

    _connection: Any

    @property
    def relayed(self) -> bool:
        """True if a relay carries the bytes now."""
        return any(path.is_relay and path.is_selected for path in self._connection.paths())

    @property
    def relayed_bytes(self) -> int:
        total_bytes = 0
        for path in self._connection.paths():
            if path.is_relay:
                total_bytes += path.stats.udp_tx_bytes + path.stats.udp_rx_bytes
        return total_bytes

    def abort(self) -> None:
        self._connection.close(0, b"")

    async def pump(self, stream: Any, near: socket.socket) -> None:
        """Copy bytes in both directions until both have ended."""
        loop = asyncio.get_running_loop()
        receive = stream.recv()
        send = stream.send()

        async def read() -> None:
            while data := await receive.read(_STREAM_BYTES):
                await loop.sock_sendall(near, data)
            near.shutdown(socket.SHUT_WR)

        async def write() -> None:
            while data := await loop.sock_recv(near, _STREAM_BYTES):
                await send.write_all(data)
            await send.finish()

        # IrohError and OSError mean that one end is gone.
        with near, suppress(Exception):
            async with asyncio.TaskGroup() as directions:
                directions.create_task(read())
                directions.create_task(write())
            async with asyncio.timeout(_LINGER_S):
                await self._connection.closed()
        self.abort()


class IrohEndpoint:
    """This peer's iroh endpoint: it dials on request, and accepts connections if the settings' ``iroh`` is not None.

    The endpoint's id is derived from the ``identity``. ``receive`` makes the receiver of a new connection, or refuses
    the connection by a `PeerError`. At most `QUOTA_BYTES` go through n0's public relays; a `Notice` is emitted to
    ``events`` before the quota is used up.
    """

    def __init__(
        self,
        identity: Identity,
        settings: NodeSettings,
        events: EventLog,
        scratch: memoryview,
        receive: Callable[[], HandshakeReceiver],
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._events = events
        self._scratch = scratch
        self._receive = receive
        self._public = settings.iroh == "public"
        # The address of the user's own iroh relay; "" without one.
        self._relay = ""
        if settings.iroh not in (None, "", "public", "direct"):
            self._relay = str(settings.iroh)
        self._loop = asyncio.get_running_loop()
        self._iroh: Any = None
        self._endpoint: Any = None
        self._starting = asyncio.Lock()
        # For each connection, the bytes that its relay has carried.
        self._carried: dict[_Carried, int] = {}
        self._spent_bytes = 0
        # For each network, the number of its connections whose handshake is not complete.
        self._fresh: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the endpoint, once; raises `PeerUnreachable` if iroh is missing or the relay does not answer."""
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
            if not (self._public or self._relay):
                return
            try:
                async with asyncio.timeout(ONLINE_S):
                    await self._endpoint.online()
            except TimeoutError:
                logger.warning(NO_RELAY)
                self._events.emit(Notice(loop_now(), NO_RELAY))

    def _options(self) -> Any:
        iroh = self._iroh
        if self._public:
            preset = iroh.preset_n0()
            relay_mode = iroh.RelayMode.default_mode()
        else:
            relays = [self._relay] if self._relay else []
            preset = iroh.preset_minimal()
            relay_mode = iroh.RelayMode.custom_from_urls(relays)
        bind_address = None
        host = self._settings.host
        if ":" in host:
            bind_address = f"[{host}]:0"
        elif host:
            bind_address = f"{host}:0"
        return iroh.EndpointOptions(
            preset=preset,
            relay_mode=relay_mode,
            secret_key=self._identity.derive(b"iroh endpoint"),
            alpns=[_ALPN] if self._settings.iroh else [],
            bind_addr=bind_address,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial this endpoint: at its relay, then at each of its IP addresses."""
        if self._endpoint is None or not self._settings.iroh:
            return ()
        address = self._endpoint.addr()
        hosts = sorted(address.direct_addresses())
        url = address.relay_url()
        relay = host_of(url) if url else ""
        if relay:
            hosts.insert(0, relay.rstrip("."))
        id = str(self._endpoint.id())
        return tuple(f"iroh://{id}@{host}" for host in hosts)

    @property
    def relayed(self) -> bool:
        """True if a relay carries all connections that are open now."""
        if not (self._public or self._relay):
            return False
        return all(carried.relayed for carried in self._carried)

    async def connect(self, address: str, receiver: HandshakeReceiver) -> WebSocket:
        """Open a stream to ``iroh://ID@HOST``; raises `PeerUnreachable`."""
        host = host_of(address)
        may_dial = self._settings.iroh_relays or ip_of(host) is not None
        require(may_dial, f"{host} is an iroh relay, which this peer may not use", PeerUnreachable)
        if is_at_public_relay(address):
            fault = f"{host} is a public iroh relay, which only iroh='public' allows"
            require(self._public, fault, PeerUnreachable)
            fault = f"{host} may carry {QUOTA_BYTES / 1e9:g} GB, which are used up"
            require(self._spent_bytes < QUOTA_BYTES, fault, PeerUnreachable)
        await self.start()
        iroh = self._iroh
        id, _, host_and_port = address.removeprefix("iroh://").partition("@")
        try:
            endpoint_id = iroh.EndpointId.from_string(id)
            if ip_of(host) is None:
                # A name is the host name of the relay where the endpoint waits.
                url = f"https://{host_and_port}"
                await self._endpoint.insert_relay(iroh.RelayConfig(url=url))
                target = iroh.EndpointAddr(endpoint_id, url, [])
            else:
                target = iroh.EndpointAddr(endpoint_id, None, [host_and_port])
            connection = await self._endpoint.connect(target, _ALPN)
            stream = await connection.open_bi()
            return await self._carry(connection, stream, receiver, client=True)
        except iroh.IrohError as error:
            raise PeerUnreachable(f"{address}: {error.message()}") from error

    async def close(self) -> None:
        for carried in list(self._carried):
            carried.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _carry(
        self, connection: Any, stream: Any, receiver: HandshakeReceiver, *, client: bool
    ) -> WebSocket:
        carried = _Carried(connection)
        near, far = socket.socketpair()
        near.setblocking(False)
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_BYTES)
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
        while (incoming := await self._endpoint.accept_next()) is not None:
            remote = await incoming.remote_addr()
            source = network_of(host_of(f"//{getattr(remote, 'addr', '')}"))
            # One network cannot take the room of others. All connections through relays count as one network.
            if self._fresh.total() >= MAX_HANDSHAKES or self._fresh[source] >= max(1, MAX_HANDSHAKES // 4):
                await incoming.ignore()
            else:
                self._spawn(self._take(incoming, source))

    async def _take(self, incoming: Any, source: str) -> None:
        self._fresh[source] += 1
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection = await (await incoming.accept()).connect()
                stream = await connection.accept_bi()
                receiver = self._receive()
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
        """Count the bytes that public relays carry; warn at four fifths of the quota, and stop at the whole quota."""
        notice_share = _WARNED_SHARE
        while True:
            await asyncio.sleep(WATCH_S)
            for carried, counted_bytes in self._carried.items():
                relayed_bytes = carried.relayed_bytes
                self._carried[carried] = relayed_bytes
                self._spent_bytes += max(0, relayed_bytes - counted_bytes)
            spent_share = self._spent_bytes / QUOTA_BYTES
            if spent_share >= notice_share:
                notice_share = 1.0 if spent_share < 1.0 else math.inf
                text = f"{spent_share:.0%} of {QUOTA_BYTES / 1e9:g} GB went through iroh's public relays"
                self._events.emit(Notice(loop_now(), text))
            if spent_share < 1.0:
                continue
            for carried in self._carried:
                if carried.relayed:
                    carried.abort()
