"""The handshake: from a fresh connection to a `Link` with a peer of known identity.

    1  initiator  Noise "e"            payload: digest of the prologue, in clear
    2  responder  Noise "e ee s es"    payload: Hello
    3  initiator  Noise "s se"         payload: Hello

The prologue holds the protocol's version and the run's name, so peers of another run or version
cannot link. The digest lets the responder report that in words; otherwise decryption would just
fail. A Hello carries the peer's Ed25519 key and its signature over the peer's Noise key and the
handshake's hash, which covers the other end's ephemeral key. `Introduction` is this exchange, free
of I/O; `HandshakeReceiver` runs it over a connection.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from colab_swarm.errors import (
    NotAdmitted,
    PeerError,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    WrongPeer,
    require,
)
from colab_swarm.net.addresses import VisitorLogger, listening_socket
from colab_swarm.net.carrier import Remote
from colab_swarm.net.identity import Identity, id_of, verify
from colab_swarm.net.link import Link, fail
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES
from colab_swarm.net.noise import Handshake
from colab_swarm.net.peers import MAX_ADDRESSES, Contact, Message, PeerId, Role, decoded, end_tasks, short
from colab_swarm.net.visitors import ConnectionRoom
from colab_swarm.net.websocket import WebSocket, accept

VERSION = 1  # a peer, and a bucket, of another one is refused in words
# Dialling an address, handshake included.
DIAL_TIMEOUT_S = 10.0
# An accepted connection has this time to complete its handshake.
HANDSHAKE_TIMEOUT_S = 10.0
# Accepted connections whose handshake is not complete.
MAX_HANDSHAKES = 64
_STAGGER_S = 0.25
# Detours are tried after this time if no address has answered.
DETOUR_AFTER_S = 1.5
# A connection to a relay that is half of a circuit begins with it.
TICKET = b"colab_swarm circuit "
_NO_BROWSER = "This is a peer of a colab_swarm run; it speaks WebSocket to other peers.\n"
_DOMAIN = b"colab_swarm hello"
Address = Annotated[str, msgspec.Meta(max_length=256)]
T = TypeVar("T")


class Hello(Message, frozen=True):
    """The signed statement of each end: its Ed25519 key, addresses, wall clock (seconds) and membership."""

    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    time: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)] = b""


def describe_run(run_id: str) -> str:
    """Return the run and the protocol's version, for error texts (99 bytes at most)."""
    return f"run '{run_id}', protocol {VERSION}"


def _admit_all(public_key: bytes, membership: bytes) -> Role:
    return Role.WORKER


