"""Creating, joining and inviting over real links on loopback; what fails or is interrupted leaves nothing behind."""

import asyncio
import gc
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import InviteError, JoinError, StateError, TunnelError
from colab_swarm.events import PeerJoined
from colab_swarm.invite import LOCAL_ONLY, Invite
from colab_swarm.net.addresses import host_of, is_local
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.net.reachability import DialledBack, ReachabilityWatch
from colab_swarm.net.tunnels import Tunnel, TunnelSettings
from colab_swarm.project import install
from colab_swarm.runtime import on_loop
from colab_swarm.swarm.joining import _start
from colab_swarm.swarm.network import NetworkOptions, NetworkSession, close
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.trust.access import RunAccess
from tests.net.swarm import identity, run
from tests.swarm import wait
from tests.training.toy import join_training, loss_of, model


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


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"ws://127.0.0.1:{server.getsockname()[1]}"


def test_two_peers_find_each_other_leave_and_come_back_by_their_key(alice: Swarm, tmp_path: Path) -> None:
    options = NetworkOptions(identity=tmp_path / "key")
    bob = cs.join(alice.invite(), peer_name="bob", options=options)
    assert bob.run == "test-run" and bob.events.recent(PeerJoined)
    assert "bob" in repr(bob) and bob.snapshot().me == "bob"
    bob.leave()
    bob.leave()
    assert "left" in repr(bob)
    gc.collect()
    with cs.join(alice.invite(), peer_name="bob", options=options) as again:
        assert again.id == bob.id
        # no other peer can rebuild its draws from its id
        with pytest.raises(NotImplementedError):
            again.services.rng.getstate()


def test_an_invitation_that_leads_to_nobody_says_why(alice: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JoinError, match="nobody answers"):  # another peer is at the address
        cs.join(invite_to(alice.services.peers.contact.addresses[0], alice.run_id), peer_name="bob")
    address = unused_address()
    said = f"Only peers in the same local network.*If the run has ended.*ask for a new invitation.*tried: .*{address}"
    with pytest.raises(JoinError, match=said):
        cs.join(invite_to(address))
    monkeypatch.setattr("colab_swarm.swarm.network.internet", lambda: False)
    monkeypatch.setattr("colab_swarm.swarm.network.only_local", lambda contacts: False)
    with pytest.raises(JoinError, match=r"no internet connection: check the network.*nobody answers"):
        cs.join(invite_to(address))
    with pytest.raises(InviteError, match="mistyped or cut off"):
        cs.join("swarm://test-run#AZabcdefgh")


def test_a_peer_whose_only_verifier_has_left_invites_all_the_same() -> None:
    with cs.create("verified", peer_name="alice", options=cs.NetworkOptions(lan=False)) as swarm:
        assert swarm.network is not None
        reachability = swarm.network.reachability
        # this machine was busy as a peer that has left dialled back
        slow = tuple((address, "no answer in 1.5 s") for address in swarm.services.peers.contact.addresses)
        reachability._policy.reports[PeerId(bytes(32))] = DialledBack("127.0.0.1", slow)
        swarm.runtime.call(on_loop(reachability._update))
        assert not swarm.services.peers.contact.addresses
        (entry,) = Invite.parse(str(swarm.invite())).entries
        assert entry.addresses


def test_a_name_that_cannot_be_one_and_a_peer_that_cannot_invite_say_so() -> None:
    with pytest.raises(ValueError, match="my-first-swarm"):
        cs.create("My Run!")
    dials_out = cs.create("test-run", options=NetworkOptions(listen=False))
    with dials_out as swarm, pytest.raises(JoinError, match="colab-swarm create"):
        swarm.invite()


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
        watching = blocking == "watch"  # an interrupt ends the watching, not the cell
        with interrupt_after(0.3), nullcontext() if watching else pytest.raises(KeyboardInterrupt):
            calls[blocking]()
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


