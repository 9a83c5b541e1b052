"""Requests are let in by signature, time and membership."""

from __future__ import annotations

import base64
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import NotAdmitted
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Grant, Membership, MembershipAdmission
from colab_swarm.net.peers import Role
from colab_swarm.workunits.tokens import NO_BODY, RequestGate, Token

NOW = 1_700_000_000.0
RUN = "digits-0011"
organizer, alice = Identity(b"o" * 32), Identity(b"a" * 32)


def membership(role: Role = Role.WORKER, *, until: float = NOW + 3600) -> bytes:
    unsigned = Membership(RUN, role, alice.public_key, "alice", NOW - 60, until)
    return unsigned.signed(organizer.sign).encode()


def gate() -> RequestGate:
    return RequestGate(MembershipAdmission(RUN, authority=organizer.public_key, own=organizer.public_key))


def test_a_member_is_let_in_with_the_digest_that_its_body_must_have() -> None:
    header = Token(alice, membership()).header("GET", "/api/job", now=NOW)
    assert gate().check(header, "GET", "/api/job", now=NOW + 2) == (alice.id, NO_BODY)
    assert gate().check(Token(organizer).header("GET", "/", now=NOW), "GET", "/", now=NOW)[0] == organizer.id


def test_an_invited_peer_is_admitted_while_the_authority_is_offline() -> None:
    invitation = Identity(os.urandom(32))
    grant = Grant(RUN, Role.WORKER, invitation.public_key, NOW + 60, NOW + 3600).signed(organizer.sign)
    shown = Membership.by_invitation(grant, invitation, key=alice.public_key, now=NOW).encode()
    assert gate().check(Token(alice, shown).header("GET", "/", now=NOW), "GET", "/", now=NOW)[0] == alice.id


def test_an_open_run_admits_every_peer_that_signs() -> None:
    assert (
        RequestGate(None).check(Token(alice).header("GET", "/", now=NOW), "GET", "/", now=NOW)[0] == alice.id
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (Token(alice, membership()).header("GET", "/api/code", now=NOW), "another path"),
        (Token(alice, membership()).header("PUT", "/api/job", now=NOW), "another path"),
        (Token(alice, membership()).header("GET", "/api/job", now=NOW - 61), "set your clock"),
        (Token(alice, membership()).header("GET", "/api/job", now=NOW + 61), "set your clock"),
        (Token(alice, membership(until=NOW - 700)).header("GET", "/api/job", now=NOW), "ended"),
        (Token(alice, membership(Role.VIEWER)).header("GET", "/api/job", now=NOW), "joined as a viewer"),
        (Token(alice).header("GET", "/api/job", now=NOW), "no membership"),
        (Token(Identity(), membership()).header("GET", "/api/job", now=NOW), "another peer's"),
        ("", "no token"),
        ("Basic YTpi", "no token"),
        ("Swarm ####", "cannot be read"),
        ("Swarm " + "A" * 100_000, "no token"),
    ],
)
def test_others_are_refused_with_a_reason(header: str, message: str) -> None:
    with pytest.raises(NotAdmitted, match=message):
        gate().check(header, "GET", "/api/job", now=NOW)


def test_a_request_is_good_once() -> None:
    door, header = gate(), Token(alice, membership()).header("GET", "/", now=NOW)
    door.check(header, "GET", "/", now=NOW)
    with pytest.raises(NotAdmitted, match="sent before"):
        door.check(header, "GET", "/", now=NOW + 59)


def test_nonces_are_forgotten_when_their_requests_are_too_old_anyway() -> None:
    door, token = gate(), Token(alice, membership(until=NOW + 1e6))
    for minute in range(100):
        door.check(token.header("GET", "/", now=NOW + 60 * minute), "GET", "/", now=NOW + 60 * minute)
    assert len(door._seen) <= 4


@given(st.binary(max_size=400))
def test_garbage_is_no_token(noise: bytes) -> None:
    with pytest.raises(NotAdmitted):
        gate().check("Swarm " + base64.urlsafe_b64encode(noise).decode(), "GET", "/", now=NOW)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    text = Token(alice, membership()).header("GET", "/", now=NOW).removeprefix("Swarm ")
    data = bytearray(base64.urlsafe_b64decode(text))
    data[place % len(data)] ^= change
    with pytest.raises(NotAdmitted):
        gate().check("Swarm " + base64.urlsafe_b64encode(data).decode(), "GET", "/", now=NOW)
