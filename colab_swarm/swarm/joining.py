"""The ways to get a `Swarm`: create a run, join one, or resume an earlier session."""

import atexit
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from colab_swarm.credentials import find_secret
from colab_swarm.errors import JoinError, StateError, require
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.mailbox.address import confirmed_address
from colab_swarm.mailbox.bucket import prepare, require_rights
from colab_swarm.net.identity import Identity
from colab_swarm.net.lan import LanSwarm, find_swarms
from colab_swarm.net.node import Node, NodeSettings
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.net.tunnels import settings_of
from colab_swarm.notebook import platforms
from colab_swarm.notebook.invitation import LanSwarms
from colab_swarm.runtime import Runtime
from colab_swarm.swarm import saved as saving
from colab_swarm.swarm.network import DEFAULT_OPTIONS, NetworkOptions, NetworkSession, assemble
from colab_swarm.swarm.saved import PeerStore, SavedPeer, folder_of
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import Allowlist

_open_swarms: set[Swarm] = set()


def create(
    name: str,
    *,
    access: Access = "invite",
    allow: Allowlist | None = None,
    mailbox: str = "",
    peer_name: str = "",
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
    accept_terms: bool = False,
) -> Swarm:
    """Create a run, with this peer as its authority. `Swarm.invite` returns a line to join it by.

    Creating it again while it is open returns the same swarm, so you can re-run cells. Another ``peer_name`` or
    another key file makes another run. So does creating it again after `Swarm.leave`, and the others need a new
    invitation; with ``state_dir`` the same run continues, by this call or by `resume`.

    Args:
        name: of the run, for people.
        access: who may join: everyone who knows an address (``open``), everyone with an invitation
            (``invite``), or those of them whose account is on a list (``allowlist``).
        allow: the list, for ``allowlist``.
        mailbox: address of a bucket or a shared folder that carries the rounds: ``s3://bucket/folder``, ``gs://…``,
            ``az://…`` or ``file:///mnt/folder``. Then nobody needs to be online with another: see
            `colab_swarm.mailbox`. Members have its keys as secrets or in the environment.
        peer_name: the name that others see.
        options: how this peer takes part in the network.
        state_dir: a folder to save this peer and its run for `resume`; secret but for checkpoints.
        accept_terms: confirm that the platform's terms allow this; required on Colab.

    Raises:
        ValueError: the name or the list is not usable, the folder saves a peer of another run, or the run is
            open with other options or another list.
        StateError: the folder is in use, damaged or read-only, or its peer or run is open unsaved.
        TermsError: the platform's terms were not accepted.
        TunnelError, SecretError, PortError: the tunnel, its token, or the port cannot be used.
        BucketError: the mailbox is a folder that cannot be made.
    """
    platforms.require_terms(accept_terms)
    if (swarm := _open_in(state_dir)) is not None and swarm.run == name and swarm.is_owner:
        return swarm
    with _reserved(state_dir) as (store, saved):
        if saved is not None:
            if (saved.invitation, saved.run, saved.access, saved.mailbox) != ("", name, access, mailbox):
                raise _saves_another(state_dir, saved)
        elif not options.identity and (opened := find_open(run=name, name=peer_name)) is not None:
            return _same(opened, store, options, access=access, allow=allow, mailbox=mailbox)
        if mailbox:
            prepare(mailbox)
        options, identity = _with_key(options, store)
        asked: dict[str, Any] = {"access": access, "allow": allow, "mailbox": mailbox}
        way = RunAccess.found(name, identity, key_file=options.identity, **asked)
        if store is None and (swarm := find_open(way.run_id, id=identity.id)) is not None:
            return swarm
        return _open(way, identity, peer_name, options, store)


