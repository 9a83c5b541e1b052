"""The handshake: from a fresh connection to a `Link` with a peer of known identity.

    1  initiator  Noise "e"            payload: digest of the prologue, in clear
    2  responder  Noise "e ee s es"    payload: Hello
    3  initiator  Noise "s se"         payload: Hello

The prologue contains the protocol's version and the run's name, so peers of another run or version
cannot link. The digest lets the responder report this in words; without it, decryption would
fail without a reason. A Hello contains the peer's Ed25519 key, and a signature by this key over the peer's Noise key
and the handshake's hash. This hash includes the other end's ephemeral key. `Introduction` is this exchange, free
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

VERSION = 1  # peers and buckets of another version are refused, with a text that says so
# Maximum time for dialling an address, handshake included.
DIAL_TIMEOUT_S = 10.0
# Maximum time for the handshake of an accepted connection.
HANDSHAKE_TIMEOUT_S = 10.0
# Maximum number of accepted connections whose handshake is not complete.
MAX_HANDSHAKES = 64
_STAGGER_S = 0.25
# Detours are tried after this time if no address has answered.
DETOUR_AFTER_S = 1.5
# The first message of a connection to a relay begins with this if the connection is half of a circuit.
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
    """Return the run and the protocol's version, for error texts (at most 99 bytes)."""
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
        # Only the end that was dialled receives a digest of the run, which it must check.
        self._run_checked = self.dialled
        self._noise = Handshake(initiator=self.dialled, static=self._static, prologue=prologue)

    def start(self) -> bytes:
        return self._noise.write(self._digest)

    def on_message(self, message: bytes, *, wall_time: float) -> bytes | None:
        """Take the other end's next message; return the answer to send, or None.

        Raises:
            ProtocolError: the run or the version differs, or the message cannot be read.
            WrongPeer: another peer than expected, or this peer itself, is at the other end.
            NotAdmitted: the other peer may not enter the run.
        """
        # The other end signed the hash that was valid before this message.
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
    """Receives the messages of a connection until the handshake is complete; then the new `link` receives them.

    The link is made in `on_message`, because the same buffer may already contain a message for it.
    ``make_link`` is called with the carrier, the result and the round-trip time in seconds, and must not send
    anything yet. If it raises a `PeerError`, the other end receives no further message. If ``held`` is True, the
    first message only tells that the handshake may begin; a relay sends such a message. ``on_ticket`` takes a
    connection whose message begins with `TICKET`.
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
        """Run the handshake over this carrier; the end that dialled sends the first message."""
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
        """Do nothing, because handshakes are short."""

    def on_lost(self, reason: str) -> None:
        # If the connection was refused, or is a circuit's half at a relay, nothing waits for its link.
        fail(self.link, PeerLost(reason))

    def _send(self, message: bytes) -> None:
        assert self._carrier is not None
        self._sent_at = self._loop.time()
        self._carrier.send_bytes(message)


async def dial_any(
    addresses: Sequence[str], dial: Callable[[str], Awaitable[T]], detours: Sequence[str] = ()
) -> T:
    """Return the result of ``dial`` for the first address that answers.

    If all addresses fail, or none answers within `DETOUR_AFTER_S`, the ``detours`` are tried, too.

    Raises `PeerUnreachable` with the failure of each address, or `WrongPeer` if another peer answered.
    """
    waiting = list(addresses)
    detours = list(detours)
    # A dict keeps the order in which the attempts started, unlike a set.
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
            # All attempts have failed, or the last ones take long.
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

    At most about `MAX_HANDSHAKES` connections may be in their handshake, each for at most `HANDSHAKE_TIMEOUT_S`.
    If there are more, the IP network with the most such connections loses its oldest one, so no network takes the room
    of others. ``receive`` makes the receiver of a new connection, or refuses the connection by a `PeerError`. A
    relay's ``on_ticket`` takes connections whose first message starts with `TICKET`. A browser gets the page that
    ``page_at`` has for the path of its request.
    """

    def __init__(self, receive: Callable[[web.BaseRequest], HandshakeReceiver], scratch: memoryview) -> None:
        self._receive = receive
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._http = web.Server(self._upgrade, access_log=None, logger=VisitorLogger())
        self._server: asyncio.Server | None = None
        # Connections whose handshake is not complete.
        self._fresh = ConnectionRoom(MAX_HANDSHAKES, self._is_fresh)
        self.on_ticket: Callable[[bytes, WebSocket], None] | None = None
        self.page_at: dict[str, Callable[[web.BaseRequest], Awaitable[web.Response]]] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port; an empty host means every interface. Raises `PortError` if the port is taken."""
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
        """Return True if a connection that has a transport has not become a link yet."""
        protocol = connection.transport.get_protocol()
        receiver = getattr(protocol, "receiver", None)
        return protocol is connection or isinstance(receiver, HandshakeReceiver)

    def _abort(self, connection: Any) -> None:
        """Abort a connection that sent no complete request in time."""
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
            # If the connection is half of a circuit, it has another receiver now.
            if websocket.receiver is receiver:
                websocket.close(str(error) or "the handshake stalled")
        await websocket.wait_closed()
        # this response is never sent
        return web.Response()