@dataclass(eq=False, kw_only=True)
class Introduction:
    """One end of the handshake. Free of I/O.

    Attributes:
        addresses: where this end can be dialled.
        expected: the id of the dialled peer; None if this end was dialled.
        admit: returns a peer's role by its public key and membership; raises `NotAdmitted`.
        result: the other end, once it is known.
    """

    identity: Identity = field(kw_only=False)
    addresses: tuple[str, ...]
    run_id: str
    expected: PeerId | None
    membership: bytes = b""
    admit: Callable[[bytes, bytes], Role] = _admit_all
    result: Remote | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._static = X25519PrivateKey.generate()
        prologue = f"colab_swarm {VERSION} {self.run_id}".encode()
        self._digest = sha256(prologue).digest()
        self.dialled = self.expected is not None
        # Only the end that was dialled gets a digest of the run to check.
        self._run_checked = self.dialled
        self._noise = Handshake(initiator=self.dialled, static=self._static, prologue=prologue)

    def start(self) -> bytes:
        return self._noise.write(self._digest)

    def on_message(self, message: bytes, *, wall_time: float) -> bytes | None:
        """Take the other end's next message; return the answer to send, or None.

        Raises `ProtocolError` (another run or version, garbled), `WrongPeer` or `NotAdmitted`.
        """
        # The other end signed the hash as it was before this message.
        signed_hash = self._noise.hash
        payload = self._noise.read(message)
        if not self._run_checked:
            same_run = payload == self._digest
            require(same_run, f"this peer belongs to {describe_run(self.run_id)}", ProtocolError)
            self._run_checked = True
            return self._write_hello(wall_time)
        hello = decoded(payload, Hello, "an undecodable hello", ProtocolError)
        genuine = verify(hello.public_key, hello.signature, _DOMAIN + self._noise.remote_static + signed_hash)
        require(genuine, "a hello with a wrong signature", ProtocolError)
        peer = id_of(hello.public_key)
        if peer == self.identity.id:
            raise WrongPeer(f"both ends are peer {short(peer)}: is its key file in use twice?")
        if self.expected is not None and peer != self.expected:
            raise WrongPeer(f"peer {short(peer)} answered, {short(self.expected)} was expected")
        try:
            role = self.admit(hello.public_key, hello.membership)
        except NotAdmitted as error:
            raise NotAdmitted(f"not admitted: {error}") from error
        answer = None
        if not self._noise.finished:
            answer = self._write_hello(wall_time)
        self.result = Remote(
            contact=Contact(peer, hello.addresses),
            public_key=hello.public_key,
            membership=hello.membership,
            role=role,
            time=hello.time,
            keys=self._noise.split(),
        )
        return answer

    def _write_hello(self, wall_time: float) -> bytes:
        public = self._static.public_key().public_bytes_raw()
        signature = self.identity.sign(_DOMAIN + public + self._noise.hash)
        hello = Hello(self.identity.public_key, signature, self.addresses, wall_time, self.membership)
        return self._noise.write(msgspec.msgpack.encode(hello))


@dataclass(eq=False)
class HandshakeReceiver:
    """Receives for a connection until the handshake is complete, then hands over to the new `link`.

    The link is made in `on_message`, since the same buffer may hold a message for it. ``make_link``
    gets the carrier, the result and the round trip (seconds), and sends nothing yet; if it raises a
    `PeerError`, the other end receives no further message. ``held``: the first message only says
    that the handshake may begin, as a relay's does. ``on_ticket`` takes a connection whose message
    begins with `TICKET`.
    """

    introduction: Introduction
    wall_clock: Callable[[], float]
    make_link: Callable[[WebSocket, Remote, float], Link]
    held: bool = False
    on_ticket: Callable[[bytes, WebSocket], None] | None = None
    _carrier: WebSocket | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self.link: asyncio.Future[Link] = self._loop.create_future()

    def use(self, carrier: WebSocket) -> None:
        """Run the handshake over this carrier; the end that dialled sends first."""
        self._carrier = carrier
        if self.introduction.dialled and not self.held:
            self._send(self.introduction.start())

    def on_message(self, data: memoryview) -> None:
        if self.link.done() or self._carrier is None:
            return
        if self.on_ticket is not None and data[: len(TICKET)] == TICKET:
            self.on_ticket(bytes(data), self._carrier)
            fail(self.link, PeerLost("this connection is half of a circuit"))
            return
        if self.held:
            self.held = False
            self._send(self.introduction.start())
            return
        rtt_s = self._loop.time() - self._sent_at
        try:
            answer = self.introduction.on_message(bytes(data), wall_time=self.wall_clock())
            if self.introduction.result is not None:
                link = self.make_link(self._carrier, self.introduction.result, rtt_s)
                self._carrier.receiver = link
                self.link.set_result(link)
            if answer is not None:
                self._send(answer)
        except PeerError as error:
            fail(self.link, error)

    def on_writable(self, writable: bool) -> None:
        """Do nothing: handshakes are short."""

    def on_lost(self, reason: str) -> None:
        # Nothing waits for the link of a refused connection, or of a circuit's half at a relay.
        fail(self.link, PeerLost(reason))

    def _send(self, message: bytes) -> None:
        assert self._carrier is not None
        self._sent_at = self._loop.time()
        self._carrier.send_bytes(message)


