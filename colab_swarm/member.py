"""Who a peer is in its run, how others reach it, and whom it lets in or puts out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypedDict, Unpack

from colab_swarm.invite import Invite, Setting
from colab_swarm.net.ladder import Reachability, Rung
from colab_swarm.net.peers import Contact, PeerId, Role
from colab_swarm.presence import Presence
from colab_swarm.runtime import Runs
from colab_swarm.training.settings import Services
from colab_swarm.trust.contributions import Contribution
from colab_swarm.trust.service import Trust
from colab_swarm.widgets.environment import in_notebook
from colab_swarm.widgets.invitation import Invitation

logger = logging.getLogger(__name__)


class Who(TypedDict):
    """Who a peer is: its run, its name for people, and its place in the network; None in a simulation."""

    run_id: str
    name: str
    presence: Presence | None


class Member:
    """One peer of a run."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        self._runtime = runtime
        self._services = services
        self._presence = who["presence"]
        self.run_id = who["run_id"]
        self.name = who["name"]
        self.events = services.events

    @property
    def id(self) -> PeerId:
        """This peer's id, 32 bytes."""
        return self._services.peers.id

    @property
    def contact(self) -> Contact:
        """This peer's id and the addresses where it can be dialled."""
        return self._services.peers.contact

    @property
    def run(self) -> str:
        """The run's name."""
        return self.run_id.rpartition("-")[0]

    @property
    def began_it(self) -> bool:
        """Whether this peer created the run, and did not join it."""
        return self._presence is not None and self._presence.entrance.invitation is None

    @property
    def reachability(self) -> Reachability:
        """How others reach this peer, and why not better: ``print(swarm.reachability.explain())``."""
        if self._presence is not None:
            return self._presence.reachability.current
        addresses = self.contact.addresses
        return Reachability(Rung.DIRECT if addresses else Rung.OUTGOING, addresses=addresses)

    def invite(
        self,
        *,
        role: str | None = None,
        hours: float | None = None,
        uses: int | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> Invitation:
        """One line that lets others join; in a notebook it shows itself with a QR code and badges.

        The authority (the peer that created the run) makes new ones. Other peers pass on the invitation that they
        came by, with fresh addresses; in a run that is open to everybody any peer makes them.

        Args:
            role: of those who join: ``worker`` (the default), ``reducer`` or ``viewer``.
            hours: for how long one may join by it; 24 by default.
            uses: how many peers may; any number by default. The authority counts, so it has to be there then.
            settings: suggestions for training, such as ``{"target_batch_size": 4096}``.

        If only peers in the same local network can use it, its ``warning`` says so, and notebooks show that.

        Raises:
            JoinError: nobody could use it: no known peer accepts connections.
            PermissionError: only the authority can make such an invitation.
            ValueError: the role, hours or uses make no sense.
        """
        presence = self._require_real()
        invite = self._runtime.call(_invite(presence, role, hours, uses))
        if settings is not None:
            invite = invite.with_settings(settings)
        if invite.warning and not in_notebook():  # notebooks show it with the invitation
            logger.warning(invite.warning)
        return Invitation(
            str(invite),
            run=self.run,
            role=invite.role.name.lower(),
            expires_at=invite.expires_at,
            uses=invite.uses or None,
            warning=invite.warning,
        )

    @property
    def suggestions(self) -> Mapping[str, Setting]:
        """Settings for training that the invitation suggests."""
        invitation = self._presence.entrance.invitation if self._presence else None
        return {} if invitation is None else dict(invitation.settings)

    def _check_role(self) -> None:
        """Others would refuse the gradients; better to know before they are computed."""
        invitation = self._presence.entrance.invitation if self._presence else None
        if invitation is not None and invitation.role < Role.WORKER:
            role = invitation.role.name.lower()
            raise PermissionError(f"you joined as a {role}: to train, ask for an invitation as worker")

    def _require_real(self) -> Presence:
        if self._presence is None:
            raise PermissionError("nobody from outside can join a simulated run, nor be put out of it")
        return self._presence

    def revoke(self, peer: PeerId | str) -> None:
        """Put a peer out of the run for good: it is out everywhere within a minute.

        Args:
            peer: its id, or the first hex digits of it, as panels show them; or the text of an invitation, which puts
                out those who are in by it alone.

        Raises:
            PermissionError: this peer did not create the run, or the run is open to everybody.
            ValueError: no such peer is known, or several are.
        """
        trust = self._require_real().trust
        if isinstance(peer, str):
            subject = Invite.parse(peer, now=0.0).key.id if "#" in peer else self._find(peer)
        else:
            subject = peer
        self._runtime.call(_revoke(trust, subject))

    def _find(self, digits: str) -> PeerId:
        known = self._known_peers()
        found = [peer for peer in known if peer.hex().startswith(digits.lower())]
        if len(found) != 1:
            raise ValueError(f"{len(found)} peers are known whose id begins with {digits!r}")
        return found[0]

    def _known_peers(self) -> set[PeerId]:
        return {*self._services.peers.linked()}

    def contributions(self) -> tuple[Contribution, ...]:
        """The leaderboard: who gave how much, as the others saw it; most samples first."""
        if self._presence is None:
            return ()
        return self._runtime.call(self._presence.trust.contributions.read())


async def _invite(presence: Presence, role: str | None, hours: float | None, uses: int | None) -> Invite:
    authority = presence.trust.authority
    return presence.entrance.invite(presence.node, authority, role=role, hours=hours, uses=uses)


async def _revoke(trust: Trust, subject: PeerId) -> None:
    trust.revoke(subject)
