"""`cs.connect`: which door it opens, by a form and by arguments."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import JoinError, TermsError, TunnelError
from colab_swarm.events import Notice
from colab_swarm.net.iroh import IrohEndpoint
from colab_swarm.net.membership import SLACK_S, Account
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.net.tunnels import Tunnel
from colab_swarm.notebook import platforms
from colab_swarm.notebook.connecting import Connection
from colab_swarm.notebook.platforms import BINDER, COLAB, JUPYTER, KAGGLE, Consent, Platform
from colab_swarm.swarm import connecting
from colab_swarm.swarm.connecting import IROH, LAN, LISTEN, TUNNELS, Door, doors
from colab_swarm.workunits import Job
from colab_swarm.workunits.coordinator import coordinate
from tests.net import agents
from tests.net.test_tunnels import agent_of, needs_posix, read, running
from tests.net.test_tunnels import folder as folder

ALL = ("iroh", "cloudflared", "ngrok")
HIRED = (COLAB, KAGGLE, BINDER)
"""Platforms whose terms ask for a second yes."""


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a public address and without helpers; everything is left in the end."""
    monkeypatch.setattr(connecting, "own_ips", set)
    monkeypatch.setattr(connecting, "find_spec", lambda name: None)
    monkeypatch.delenv(connecting.SAVED, raising=False)
    yield
    from colab_swarm.swarm.joining import _leave_all

    _leave_all()


def start(**options: Any) -> Any:
    """Start a run as alice in a notebook whose page nobody sees."""
    with pytest.MonkeyPatch.context() as kernel:
        kernel.setattr(platforms, "in_notebook", lambda: True)
        kernel.setattr(platforms, "has_frontend", lambda: False)
        return cs.connect(**{"peer_name": "alice", **options})


def test_a_script_has_no_form_and_a_wrong_call_is_told_the_right_one() -> None:
    with pytest.raises(RuntimeError, match=r"cs.create\('my-run'\) .*cs.join\('swarm://…'\)"):
        cs.connect()
    with pytest.raises(TypeError, match="peer_name= for this peer's name, run= for the run's"):
        cs.connect(name="alice")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="peer_name="):
        cs.create("ours", name="alice")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="accept_terms='yes' is unknown: pass True, or 'tunnels'"):
        cs.create("ours", accept_terms="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("here", "public", "consent", "usable", "expected"),
    [
        (JUPYTER, True, True, ALL, [LISTEN]),
        (JUPYTER, False, True, ALL, [IROH, *TUNNELS, LAN]),
        (JUPYTER, False, True, ["ngrok"], [TUNNELS[1], LAN]),
        (JUPYTER, False, False, ALL, [LAN]),
        *[(here, False, consent, ALL, []) for here in HIRED for consent in (False, True)],
        *[(here, False, "tunnels", ALL, [IROH, *TUNNELS]) for here in HIRED],
        *[(here, False, "tunnels", ["cloudflared"], [TUNNELS[0]]) for here in HIRED],
    ],
)
def test_doors_are_tried_in_order_and_those_of_others_only_after_a_yes(
    here: Platform, public: bool, consent: Consent, usable: Sequence[str], expected: list[Door]
) -> None:
    assert doors(here, public=public, consent=consent, usable=usable) == expected


def test_friends_connect_by_arguments_by_a_secret_and_come_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alice = start(run="ours", state_dir=tmp_path / "alice")
    line = str(alice.invite())
    bob = cs.connect(f"  {line[:30]}\n{line[30:]} ", peer_name="bob")
    assert start(run="ours") is alice and cs.connect(line, peer_name="bob") is bob
    told = capsys.readouterr().out
    assert "○ others reach you: that shows when the first peer joins" in told
    assert "the local network" in told and f"reached {alice.id.hex()[:8]}: same machine" in told
    monkeypatch.setenv(connecting.SAVED, line)
    carol = start(peer_name="carol")
    assert carol.run_id == alice.run_id and not carol.is_owner
    alice.leave()
    again = cs.connect(state_dir=tmp_path / "alice")
    assert (again.id, again.run_id, again.name) == (alice.id, alice.run_id, "alice")


