"""Runs in a folder: create, join, resume, connect, and what is refused at once."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import BucketAway, JoinError, MismatchError
from colab_swarm.events import Notice
from colab_swarm.invite import Invite
from colab_swarm.mailbox.bucket import MEMORY
from colab_swarm.net.membership import in_words
from colab_swarm.net.peers import Role
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.trust.access import MAILBOX_HOURS
from tests.training.toy import join_training, model, take

LOCAL = {"local_steps": 2, "target_batch_size": 20}


@pytest.fixture
def box(tmp_path: Path) -> str:
    return f"file://{tmp_path}/box"


def test_an_invitation_alone_leads_to_a_run_whose_creator_has_left(box: str, tmp_path: Path) -> None:
    with cs.create("away", mailbox=box, state_dir=tmp_path / "alice") as alice:
        assert cs.create("away", mailbox=box, state_dir=tmp_path / "alice") is alice
        invitation = alice.invite()
        mine = join_training(alice, net := model(), **LOCAL)
        while mine.global_step < 1:
            take(mine, net, 0)
        seen = alice.snapshot()
        assert seen.sent_bytes > 1000 and str(alice.reachability) == f"by the bucket {box}"
        assert alice.reachability.level is ReachabilityLevel.BUCKET
        assert "dials out only" in alice.reachability.explain()
    parsed = Invite.parse(str(invitation))
    assert parsed.mailbox == box and not (parsed.entries or invitation.warning)
    assert parsed.expires_at == pytest.approx(alice.services.peers.time() + 3600 * MAILBOX_HOURS, abs=600)
    with pytest.raises(JoinError, match="a folder of this machine"):
        cs.join(str(invitation), state_dir=tmp_path / "bob")
    with cs.join(str(invitation), mailbox=box, state_dir=tmp_path / "bob") as bob:
        theirs = join_training(bob, other := model(seed=1), communication="auto", target_batch_size=20)
        assert theirs.lineage == mine.lineage and theirs.settings.local_steps == 2
        take(theirs, other, 0)
    with cs.resume(tmp_path / "bob") as again, cs.resume(tmp_path / "alice") as founder:
        assert again.id == bob.id and again.services.mailbox == founder.services.mailbox == box
        assert founder.is_owner and founder.run_id == again.run_id
        with pytest.raises(PermissionError, match="Change the keys"):
            founder.remove_peer(again.id)


@pytest.mark.parametrize("empty", [False, True], ids=["absent", "mount point"])
def test_a_run_whose_folder_is_not_mounted_is_refused_and_begins_no_new_history(
    box: str, tmp_path: Path, empty: bool
) -> None:
    folder = tmp_path / "box"
    with cs.create("away", mailbox=box, state_dir=tmp_path / "alice") as alice:
        invitation = str(alice.invite())
        with cs.join(invitation, mailbox=box, state_dir=tmp_path / "bob") as bob:
            assert bob.run_id == alice.run_id, "before anybody trains"
        folder.rename(tmp_path / "unmounted")
        with pytest.raises(BucketAway, match="is the folder mounted"):
            join_training(alice, model(), **LOCAL)
    if empty:
        folder.mkdir()
    returns: list[Callable[[], cs.Swarm]] = [
        lambda: cs.join(invitation, mailbox=box),
        lambda: cs.join(invitation, mailbox=box, state_dir=tmp_path / "bob"),
        lambda: cs.resume(tmp_path / "bob"),
        lambda: cs.resume(tmp_path / "alice"),
        lambda: cs.create("away", mailbox=box, state_dir=tmp_path / "alice"),
    ]
    for come_back in returns:
        with pytest.raises(JoinError, match=f"the run is not in {box}: is the folder mounted"):
            come_back()
    assert folder.exists() is empty
    if empty:
        folder.rmdir()
    (tmp_path / "unmounted").rename(folder)
    for name in ("alice", "bob"):
        with cs.resume(tmp_path / name) as again:
            assert again.run_id == alice.run_id


def test_a_bucket_without_the_run_is_refused_and_a_viewer_writes_nothing_there(tmp_path: Path) -> None:
    address = f"memory://{tmp_path}"
    with cs.create("kept", mailbox=address) as alice:
        objects = MEMORY[address].objects
        written = set(objects)
        with cs.join(str(alice.invite(role="viewer")), peer_name="carol"):
            assert set(objects) == written
        invitation = str(alice.invite())
        objects.clear()
        with pytest.raises(JoinError, match=f"the run is not in {address}: have its objects been deleted"):
            cs.join(invitation, peer_name="bob")
        assert not objects


@pytest.mark.parametrize("ahead_s", [3 * 3600.0, 25 * 3600.0, -3 * 3600.0, -400 * 86400.0])
@pytest.mark.parametrize("off", ["alice", "bob"])
def test_the_owner_of_a_wrong_clock_is_told_and_counts_as_a_member(
    box: str, off: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = time.time

    def enter(name: str, invitation: str) -> tuple[cs.Swarm, str]:
        with monkeypatch.context() as machine:
            if name == off:
                machine.setattr(time, "time", lambda: clock() + ahead_s)
            if invitation:
                return cs.join(invitation, mailbox=box, peer_name=name), invitation
            swarm = cs.create("clocks", mailbox=box, peer_name=name)
            return swarm, str(swarm.invite())

    alice, invitation = enter("alice", "")
    bob, _ = enter("bob", invitation)
    with alice, bob:
        own = bob.services.peers
        assert alice.services.peers.role_by(own.public_key, own.membership, clock()) is Role.WORKER
        swarm = alice if off == "alice" else bob
        (told,) = (event.text for event in swarm.events.recent(Notice) if "clock" in event.text)
    way = "ahead of" if ahead_s > 0 else "behind"
    assert told.startswith(
        f"this machine's clock is {in_words(abs(ahead_s))} {way} that of {box}: compensated"
    )
    assert "timedatectl" in told and caplog.text.count(told) == 1


def test_connect_takes_the_address_of_a_bucket(box: str, capsys: pytest.CaptureFixture[str]) -> None:
    with cs.connect(box, run="by-address") as swarm:
        assert swarm.services.mailbox == box and swarm.is_owner
        with cs.connect(str(swarm.invite()), mailbox=box, name="bob") as bob:
            assert bob.services.mailbox == box and bob.run_id == swarm.run_id
    assert f"others reach you: by the bucket {box}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"mailbox": "bucket/folder"}, "is no mailbox: pass an address such as s3://"),
        ({"mailbox": "s3://" + "x" * 200}, "205 characters: at most 200 fit"),
        ({"access": "allowlist", "allow": cs.Allowlist(users=("a",))}, "needs this peer online"),
    ],
)
def test_a_run_that_cannot_be_in_a_bucket_is_refused_at_once(
    box: str, given: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        cs.create("refused", **{"mailbox": box, **given})


def test_an_open_run_with_another_bucket_is_refused_and_counted_invitations_too(box: str) -> None:
    with cs.create("kept", mailbox=box) as swarm:
        with pytest.raises(ValueError, match="mailbox='file://"):
            cs.create("kept", mailbox=f"{box}2")
        with pytest.raises(PermissionError, match=r"call invite\(\) without uses"):
            swarm.invite(uses=3)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"local_steps": 1}, ValueError, "local_steps=1: in a bucket, pass"),
        ({"compression": "adaptive"}, ValueError, "for runs over links"),
        ({"local_steps": 3}, MismatchError, "local_steps: 2 there, 3 here"),
        ({"compression": "int8"}, MismatchError, "compression: float32 there, int8 here"),
    ],
)
def test_a_setting_that_does_not_go_with_the_run_is_refused(
    settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with cs.simulate(2, mailbox=True) as sim:
        join_training(sim.swarms["alice"], model(), **LOCAL)
        with pytest.raises(error, match=match):
            join_training(sim.swarms["bob"], model(), **{**LOCAL, **settings})
