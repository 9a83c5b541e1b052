"""Joining that fails, or is interrupted, leaves nothing behind."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import StateError, TunnelError
from colab_swarm.invite import Invite
from colab_swarm.net.peers import Contact
from colab_swarm.net.reachability import ReachabilityWatch
from colab_swarm.net.tunnels import Tunnel, TunnelSettings
from colab_swarm.project import install
from colab_swarm.swarm.joining import _start
from colab_swarm.swarm.network import NetworkOptions, NetworkSession, close
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.access import RunAccess
from tests.net.swarm import identity, run
from tests.swarm import wait

ALONE = NetworkOptions(lan=False, use_relays=False)


async def founded() -> tuple[PeerServices, NetworkSession, Invite]:
    own = identity("authority")
    found = RunAccess.create("my-run", own, access="invite", allow=None, key_file=None)
    services, network = await _start(found, own, "authority", ALONE, None, 0.0)
    return services, network, found.invite(network.node, network.trust.authority)


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
        services, network, invitation = await founded()
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
