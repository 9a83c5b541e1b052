"""One peer on the real network: how it gets in, how others reach it, whether it relays, who finds it in the LAN."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.averaging.round import Averager, RoundResult
from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.errors import JoinError, PeerError, StateError
from colab_swarm.events import EventLog, Fault, PeerLeft
from colab_swarm.invite import LOCAL_ONLY
from colab_swarm.markup import settings
from colab_swarm.net.addresses import only_local
from colab_swarm.net.lan import Announcement, LanAnnouncer
from colab_swarm.net.metering import SpeedTests
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import Contact, PeerId, Peers
from colab_swarm.net.reachability import ReachabilityWatch
from colab_swarm.net.relay import Relay, RelayQuota
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.contributions import newest
from colab_swarm.trust.member import ClockWatch
from colab_swarm.trust.service import LinkControl, Trust

if TYPE_CHECKING:
    from colab_swarm.swarm.saved import PeerStore

logger = logging.getLogger(__name__)
ENTER_TIMEOUT_S = 15.0
PUBLISH_EVERY_S = 60.0
KEEP_S, LOOK_S = 60.0, 2.0
RELAY_TTL_S = 180.0
MAX_RELAYS = 64


@dataclass(frozen=True)
class NetworkOptions:
    """How this peer takes part in the network.

    Attributes:
        listen: accept connections; without it this peer only dials out (client mode).
        port: TCP port to listen on; 0 takes a free one.
        announce: addresses to tell others, such as ``ws://203.0.113.7:4500``; found out if empty.
        identity: file that keeps this peer's key, so that it is the same peer after a restart; new key if None.
        upload_mbit_s, download_mbit_s: bounds on what this peer uses; None for no bound.
        relay: relay for peers that cannot be dialled: True, or a quota.
        use_relays: be reached through relays where nothing better works.
        punch: try to turn relayed links into direct ones.
        tunnel: ``ngrok`` or ``cloudflared``; a tunnel's public address leads to this peer.
        lan: let peers in the local network find this run.
        session_hours: how long this machine may be used from now on: this peer leaves a few minutes before. Left out:
            as long as the platform (Colab, Kaggle, Binder) lets a session live.
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
    tunnel: Literal["ngrok", "cloudflared"] | TunnelSettings | None = None
    lan: bool = True
    session_hours: float | None = None

    def __repr__(self) -> str:
        return settings(self)

    def node_settings(self, run_id: str) -> NodeSettings:
        """The part that concerns the links."""
        return NodeSettings(
            run_id=run_id,
            listen=self.listen,
            port=self.port,
            announce=tuple(self.announce) or None,
            upload_bps=None if self.upload_mbit_s is None else self.upload_mbit_s * 1e6,
            download_bps=None if self.download_mbit_s is None else self.download_mbit_s * 1e6,
        )


DEFAULT_OPTIONS = NetworkOptions()


