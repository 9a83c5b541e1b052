"""A peer's rights in its run: inviting, removing others, and the record of contributions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from colab_swarm.invite import Invite, Setting
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.platforms import in_notebook
from colab_swarm.notebook.receipt import LocalStats, Receipt
from colab_swarm.runtime import Runner
from colab_swarm.swarm.network import NetworkSession
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.contributions import Contribution, Leaderboard
from colab_swarm.trust.service import Trust

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerContext:
    """What every part of a `Swarm` stands on.

    Attributes:
        runtime: the background thread, or virtual time.
        services: this peer's link, DHT, averaging and events.
        network: its session on the real network; None in a simulation.
        run_id: the run.
        name: this peer's name for people.
    """

    runtime: Runner
    services: PeerServices
    network: NetworkSession | None
    run_id: str
    name: str

    @property
    def run(self) -> str:
        """The run's name for people."""
        return self.run_id.rpartition("-")[0]

    def require_network(self) -> NetworkSession:
        """Return the network session.

        Raises:
            PermissionError: this peer is simulated.
        """
        if self.network is None:
            raise PermissionError("a simulated run has no invitations, memberships or contributions")
        return self.network


class RunMembership:
    """Invitations, roles and contributions of one peer."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._deeds = LocalStats(context.services)

    @property
    def is_owner(self) -> bool:
        """True if this peer created the run."""
        network = self._context.network
        return network is not None and network.entrance.invitation is None

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Training settings that the invitation carries."""
        invitation = self._context.network.entrance.invitation if self._context.network else None
        return {} if invitation is None else dict(invitation.settings)

    def check_role(self) -> None:
        """Fail before gradients are computed that other peers would refuse.

        Raises:
            PermissionError: this peer joined as a viewer or reducer.
        """
        invitation = self._context.network.entrance.invitation if self._context.network else None
        if invitation is not None and invitation.role < Role.WORKER:
            role = invitation.role.name.lower()
            raise PermissionError(f"you joined as a {role}: to train, ask for an invitation as worker")

    def invite(
        self,
        *,
        role: str | None,
        hours: float | None,
        uses: int | None,
        settings: Mapping[str, Setting] | None,
    ) -> Invitation:
        """Make an invitation; see `Swarm.invite`."""
        invite = self._context.runtime.call(_invite(self._context.require_network(), role, hours, uses))
        if settings is not None:
            invite = invite.with_settings(settings)
        if invite.warning and not in_notebook():  # notebooks show it with the invitation
            logger.warning(invite.warning)
        return Invitation(
            str(invite),
            run=self._context.run,
            role=invite.role.name.lower(),
            expires_at=invite.expires_at,
            uses=invite.uses or None,
            warning=invite.warning,
        )

    def remove(self, peer: PeerId | str, known: set[PeerId]) -> None:
        """Remove a peer; see `Swarm.remove_peer`. ``known``: the ids that a prefix may match."""
        trust = self._context.require_network().trust
        if isinstance(peer, str):
            subject = Invite.parse(peer, now=0.0).key.id if "#" in peer else _match(peer, known)
        else:
            subject = peer
        self._context.runtime.call(_revoke(trust, subject))

    def contributions(self, names: Mapping[str, str]) -> Leaderboard:
        """Read the leaderboard; ``names`` by short id."""
        rows: tuple[Contribution, ...] = ()
        me = self._context.services.peers.id
        if self._context.network is not None:
            rows = self._context.runtime.call(self._context.network.trust.contributions.read())
        return Leaderboard(rows, {**names, short(me): self._context.name}, me)

    def receipt(self) -> Receipt:
        """Make the receipt; see `Swarm.receipt`."""
        network = self._context.require_network()
        vouchers = self._context.runtime.call(network.trust.contributions.vouchers())
        admission = network.entrance.admission
        authority = b"" if admission is None else admission.authority
        return self._deeds.receipt(self._context.run_id, self._context.name, vouchers, authority=authority)


def _match(digits: str, known: set[PeerId]) -> PeerId:
    found = [peer for peer in known if peer.hex().startswith(digits.lower())]
    if len(found) != 1:
        raise ValueError(f"{digits!r} matches {len(found)} peer ids, expected exactly one")
    return found[0]


async def _invite(network: NetworkSession, role: str | None, hours: float | None, uses: int | None) -> Invite:
    return network.entrance.invite(network.node, network.trust.authority, role=role, hours=hours, uses=uses)


async def _revoke(trust: Trust, subject: PeerId) -> None:
    trust.revoke(subject)
