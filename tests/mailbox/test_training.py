"""Runs in a bucket on virtual time: ordinary life, a bucket that fails, and the same result as over links."""

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import colab_swarm as cs
from colab_swarm.averaging.grants import Batch
from colab_swarm.errors import BucketError
from colab_swarm.events import BatchDropped, StateReceived, Waited
from colab_swarm.mailbox.chain import RoundChain
from colab_swarm.mailbox.decide import LEAST_PAUSE_S
from colab_swarm.mailbox.objects import PLACE, RoundManifest, content_digest, unseal
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.swarm import Swarm
from tests.mailbox.run import (
    SETTINGS,
    Change,
    Create,
    Trained,
    agree,
    closings,
    count,
    fail,
    faults,
    manifests,
    notices,
    train,
)
from tests.training.toy import ROWS, exchanged, join_training, loss_of, model, wait_for_peers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "compression", "overlap"),
    [(OSError("off"), "float32", False), (PermissionError("revoked"), "sparseloco", True)],
)
def test_a_store_that_fails_for_minutes_costs_nothing(
    error: Exception, overlap: bool, compression: str
) -> None:
    with cs.simulate(3, mailbox=True) as sim:
        fail(sim, error, 20.0, 300.0)
        results = sim.run(lambda swarm: train(swarm, overlap=overlap, compression=compression), seconds=1500)
        agree(results, *sim.swarms)
        assert not count(sim, BatchDropped)
        if isinstance(error, PermissionError):
            assert all(one.refusals for one in results.values())
        else:
            assert "the bucket answers again" in notices(sim, "alice")


@pytest.mark.slow
def test_keys_that_cannot_delete_are_enough_for_all_members_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob and carol write states too; alice deletes what is older."""
    monkeypatch.setattr("colab_swarm.mailbox.bucket_rounds.STATE_ROUNDS", 4)
    refused: list[str] = []

    def forbid(bucket: Any) -> None:
        async def refuse(paths: Sequence[str]) -> None:
            refused.extend(paths)
            raise BucketError("this key may not delete")

        bucket.delete = refuse

    def life(swarm: Swarm) -> Trained:
        return train(swarm, rounds=30) if swarm.name == "alice" else train(swarm, rounds=30, meddle=forbid)

    with cs.simulate(3, mailbox=True) as sim:
        agree(sim.run(life, seconds=9000), *sim.swarms, rounds=30)
        assert any(path.startswith("states/") for path in refused)
        states = [int(path.partition("/states/")[2][:8]) for path in sim.bucket.objects if "/states/" in path]
        assert max(states) == 28
        assert min(states) == 24, "alice keeps the last two"


@pytest.mark.parametrize(("peers", "samples_per_s", "most_s"), [(2, 8.0, 21.0), (3, 400.0, 8.0)])
def test_a_round_waits_two_usual_rounds_for_killed_members_and_says_so_once(
    peers: int, samples_per_s: float, most_s: float
) -> None:
    """All but bob stop without a farewell."""
    with cs.simulate(peers, mailbox=True, samples_per_s=samples_per_s) as sim:
        results = sim.run(lambda one: train(one, rounds=8 if one.name == "bob" else 4), seconds=900)
        agree(results, "bob", rounds=8)
        closed_at = closings(sim)
        waits = [end - begin for begin, end in itertools.pairwise(closed_at)]
        assert most_s <= max(waits) <= most_s + LEAST_PAUSE_S
        assert all(len(made.entries) == 1 for made in manifests(sim)[-2:]), "the others are left out"
        late = [text for text in notices(sim, "bob") if "waits for alice" in text]
        assert late and len(late) == len({text.split()[1] for text in late}), late
        assert all("s so far: it goes on in" in text for text in late)


def slowly(upload_s: float) -> Change:
    async def upload(part: Any, create: Create, path: str, data: bytes) -> bool:
        await asyncio.sleep(upload_s)
        return await create(path, data)

    return upload


def test_a_member_is_not_left_out_for_a_slow_upload() -> None:
    """It takes many times as long as the local steps; the first contributions do not know that yet."""

    def life(swarm: Swarm) -> Trained:
        return train(swarm, slowly(60.0 if swarm.name == "alice" else 90.0), rounds=8)

    with cs.simulate(2, mailbox=True, samples_per_s=100.0) as sim:
        agree(sim.run(life, seconds=3000), "alice", "bob", rounds=8)
        assert not count(sim, BatchDropped)
        members = [len({entry.member for entry in made.entries}) for made in manifests(sim)]
        assert members[3:8] == [2] * 5


@pytest.mark.slow
def test_a_member_that_is_late_again_and_again_costs_the_others_little_and_counts() -> None:
    """Carol's line needs two usual rounds for each contribution."""

    seconds = []
    for change in (None, slowly(140.0)):
        with cs.simulate(3, mailbox=True, samples_per_s=0.8) as sim:
            results = sim.run(
                lambda one: train(one, change if one.name == "carol" else None, rounds=20),  # noqa: B023
                seconds=6000,
            )
            agree(results, "alice", "bob", rounds=20)
            seconds.append(max(at for path, (_, at) in sim.bucket.objects.items() if "/00000019-" in path))
            carol = sim.swarms["carol"].id
            counted = sum(carol == entry.member for made in manifests(sim) for entry in made.entries)
            late = {event.peer for swarm in sim.swarms.values() for event in swarm.events.recent(Waited)}
    assert carol.hex() in late and counted > 5
    assert seconds[1] < 1.5 * seconds[0], "of the time of three members that are all in time"


