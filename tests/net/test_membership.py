"""Memberships: who may be what, checked offline; every field is protected, every bound holds."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import NotAdmitted, PeerUnreachable, ProtocolError
from colab_swarm.net import membership as module
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import GUEST_S, Grant, Membership, MembershipAdmission, whoami
from colab_swarm.net.peers import PeerId, Role
from tests.net.swarm import run, served

RUN, NOW, HOUR = "my-run-0badcafe", 1_750_000_000.0, 3600.0
NAMES = b"auth", b"alice", b"bob", b"link"
AUTHORITY, ALICE, BOB, LINK = (Identity(sha256(name).digest()) for name in NAMES)


def grant(sign: Any = AUTHORITY.sign, **changes: Any) -> Grant:
    plain = Grant(RUN, Role.WORKER, LINK.public_key, NOW + HOUR, NOW + 10 * HOUR)
    return msgspec.structs.replace(plain, **changes).signed(sign)


def membership(sign: Any = AUTHORITY.sign, **changes: Any) -> Membership:
    plain = Membership(RUN, Role.WORKER, ALICE.public_key, "alice", NOW, NOW + 4 * HOUR)
    return msgspec.structs.replace(plain, **changes).signed(sign)


def admission(own: Identity = BOB) -> MembershipAdmission:
    return MembershipAdmission(RUN, authority=AUTHORITY.public_key, own=own.public_key)


def admit(shown: Membership, *, at: MembershipAdmission | None = None, now: float = NOW) -> Role:
    return (at or admission()).admit(ALICE.public_key, shown.encode(), now=now)


def refused(shown: Membership | bytes, match: str, *, now: float = NOW) -> None:
    data = shown if isinstance(shown, bytes) else shown.encode()
    with pytest.raises(NotAdmitted, match=match) as error:
        admission().admit(ALICE.public_key, data, now=now)
    assert len(str(error.value).encode()) <= 100  # it travels as a WebSocket's close reason


def test_a_peer_without_membership_is_a_guest_for_a_minute_at_the_authority_alone() -> None:
    refused(b"", "no membership: join with an invitation")
    assert admission(AUTHORITY).admit(ALICE.public_key, b"garbage", now=NOW) is Role.GUEST
    at = admission(AUTHORITY)
    for seconds in (0, GUEST_S):
        assert at.admit(ALICE.public_key, b"", now=NOW + seconds) is Role.GUEST
    with pytest.raises(NotAdmitted, match="no membership was requested in a minute"):
        at.admit(ALICE.public_key, b"", now=NOW + GUEST_S + 1)
    assert at.admit(ALICE.public_key, b"", now=NOW + GUEST_S + 2) is Role.GUEST
    assert admit(membership(), at=at, now=NOW + GUEST_S + 3) is Role.WORKER
    for minutes in (3, 63, 123):  # it comes again
        assert at.admit(ALICE.public_key, b"", now=NOW + minutes * GUEST_S) is Role.GUEST
    at = admission(AUTHORITY)
    for i in range(module.MAX_GUESTS):
        at.admit(i.to_bytes(32), b"", now=NOW)
    with pytest.raises(NotAdmitted, match="too many peers request"):
        at.admit(ALICE.public_key, b"", now=NOW + GUEST_S)
    assert at.admit(ALICE.public_key, b"", now=NOW + GUEST_S + 1) is Role.GUEST


def test_a_membership_ends_with_ten_minutes_of_slack_for_clocks() -> None:
    end, at = NOW + 4 * HOUR, admission()
    assert admit(membership(), at=at, now=end + module.SLACK_S) is Role.WORKER
    with pytest.raises(NotAdmitted, match="ended 3 hours ago: join again with an invitation"):
        admit(membership(), at=at, now=end + 3 * HOUR)  # also where it was read before
    assert admit(membership(), now=NOW - module.SLACK_S) is Role.WORKER
    refused(membership(), "starts in 2 hours: set the clock that is off", now=NOW - 2 * HOUR)


def under(given: Grant, **changes: Any) -> Membership:
    plain = Membership.by_invitation(given, LINK, key=ALICE.public_key, now=NOW)
    return msgspec.structs.replace(plain, **changes).signed(LINK.sign)


WRONG_SIGNATURE, NOT_THE_AUTHORITY = "signature is wrong", "not signed by this run's authority"


@pytest.mark.parametrize(
    ("shown", "match"),
    [
        # what even the authority cannot sign
        (membership(key=BOB.public_key), "another peer's"),
        (membership(run_id="other-run-1"), "another run"),
        (membership(role=Role.AUTHORITY), "cannot be granted"),
        (membership(role=Role.GUEST), "cannot be granted"),
        # an invitation cannot give more than it has
        (under(grant(role=Role.VIEWER), role=Role.WORKER), "more than its invitation allows"),
        (under(grant(), expires_at=NOW + 11 * HOUR), "more than its invitation allows"),
        (under(grant(join_until=NOW - 1.0)), "more than its invitation allows"),
        (under(grant(run_id="other-run-1"), run_id=RUN), "another run"),
        (under(grant(sign=BOB.sign)), NOT_THE_AUTHORITY),
        (under(grant(uses=3, offline=False)), "only good at the authority"),
        (under(grant(uses=3)), "only good at the authority"),
        # the signer must be the one that the chain names
        (membership(sign=BOB.sign), WRONG_SIGNATURE),
        (membership(sign=LINK.sign), WRONG_SIGNATURE),
        (membership(grant=grant()), WRONG_SIGNATURE),  # by the authority, yet under a grant
        (membership(grant=grant(), sign=BOB.sign), WRONG_SIGNATURE),
        (bytes(module.MAX_MEMBERSHIP_BYTES), "cannot be read"),
        (bytes(module.MAX_MEMBERSHIP_BYTES + 1), "too long"),
    ],
)
def test_a_membership_that_nobody_may_give_is_refused(shown: Membership | bytes, match: str) -> None:
    refused(shown, match)


def test_every_field_of_a_membership_and_of_a_grant_is_protected() -> None:
    later = NOW + 99 * HOUR
    of_membership: dict[str, Any] = {"role": Role.REDUCER, "name": "mallory", "signature": bytes(64)}
    of_membership |= {"issued_at": NOW - 1.0, "expires_at": later}
    for field, value in of_membership.items():
        refused(msgspec.structs.replace(membership(), **{field: value}), WRONG_SIGNATURE)
    of_grant: dict[str, Any] = {"role": Role.VIEWER, "key": BOB.public_key, "signature": bytes(64)}
    of_grant |= {"uses": 1, "offline": False, "join_until": later, "member_until": later}
    for field, value in of_grant.items():
        refused(under(msgspec.structs.replace(grant(), **{field: value})), NOT_THE_AUTHORITY)


@given(st.binary(max_size=3000))
def test_any_bytes_are_no_membership_and_no_revocations(data: bytes) -> None:
    refused(data, "membership")
    with pytest.raises(ProtocolError):
        admission().learn(data)


def revocations(*subjects: PeerId, version: int = 1, sign: Any = AUTHORITY.sign, run_id: str = RUN) -> bytes:
    return module.Revocations(run_id, version, subjects).signed(sign).encode()


def test_a_list_of_revocations_through_its_life() -> None:
    at, invited = admission(), Membership.by_invitation(grant(), LINK, key=ALICE.public_key, now=NOW)
    assert admit(invited, at=at) is Role.WORKER
    assert at.learn(revocations(LINK.id))
    with pytest.raises(NotAdmitted, match="revoked"):
        admit(invited, at=at)
    assert admit(membership(), at=at) is Role.WORKER
    assert at.learn(revocations(ALICE.id, version=5))
    with pytest.raises(NotAdmitted, match="revoked"):
        admit(membership(), at=at)
    guarded = admission(AUTHORITY)
    guarded.learn(revocations(ALICE.id))
    with pytest.raises(NotAdmitted, match="revoked"):  # not even a guest
        guarded.admit(ALICE.public_key, b"", now=NOW)
    # only newer ones by the authority are taken
    assert not at.learn(revocations(version=5)) and not at.learn(revocations(version=4))
    for forged in (revocations(version=6, sign=BOB.sign), revocations(version=6, run_id="other-run")):
        with pytest.raises(ProtocolError, match="not signed"):
            at.learn(forged)
    assert at.revoked.subjects == (ALICE.id,)
    # it is bounded, and forgets the oldest
    subjects = tuple(PeerId(i.to_bytes(32)) for i in range(module.MAX_REVOKED))
    more = module.Revocations(RUN, 7, subjects).adding(ALICE.id, now=NOW, sign=AUTHORITY.sign)
    assert more.subjects == (*subjects[1:], ALICE.id) and more.version == int(NOW)
    assert len(more.encode()) < 32_000  # a record of the DHT
    again = more.adding(ALICE.id, now=0.0, sign=AUTHORITY.sign)
    assert again.subjects == more.subjects and again.version == more.version + 1
    assert admission().learn(again.encode())


TOKEN = "hf_secretsecret"
ACCOUNT = {"type": "user", "name": "alice", "orgs": [{"name": "neuropark", "id": "1"}], "auth": {"type": "x"}}
BIGGEST = json.dumps(ACCOUNT).encode().ljust(module.MAX_ANSWER_BYTES)


@asynccontextmanager
async def hub(answer: Any = ACCOUNT, status: int = 200) -> AsyncIterator[None]:
    async def answer_whoami(request: web.BaseRequest) -> web.Response:
        if request.path != "/api/whoami-v2" or request.headers["Authorization"] != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials"}, status=401)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return web.Response(body=body, status=status, headers={"Location": "/elsewhere"})

    with pytest.MonkeyPatch.context() as patch:
        async with served(answer_whoami) as at:
            patch.setenv("HF_ENDPOINT", f"http://{at}/")
            yield


async def test_a_token_names_its_user_and_organisations() -> None:
    async with hub(BIGGEST):
        assert await whoami(TOKEN) == module.Account("alice", orgs=(module.Account("neuropark"),))
        assert await whoami("hf_other") is None
    async with hub({"type": "org", "name": "neuropark"}):
        assert await whoami(TOKEN) is None


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        *((answer, 200) for answer in (b"<html>", b"", b'{"name":"\xff"}', b"[" * 100_000, BIGGEST + b" ")),
        *(({"orgs": 3}, 200), (ACCOUNT, 503), (ACCOUNT, 302)),
    ],
)
def test_a_hub_in_trouble_is_reported_without_the_token(
    answer: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with hub(answer, status):
            with pytest.raises(PeerUnreachable, match="try again later") as error:
                await whoami(TOKEN)
            assert TOKEN not in repr(error.value)

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "x" * 600])
async def test_what_cannot_be_a_token_is_not_sent(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert await whoami(token) is None
    with pytest.raises(PeerUnreachable, match="does not answer"):
        await whoami(TOKEN)
