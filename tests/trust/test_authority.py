"""From `create` over an invitation to `join`: who is let in by an invitation alone, a counted one, by name."""

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from colab_swarm.errors import CallRefused, JoinError, PeerError, PeerUnreachable
from colab_swarm.events import Notice
from colab_swarm.invite import Access
from colab_swarm.net.membership import Account, Grant
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.trust.access import RunAccess
from colab_swarm.trust.authority import AuthorityBook, RequestMembership
from tests.net.swarm import identity, until
from tests.trust.run import ALLOW, RUN, Clock, Echo, Peer, call, found, run_with

HOUR = 3600.0


@pytest.mark.parametrize("access", ["open", "invite"])
async def test_an_invited_peer_takes_part_and_invites_others(access: Access) -> None:
    async with run_with(access=access) as (here, (authority,)):
        alice = await here.start("alice", here.invite(settings={"tokenizer": "me/own"}))
        bob = await here.start("bob", invitation := alice.invite(), clock=Clock(-540.0))
        entry = alice if access == "open" else authority
        assert bob.access.entries[0].id == entry.node.id
        assert invitation.settings == {"tokenizer": "me/own"}
        bob.trust.start()
        assert await call(bob, alice) == Echo(b"in")


async def test_an_unusable_invitation_is_not_made() -> None:
    async with run_with(access="open") as (here, _):
        with pytest.raises(PermissionError, match="open run"):
            here.invite(role="viewer")
        with pytest.raises(ValueError, match="more than 0 hours"):
            here.invite(hours=-1.0)
    async with run_with() as (here, _):
        for figures in ({"hours": 0.0}, {"uses": -1}, {"uses": 1_000_000}):
            with pytest.raises(ValueError, match=r"hours=0\.0|uses=-1|uses=1000000"):
                here.invite(**figures)
    async with run_with(listen=False) as (here, (authority,)):
        with pytest.raises(JoinError, match="start one on any machine"):
            here.invite()
        authority.node.addresses = (f"ws://203.0.113.7:4500/relay/{'a' * 64}",)
        assert here.invite().entries == (authority.node.contact,)
        with pytest.raises(JoinError, match="requires that others can dial this peer"):
            here.invite(uses=3)


def test_a_key_file_makes_the_same_run_again_and_a_run_that_cannot_be_created_says_why(
    tmp_path: Path,
) -> None:
    for access in ("open", "invite"):
        first, again = (found(access=access, key_file=tmp_path / "key") for _ in range(2))  # type: ignore[arg-type]
        assert first.run_id == again.run_id != found(access=access).run_id  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is the key of the run 'my-run': use another file for 'other'"):
        found("other", key_file=tmp_path / "key")
    with pytest.raises(ValueError, match="no run name"):
        found("My Run")
    with pytest.raises(ValueError, match="need each other"):
        RunAccess.create("my-run", identity("a"), access="invite", allow=ALLOW, key_file=None)


async def test_secrets_are_in_no_repr() -> None:
    async with run_with() as (here, _):
        access = RunAccess.from_invitation(invitation := here.invite(), identity("alice"), token="hf_secret")
    shown = repr(access) + repr(RequestMembership(b"proof", "hf_secret"))
    assert "hf_secret" not in shown and repr(invitation.secret) not in shown


async def test_an_invitation_admits_while_the_authority_sleeps_and_a_counted_one_does_not() -> None:
    async with run_with("alice") as (here, (authority, alice)):
        invitation, counted = here.invite(), here.invite(uses=1)
        await here.leave(authority)
        with pytest.raises(JoinError, match=r"only the organizer's peer can admit you.*Is it running"):
            await here.start("carol", msgspec.structs.replace(counted, entries=()))
        bob = await here.start("bob", invitation)
        assert await call(bob, alice) == Echo(b"in")
        assert alice.node.role_of(bob.node.id) is Role.WORKER


def notices(peer: Peer, about: str) -> list[str]:
    return [one.text for one in peer.events.recent(Notice) if one.text.startswith(about)]


async def test_the_authority_replaces_a_self_signed_membership_and_all_take_the_new_one() -> None:
    async with run_with("alice", "bob") as (_, (authority, alice, bob)):
        await call(alice, bob)
        await alice.member.tick()
        assert alice.shown.grant is None
        assert notices(alice, "membership renewed for ") == ["membership renewed for 168.0 h"]
        (link,) = bob.node.table.of(alice.node.id)
        assert link.remote.membership == alice.admission.membership
        assert authority.node.role_of(alice.node.id) is Role.WORKER