def test_no_round_waits_for_a_member_that_handed_over_before_its_last_round_was_over() -> None:
    def life(swarm: Swarm) -> float:
        alice = swarm.name == "alice"
        train(swarm, rounds=3 if alice else 6, leave_s=1.0 if alice else 0.0)
        return swarm.runtime.time()

    with cs.simulate(2, mailbox=True) as sim:
        left_at = sim.run(life, seconds=900)["alice"]
        alice = sim.swarms["alice"].id
        last = max(one.round for one in manifests(sim) if alice in {entry.member for entry in one.entries})
        closed_at = closings(sim)
        assert left_at < closed_at[last]
        assert max(end - begin for begin, end in itertools.pairwise(closed_at[last:])) < 60


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "overlap"), [("int8", True), ("sparseloco", False)])
def test_peers_join_crash_return_and_leave(compression: str, overlap: bool) -> None:
    def life(swarm: Swarm) -> Trained:
        carol = swarm.name == "carol"
        if swarm.name == "dave":
            folder = f"runs/{swarm.run_id}/model"
            for garbage in (f"states/99999999-{bytes(8).hex()}", "states/x", "rounds/x"):
                swarm.runtime.call(sim.bucket.create(f"{folder}/{garbage}", b"garbage"))
        return train(
            swarm, rounds=5 if carol else 20, leave_s=120.0 * carol, compression=compression, overlap=overlap
        )

    with cs.simulate(3, mailbox=True) as sim:
        sim.network.at(40.0).crash("bob")
        sim.join("dave", at=50.0)
        sim.join("bob", at=90.0)
        carol = sim.swarms["carol"]
        results = sim.run(life, seconds=1500)
        agree(results, "alice", "bob", "dave", rounds=20)
        entries = [entry for one in manifests(sim) for entry in one.entries if entry.member == carol.id]
        assert sum(entry.samples for entry in entries) == results["carol"].samples, (
            "its last samples count too"
        )
        for name in ("alice", "dave"):
            assert results[name].requests <= 20 * len(results[name].lineages)
        assert any("states/00000016" in path for path in sim.bucket.objects)
        assert f"states/99999999-{bytes(8).hex()} does not count" in faults(sim, "dave")


