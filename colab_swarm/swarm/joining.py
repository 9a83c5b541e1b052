"""The ways to get a `Swarm`: create a run, join one, or come back to an earlier session."""

import atexit
import contextlib
import dataclasses
import inspect
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, overload

from colab_swarm.credentials import require_secret
from colab_swarm.errors import JoinError, StateError, TokenNotSent, require
from colab_swarm.events import EventLog, Notice
from colab_swarm.invite import Access, Invite
from colab_swarm.mailbox.address import checked_address, confirmed_address
from colab_swarm.mailbox.bucket import Bucket, require_rights
from colab_swarm.mailbox.spectator import last_members
from colab_swarm.net.carrier import NodeSettings
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.lan import LanSwarm, find_swarms
from colab_swarm.net.node import Node
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.net.tunnels import settings_of
from colab_swarm.notebook import platforms
from colab_swarm.notebook.invitation import LanSwarms
from colab_swarm.notebook.platforms import Consent
from colab_swarm.runtime import Runtime, loop_now
from colab_swarm.snapshot import PeerRow, PeerTable
from colab_swarm.swarm import saved as saving
from colab_swarm.swarm.network import DEFAULT_OPTIONS, NetworkOptions, NetworkSession, assemble
from colab_swarm.swarm.saved import PeerStore, SavedPeer, folder_of
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess, clock_advice
from colab_swarm.trust.authority import Allowlist

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_LAST_TIME = 1e11  # expiration of an invitation that does not expire, seconds since the epoch
_open_swarms: set[Swarm] = set()


def answers_options(call: Callable[P, T]) -> Callable[P, T]:
    """Let an option that ``call`` does not have raise a TypeError that says what to pass instead."""
    known = [*inspect.signature(call).parameters]
    of_network = {option.name for option in dataclasses.fields(NetworkOptions)}

    @wraps(call)
    def checked(*arguments: P.args, **options: P.kwargs) -> T:
        for option in options.keys() - {*known}:
            similar = get_close_matches(option, known, n=1)
            advice = f"it has {', '.join(similar or known)}"
            if option == "name":
                advice = "write peer_name= for this peer's name, run= for the run's"
            elif option in of_network:
                advice = f"pass options=cs.NetworkOptions({option}={options[option]!r:.60})"
            raise TypeError(f"cs.{call.__name__}({option}=…): {advice}")
        network = options.get("options", DEFAULT_OPTIONS)
        text = f"options={network!r:.60}: pass cs.NetworkOptions(…), such as cs.NetworkOptions(port=4500)"
        require(isinstance(network, NetworkOptions), text, TypeError)
        return call(*arguments, **options)

    return checked