class NetworkSession:
    """A peer's place in the network, from `open` to `leave`.

    Attributes:
        node: the peer itself.
        trust: who it is to the others, and they to it.
        reachability: how others reach it.
        relay: what it relays; None if it does not.
        keeping: the folder that keeps it; None if it is kept nowhere.
    """

    def __init__(
        self, node: Node, entrance: RunAccess, options: NetworkOptions, services: PeerServices
    ) -> None:
        self.node, self.entrance, self._options, self._services = node, entrance, options, services
        self.trust = Trust(
            node,
            services.dht,
            services.events,
            services.rng,
            entrance.run_id,
            entrance.closed,
            LinkControl.of(node),
        )
        self.trust.contributions.kept = entrance.given
        self.keeping: PeerStore | None = None
        self._kept: set[PeerId] = set()  # linked when the folder was written
        services.averager.on_round = self._on_round
        self.reachability = ReachabilityWatch(
            node,
            self.relays,
            services.events,
            services.rng,
            trusted=tuple(options.announce),
            use_relays=options.use_relays,
            punch=options.punch,
            tunnel=options.tunnel if isinstance(options.tunnel, TunnelSettings) else None,
        )
        quota = options.relay if isinstance(options.relay, RelayQuota) else RelayQuota()
        self.relay = Relay(node, quota) if options.relay else None
        self._announcer: LanAnnouncer | None = None

    @classmethod
    async def open(
        cls,
        node: Node,
        entrance: RunAccess,
        options: NetworkOptions,
        services: PeerServices,
        keeping: PeerStore | None = None,
    ) -> NetworkSession:
        """Get into the run through any of the entries, find out how others reach this peer, and keep it in a folder.

        Raises:
            StateError: the folder cannot be written.
            JoinError: there are entries, and none of them could be reached, or this peer is not let in.
            TunnelError: the tunnel that was asked for cannot be opened.
        """
        presence = cls(node, entrance, options, services)
        try:
            await presence._enter()
            if keeping is not None:
                await presence._begin_to_keep(keeping)
        except BaseException:  # an interrupt included: a tunnel would stay open
            await presence.leave()
            raise
        return presence

    async def _enter(self) -> None:
        node, entries = self.node, self.entrance.entries
        if entries and not self._options.announce:
            node.announce(())  # until somebody has dialled back: nobody shall try addresses behind a NAT
        for contact in entries:
            node.learn(contact)
        await self.trust.join()
        if entries:
            entries = await self._reach(entries)
        try:
            await find_others(self._services, entries)
        except JoinError as error:
            skew = ClockWatch().on_skew(node.linker.clock.behind_s)
            raise JoinError(f"{error}; {skew}" if skew else str(error)) from error
        await self.reachability.start()
        self.trust.start()
        if self.relay is not None:
            node.linker.spawn(self._publish_relay())

    async def _reach(self, entries: tuple[Contact, ...]) -> tuple[Contact, ...]:
        """Link to who is there; whoever began the run and came back goes on alone if nobody is."""
        try:
            await enter(self.node, entries)
        except JoinError:
            if self.entrance.invitation is not None:
                raise
            self.node.announce(tuple(self._options.announce) or self.node.listening())
            return ()
        await self.reachability.verify()
        return entries

    async def _begin_to_keep(self, keeping: PeerStore) -> None:
        """Write into the folder what this peer needs to come back: now, each minute, when somebody new is linked, and
        when it leaves."""
        await self._keep_in(keeping)
        self.keeping = keeping
        self.node.linker.spawn(self._go_on_keeping(keeping))

    async def _go_on_keeping(self, keeping: PeerStore) -> None:
        while True:
            await self._wait_news()
            try:
                await self._keep_in(keeping)
            except StateError as error:
                logger.warning("this peer could not be kept: %s", error)
                now = asyncio.get_running_loop().time()
                self._services.events.emit(Fault(now, "keeping this peer", str(error)))

    async def _wait_news(self) -> None:
        """Return after a minute, or soon after somebody was linked: by whom this peer finds back if it is killed."""
        time = asyncio.get_running_loop().time
        end = time() + KEEP_S
        while time() < end and self._dialable() <= self._kept:
            await asyncio.sleep(LOOK_S)

    def _dialable(self) -> set[PeerId]:
        return {peer for peer in self.node.linked() if self.node.contact_of(peer).addresses}

    async def _keep_in(self, keeping: PeerStore) -> None:
        admission = self.entrance.admission
        membership = b"" if admission is None else admission.membership
        tally = self.trust.contributions
        given = newest(tally.kept, tally.ledger.rows())  # the first are not in the second yet
        self._kept = self._dialable()
        contacts = [self.node.contact_of(peer) for peer in sorted(self._kept)]
        contacts.sort(key=lambda contact: not contact.direct)
        await asyncio.to_thread(keeping.write, contacts, membership, given)

    async def leave(self) -> None:
        """Be found and reached no more, and end all services; the node's links stay."""
        async with (
            contextlib.AsyncExitStack() as ends
        ):  # the last first; no failure or interrupt skips another
            ends.push_async_callback(self.reachability.close)
            if self.relay is not None:
                ends.callback(self.relay.close)
            if self._announcer is not None:
                ends.push_async_callback(self._announcer.close)
            ends.push_async_callback(self._services.averager.close)
            if self.keeping is not None:
                ends.callback(self.keeping.close)
            ends.push_async_callback(_stop, self._services.dht.stop)
            ends.push_async_callback(_stop, self.trust.stop)
            if self.keeping is not None:
                with contextlib.suppress(StateError):
                    await self._keep_in(self.keeping)

    def _on_round(self, result: RoundResult) -> None:
        ledger = self.trust.contributions.ledger
        samples = "/average/" not in result.group.prefix  # weights of arrays are no samples
        ledger.on_round(result.group, result.contributors if samples else (), result.spans_lost)

    def announce_in_lan(self, name: str) -> None:
        """Let `colab_swarm.net.lan.find_swarms` find this peer, under ``name``; in the background."""
        if self._options.lan and self.node.port is not None:
            self.node.linker.spawn(self._announce(name))

    async def _announce(self, name: str) -> None:
        contact = Contact(self.node.id, self.node.listening())
        announcement = Announcement(self.entrance.run_id, self.entrance.access, name, contact)
        try:
            self._announcer = await LanAnnouncer.start(announcement)
        except OSError as error:
            logger.info("not announced in the LAN: %s", error)
            return
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            if self.node.listening() != contact.addresses:
                contact = Contact(self.node.id, self.node.listening())
                await self._announcer.update(contact)

    # --- relays -------------------------------------------------------------------------------------------------

    @property
    def _relays_key(self) -> str:
        return f"{self.entrance.run_id}/relays"

    async def relays(self) -> list[Contact]:
        """Relays of the run, as they say themselves."""
        found = await self._services.dht.get(self._relays_key)
        contacts = []
        for subkey, record in list(found.items())[:MAX_RELAYS]:
            addresses = record.value if isinstance(record.value, list) else []
            texts = tuple(address for address in addresses if isinstance(address, str))
            if record.owner == subkey and texts:
                contacts.append(Contact(PeerId(subkey), texts))
        return contacts

    async def _publish_relay(self) -> None:
        while True:
            contact = self.node.contact
            if contact.direct:
                with contextlib.suppress(PeerError):
                    await self._services.dht.store(
                        self._relays_key, contact.addresses, subkey=contact.id, ttl_s=RELAY_TTL_S, signed=True
                    )
            await asyncio.sleep(PUBLISH_EVERY_S if contact.direct else 1.0)


