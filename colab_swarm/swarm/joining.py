"""The ways to get a `Swarm`: begin a run, join one, or come back to one."""

from __future__ import annotations

import atexit
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import overload

from colab_swarm.credentials import find_secret
from colab_swarm.errors import JoinError, StateError
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.identity import Identity
from colab_swarm.net.lan import LanSwarm, find_swarms
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Role, short
from colab_swarm.net.tunnels import settings_of
from colab_swarm.notebook.invitation import LanSwarms
from colab_swarm.notebook.platforms import (
    SessionClock,
    in_colab,
    in_kaggle,
    platform,
    require_terms,
    session_age_s,
)
from colab_swarm.runtime import Runtime
from colab_swarm.swarm.network import DEFAULT_OPTIONS, NetworkOptions, NetworkSession, assemble
from colab_swarm.swarm.saved import PeerStore, SavedPeer, folder_of, lasts, read_kept
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import Allowlist

ENDLESS = 1e11
"""When an invitation to an open run ends: the last moment there is."""
_open_swarms: set[Swarm] = set()


def create(
    name: str,
    *,
    access: Access = "invite",
    allow: Allowlist | None = None,
    peer_name: str = "",
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
    accept_terms: bool = False,
) -> Swarm:
    """Begin a run and be its first peer and its authority; `Swarm.invite` gives the line that lets others join.

    With ``state_dir`` the run survives a restart of its authority: the same folder, the same run. Creating it again
    while it is open returns the same swarm, so cells can be run again.

    Args:
        name: of the run, for people.
        access: whom it takes: everybody who knows an address (``open``), whoever has an invitation (``invite``), or
            whoever has one and is on a list (``allowlist``).
        allow: the list, for ``allowlist``.
        peer_name: what others see of this peer.
        options: how this peer takes part in the network.
        state_dir: a folder for all that this peer needs to come back (see `resume`): its key, its way in, what its
            optimizers have trained and what it saw others give. All but the checkpoints in it is secret.
        accept_terms: that the platform's terms allow this; asked for on Colab.

    Raises:
        ValueError: the name is not usable, the list is missing, or the folder keeps a peer of another run.
        StateError: the folder is in use, damaged, or cannot be written, or its peer is open without being kept.
        TermsError: the platform's terms have not been read.
        TunnelError, SecretError: the tunnel cannot be opened.
        OSError: the port cannot be listened on.
    """
    require_terms(accept_terms)
    if (swarm := _open_in(state_dir)) is not None and swarm.run == name and swarm.is_owner:
        return swarm
    with _taken(state_dir) as keeping:
        kept = None if keeping is None else keeping.found
        if kept is not None and (kept.invitation or (kept.run, kept.access) != (name, access)):
            raise _keeps_another(state_dir, kept)
        options = _with_key(options, keeping)
        identity = _identity(options)
        entrance = RunAccess.found(name, identity, access=access, allow=allow, key_file=options.identity)
        if (swarm := _open_as(identity, entrance.run_id, state_dir)) is not None:
            return swarm
        return _open(entrance, identity, peer_name, options, keeping)


