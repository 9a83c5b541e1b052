"""Peers that shake hands properly and then use up memory, streams and time."""

import asyncio
import contextlib
import tracemalloc
from pathlib import Path

import aiohttp
import pytest

from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import EventLog, Notice
from colab_swarm.net import link as answers
from colab_swarm.net.handshake import Introduction
from colab_swarm.net.identity import Identity
from colab_swarm.net.link import LEAVE_TIMEOUT_S
from colab_swarm.net.peers import Stream, short
from tests.net.swarm import Echo, Piece, Talk, identity, peers, push, sink, until


async def test_a_peer_that_never_leaves_loses_its_quiet_link() -> None:
    async with peers("alice", "bob", keep_alive_s=0.5) as (alice, bob):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        (near,), (far,) = bob.table.of(alice.id), alice.table.of(bob.id)
        far.leave = lambda: None  # type: ignore[method-assign]
        near.leave()
        await until(lambda: far.mux.peer_leaving)
        assert near.lost is None
        near.used_at -= LEAVE_TIMEOUT_S
        await until(lambda: near.lost is not None)


async def test_links_that_never_leave_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.node.MAX_LINKS", 2)
    async with peers("alice", "bob", "carol", "dave", "erin", "frank") as (alice, *callers):
        outcomes = []
        for caller in callers:
            try:
                await caller.call(alice.id, Echo(), Echo, timeout_s=5)
                (link,) = caller.table.of(alice.id)
                link.leave = lambda: None  # type: ignore[method-assign]
                outcomes.append("linked")
            except PeerError as error:
                outcomes.append("busy" if "links, all busy" in str(error) else str(error))
        assert outcomes == ["linked"] * 4 + ["busy"]


async def test_handshakes_that_stall_after_the_first_message_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("colab_swarm.net.handshake.MAX_HANDSHAKES", 3)
    async with peers("alice") as (alice,), aiohttp.ClientSession() as session:
        held = []
        for _ in range(4):
            socket = await session.ws_connect(alice.contact.addresses[0])
            caller = Introduction(identity("bob"), addresses=(), run_id="", expected=alice.id)
            await socket.send_bytes(caller.start())
            held.append(socket)  # collected, it would close
            assert (await socket.receive()).type is aiohttp.WSMsgType.BINARY
        assert (await held[0].receive()).type is aiohttp.WSMsgType.CLOSED  # the oldest makes room
        for socket in held:
            await socket.close()


def test_a_saved_identity_is_read_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "me"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).id == made.id
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]


async def test_handlers_of_streams_given_up_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_TASKS", 3)
    release = asyncio.Event()

    async def brood(opening: Talk, stream: Stream) -> None:
        await release.wait()

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, brood)
        for _ in range(8):
            (await alice.stream(bob.id, Talk(), timeout_s=5)).reset()
        with pytest.raises(CallRefused, match="handlers still run"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        (link,) = bob.table.of(alice.id)
        assert len(link.tasks) == 3
        release.set()
        await until(lambda: not link.tasks)
        assert await alice.call(bob.id, Echo(b"again"), Echo, timeout_s=5) == Echo(b"again")


@pytest.mark.parametrize("size", [100_000, 1])
async def test_streams_that_nobody_reads_take_bounded_memory_and_honest_ones_go_on(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PEER_UNREAD_BYTES", 4 << 20)
    monkeypatch.setattr(answers, "UNREAD_BYTES", 6 << 20)
    release, events, held = asyncio.Event(), EventLog(), list[Stream]()

    async def wait(opening: Talk, stream: Stream) -> None:
        held.append(stream)
        await release.wait()

    async def fill(stream: Stream) -> None:
        with contextlib.suppress(PeerError):
            while True:
                await stream.send(Piece(0), bytes(size))

    async with peers("victim", events=events) as (victim,), peers("alice", "mallory", "sybil") as everyone:
        victim.serve_stream(Talk, wait)
        victim.serve_stream(Echo, sink)
        for one in everyone:
            one.learn(victim.contact)
        honest, *hostile = everyone
        early = await honest.stream(victim.id, Talk(), timeout_s=5)
        await early.send(Piece(0), bytes(1_000_000))
        tracemalloc.start()
        opened = [await one.stream(victim.id, Talk(), timeout_s=5) for one in hostile for _ in range(12)]
        filling = [asyncio.create_task(fill(stream)) for stream in opened]
        assert await push(await honest.stream(victim.id, Echo(), timeout_s=5), 100, 100_000) == 100
        await until(lambda: len(events.recent(Notice)) == 2)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        texts = str(events.recent(Notice))
        assert all(short(one.id) in texts for one in hostile) and short(honest.id) not in texts
        assert sum(stream.held_bytes for stream in held) <= answers.UNREAD_BYTES + answers.RECOUNT_BYTES
        assert next(one for one in held if one.peer == honest.id).held_bytes > 1_000_000
        assert most < 32 << 20, f"{most / 2**20:.1f} MiB, of 48 sent"
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)
        release.set()
