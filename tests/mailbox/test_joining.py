"""Runs in a folder: create, join, resume, connect, and what is refused at once."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import BucketAway, JoinError, MismatchError
from colab_swarm.events import Notice
from colab_swarm.invite import Invite
from colab_swarm.mailbox.bucket import MEMORY
from colab_swarm.net.membership import in_words
from colab_swarm.net.peers import Role
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.state import CheckpointFolder
from colab_swarm.trust.access import MAILBOX_HOURS
from tests.training.toy import join_training, model, parameters_of, take

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
        assert theirs.lineage == mine.lineage and theirs.settings.communication.local_steps == 2
        take(theirs, other, 0)
    with cs.join(state_dir=tmp_path / "bob") as again, cs.join(state_dir=tmp_path / "alice") as founder:
        assert again.id == bob.id and again.services.mailbox == founder.services.mailbox == box
        assert founder.is_owner and founder.run_id == again.run_id
        with pytest.raises(PermissionError, match="Change the keys"):
            founder.remove_peer(again.id)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "theirs", "saves"),
    [
        ("int8", {"communication": "auto"}, False),
        ("sparseloco", {"local_steps": 2, "overlap": True, "compression": "sparseloco"}, True),
    ],
    ids=["auto", "overlap"],
)
def test_who_joins_or_returns_has_the_weights_of_the_step_that_it_reports(
    compression: str, theirs: dict[str, Any], saves: bool, box: str, tmp_path: Path
) -> None:
    """Before its first batch; also after a kill that left an old checkpoint, or none."""
    weights: dict[int, torch.Tensor] = {}

    def train_on(rounds: int) -> None:
        while mine.global_step < rounds:
            if take(mine, net, mine.global_step) is not None:
                weights[mine.global_step] = parameters_of(net)

    def enter(bob: cs.Swarm) -> tuple[SwarmOptimizer, torch.nn.Module]:
        optimizer = join_training(bob, other := model(seed=1), target_batch_size=20, **theirs)
        assert optimizer.global_step == mine.global_step
        assert torch.equal(parameters_of(other), weights[optimizer.global_step])
        return optimizer, other

    with cs.create("weights", mailbox=box) as alice:
        mine = join_training(alice, net := model(), **LOCAL, compression=compression)
        train_on(3)
        with cs.join(str(alice.invite()), mailbox=box, state_dir=tmp_path / "bob") as bob:
            optimizer, other = enter(bob)
            take(optimizer, other, 0)
            if saves:
                optimizer.save(CheckpointFolder(tmp_path / "bob/checkpoints/model"))
            # as a kill leaves it
            shutil.copytree(tmp_path / "bob", tmp_path / "killed", ignore=shutil.ignore_patterns("in-use*"))
        train_on(5)
        with cs.join(state_dir=tmp_path / "killed") as bob:
            enter(bob)


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
        lambda: cs.join(state_dir=tmp_path / "bob"),
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
        with cs.join(state_dir=tmp_path / name) as again:
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


@pytest.mark.parametrize(
    ("off", "ahead_s", "way"),
    [("alice", 3 * 3600.0, "ahead of"), ("bob", 25 * 3600.0, "ahead of"), ("bob", -400 * 86400.0, "behind")],
)
def test_the_owner_of_a_wrong_clock_is_told_and_counts_as_a_member(
    box: str,
    off: str,
    ahead_s: float,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = time.time

    def enter(name: str, come: Callable[[], cs.Swarm]) -> cs.Swarm:
        with monkeypatch.context() as machine:
            if name == off:
                machine.setattr(time, "time", lambda: clock() + ahead_s)
            return come()

    alice = enter("alice", lambda: cs.create("clocks", mailbox=box, peer_name="alice"))
    invitation = str(alice.invite())
    bob = enter("bob", lambda: cs.join(invitation, mailbox=box, peer_name="bob"))
    with alice, bob:
        own = bob.services.peers
        assert alice.services.peers.role_by(own.public_key, own.membership, clock()) is Role.WORKER
        swarm = alice if off == "alice" else bob
        (told,) = (event.text for event in swarm.events.recent(Notice) if "clock" in event.text)
    assert told.startswith(
        f"this machine's clock is {in_words(abs(ahead_s))} {way} that of {box}: compensated"
    )
    assert "timedatectl" in told and caplog.text.count(told) == 1


def test_connect_takes_the_address_of_a_bucket_and_what_cannot_be_in_one_is_refused(
    box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with cs.connect(box, run="by-address") as swarm:
        assert swarm.services.mailbox == box and swarm.is_owner
        with cs.connect(str(swarm.invite()), mailbox=box, peer_name="bob") as bob:
            assert bob.services.mailbox == box and bob.run_id == swarm.run_id
        with pytest.raises(ValueError, match="mailbox='file://"):
            cs.create("by-address", mailbox=f"{box}2")
        with pytest.raises(PermissionError, match=r"call invite\(\) without uses"):
            swarm.invite(uses=3)
    assert f"others reach you: by the bucket {box}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs this peer online"):
        cs.create("refused", mailbox=box, allow=cs.Allowlist(users=("a",)))
    with pytest.raises(ValueError, match="is no mailbox: pass an address such as s3://"):
        cs.create("refused", mailbox="bucket/folder")


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"local_steps": 1}, ValueError, "are in a bucket, .*pass communication='sparseloco'"),
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
