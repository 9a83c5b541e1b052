"""A peer's own membership: got when it joins, renewed long before it ends, shown to whom it is linked to.

An invitation that admits offline is signed in by at once; the authority replaces that membership by one of its own
as soon as it is reached, so that the invitation can be revoked without putting its users out. A membership by the
authority is renewed from half of its life on, so that the authority may be away for the other half.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from colab_swarm.dht.service import DHT
from colab_swarm.errors import CallRefused, JoinError, NotAdmitted, PeerError
from colab_swarm.events import ClockSkewed, EventLog, Fault, MembershipEnding, MembershipRenewed
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import SLACK_S, Grant, Membership, MembershipAdmission, in_words
from colab_swarm.net.peers import PeerId, Peers, Refusal, Role, short
from colab_swarm.trust.authority import IssuedMembership, Presented, PresentMembership, RequestMembership

TELL_S = 30.0

"""A difference that is worth a word."""

FIX = (
    "set it (Linux: `sudo timedatectl set-ntp true`; Windows, macOS: switch on automatic time in the settings; "
    "Colab, Kaggle: restart the runtime)"
)


class ClockWatch:
    """Says a thing once: when the clock is off, when that has become much worse or better, when it is over."""

    def __init__(self) -> None:
        self._told_s = 0.0

    def on_skew(self, behind_s: float) -> str | None:
        """What to tell now that the clock is ``behind_s`` behind the other peers' (ahead if negative), if anything."""
        off_s, told_s = abs(behind_s), abs(self._told_s)
        if told_s and off_s <= TELL_S / 2:
            self._told_s = 0.0
            return "this machine's clock is right again"
        as_told = told_s > 0 and abs(behind_s - self._told_s) <= max(TELL_S, told_s / 2)
        if off_s <= TELL_S or (as_told and (off_s > SLACK_S) == (told_s > SLACK_S)):
            return None
        self._told_s = behind_s
        way = "behind" if behind_s > 0 else "ahead of"
        text = f"this machine's clock is {in_words(off_s)} {way} the other peers'"
        if off_s <= SLACK_S:
            return f"{text}: compensated, nothing needs to be done"
        return f"{text}: beyond 10 minutes they refuse what it signs; {FIX}"


logger = logging.getLogger(__name__)

TICK_S = 10.0

ASK_TIMEOUT_S = 20.0

CALL_TIMEOUT_S = 10.0

RETRY_S, MAX_RETRY_S = 30.0, 600.0


@dataclass(frozen=True)
class Credentials:
    """What lets a peer in.

    Attributes:
        grant, invitation: the invitation's grant and key.
        token: of Hugging Face, where the run asks for one.
        membership: of an earlier session; it may outlive the invitation.
    """

    grant: Grant
    invitation: Identity
    token: str = field(default="", repr=False)
    membership: bytes = field(default=b"", repr=False)


class RenewalPlan:
    """When to ask for a fresh membership. Free of I/O."""

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = float("-inf")

    def due(self, held: Membership, *, now: float) -> bool:
        """Whether to ask now."""
        wanted_at = (held.issued_at + held.expires_at) / 2 if held.grant is None else held.issued_at
        return now >= max(wanted_at, self._not_before)

    def on_renewed(self) -> None:
        """It worked."""
        self._failures, self._not_before = 0, float("-inf")

    def on_failed(self, *, now: float) -> None:
        """It did not: wait twice as long as the last time, 10 minutes at most."""
        self._not_before = now + min(RETRY_S * 2**self._failures, MAX_RETRY_S)
        self._failures = min(self._failures + 1, 10)


