"""`connect`: make this machine a peer, by a form or by arguments, through the best door that opens."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from colab_swarm.credentials import find_secret
from colab_swarm.errors import JoinError, PeerError, TunnelError
from colab_swarm.invite import Invite
from colab_swarm.mailbox.address import SCHEMES
from colab_swarm.net.addresses import is_local, own_ips
from colab_swarm.net.iroh import is_at_public_relay
from colab_swarm.net.peers import short
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.notebook import platforms
from colab_swarm.notebook.connecting import Connection, Say
from colab_swarm.notebook.platforms import Platform
from colab_swarm.swarm import joining
from colab_swarm.swarm.network import DEFAULT_OPTIONS, NetworkOptions
from colab_swarm.swarm.saved import folder_of, read_saved
from colab_swarm.swarm.swarm import Swarm

SAVED = "SWARM_INVITATION"
_shown: Connection | None = None


@dataclass(frozen=True)
class Door:
    """A way to let others in: its ``name`` for people, and the options that open it."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)


LISTEN, LAN = Door("this machine's public address"), Door("the local network")
IROH = Door("iroh's free relays", {"iroh": "public"})
TUNNELS = tuple(Door(f"a tunnel by {kind}", {"tunnel": kind}) for kind in ("cloudflared", "ngrok"))


def doors(here: Platform, *, public: bool, agreed: bool, usable: Collection[str]) -> list[Door]:
    """Return the doors to try, the best first; ``usable`` are the helpers at hand: iroh, cloudflared, ngrok.

    Relays and tunnels need the user's consent. Colab's FAQ forbids proxies, and Kaggle ends sessions with tunnels.
    """
    if public:
        return [LISTEN]
    found = [IROH] if agreed and here.proxies and "iroh" in usable else []
    found += [door for door in TUNNELS if agreed and not here.alone and door.changes["tunnel"] in usable]
    return found if here.alone else [*found, LAN]


def connect(
    invitation: str | None = None,
    *,
    name: str = "",
    run: str = "my-swarm",
    mailbox: str = "",
    accept_terms: bool = False,
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
) -> Swarm | Connection:
    """Make this notebook a peer: show a form that starts or joins a run, and then becomes the panel.

    With an ``invitation`` it joins at once, with an empty one it starts a run, and with the address of a bucket a
    run whose rounds are there: ``s3://bucket/folder``, see `create`. So it does where nobody sees a
    form; an invitation may be the secret or environment variable ``SWARM_INVITATION``. Run it again for the same
    peer. The result has all attributes of a `Swarm`.

    A new run opens the best door: a public address, iroh's relays, a tunnel by cloudflared or ngrok, the local
    network. Relays and tunnels open only after ``accept_terms``, and never on Colab.

    Args:
        name: what the others see of this peer.
        run: name of a run that is started.
        mailbox: confirms where the rounds of an invitation are; see `join`.
        accept_terms: the platform's terms allow this, and relays or tunnels may be used.
        options: how this peer takes part; a tunnel, relay or address given there is the door.
        state_dir: see `create`; a peer that it saves is resumed.

    Raises:
        JoinError: no peer of the invitation answers, or nobody could reach a run that is started here.
        InviteError, TermsError, ValueError, StateError: see `join` and `create`.
    """
    global _shown
    act = partial(_connect, run=run, mailbox=mailbox, options=options, state_dir=state_dir)
    saves = state_dir is not None and read_saved(folder_of(state_dir)) is not None
    if invitation is not None or saves or not platforms.has_frontend():
        return act(invitation or "", name, accept_terms, print)
    if _shown is None or not _shown.is_open:
        _shown = Connection(act, platforms.platform(), saved=find_secret(SAVED) is not None)
    from IPython.display import display

    display(_shown)  # type: ignore[no-untyped-call]
    return _shown


def _connect(
    invitation: str,
    name: str,
    agreed: bool,
    say: Say,
    *,
    run: str,
    mailbox: str,
    options: NetworkOptions,
    state_dir: str | Path | None,
) -> Swarm:
    how: dict[str, Any] = {"peer_name": name, "state_dir": state_dir, "accept_terms": agreed}
    invitation = invitation.strip() or str(find_secret(SAVED) or "")
    saved = None if state_dir is None else read_saved(folder_of(state_dir))
    if invitation.startswith(SCHEMES):
        say(f"… starting {run} in {invitation}")
        swarm = joining.create(run, mailbox=invitation, options=options, **how)
    elif saved is not None:
        say(f"… coming back as {saved.name}")
        swarm = joining.resume(folder_of(state_dir or ""), accept_terms=agreed)
    elif invitation:
        swarm = _join(invitation, options, say, mailbox=mailbox, **how)
    else:
        swarm = _start(run, options, say, **how)
    say(f"✔ you are {swarm.name} ({short(swarm.id)}) in {swarm.run}")
    for peer in swarm.services.peers.linked():
        say(f"✔ reached {short(peer)}: {swarm.services.peers.way_to(peer)}")
    known = swarm.reachability.level is not ReachabilityLevel.UNVERIFIED
    say(f"{'✔' if known else '○'} others reach you: {swarm.reachability}")
    return swarm


def _join(invitation: str, options: NetworkOptions, say: Say, **how: Any) -> Swarm:
    invite = Invite.parse(invitation)
    addresses = [address for contact in invite.entries for address in contact.addresses]
    say(f"… joining {invite.name}")
    if how["accept_terms"] and platforms.platform().proxies and any(map(is_at_public_relay, addresses)):
        options = replace(options, iroh=options.iroh or "public")
    return joining.join(invitation, options=options, **how)


def _start(run: str, options: NetworkOptions, say: Say, **how: Any) -> Swarm:
    platforms.require_terms(how["accept_terms"])
    if (swarm := joining.find_open(run=run, name=how["peer_name"])) is not None:
        return swarm
    given = options.tunnel or options.announce or options.iroh
    for door in [Door("the given options")] if given else _doors_here(how["accept_terms"]):
        say(f"… trying {door.name}")
        try:
            swarm = joining.create(run, options=replace(options, **door.changes), **how)
        except (TunnelError, PeerError) as error:
            say(f"✖ {door.name}: {error}")
            continue
        if door is not IROH or any(map(is_at_public_relay, swarm.contact.addresses)):
            return swarm
        say(f"✖ {door.name}: none answered")
        swarm.leave()
    raise JoinError(platforms.ways_out())


def _doors_here(agreed: bool) -> list[Door]:
    here = platforms.platform()
    found = {
        "iroh": find_spec("iroh"),
        "cloudflared": which("cloudflared"),
        "ngrok": find_spec("pyngrok") and find_secret("NGROK_AUTHTOKEN"),
    }
    public = not here.alone and any(ip.version == 4 and not is_local(str(ip)) for ip in own_ips())
    return doors(here, public=public, agreed=agreed, usable=[name for name, one in found.items() if one])
