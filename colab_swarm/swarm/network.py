"""A peer on the real network: joining a run, reachability, relaying, announcements."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from colab_swarm.averaging.result import GroupResult, RoundResult
from colab_swarm.averaging.round import Averager
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import DHT, Found
from colab_swarm.errors import JoinError, PeerError, StateError, require
from colab_swarm.events import Event, EventLog, Fault, PeerJoined, PeerLeft
from colab_swarm.invite import LOCAL_ONLY
from colab_swarm.markup import settings
from colab_swarm.net.addresses import only_local
from colab_swarm.net.lan import LanAnnouncer
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, PeerId, end_tasks
from colab_swarm.net.reachability import ReachabilityWatch
from colab_swarm.net.relay import Relay, RelayQuota
from colab_swarm.net.speed import SpeedTests
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.notebook.platforms import SessionClock, platform, wait_for_end
from colab_swarm.runtime import PauseGate, loop_now, wait_until
from colab_swarm.swarm.saved import PeerStore
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess, Trust, clock_advice

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.workunits.messages import Token

logger = logging.getLogger(__name__)
_PUBLISH_EVERY_S = 60.0
_PUBLISHED_S = 180.0  # after this time an announcement expires
SAVE_EVERY_S = 15.0
# A new link is saved quickly, because a killed peer comes back through saved peers. Within the delay it learns the
# addresses of the linked peer.
_SAVE_NEW_S = 1.0
_LINK_S = 15.0
DIALS = 16  # how many of the saved peers are dialled at the same time
# the installation of the package and the download of a data set contact these hosts anyway
HOSTS = (("pypi.org", 443), ("huggingface.co", 443))
CONNECT_TIMEOUT_S = 3.0
_ENDED = "If the run has ended, start a new one with cs.create(…); if not, ask for a new invitation"
PATIENCE_S = 120.0  # how long to wait for the trainer's next step when the session ends
_HAND_OVER_S = 60.0  # how long to wait then for a last round
MAX_RELAYS = 64


@dataclass(frozen=True)
class NetworkOptions:
    """How this peer takes part in the network.

    Attributes:
        listen: accept connections. If False, this peer only opens connections itself (client mode).
        port: TCP port to listen on; 0 takes a free one.
        announce: addresses at which others can reach this peer, such as ``ws://203.0.113.7:4500``; detected if empty.
        identity: file with this peer's key, so that it is the same peer after a restart.
        upload_mbit_s, download_mbit_s: limits of this peer's traffic, in Mbit/s.
        relay: forward the traffic of peers that cannot be dialled: True, or a quota (`RelayQuota`).
        use_relays: let others reach this peer through relays of the run if no better way works.
        iroh: let others reach this peer by iroh, which needs no account and no port: at this peer's IP addresses
            (``direct``), through the free relays of iroh's makers (``public``; 1 GB a session), or through your
            own iroh relay (the https address of that relay).
        tunnel: ``ngrok`` or ``cloudflared``: a tunnel with a public address that leads to this peer.
        lan: let peers in the local network find this run.
        session_hours: how long this machine may be used from now on; this peer leaves a few minutes before the end.
            None: as long as the platform (Colab, Kaggle, Binder) keeps a session.
    """

    listen: bool = True
    port: int = 0
    announce: Sequence[str] = field(default=(), repr=False)
    identity: str | Path | None = field(default=None, repr=False)
    upload_mbit_s: float | None = None
    download_mbit_s: float | None = None
    relay: bool | RelayQuota = False
    use_relays: bool = True
    iroh: str | None = None
    tunnel: Literal["ngrok", "cloudflared"] | TunnelSettings | None = None
    lan: bool = True
    session_hours: float | None = None

    def __post_init__(self) -> None:
        text = f"announce={self.announce!r}: pass a list of addresses, as in announce=[{self.announce!r}]"
        require(not isinstance(self.announce, str), text, TypeError)
        text = f"port={self.port!r}: pass a whole number from 0 to 65535; 0 takes a free port"
        require(isinstance(self.port, int) and 0 <= self.port <= 65535, text)

    def __repr__(self) -> str:
        return settings(self)

    @property
    def service(self) -> str:
        """The tunnel or relay of another company that these options use; empty if there is none."""
        if self.tunnel:
            return f"a tunnel by {getattr(self.tunnel, 'kind', self.tunnel)}"
        return "an iroh relay" if self.iroh not in (None, "direct") else ""

    def to_saved(self) -> dict[str, Any]:
        """Return the options in the form that a folder saves: without the key file and without a tunnel's token.

        The folder has its own key file.
        """
        tunnel = self.tunnel.kind if isinstance(self.tunnel, TunnelSettings) else self.tunnel
        return asdict(replace(self, tunnel=tunnel, identity=None))

    def without_links(self) -> "NetworkOptions":
        """Return the options for a run whose rounds are in a bucket: no links to other peers."""
        return replace(self, listen=False, lan=False, use_relays=False)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "NetworkOptions":
        relay = saved.get("relay", False)
        if isinstance(relay, dict):
            relay = RelayQuota(**relay)
        return cls(**{**saved, "relay": relay})


DEFAULT_OPTIONS = NetworkOptions()


class NetworkSession:
    """A peer's part in the real network, from `open` to `leave`."""

    def __init__(
        self,
        node: Node,
        access: RunAccess,
        options: NetworkOptions,
        services: PeerServices,
    ) -> None:
        self.node = node
        self.access = access
        self.options = options
        self._services = services
        self.trust = Trust(node, services.dht, services.events, services.rng, access)
        self.trust.contributions.expert_calls = services.expert_calls
        self.store: PeerStore | None = None  # the folder that saves this peer
        self.clock: SessionClock | None = None  # None if the session's end is unknown
        self.stops: list[Callable[[], None]] = []  # called at the session's end, to give unfinished work back
        services.averager.on_round = self._on_round
        self.reachability = ReachabilityWatch(
            node,
            self.relays,
            services.events,
            services.rng,
            trusted=tuple(options.announce),
            use_relays=options.use_relays,
            tunnel=options.tunnel if isinstance(options.tunnel, TunnelSettings) else None,
        )
        quota = RelayQuota() if options.relay is True else options.relay
        self.relay = Relay(node, quota) if quota else None
        self._announcer: LanAnnouncer | None = None

    def _on_round(self, result: RoundResult) -> None:
        ledger = self.trust.contributions.ledger
        if isinstance(result, GroupResult):
            ledger.on_round(result.group, result.contributors, result.spans_lost)
        else:
            ledger.on_bucket_round(result.samples)

    async def open(self, store: PeerStore | None) -> None:
        """Join the run, and save this peer in ``store`` from now on; if that fails, leave again."""
        try:
            await self._enter()
            if store is not None:
                await self._save(store)
                self.store = store
                self.node.spawn(self._keep_saving(store))
        except BaseException:
            # otherwise a tunnel would stay open; an interrupt must close it too
            await self.leave()
            raise

    async def _enter(self) -> None:
        node = self.node
        entries = () if self.access.mailbox else self.access.entries
        for contact in entries:
            node.learn(contact)
        # Others must not try addresses behind a NAT, so this peer announces its own after a peer has dialled back.
        if entries and not self.options.announce:
            node.addresses = node.iroh.addresses
        await self.trust.join()
        if entries:
            entries = await self._link(entries)
        try:
            await find_others(self._services, entries)
        except JoinError as error:
            skew = clock_advice(node.clock.behind_s)
            if not skew:
                raise
            raise JoinError(f"{error}; {skew}") from error
        await self.reachability.start()
        self.trust.start()
        if self.relay is not None:
            await self.announce("relays", lambda: node.contact.addresses if node.contact.direct else ())

    async def _link(self, entries: tuple[Contact, ...]) -> tuple[Contact, ...]:
        """Link to the entries of the run, and return them. The run's owner continues alone if no entry answers."""
        node = self.node
        try:
            await enter(node, entries)
        except JoinError as error:
            if not only_local(entries) and not await asyncio.to_thread(internet):
                advice = platform().internet_help or "check the network and its proxy"
                text = f"this machine has no internet connection: {advice}. {error}"
                raise JoinError(text) from error
            if self.access.invitation is not None:
                raise
            node.addresses = tuple(self.options.announce) or node.listening()
            return ()
        await self.reachability.verify()
        return entries

    async def _keep_saving(self, store: PeerStore) -> None:
        new_link = asyncio.Event()

        def on_event(event: Event) -> None:
            if isinstance(event, PeerJoined):
                new_link.set()

        self._services.events.listen(on_event)
        while True:
            await wait_until(loop_now() + SAVE_EVERY_S, new_link)
            await asyncio.sleep(_SAVE_NEW_S)
            new_link.clear()
            try:
                await self._save(store)
            except StateError as error:
                logger.warning("this peer could not be saved: %s", error)
                self._services.events.emit(Fault(time.monotonic(), "saving this peer", str(error)))

    async def _save(self, store: PeerStore) -> None:
        tally = self.trust.contributions.tally()
        linked = map(self.node.contact_of, sorted(self.node.linked()))
        reachable = [contact for contact in linked if contact.addresses]
        contacts = sorted(reachable, key=lambda contact: not contact.direct)
        await asyncio.to_thread(store.write, contacts, self._membership(), tally, self.node.port or 0)

    async def leave(self) -> None:
        # the stack runs its callbacks in reverse order; a failure or interrupt in one does not skip the others
        async with contextlib.AsyncExitStack() as ends:
            ends.push_async_callback(self.reachability.close)
            if self.relay is not None:
                ends.callback(self.relay.close)
            if self._announcer is not None:
                ends.push_async_callback(self._announcer.close)
            ends.push_async_callback(self._services.averager.close)
            if self.store is not None:
                ends.callback(self.store.close)
            ends.push_async_callback(_stop, self._services.dht.stop)
            ends.push_async_callback(_stop, self.trust.stop)
            if self.store is not None:
                with contextlib.suppress(StateError):
                    await self._save(self.store)

    async def leave_in_time(
        self, clock: SessionClock, optimizers: "Mapping[str, SwarmOptimizer]", leave: Callable[[], None]
    ) -> None:
        """Hand over, give work back and ``leave`` before the platform ends this session."""

        async def wait() -> None:
            await wait_for_end(clock, self._services.events)
            # leaving blocks, and it cancels this task
            end = partial(self.end_session, clock, optimizers, leave)
            threading.Thread(target=end, name="colab-swarm-leave", daemon=True).start()

        self.clock = clock
        # the node cancels this task when it closes
        self.node.spawn(wait())

    def end_session(
        self, clock: SessionClock, optimizers: "Mapping[str, SwarmOptimizer]", leave: Callable[[], None]
    ) -> None:
        ends: list[Callable[[], None]] = [partial(self._hand_over, clock, optimizers), *self.stops, leave]
        for end in ends:
            try:
                end()
            except Exception as error:
                logger.exception("leaving at the session's end failed")
                self._services.events.emit(Fault.of(time.monotonic(), "leaving at the session's end", error))

    def _hand_over(self, clock: SessionClock, optimizers: "Mapping[str, SwarmOptimizer]") -> None:
        next_step = "join again in a new one"
        if self.store is not None:
            next_step = f"continue in a new one with cs.join(state_dir={str(self.store.folder)!r})"
        reason = f"this peer has handed over and left before its session ends ({clock.reason}): {next_step}"
        # a quarter of the time, because experts and work units are given back after it
        max_s = clock.leave_before_s / 4
        deadline = time.monotonic() + min(PATIENCE_S, max_s)
        trained = list(optimizers.values())
        for optimizer in trained:
            optimizer.hooks.end(reason, hand_over_s=min(_HAND_OVER_S, max_s))
        # `leave` closes the optimizers that the user no longer steps
        for optimizer in trained:
            optimizer.hooks.closed.wait(max(0.0, deadline - time.monotonic()))

    async def announce_in_lan(self, name: str) -> None:
        if not self.options.lan or self.node.port is None:
            return
        addresses: tuple[str, ...] = ()
        try:
            self._announcer = LanAnnouncer(self.access.run_id, self.access.access, name)
            while True:
                listening = self.node.listening()
                if addresses != listening:
                    addresses = listening
                    await self._announcer.update(Contact(self.node.id, addresses))
                await asyncio.sleep(_PUBLISH_EVERY_S)
        except OSError as error:
            logger.info("not announced in the LAN: %s", error)

    async def announce(self, what: str, value: Callable[[], Any]) -> None:
        """Publish ``value()`` for the run each minute, except while it is empty; None ends the announcements."""
        self.node.spawn(self._publish(f"{self.access.run_id}/{what}", value))

    async def _publish(self, key: str, value: Callable[[], Any]) -> None:
        while (current := value()) is not None:
            if not current:
                await asyncio.sleep(1.0)
                continue
            with contextlib.suppress(PeerError):
                await self._services.dht.publish(key, current, ttl_s=_PUBLISHED_S)
            await asyncio.sleep(_PUBLISH_EVERY_S)

    async def announced(self, what: str) -> dict[PeerId, Found]:
        """Return the announcements of the run's peers (see `announce`) by peer; their values are not checked."""
        return await self._services.dht.get(f"{self.access.run_id}/{what}")

    async def relays(self) -> list[Contact]:
        """Return the run's relays whose announcements are valid."""
        contacts = []
        records = await self.announced("relays")
        for peer, record in list(records.items())[:MAX_RELAYS]:
            listed = record.value if isinstance(record.value, list) else []
            addresses = tuple(address for address in listed if isinstance(address, str))
            if addresses:
                contacts.append(Contact(peer, addresses))
        return contacts

    async def coordinators(self) -> list[str]:
        """Return the links of the run's coordinators of work units, the newest first."""
        records = await self.announced("coordinators")
        newest_first = sorted(records.values(), key=lambda record: -record.expires_at)
        urls = [record.value for record in newest_first]
        return [url for url in urls if isinstance(url, str) and url.startswith(("http://", "https://"))]

    @property
    def gate(self) -> PauseGate:
        """The gate that stops this peer's background work while the user has paused the peer."""
        return self._services.gate

    def token(self) -> "Token":
        from colab_swarm.workunits.messages import Token

        return Token(self.node, self._membership)

    def _membership(self) -> bytes:
        """Return this peer's membership; empty in an open run."""
        admission = self.access.admission
        return b"" if admission is None else admission.membership