ALONE = NetworkOptions(lan=False, use_relays=False)


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_peer_that_fails_after_opening_its_tunnel_leaves_nothing_open(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, stopped = asyncio.Event(), asyncio.Event()

    async def connect(tunnel: Tunnel) -> str:
        return "wss://somewhere.example"

    async def stop(tunnel: Tunnel) -> None:
        stopped.set()

    async def main() -> None:
        own = identity("authority")
        found = RunAccess.create("my-run", own, access="invite", allow=None, key_file=None)
        services, network = await _start(found, own, "authority", ALONE, None, 0.0)
        invitation = found.invite(network.node, network.trust.authority)
        verify = ReachabilityWatch.verify

        async def stuck(watch: ReachabilityWatch) -> object:
            if watch._tunnel is None:
                return await verify(watch)
            there.set()
            if not interrupted:
                raise TunnelError("no")
            return await asyncio.Event().wait()

        monkeypatch.setattr(Tunnel, "_connect", connect)
        monkeypatch.setattr(Tunnel, "_stop", stop)
        monkeypatch.setattr(Tunnel, "_wait_lost", lambda tunnel: asyncio.Event().wait())
        monkeypatch.setattr(ReachabilityWatch, "verify", stuck)
        access = RunAccess.from_invitation(invitation, identity("alice"))
        options = NetworkOptions(lan=False, tunnel=TunnelSettings("ngrok"))
        joining = asyncio.ensure_future(_start(access, identity("alice"), "alice", options, None, 0.0))
        await there.wait()
        if interrupted:
            joining.cancel()
        with pytest.raises(asyncio.CancelledError if interrupted else TunnelError):
            await joining
        assert stopped.is_set()
        await close(services, network)

    run(main())


def test_creating_an_open_run_again_returns_the_same_swarm_and_names_what_differs() -> None:
    with cs.create("my-run", peer_name="alice", options=ALONE) as swarm:
        assert cs.create("my-run", peer_name="alice", options=ALONE) is swarm
        assert cs.create("my-run", options=ALONE) is swarm
        with pytest.raises(
            ValueError, match=r"is open already, with access='invite', lan=False: pass that again"
        ):
            cs.create("my-run", access="open", options=NetworkOptions(use_relays=False))
        with cs.create("my-run", peer_name="bob", options=ALONE) as other:
            assert other.run_id != swarm.run_id
        with cs.join(swarm.invite(), peer_name="carol", options=ALONE) as joined:
            assert cs.create("my-run", options=ALONE) is swarm is not joined
    with cs.create("my-run", options=ALONE) as again:
        assert again is not swarm and again.run_id != swarm.run_id


def test_a_missing_tunnel_library_precedes_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.tunnels.find_spec", lambda name: None)
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(TunnelError, match=re.escape(f"needs pyngrok: {install('notebook')}")):
        cs.create("my-run", options=NetworkOptions(lan=False, tunnel="ngrok"))


@pytest.mark.parametrize("began", [True, False])
def test_an_open_peer_that_is_not_saved_is_not_returned(began: bool, tmp_path: Path) -> None:
    options = NetworkOptions(lan=False, use_relays=False, identity=tmp_path / "identity.key")
    with cs.create("test-run", options=options if began else ALONE) as alice:
        invitation = alice.invite()

        def come(**how: object) -> cs.Swarm:
            return cs.create("test-run", **how) if began else cs.join(invitation, peer_name="bob", **how)

        with come(options=options) as unkept:
            with pytest.raises(StateError, match="is open already and is not saved there: leave it first"):
                come(state_dir=tmp_path)
            assert not (tmp_path / "in-use.json").exists()
        with come(state_dir=tmp_path) as kept:
            assert kept.id == unkept.id and kept.network is not None and kept.network.store is not None
            assert kept.network.store.folder == tmp_path


def test_a_peer_that_relays_is_found_by_the_others() -> None:
    relaying, silent = cs.NetworkOptions(relay=True, lan=False), cs.NetworkOptions(lan=False)
    with cs.create("test-run", options=relaying) as alice, cs.join(alice.invite(), options=silent) as bob:
        network = bob.network
        assert network is not None
        wait(lambda: [one.id for one in bob.runtime.call(network.relays())] == [alice.id])


async def test_addresses_that_change_are_announced_again_in_the_local_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, ...]] = []

    class Announcer:
        def __init__(self, *run: str) -> None: ...

        async def update(self, contact: Contact) -> None:
            told.append(contact.addresses)

    monkeypatch.setattr("colab_swarm.swarm.network.LanAnnouncer", Announcer)
    before, after = ("ws://192.0.2.7:4500",), ("ws://192.0.2.8:4500",)
    node = SimpleNamespace(id=identity("alice").id, port=4500, listening=lambda: before)
    run = SimpleNamespace(run_id="my-run", access="open")
    session: Any = SimpleNamespace(node=node, access=run, options=NetworkOptions())
    announcing = asyncio.create_task(NetworkSession.announce_in_lan(session, "alice"))
    await asyncio.sleep(150)
    node.listening = lambda: after
    await asyncio.sleep(150)
    announcing.cancel()
    assert told == [before, after]
