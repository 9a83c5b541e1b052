"""`connect`: make this machine a peer, by a form or by arguments. A new run opens the best way in for others."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from colab_swarm.credentials import find_secret
from colab_swarm.errors import JoinError, PeerError, TunnelError, require
from colab_swarm.invite import Invite
from colab_swarm.mailbox.address import SCHEMES
from colab_swarm.net.addresses import is_local, own_ips
from colab_swarm.net.iroh import is_at_public_relay
from colab_swarm.net.peers import short
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.notebook import platforms
from colab_swarm.notebook.connecting import Connection, Entries, Say
from colab_swarm.notebook.platforms import Consent, Platform
from colab_swarm.swarm import joining
from colab_swarm.swarm.network import DEFAULT_OPTIONS, NetworkOptions
from colab_swarm.swarm.saved import folder_of, read_saved
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.trust.authority import Allowlist

SAVED = "SWARM_INVITATION"
_connection: Connection | None = None


@dataclass(frozen=True)
class Door:
    """A way by which others reach this peer: its ``name`` for people, and the network options that open it."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)


LISTEN = Door("this machine's public address")
LAN = Door("the local network")
IROH = Door("iroh's free relays", {"iroh": "public"})
TUNNELS = tuple(Door(f"a tunnel by {kind}", {"tunnel": kind}) for kind in ("cloudflared", "ngrok"))


def doors(here: Platform, *, public: bool, consent: Consent, usable: Collection[str]) -> list[Door]:
    """Return the doors to try, the best first; ``usable`` names the installed helpers: iroh, cloudflared, ngrok.

    Relays and tunnels need the user's consent. On Colab, Kaggle and Binder this is "tunnels"; elsewhere the consent
    to train is enough.
    """
    if public:
        return [LISTEN]
    doors = []
    if here.allows_tunnels(consent):
        if "iroh" in usable:
            doors.append(IROH)
        doors += [door for door in TUNNELS if door.changes["tunnel"] in usable]
    if not here.alone:
        doors.append(LAN)
    return doors


@joining.answers_options
def connect(
    invitation: str = "",
    *,
    run: str = "my-swarm",
    peer_name: str = "",
    allow: Allowlist | None = None,
    mailbox: str = "",
    accept_terms: Consent = False,
    options: NetworkOptions = DEFAULT_OPTIONS,
    state_dir: str | Path | None = None,
) -> Swarm | Connection:
    """Make this notebook a peer: show a form that starts or joins a run, and then becomes the panel.

    A run with an allowlist needs your Hugging Face token. The form asks before it sends the token; without a form,
    use `join`. In three cases there is no form, and the call joins or creates the run immediately:

    - with an ``invitation``, as `join` does;
    - with the address of a bucket as ``invitation``, as `create` does for a new run whose rounds are in this bucket;
    - in a notebook that runs without a page, as in CI. The invitation may then be the secret or environment variable
      ``SWARM_INVITATION``; without it the notebook starts a run.

    Run the cell again to get the same peer. The result has all attributes of a `Swarm`.

    A new run opens the first of these ways for others to reach this peer that works: a public address, iroh's
    relays, a tunnel by cloudflared or ngrok, the local network. Relays and tunnels are used only with
    ``accept_terms``, on Colab, Kaggle and Binder only with "tunnels".

    Args:
        invitation: the line that a friend sent; empty: see above.
        run: name of the run, if one is started.
        peer_name: the name that the others see for this peer.
        allow: who may join the run, if one is started; see `create`.
        mailbox: the address that you confirm for the rounds of an invitation; see `join`.
        accept_terms: the platform's terms allow this. On your own machine, it also allows relays and tunnels.
            "tunnels": you use paid compute units on Colab, and the platform's terms allow tunnels and relays.
        options: how this peer takes part in the network. If they have a tunnel, relay or address, others reach this
            peer by it.
        state_dir: see `create`. If the folder saves a peer, that peer is resumed; on Colab you must first agree to the
            terms again.

    Raises:
        JoinError: no peer of the invitation answers, or no other peer could reach a run that is started here.
        RuntimeError: this is a script, which cannot show a form.
        InviteError, TermsError, ValueError, StateError: see `join` and `create`.
    """
    global _connection
    act = partial(_connect, run=run, allow=allow, mailbox=mailbox, options=options, state_dir=state_dir)
    saves = state_dir is not None and read_saved(folder_of(state_dir)) is not None
    require(
        invitation or saves or platforms.in_notebook(),
        "cs.connect() shows a form, which needs a notebook. In a script use cs.create('my-run') to start a run, or "
        "cs.join('swarm://…') with a friend's invitation",
        RuntimeError,
    )
    here = platforms.platform()
    # the user of a peer that comes back accepted the platform's terms only for an earlier session
    comes_back = saves and (accept_terms or not here.must_agree)
    if invitation or comes_back or not platforms.has_frontend():
        return act(Entries(invitation, peer_name, accept_terms), print)
    if _connection is None or not _connection.is_open:
        _connection = Connection(act, here, saved=saves or find_secret(SAVED) is not None)
    from IPython.display import display

    display(_connection)  # type: ignore[no-untyped-call]
    return _connection


