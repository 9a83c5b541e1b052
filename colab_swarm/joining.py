"""The ways to get a `Swarm`: begin a run, or join one."""

from __future__ import annotations

import atexit
import contextlib
import random
import secrets
from collections.abc import Sequence
from dataclasses import replace

from colab_swarm.credentials import require_secret
from colab_swarm.events import EventLog
from colab_swarm.invite import NAME, Invite
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, short
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.presence import DEFAULT_OPTIONS, PeerOptions, Presence, assemble
from colab_swarm.runtime import Runtime
from colab_swarm.swarm import Swarm
from colab_swarm.training.settings import Services

_open_swarms: set[Swarm] = set()


def create(name: str, *, peer_name: str = "", options: PeerOptions = DEFAULT_OPTIONS) -> Swarm:
    """Begin a run and be its first peer; `Swarm.invite` gives the line that lets others join.

    Raises:
        ValueError: the name is not usable.
        OSError: the port cannot be listened on.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no run name: use up to 63 of a-z, 0-9, '.', '_', '-', such as 'my-first-swarm'"
        )
    return _open(f"{name}-{secrets.token_hex(4)}", (), peer_name, options)


def join(invite: str, *, peer_name: str = "", options: PeerOptions = DEFAULT_OPTIONS) -> Swarm:
    """Join the run of an invitation. Joining again under the same name gives the same swarm (re-run cells freely).

    Raises:
        InviteError: the invitation is mistyped, expired or of another version.
        JoinError: none of the peers it names could be reached.
    """
    invitation = Invite.parse(invite)
    for swarm in _open_swarms:
        if swarm.run_id == invitation.run_id and (peer_name or swarm.name) == swarm.name and not swarm.left:
            return swarm
    return _open(invitation.run_id, invitation.entries, peer_name, options)


def _open(run_id: str, entries: Sequence[Contact], peer_name: str, options: PeerOptions) -> Swarm:
    options = _with_tunnel(options)
    runtime = Runtime.shared()
    identity = Identity() if options.identity is None else Identity.load_or_create(options.identity)
    name = peer_name or f"peer-{short(identity.id)}"
    services, presence = runtime.call(_start(identity, run_id, entries, options))
    _open_swarms.difference_update({swarm for swarm in _open_swarms if swarm.left})
    swarm = Swarm(runtime, services, run_id=run_id, name=name, entries=entries, presence=presence)
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
    identity: Identity, run_id: str, entries: Sequence[Contact], options: PeerOptions
) -> tuple[Services, Presence]:
    events = EventLog()
    node = await Node.start(identity, options.node_settings(run_id), events)
    try:
        services = assemble(node, events, random.Random(identity.id))
        presence = await Presence.open(node, run_id, entries, options, services)
    except BaseException:  # an interrupt included: nothing may stay open
        await node.close()
        raise
    return services, presence


@atexit.register
def _leave_all() -> None:
    for swarm in list(_open_swarms):
        with contextlib.suppress(Exception):
            swarm.leave()
