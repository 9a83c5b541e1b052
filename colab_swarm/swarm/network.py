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

from colab_swarm.averaging.round import Averager
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import DHT, DHTSettings, Found
from colab_swarm.errors import JoinError, PeerError, StateError
from colab_swarm.events import EventLog, Fault, PeerJoined, PeerLeft
from colab_swarm.invite import LOCAL_ONLY
from colab_swarm.markup import settings
from colab_swarm.net.addresses import only_local
from colab_swarm.net.carrier import SpeedTests
from colab_swarm.net.lan import LanAnnouncer
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, PeerId, Peers, end_tasks
from colab_swarm.net.reachability import ReachabilityWatch
from colab_swarm.net.relay import Relay, RelayQuota
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.notebook.platforms import SessionClock, platform, wait_for_end
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.swarm.saved import PeerStore
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess, Trust, clock_advice
from colab_swarm.trust.contributions import merged

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.workunits.messages import Token

logger = logging.getLogger(__name__)
PUBLISH_EVERY_S = 60.0
SAVE_EVERY_S, SAVE_NEW_S = 15.0, 1.0  # and after a new link: a killed peer finds back through saved peers
DIALS = 16  # at once, of the saved peers
HOSTS = (("pypi.org", 443), ("huggingface.co", 443))  # which installing and loading a data set contact anyway
CONNECT_TIMEOUT_S = 3.0
ENDED = "If the run has ended, start a new one with cs.create(…); if not, ask for a new invitation"
PATIENCE_S = 120.0  # for the trainer's next step when the session ends
MAX_RELAYS = 64