def _connect(
    entries: Entries,
    say: Say,
    *,
    run: str,
    allow: Allowlist | None,
    mailbox: str,
    options: NetworkOptions,
    state_dir: str | Path | None,
) -> Swarm:
    invitation = entries.invitation.strip() or str(find_secret(SAVED) or "")
    saved = None if state_dir is None else read_saved(folder_of(state_dir))
    if invitation.startswith(SCHEMES):
        say(f"… starting {run} in {invitation}")
        swarm = joining.create(
            run,
            allow=allow,
            mailbox=invitation,
            options=options,
            peer_name=entries.name,
            state_dir=state_dir,
            accept_terms=entries.consent,
        )
    elif saved is not None:
        say(f"… coming back as {saved.name}")
        assert state_dir is not None
        swarm = joining.join(
            state_dir=state_dir, accept_terms=entries.consent, send_hf_token=entries.send_hf_token
        )
    elif invitation:
        options = _options_to_join(invitation, options, entries, say)
        swarm = joining.join(
            invitation,
            mailbox=mailbox,
            options=options,
            peer_name=entries.name,
            state_dir=state_dir,
            accept_terms=entries.consent,
            send_hf_token=entries.send_hf_token,
        )
    else:
        swarm = _start(run, options, entries, say, allow=allow, state_dir=state_dir)
    _say_links(swarm, say)
    return swarm


def _say_links(swarm: Swarm, say: Say) -> None:
    say(f"✔ you are {swarm.name} ({short(swarm.id)}) in {swarm.run}")
    for peer in swarm.services.peers.linked():
        say(f"✔ reached {short(peer)}: {swarm.services.peers.way_to(peer)}")
    if swarm.reachability.level is ReachabilityLevel.UNVERIFIED:
        say("○ others reach you: that shows when the first peer joins, in the panel")
    else:
        say(f"✔ others reach you: {swarm.reachability}")


def _options_to_join(invitation: str, options: NetworkOptions, entries: Entries, say: Say) -> NetworkOptions:
    """Return the network options with which to join, as far as the user agreed to them.

    If the invitation names peers at iroh's public relays, this peer uses these relays. If the user entered a token of
    ngrok, others reach this peer by ngrok.
    """
    invite = Invite.parse(invitation)
    if entries.ngrok_token:
        options = replace(options, tunnel=_by_ngrok(entries.ngrok_token))
    at_relay = any(is_at_public_relay(address) for contact in invite.entries for address in contact.addresses)
    here = platforms.platform()
    if at_relay and here.allows_tunnels(entries.consent):
        options = replace(options, iroh=options.iroh or "public")
    elif at_relay and here.tunnels_if:
        say(f"○ the way by iroh's relays stays closed. {platforms.WITHOUT_TUNNELS}")
    say(f"… joining {invite.name}")
    return options


def _by_ngrok(token: str) -> TunnelSettings:
    return TunnelSettings("ngrok", auth_token=token)


def _start(
    run: str,
    options: NetworkOptions,
    entries: Entries,
    say: Say,
    *,
    allow: Allowlist | None,
    state_dir: str | Path | None,
) -> Swarm:
    """Create a run with the first door that opens; raise JoinError if none opens."""
    platforms.require_terms(entries.consent)
    swarm = joining.find_open(run=run, name=entries.name)
    if swarm is not None:
        return swarm
    has_door = options.tunnel or options.announce or options.iroh
    if has_door and not entries.ngrok_token:
        doors_to_try = [Door("the given options")]
    else:
        doors_to_try = _doors_here(entries)
    for door in doors_to_try:
        say(f"… trying {door.name}")
        try:
            swarm = joining.create(
                run,
                allow=allow,
                options=replace(options, **door.changes),
                peer_name=entries.name,
                state_dir=state_dir,
                accept_terms=entries.consent,
            )
        except (TunnelError, PeerError) as error:
            say(f"✖ {door.name}: {error}")
            continue
        # if no relay answered, nobody can reach this peer by iroh
        if door is not IROH or any(map(is_at_public_relay, swarm.services.peers.contact.addresses)):
            return swarm
        say(f"✖ {door.name}: none answered")
        swarm.leave()
    raise JoinError(platforms.ways_out())


def _doors_here(entries: Entries) -> list[Door]:
    """Return the doors to try. If the user entered a token, its door comes first."""
    here = platforms.platform()
    usable = []
    if find_spec("iroh"):
        usable.append("iroh")
    if which("cloudflared"):
        usable.append("cloudflared")
    # Colab asks the user before it returns a secret
    may_ask = here.allows_tunnels(entries.consent) and not entries.ngrok_token
    if may_ask and find_spec("pyngrok") and find_secret("NGROK_AUTHTOKEN"):
        usable.append("ngrok")
    public_ips = [ip for ip in own_ips() if ip.version == 4 and not is_local(str(ip))]
    public = bool(public_ips) and not here.alone
    usual = doors(here, public=public, consent=entries.consent, usable=usable)
    if not entries.ngrok_token:
        return usual
    return [Door("a tunnel by ngrok", {"tunnel": _by_ngrok(entries.ngrok_token)}), *usual]
