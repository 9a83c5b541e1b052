"""`cs.connect`: which door it opens, by a form and by arguments."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import InviteError, JoinError, TermsError
from colab_swarm.net.membership import SLACK_S
from colab_swarm.notebook import platforms
from colab_swarm.notebook.connecting import Connection
from colab_swarm.notebook.platforms import COLAB, JUPYTER, KAGGLE
from colab_swarm.swarm import connecting
from colab_swarm.swarm.connecting import IROH, LAN, LISTEN, TUNNELS, doors

ALL = ("iroh", "cloudflared", "ngrok")


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a public address and without helpers; everything is left in the end."""
    monkeypatch.setattr(connecting, "own_ips", set)
    monkeypatch.setattr(connecting, "find_spec", lambda name: None)
    monkeypatch.delenv(connecting.SAVED, raising=False)
    yield
    from colab_swarm.swarm.joining import _leave_all

    _leave_all()


def test_doors_are_tried_in_order_and_others_are_used_only_after_a_yes() -> None:
    assert doors(JUPYTER, public=True, agreed=True, usable=ALL) == [LISTEN]
    assert doors(JUPYTER, public=False, agreed=True, usable=ALL) == [IROH, *TUNNELS, LAN]
    assert doors(JUPYTER, public=False, agreed=True, usable=["ngrok"]) == [TUNNELS[1], LAN]
    assert doors(JUPYTER, public=False, agreed=False, usable=ALL) == [LAN]


def test_colab_uses_no_proxy_and_kaggle_no_tunnel() -> None:
    assert doors(COLAB, public=False, agreed=True, usable=ALL) == []
    assert doors(KAGGLE, public=False, agreed=True, usable=ALL) == [IROH]
    assert doors(KAGGLE, public=False, agreed=False, usable=ALL) == []


def test_friends_connect_by_arguments_and_again_for_the_same_peer(capsys: pytest.CaptureFixture[str]) -> None:
    alice = cs.connect("", name="alice", run="ours")
    line = str(alice.invite())
    bob = cs.connect(f"  {line[:30]}\n{line[30:]} ", name="bob")
    assert cs.connect("", name="alice", run="ours") is alice and cs.connect(line, name="bob") is bob
    told = capsys.readouterr().out
    assert "the local network" in told and f"reached {alice.id.hex()[:8]}: same machine" in told


def test_an_invitation_may_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    alice = cs.connect("", name="alice", run="ours")
    monkeypatch.setenv(connecting.SAVED, str(alice.invite()))
    bob = cs.connect(name="bob")  # nobody sees a form here
    assert bob.run_id == alice.run_id and not bob.is_owner


def test_a_saved_peer_comes_back(tmp_path: Path) -> None:
    first = cs.connect("", name="alice", run="ours", state_dir=tmp_path / "alice")
    first.leave()
    again = cs.connect(state_dir=tmp_path / "alice")
    assert again.id == first.id and again.run_id == first.run_id and again.name == "alice"


def test_where_nobody_could_join_no_run_starts_and_the_ways_out_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for here, words in ((KAGGLE, "iroh's free relays"), (COLAB, "colab-swarm create my-run")):
        monkeypatch.setattr(platforms, "platform", lambda here=here: here)
        with pytest.raises(JoinError, match=f"{here.name} by itself.*{words}.*simulate"):
            cs.connect("", name="alice", accept_terms=True)
    with pytest.raises(TermsError):
        cs.connect("", name="alice")
    assert connecting.joining.find_open(run="my-swarm") is None


def test_a_door_that_does_not_open_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connecting, "IROH", IROH)
    tried = [connecting.Door("iroh's free relays", {"iroh": "https://127.0.0.1:9"}), LAN]
    monkeypatch.setattr(connecting, "IROH", tried[0])
    monkeypatch.setattr(connecting, "doors", lambda *_, **__: tried)
    monkeypatch.setattr("colab_swarm.net.iroh.ONLINE_S", 0.1)
    alice = cs.connect("", name="alice", accept_terms=True)
    told = capsys.readouterr().out
    assert not alice.left and "✖ iroh's free relays: none answered\n… trying the local network" in told


class Clicked(Connection):
    def press(self, *, invitation: str = "", name: str = "bob") -> None:
        self._invitation.value, self._name.value = invitation, name
        self._button.click()

    @property
    def log(self) -> str:
        return str(self._log.value)


def open_form() -> Clicked:
    act: Any = connecting.partial(
        connecting._connect, run="mine", mailbox="", options=cs.NetworkOptions(), state_dir=None
    )
    return Clicked(act, JUPYTER, saved=False)


def test_the_form_tells_what_is_wrong_and_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alice = cs.connect("", name="alice", run="ours")
    form = open_form()
    with pytest.raises(JoinError, match="press Start / Join"):
        form.invite()
    form.press(invitation="hello")
    assert "✖" in form.log and form._button.description == "Try again" and form.is_open
    ended, later = str(alice.invite(hours=1)), time.time() + 3600 + 2 * SLACK_S
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


def test_a_starters_form_becomes_the_invitation() -> None:
    form = open_form()
    form.press(name="alice")
    assert form.is_owner and "join mine as worker" in form._box.children[1].value
    assert not form.swarm.left and form._agreed.value is False


def test_a_text_that_is_no_invitation_is_refused_at_once() -> None:
    with pytest.raises(InviteError):
        cs.connect("https://colab.research.google.com/drive/1", name="bob")