async def test_a_counted_invitation_admits_its_number_and_refuses_the_next() -> None:
    async with run_with("alice") as (here, (_, alice)):
        invitation = here.invite(uses=1)
        bob = await here.start("bob", invitation)
        assert await call(bob, alice) == Echo(b"in") and bob.shown.grant is None
        with pytest.raises(JoinError) as error:
            await here.start("carol", invitation)
        assert str(error.value).splitlines() == [
            f"my-run does not admit peer {here.peers[-1].node.id.hex()[:8]}",
            "why: this invitation was for 1 peer, and all have joined",
            "what to do: ask for an invitation of your own",
            f"whom to ask: the organizer (peer {here.peers[0].node.id.hex()[:8]})",
        ]
        with pytest.raises(PeerError, match="no membership"):
            await call(here.peers[-1], alice)


async def test_a_viewer_reads_but_neither_calls_nor_publishes_and_passes_its_invitation_on() -> None:
    async with run_with("alice") as (here, (authority, alice)):
        victor = await here.start("victor", here.invite(role="viewer", uses=1))
        assert authority.node.role_of(victor.node.id) is Role.VIEWER
        with pytest.raises(CallRefused, match="needs the role worker; yours is viewer"):
            await call(victor, alice)
        assert await victor.dht.get("anything") == {}
        assert await victor.dht.publish("anything", 1, ttl_s=60) == 0
        with pytest.raises(PermissionError, match="only the organizer's peer chooses"):
            victor.invite(role="worker")
        passed_on = victor.invite()
        assert passed_on.role is Role.VIEWER and passed_on.uses == 1


async def test_neither_anothers_proof_nor_a_name_without_an_invitation_is_enough() -> None:
    async with run_with("alice", access="invite") as (here, (authority, alice)):
        forged = msgspec.structs.replace(here.invite(uses=1), secret=bytes(31) + b"x")
        with pytest.raises(JoinError):
            await here.start("mallory", forged)
        for ask in map(RequestMembership, (alice.admission.membership, b"", b"garbage")):
            with pytest.raises(CallRefused, match="does not admit peer"):
                await here.peers[-1].node.call(authority.node.id, ask, RequestMembership, timeout_s=5)
    async with run_with(access="allowlist") as (here, (authority,)):
        forged = msgspec.structs.replace(here.invite(), secret=bytes(31) + b"x")
        with pytest.raises(JoinError, match="not signed by this run's authority"):
            await here.start("alice", forged, "hf_alice")
        assert authority.node.role_of(here.peers[-1].node.id) is Role.GUEST


ACCOUNTS = {
    "hf_alice": Account("Alice"),
    "hf_bob": Account("bob", orgs=(Account("cats"), Account("NeuroPark"))),
    "hf_mallory": Account("mallory", orgs=(Account("burglars"),)),
}


@pytest.fixture(autouse=True)
def stand_in_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    async def whoami(token: str) -> Account | None:
        if token == "hf_later":
            raise PeerUnreachable("the Hub answers 503: try again later")
        return ACCOUNTS.get(token)

    monkeypatch.setattr("colab_swarm.trust.authority.whoami", whoami)


async def test_accounts_on_the_list_are_admitted_for_four_hours_and_put_out_when_they_leave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_with(access="allowlist") as (here, _):
        invitation = here.invite()
        alice, bob = [await here.start(name, invitation, f"hf_{name}") for name in ("alice", "bob")]
        assert await call(alice, bob) == Echo(b"in")
        assert [alice.shown.name, bob.shown.name] == ["Alice", "bob"]
        assert bob.shown.expires_at - bob.shown.issued_at == 4 * HOUR
        for peer in here.peers:
            peer.sleep(2.5 * HOUR)
        monkeypatch.setitem(ACCOUNTS, "hf_bob", Account("bob"))
        await bob.member.tick()
        (ending,) = notices(bob, "membership ends in ")
        assert "not on the list" in ending and 1.4 <= float(ending.split()[3]) <= 1.6
        for peer in here.peers:
            peer.sleep(2.5 * HOUR)
        alice.node.recheck()
        await until(lambda: alice.node.id not in bob.node.linked())
        with pytest.raises(PeerError, match="ended"):
            await call(bob, alice)