@dataclass(frozen=True)
class NetworkOptions:
    """How this peer takes part in the network.

    Attributes:
        listen: accept connections; without it this peer only dials out (client mode).
        port: TCP port to listen on; 0 takes a free one.
        announce: addresses to give to others, such as ``ws://203.0.113.7:4500``; detected if empty.
        identity: file with this peer's key, so that it is the same peer after a restart.
        upload_mbit_s, download_mbit_s: bounds on this peer's traffic.
        relay: relay for peers that cannot be dialled: True, or a quota.
        use_relays: let relays reach this peer where nothing better works.
        punch: try to turn relayed links into direct ones.
        iroh: let others reach this peer by iroh, which needs no account and no port: at its IP addresses
            (``direct``), through the free relays of iroh's makers (``public``; 1 GB a session), or through your
            own iroh relay (its https address).
        tunnel: ``ngrok`` or ``cloudflared``: a tunnel whose public address leads to this peer.
        lan: let peers in the local network find this run.
        session_hours: how long this machine may be used from now on; this peer leaves a few minutes
            before. None: as long as the platform (Colab, Kaggle, Binder) lets a session live.
    """

    listen: bool = True
    port: int = 0
    announce: Sequence[str] = field(default=(), repr=False)
    identity: str | Path | None = field(default=None, repr=False)
    upload_mbit_s: float | None = None
    download_mbit_s: float | None = None
    relay: bool | RelayQuota = False
    use_relays: bool = True
    punch: bool = True
    iroh: str | None = None
    tunnel: Literal["ngrok", "cloudflared"] | TunnelSettings | None = None
    lan: bool = True
    session_hours: float | None = None

    def __repr__(self) -> str:
        return settings(self)

    def to_saved(self) -> dict[str, Any]:
        """Return what a folder saves: no key file, as the folder has its own, and no tunnel token."""
        tunnel = self.tunnel.kind if isinstance(self.tunnel, TunnelSettings) else self.tunnel
        return asdict(replace(self, tunnel=tunnel, identity=None))

    def without_links(self) -> "NetworkOptions":
        """Return them for a run in a bucket."""
        return replace(self, listen=False, lan=False, use_relays=False, punch=False)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "NetworkOptions":
        relay = saved.get("relay", False)
        if isinstance(relay, dict):  # an earlier version had more limits
            relay = RelayQuota(**{key: relay[key] for key in relay.keys() & RelayQuota.__annotations__})
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
        self.node, self.access, self.options, self._services = node, access, options, services
        dht, events, rng = services.dht, services.events, services.rng
        self.trust = Trust(node, dht, events, rng, access)
        self.trust.contributions.saved = access.tally
        self.store: PeerStore | None = None  # the folder that saves this peer
        self.clock: SessionClock | None = None  # None if the session's end is unknown
        self.stops: list[Callable[[], None]] = []  # give work back at the session's end
        ledger = self.trust.contributions.ledger
        services.averager.on_round = lambda one: ledger.on_round(one.group, one.contributors, one.spans_lost)
        self.reachability = ReachabilityWatch(
            node,
            self.relays,
            events,
            rng,
            trusted=tuple(options.announce),
            use_relays=options.use_relays,
            punch=options.punch,
            tunnel=options.tunnel if isinstance(options.tunnel, TunnelSettings) else None,
        )
        quota = options.relay if isinstance(options.relay, RelayQuota) else RelayQuota()
        self.relay = Relay(node, quota) if options.relay else None
        self._announcer: LanAnnouncer | None = None

    async def open(self, store: PeerStore | None) -> None:
        try:
            await self._enter()
            if store is not None:
                await self._save(store)
                self.store = store
                self.node.linker.spawn(self._keep_saving(store))
        except BaseException:  # an interrupt included: a tunnel would stay open
            await self.leave()
            raise

    async def _enter(self) -> None:
        node = self.node
        entries = () if self.access.mailbox else self.access.entries
        for contact in entries:
            node.learn(contact)
        if entries and not self.options.announce:
            # until a peer has dialled back: others must not try addresses behind a NAT
            node.announce(node.linker.iroh.addresses)
        await self.trust.join()
        if entries:
            try:
                await enter(node, entries)
            except JoinError as error:
                await _blame_the_network(entries, error)
                if self.access.invitation is not None:  # a returning owner continues alone
                    raise
                node.announce(tuple(self.options.announce) or node.listening())
                entries = ()
            else:
                await self.reachability.verify()
        try:
            await find_others(self._services, entries)
        except JoinError as error:
            skew = clock_advice(node.linker.clock.behind_s)
            raise JoinError(f"{error}; {skew}" if skew else str(error)) from error
        await self.reachability.start()
        self.trust.start()
        if self.relay is not None:
            await self.announce("relays", lambda: node.contact.addresses if node.contact.direct else ())

    async def _keep_saving(self, store: PeerStore) -> None:
        met = asyncio.Event()
        self._services.events.listen(lambda event: met.set() if isinstance(event, PeerJoined) else None)
        while True:
            await wait_until(loop_now() + SAVE_EVERY_S, met)
            await asyncio.sleep(SAVE_NEW_S)  # until its addresses are known
            met.clear()
            try:
                await self._save(store)
            except StateError as error:
                logger.warning("this peer could not be saved: %s", error)
                self._services.events.emit(Fault(time.monotonic(), "saving this peer", str(error)))

    async def _save(self, store: PeerStore) -> None:
        admission, contributions = self.access.admission, self.trust.contributions
        membership = b"" if admission is None else admission.membership
        tally = merged(contributions.saved, contributions.ledger.rows())  # it may lack saved ones
        linked = map(self.node.contact_of, sorted(self.node.linked()))
        contacts = sorted((one for one in linked if one.addresses), key=lambda one: not one.direct)
        await asyncio.to_thread(store.write, contacts, membership, tally, self.node.port or 0)

    async def leave(self) -> None:
        async with contextlib.AsyncExitStack() as ends:  # last first; no failure or interrupt skips another
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
            # leaving blocks, and ends the task that this is
            end = partial(self.end_session, clock, optimizers, leave)
            threading.Thread(target=end, name="colab-swarm-leave", daemon=True).start()

        self.clock = clock
        self.node.linker.spawn(wait())  # until the node is closed

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
        again = "join again in a new one"
        if self.store is not None:
            again = f"continue in a new one with cs.resume({str(self.store.folder)!r})"
        why = f"this peer has handed over and left before its session ends ({clock.reason}): {again}"
        most_s, trained = clock.leave_before_s / 4, list(optimizers.values())
        deadline = time.monotonic() + min(PATIENCE_S, most_s)
        for optimizer in trained:
            optimizer.end(why, hand_over_s=min(60.0, most_s))
        for optimizer in trained:  # `leave` closes those that the user no longer steps
            optimizer.closed.wait(max(0.0, deadline - time.monotonic()))

    async def announce_in_lan(self, name: str) -> None:
        if not self.options.lan or self.node.port is None:
            return
        addresses: tuple[str, ...] = ()
        try:
            self._announcer = LanAnnouncer(self.access.run_id, self.access.access, name)
            while True:
                if addresses != (addresses := self.node.listening()):
                    await self._announcer.update(Contact(self.node.id, addresses))
                await asyncio.sleep(PUBLISH_EVERY_S)
        except OSError as error:
            logger.info("not announced in the LAN: %s", error)

    async def announce(self, what: str, value: Callable[[], Any]) -> None:
        """Publish a value for the run each minute, but not while it is empty; None ends it."""
        self.node.linker.spawn(self._publish(f"{self.access.run_id}/{what}", value))

    async def _publish(self, key: str, value: Callable[[], Any]) -> None:
        while (current := value()) is not None:
            if current:
                with contextlib.suppress(PeerError):
                    await self._services.dht.publish(key, current, ttl_s=180.0)
            await asyncio.sleep(PUBLISH_EVERY_S if current else 1.0)

    async def announced(self, what: str) -> dict[PeerId, Found]:
        """Return the announcements of the run's peers (see `announce`), not checked, by peer."""
        return await self._services.dht.get(f"{self.access.run_id}/{what}")

    async def relays(self) -> list[Contact]:
        contacts = []
        for peer, record in list((await self.announced("relays")).items())[:MAX_RELAYS]:
            addresses = record.value if isinstance(record.value, list) else []
            if texts := tuple(address for address in addresses if isinstance(address, str)):
                contacts.append(Contact(peer, texts))
        return contacts

    async def coordinators(self) -> list[str]:
        """Return the links of the run's coordinators of work units, the newest first."""
        found = (await self.announced("coordinators")).values()
        newest = [record.value for record in sorted(found, key=lambda record: -record.expires_at)]
        return [url for url in newest if isinstance(url, str) and url.startswith(("http://", "https://"))]

    def token(self) -> "Token":
        from colab_swarm.workunits.messages import Token

        admission = self.access.admission
        return Token(self.node, bytes if admission is None else lambda: admission.membership)


