"""Attacks by one member on a run in a bucket, in virtual time. It has the bucket's keys, and only adds objects."""

import asyncio
import os
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from colab_swarm.errors import BucketError
from colab_swarm.events import BatchDropped, PeerRefused, StateReceived, Waited
from colab_swarm.mailbox.contributions import encode, entries_of
from colab_swarm.mailbox.rounds import (
    Card,
    PseudoGradient,
    RoundChain,
    RoundManifest,
    StateHead,
    content_digest,
    folder_of,
    numbered,
    seal,
    unseal,
)
from colab_swarm.net.identity import Identity
from colab_swarm.tensors.chunks import Snapshot, pack, unpack
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.records import LINEAGE_BYTES, SKETCH_STEPS, StateSketch
from tests.attacks.bucket import (
    LEAST_WILD,
    USUAL_S,
    Attack,
    Mallory,
    assert_held,
    run,
    undisturbed,
    unreadable,
)


async def ghosts_all_the_time(mallory: Mallory) -> None:
    """Each second another manifest that nobody can follow."""
    while True:
        await mallory.look()
        await mallory.close(unreadable(mallory))
        await asyncio.sleep(1.0)


async def ghosts_once_a_round(mallory: Mallory) -> None:
    while True:
        await mallory.look()
        await mallory.close(unreadable(mallory))
        await mallory.wait_round()


async def ghosts_before_another_one(mallory: Mallory) -> None:
    """A manifest just before another peer may replace the last one, each time."""
    while True:
        manifests = (await mallory.look()).listing.manifests.get(mallory.chain.folder, [])
        newest = max((place.modified_at for place in manifests), default=-1e9)
        if mallory.journal.bucket.now() >= newest + mallory.chain.missing_s - 0.6:
            await mallory.close(unreadable(mallory))
        await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(ghosts_all_the_time, marks=pytest.mark.ordeal),
        pytest.param(ghosts_once_a_round, marks=pytest.mark.ordeal),
        ghosts_before_another_one,
    ],
)
def test_manifests_that_nobody_can_follow_cost_two_rounds(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert outcome.named(Waited)


def forged(mallory: Mallory, chain: RoundChain) -> Snapshot:
    """The state of this member with other parameters."""
    held = mallory.rounds.model.snapshot()
    state = unpack(held.manifest.layout, held.blob.copy())
    state["step"] = chain.round
    state["parameters"] = {name: torch.full_like(one, 7.0) for name, one in state["parameters"].items()}
    state["lineage"] = lineage = chain.base[:LINEAGE_BYTES]
    return Snapshot.of(lineage, chain.round, *pack(state))


async def write_state(mallory: Mallory, chain: RoundChain, place: int = 0) -> None:
    state = forged(mallory, chain)
    blob = memoryview(state.blob.data)
    data = mallory.journal.signed(StateHead, blob, chain=chain, manifest=state.head)
    await mallory.write(numbered(f"states/{chain.round:08d}", place), data)


async def later_run_of_its_own(mallory: Mallory) -> None:
    """A state of round 9000 with other parameters, contributions and manifests to the rounds after it."""
    while True:
        await mallory.look()
        own = mallory.chain
        other = RoundChain.begin(9000 + own.round, os.urandom(32), now=mallory.journal.bucket.now())
        await write_state(mallory, other)
        mallory.chain = other
        await mallory.contribute(other.round, np.zeros(mallory.journal.numel))
        await mallory.close(entries_of(mallory.chain, await mallory.offers()))
        mallory.chain = own
        await mallory.wait_round()


async def false_states_of_this_run(mallory: Mallory) -> None:
    """Each round a state of it with other parameters, of the true chain."""
    while True:
        await mallory.look()
        await write_state(mallory, mallory.chain)
        await mallory.wait_round()


async def next_round_built_on_a_ghost(mallory: Mallory) -> None:
    """A manifest that nobody can follow, and the manifest of the next round upon it."""
    while True:
        await mallory.look()
        chain = mallory.chain
        entries = unreadable(mallory)
        await mallory.close(entries)
        listing = (await mallory.journal.look(chain)).listing
        for place in listing.manifests.get(chain.folder, []):
            data = await mallory.journal.bucket.read(place.path)
            head, _ = unseal(data, RoundManifest)
            if head.member == mallory.id:
                digest = content_digest(data)
                after = chain.after(head, digest, closed_at=place.modified_at)
                mallory.chain = after
                await mallory.contribute(after.round, np.zeros(mallory.journal.numel))
                await mallory.close(entries_of(mallory.chain, await mallory.offers()), after)
        mallory.chain = chain
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack",
    [
        later_run_of_its_own,
        pytest.param(false_states_of_this_run, marks=pytest.mark.ordeal),
        pytest.param(next_round_built_on_a_ghost, marks=pytest.mark.ordeal),
    ],
)
def test_a_state_moves_nobody_that_can_follow_the_rounds(attack: Attack) -> None:
    assert_held(run(attack))