@answers_options
def create(
    run: str,
    *,
    access: Literal["open", "invite"] = "invite",
    allow: Allowlist | None = None,
    mailbox: str = "",
    peer_name: str = "",
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
    accept_terms: Consent = False,
) -> Swarm:
    """Create a run, with this peer as its authority. `Swarm.invite` returns the invitation, a line for the others.

    A second call with the same names while the run is open returns the same swarm, so you can run a cell again. Another
    ``peer_name`` or another key file makes another run. A call after `Swarm.leave` also makes another run, for which
    the others need a new invitation. With ``state_dir`` the same run continues instead, by this call or by
    ``join(state_dir=…)``.

    Args:
        run, peer_name: names of the run and of this peer, for people.
        access: who may join: everyone with an invitation (``invite``), or everyone who knows an address (``open``).
        allow: a list of Hugging Face accounts. Then a peer needs an invitation and one of these accounts.
        mailbox: a bucket or shared folder through which the rounds go: ``s3://bucket/folder``, ``gs://…``,
            ``az://…`` or ``file:///mnt/folder``. Then two peers never need to be online together: see
            `colab_swarm.mailbox`. Each peer needs the bucket's keys as secrets or in its environment.
        options: how this peer takes part in the network.
        state_dir: a folder that saves this peer and its run for a later session. All files in it are secret, except
            the checkpoints.
        accept_terms: confirm that the platform's terms allow this; required on Colab. "tunnels" also confirms that
            you use paid compute units there, and that the terms allow tunnels and relays. On Colab, Kaggle and Binder
            the options ``tunnel`` and ``iroh`` need "tunnels".

    Raises:
        ValueError: the name or the list is not usable, the folder saves a peer of another run, or the run is
            open with other options or another list.
        StateError: the folder is in use, damaged or read-only, or its peer or run is open but not saved there.
        TermsError: the platform's terms were not accepted, or the terms for a tunnel or relay were not accepted.
        TunnelError, SecretError, PortError: the tunnel, its token, or the port cannot be used.
        BucketError: the mailbox is a folder that cannot be made, or a bucket that refuses this peer or is away.
        JoinError: the mailbox lacks the run that ``state_dir`` saves.
    """
    text = "access='open' lets everyone in: leave it out to admit only those of allow="
    require(allow is None or access == "invite", text)
    chosen: Access = access if allow is None else "allowlist"
    platforms.require_terms(accept_terms)
    platforms.require_tunnels(accept_terms, options.service)
    swarm = _open_in(state_dir)
    if swarm is not None and swarm.run == run and swarm.is_owner:
        return swarm
    with _reserved(state_dir) as (store, saved):
        if saved is not None:
            _check_saves_creator(saved, state_dir, run, chosen, mailbox)
        elif not options.identity:
            swarm = _open_same(run, peer_name, store, options, access=chosen, allow=allow, mailbox=mailbox)
            if swarm is not None:
                return swarm
        if mailbox and saved is None:
            checked_address(mailbox)
        options, identity = _with_identity(options, store)
        run_access = RunAccess.create(
            run, identity, access=chosen, allow=allow, mailbox=mailbox, key_file=options.identity
        )
        # the same key file means the same peer of the same run
        if store is None:
            swarm = find_open(run_access.run_id, id=identity.id)
            if swarm is not None:
                return swarm
        return _open(run_access, identity, peer_name, options, store)


@overload
def join(
    invitation: str | LanSwarm,
    *,
    mailbox: str = ...,
    peer_name: str = ...,
    options: NetworkOptions = ...,
    state_dir: str | Path | None = ...,
    accept_terms: Consent = ...,
    send_hf_token: bool = ...,
) -> Swarm: ...
@overload
def join(
    *,
    state_dir: str | Path,
    accept_terms: Consent = ...,
    send_hf_token: bool = ...,
) -> Swarm: ...
@overload
def join() -> LanSwarms: ...
@answers_options
def join(
    invitation: str | LanSwarm | None = None,
    *,
    mailbox: str = "",
    peer_name: str = "",
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
    accept_terms: Consent = False,
    send_hf_token: bool = False,
) -> Swarm | LanSwarms:
    """Join the run of an invitation. A second call with the same name returns the same swarm.

    With ``state_dir`` (see `create`) this peer keeps its identity for later sessions, even after the invitation has
    expired. ``join(state_dir=…)`` without an invitation brings back the peer that the folder saves, also if that peer
    created its run. Then make the model and call `Swarm.optimizer` as before. Training continues from the saved
    checkpoint, or from the swarm's state if that is newer.

    Without any argument, the call returns a list of the runs in the local network. If the first is an open run,
    ``join(found[0])`` joins it.

    Args:
        invitation: the line that `Swarm.invite` returned to another member.
        mailbox: the address of the bucket or folder with the rounds, which you confirm by it. It is needed if the
            invitation names a folder, or an ``endpoint`` other than your ``AWS_ENDPOINT_URL``. The folder may have
            another path on this machine.
        peer_name, options, state_dir, accept_terms: see `create`.
        send_hf_token: send your Hugging Face token, the secret or environment variable ``HF_TOKEN``, to the organizer
            of the run. Only a run with an allowlist needs it, now and at each renewal of the membership. Use a token
            that may only read.

    Raises:
        InviteError: the invitation is mistyped, expired or of another version.
        TokenNotSent: the run needs your token, and ``send_hf_token`` is not set.
        JoinError: no peer of the invitation could be reached or admits this one, or the mailbox lacks the run.
        StateError: the folder saves no peer, and there is no invitation. For other causes see `create`.
        ValueError, BucketError, TermsError, TunnelError, SecretError: see `create`.
    """
    if invitation is None:
        if state_dir is None:
            return LanSwarms(Runtime.shared().call(find_swarms()))
        return _come_back(state_dir, accept_terms=accept_terms, send_hf_token=send_hf_token)
    swarm = _open_in(state_dir)
    if swarm is not None and swarm.run_id == _parsed(invitation, returning=True).run_id:
        return swarm
    with _reserved(state_dir) as (store, saved):
        invite = _parsed(invitation, returning=saved is not None)
        if saved is not None and (not saved.invitation or saved.run_id != invite.run_id):
            raise _saves_another(state_dir, saved)
        if store is None:
            swarm = find_open(invite.run_id, name=peer_name)
            if swarm is not None:
                return swarm
        mailbox = _mailbox_of(invite, mailbox)
        # viewers compute nothing
        platforms.require_terms(accept_terms or invite.role <= Role.VIEWER)
        platforms.require_tunnels(accept_terms, options.service)
        options, identity = _with_identity(options, store)
        token = _token_for(invite, consent=send_hf_token)
        membership = b"" if saved is None else saved.membership
        run_access = RunAccess.from_invitation(
            invite, identity, token=token, membership=membership, mailbox=mailbox
        )
        return _open(run_access, identity, peer_name, options, store)