async def _stop(stop: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(PeerError):  # peers that it says farewell to may be gone
        await stop()


def internet() -> bool:
    """Return True if a well-known host answers within `CONNECT_TIMEOUT_S`."""
    up = threading.Event()

    def try_host(host: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(host, CONNECT_TIMEOUT_S).close()
            up.set()

    for host in HOSTS:  # in threads, because a name lookup has no timeout
        threading.Thread(target=try_host, args=(host,), daemon=True).start()
    return up.wait(CONNECT_TIMEOUT_S)


async def enter(node: Node, entries: Sequence[Contact]) -> None:
    """Link to the first of the entries that answers, `DIALS` at once in their order; `JoinError` if none does."""
    free, reasons = asyncio.Semaphore(DIALS), []

    async def dial(contact: Contact) -> None:
        async with free:
            await node.linker.link_to(contact.id, 15.0)

    tries = [asyncio.create_task(dial(one)) for one in entries]
    try:
        for done in asyncio.as_completed(tries):
            try:
                await done
                return
            except PeerError as error:
                reasons.append(str(error))
    finally:
        await end_tasks(*tries)
    tried, hint = "; ".join(dict.fromkeys(reasons)), f" {LOCAL_ONLY}" if only_local(entries) else ""
    raise JoinError(f"nobody answers: {tried}.{hint} {ENDED}")


def assemble(
    peers: Peers,
    run_id: str,
    events: EventLog,
    rng: random.Random,
    *,
    mailbox: str = "",
    pace: Callable[[float], float] | None = None,
) -> PeerServices:
    SpeedTests(peers)
    dht = DHT(peers, DHTSettings(), rng, events)
    router = PrefixRouter(peers, events)
    averager = Averager(peers, events=events)
    how: Any = {"router": router, "averager": averager, "pace": pace}
    return PeerServices(peers, dht, events, rng, run_id, mailbox=mailbox, **how)


async def find_others(services: PeerServices, entries: Sequence[Contact]) -> None:
    """Join the DHT through the entries; raise `JoinError` if there are some and none answered."""
    if entries and await services.dht.bootstrap(entries) == 0:
        reasons = {one.reason for one in services.events.recent(PeerLeft) if isinstance(one, PeerLeft)}
        why = f"{'; '.join(sorted(reasons)) or 'they do not answer'}. Ask for a new invitation"
        raise JoinError(f"the peers of this invitation do not admit this peer: {why}")
    services.dht.start()


async def close(services: PeerServices, network: NetworkSession | None) -> None:
    try:
        if network is not None:
            await network.leave()
        else:
            await _stop(services.dht.stop)
            await services.averager.close()
    finally:  # an interrupt leaves no link open
        await services.peers.close()


async def _blame_the_network(entries: Sequence[Contact], error: JoinError) -> None:
    """Raise `JoinError` if none of ``entries`` answered because this machine has no internet connection."""
    if not only_local(entries) and not await asyncio.to_thread(internet):
        advice = platform().internet_help or "check the network and its proxy"
        raise JoinError(f"this machine has no internet connection: {advice}. {error}") from error
