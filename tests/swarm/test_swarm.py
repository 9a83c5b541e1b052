"""Creating, joining, training and leaving over real links on loopback, as a notebook does it."""

import gc
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import InviteError, JoinError
from colab_swarm.events import PeerJoined, RoundFinished
from colab_swarm.invite import LOCAL_ONLY, Invite
from colab_swarm.net.addresses import host_of, is_local
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.net.reachability import DialledBack
from colab_swarm.runtime import on_loop
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, joint_reference, loss_of, model, train_own_rows


@pytest.fixture
def alice() -> Iterator[Swarm]:
    with cs.create("test-run", peer_name="alice") as swarm:
        yield swarm


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def invite_to(address: str, run_id: str = "test-run-00000000") -> str:
    entry = Contact(PeerId(b"x" * 32), (address,))
    return str(Invite(run_id, (entry,), time.time() + 60))


def test_two_peers_find_each_other_and_leave_without_a_trace(alice: Swarm) -> None:
    bob = cs.join(alice.invite(), peer_name="bob")
    assert bob.run == "test-run" and bob.events.recent(PeerJoined)
    assert "bob" in repr(bob) and bob.snapshot().me == "bob"
    bob.leave()
    bob.leave()
    assert "left" in repr(bob)
    gc.collect()


def test_an_invitation_without_an_answering_peer_says_what_was_tried(alice: Swarm) -> None:
    with pytest.raises(JoinError, match="nobody answers"):  # another peer is at the address
        cs.join(invite_to(alice.services.peers.contact.addresses[0], alice.run_id), peer_name="bob")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ws://127.0.0.1:{server.getsockname()[1]}"
    said = f"Only peers in the same local network.*If the run has ended.*ask for a new invitation.*tried: .*{address}"
    with pytest.raises(JoinError, match=said):
        cs.join(invite_to(address))


def test_a_peer_whose_only_verifier_has_left_invites_all_the_same() -> None:
    with cs.create("verified", peer_name="alice", options=cs.NetworkOptions(lan=False)) as swarm:
        assert swarm.network is not None
        reachability = swarm.network.reachability
        # this machine was busy as a peer that has left dialled back
        slow = tuple(
            (address, "no answer within 1.5 s") for address in swarm.services.peers.contact.addresses
        )
        reachability._policy.reports[PeerId(bytes(32))] = DialledBack("127.0.0.1", slow)
        swarm.runtime.call(on_loop(reachability._update))
        assert not swarm.services.peers.contact.addresses
        (entry,) = Invite.parse(str(swarm.invite())).entries
        assert entry.addresses


def test_a_machine_without_internet_says_so(alice: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.swarm.network.internet", lambda: False)
    monkeypatch.setattr("colab_swarm.swarm.network.only_local", lambda contacts: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ws://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(JoinError, match=r"no internet connection: check the network.*nobody answers"):
        cs.join(invite_to(address))


def test_a_name_that_cannot_be_one_and_a_mistyped_invitation_say_so() -> None:
    with pytest.raises(ValueError, match="my-first-swarm"):
        cs.create("My Run!")
    with pytest.raises(InviteError, match="mistyped or cut off"):
        cs.join("swarm://test-run#AZabcdefgh")


def test_a_peer_that_cannot_be_dialled_cannot_invite() -> None:
    dials_out = cs.create("test-run", options=NetworkOptions(listen=False))
    with dials_out as swarm, pytest.raises(JoinError, match="colab-swarm create"):
        swarm.invite()


def test_the_same_identity_comes_back_after_a_restart(alice: Swarm, tmp_path: Path) -> None:
    options = NetworkOptions(identity=tmp_path / "key")
    with cs.join(alice.invite(), peer_name="bob", options=options) as first:
        pass
    with cs.join(alice.invite(), peer_name="bob", options=options) as again:
        assert again.id == first.id
        # no other peer can rebuild its draws from its id
        with pytest.raises(NotImplementedError):
            again.services.rng.getstate()


@pytest.mark.slow
def test_four_peers_with_unequal_batches_equal_one_process(alice: Swarm) -> None:
    invite = alice.invite()
    swarms = [alice, *(cs.join(invite, peer_name=name) for name in ("bob", "carol", "dave"))]
    with ThreadPoolExecutor(4) as pool:
        meet = threading.Barrier(4).wait
        results = list(pool.map(lambda swarm: train_own_rows(swarm, 20, meet), swarms))
    for swarm in swarms[1:]:
        swarm.leave()
    rounds = alice.events.recent(RoundFinished)
    assert [len(one.contributors) for one in rounds] == 20 * [4]
    assert len({lineage for _, lineage in results}) == 1
    for parameters, _ in results:
        torch.testing.assert_close(parameters, joint_reference(20), rtol=0, atol=1e-5)


def test_an_invitation_with_private_addresses_alone_says_who_can_use_it(alice: Swarm) -> None:
    invitation = alice.invite()
    assert "any number of times" in invitation.described()
    assert "3 times" in alice.invite(uses=3).described()
    local = all(is_local(host_of(address)) for address in alice.services.peers.contact.addresses)
    assert invitation.warning == (LOCAL_ONLY if local else "")
    shown = invitation._repr_mimebundle_()
    assert ["same local network" in shown[kind] for kind in ("text/html", "text/plain")] == [local] * 2
    assert Invite.parse(shown["text/plain"]) == Invite.parse(invitation)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", ["wait_step", "watch", "join"])
def test_ctrl_c_ends_a_blocking_call_and_leaves_the_peer_usable(alice: Swarm, blocking: str) -> None:
    optimizer = join_training(alice, net := model())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        calls: dict[str, Callable[[], object]] = {
            "wait_step": optimizer.wait_step,
            "watch": alice.panel().watch,
            "join": lambda: cs.join(invite_to(f"ws://127.0.0.1:{silent.getsockname()[1]}")),
        }
        began = time.monotonic()
        watching = blocking == "watch"  # an interrupt ends the watching, not the cell
        with interrupt_after(0.3), nullcontext() if watching else pytest.raises(KeyboardInterrupt):
            calls[blocking]()
        assert time.monotonic() - began < 5
    loss_of(net, 0).backward()
    assert optimizer.step(samples=10) is not None


def test_a_backbone_needs_no_torch_and_none_of_the_extras() -> None:
    code = """
        import sys
        for absent in ("torch", "transformers", "datasets", "scipy", "safetensors", "rich", "ipywidgets"):
            sys.modules[absent] = None
        import colab_swarm as cs
        with cs.create("test-run") as swarm:
            print(swarm.panel())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("Panel(test-run: joined, 1 peer)", "")