def test_a_peer_that_slept_while_its_rounds_were_deleted_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.mailbox.bucket_rounds.STATE_ROUNDS", 4)
    reads = Counter[str]()

    async def looked(path: str, most_bytes: int | None) -> bytes | None:
        if "/states/" in path and sim.time > 40:
            reads[path] += 1
        return await read(path, most_bytes)

    with cs.simulate(3, mailbox=True) as sim:
        read, sim.bucket.read = sim.bucket.read, looked  # type: ignore[method-assign]
        sim.network.at(40.0).freeze("bob", 200.0)
        agree(sim.run(lambda swarm: train(swarm, rounds=32), seconds=1500), *sim.swarms, rounds=32)
        assert len(sim.swarms["bob"].events.recent(StateReceived)) == 2
        assert min(one.round for one in manifests(sim)) > 12
        assert max(reads.values()) == 2, "its head, and all of it once"


@pytest.mark.parametrize("overlap", [False, True])
def test_wait_step_ends_in_time_though_the_bucket_is_away(overlap: bool) -> None:
    def wait(swarm: Swarm) -> float:
        optimizer = join_training(swarm, net := model(), **SETTINGS, overlap=overlap)
        loss_of(net, 0).backward()
        swarm.runtime.call(asyncio.sleep(5.0))
        if overlap:
            optimizer.step(samples=200)  # a round begins beside the trainer
        began = swarm.runtime.time()
        assert optimizer.wait_step(20.0) is None
        optimizer.close(hand_over_s=10.0)
        return swarm.runtime.time() - began

    with cs.simulate(1, mailbox=True) as sim:
        fail(sim, OSError("off"), 5.0, math.inf)
        assert 20.0 <= sim.run(wait)["alice"] <= 31.0


def follow_a_plan(swarm: Swarm, **settings: Any) -> torch.Tensor:
    """Four rounds of three local steps each, of one batch."""
    optimizer = join_training(swarm, net := model(), target_batch_size=40, local_steps=3, **settings)
    rounds: Any = optimizer.rounds
    rows = ROWS[swarm.name]
    samples = rows.stop - rows.start
    count = rounds.count

    def counted(samples: float, now: float) -> None:
        count(samples, now)
        rounds.share.granted = 3 * samples

    rounds.count = counted
    swarm.runtime.call(asyncio.sleep(30.0))
    if not swarm.services.mailbox:
        wait_for_peers(swarm, optimizer, 2)
    for batch in range(12):
        loss_of(net, batch, rows).backward()
        optimizer.step(samples=samples)
        if batch % 3 == 2:
            optimizer._trainer.land(wait=True)
    assert optimizer.global_step == 4
    return torch.cat([one.detach().flatten() for one in optimizer._replica.parameters])


