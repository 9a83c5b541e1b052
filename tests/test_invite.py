"""Invitations: what a person may do to a line of text before pasting it."""

import base64
import re
import time
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import InviteError
from colab_swarm.invite import LOCAL_ONLY, VERSION, Invite, _check
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Grant
from colab_swarm.net.peers import Contact, PeerId, Role
from colab_swarm.project import update

RUN, END = "my-run-0badcafe", 1000.0
ENTRY = Contact(PeerId(b"e" * 32), ("ws://203.0.113.7:4500",))
OTHER = Contact(PeerId(b"f" * 32), ("ws://198.51.100.23:4500",))
OPEN = Invite(RUN, (ENTRY,), END)
AUTHORITY, ALICE = (Identity(sha256(name).digest()) for name in (b"authority", b"alice"))
SECRET = sha256(b"secret").digest()


def make(access: Any = "invite", *, uses: int = 0, role: Role = Role.WORKER) -> Invite:
    offline = access == "invite" and not uses
    grant = Grant(RUN, role, Identity(SECRET).public_key, END, END + 3600, uses, offline)
    signed = grant.signed(AUTHORITY.sign)
    return Invite.issue(signed, SECRET, (ENTRY, OTHER), access=access, authority=AUTHORITY.public_key)


INVITE = make()
ANY = pytest.mark.parametrize("invite", [OPEN, INVITE, make("allowlist"), make(uses=3)], ids=repr)


def packed(body: bytes) -> str:
    return "#" + base64.urlsafe_b64encode(body + _check(body)).decode()


@ANY
def test_an_invitation_survives_the_trip_and_names_the_run(invite: Invite) -> None:
    assert str(invite).startswith("swarm://my-run.")
    assert Invite.parse(str(invite), now=999.0) == invite
    assert len(str(invite)) < 700
    # without the secret
    assert re.fullmatch(r"Invite\(my-run-0badcafe, \w+, worker, [12] entries\)", repr(invite))


def test_line_breaks_quotes_and_spaces_do_not_matter() -> None:
    text = str(INVITE)
    code = INVITE.code
    for spoilt in (
        f"  '{text[:60]}\n{text[60:]}' ",
        f"<{text}>",
        f"[join]({text}).",
        f"{text[:90]}\u200b{text[90:]}",
        *(
            f"{start}{code}" for start in ("https://example.org/join#", "http://localhost/#", "")
        ),  # for web servers
    ):
        assert Invite.parse(spoilt, now=0.0) == INVITE
    dotted = msgspec.structs.replace(OPEN, run_id="gpt-2.5_b.x-0badcafe")
    assert "//gpt-2.5_b.x." in str(dotted) and Invite.parse(str(dotted), now=0.0) == dotted


@pytest.mark.parametrize(
    ("late_s", "words"), [(3600.0, "60 minutes"), (7 * 3600.0, "7 hours"), (90e6, "1042 days")]
)
def test_an_expired_invitation_says_since_when_and_names_both_clocks(late_s: float, words: str) -> None:
    at = time.strftime("%d %B %Y %H:%M UTC", time.gmtime(END + late_s))
    said = (
        f"expired {words} ago, by the clock of this machine: ask for a new one. If it is new, the "
        f"clock here or the one of its creator is off by more than {words}: here it is {at}"
    )
    with pytest.raises(InviteError, match=re.escape(said)):
        Invite.parse(str(INVITE), now=END + late_s)


def test_an_invitation_of_another_version_says_what_to_do() -> None:
    with pytest.raises(InviteError, match=f"version 9.*{re.escape(update())}"):
        Invite.parse(packed(bytes([9]) + INVITE.encode()), now=0.0)


@ANY
def test_an_invitation_with_a_page_is_a_link_to_it(invite: Invite) -> None:
    linked = invite.replaced(page="https://run.example.org:8443")
    assert str(linked) == f"https://run.example.org:8443/join#{linked.code}"
    assert Invite.parse(f" {str(linked)[:60]}\n {str(linked)[60:]} ", now=0.0) == linked
    assert linked.grant == invite.grant and str(linked.replaced(page="")) == str(invite)


@pytest.mark.parametrize(
    "page",
    ["javascript:alert(1)", "http://example.org", "https://a/b", "https://a b", "https://", "https://a#"],
)
def test_a_page_is_a_host_with_https(page: str) -> None:
    with pytest.raises(InviteError, match="cannot be read"):
        Invite.parse(str(INVITE.replaced(page=page)), now=0.0)


def test_an_invited_peer_passes_the_invitation_on_with_other_entries() -> None:
    passed_on = Invite.parse(str(INVITE.replaced(entries=(OTHER,))), now=0.0)
    assert passed_on.entries == (OTHER,) and passed_on.grant == INVITE.grant
    assert Invite.parse(str(OPEN.replaced(entries=(OTHER,))), now=0.0).entries == (OTHER,)