def _come_back(folder: str | Path, *, accept_terms: Consent, send_hf_token: bool) -> Swarm:
    """Return the peer that a folder saves."""
    swarm = _open_in(folder)
    if swarm is not None:
        return swarm
    saved = saving.read_saved(folder_of(folder))
    if saved is None:
        raise StateError(f"{folder} saves no peer: start with cs.join(invitation, state_dir={str(folder)!r})")
    try:
        options = NetworkOptions.from_saved(saved.options)
    except (TypeError, ValueError) as error:
        raise saving.damaged(folder_of(folder)) from error
    if saved.invitation:
        return join(
            saved.invitation,
            mailbox=saved.mailbox,
            options=options,
            state_dir=folder,
            accept_terms=accept_terms,
            send_hf_token=send_hf_token,
        )
    return create(
        saved.run,
        access="open" if saved.access == "open" else "invite",
        allow=saved.allow,
        mailbox=saved.mailbox,
        options=options,
        state_dir=folder,
        accept_terms=accept_terms,
    )


def _parsed(invite: str | LanSwarm, *, returning: bool) -> Invite:
    """Return the invitation to a run; a returning peer may use one that has expired."""
    if isinstance(invite, str):
        return Invite.parse(invite, now=0.0 if returning else None)
    require(
        invite.access == "open",
        f"{invite.run} takes peers with an invitation only: ask {', '.join(invite.names)} for one",
        JoinError,
    )
    return Invite(invite.run_id, invite.contacts, _LAST_TIME)


def _token_for(invitation: Invite, *, consent: bool) -> str:
    """Return the user's Hugging Face token for a run with an allowlist; raise TokenNotSent unless the user agreed."""
    if invitation.access != "allowlist":
        return ""
    organizer = f"the organizer of {invitation.name}, peer {short(id_of(invitation.authority))}"
    require(
        consent,
        f"{invitation.name} admits listed accounts of Hugging Face only. To look you up, {organizer}, would get your "
        "whole token (HF_TOKEN), which was not sent. If you trust the organizer, use a token that may only read and "
        "add send_hf_token=True; in a shell, --send-hf-token",
        TokenNotSent,
    )
    help = f"It goes to {organizer}: make one that may only read at https://huggingface.co/settings/tokens"
    return str(require_secret("HF_TOKEN", help=help))


def _open_in(folder: str | Path | None) -> Swarm | None:
    """Return the open swarm of this process that the folder saves, or None; wait until a leaving one has left."""
    if folder is None:
        return None
    for swarm in list(_open_swarms):
        store = None if swarm.network is None else swarm.network.store
        if store is None or store.folder != folder_of(folder):
            continue
        if not swarm.left:
            return swarm
        # returns when the other thread has finished leaving
        swarm.leave()
    return None


def find_open(run_id: str = "", *, run: str = "", id: PeerId | None = None, name: str = "") -> Swarm | None:
    """Return this process's open swarm by the id of its run, or by the name ``run`` of a run that it created."""
    for swarm in _open_swarms:
        is_run = swarm.run_id == run_id or (swarm.run == run and swarm.is_owner)
        is_peer = id in (None, swarm.id) and name in ("", swarm.name)
        if is_run and is_peer and not swarm.left:
            return swarm
    return None