@pytest.mark.parametrize(
    ("token", "first", "why", "do"),
    [
        ("hf_mallory", "mallory of Hugging Face", "not on the list", "or join neuropark at https://hugg"),
        ("hf_wrong", "your token", "does not know this token", "copy it again"),
        ("hf_later", "your token", "answers 503", "try again in a minute"),
        ("", "a peer without a name", "you gave no token", "set HF_TOKEN"),
    ],
)
async def test_an_unlisted_account_gets_four_lines_of_help(token: str, first: str, why: str, do: str) -> None:
    async with run_with(access="allowlist") as (here, _):
        with pytest.raises(JoinError) as error:
            await here.start("mallory", here.invite(), token)
        lines = str(error.value).splitlines()
        assert len(lines) == 4 and first in lines[0] and why in lines[1] and do in lines[2]
        assert "organizer" in lines[3] and not (token and token in str(error.value))


async def test_a_membership_that_ended_while_the_authority_was_away_is_renewed_when_it_is_back() -> None:
    async with run_with(access="allowlist") as (here, (authority,)):
        alice = await here.start("alice", here.invite(hours=1), "hf_alice")
        await here.leave(authority)
        for hours in (2.5, 2.5):
            alice.sleep(hours * HOUR)
            await alice.member.tick()
        (ending,) = notices(alice, "membership ends in ")  # silent while there is time
        assert ": the organizer's peer cannot be reached for a new one: " in ending
        again = await here.start("authority", clock=alice.clock)
        alice.node.learn(again.node.contact)
        alice.sleep(700.0)
        await alice.member.tick()
        assert again.node.role_of(alice.node.id) is Role.WORKER
        assert len(notices(alice, "membership renewed for ")) == 1


async def test_a_membership_that_ends_in_a_bucket_asks_for_a_new_invitation() -> None:
    async with run_with("alice") as (here, (authority, alice)):
        alice.member.access = replace(alice.access, mailbox="s3://box/run")
        await here.leave(authority)
        alice.sleep(7.5 * 24 * HOUR)
        await alice.member.tick()
        (ending,) = notices(alice, "membership ends in ")
        assert "ask the organizer for a new invitation, and join by it with the same state_dir" in ending


NOW = 1_750_000_000.0
ALICE, BOB, CAROL = (PeerId(name * 32) for name in (b"a", b"b", b"c"))


def grant(uses: int, key: bytes = b"k", until: float = NOW + 60) -> Grant:
    return Grant(RUN, Role.WORKER, key * 32, until, NOW + 9999, uses, False)


def test_uses_are_counted_by_peer_until_the_invitation_ends() -> None:
    book = AuthorityBook(RUN)
    used = [book.use(grant(2), peer, now=NOW) for peer in (ALICE, BOB, ALICE, CAROL, BOB)]
    assert used == [True, True, True, False, True], "coming again is free"
    assert all(book.use(grant(0), peer, now=NOW) for peer in (ALICE, BOB, CAROL))
    assert len(book.used) == 1
    for key, now, kept in ((b"l", NOW + 660, 2), (b"m", NOW + 661, 2)):
        assert book.use(grant(1, key, until=now + 60), CAROL, now=now)
        assert len(book.used) == kept  # a minute, and 10 minutes of slack


def test_the_book_survives_a_restart_and_a_damaged_one_is_not_overwritten(tmp_path: Path) -> None:
    book = AuthorityBook.of(RUN, tmp_path / "me.key")
    book.use(grant(1), ALICE, now=NOW)
    book.save()
    again = AuthorityBook.of("my-run-another", tmp_path / "me.key")
    assert again.run_id == RUN
    assert not again.use(grant(1), BOB, now=NOW) and again.use(grant(1), ALICE, now=NOW)
    (path,) = tmp_path.iterdir()
    assert path.name == "me.key.authority"
    assert os.name != "posix" or path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"{")
    with pytest.raises(ValueError, match="move it away to create a new run"):
        AuthorityBook.of(RUN, tmp_path / "me.key")
    assert path.read_bytes() == b"{"


async def test_a_revocation_survives_the_authoritys_restart(tmp_path: Path) -> None:
    async with run_with() as (here, (authority,)):
        await here.leave(authority)
        here.access = found(key_file=tmp_path / "me.key")
        authority = await here.start("authority")
        alice = await here.start("alice", here.invite())
        authority.trust.revoke(alice.node.id)
        await here.leave(alice)
        await here.leave(authority)
        here.access = found(key_file=tmp_path / "me.key")
        authority = await here.start("authority")
        alice = await here.start("alice", here.invite())
        with pytest.raises(PeerError, match="revoked"):
            await call(alice, authority)