async def garbage_for_states(mallory: Mallory) -> None:
    await mallory.write("card/a", mallory.journal.signed(Card, schema=b"another", agreement=()))
    await mallory.write("card/0", b"colab_swarm\x63 of another version")
    for round in range(0, 400, 16):
        for place in range(3):
            await mallory.write(numbered(f"states/{round:08d}", place), b"garbage")
            fields = {"chain": RoundChain.begin(round, os.urandom(32), now=0.0), "manifest": b"junk"}
            data = mallory.journal.signed(StateHead, b"x", **fields)
            await mallory.write(numbered(f"states/{round:08d}", 3 + place), data)


async def later_run(mallory: Mallory) -> None:
    await later_run_of_its_own(mallory)


async def false_chains(mallory: Mallory) -> None:
    """Garbage, and each round states whose chain says something false."""
    await garbage_for_states(mallory)
    while True:
        await mallory.look()
        chain = mallory.chain
        members = tuple(os.urandom(32) for _ in range(50))
        listed = tuple(
            (each, round) for each in chain.members for round in range(chain.round, chain.round + 200)
        )
        lies: tuple[dict[str, Any], ...] = (
            {"digests": {**chain.digests, chain.round: os.urandom(32)}},
            {"members": members, "pace_s": 6 * 3600.0},
            {"listed": listed, "closed_at": 9e11},
        )
        for place, lie in enumerate(lies, 9):
            await write_state(mallory, msgspec.structs.replace(chain, **lie), place)
        await mallory.wait_round()


