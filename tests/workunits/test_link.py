"""The line that lets volunteers in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from colab_swarm.errors import InviteError
from colab_swarm.invite import Access
from colab_swarm.net.identity import Identity
from colab_swarm.trust.access import RunAccess
from colab_swarm.workunits.coordinator import shown
from colab_swarm.workunits.tokens import RequestGate, WorkLink

URL = "http://192.0.2.7:8000/"
organizer, alice = Identity(b"o" * 32), Identity(b"a" * 32)


def issued(access: Access = "invite", hours: float = 1.0) -> tuple[str, RunAccess]:
    entrance = RunAccess.found("digits", organizer, access=access, allow=None, key_file=None)
    return str(WorkLink.issue(URL, entrance, organizer, hours=hours)), entrance


@pytest.mark.parametrize("access", ["invite", "open"])
def test_the_link_admits_a_volunteer(access: Access) -> None:
    text, entrance = issued(access)
    link = WorkLink.parse(f'  "{text}" ')
    assert (link.url, link.invite.name) == (URL, "digits")
    assert link.authority == (organizer.public_key if access == "invite" else None)
    now = time.time()
    header = link.token(alice).header("GET", "/api/job", now=now)
    assert RequestGate(entrance.admission).check(header, "GET", "/api/job", now=now)[0] == alice.id


def test_a_link_that_is_passed_on_cannot_be_changed() -> None:
    text, _ = issued()
    assert WorkLink.parse(text).invite.expires_at < time.time() + 3601
    with pytest.raises(InviteError, match="mistyped"):
        WorkLink.parse(text[:-3] + "AAA")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://OWNER.github.io/colab_swarm/join#digits.abc", "invites to a swarm"),
        ("http://192.0.2.7:8000/", "no link to a coordinator"),
        ("192.0.2.7#digits.abc", "no link to a coordinator"),
        ("", "no link to a coordinator"),
        ("http://192.0.2.7/#digits.abc", "mistyped"),
    ],
)
def test_text_that_is_no_link_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(InviteError, match=message):
        WorkLink.parse(text)


def test_an_expired_link_is_refused() -> None:
    text, _ = issued(hours=-1.0)
    with pytest.raises(InviteError, match="expired"):
        WorkLink.parse(text)


def test_a_link_shows_itself_but_its_repr_holds_no_secret() -> None:
    text, _ = issued()
    link = WorkLink.parse(text)
    assert repr(link) == f"WorkLink({URL}, digits)"
    html = shown(link)._repr_html_()
    assert "volunteer.ipynb" in html and "join digits as volunteer" in html


def test_the_run_of_a_folder_stays_the_same(tmp_path: Path) -> None:
    key = tmp_path / "organizer.key"
    runs = {
        RunAccess.found(
            "digits", Identity.load_or_create(key), access="invite", allow=None, key_file=key
        ).run_id
        for _ in range(2)
    }
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://172.28.0.12:8000/", True),
        ("http://[::1]:80/", True),
        (URL, False),
        ("https://a.example/", False),
    ],
)
def test_a_link_to_a_private_address_says_who_can_use_it(url: str, local: bool) -> None:
    entrance = RunAccess.found("digits", organizer, access="open", allow=None, key_file=None)
    warning = shown(WorkLink.issue(url, entrance, organizer, hours=1.0)).warning
    assert ("same local network" in warning and "tunnel=" in warning) is local
