"""A peer's own membership: issued when it joins, renewed long before it ends, shown to its linked peers.

An invitation that admits offline lets a peer sign its own membership at once. The authority
replaces it as soon as it is reached, so that the invitation can be revoked without removing the
peers that used it. It renews its own from half of their life on: it may be away for the other half.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from colab_swarm.dht.service import DHT
from colab_swarm.errors import CallRefused, JoinError, NotAdmitted, PeerError
from colab_swarm.events import ClockSkewed, EventLog, MembershipEnding, MembershipRenewed
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.left_out import LeftOut
from colab_swarm.net.membership import SLACK_S, Grant, Membership, MembershipAdmission, in_words
from colab_swarm.net.peers import Ack, PeerId, Peers, Refusal, Role, short
from colab_swarm.trust.authority import IssuedMembership, RequestMembership

logger = logging.getLogger(__name__)
REPORT_S = 30.0  # smaller clock differences are not reported
TICK_S = 10.0
ASK_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 10.0
RETRY_S, MAX_RETRY_S = 30.0, 600.0
FIX = (
    "set it (Linux: `sudo timedatectl set-ntp true`; Windows, macOS: switch on automatic time in the settings; "
    "Colab, Kaggle: restart the runtime)"
)


class ClockWatch:
    """Reports once that the clock is off, that this has much changed, and that it is over."""

    def __init__(self) -> None:
        self._reported_s = 0.0

    def on_skew(self, behind_s: float) -> str | None:
        """Return what to report if the clock is ``behind_s`` behind others' (negative: ahead), or None."""
        off_s, reported_s = abs(behind_s), abs(self._reported_s)
        if reported_s and off_s <= REPORT_S / 2:
            self._reported_s = 0.0
            return "this machine's clock is right again"
        same = reported_s > 0 and abs(behind_s - self._reported_s) <= max(REPORT_S, reported_s / 2)
        if off_s <= REPORT_S or (same and (off_s > SLACK_S) == (reported_s > SLACK_S)):
            return None
        self._reported_s = behind_s
        way = "behind" if behind_s > 0 else "ahead of"
        text = f"this machine's clock is {in_words(off_s)} {way} the other peers'"
        if off_s <= SLACK_S:
            return f"{text}: compensated, you need to do nothing"
        return f"{text}: beyond 10 minutes they refuse what it signs; {FIX}"


@dataclass(frozen=True)
class Credentials:
    """What admits a peer: an invitation's grant and key, and a Hugging Face token if required."""

    grant: Grant
    invitation: Identity
    token: str = field(default="", repr=False)
    membership: bytes = field(default=b"", repr=False)  # of an earlier session


class RunMember:
    """Gets and renews this peer's membership, and accepts the renewed ones of other peers.

    ``credentials`` admit this peer, None for the authority. ``readmit`` is `Linker.readmit`,
    ``behind_s`` is `SwarmClock.behind_s`.
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
        self._clock, self._absent = ClockWatch(), LeftOut[str](RETRY_S, MAX_RETRY_S)
        self._unaware: set[PeerId] = set()  # linked peers that have not seen the renewed membership
        peers.serve(IssuedMembership, self._on_renewed, role=Role.GUEST)

    async def join(self) -> None:
        """Get the first membership; raise `JoinError` if the authority refuses or does not answer."""
        if self._credentials is None:
            return
        grant, key, now = self._credentials.grant, self._peers.public_key, self._peers.time()
        saved = self._credentials.membership
        if saved:
            with contextlib.suppress(NotAdmitted):
                self._admission.check(key, saved, now=now)
                self._admission.membership = saved
                return
        own = Membership.by_invitation(grant, self._credentials.invitation, key=key, now=now).encode()
        over = now > grant.join_until
        if grant.offline and not (saved and over):
            self._admission.membership = own
            return
        # the authority renews an ended membership for a while
        try:
            await self._request(saved if saved and over else own, self._credentials.token)
        except CallRefused as error:
            raise JoinError(self._words_of(error)) from error
        except PeerError as error:
            raise JoinError(
                "only the organizer's peer can admit you by this invitation, and it cannot be reached: "
                f"{error}. Is it running? Try again later, or ask for an invitation of unlimited use"
            ) from error

    async def tick(self) -> None:
        """Renew the membership if due, show it to linked peers that have not seen it, check the clock."""
        text = self._clock.on_skew(self._behind_s())
        if text is not None:
            self._events.emit(ClockSkewed(self._loop.time(), self._behind_s(), text))
        if self._credentials is not None:
            held, now = Membership.decode(self._admission.membership), self._peers.time()
            due_at = held.issued_at if held.grant else (held.issued_at + held.expires_at) / 2
            if now >= due_at and not self._absent.holds("authority", now):
                await self._renew(held, self._credentials.token)
        self._unaware &= self._peers.linked()
        await asyncio.gather(*(self._present(peer) for peer in self._unaware))

    async def _renew(self, held: Membership, token: str) -> None:
        try:
            renewed = await self._request(self._admission.membership, token)
        except PeerError as error:
            now = self._peers.time()
            self._absent.fail("authority", now)
            left_s = held.expires_at - now
            refused = isinstance(error, CallRefused) and error.code == "refused"
            if refused or left_s < (held.expires_at - held.issued_at) / 4:
                why = self._words_of(error)
                reason = why if refused else f"the organizer's peer cannot be reached for a new one: {why}"
                self._events.emit(MembershipEnding(self._loop.time(), max(0.0, left_s), reason))
            return
        self._absent.forgive("authority")
        self._unaware = set(self._peers.linked())
        self._events.emit(MembershipRenewed(self._loop.time(), renewed.expires_at - self._peers.time()))

    async def _request(self, proof: bytes, token: str) -> Membership:
        authority = id_of(self._admission.authority)
        if authority not in self._peers.linked():
            contact = await self._dht.find_peer(authority)
            if contact is not None:
                self._peers.learn(contact)
        answer = await self._peers.call(
            authority, RequestMembership(proof, token), IssuedMembership, timeout_s=ASK_TIMEOUT_S
        )
        issued = self._admission.check(self._peers.public_key, answer.membership, now=self._peers.time())
        self._admission.membership = answer.membership
        return issued

    def _words_of(self, error: PeerError) -> str:
        # the authority's refusal without its id in front
        return str(error).removeprefix(f"{short(id_of(self._admission.authority))}: ")

    async def _present(self, peer: PeerId) -> None:
        try:
            await self._peers.call(
                peer, IssuedMembership(self._admission.membership), Ack, timeout_s=CALL_TIMEOUT_S
            )
            self._unaware.discard(peer)
        except PeerError as error:
            logger.debug("%s does not take the renewed membership: %s", short(peer), error)

    async def _on_renewed(self, peer: PeerId, message: IssuedMembership) -> Ack:
        try:
            self._readmit(peer, message.membership)
        except NotAdmitted as error:
            raise Refusal(str(error)) from error
        return Ack()