def _open_same(
    run: str,
    peer_name: str,
    store: PeerStore | None,
    options: NetworkOptions,
    *,
    access: Access,
    allow: Allowlist | None,
    mailbox: str,
) -> Swarm | None:
    """Return the open swarm that `create` made with these names, or None; raise if its arguments were different."""
    swarm = find_open(run=run, name=peer_name)
    if swarm is None:
        return None
    assert swarm.network is not None
    if store is not None:
        raise _open_unsaved(store, swarm)
    own = swarm.network.access
    saved = swarm.network.options.to_saved()
    present = {"access": own.access, "allow": own.allow, "mailbox": own.mailbox, **saved}
    wanted = {"access": access, "allow": allow, "mailbox": mailbox, **options.to_saved()}
    differences = [f"{name}={present[name]!r}" for name in wanted if present[name] != wanted[name]]
    require(
        not differences,
        f"{swarm!r} is open already, with {', '.join(differences)}: pass that again, or leave it first: "
        "swarm.leave(). Unless a state_dir saves it, invited peers then need a new invitation. "
        "Another peer_name= makes another run",
    )
    return swarm


def _open_unsaved(store: PeerStore, swarm: Swarm) -> StateError:
    return StateError(
        f"the peer of {store.folder} is open already and is not saved there: leave it first ({swarm!r}), "
        "then run this again"
    )


@contextlib.contextmanager
def _reserved(state_dir: str | Path | None) -> Iterator[tuple[PeerStore | None, SavedPeer | None]]:
    """Reserve the folder and read the peer in it; release the folder if the block raises."""
    if state_dir is None:
        yield None, None
        return
    store = PeerStore(folder_of(state_dir))
    try:
        yield store, store.saved
    except BaseException:
        store.close()
        raise


def _check_saves_creator(saved: SavedPeer, folder: object, run: str, access: Access, mailbox: str) -> None:
    """Raise ValueError unless the folder saves the peer that created this run."""
    joined_another = saved.invitation or saved.run != run
    if joined_another or saved.access != access or saved.mailbox != mailbox:
        raise _saves_another(folder, saved)


def _saves_another(folder: object, saved: SavedPeer) -> ValueError:
    verb = "joined" if saved.invitation else "created"
    return ValueError(
        f"{folder} saves {saved.name}, which {verb} {saved.run} (access={saved.access!r}): "
        f"cs.join(state_dir={str(folder)!r}) brings that peer back; for another run use another folder"
    )


def _mailbox_of(invitation: Invite, mailbox: str) -> str:
    """Return the confirmed address of the mailbox with the run's rounds; empty if the rounds go over links."""
    if not invitation.mailbox:
        problem = f"mailbox={mailbox!r}: the rounds of this run are in no mailbox; leave it out"
        require(not mailbox, problem)
        return ""
    mailbox = confirmed_address(invitation.mailbox, mailbox)
    require_rights(mailbox)
    return mailbox


def peers_in_bucket(invitation: Invite, mailbox: str = "", *, name: str = "model") -> PeerTable:
    """Return the peers that train the model ``name`` in a run whose rounds are in a bucket. Writes nothing there.

    Raises `JoinError` if the bucket lacks the run or the run has had no round yet. Raises ValueError and `BucketError`
    as `join` does.
    """
    access = RunAccess.from_invitation(invitation, Identity(), mailbox=_mailbox_of(invitation, mailbox))
    prefix = f"{access.run_id}/{name}"

    async def look() -> list[PeerRow]:
        await Bucket(access.mailbox, access.run_id).enter(begins=False, writes=False)
        return await last_members(Bucket(access.mailbox, prefix), prefix, access.admission)

    return PeerTable(Runtime.shared().call(look()))


def _with_identity(options: NetworkOptions, store: PeerStore | None) -> tuple[NetworkOptions, Identity]:
    if store is not None:
        problem = "a folder given as state_dir= has its own key: leave identity= out of the options"
        require(options.identity is None, problem)
        options = replace(options, identity=store.key_file)
    if options.identity is None:
        return options, Identity()
    return options, Identity.load_or_create(options.identity)


