"""Members without keys: others carry their objects over links."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import BucketAway, BucketError, JoinError
from colab_swarm.events import Fault
from colab_swarm.mailbox.bucket import Bucket, can_open
from colab_swarm.mailbox.courier import (
    MAX_OBJECT_BYTES,
    Courier,
    CourierRecord,
    CourierStore,
    ListObjects,
    ObjectRows,
    ObjectSize,
    ReadObject,
    WriteObject,
    couriers_key,
)
from colab_swarm.mailbox.journal import Journal
from colab_swarm.mailbox.rounds import Card, Farewell, H, ManifestEntry, RoundManifest
from colab_swarm.net.peers import Ack, Message, PeerId, Refusal, Stream
from colab_swarm.net.reachability import ReachabilityLevel
from colab_swarm.swarm import joining
from colab_swarm.swarm.simulation import Simulation
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.settings import TrainingSettings
from tests.mailbox.run import agree, count, faults, manifests, train
from tests.net.test_upgrade import free_port
from tests.training.toy import join_training, model, take


def listed(sim: Simulation) -> set[str]:
    names = {swarm.id: name for name, swarm in sim.swarms.items()}
    return {names[entry.member] for one in manifests(sim) for entry in one.entries}


def test_members_without_keys_train_as_those_with_keys() -> None:
    with cs.simulate(2, mailbox=True) as sim:
        sim.join("carol", keys=False)
        sim.join("dave", listen=False, keys=False)
        results = sim.run(train, seconds=900)
        agree(results, "alice", "bob", "carol", "dave")
        assert listed(sim) == {"alice", "bob", "carol", "dave"} and not faults(sim, *results)
        assert results["carol"].requests < 1.5 * results["alice"].requests
        carol = sim.swarms["carol"]
        assert carol.snapshot().sent_bytes == carol.services.peers.statistics().sent_bytes


def test_a_late_joiner_and_its_state_need_no_keys_either() -> None:
    def twice(swarm: Swarm) -> object:
        return train(swarm, rounds=20 if swarm.name == "carol" else 18)

    with cs.simulate(1, mailbox=True) as sim:
        sim.join("bob", keys=False)
        sim.join("carol", at=300.0, keys=False)
        results: Any = sim.run(twice, seconds=3000)
        agree(results, "alice", "bob", rounds=18)
        assert max(results["carol"].lineages) == 20 and min(results["carol"].lineages) > 1
        assert any(path.endswith("states/00000016") for path in sim.bucket.objects)


def test_another_courier_takes_over_and_a_time_without_any_loses_nothing() -> None:
    with cs.simulate(2, mailbox=True) as sim:
        sim.join("carol", keys=False)
        sim.network.at(20.0).crash("alice")
        sim.network.at(130.0).crash("bob")
        sim.join("bob", at=300.0)
        results = sim.run(lambda swarm: train(swarm, rounds=30), seconds=3000)
        agree(results, "bob", "carol", rounds=30)
        told = faults(sim, "carol")
        assert "no courier answers" in told and "asked again" in told and told.count("\n") == 0
        closed_at = [at for path, (_, at) in sim.bucket.objects.items() if "manifest" in path]
        assert any(20 < at < 130 for at in closed_at) and any(at > 300 for at in closed_at)
        assert not any(130 < at < 300 for at in closed_at)


def bucket_of(swarm: Swarm) -> Bucket:
    """The bucket that a member without keys uses."""
    prefix = f"{swarm.run_id}/model"
    return Bucket(swarm.services.mailbox, prefix, CourierStore(swarm.services, prefix))


def signed(swarm: Swarm, kind: type[H], name: str = "model", **fields: Any) -> bytes:
    settings = TrainingSettings(f"{swarm.run_id}/{name}", 1.0)
    return Journal(bucket_of(swarm), swarm.services, settings, 8).signed(kind, **fields)


def farewell(swarm: Swarm, name: str = "model") -> bytes:
    return signed(swarm, Farewell, name, base=bytes(32))


FOLDER = f"rounds/00000003-{bytes(8).hex()}"


@pytest.mark.parametrize(
    ("path", "signer", "name", "match"),
    [
        (f"{FOLDER}/ALICE-left", "carol", "model", "another member's"),
        (f"{FOLDER}/ALICE-left", "alice", "model", "another member's"),
        (f"{FOLDER}/CAROL-left", "carol", "other", "of another model"),
        (f"{FOLDER}/CAROL", "carol", "model", "no readable PseudoGradient"),
        (f"{FOLDER}/manifest-00", "carol", "model", "no readable RoundManifest"),
        ("states/00000099", "carol", "model", "no readable StateHead"),
        ("card/second", "carol", "model", "nothing is written to"),
        ("../model/card/first", "carol", "model", "is outside of the run"),
    ],
)
def test_a_courier_writes_only_what_the_caller_has_signed_in_its_places(
    path: str, signer: str, name: str, match: str
) -> None:
    with cs.simulate(1, mailbox=True) as sim:
        sim.join("carol", keys=False)
        for one, swarm in sim.swarms.items():
            path = path.replace(one.upper(), swarm.id.hex())
        carol, data = sim.swarms["carol"], farewell(sim.swarms[signer], name)
        with pytest.raises(BucketError, match=match) as caught:
            carol.runtime.call(bucket_of(carol).create(path, data))
        assert not isinstance(caught.value, BucketAway) and not sim.bucket.objects


def test_a_courier_overwrites_and_deletes_nothing() -> None:
    with cs.simulate(1, mailbox=True) as sim:
        sim.join("carol", keys=False)
        carol = sim.swarms["carol"]
        bucket, path, data = bucket_of(carol), f"{FOLDER}/{carol.id.hex()}-left", farewell(carol)
        assert carol.runtime.call(bucket.create(path, data)) and carol.runtime.call(bucket.read(path)) == data
        assert not carol.runtime.call(bucket.create(path, farewell(carol)))
        with pytest.raises(BucketError, match="only members with keys delete"):
            carol.runtime.call(bucket.delete([path]))
        assert [one[0] for one in sim.bucket.objects.values()] == [data]
        with pytest.raises(BucketError, match=r"cut off|no readable"):
            carol.runtime.call(bucket.create(path, b"garbage"))


def test_a_courier_that_damages_objects_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged, ask = list[bytes](), Courier._ask

    async def changing(courier: Courier, verb: Any) -> Any:
        data = await ask(courier, verb)
        if courier._services is sim.swarms["carol"].services and isinstance(data, bytes):
            damaged.append(data)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    monkeypatch.setattr(Courier, "_ask", changing)
    with cs.simulate(3, mailbox=True) as sim:
        sim.join("dave", keys=False)
        results = sim.run(train, seconds=900)
        agree(results, "alice", "bob", "carol", "dave")
        assert damaged and "dave" in listed(sim) and not count(sim, Fault)


def test_who_finds_no_courier_is_told_that_keys_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "can_open", lambda _: False)
    box, settings = f"file://{tmp_path}/box", {"local_steps": 2, "target_batch_size": 20}
    with cs.create("carried", mailbox=box, options=cs.NetworkOptions(port=free_port())) as alice:
        invitation = str(alice.invite())
        assert alice.contact.addresses and alice.reachability.level is not ReachabilityLevel.BUCKET
        with cs.join(invitation, peer_name="bob") as bob:
            assert bob.services.carried and not alice.services.carried
            mine = join_training(bob, net := model(), **settings)
            while mine.global_step < 2:
                take(mine, net, mine.global_step)
            theirs = join_training(alice, model(seed=1), communication="auto", target_batch_size=20)
            assert theirs.lineage == mine.lineage
            assert bob.runtime.call(bucket_of(bob).read("card/first"))
            alice.remove_peer(bob.id)
            with pytest.raises(BucketError):
                bob.runtime.call(bucket_of(bob).read("card/first"))
    with pytest.raises(JoinError, match=r"invitation\. Or set the keys of file://.*: it needs nobody"):
        cs.join(invitation, peer_name="carol")


def test_an_invitation_for_one_admits_who_has_the_keys_too(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    options = cs.NetworkOptions(port=free_port())
    with cs.create("counted", mailbox=f"file://{tmp_path}/box", options=options) as alice:
        invitation = str(alice.invite(uses=1))
        with cs.join(invitation, peer_name="bob") as bob:
            assert not bob.services.carried and alice.id in bob.services.peers.linked()
        with pytest.raises(JoinError, match="all have joined"):
            cs.join(invitation, peer_name="carol")


def test_a_courier_refuses_paths_that_its_store_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "can_open", lambda _: False)
    options = cs.NetworkOptions(port=free_port())
    with cs.create("odd", mailbox=f"file://{tmp_path}/box", options=options) as alice:
        with cs.join(str(alice.invite()), peer_name="bob") as bob:
            for name in ("a//b", "a\0b", "./a", "a/../../other", "", "/"):
                prefix = f"{bob.run_id}/{name}"
                bucket = Bucket(bob.services.mailbox, prefix, CourierStore(bob.services, prefix))
                for asked in (bucket.read("card/first"), bucket.list("card")):
                    with pytest.raises(BucketError, match=r"path|outside of the run") as caught:
                        bob.runtime.call(asked)
                    assert not isinstance(caught.value, BucketAway)
        assert not alice.events.recent(Fault)


def test_who_can_open_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert can_open(f"file://{tmp_path}") and not can_open(f"file://{tmp_path}/nowhere")
    assert not can_open("s3://bucket/run") and not can_open("s3://bucket/run?access_key_id=x")
    assert can_open("s3://bucket/run?access_key_id=x&secret_access_key=y")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert not can_open("s3://bucket/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    assert can_open("s3://bucket/run")


def courier_of(swarm: Swarm) -> Courier:
    table = swarm.services.peers.linker.services[1]  # type: ignore[attr-defined]
    return table._by_name["ReadObject"][1].__self__  # type: ignore[no-any-return]


def test_members_that_stall_lose_their_turns() -> None:
    with cs.simulate(1, mailbox=True) as sim:
        stalling = [f"mallory{i}" for i in range(8)]
        for name in [*stalling, "carol"]:
            sim.join(name, keys=False)
        courier, carol = courier_of(sim.swarms["alice"]), sim.swarms["carol"]
        opening = WriteObject("model", f"{FOLDER}/manifest-00", MAX_OBJECT_BYTES)

        async def attack() -> tuple[float, list[Stream]]:
            alice, began_at = sim.swarms["alice"].id, sim.time
            peers = [sim.swarms[name].services.peers for name in stalling]
            held = [await one.stream(alice, opening, timeout_s=15.0) for one in peers]
            await asyncio.sleep(10.0)
            assert courier._all.locked()
            assert await bucket_of(carol).read("card/first") is None
            return sim.time - began_at, held

        took_s, _ = carol.runtime.call(attack())
        assert 100 < took_s < 121 and not courier._all.locked() and not len(courier._turns)


def test_a_member_has_one_list_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    most, now, real = Counter[str](), Counter[str](), Bucket.list

    async def slowly(bucket: Bucket, *given: str) -> Any:
        now["lists"] += 1
        most["lists"] = max(most["lists"], now["lists"])
        await asyncio.sleep(1.0)
        now["lists"] -= 1
        return await real(bucket, *given)

    with cs.simulate(1, mailbox=True) as sim:
        sim.join("carol", keys=False)
        monkeypatch.setattr(Bucket, "list", slowly)

        async def flood() -> int:
            alice, peers = sim.swarms["alice"].id, sim.swarms["carol"].services.peers
            opening = ListObjects("model", "rounds", "")
            streams = [await peers.stream(alice, opening, timeout_s=15.0) for _ in range(50)]
            return len([await one.receive(ObjectRows) for one in streams])

        assert sim.swarms["carol"].runtime.call(flood()) == 50 and most["lists"] == 1


Talk = Callable[[Message, Stream], Awaitable[None]]


async def no_rows(_: Message, stream: Stream) -> None:
    while True:
        await stream.send(ObjectRows((), more=True))
        await asyncio.sleep(60.0)


async def rows_by_and_by(_: Message, stream: Stream) -> None:
    while True:
        await stream.send(ObjectRows((("card/first", 1, 9e11),), more=True))
        await asyncio.sleep(60.0)


async def a_part_by_and_by(_: Message, stream: Stream) -> None:
    await stream.send(ObjectSize(MAX_OBJECT_BYTES))
    while True:
        await stream.send(Ack(), bytes(100))
        await asyncio.sleep(60.0)


async def nothing(_: Message, stream: Stream) -> None:
    await stream.send(ObjectSize(None))


async def refuse(_: Message, stream: Stream) -> None:
    raise Refusal("no")


def pretend(swarm: Swarm, kind: type[Message], talk: Talk) -> PeerId:
    """Let a peer announce itself as a courier."""
    services = swarm.services

    async def begin() -> None:
        services.peers.serve_stream(kind, talk)
        await services.dht.publish(
            couriers_key(services), CourierRecord(swarm.contact.addresses), ttl_s=3600.0
        )

    swarm.runtime.call(begin())
    return swarm.id


@pytest.mark.parametrize(
    ("kind", "talk"),
    [
        (ListObjects, no_rows),
        (ListObjects, rows_by_and_by),
        (ReadObject, a_part_by_and_by),
        (ReadObject, nothing),
        (ReadObject, refuse),
    ],
)
def test_a_courier_that_trickles_or_hides_an_object_is_passed_over(kind: type[Message], talk: Talk) -> None:
    with cs.simulate(1, mailbox=True) as sim:
        for name in ("carol", "mallory"):
            sim.join(name, keys=False)
        carol, asked = sim.swarms["carol"], list[Message]()

        async def counted(opening: Message, stream: Stream) -> None:
            asked.append(opening)
            await talk(opening, stream)

        bucket, mine, data = bucket_of(carol), f"{FOLDER}/{carol.id.hex()}-left", farewell(carol)
        assert carol.runtime.call(bucket.create(mine, data))
        began_at = sim.time
        bucket._store._last = pretend(sim.swarms["mallory"], kind, counted)  # type: ignore[attr-defined]
        if kind is ListObjects:
            assert [one.path for one in carol.runtime.call(bucket.list("rounds"))] == [mine]
        else:
            assert carol.runtime.call(bucket.read(mine)) == data
        assert asked and sim.time - began_at < 130


def test_a_refusal_counts_only_if_no_courier_is_away() -> None:
    with cs.simulate(1, mailbox=True) as sim:
        for name in ("carol", "mallory"):
            sim.join(name, keys=False)
        carol, bucket = sim.swarms["carol"], bucket_of(sim.swarms["carol"])
        pretend(sim.swarms["mallory"], ReadObject, refuse)
        bucket._store._last = sim.swarms["alice"].id  # type: ignore[attr-defined]
        sim.network.at(sim.time).crash("alice")
        with pytest.raises(BucketAway):
            carol.runtime.call(bucket.read("card/first"))


def test_names_that_are_too_long_for_a_list_are_left_out() -> None:
    with cs.simulate(1, mailbox=True) as sim:
        sim.join("carol", keys=False)
        carol, agreed = sim.swarms["carol"], {"schema": b"", "agreement": ()}

        async def fill() -> Any:
            for i in range(500):
                name = f"model/rounds/99999999-{i:03d}{chr(0x1F600) * 150}"
                prefix = f"{carol.run_id}/{name}"
                bucket = Bucket(carol.services.mailbox, prefix, CourierStore(carol.services, prefix))
                assert await bucket.create("card/first", signed(carol, Card, name, **agreed))
            mine = f"{FOLDER}/{carol.id.hex()}-left"
            assert await bucket_of(carol).create(mine, farewell(carol))
            return await bucket_of(carol).list("rounds"), mine

        found, mine = carol.runtime.call(fill())
        assert len(sim.bucket.objects) == 501 and [one.path for one in found] == [mine]


def test_a_round_closes_beside_any_number_of_faulty_manifests() -> None:
    written = Counter[bool]()

    def spoil(swarm: Swarm) -> None:
        entry = ManifestEntry(swarm.id, 0, bytes(32), 1.0, 1.0, 1.0, 1.0)
        data = signed(swarm, RoundManifest, round=0, base=bytes(32), entries=(entry,))

        async def write() -> None:
            while not (found := await bucket_of(swarm).list("rounds")):
                await asyncio.sleep(1.0)
            written.update([await bucket_of(swarm).create(f"{found[0].folder}/manifest-00", data)])
            for i in range(1, 1200):  # by a member with keys, to be fast
                path = f"runs/{swarm.run_id}/model/{found[0].folder}/manifest-{i:02d}"
                written.update([await sim.bucket.create(path, data)])

        swarm.runtime.call(write())

    with cs.simulate(2, mailbox=True) as sim:
        sim.join("mallory", keys=False)
        results = sim.run(lambda one: spoil(one) if one.name == "mallory" else train(one), seconds=1500)
        results.pop("mallory")
        agree(results, "alice", "bob")
        assert written[True] > 1100