@overload
def join(
    invite: str | LanSwarm,
    *,
    peer_name: str = ...,
    options: NetworkOptions = ...,
    state_dir: str | Path | None = ...,
    accept_terms: bool = ...,
) -> Swarm: ...
@overload
def join() -> LanSwarms: ...
def join(
    invite: str | LanSwarm | None = None,
    *,
    peer_name: str = "",
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
    accept_terms: bool = False,
) -> Swarm | LanSwarms:
    """Join the run of an invitation. Joining again under the same name gives the same swarm (re-run cells freely).

    Without an invitation it lists the runs in the local network; those that are open can be joined: ``join(found[0])``.

    With ``state_dir`` (a folder, see `create`) this peer is the same one each time and continues where it was, also
    in a later session and after the invitation expired.

    Raises:
        InviteError: the invitation is mistyped, expired or of another version.
        JoinError: none of the peers it names could be reached, or this peer is not let in.
        ValueError: the folder keeps a peer of another run.
        StateError: the folder is in use, damaged, or cannot be written, or its peer is open without being kept.
        TermsError: the platform's terms have not been read.
        TunnelError, SecretError: the tunnel cannot be opened, or a token is missing.
    """
    if invite is None:
        return LanSwarms(Runtime.shared().call(find_swarms()))
    if (swarm := _open_in(state_dir)) is not None and swarm.run_id == _invitation(
        invite, came_before=True
    ).run_id:
        return swarm
    with _taken(state_dir) as keeping:
        kept = None if keeping is None else keeping.found
        invitation = _invitation(invite, came_before=kept is not None)
        if kept is not None and (not kept.invitation or kept.run_id != invitation.run_id):
            raise _keeps_another(state_dir, kept)
        for swarm in _open_swarms if keeping is None else ():
            if (
                swarm.run_id == invitation.run_id
                and (peer_name or swarm.name) == swarm.name
                and not swarm.left
            ):
                return swarm
        if invitation.role > Role.VIEWER:
            require_terms(accept_terms)
        options = _with_key(options, keeping)
        identity = _identity(options)
        if state_dir is not None:
            _open_as(identity, invitation.run_id, state_dir)
        token = find_secret("HF_TOKEN") if invitation.access == "allowlist" else None
        membership = b"" if kept is None else kept.membership
        entrance = RunAccess.by(invitation, identity, token=str(token or ""), membership=membership)
        return _open(entrance, identity, peer_name, options, keeping)


def resume(folder: str | Path, *, accept_terms: bool = False) -> Swarm:
    """Come back as the peer saved in a folder by ``create`` or ``join`` with ``state_dir=folder``.

    It has the same id, and so the same line in the leaderboard. Then make the model and call `Swarm.optimizer` as
    before: it goes on from what was kept, or from the swarm's newer state. While the peer is here already, it is the
    same swarm (re-run cells freely).

    Raises:
        StateError: the folder keeps no peer, is in use by another process, or damaged.
        JoinError: nobody of the run could be reached where it was: ask for an invitation, and
            ``cs.join(invitation, state_dir=folder)``.
        TermsError, TunnelError, SecretError: see `join`.
    """
    if (swarm := _open_in(folder)) is not None:
        return swarm
    kept = read_kept(folder_of(folder))
    if kept is None:
        raise StateError(f"{folder} keeps no peer: cs.join(invitation, state_dir={str(folder)!r}) begins to")
    if kept.invitation:
        return join(
            kept.invitation,
            options=kept.peer_options,
            state_dir=folder,
            accept_terms=accept_terms,
        )
    return create(
        kept.run,
        access=kept.access,
        allow=kept.allow,
        options=kept.peer_options,
        state_dir=folder,
        accept_terms=accept_terms,
    )


def _invitation(invite: str | LanSwarm, *, came_before: bool) -> Invite:
    """What was given; who came by it before may come again when it has expired."""
    if isinstance(invite, str):
        return Invite.parse(invite, now=0.0 if came_before else None)
    if invite.access != "open":
        raise JoinError(
            f"{invite.run} takes peers with an invitation only: ask {', '.join(invite.names)} for one"
        )
    return Invite(invite.run_id, invite.contacts, ENDLESS)


def _open_in(folder: str | Path | None) -> Swarm | None:
    """The swarm of this process that is kept there; one that is just leaving is waited for."""
    for swarm in (
        () if folder is None else [one for one in _open_swarms if one.session.folder == folder_of(folder)]
    ):
        if not swarm.left:
            return swarm
        swarm.leave()  # returns when the thread that leaves has done so
    return None