def test_where_nobody_could_join_no_run_starts_and_the_ways_out_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "platform", lambda: KAGGLE)
    with pytest.raises(JoinError, match=r"Kaggle by itself.*“My terms allow tunnels and relays”.*simulate"):
        start(accept_terms=True)
    monkeypatch.setattr(platforms, "platform", lambda: COLAB)
    ways = r"Colab by itself.*mailbox='s3://.*colab-swarm create my-run.*“I use paid compute units.*simulate"
    with pytest.raises(JoinError, match=ways):
        start(accept_terms=True)
    with pytest.raises(TermsError):
        start()
    assert connecting.joining.find_open(run="my-swarm") is None


def test_a_door_that_does_not_open_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = [connecting.Door("iroh's free relays", {"iroh": "https://127.0.0.1:9"}), LAN]
    monkeypatch.setattr(connecting, "IROH", tried[0])
    monkeypatch.setattr(connecting, "doors", lambda *_, **__: tried)
    monkeypatch.setattr("colab_swarm.net.iroh.ONLINE_S", 0.1)
    alice = start(accept_terms=True)
    told = capsys.readouterr().out
    assert not alice.left and "✖ iroh's free relays: none answered\n… trying the local network" in told


class Clicked(Connection):
    def press(self, *, invitation: str = "", name: str = "bob", agreed: bool = True) -> None:
        self._invitation.value, self._name.value, self._agreed.value = invitation, name, agreed
        self._button.click()

    @property
    def log(self) -> str:
        return str(self._log.value)


def open_form(here: Platform = JUPYTER, **changes: Any) -> Clicked:
    given = {"run": "mine", "allow": None, "mailbox": "", "options": cs.NetworkOptions(), "state_dir": None}
    act: Any = connecting.partial(connecting._connect, **given | changes)
    return Clicked(act, here, saved=False)


def test_the_form_tells_what_is_wrong_and_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alice = start(run="ours")
    form = open_form()
    with pytest.raises(JoinError, match="press Start / Join"):
        form.invite()
    ended, later = str(alice.invite(hours=1)), time.time() + 3600 + 2 * SLACK_S
    form.press(invitation="hello")
    assert "✖" in form.log and form._button.description == "Try again" and form.is_open
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: later)
        form.press(invitation=ended)
    assert "✖" in form.log and "expired" in form.log and form.is_open
    form.press(invitation=str(alice.invite()))
    assert form.name == "bob" and form.run == "ours" and form.swarm.run_id == alice.run_id
    assert form._invitation.value == "" and "reached" in form.log and "✖" not in form.log
    assert repr(form) == repr(form.swarm) and form._box.children[0] is form._log
    form.leave()
    assert not form.is_open


def test_the_form_asks_before_it_sends_a_token_and_for_each_invitation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = []

    async def whoami(token: str) -> Account:
        received.append(token)
        return Account("bob")

    monkeypatch.setattr("colab_swarm.trust.authority.whoami", whoami)
    monkeypatch.setenv("HF_TOKEN", "hf_of_bob")
    allow = cs.Allowlist(users=("bob",))
    lines = [str(cs.create(name, allow=allow).invite()) for name in ("first", "second")]
    form = open_form()
    for line, name in zip(lines, ("first", "second"), strict=True):
        form.press(invitation=line)
        assert f"the organizer of {name}, peer" in form.log and received == []
        form._send_token.value = True
    form.press(invitation=lines[1])
    assert form.run == "second" and received == ["hf_of_bob"]


def test_a_starters_form_becomes_the_invitation() -> None:
    form = open_form()
    form.press(name="alice")
    assert form.is_owner and "join mine as worker" in form._box.children[1].value
    assert not form.swarm.left


def test_a_box_that_is_not_ticked_starts_nothing_and_opens_no_relay(opened: list[str]) -> None:
    form = open_form()
    form.press(name="alice", agreed=False)
    assert "tick the first box" in form.log and form.is_open and "bob" not in repr(form)
    with pytest.raises(JoinError, match="press Start / Join"):
        form.invite()
    assert opened == []


