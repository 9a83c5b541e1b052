"""Members without keys: others carry their objects over links."""

from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.errors import BucketAway, BucketError, JoinError
from colab_swarm.events import Fault
from colab_swarm.mailbox.bucket import Bucket, can_open
from colab_swarm.mailbox.courier import Courier, CourierStore
from colab_swarm.mailbox.journal import Journal
from colab_swarm.mailbox.rounds import Farewell
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
        results = sim.run(train, seconds=3000)
        agree(results, "bob", "carol")
        told = faults(sim, "carol")
        assert "no courier answers" in told and "asked again" in told and told.count("\n") == 0
        closed_at = [at for path, (_, at) in sim.bucket.objects.items() if "manifest" in path]
        assert any(20 < at < 130 for at in closed_at) and any(at > 300 for at in closed_at)
        assert not any(130 < at < 300 for at in closed_at)


def bucket_of(swarm: Swarm) -> Bucket:
    """The bucket that a member without keys uses."""
    prefix = f"{swarm.run_id}/model"
    return Bucket(swarm.services.mailbox, prefix, CourierStore(swarm.services, prefix))


def farewell(swarm: Swarm, name: str = "model") -> bytes:
    settings = TrainingSettings(f"{swarm.run_id}/{name}", 1.0)
    return Journal(bucket_of(swarm), swarm.services, settings, 8).signed(Farewell, base=bytes(32))


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
    with pytest.raises(JoinError, match=r"invitation\. With the keys of file://.* it needs nobody"):
        cs.join(invitation, peer_name="carol")


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