@overload
def join(
    invite: str | LanSwarm,
    *,
    mailbox: str = ...,
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
    mailbox: str = "",
    peer_name: str = "",
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
    accept_terms: bool = False,
) -> Swarm | LanSwarms:
    """Join the run of an invitation. A second call under the same name returns the same swarm.

    Without an invitation it lists the runs in the local network: ``join(found[0])`` if it is open.
    With ``state_dir`` (see `create`) this peer stays the same, also after the invitation expired.

    Args:
        invite: the line that `Swarm.invite` returned to another member.
        mailbox: confirms where the rounds are. Needed if the invitation names a folder, or a store that is not
            on the public internet; a folder may have another path on this machine.
        peer_name, options, state_dir, accept_terms: see `create`.

    Raises:
        InviteError: the invitation is mistyped, expired or of another version.
        JoinError: none of the peers it names could be reached, or this peer is not admitted.
        ValueError, StateError, TermsError, TunnelError, SecretError: see `create`.
    """
    if invite is None:
        return LanSwarms(Runtime.shared().call(find_swarms()))
    swarm = _open_in(state_dir)
    if swarm is not None and swarm.run_id == _invitation(invite, returning=True).run_id:
        return swarm
    with _reserved(state_dir) as (store, saved):
        invitation = _invitation(invite, returning=saved is not None)
        if saved is not None and (not saved.invitation or saved.run_id != invitation.run_id):
            raise _saves_another(state_dir, saved)
        if store is None and (swarm := find_open(invitation.run_id, name=peer_name)) is not None:
            return swarm
        if invitation.mailbox:
            mailbox = confirmed_address(invitation.mailbox, mailbox)
            require_rights(mailbox)
        else:
            require(
                not mailbox, f"mailbox={mailbox!r}: the rounds of this run are in no mailbox; leave it out"
            )
        platforms.require_terms(accept_terms or invitation.role <= Role.VIEWER)
        options, identity = _with_key(options, store)
        token = find_secret("HF_TOKEN") if invitation.access == "allowlist" else None
        membership = b"" if saved is None else saved.membership
        access = RunAccess.by(
            invitation, identity, token=str(token or ""), membership=membership, mailbox=mailbox
        )
        return _open(access, identity, peer_name, options, store)


def resume(folder: str | Path, *, accept_terms: bool = False) -> Swarm:
    """Come back as the peer saved in a folder by ``create`` or ``join``; you can re-run cells.

    It has the same id. Then make the model and call `Swarm.optimizer` as before: training continues
    from the saved checkpoint or the swarm's newer state. A StateError if the folder is unusable, a
    JoinError if no saved peer answers: join with ``state_dir=folder``. Else see `join`.
    """
    if (swarm := _open_in(folder)) is not None:
        return swarm
    if (saved := saving.read_saved(folder_of(folder))) is None:
        raise StateError(f"{folder} saves no peer: start with cs.join(invitation, state_dir={str(folder)!r})")
    try:
        options = NetworkOptions.from_saved(saved.options)
    except (TypeError, ValueError) as error:
        raise saving.damaged(folder_of(folder)) from error
    how: Any = {"options": options, "state_dir": folder, "accept_terms": accept_terms}
    if saved.invitation:
        return join(saved.invitation, mailbox=saved.mailbox, **how)
    return create(saved.run, access=saved.access, allow=saved.allow, mailbox=saved.mailbox, **how)


def _invitation(invite: str | LanSwarm, *, returning: bool) -> Invite:
    if isinstance(invite, str):  # a returning peer may use one that has expired
        return Invite.parse(invite, now=0.0 if returning else None)
    require(
        invite.access == "open",
        f"{invite.run} takes peers with an invitation only: ask {', '.join(invite.names)} for one",
        JoinError,
    )
    return Invite(invite.run_id, invite.contacts, 1e11)  # the last possible time


def _open_in(folder: str | Path | None) -> Swarm | None:
    """Return the swarm of this process that the folder saves; wait for one that is just leaving."""
    if folder is None:
        return None
    for swarm in list(_open_swarms):
        store = None if swarm.network is None else swarm.network.store
        if store is None or store.folder != folder_of(folder):
            continue
        if not swarm.left:
            return swarm
        swarm.leave()  # returns when the thread that leaves has done so
    return None


def find_open(run_id: str = "", *, run: str = "", id: PeerId | None = None, name: str = "") -> Swarm | None:
    """Return this process's swarm of a run, by the run's id, or by the name ``run`` of one that it created."""
    here = (
        swarm
        for swarm in _open_swarms
        if not swarm.left and (swarm.run_id == run_id or (swarm.run == run and swarm.is_owner))
    )
    return next((one for one in here if id in (None, one.id) and name in ("", one.name)), None)


def _same(swarm: Swarm, store: PeerStore | None, options: NetworkOptions, **asked: object) -> Swarm:
    """Return the open swarm; raise unless it is what `create` is asked for."""
    assert swarm.network is not None
    if store is not None:
        raise _open_unsaved(store, swarm)
    own = swarm.network.access
    has = {"access": own.access, "allow": own.allow, "mailbox": own.mailbox}
    has |= swarm.network.options.to_saved()
    asked |= options.to_saved()
    other = ", ".join(f"{name}={has[name]!r}" for name in asked if has[name] != asked[name])
    require(
        not other,
        f"{swarm!r} is open already, with {other}: pass that again, or leave it first: swarm.leave(). "
        "Unless a state_dir saves it, invited peers then need a new invitation. Another peer_name= makes another run",
    )
    return swarm