async def first_states_amid_the_rounds(mallory: Mallory) -> None:
    """States of true rounds, which say that nothing was before them: with them, any lineage would do."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await write_state(mallory, msgspec.structs.replace(chain, digests={chain.round: chain.base}), 9)
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel))
        await mallory.wait_round()


async def crowd(mallory: Mallory) -> None:
    """Garbage of hundreds of names in the folder of each round, and a later run of its own."""
    own = asyncio.create_task(later_run_of_its_own(mallory))
    base = b""
    try:
        while True:
            await asyncio.sleep(0.5)
            chain = mallory.rounds._follower.chain if mallory.chain.round >= 9000 else mallory.chain
            if chain.base == base:
                continue
            base = chain.base
            for number in range(260):
                name = number.to_bytes(4, "big") + base[:28]
                await mallory.write(f"{chain.folder}/{name.hex()}", b"x")
    finally:
        own.cancel()


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_late_joiner_that_got_a_false_state_of_the_true_rounds_finds_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.attacks.bucket.ATTACK_S", 1500.0)
    outcome = run(false_states_of_this_run, late="zoe")
    received = [event for event in outcome.events["zoe"] if isinstance(event, StateReceived)]
    givers = [event.donors == (outcome.mallory,) for event in received]
    assert givers[0] and not givers[-1], "a false one first, and a true one as soon as there is one"
    assert outcome.losses["zoe"][-1] == outcome.losses["alice"][-1]
    assert all(len(lineages) == 1 for lineages in outcome.lineages.values())


@pytest.mark.parametrize(
    "attack",
    [
        false_chains,
        pytest.param(later_run, marks=pytest.mark.ordeal),
        pytest.param(crowd, marks=[pytest.mark.slow, pytest.mark.ordeal]),
        pytest.param(first_states_amid_the_rounds, marks=[pytest.mark.slow, pytest.mark.ordeal]),
    ],
)
def test_a_late_joiner_finds_the_state_of_most_members(attack: Attack) -> None:
    outcome = run(attack, late="zoe")
    received = [event for event in outcome.events["zoe"] if isinstance(event, StateReceived)]
    assert outcome.mallory not in [donor for event in received for donor in event.donors]
    assert len(outcome.steps["zoe"]) >= 5 and received
    del outcome.steps["zoe"], outcome.events["zoe"]
    assert_held(outcome)


async def garbage_for_contributions(mallory: Mallory) -> None:
    """Objects in the places where the others contribute, as soon as a round begins."""
    while True:
        await mallory.look()
        for member in mallory.chain.members:
            if member != mallory.id:
                await mallory.write(f"{mallory.chain.folder}/{member.hex()}", b"garbage")
                await mallory.write(f"{mallory.chain.folder}/{member.hex()}-00000000", b"garbage")
        await mallory.wait_round()


async def contributions_of_others(mallory: Mallory) -> None:
    """Its own contribution, in the others' places."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await mallory.contribute(chain.round, np.zeros(mallory.journal.numel))
        data = await mallory.journal.bucket.read(f"{chain.folder}/{mallory.id.hex()}")
        for member in chain.members:
            await mallory.write(f"{chain.folder}/{member.hex()}", data)
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack", [garbage_for_contributions, pytest.param(contributions_of_others, marks=pytest.mark.ordeal)]
)
def test_garbage_in_the_place_of_a_contribution_blocks_nobody(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert not outcome.all(BatchDropped)


async def triple(mallory: Mallory, **fields: Any) -> None:
    """A contribution to each round that is open, in three places each."""
    scale = fields.pop("scale", 1e-3)
    while True:
        await mallory.look()
        for round in mallory.chain.folders:
            values = scale * np.random.default_rng(round).standard_normal(mallory.journal.numel)
            for place in range(3):
                with suppress(BucketError):
                    await mallory.contribute(round, values, place, **fields)
        await mallory.wait_round()


async def huge(mallory: Mallory) -> None:
    await triple(mallory, scale=1e6, weight=1000.0)


async def zero(mallory: Mallory) -> None:
    await triple(mallory, scale=0.0, weight=1e-6)


async def slow_pace(mallory: Mallory) -> None:
    await triple(mallory, seconds=9e11)


async def fast_pace(mallory: Mallory) -> None:
    await triple(mallory, seconds=0.0)


@pytest.mark.parametrize(
    "attack",
    [
        huge,
        pytest.param(zero, marks=pytest.mark.ordeal),
        pytest.param(slow_pace, marks=pytest.mark.ordeal),
        pytest.param(fast_pace, marks=pytest.mark.ordeal),
    ],
)
@pytest.mark.parametrize("honest", [pytest.param(2, marks=pytest.mark.ordeal), 3])
def test_a_member_has_one_vote_and_one_entry(attack: Attack, honest: int) -> None:
    assert_held(run(attack, honest), honest)


async def copies_of_manifests(mallory: Mallory) -> None:
    """Two old manifests of each member in the folder of each new round."""
    bucket = mallory.journal.bucket
    copies = dict[bytes, bytes]()
    while True:
        listing = (await mallory.look()).listing
        chain = mallory.chain
        for place in listing.manifests.get(folder_of(chain.round - 1, chain.digests[chain.round - 1]), ()):
            data = await bucket.read(place.path)
            head, _ = unseal(data, RoundManifest)
            if head.round == chain.round - 1:
                copies[head.member] = data
        for number, data in enumerate(2 * list(copies.values())):
            await mallory.write(f"{chain.folder}/manifest-{number:02d}", data)
        await mallory.wait_round()


async def copies_of_contributions(mallory: Mallory) -> None:
    """Each contribution in each place of the others."""
    while True:
        await mallory.look()
        await asyncio.sleep(0.7 * mallory.chain.pace_s)
        listing = (await mallory.look()).listing
        chain = mallory.chain
        for place in listing.contributions.get(chain.folder, ())[:5]:
            data = await mallory.journal.bucket.read(place.path)
            for folder in chain.folders.values():
                for member in chain.members:
                    await mallory.write(f"{folder}/{member.hex()}-{os.urandom(4).hex()}", data)
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack", [copies_of_manifests, pytest.param(copies_of_contributions, marks=pytest.mark.ordeal)]
)
def test_copies_of_what_others_wrote_are_not_theirs(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert not outcome.all(PeerRefused)


async def fewest_members(mallory: Mallory) -> None:
    """Contributes at once, and closes each round with the fewest members that make a quorum."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel))
        while mallory.chain.base == chain.base:
            offers = sorted(await mallory.offers(), key=lambda each: each.entry.member != mallory.id)
            most = len(chain.members) // 2 + 1
            if len(offers) >= most:
                await mallory.close(entries_of(mallory.chain, offers[:most]))
            await asyncio.sleep(0.3)


async def wrong_weights(mallory: Mallory) -> None:
    """A hundred readable manifests a round with wrong samples."""
    while True:
        await mallory.look()
        chain = mallory.chain
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel))
        offers = await mallory.offers()
        entries = entries_of(mallory.chain, offers) if offers else ()
        lies = tuple(msgspec.structs.replace(entry, samples=entry.samples + 1) for entry in entries)
        for _ in range(100):
            if lies:
                await mallory.close(lies)
        await mallory.wait_round()


@pytest.mark.parametrize("attack", [fewest_members, pytest.param(wrong_weights, marks=pytest.mark.ordeal)])
def test_a_manifest_that_leaves_members_out_or_lies_does_not_count(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert outcome.named(PeerRefused)
    assert not outcome.all(BatchDropped)


async def late_each_time(mallory: Mallory) -> None:
    """Contributes after one and a half usual rounds."""
    while True:
        await mallory.look()
        await asyncio.sleep(1.5 * mallory.chain.pace_s)
        await mallory.look()
        for round in mallory.chain.folders:
            await mallory.contribute(round, 1e-3 * np.ones(mallory.journal.numel))


async def another_member_each_round(mallory: Mallory) -> None:
    """Contributes once under each of many identities."""
    journal = mallory.journal
    figures: dict[str, Any] = {
        "weight": 4.0,
        "samples": 4.0,
        "samples_per_s": 1.0,
        "seconds": 1.0,
        "name": "new",
    }
    content = encode(journal.codec, HostVector(np.full(journal.numel, 1e-3, np.float32)))
    while True:
        await mallory.look()
        chain = mallory.chain
        member = Identity(os.urandom(32))
        head = PseudoGradient(
            prefix=journal._prefix,
            key=member.public_key,
            membership=journal._services.peers.membership,
            content=content_digest(content),
            round=chain.round,
            base=chain.base,
            **figures,
        )
        path = f"{chain.folder}/{member.id.hex()}"
        await mallory.write(path, seal(head.signed(member.sign), content))
        await mallory.wait_round()


@pytest.mark.ordeal
def test_members_that_come_for_one_round_are_not_awaited() -> None:
    outcome = run(another_member_each_round)
    assert_held(outcome)
    waited = [event for events in outcome.events.values() for event in events if isinstance(event, Waited)]
    assert {event.peer for event in waited} <= outcome.hostile


async def each_second_round(mallory: Mallory) -> None:
    while True:
        await mallory.look()
        await mallory.contribute(mallory.chain.round, 1e-3 * np.ones(mallory.journal.numel))
        await mallory.wait_round()
        await mallory.wait_round()


@pytest.mark.parametrize(
    "attack", [late_each_time, pytest.param(each_second_round, marks=pytest.mark.ordeal)]
)
def test_a_member_that_is_late_again_and_again_is_not_awaited(attack: Attack) -> None:
    outcome = run(attack)
    assert_held(outcome)
    assert outcome.named(Waited)


def kept(honest: int, hostile: int, seed: int) -> float:
    """Return the part of the rounds that wild members leave the honest ones."""
    outcome = run(None, honest, hostile, seed=seed, wild=True)
    calm = undisturbed(honest, hostile)
    part = outcome.fewest / calm.fewest
    charged_s = Counter[str]()
    for event in outcome.all(Waited):
        if event.peer not in outcome.hostile:
            charged_s[event.peer] += event.seconds
    print(f"seed {seed}: {part:.2f} with {hostile} of {honest + hostile}, {outcome.moods}, {charged_s}")
    assert outcome.moods.total() >= 3
    assert all(len(lineages) == 1 for lineages in outcome.lineages.values())
    assert max(charged_s.values(), default=0.0) <= USUAL_S
    return part


@pytest.mark.slow
@pytest.mark.parametrize(("honest", "hostile"), [pytest.param(2, 1, marks=pytest.mark.ordeal), (3, 2)])
def test_wild_members_leave_the_others_most_of_their_rounds(honest: int, hostile: int) -> None:
    assert kept(honest, hostile, 0) >= LEAST_WILD


@pytest.mark.slow
@pytest.mark.ordeal
@pytest.mark.parametrize("seed", range(1, 40))
def test_wild_members_of_any_kind_leave_the_others_most_of_their_rounds(seed: int) -> None:
    honest, hostile = ((2, 1), (3, 2))[seed % 2]
    assert kept(honest, hostile, seed) >= LEAST_WILD


async def false_sketches(mallory: Mallory) -> None:
    """Trains no more, and says each ten steps that its state is another."""
    sketch: StateSketch | None = None
    while True:
        await mallory.look()
        chain = mallory.chain
        if chain.round % SKETCH_STEPS == 0:
            sketch = StateSketch(chain.round, chain.base[:LINEAGE_BYTES], (9.0,) * 15)
        await mallory.contribute(chain.round, 1e-3 * np.ones(mallory.journal.numel), sketch=sketch)
        await mallory.wait_round()


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_minority_that_says_to_hold_another_state_moves_nobody() -> None:
    assert_held(run(false_sketches, 3, 2))
