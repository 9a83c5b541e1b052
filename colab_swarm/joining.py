"""The ways to get a `Swarm`: begin a run, or join one."""

from __future__ import annotations

import atexit
import contextlib
import random
from dataclasses import replace
from typing import overload

from colab_swarm.access import Entrance
from colab_swarm.credentials import find_secret, require_secret
from colab_swarm.errors import JoinError
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.identity import Identity
from colab_swarm.net.lan import LanSwarm, find_swarms
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Role, short
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.presence import DEFAULT_OPTIONS, PeerOptions, Presence, assemble
from colab_swarm.runtime import Runtime
from colab_swarm.swarm import Swarm
from colab_swarm.training.settings import Services
from colab_swarm.trust.authority import Allowlist
from colab_swarm.widgets.environment import in_colab, in_kaggle, require_terms
from colab_swarm.widgets.lan import LanSwarms

_open_swarms: set[Swarm] = set()


def create(
    name: str,
    *,
    access: Access = "invite",
    allow: Allowlist | None = None,
    peer_name: str = "",
    options: PeerOptions = DEFAULT_OPTIONS,
    i_have_read_the_terms: bool = False,
) -> Swarm:
    """Begin a run and be its first peer and its authority; `Swarm.invite` gives the line that lets others join.

    With ``options.identity`` the run survives a restart of its authority: the same file, the same run. Creating it
    again while it is open gives the same swarm (re-run cells freely).

    Args:
        name: of the run, for people.
        access: whom it takes: everybody who knows an address (``open``), whoever has an invitation (``invite``), or
            whoever has one and is on a list (``allowlist``).
        allow: the list, for ``allowlist``.
        peer_name: what others see of this peer.
        options: how this peer takes part in the network.
        i_have_read_the_terms: that the platform's terms allow this; asked for on Colab.

    Raises:
        ValueError: the name is not usable, or the list is missing.
        TermsError: the platform's terms have not been read.
        TunnelError, SecretError: the tunnel cannot be opened.
        OSError: the port cannot be listened on.
    """
    require_terms(i_have_read_the_terms)
    identity = _identity(options)
    entrance = Entrance.found(name, identity, access=access, allow=allow, key_file=options.identity)
    for swarm in _open_swarms:
        if swarm.run_id == entrance.run_id and not swarm.left:
            return swarm
    return _open(entrance, identity, peer_name, options)


@overload
def join(
    invite: str | LanSwarm,
    *,
    peer_name: str = ...,
    options: PeerOptions = ...,
    i_have_read_the_terms: bool = ...,
) -> Swarm: ...
@overload
def join() -> LanSwarms: ...
def join(
    invite: str | LanSwarm | None = None,
    *,
    peer_name: str = "",
    options: PeerOptions = DEFAULT_OPTIONS,
    i_have_read_the_terms: bool = False,
) -> Swarm | LanSwarms:
    """Join the run of an invitation. Joining again under the same name gives the same swarm (re-run cells freely).

    Without an invitation it lists the runs in the local network; those that are open can be joined: ``join(found[0])``.

    Raises:
        InviteError: the invitation is mistyped, expired or of another version.
        JoinError: none of the peers it names could be reached, or this peer is not let in.
        TermsError: the platform's terms have not been read.
        TunnelError, SecretError: the tunnel cannot be opened, or a token is missing.
    """
    if invite is None:
        return LanSwarms(Runtime.shared().call(find_swarms()))
    invitation = _invitation(invite)
    for swarm in _open_swarms:
        if swarm.run_id == invitation.run_id and (peer_name or swarm.name) == swarm.name and not swarm.left:
            return swarm
    if invitation.role > Role.VIEWER:
        require_terms(i_have_read_the_terms)
    identity = _identity(options)
    token = find_secret("HF_TOKEN") if invitation.access == "allowlist" else None
    return _open(Entrance.by(invitation, identity, token=str(token or "")), identity, peer_name, options)


def _invitation(invite: str | LanSwarm) -> Invite:
    if isinstance(invite, str):
        return Invite.parse(invite)
    if invite.access != "open":
        raise JoinError(
            f"{invite.run} takes peers with an invitation only: ask {', '.join(invite.names)} for one"
        )
    return Invite(invite.run_id, invite.contacts, float("inf"))


def _identity(options: PeerOptions) -> Identity:
    return Identity() if options.identity is None else Identity.load_or_create(options.identity)


def _open(entrance: Entrance, identity: Identity, peer_name: str, options: PeerOptions) -> Swarm:
    options = _with_tunnel(options)
    runtime = Runtime.shared()
    name = peer_name or f"peer-{short(identity.id)}"
    services, presence = runtime.call(_start(entrance, identity, name, options))
    _open_swarms.difference_update({swarm for swarm in _open_swarms if swarm.left})
    swarm = Swarm(runtime, services, run_id=entrance.run_id, name=name, presence=presence)
    _open_swarms.add(swarm)
    return swarm


def _with_tunnel(options: PeerOptions) -> PeerOptions:
    """The options with the tunnel's token, which is asked for on the user's thread."""
    if options.tunnel == "ngrok":
        where = "get one at https://dashboard.ngrok.com/get-started/your-authtoken"
        token = require_secret("NGROK_AUTHTOKEN", help=where)
        return replace(options, tunnel=TunnelSettings("ngrok", auth_token=token))
    if isinstance(options.tunnel, str):
        return replace(options, tunnel=TunnelSettings(options.tunnel))
    return options


async def _start(
    entrance: Entrance, identity: Identity, name: str, options: PeerOptions
) -> tuple[Services, Presence]:
    events = EventLog()
    settings = options.node_settings(entrance.run_id)
    node = await Node.start(identity, settings, events, admission=entrance.admission)
    try:
        services = assemble(node, events, random.Random(identity.id))
        presence = await Presence.open(node, entrance, options, services)
    except BaseException:  # an interrupt included: nothing may stay open
        await node.close()
        raise
    if not (in_colab() or in_kaggle()):  # nobody else is in their networks
        presence.announce_in_lan(name)
    return services, presence


@atexit.register
def _leave_all() -> None:
    for swarm in list(_open_swarms):
        with contextlib.suppress(Exception):
            swarm.leave()