async def dial_any(
    addresses: Sequence[str], dial: Callable[[str], Awaitable[T]], detours: Sequence[str] = ()
) -> T:
    """Return the result of ``dial`` for the first address that answers; the ``detours`` are tried if these fail.

    Raises `PeerUnreachable` with each address's failure, or `WrongPeer` if another peer answered.
    """
    waiting = list(addresses)
    detours = list(detours)
    # A dict keeps the order of their start; a set would not.
    running: dict[asyncio.Future[T], None] = {}
    failures: list[PeerError] = []
    try:
        while waiting or running:
            if waiting:
                dialling = asyncio.ensure_future(dial(waiting.pop(0)))
                running[dialling] = None
            timeout_s = _STAGGER_S if waiting else DETOUR_AFTER_S
            done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for attempt in [attempt for attempt in running if attempt in done]:
                try:
                    return attempt.result()
                except PeerError as error:
                    failures.append(error)
                    del running[attempt]
            # All attempts have failed, or the last of them takes long.
            stuck = not running or not done
            if stuck and not waiting:
                waiting = detours
                detours = []
    finally:
        await end_tasks(*running)
    text = "; ".join(map(str, failures))
    if any(type(failure) is WrongPeer for failure in failures):
        raise WrongPeer(text)
    raise PeerUnreachable(text)


class Listener:
    """Accepts connections until `close`.

    About `MAX_HANDSHAKES` connections are no links yet, each for `HANDSHAKE_TIMEOUT_S`. Beyond
    that the address with the most of them loses its oldest one, so no address takes room from
    others. ``receive`` makes the receiver of a new connection, or refuses it by a `PeerError`; a
    relay's ``on_ticket`` takes connections whose first message starts with `TICKET`. A browser gets
    the page of ``page_at`` for its path.
    """

    def __init__(self, receive: Callable[[web.BaseRequest], HandshakeReceiver], scratch: memoryview) -> None:
        self._receive = receive
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._http = web.Server(self._upgrade, access_log=None, logger=VisitorLogger())
        self._server: asyncio.Server | None = None
        # Connections that are no links yet.
        self._fresh = ConnectionRoom(MAX_HANDSHAKES, self._is_fresh)
        self.on_ticket: Callable[[bytes, WebSocket], None] | None = None
        self.page_at: dict[str, Callable[[web.BaseRequest], Awaitable[web.Response]]] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen, for an empty host on every interface; return the port, or raise `PortError` if it is taken."""
        self._server = await self._loop.create_server(self._on_connection, sock=listening_socket(host, port))
        name = self._server.sockets[0].getsockname()
        return int(name[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._fresh.open:
            self._abort(connection)
        await self._http.shutdown(timeout=1.0)

    def _on_connection(self) -> asyncio.BaseProtocol:
        connection = self._http()
        self._fresh.enter(connection)
        self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._abort, connection)
        return connection

    @staticmethod
    def _is_fresh(connection: Any) -> bool:
        """Return True until a connection with a transport is a link."""
        protocol = connection.transport.get_protocol()
        receiver = getattr(protocol, "receiver", None)
        return protocol is connection or isinstance(receiver, HandshakeReceiver)

    def _abort(self, connection: Any) -> None:
        """Abort a connection that sent no full request in time."""
        if connection.transport is not None and connection.transport.get_protocol() is connection:
            connection.transport.abort()

    async def _upgrade(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            page = self.page_at.get(request.path)
            if page is None or request.method != "GET":
                return web.Response(text=_NO_BROWSER, status=426)
            return await page(request)
        try:
            receiver = self._receive(request)
        except PeerError as error:
            return web.Response(status=503, reason=str(error))
        receiver.on_ticket = self.on_ticket
        try:
            websocket = accept(request, scratch=self._scratch, receiver=receiver)
        except PeerLost:
            raise web.HTTPBadRequest(text=_NO_BROWSER) from None
        receiver.use(websocket)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await receiver.link
        except (PeerError, TimeoutError) as error:
            # Half of a circuit has another receiver now.
            if websocket.receiver is receiver:
                websocket.close(str(error) or "the handshake stalled")
        await websocket.wait_closed()
        # nobody gets it
        return web.Response()