def _open_unsaved(store: PeerStore, swarm: Swarm) -> StateError:
    return StateError(
        f"the peer of {store.folder} is open already and is not saved there: leave it first ({swarm!r}), "
        "then run this again"
    )


@contextlib.contextmanager
def _reserved(state_dir: str | Path | None) -> Iterator[tuple[PeerStore | None, SavedPeer | None]]:
    if state_dir is None:
        yield None, None
        return
    store = PeerStore(folder_of(state_dir))
    try:
        yield store, store.saved
    except BaseException:
        store.close()
        raise


def _saves_another(folder: object, saved: SavedPeer) -> ValueError:
    how = "joined" if saved.invitation else "created"
    return ValueError(
        f"{folder} saves {saved.name}, which {how} {saved.run} (access={saved.access!r}): cs.resume({str(folder)!r}) "
        "brings that peer back; for another run use another folder"
    )


def _with_key(options: NetworkOptions, store: PeerStore | None) -> tuple[NetworkOptions, Identity]:
    require(
        store is None or options.identity is None,
        "a folder given as state_dir= has its own key: leave identity= out of the options",
    )
    options = options if store is None else replace(options, identity=store.key_file)
    return options, Identity() if options.identity is None else Identity.load_or_create(options.identity)


def _open(
    access: RunAccess, identity: Identity, peer_name: str, options: NetworkOptions, store: PeerStore | None
) -> Swarm:
    runtime, here, saved = Runtime.shared(), platforms.platform(), None if store is None else store.saved
    if access.mailbox:
        options = options.without_links()
    clock = platforms.SessionClock.of(
        here, options.session_hours, age_s=platforms.session_age_s(), now=runtime.time()
    )
    name = peer_name or (saved.name if saved is not None else f"peer-{short(identity.id)}")
    if store is not None:
        _save(store, access, identity, name, options)
        if warning := saving.loss_warning(store.folder, here):
            print(warning)
    if saved is not None:
        access = replace(access, known=saved.contacts, tally=saved.tally)
    if isinstance(options.tunnel, str):  # its token may have to be typed: on the user's thread
        options = replace(options, tunnel=settings_of(options.tunnel))
    services, network = runtime.call(_start(access, identity, name, options, store))
    _open_swarms.difference_update({swarm for swarm in _open_swarms if swarm.left})
    swarm = Swarm(runtime, services, access.run_id, name, network)
    if clock is not None:
        runtime.call(network.leave_in_time(clock, swarm.optimizers, swarm.leave))
    _open_swarms.add(swarm)
    return swarm


def _save(store: PeerStore, access: RunAccess, key: Identity, name: str, options: NetworkOptions) -> None:
    if (swarm := find_open(access.run_id, id=key.id)) is not None:
        raise _open_unsaved(store, swarm)
    invitation = "" if access.invitation is None else str(access.invitation)
    run = (access.run_id, access.access, name, invitation, access.allow)
    store.begin(SavedPeer(saving.VERSION, *run, options.to_saved(), mailbox=access.mailbox))


async def _start(
    access: RunAccess,
    identity: Identity,
    name: str,
    options: NetworkOptions,
    store: PeerStore | None = None,
) -> tuple[PeerServices, NetworkSession]:
    events, saved = EventLog(), None if store is None else store.saved
    former = saved.port if saved is not None and options.listen else 0
    try:
        node = await _start_node(access, identity, options, options.port or former, events)
    except OSError:  # another program uses the port now; old invitations stop working
        if not former:
            raise
        node = await _start_node(access, identity, options, options.port, events)
    try:
        services = assemble(node, access.run_id, events, random.SystemRandom(), mailbox=access.mailbox)
        network = NetworkSession(node, access, options, services)
        await network.open(store)
    except BaseException:  # an interrupt included: nothing may stay open
        await node.close()
        raise
    if not (platforms.in_colab() or platforms.in_kaggle()):  # no other machine is in their networks
        node.linker.spawn(network.announce_in_lan(name))
    return services, network


async def _start_node(
    access: RunAccess, identity: Identity, options: NetworkOptions, port: int, events: EventLog
) -> Node:
    bounds = (options.upload_mbit_s, options.download_mbit_s)
    upload_bps, download_bps = (None if bound is None else bound * 1e6 for bound in bounds)
    announce = tuple(options.announce) or None
    settings = NodeSettings(
        access.run_id,
        port=port,
        listen=options.listen,
        announce=announce,
        iroh=options.iroh,
        upload_bps=upload_bps,
        download_bps=download_bps,
    )
    return await Node.start(identity, settings, events, admission=access.admission)


@atexit.register
def _leave_all() -> None:
    for swarm in list(_open_swarms):
        with contextlib.suppress(Exception):
            swarm.leave()
