"""Invitations: what a person may do to a line of text before pasting it."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import InviteError
from colab_swarm.invite import CHECK_BYTES, Invite, _check
from colab_swarm.net.peers import Contact, PeerId

ENTRY = Contact(PeerId(b"e" * 32), ("ws://127.0.0.1:4500",))
INVITE = Invite("my-run-0badcafe", (ENTRY,), expires_at=1000.0)


def test_an_invitation_survives_the_trip_and_names_the_run() -> None:
    assert str(INVITE).startswith("swarm://my-run#")
    assert Invite.parse(str(INVITE), now=999.0) == INVITE


def test_line_breaks_quotes_and_spaces_do_not_matter() -> None:
    text = str(INVITE)
    assert Invite.parse(f"  '{text[:40]}\n{text[40:]}' ", now=0.0) == INVITE


def test_an_expired_invitation_says_since_when() -> None:
    with pytest.raises(InviteError, match="expired 2 hours ago: ask for a new one"):
        Invite.parse(str(INVITE), now=1000.0 + 7200)


def test_an_invitation_of_the_future_says_to_upgrade() -> None:
    head, _, payload = str(INVITE).partition("#")
    body = bytearray(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))[:-CHECK_BYTES])
    body[0] = 9
    future = base64.urlsafe_b64encode(bytes(body) + _check(bytes(body))).decode()
    with pytest.raises(InviteError, match=r"version 9.*pip install -U"):
        Invite.parse(f"{head}#{future}", now=0.0)


@given(st.integers(16, 200), st.sampled_from("aAzZ09-_"))
def test_a_mistyped_letter_is_noticed(at: int, letter: str) -> None:
    text = str(INVITE)
    at = min(at, len(text) - 1)
    wrong = text[:at] + letter + text[at + 1 :]
    if wrong != text and at > text.index("#"):
        with pytest.raises(InviteError, match="mistyped"):
            Invite.parse(wrong, now=0.0)


@given(st.text(max_size=300))
def test_any_text_gives_an_invitation_or_one_clear_sentence(text: str) -> None:
    with pytest.raises(InviteError):
        Invite.parse(text)


def test_a_whole_page_pasted_is_refused() -> None:
    with pytest.raises(InviteError, match="no invitation"):
        Invite.parse("x" * 100_000)