class RunMember:
    """Gets and keeps this peer's membership, and takes the renewed ones of others.

    Args:
        peers: the network.
        dht: finds the authority.
        admission: of this peer; its `membership` is kept fresh.
        events: gets `MembershipRenewed`, `MembershipEnding`, `ClockSkewed`, and a `Fault` when keeping it fails.
        credentials: what lets it in; None for the authority, and in an open run.
        readmit: gives a linked peer the role of a membership, see `Linker.readmit`.
        behind_s: how far this machine's clock is behind the other peers', see `SwarmClock.behind_s`.
    """

    def __init__(
        self,
        peers: Peers,
        dht: DHT,
        admission: MembershipAdmission,
        events: EventLog,
        credentials: Credentials | None,
        readmit: Callable[[PeerId, bytes], Role],
        behind_s: Callable[[], float],
    ) -> None:
        self._peers, self._dht, self._admission, self._events = peers, dht, admission, events
        self._credentials, self._readmit, self._behind_s = credentials, readmit, behind_s
        self._loop = asyncio.get_running_loop()
        self._plan, self._clock = RenewalPlan(), ClockWatch()
        self._untold: set[PeerId] = set()
        self._task: asyncio.Task[None] | None = None
        peers.serve(PresentMembership, self._on_present, role=Role.GUEST)

    async def join(self) -> None:
        """Get the first membership: before anything else is asked of the swarm.

        Raises:
            JoinError: the authority refused, or is needed and does not answer.
        """
        if self._credentials is None:
            return
        grant, key, now = self._credentials.grant, self._peers.public_key, self._peers.time()
        kept = self._credentials.membership
        if kept:
            with contextlib.suppress(NotAdmitted):
                self._admission.check(key, kept, now=now)
                self._admission.membership = kept
                return
        own = Membership.by_invitation(grant, self._credentials.invitation, key=key, now=now).encode()
        over = now > grant.join_until
        if grant.offline and not (kept and over):
            self._admission.membership = own
            return
        if kept and over:  # the authority renews for a while what it gave
            own = kept
        try:
            await self._ask(own, self._credentials.token)
        except CallRefused as error:
            raise JoinError(self._words_of(error)) from error
        except PeerError as error:
            raise JoinError(
                "only the organizer's peer can admit you by this invitation, and it cannot be asked: "
                f"{error}. Is it running? Try again later, or ask for an invitation of unlimited use"
            ) from error

    def start(self) -> None:
        """Keep the membership fresh until `stop`."""
        self._task = self._loop.create_task(self._keep())

    async def stop(self) -> None:
        """End the background work."""
        self._peers.unserve(PresentMembership)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                await self.tick()
            except Exception as error:
                logger.exception("keeping the membership failed")
                self._events.emit(Fault.of(self._loop.time(), "keeping the membership", error))
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """Renew the membership if it is time to, show it to who has not seen it, look at the clock."""
        text = self._clock.on_skew(self._behind_s())
        if text is not None:
            self._events.emit(ClockSkewed(self._loop.time(), self._behind_s(), text))
        if self._credentials is not None:
            held = Membership.decode(self._admission.membership)
            if self._plan.due(held, now=self._peers.time()):
                await self._renew(held, self._credentials.token)
        self._untold &= self._peers.linked()
        await asyncio.gather(*(self._present(peer) for peer in self._untold))

    async def _renew(self, held: Membership, token: str) -> None:
        try:
            fresh = await self._ask(self._admission.membership, token)
        except PeerError as error:
            now = self._peers.time()
            self._plan.on_failed(now=now)
            left_s = held.expires_at - now
            refused = isinstance(error, CallRefused) and error.code == "refused"
            if refused or left_s < (held.expires_at - held.issued_at) / 4:
                why = self._words_of(error)
                reason = why if refused else f"the organizer's peer cannot be asked for a new one: {why}"
                self._events.emit(MembershipEnding(self._loop.time(), max(0.0, left_s), reason))
            return
        self._plan.on_renewed()
        self._untold = set(self._peers.linked())
        self._events.emit(MembershipRenewed(self._loop.time(), fresh.expires_at - self._peers.time()))

    async def _ask(self, proof: bytes, token: str) -> Membership:
        """Ask the authority, and take what it gives.

        Raises:
            PeerError: it gives nothing, or nothing of use.
        """
        authority = id_of(self._admission.authority)
        if authority not in self._peers.linked():
            contact = await self._dht.find_peer(authority)
            if contact is not None:
                self._peers.learn(contact)
        answer = await self._peers.call(
            authority, RequestMembership(proof, token), IssuedMembership, timeout_s=ASK_TIMEOUT_S
        )
        fresh = self._admission.check(self._peers.public_key, answer.membership, now=self._peers.time())
        self._admission.membership = answer.membership
        return fresh

    def _words_of(self, error: PeerError) -> str:
        """An error as the person reads it: the authority's refusal without its id in front."""
        return str(error).removeprefix(f"{short(id_of(self._admission.authority))}: ")

    async def _present(self, peer: PeerId) -> None:
        message = PresentMembership(self._admission.membership)
        try:
            await self._peers.call(peer, message, Presented, timeout_s=CALL_TIMEOUT_S)
        except PeerError as error:
            logger.debug("%s does not take the renewed membership: %s", short(peer), error)
            return
        self._untold.discard(peer)

    async def _on_present(self, peer: PeerId, message: PresentMembership) -> Presented:
        try:
            return Presented(self._readmit(peer, message.membership))
        except NotAdmitted as error:
            raise Refusal(str(error)) from error
