"""Links let volunteers in, and requests are let in by signature, time and membership."""

import base64
import time
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import InviteError, NotAdmitted
from colab_swarm.invite import Access
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Membership, MembershipAdmission
from colab_swarm.net.peers import Role
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import Allowlist
from colab_swarm.workunits import messages
from colab_swarm.workunits.coordinator import invitation_at, issue
from colab_swarm.workunits.messages import RequestGate, Token, parse_link, token_by

NOW = 1_700_000_000.0
RUN = "digits-0011"
organizer, alice = Identity(b"o" * 32), Identity(b"a" * 32)


def membership(role: Role = Role.WORKER, *, until: float = NOW + 3600) -> bytes:
    unsigned = Membership(RUN, role, alice.public_key, "alice", NOW - 60, until)
    return unsigned.signed(organizer.sign).encode()


def token(*given: Any, **changes: Any) -> Token:
    shown = membership(*given, **changes)
    return Token(alice, lambda: shown)


def gate() -> RequestGate:
    return RequestGate(MembershipAdmission(RUN, authority=organizer.public_key, own=organizer.public_key))


def test_a_member_is_let_in_with_the_digest_that_its_body_must_have() -> None:
    header = token().header("GET", "/api/job", now=NOW)
    assert gate().check(header, "GET", "/api/job", now=NOW + 60) == (alice.id, sha256(b"").digest())
    assert gate().check(Token(organizer).header("GET", "/", now=NOW), "GET", "/", now=NOW)[0] == organizer.id


GOOD = token().header("GET", "/api/job", now=NOW)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (token().header("GET", "/api/code", now=NOW), "another path"),
        (token().header("PUT", "/api/job", now=NOW), "another path"),
        (token().header("GET", "/api/job", now=NOW - 61), "is 61 s off: set your clock"),
        (token().header("GET", "/api/job", now=NOW + 61), "is 61 s off: set your clock"),
        (token(until=NOW - 700).header("GET", "/api/job", now=NOW), "ended"),
        (token(Role.VIEWER).header("GET", "/api/job", now=NOW), "joined as a viewer"),
        (Token(alice).header("GET", "/api/job", now=NOW), "no membership"),
        (Token(Identity(), membership).header("GET", "/api/job", now=NOW), "another peer's"),
        ("", "no token"),
        ("Basic YTpi", "no token"),
        (GOOD.replace("Swarm1", "Swarm0"), "your colab-swarm is older than the coordinator's"),
        (GOOD.replace("Swarm1", "Swarm99"), "ask its organizer to update"),
        ("Swarm1 ####", "cannot be read"),
        ("Swarm1 \u00e9\u00b2", "cannot be read"),
        ("Swarm\u00b2 AAAA", "no token"),
        ("Swarm1 " + "A" * 100_000, "no token"),
    ],
)
def test_others_are_refused_with_a_reason(header: str, message: str) -> None:
    with pytest.raises(NotAdmitted, match=message):
        gate().check(header, "GET", "/api/job", now=NOW)


def test_a_request_is_good_once_and_its_nonce_is_forgotten_when_it_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_NONCES", 6)
    door, lasting = gate(), token(until=NOW + 1e6)
    for minute in range(9):
        now = NOW + 60 * minute
        header = lasting.header("GET", "/", now=now)
        door.check(header, "GET", "/", now=now)
        with pytest.raises(NotAdmitted, match="sent before"):
            door.check(header, "GET", "/", now=now + 59)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    text = token().header("GET", "/", now=NOW).removeprefix("Swarm1 ")
    data = bytearray(base64.urlsafe_b64decode(text))
    data[place % len(data)] ^= change
    with pytest.raises(NotAdmitted):
        gate().check("Swarm1 " + base64.urlsafe_b64encode(data).decode(), "GET", "/", now=NOW)


URL = "http://192.0.2.7:8000/"


def issued(access: Access = "invite", hours: float = 1.0) -> tuple[str, RunAccess]:
    entrance = RunAccess.create("digits", organizer, access=access, allow=None, key_file=None)
    return str(invitation_at(URL, issue(entrance, organizer, hours=hours))), entrance


@pytest.mark.parametrize("access", ["invite", "open"])
def test_the_link_admits_a_volunteer(access: Access) -> None:
    text, entrance = issued(access)
    url, invite = parse_link(f'  "{text}" ')
    assert (url, invite.name, invite.access) == (URL, "digits", access)
    now = time.time()
    header = token_by(invite, alice).header("GET", "/api/job", now=now)
    assert RequestGate(entrance.admission).check(header, "GET", "/api/job", now=now)[0] == alice.id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swarm://digits.abc", "invites to a swarm"),
        ("https://example.org/join#digits.abc", "invites to a swarm"),
        ("http://192.0.2.7:8000/", "no link to a coordinator"),
        ("192.0.2.7#digits.abc", "no link to a coordinator"),
        ("", "no link to a coordinator"),
        ("http://192.0.2.7/#digits.abc", "mistyped"),
    ],
)
def test_text_that_is_no_link_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(InviteError, match=message):
        parse_link(text)


def test_a_link_to_a_run_with_an_allowlist_admits_nobody_by_itself() -> None:
    allow = Allowlist(("alice",))
    entrance = RunAccess.create("digits", organizer, access="allowlist", allow=allow, key_file=None)
    _, invite = parse_link(str(invitation_at(URL, issue(entrance, organizer, hours=1.0))))
    with pytest.raises(InviteError, match="admits each peer"):
        token_by(invite, alice)
    grant, now = invite.grant, time.time()
    assert grant is not None
    forged = Membership.by_invitation(grant, invite.key, key=alice.public_key, now=now).encode()
    header = Token(alice, lambda: forged).header("GET", "/", now=now)
    with pytest.raises(NotAdmitted):
        RequestGate(entrance.admission).check(header, "GET", "/", now=now)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://172.28.0.12:8000/", True),
        ("http://[::1]:80/", True),
        (URL, False),
        ("https://a.test/", False),
    ],
)
def test_a_link_shows_who_can_use_it(monkeypatch: pytest.MonkeyPatch, url: str, local: bool) -> None:
    monkeypatch.setattr("colab_swarm.project.repository", lambda: "https://github.com/alice/swarm")
    _, invite = parse_link(issued("open")[0])
    invitation = invitation_at(url, invite)
    assert ("same local network" in invitation.warning and "tunnel=" in invitation.warning) is local
    assert "volunteer.ipynb" in invitation._repr_mimebundle_()["text/html"]