TOKEN = "2abcDEFsecretTOKEN"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The agents that were started and the iroh relays that were asked on a kernel that poses as Colab."""
    services: list[str] = []

    async def run_agent(tunnel: Tunnel) -> Tunnel:
        services.append(tunnel._settings.kind)
        raise TunnelError("the stand-in opens nothing")

    async def ask_relay(endpoint: IrohEndpoint) -> None:
        services.append("iroh")

    monkeypatch.setattr(Tunnel, "open", run_agent)
    monkeypatch.setattr(IrohEndpoint, "start", ask_relay)
    monkeypatch.setattr(connecting, "find_spec", lambda name: True)
    monkeypatch.setattr(connecting, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("NGROK_AUTHTOKEN", "of the environment")
    monkeypatch.setattr(platforms, "platform", lambda: COLAB)
    return services


def test_on_colab_nothing_opens_without_the_second_yes(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as at_home:
        at_home.setattr(platforms, "platform", lambda: JUPYTER)
        line = str(cs.create("theirs", peer_name="bob").invite())
    with pytest.raises(JoinError, match="by itself"):
        start(accept_terms=True)
    for way in ({"tunnel": "ngrok"}, {"tunnel": "cloudflared"}, {"iroh": "public"}):
        options = cs.NetworkOptions(**way)  # type: ignore[arg-type]
        for begin in (cs.create, cs.join, cs.connect):
            run = "ours" if begin is cs.create else line
            with pytest.raises(
                TermsError, match=r"accept_terms='tunnels'.*mailbox='s3://.*cs.join"
            ) as refusal:
                begin(run, options=options, accept_terms=True, state_dir=tmp_path / "alice")
            assert "paid compute units" in str(refusal.value)
    job = Job("signs", lambda: None, data=([1], [1]), validation=([1], [1]))  # type: ignore[arg-type]
    with pytest.raises(TermsError, match="cloudflared opens only"):
        coordinate(job, tunnel="cloudflared", accept_terms=True, folder=tmp_path / "job")
    cs.connect(line, peer_name="alice", accept_terms=True)
    assert opened == []


def test_after_the_second_yes_each_door_is_tried(
    opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JoinError, match="by itself"):
        start(accept_terms="tunnels")
    assert opened == ["iroh", "cloudflared", "ngrok"]
    assert "✖ a tunnel by cloudflared: the stand-in opens nothing" in capsys.readouterr().out


def test_an_iroh_relay_of_a_friend_is_not_dialled_from_colab_without_a_yes(opened: list[str]) -> None:
    relays = {}
    for name, consent, options in (
        ("alice", True, cs.NetworkOptions()),
        ("bob", "tunnels", cs.NetworkOptions(iroh="https://relay.test")),
    ):
        swarm = cs.create(name, options=options, accept_terms=consent)  # type: ignore[arg-type]
        assert swarm.network is not None
        relays[name] = swarm.network.node.iroh._settings.iroh_relays
    assert relays == {"alice": False, "bob": True} and opened == ["iroh"]


def test_the_form_on_colab_has_a_second_box_and_a_field_for_the_token(opened: list[str]) -> None:
    form = open_form(COLAB)
    assert len(form._box.children) == 7 and len(open_form(JUPYTER)._box.children) == 6
    assert "I use paid compute units" in form._box.children[3].children[1].value
    assert form._agreed.value is form._tunnels.value is False
    form._tunnels.value = True
    form.press(name="alice", agreed=False)
    assert "read the terms" in form.log
    form._agreed.value, form._tunnels.value, form._token.value = True, False, TOKEN
    form.press(name="alice")
    assert "tick the second box" in form.log and opened == []
    form._tunnels.value = True
    form.press(name="alice")
    # the user entered the token for ngrok
    assert opened == ["ngrok", "iroh", "cloudflared"] and form._token.value == ""
    assert TOKEN not in form.log


@needs_posix
def test_the_token_opens_the_door_and_stays_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("pyngrok.conf.DEFAULT_NGROK_PATH", agents.install("ngrok", folder))
    monkeypatch.delenv("PYNGROK_NGROK_PATH", raising=False)
    monkeypatch.setattr(platforms, "platform", lambda: COLAB)
    # the stand-in's public end is a port of this machine
    monkeypatch.setattr("colab_swarm.invite.only_local", lambda contacts: False)
    form = open_form(COLAB, run="ours", state_dir=folder / "alice")
    form._agreed.value, form._tunnels.value, form._token.value = True, True, TOKEN
    form.press(name="alice")
    assert form.reachability.level is ReachabilityLevel.TUNNEL and TOKEN.encode() not in read(
        agent_of(folder), "cmdline"
    )
    texts = [repr(form), form.log, repr(form.network.options), str(form.invite()), caplog.text]
    texts += [str(widget.value) for widget in (form._token, form._invitation, form._name)]
    texts += [event.text for event in form.events.recent(Notice)]
    form.leave()
    saved = [path.read_bytes() for path in (folder / "alice").rglob("*") if path.is_file()]
    assert len(saved) >= 2 and not any(TOKEN.encode() in content for content in saved)
    assert not any(TOKEN in text for text in texts) and running(folder) == []