def test_settings_travel_along_and_those_that_cannot_be_read_are_refused_at_once() -> None:
    settings = {"target_batch_size": 4096, "codec": "float16", "lr": 1e-3}
    assert Invite.parse(str(INVITE.with_settings(settings)), now=0.0).settings == settings
    wrong: Any
    for wrong in ({"text": "x" * 65}, {"n" * 33: 1}, dict.fromkeys("abcdefghijklmnopq", 1), {"lr": [1]}):
        with pytest.raises(ValueError, match="at most 16 settings"):
            INVITE.with_settings(wrong)


RIGHTS: dict[str, Any] = {"run_id": "other-run-1", "access": "allowlist", "role": Role.REDUCER, "uses": 5}
RIGHTS |= {"expires_at": END + 9e5, "member_until": END + 9e9, "grant_signature": bytes(64)}
RIGHTS |= {"authority": ALICE.public_key, "secret": sha256(b"another").digest()}


@pytest.mark.parametrize("field", RIGHTS)
def test_only_the_authoritys_key_changes_the_rights(field: str) -> None:
    changed = msgspec.structs.replace(INVITE, **{field: RIGHTS[field]})
    with pytest.raises(InviteError, match="tampered with: ask for a new one"):
        Invite.parse(str(changed.signed(changed.key.sign)), now=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": (OTHER,)},
        {"settings": {"lr": 1}},
        {"page": "https://example.com"},
        {"signature": b""},
        {"access": "open"},
    ],
)
def test_only_the_invitations_key_changes_the_rest(change: dict[str, Any]) -> None:
    changed = msgspec.structs.replace(INVITE, **change)
    with pytest.raises(InviteError, match="tampered"):
        Invite.parse(packed(bytes([VERSION]) + changed.encode()), now=0.0)


@given(st.integers(0, 2000), st.sampled_from("aAzZ09-_"))
def test_a_mistyped_letter_is_noticed(at: int, letter: str) -> None:
    text = str(INVITE)
    begin = text.rindex(".") + 1
    at = begin + at % (len(text) - begin)
    wrong = text[:at] + letter + text[at + 1 :]
    if wrong != text:
        with pytest.raises(InviteError, match="mistyped"):
            Invite.parse(wrong, now=0.0)


@pytest.mark.parametrize(
    "link",
    [
        "https://colab.research.google.com/drive/1AbC?usp=sharing",
        "https://colab.research.google.com/github/me/mine/blob/main/a.ipynb#scrollTo=xyz",
        "https://www.kaggle.com/code/me/mine",
        "http://localhost:8888/lab/tree/notebooks/mine.ipynb",
    ],
)
def test_the_link_of_a_notebook_is_called_that(link: str) -> None:
    with pytest.raises(InviteError, match="this is a link to a notebook, not an invitation: ask"):
        Invite.parse(link)


@given(st.integers(0, 2000), st.integers(1, 255))
def test_a_changed_byte_is_noticed_though_the_checksum_fits(at: int, flip: int) -> None:
    body = bytearray(bytes([VERSION]) + INVITE.encode())
    body[at % len(body)] ^= flip
    with pytest.raises(InviteError):
        Invite.parse(packed(bytes(body)), now=0.0)


@given(st.text(max_size=300), st.binary(max_size=400))
def test_any_text_and_any_body_give_an_invitation_or_one_clear_sentence(text: str, body: bytes) -> None:
    for pasted in (text, packed(bytes([VERSION]) + body)):
        with pytest.raises(InviteError):
            Invite.parse(pasted)
    with pytest.raises(InviteError, match="not an invitation"):
        Invite.parse("x" * 100_000)


@pytest.mark.parametrize(
    ("addresses", "local"),
    [
        ("ws://127.0.0.1:1 ws://192.168.1.5:1", True),
        ("ws://172.28.0.12:1", True),
        ("ws://[fd00::1]:1", True),
        (f"ws://10.0.0.7:1/relay/{'0' * 64}", True),
        ("ws://192.168.1.5:1 ws://203.0.113.7:1", False),
        ("wss://words.ngrok.app", False),
        (f"ws://203.0.113.7:1/relay/{'0' * 64}", False),
        ("ws://[2001:db8::1]:1", False),
    ],
)
def test_an_invitation_warns_if_all_its_addresses_are_private(addresses: str, local: bool) -> None:
    invite = OPEN.replaced(entries=(Contact(ENTRY.id, tuple(addresses.split())),))
    assert invite.warning == (LOCAL_ONLY if local else "")
    assert LOCAL_ONLY.count(". ") == 0 and all(way in LOCAL_ONLY for way in ("tunnel", "create", "relay"))
