"""Coming back: the same peer, its line in the ledger, its progress; whatever ended the session."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import JoinError, PeerTimeout, StateError
from colab_swarm.events import Notice
from colab_swarm.invite import Invite
from colab_swarm.net.membership import SLACK_S
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.sim import run_virtual
from colab_swarm.swarm import network
from colab_swarm.swarm import swarm as swarm_module
from colab_swarm.swarm.saved import read_saved
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import leave_in, network_of, wait
from tests.training.toy import (
    BATCH,
    join_training,
    loss_of,
    model,
    parameters_of,
    train_freely,
    wait_for_peers,
)


@pytest.fixture
def alice(tmp_path: Path) -> Iterator[Swarm]:
    with cs.create("test-run", peer_name="alice", state_dir=tmp_path / "alice") as swarm:
        yield swarm


def test_the_owner_and_a_member_come_back_as_who_they_were(tmp_path: Path) -> None:
    began = cs.create("test-run", peer_name="alice", state_dir=tmp_path / "alice")
    old = began.invite()
    at = {"state_dir": tmp_path / "bob"}
    options = cs.NetworkOptions(lan=False, upload_mbit_s=50.0)
    with cs.join(old, peer_name="bob", options=options, **at) as bob:
        began.leave()
        with cs.join(state_dir=tmp_path / "alice") as alice:
            assert (alice.id, alice.run_id, alice.name) == (began.id, began.run_id, "alice")
            assert bob.id in alice.services.peers.linked()
            for name, invitation in (("carol", alice.invite()), ("dave", old)):
                with cs.join(invitation, peer_name=name) as other:
                    assert other.run_id == began.run_id and alice.id in other.services.peers.linked()
            assert cs.join(**at) is bob
            bob.leave()
            with cs.join(**at) as again:
                assert (again.id, again.name) == (bob.id, "bob") and again is not bob
                assert network_of(again).options.upload_mbit_s == 50.0
            # the cell that it joined with brings it back too
            with cs.join(old, **at) as again:
                assert (again.id, again.name) == (bob.id, "bob") and cs.join(old, **at) is again


def test_a_membership_outlives_the_invitation(
    alice: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cs.join(invitation := alice.invite(hours=0.5), state_dir=tmp_path / "bob").leave()
    later = time.time() + 1800 + 2 * SLACK_S
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(cs.errors.InviteError, match="expired"):
        Invite.parse(str(invitation))
    with cs.join(state_dir=tmp_path / "bob") as bob:
        assert alice.id in bob.services.peers.linked()


def test_a_port_that_another_program_uses_now_does_not_keep_a_peer_away(tmp_path: Path) -> None:
    began = cs.create("test-run", state_dir=tmp_path / "alice")
    port = began.network.node.port
    began.leave()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", port))
        other.listen()
        with cs.join(state_dir=tmp_path / "alice") as alice:
            assert alice.services.peers.contact.addresses and alice.network.node.port != port


def test_a_member_that_reaches_no_peer_says_what_to_do(tmp_path: Path) -> None:
    with cs.create("test-run") as alice:
        cs.join(alice.invite(), state_dir=tmp_path / "bob").leave()
    with pytest.raises(JoinError, match="ask for a new invitation"):
        cs.join(state_dir=tmp_path / "bob")
    assert not (tmp_path / "bob" / "in-use.json").exists()


@pytest.mark.parametrize("stays", range(4))
def test_all_but_one_come_back_in_any_order(stays: int, tmp_path: Path) -> None:
    names = ["alice", "bob", "carol", "dave"]
    swarms = {"alice": cs.create("test-run", state_dir=tmp_path / "alice")}
    invitation = swarms["alice"].invite()  # names alice only
    for name in names[1:]:
        swarms[name] = cs.join(invitation, peer_name=name, state_dir=tmp_path / name)
    left = names[:stays] + names[stays + 1 :]
    random.Random(stays).shuffle(left)
    ids = {name: swarm.id for name, swarm in swarms.items()}
    try:
        wait(lambda: all(len(swarm.services.peers.linked()) == 3 for swarm in swarms.values()))
        for name in left:
            swarms.pop(name).leave()
        for name in reversed(left):
            swarms[name] = cs.join(state_dir=tmp_path / name)
            assert ids[names[stays]] in swarms[name].services.peers.linked()
    finally:
        for swarm in swarms.values():
            swarm.leave()


def test_a_peer_that_was_just_met_is_saved_at_once(
    alice: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SAVE_EVERY_S", 3600.0)

    def known() -> set[PeerId]:
        saved = read_saved(tmp_path / "bob")
        return set() if saved is None else {contact.id for contact in saved.contacts}

    with cs.join(alice.invite(), peer_name="bob", state_dir=tmp_path / "bob"):
        assert known() == {alice.id}
        with cs.join(alice.invite(), peer_name="carol") as carol:
            wait(lambda: carol.id in known())


@pytest.mark.parametrize("lives", [True, False])
def test_a_peer_enters_through_the_last_living_one_of_many_that_it_knew(lives: bool) -> None:
    known = [Contact(PeerId(bytes([number]) * 32), (f"ws://203.0.113.{number}:1",)) for number in range(64)]
    dialled, at_once = list[PeerId](), [0]

    async def link_to(peer: PeerId, timeout_s: float) -> None:
        """The others stay silent, each for its whole time limit."""
        dialled.append(peer)
        if not lives or peer != known[-1].id:
            at_once.append(at_once[-1] + 1)
            await asyncio.sleep(timeout_s)
            at_once.append(at_once[-1] - 1)
            raise PeerTimeout(f"no link to {peer.hex()[:8]}")

    node: Any = SimpleNamespace(link_to=link_to)
    said = r"nobody answers\. .*run has ended.*\(tried: .*; "
    with nullcontext() if lives else pytest.raises(JoinError, match=said):
        run_virtual(network.enter(node, known))
    assert dialled == [contact.id for contact in known] and max(at_once) == network.DIALS


def test_a_folder_of_another_run_is_refused(alice: Swarm, tmp_path: Path) -> None:
    with cs.join(alice.invite(), state_dir=tmp_path / "bob"), pytest.raises(StateError, match="in use"):
        cs.create("test-run", state_dir=tmp_path / "bob")
    with pytest.raises(ValueError, match="which joined test-run"):
        cs.create("other-run", state_dir=tmp_path / "bob")
    with cs.create("other-run") as other, pytest.raises(ValueError, match="for another run use another"):
        cs.join(other.invite(), state_dir=tmp_path / "bob")
    with pytest.raises(ValueError, match="has its own key"):
        cs.create("new-run", state_dir=tmp_path / "new", options=cs.NetworkOptions(identity=tmp_path / "key"))
    with pytest.raises(StateError, match=r"cs\.join\(invitation, state_dir="):
        cs.join(state_dir=tmp_path)


@pytest.mark.slow
def test_progress_saved_here_is_restored_in_a_swarm_that_lost_it(alice: Swarm, tmp_path: Path) -> None:
    trained, _ = train_freely(alice, 6, samples=BATCH)
    alice.leave()
    with cs.join(state_dir=tmp_path / "alice") as again, cs.join(again.invite(), peer_name="bob") as bob:
        fresh = join_training(bob, theirs := model(seed=3))
        assert fresh.global_step == 0 and join_training(again, model()).global_step == 6
        wait_for_peers(bob, fresh, 2)
        while fresh.global_step < 6:
            loss_of(theirs, 0, slice(0, 1)).backward()
            fresh.step(samples=0.1)
        torch.testing.assert_close(parameters_of(theirs), trained)


def test_a_training_loop_ends_before_the_session_does(alice: Swarm, tmp_path: Path) -> None:
    optimizer = join_training(alice, net := model())
    stopped: list[str] = []
    network_of(alice).stops.append(lambda: stopped.append("units are given back"))
    leave_in(alice, 2.0)
    batch = 0
    with pytest.raises(
        RuntimeError, match=r"before its session ends \(.*Binder.*cs\.join\(state_dir='.*alice'\)"
    ):
        while True:
            loss_of(net, batch).backward()
            optimizer.step(samples=BATCH)
            batch += 1
    wait(lambda: alice.left)
    assert stopped and len([one for one in alice.events.recent(Notice) if "session ends" in one.text]) == 2
    with pytest.raises(RuntimeError, match=r"cs\.join\(state_dir"):
        optimizer.step(samples=BATCH)
    with cs.join(state_dir=tmp_path / "alice") as again:
        assert join_training(again, model()).global_step == optimizer.global_step


def test_resuming_waits_for_a_peer_that_still_leaves(
    alice: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    leave = alice.leave
    close = swarm_module.close

    async def close_late(*session: Any) -> None:
        reached.set()
        await asyncio.to_thread(go_on.wait)
        await close(*session)

    def leave_too() -> None:
        go_on.set()
        leave()

    monkeypatch.setattr(swarm_module, "close", close_late)
    monkeypatch.setattr(alice, "leave", leave_too)
    leaving = threading.Thread(target=leave)
    leaving.start()
    assert reached.wait(20) and alice.left and not go_on.is_set()
    try:
        with cs.join(state_dir=tmp_path / "alice") as again:
            assert again is not alice and again.id == alice.id
    finally:
        go_on.set()
        leaving.join()


def test_an_idle_kernel_leaves_too(alice: Swarm) -> None:
    join_training(alice, model())
    leave_in(alice, 0.3)
    wait(lambda: alice.left)