@pytest.mark.parametrize(
    ("compression", "error", "overlap"),
    [("float32", 1e-6, True), ("sparseloco", 1e-6, False), ("int8", 2e-3, False)],
)
def test_training_equals_that_over_links(
    compression: str, error: float, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for int8, as nobody encodes its own contribution there."""

    def both(chain: RoundChain, present: set[PeerId], *_: Any) -> float:
        return chain.closed_at if len(present) == 2 else math.inf

    def full(batch: Batch) -> bool:
        return sum(one.ready for one in batch.participants.values()) == 2

    monkeypatch.setattr(RoundChain, "due_at", both)
    monkeypatch.setattr(Batch, "full", property(full))
    monkeypatch.setattr(Batch, "next_grants", lambda *_: {})
    monkeypatch.setattr(Batch, "next_shares", lambda batch, _: dict.fromkeys(batch.participants, 1.0))
    settings = {"compression": compression, "overlap": overlap, "mean_compression": "float32"}
    found = []
    for mailbox in (False, True):
        with cs.simulate(1, network="lan", mailbox=mailbox) as sim:
            sim.join(
                "bob", listen=False
            )  # so that alice reduces all: sparseloco takes the largest of each span
            results = sim.run(lambda swarm: follow_a_plan(swarm, **settings), seconds=900)
            assert torch.equal(results["alice"], results["bob"])
            found.append(results["alice"])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=error)
    assert not torch.allclose(found[0], torch.cat([one.flatten() for one in model().parameters()]), atol=0.01)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plateau_goes_by_the_losses_of_a_rounds_contributions(overlap: bool) -> None:
    """Alice's batches have a loss of 1, bob's of 3; a late joiner applies the same."""

    def train(swarm: Swarm) -> tuple[bytes, dict[str, Any], float]:
        inner = torch.optim.SGD((net := model()).parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(inner, patience=0, factor=0.5)
        options = {**SETTINGS, "overlap": overlap, "min_peers": 2}
        optimizer = swarm.optimizer(inner, scheduler=scheduler, **exchanged(options))
        loss = 3.0 if swarm.name == "bob" else 1.0
        while optimizer.global_step < 5 and swarm.name != "carol":
            loss_of(net, 0).backward()
            optimizer.step(samples=4, loss=loss)
        optimizer.close()
        return optimizer.lineage, scheduler.state_dict(), inner.param_groups[0]["lr"]

    with cs.simulate(2, mailbox=True) as sim:
        sim.join("carol", at=400.0)
        results = sim.run(train, seconds=900)
        writers = [len(manifest.entries) for manifest in manifests(sim)]
    assert max(writers) == 2
    assert results["alice"] == results["bob"] == results["carol"]
    _, state, rate = results["carol"]
    assert 1.0 < state["best"] < 3.0 and state["last_epoch"] >= 5 and rate < 0.1


HOUR = 3600.0
LATEST = 2  # rounds in which a contribution may still be listed


def test_a_run_goes_on_for_a_day_though_no_process_lives_for_more_than_an_hour() -> None:
    """Each is killed, and often nobody is online; the rounds follow each other, and each contribution counts once."""
    losses, alive, rng = list[float](), list[float](), random.Random(1)
    told = set[tuple[PeerId, int]]()

    def train(swarm: Swarm) -> None:
        settings = {"target_batch_size": 1500, "local_steps": 2, "compression": "sparseloco"}
        optimizer = join_training(swarm, net := model(), **settings)
        while True:
            loss_of(net, optimizer.global_step % 8).backward()
            if (result := optimizer.step(samples=500)) is not None:
                with torch.no_grad():
                    losses.append(sum(loss_of(net, step).item() for step in range(8)))
                if swarm.id in result.contributors:
                    told.add((swarm.id, result.step))

    with cs.simulate(1, mailbox=True, samples_per_s=5.0) as sim:
        log, create = list[tuple[str, bytes]](), sim.bucket.create

        async def logged(path: str, data: bytes) -> bool:
            if written := await create(path, data):
                log.append((path, bytes(data)))
            return written

        sim.bucket.create = logged  # type: ignore[method-assign, assignment]
        name, begin, gaps = "alice", 0.0, 0
        while begin < 24 * HOUR:
            alive.append(end := begin + rng.uniform(0.5, 1.0) * HOUR)
            sim.network.at(end).crash(name)
            begin += rng.uniform(0.5, 1.2) * HOUR
            gaps += begin > max(alive)
            if begin < 24 * HOUR:
                sim.join(name := f"runner{len(alive)}", at=begin)
        sim.run(train, seconds=24 * HOUR)
        to_come = len(sim.network.coming)  # after the end
        states = [path for path in sim.bucket.objects if "/states/" in path]

    assert len(alive) - to_come > 24 and gaps > 5
    assert losses[-1] < losses[0]
    assert len(states) == 2 and sum("/states/" in path for path, _ in log) >= 3
    places = [(place, data) for path, data in log if (place := PLACE.search(path)) is not None]
    written = {(PeerId(bytes.fromhex(place[2])), int(place[1])) for place, _ in places if place[2]}
    closed = [data for place, data in places if not place[2]]
    made = [unseal(data, RoundManifest)[0] for data in closed]
    assert [one.round for one in made] == list(range(len(made))) and len(made) > 40
    assert [one.base for one in made[1:]] == [content_digest(data) for data in closed[:-1]]
    listed = [(entry.member, entry.round) for one in made for entry in one.entries]
    assert len({member for member, _ in listed}) > 20
    assert len(listed) == len(set(listed)) and set(listed) <= written
    assert all(lost_round >= len(made) - LATEST for _, lost_round in written - set(listed))
    assert len(told) > 20 and told <= {(entry.member, one.round) for one in made for entry in one.entries}
