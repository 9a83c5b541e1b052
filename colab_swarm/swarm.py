"""`Swarm`: one peer's membership in a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from colab_swarm.averaging.arrays import ArrayAverages
from colab_swarm.errors import PeerError
from colab_swarm.invite import Invite, Setting
from colab_swarm.net.ladder import Reachability, Rung
from colab_swarm.net.peers import Contact, PeerId, Role
from colab_swarm.overview import Overview
from colab_swarm.presence import Presence
from colab_swarm.runtime import Runs
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.training.settings import AveragingOptions, Services
from colab_swarm.trust.contributions import Contribution
from colab_swarm.trust.service import Trust
from colab_swarm.widgets.invitation import Invitation

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from colab_swarm.averaging.moshpit import GridResult
    from colab_swarm.training.assistant import Assistance
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.thrift import Budget
    from colab_swarm.widgets.panel import Panel

logger = logging.getLogger(__name__)


class Swarm:
    """One peer's membership in a run. Use `create`, `join` or `simulate` to get one."""

    def __init__(
        self,
        runtime: Runs,
        services: Services,
        *,
        run_id: str,
        name: str,
        presence: Presence | None = None,
    ) -> None:
        """``presence`` is None in a simulation."""
        self._runtime = runtime
        self._services = services
        self._presence = presence
        self._averages = ArrayAverages(services.rooms, services.dht, services.averager, run_id)
        self.run_id = run_id
        self._optimizer: SwarmOptimizer | None = None  # the last one made: what is shown
        self._optimizers: dict[str, SwarmOptimizer] = {}  # by name of the model
        self.assistance: Assistance | None = None
        self.left = False
        self.name = name
        self.events = services.events
        self._overview = Overview(services, run=self.run, name=name)

    # --- who and where --------------------------------------------------------------------------------------------

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

        Raises:
            JoinError: nobody could use it: no known peer accepts connections.
            PermissionError: only the authority can make such an invitation.
            ValueError: the role, hours or uses make no sense.
        """
        presence = self._require_real()
        invite = self._runtime.call(_invite(presence, role, hours, uses))
        if settings is not None:
            invite = invite.with_settings(settings)
        return Invitation(
            str(invite),
            run=self.run,
            role=invite.role.name.lower(),
            expires_at=invite.expires_at,
            uses=invite.uses or None,
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
        known = {*self._services.peers.linked()}
        if self._optimizer is not None:
            known |= self._optimizer.collaboration.progress.records.keys()
        found = [peer for peer in known if peer.hex().startswith(digits.lower())]
        if len(found) != 1:
            raise ValueError(f"{len(found)} peers are known whose id begins with {digits!r}")
        return found[0]

    def contributions(self) -> tuple[Contribution, ...]:
        """The leaderboard: who gave how much, as the others saw it; most samples first."""
        if self._presence is None:
            return ()
        return self._runtime.call(self._presence.trust.contributions.read())

    # --- what it is for -------------------------------------------------------------------------------------------

    def optimizer(
        self,
        optimizer: Optimizer,
        *,
        target_batch_size: int,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        name: str = "model",
        budget: Budget | None = None,
        **averaging: Unpack[AveragingOptions],
    ) -> SwarmOptimizer:
        """Let the swarm step ``optimizer``: see `SwarmOptimizer`. Calling it again for a name replaces the former one.

        Args:
            optimizer: a torch optimizer over the model's parameters; all peers use the same kind and settings.
            target_batch_size: samples of all peers together for one global step.
            scheduler: stepped once per global step.
            max_grad_norm: clip the averaged gradient to this norm.
            name: tells several models of one run apart.
            budget: for the traffic of this peer.
            **averaging: ``codec``, ``mean_codec``, ``error_feedback``, ``delayed``, ``local_steps``, ``matchmaking_s``:
                see `AveragingOptions`. All peers use the same, but for delayed.

        Raises:
            ValueError, TypeError: a setting is not usable.
            PermissionError: this peer joined as a viewer or reducer.
            StateError: a swarm trains this already, but nobody could give its state.
        """
        from colab_swarm.training.optimizer import SwarmOptimizer
        from colab_swarm.training.replica import UpdateRule
        from colab_swarm.training.settings import TrainingSettings

        prefix = f"{self.run_id}/{name}"
        settings = TrainingSettings.of(prefix, float(target_batch_size), budget, averaging)
        self._check_here()
        self._check_role()
        if name in self._optimizers:
            self._optimizers.pop(name).close()
        delayed, local = averaging.get("delayed", False), settings.local_steps != 1
        rule = UpdateRule(optimizer, scheduler, max_grad_norm, delayed, local)
        trained = SwarmOptimizer(self._runtime, self._services, settings, rule, self.name)
        self._optimizer = self._optimizers[name] = trained
        return trained

    def average(
        self, values: Any, *, weight: float = 1.0, group_size: int | None = None, name: str = "values"
    ) -> tuple[Any, GridResult]:
        """The mean of an array over all who call this at about the same time, and what became of it.

        Args:
            values: a NumPy array or torch tensor; the same length for all.
            weight: of this peer's values; 0: only receive.
            group_size: of the groups that average in turn; None: as failures and times suggest.
            name: tells several averages apart.

        Raises:
            ValueError: values, weight or group_size are not usable.
            PermissionError: this peer joined as a viewer or reducer.
        """
        self._check_here()
        self._check_role()
        average = self._averages.average(values, weight=weight, group_size=group_size, name=name)
        return self._runtime.call(average)

    def assist(self, name: str | None = None) -> Assistance:
        """Help others train: organize their rounds, reduce, hand on the state to newcomers. Needs no torch.

        It lets peers that only dial out train together. Calling it again replaces the former one.

        Args:
            name: of the only model to help with, as given to `optimizer`; None: every model of the run.
        """
        from colab_swarm.training.assistant import Assistance, Assistant

        self._check_here()
        if self.assistance is not None:
            self.assistance.stop()
        assistant = Assistant(self._services, self.run_id, name=self.name, collaboration=name)
        self.assistance = Assistance(self._runtime, assistant)
        return self.assistance

    def panel(self) -> Panel:
        """A live view of the swarm: widgets in a notebook, text elsewhere."""
        from colab_swarm.widgets.panel import Panel

        return Panel(self.snapshot, self.leave)

    def watch(self, seconds: float | None = None) -> None:
        """Show the swarm for ``seconds`` (until interrupted if None); the peer goes on afterwards."""
        self.panel().watch(seconds)

    # --- leaving --------------------------------------------------------------------------------------------------

    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links. Idempotent.

        Args:
            hand_over_s: how long to wait for a last round, so that gradients accumulated here are not lost.
        """
        if self.left:
            return
        for optimizer in self._optimizers.values():
            optimizer.close(hand_over_s=hand_over_s)
        self.left = True
        if self.assistance is not None:
            self.assistance.stop()
        self._runtime.call(self._averages.close())
        self._runtime.call(_close(self._services, self._presence))

    def vanish(self) -> None:
        """End like a process that is killed: no farewell. For simulated crashes, on the runtime's loop."""
        self.left = True
        for optimizer in self._optimizers.values():
            optimizer.collaboration.vanish()
        if self.assistance is not None:
            self.assistance.vanish()
        self._services.dht.vanish()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _check_here(self) -> None:
        if self.left:
            raise RuntimeError("this peer has left its swarm: cs.join(…) again")

    # --- what it shows --------------------------------------------------------------------------------------------

    def snapshot(self) -> SwarmSnapshot:
        """What a panel shows, as one frozen record; safe from any thread."""
        return self._overview.snapshot(self._optimizer, reached=str(self.reachability), left=self.left)

    def __repr__(self) -> str:
        linked = len(self._services.peers.linked())
        state = "left" if self.left else f"{linked} {'peer' if linked == 1 else 'peers'} linked"
        return f"Swarm({self.run}, {self.name}, {state})"

    def _repr_html_(self) -> str:
        from colab_swarm.widgets.render import render_html

        return render_html(self.snapshot())


async def _invite(presence: Presence, role: str | None, hours: float | None, uses: int | None) -> Invite:
    authority = presence.trust.authority
    return presence.entrance.invite(presence.node, authority, role=role, hours=hours, uses=uses)


async def _revoke(trust: Trust, subject: PeerId) -> None:
    trust.revoke(subject)


async def _close(services: Services, presence: Presence | None) -> None:
    if presence is not None:
        await presence.leave()
    else:
        with contextlib.suppress(PeerError):
            await services.dht.stop()
        await services.averager.close()
    await services.peers.close()