def _open(
    access: RunAccess, identity: Identity, peer_name: str, options: NetworkOptions, store: PeerStore | None
) -> Swarm:
    runtime = Runtime.shared()
    here = platforms.platform()
    saved = None if store is None else store.saved
    behind_s = 0.0
    if access.mailbox:
        options = options.without_links()
        begins = saved is None and access.invitation is None
        writes = access.invitation is None or access.invitation.role >= Role.WORKER
        behind_s = runtime.call(Bucket(access.mailbox, access.run_id).enter(begins=begins, writes=writes))
    clock = platforms.SessionClock.of(
        here, options.session_hours, age_s=platforms.session_age_s(), now=runtime.time()
    )
    name = f"peer-{short(identity.id)}"
    if peer_name:
        name = peer_name
    elif saved is not None:
        name = saved.name
    if store is not None:
        _save(store, access, identity, name, options)
        warning = saving.loss_warning(store.folder, here)
        if warning:
            print(warning)
    if saved is not None:
        access = replace(access, known=saved.contacts, tally=saved.tally)
    # The user may have to type the token of a tunnel, and only the user's thread can ask for it.
    if isinstance(options.tunnel, str):
        options = replace(options, tunnel=settings_of(options.tunnel))
    services, network = runtime.call(_start(access, identity, name, options, store, behind_s))
    _open_swarms.difference_update({swarm for swarm in _open_swarms if swarm.left})
    swarm = Swarm(runtime, services, access.run_id, name, network)
    if clock is not None:
        runtime.call(network.leave_in_time(clock, swarm.optimizers, swarm.leave))
    _open_swarms.add(swarm)
    return swarm


def _save(store: PeerStore, access: RunAccess, key: Identity, name: str, options: NetworkOptions) -> None:
    swarm = find_open(access.run_id, id=key.id)
    if swarm is not None:
        raise _open_unsaved(store, swarm)
    peer = SavedPeer(
        saving.VERSION,
        access.run_id,
        access.access,
        name,
        "" if access.invitation is None else str(access.invitation),
        access.allow,
        options.to_saved(),
        mailbox=access.mailbox,
    )
    store.begin(peer)


async def _start(
    access: RunAccess,
    identity: Identity,
    name: str,
    options: NetworkOptions,
    store: PeerStore | None,
    behind_s: float,
) -> tuple[PeerServices, NetworkSession]:
    events = EventLog()

    def wall_clock() -> float:
        return time.time() + behind_s

    advice = clock_advice(behind_s, access.mailbox)
    if advice:
        logger.warning("%s", advice)
        events.emit(Notice(loop_now(), advice))
    former_port = 0
    if store is not None and store.saved is not None and options.listen:
        former_port = store.saved.port
    try:
        node = await _start_node(access, identity, options, options.port or former_port, events, wall_clock)
    except OSError:
        # if another program uses the former port now, take another one; old invitations then stop working
        if not former_port:
            raise
        node = await _start_node(access, identity, options, options.port, events, wall_clock)
    try:
        services = assemble(node, access.run_id, events, random.SystemRandom(), mailbox=access.mailbox)
        network = NetworkSession(node, access, options, services)
        await network.open(store)
    except BaseException:
        # close the node also after an interrupt
        await node.close()
        raise
    # on Colab and Kaggle there is no other machine in the local network
    if not (platforms.in_colab() or platforms.in_kaggle()):
        node.spawn(network.announce_in_lan(name))
    return services, network


async def _start_node(
    access: RunAccess,
    identity: Identity,
    options: NetworkOptions,
    port: int,
    events: EventLog,
    wall_clock: Callable[[], float],
) -> Node:
    settings = NodeSettings(
        access.run_id,
        port=port,
        listen=options.listen,
        announce=tuple(options.announce) or None,
        iroh=options.iroh,
        # a tunnel or relay in the options shows that the user agreed to relays
        iroh_relays=bool(options.service) or not platforms.platform().tunnels_if,
        upload_bps=_bps(options.upload_mbit_s),
        download_bps=_bps(options.download_mbit_s),
    )
    return await Node.start(identity, settings, events, admission=access.admission, wall_clock=wall_clock)


def _bps(mbit_s: float | None) -> float | None:
    return None if mbit_s is None else mbit_s * 1e6


@atexit.register
def _leave_all() -> None:
    for swarm in list(_open_swarms):
        with contextlib.suppress(Exception):
            swarm.leave()