async def _stop(stop: Callable[[], Awaitable[None]]) -> None:
    """Stop a service that may say farewell to peers which are gone."""
    with contextlib.suppress(PeerError):
        await stop()


async def enter(node: Node, entries: Sequence[Contact]) -> None:
    """Link to the first entry that answers.

    Raises:
        JoinError: none does.
    """
    tries = [asyncio.ensure_future(node.linker.link_to(one.id, ENTER_TIMEOUT_S)) for one in entries]
    reasons = []
    try:
        for done in asyncio.as_completed(tries):
            try:
                await done
                return
            except PeerError as error:
                reasons.append(str(error))
    finally:
        for one in tries:
            one.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
    told, hint = "; ".join(dict.fromkeys(reasons)), f" {LOCAL_ONLY}" if only_local(entries) else ""
    raise JoinError(
        f"no peer of this invitation could be reached: {told}.{hint} Are they still running? "
        "Ask for a new invitation"
    )


def assemble(
    peers: Peers,
    events: EventLog,
    rng: random.Random,
    pace: Callable[[float], float] | None = None,
) -> PeerServices:
    """A peer's services on a network, real or simulated."""
    SpeedTests(peers)
    dht, averager = DHT(peers, DHTSettings(), rng, events), Averager(peers, events=events)
    return PeerServices(peers, PrefixRouter(peers), dht, averager, events, rng, pace)


async def find_others(services: PeerServices, entries: Sequence[Contact]) -> None:
    """Get to know the swarm through the entries, and be known from then on.

    Raises:
        JoinError: there are entries, and none of them answered.
    """
    if entries and await services.dht.bootstrap(entries) == 0:
        told = {event.reason for event in services.events.recent(PeerLeft) if isinstance(event, PeerLeft)}
        why = "; ".join(sorted(told)) or "they do not answer"
        raise JoinError(f"the peers of this invitation let this peer not in: {why}. Ask for a new invitation")
    services.dht.start()
