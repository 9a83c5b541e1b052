"""State sharing on the simulated network: several donors, and their faults."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.errors import PeerError, StateError
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HOME, SimNetwork, SimPeers
from colab_swarm.sim.profiles import LAN, NetworkProfile
from colab_swarm.tensors.chunks import CHUNK_TIMEOUT_S, SILENCE_S, Manifest, Snapshot, StateChunk, digest_of
from colab_swarm.training.state import DescribeState, FetchState, Mirror, StateSharing

SIZE_BYTES = 5_000_000
BLOB = np.random.default_rng(0).integers(0, 256, SIZE_BYTES, np.uint8)


def snapshot(step: int = 7, blob: np.ndarray = BLOB) -> Snapshot:
    return Snapshot.of(b"lineage", step, blob)


class Scene:
    """A late joiner and donors that share ``provided``."""

    def __init__(self, donors: dict[str, Snapshot], profile: NetworkProfile = LAN) -> None:
        self.network = SimNetwork(profile, seed=1)
        self.taken = 0
        self.donors = {name: self.network.peer(name) for name in donors}
        self.shares = {
            name: StateSharing(PrefixRouter(peers), "run", self.provider(donors[name]))
            for name, peers in self.donors.items()
        }
        self.joiner: SimPeers = self.network.peer("joiner")
        self.network.introduce()
        self.sharing = StateSharing(PrefixRouter(self.joiner), "run", self.provider(None))

    def provider(self, made: Snapshot | None) -> Callable[[], Awaitable[Snapshot]]:
        async def provide() -> Snapshot:
            self.taken += 1
            if made is None:
                raise StateError("nothing here yet")
            return made

        return provide

    async def download(self, *names: str) -> Snapshot:
        return await self.sharing.download([self.donors[name].id for name in names or self.donors])


async def test_a_state_arrives_whole_from_several_donors() -> None:
    scene = Scene({"alice": snapshot(), "bob": snapshot(), "carol": snapshot()}, HOME)
    got = await scene.download()
    assert np.array_equal(got.blob, BLOB) and got.manifest == snapshot().manifest
    assert set(got.donors) == {peers.id for peers in scene.donors.values()}


@pytest.mark.parametrize("fault", ["crash", "partition"])
async def test_a_donor_that_vanishes_or_stalls_half_way_costs_some_time(fault: str) -> None:
    scene = Scene({"alice": snapshot(), "bob": snapshot()}, HOME)
    bob_gives = scene.network.when(lambda m: isinstance(m, StateChunk), sender="bob", nth=3)
    if fault == "crash":
        bob_gives.crash("bob")
    else:
        bob_gives.partition({"bob"}, {"alice", "joiner"})
    got = await scene.download()
    assert np.array_equal(got.blob, BLOB) and loop_now() < 15
    assert [fired.name for fired in scene.network.fired] == [fault]


@pytest.mark.parametrize("kind", [DescribeState, FetchState])
@pytest.mark.parametrize("others", [["alice"], ["alice", "bob"]])
async def test_a_silent_donor_costs_a_few_seconds(kind: type, others: list[str]) -> None:
    """It keeps its manifest, or only its chunks, to itself; the state has one chunk."""
    small = snapshot(blob=BLOB[:1000])
    asked = []
    scene = Scene(dict.fromkeys(["frozen", *others], small))

    async def keep_silent(*_: object) -> None:
        asked.append(loop_now())
        await asyncio.sleep(1e6)

    peers = scene.donors["frozen"]
    peers.unserve(kind)
    serve = peers.serve if kind is DescribeState else peers.serve_stream
    serve(kind, keep_silent)
    assert (await scene.download()).manifest == small.manifest
    assert asked and loop_now() < SILENCE_S + 1


async def test_a_slow_donor_is_kept_while_its_chunks_arrive() -> None:
    class Slow(Snapshot):
        async def read(self, digest: bytes) -> memoryview | None:
            await asyncio.sleep(20)
            return await super().read(digest)

    whole = snapshot(blob=BLOB[:600_000])
    got = await Scene({"alice": Slow(whole.manifest, whole.blob)}).download()
    assert np.array_equal(got.blob, whole.blob) and 60 <= loop_now() < 65


async def test_a_donor_that_trickles_after_a_good_start_holds_its_chunks_for_30_s_only() -> None:
    class Trickling(Snapshot):
        async def read(self, digest: bytes) -> memoryview | None:
            sent.append(digest)
            await asyncio.sleep(25 if len(sent) > 3 else 0)  # a chunk each 25 s: none is late by itself
            return await super().read(digest)

    sent: list[bytes] = []
    got = await Scene({"alice": snapshot(), "bob": Trickling(snapshot().manifest, BLOB)}).download()
    assert np.array_equal(got.blob, BLOB) and len(sent) > 3 and loop_now() < CHUNK_TIMEOUT_S


async def test_a_chunk_of_another_length_is_refused_though_its_hash_is_right() -> None:
    whole, short = snapshot(), b"short"
    digests = digest_of(short) + whole.manifest.digests[32:]
    lie = Snapshot(msgspec.structs.replace(whole.manifest, digests=digests), BLOB)
    lie.chunks[digest_of(short)] = memoryview(short)
    with pytest.raises(StateError, match="20 of 20 chunks did not arrive"):
        await Scene({"mallory": lie}).download()


async def test_a_download_that_failed_goes_on_where_it_stopped() -> None:
    scene = Scene({"alice": snapshot(), "bob": snapshot()}, HOME)
    scene.network.when(lambda m: isinstance(m, StateChunk), sender="alice", nth=4).crash("alice")
    with pytest.raises(StateError, match="17 of 20 chunks did not arrive"):
        await scene.download("alice")
    got = await scene.download("bob")
    assert np.array_equal(got.blob, BLOB) and scene.network.fired
    assert set(got.donors) == {peers.id for peers in scene.donors.values()}


async def test_a_donor_on_another_step_is_left_out() -> None:
    scene = Scene({"alice": snapshot(7), "bob": snapshot(8)})
    got = await scene.download("alice", "bob")
    assert got.manifest.step == 7 and got.donors == (scene.donors["alice"].id,)


async def test_late_joiners_share_one_copy_until_the_state_changes() -> None:
    scene = Scene({"alice": snapshot()})
    await scene.download()
    await scene.download()
    assert scene.taken == 1
    scene.shares["alice"].outdate()
    await scene.download()
    assert scene.taken == 2


async def test_a_donor_without_a_state_says_so() -> None:
    scene = Scene({"alice": snapshot()})
    with pytest.raises(StateError, match="nothing here yet"):
        await scene.shares["alice"].download([scene.joiner.id])
    with pytest.raises(PeerError, match="the state of step 3 is gone"):
        await scene.joiner.call(scene.donors["alice"].id, DescribeState("run", 3), Manifest, timeout_s=5)


async def test_a_request_for_a_chunk_that_is_not_there_is_refused() -> None:
    scene = Scene({"alice": snapshot()})
    root = (await scene.download()).manifest.root
    for asked, refusal in ((root, "chunk 00000000 is not here"), (bytes(16), "that snapshot is gone")):
        ask = FetchState((bytes(32),), "run", asked)
        stream = await scene.joiner.stream(scene.donors["alice"].id, ask, timeout_s=5)
        with pytest.raises(ConnectionError, match=refusal):
            await stream.receive(StateChunk)


class Mirrored:
    """A mirror that all peers can dial, donors and a late joiner that only dial out."""

    checkpoint: Snapshot | None = None

    def __init__(self, donors: dict[str, Snapshot]) -> None:
        self.network = SimNetwork(HOME, seed=1)
        self.backbone = self.network.peer("backbone")
        self.donors = {name: self.client(name) for name in donors}
        self.joiner = self.client("joiner")
        self.network.introduce()
        self.mirror = Mirror(PrefixRouter(self.backbone), "run", self.stored, self.trainers)
        for name, peers in self.donors.items():
            StateSharing(PrefixRouter(peers), "run", lambda made=donors[name]: self.give(made))

    def client(self, name: str) -> SimPeers:
        return self.network.peer(name, listen=False)

    async def stored(self) -> Snapshot | None:
        return self.checkpoint

    async def trainers(self) -> list[PeerId]:
        return [peers.id for peers in self.donors.values()]

    @staticmethod
    async def give(made: Snapshot) -> Snapshot:
        return made

    async def download(self) -> Snapshot:
        for peers in self.donors.values():  # a trainer's own link is how it is called back
            (await peers.stream(self.backbone.id, StateChunk(), timeout_s=5)).reset()
        sharing = StateSharing(PrefixRouter(self.joiner), "run", lambda: self.give(snapshot()))
        return await sharing.download([self.backbone.id])


async def test_without_trainers_a_mirror_gives_its_checkpoint() -> None:
    scene = Mirrored({})
    scene.checkpoint = snapshot()
    scene.mirror._held[snapshot().root] = []  # of trainers that are gone
    assert (await scene.download()).manifest == snapshot().manifest


async def test_a_donor_that_vanishes_half_way_is_replaced() -> None:
    scene = Mirrored({"alice": snapshot(), "bob": snapshot()})
    scene.network.when(lambda m: isinstance(m, StateChunk), sender="alice", nth=6).crash("alice")
    got = await scene.download()
    assert np.array_equal(got.blob, BLOB) and got.manifest == snapshot().manifest
    assert [fault.name for fault in scene.network.fired] == ["crash"]
    assert scene.joiner.linked() == {scene.backbone.id}


async def test_a_donor_that_lies_is_passed_over() -> None:
    scene = Mirrored({"mallory": Snapshot(snapshot().manifest, np.zeros_like(BLOB)), "bob": snapshot()})
    assert np.array_equal((await scene.download()).blob, BLOB)


@pytest.mark.parametrize("step", [7, 9])
@pytest.mark.parametrize("honest_s", [0.0, 1.0])
async def test_a_liar_that_answers_a_mirror_first_is_outvoted(
    step: int, honest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = snapshot(step, np.zeros_like(BLOB))
    answered = []

    async def give(made: Snapshot) -> Snapshot:
        if made is not lie:
            await asyncio.sleep(honest_s)
        answered.append(made.manifest)
        return made

    monkeypatch.setattr(Mirrored, "give", staticmethod(give))
    got = await Mirrored({"mallory": lie, "bob": snapshot(), "carol": snapshot()}).download()
    assert lie.manifest in answered and got.manifest == snapshot().manifest


async def test_without_a_donor_in_reach_it_says_so() -> None:
    scene = Mirrored({"alice": snapshot()})
    sharing = StateSharing(PrefixRouter(scene.joiner), "run", lambda: scene.give(snapshot()))
    with pytest.raises(StateError, match="no trainer linked to this assistant"):
        await sharing.download([scene.backbone.id])