async def _stop(stop: Callable[[], Awaitable[None]]) -> None:
    # the peers to which it says farewell may have left
    with contextlib.suppress(PeerError):
        await stop()


def internet() -> bool:
    """Return True if a well-known host answers within `CONNECT_TIMEOUT_S`."""
    up = threading.Event()

    def try_host(host: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(host, CONNECT_TIMEOUT_S).close()
            up.set()

    # each host in a thread, because a name lookup has no timeout
    for host in HOSTS:
        threading.Thread(target=try_host, args=(host,), daemon=True).start()
    return up.wait(CONNECT_TIMEOUT_S)


async def enter(node: Node, entries: Sequence[Contact]) -> None:
    """Link to the first entry that answers; raise `JoinError` if none does. Dials `DIALS` at a time, in order."""
    free = asyncio.Semaphore(DIALS)
    reasons = []

    async def dial(contact: Contact) -> None:
        async with free:
            await node.link_to(contact.id, _LINK_S)

    dials = [asyncio.create_task(dial(contact)) for contact in entries]
    try:
        for done in asyncio.as_completed(dials):
            try:
                await done
                return
            except PeerError as error:
                reasons.append(str(error))
    finally:
        await end_tasks(*dials)
    advice = f"{LOCAL_ONLY} {_ENDED}" if only_local(entries) else _ENDED
    raise JoinError(f"nobody answers. {advice} (tried: {'; '.join(dict.fromkeys(reasons))})")


def assemble(
    peers: Node,
    run_id: str,
    events: EventLog,
    rng: random.Random,
    *,
    mailbox: str = "",
    pace: Callable[[float], float] | None = None,
) -> PeerServices:
    SpeedTests(peers)
    dht = DHT(peers, rng, events)
    router = PrefixRouter(peers, events)
    averager = Averager(peers, events=events)
    return PeerServices(
        peers, dht, events, rng, run_id, mailbox=mailbox, router=router, averager=averager, pace=pace
    )


async def find_others(services: PeerServices, entries: Sequence[Contact]) -> None:
    """Join the DHT through the entries; raise `JoinError` if there are entries but none answered."""
    if entries and await services.dht.bootstrap(entries) == 0:
        reasons = {event.reason for event in services.events.recent(PeerLeft)}
        reason = "; ".join(sorted(reasons)) or "they do not answer"
        raise JoinError(
            f"the peers of this invitation do not admit this peer: {reason}. Ask for a new invitation"
        )
    services.dht.start()


async def close(services: PeerServices, network: NetworkSession | None) -> None:
    """Close the services of a peer; also after a failure or an interrupt, all links are closed."""
    try:
        if network is None:
            await _stop(services.dht.stop)
            await services.averager.close()
        else:
            await network.leave()
    finally:
        await services.peers.close()