def _open_as(identity: Identity, run_id: str, state_dir: str | Path | None) -> Swarm | None:
    """The swarm of this process that has this key in this run.

    Raises:
        StateError: there is one, and it is to be kept: it is not, or it is kept elsewhere.
    """
    for swarm in _open_swarms:
        if (swarm.run_id, swarm.id) == (run_id, identity.id) and not swarm.left:
            if state_dir is not None:
                raise StateError(
                    f"the peer of {state_dir} is open already and is not kept there: leave it first ({swarm!r}), then "
                    "run this again"
                )
            return swarm
    return None


@contextlib.contextmanager
def _taken(state_dir: str | Path | None) -> Iterator[PeerStore | None]:
    """Have the folder; leave it again if what is done with it fails."""
    if state_dir is None:
        yield None
        return
    keeping = PeerStore.open(folder_of(state_dir))
    try:
        yield keeping
    except BaseException:
        keeping.close()
        raise


def _keeps_another(folder: object, kept: SavedPeer) -> ValueError:
    how = "joined" if kept.invitation else "began"
    return ValueError(
        f"{folder} keeps {kept.name}, which {how} {kept.run} (access={kept.access!r}): cs.resume({str(folder)!r}) "
        "brings that peer back; for another run take another folder"
    )


def _with_key(options: NetworkOptions, keeping: PeerStore | None) -> NetworkOptions:
    """The key in the folder is the peer's."""
    if keeping is None:
        return options
    if options.identity is not None:
        raise ValueError("a folder to state_dir= has a key of its own: leave identity= out of the options")
    return replace(options, identity=keeping.key_file)


def _identity(options: NetworkOptions) -> Identity:
    return Identity() if options.identity is None else Identity.load_or_create(options.identity)


def _open(
    entrance: RunAccess,
    identity: Identity,
    peer_name: str,
    options: NetworkOptions,
    keeping: PeerStore | None,
) -> Swarm:
    runtime, here, kept = Runtime.shared(), platform(), None if keeping is None else keeping.found
    clock = SessionClock.of(here, options.session_hours, age_s=session_age_s(), now=runtime.time())
    name = peer_name or (kept.name if kept is not None else f"peer-{short(identity.id)}")
    if keeping is not None:
        keeping.begin(SavedPeer.new(entrance, name, options))
        if warning := lasts(keeping.folder, here):
            print(warning)
    if kept is not None:
        entrance = replace(entrance, known=kept.contacts, given=kept.given)
    services, presence = runtime.call(_start(entrance, identity, name, _with_tunnel(options), keeping))
    _open_swarms.difference_update({swarm for swarm in _open_swarms if swarm.left})
    swarm = Swarm(runtime, services, run_id=entrance.run_id, name=name, network=presence)
    swarm.session.begin(clock)
    _open_swarms.add(swarm)
    return swarm


def _with_tunnel(options: NetworkOptions) -> NetworkOptions:
    """The options with the tunnel's token, which is asked for on the user's thread."""
    if isinstance(options.tunnel, str):
        return replace(options, tunnel=settings_of(options.tunnel))
    return options


async def _start(
    entrance: RunAccess,
    identity: Identity,
    name: str,
    options: NetworkOptions,
    keeping: PeerStore | None = None,
) -> tuple[PeerServices, NetworkSession]:
    events = EventLog()
    settings, last = options.node_settings(entrance.run_id), keeping.found if keeping is not None else None
    node = None
    if last is not None and options.listen and not options.port:
        with contextlib.suppress(
            OSError
        ):  # somebody else has its port now; invitations of before are dead then
            again = replace(settings, port=last.port)
            node = await Node.start(identity, again, events, admission=entrance.admission)
    if node is None:
        node = await Node.start(identity, settings, events, admission=entrance.admission)
    if keeping is not None:
        keeping.on_port(node.port or 0)
    try:
        services = assemble(node, events, random.Random(identity.id))
        presence = await NetworkSession.open(node, entrance, options, services, keeping)
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
