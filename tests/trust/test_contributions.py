"""The contribution ledger: nothing is lost, nothing invented, nobody credits itself."""

import asyncio
from collections.abc import Sequence
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.group import Group, GroupMember, RoundTerms
from colab_swarm.dht.records import Record
from colab_swarm.errors import PeerError
from colab_swarm.net.identity import id_of
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.trust import contributions as module
from colab_swarm.trust.contributions import MAX_ROWS, Contribution, ContributionLedger, Contributions
from tests.dht.swarm import Member, swarm

pytestmark = pytest.mark.virtual_time
RUN = "my-run-0badcafe"
KEYS = [sha256(bytes([i])).digest() for i in range(5)]


def peer(index: int) -> PeerId:
    return id_of(KEYS[index])


def group(weights: Sequence[float], shares: Sequence[float], numel: int = 100) -> Group:
    members = [
        GroupMember(peer(i), (), weight, share, samples=weight)
        for i, (weight, share) in enumerate(zip(weights, shares, strict=True))
    ]
    members.sort(key=lambda member: member.id)
    return Group(bytes(16), RoundTerms("", 1, b"", numel), tuple(members))


def tallies(round_: Group) -> list[module.ContributionTally]:
    everybody = [member.id for member in round_.members]
    written = []
    for key in KEYS[: len(everybody)]:
        ledger = ContributionLedger(id_of(key))
        ledger.on_round(round_, everybody)
        written.append(module.ContributionTally(key, ledger.rows()))
    return written


PARTS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 10)), min_size=2, max_size=5)


@given(PARTS)
def test_what_all_reducers_credit_adds_up_to_the_weight(parts: list[tuple[float, float]]) -> None:
    weights, shares = zip(*parts, strict=True)
    if sum(share > 1e-3 for share in shares) == 0:
        return
    shares = tuple(share if share > 1e-3 else 0.0 for share in shares)
    found = {one.peer: one for one in module.leaderboard(tallies(group(weights, shares)))}
    for index, weight in enumerate(weights):
        credited = found.get(peer(index), Contribution(peer(index)))
        assert credited.samples == pytest.approx(weight, rel=1e-6)


def test_a_round_in_a_bucket_credits_samples_that_add_up_and_no_reducing() -> None:
    samples = {peer(0): 8.0, peer(1): 4.0, peer(2): 2.0}
    written = []
    for key in KEYS[:3]:
        ledger = ContributionLedger(id_of(key))
        ledger.on_bucket_round(samples)
        written.append(module.ContributionTally(key, ledger.rows()))
    found = module.leaderboard(written)
    assert {one.peer: one.samples for one in found} == samples
    assert not any(one.reduced_bytes for one in found)


def test_the_only_reducer_is_credited_by_those_that_got_its_means() -> None:
    found = module.leaderboard(tallies(group([8.0, 4.0, 0.0], [1.0, 0.0, 0.0])))
    assert {one.peer: one.samples for one in found} == {peer(0): 8.0, peer(1): 4.0}
    assert module.leaderboard(tallies(group([8.0], [1.0]))) == ()  # a round of one is not counted


def test_reducers_are_credited_with_the_spans_that_the_others_got_from_them() -> None:
    found = {one.peer: one for one in module.leaderboard(tallies(group([1.0, 1.0, 1.0], [3.0, 1.0, 0.0])))}
    assert found[peer(0)].reduced_bytes == 2 * 75 * 4 and found[peer(1)].reduced_bytes == 2 * 25 * 4
    assert found[peer(2)].reduced_bytes == 0


def test_a_lost_span_and_a_lost_contribution_earn_nothing() -> None:
    round_, ledger = group([1.0, 1.0], [1.0, 1.0]), ContributionLedger(peer(0))
    ledger.on_round(round_, [peer(0)], spans_lost=[round_.spans()[round_.index_of(peer(1)) or 0]])
    assert ledger.rows() == ()


def test_no_peer_credits_itself() -> None:
    ledger = ContributionLedger(peer(0))
    ledger.credit(peer(0), "units", 5)
    assert ledger.rows() == ()
    own, row = module.TallyRow(peer(0), (9.0,) * 5), module.TallyRow(peer(1), (1.0, 0, 0, 0, 0))
    forged = module.ContributionTally(KEYS[0], (own, row, row))  # and no other twice
    assert module.leaderboard([forged]) == (Contribution(peer(1), samples=1.0),)


def test_the_two_ends_of_a_circuit_credit_its_relay_with_what_it_carried() -> None:
    ends = [ContributionLedger(peer(0)), ContributionLedger(peer(1))]
    for total in (1000, 1000, 5000):
        for ledger in ends:
            ledger.on_totals("relayed_bytes", {peer(2): total}, 0.5)
    shown = zip(KEYS, ends, strict=False)
    tallied = [module.ContributionTally(key, ledger.rows()) for key, ledger in shown]
    assert module.leaderboard(tallied) == (Contribution(peer(2), relayed_bytes=5000.0),)


def test_a_callers_experts_are_credited_to_their_hosts_once_each() -> None:
    caller = ContributionLedger(peer(0))
    for calls in ({peer(1): 3}, {peer(1): 3}, {peer(1): 10, peer(2): 4}, {peer(0): 7, peer(1): 10}):
        caller.on_totals("expert_calls", calls)
    tally = module.ContributionTally(KEYS[0], caller.rows())
    shown = module.leaderboard([tally])
    assert {row.peer: row.expert_calls for row in shown} == {peer(1): 10.0, peer(2): 4.0}


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
def test_nonsense_is_not_credited(amount: float) -> None:
    with pytest.raises(ValueError, match="cannot be credited"):
        ContributionLedger(peer(0)).credit(peer(1), "samples", amount)


def test_the_tally_is_bounded_and_keeps_the_largest() -> None:
    ledger = ContributionLedger(peer(0))
    for i in range(3 * MAX_ROWS):
        ledger.credit(PeerId(i.to_bytes(32)), "units", 1.0 + i)
    rows = ledger.rows()
    assert len(rows) == MAX_ROWS and rows[0].amounts[module.KINDS.index("units")] == 3 * MAX_ROWS


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats()
VALUES = st.recursive(
    PLAIN | st.binary(max_size=40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.binary(max_size=40) | (VALUES | st.tuples(st.just(KEYS[0]), VALUES)).map(msgspec.msgpack.encode))
def test_any_value_is_a_tally_or_ignored(value: bytes) -> None:
    tally = module.tally_of(Record(value, 0.0, 0, 0.0, owner=KEYS[0]))
    assert tally is None or tally.key == KEYS[0]


def service_of(member: Member) -> Contributions:
    return Contributions(member.peers, member.dht, RUN)


async def run_of(count: int) -> tuple[list[Member], list[Contributions]]:
    _, members = await swarm(count)
    return members, list(map(service_of, members))


async def test_all_peers_read_the_same_leaderboard_which_outlives_a_restart() -> None:
    members, services = await run_of(4)
    alice, bob, _, dave = (member.peers.id for member in members)
    services[0].ledger.credit(bob, "samples", 10.0)
    services[1].ledger.credit(alice, "samples", 4.0)
    services[2].ledger.credit(alice, "samples", 3.0)
    services[2].ledger.credit(dave, "relayed_bytes", 1e6)
    for service in (*services, *services):  # resume, then publish
        await service.tick()
    one, two = Contribution(bob, samples=10.0), Contribution(alice, samples=7.0)
    expected = (one, two, Contribution(dave, relayed_bytes=1e6))
    assert [await service.read() for service in services] == [expected] * 4
    await services[2].stop()
    again = service_of(members[2])
    await again.resume()
    again.ledger.credit(alice, "samples", 1.0)
    await again.publish()
    assert (await services[0].read())[1] == Contribution(alice, samples=8.0)
    for pause_s, renewed in ((module.RECORD_S / 4, True), (1.0, False)):
        published_at = again._published_at
        await asyncio.sleep(pause_s)
        await again.publish()
        assert (again._published_at > published_at) is renewed


async def test_a_saved_tally_that_makes_no_sense_is_dropped() -> None:
    _, (service,) = await run_of(1)
    service.saved = (module.TallyRow(peer(1), (-1.0, 0.0, 0.0, 0.0, 0.0)),)
    with pytest.raises(ValueError, match=r"-1\.0"):
        await service.tick()
    service.ledger.credit(peer(1), "samples", 3.0)
    await service.tick()
    assert await service.read() == (Contribution(peer(1), samples=3.0),)


async def test_no_tally_is_published_before_the_last_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    members, (first, reader) = await run_of(2)
    dht, alice = members[0].dht, peer(1)
    first.ledger.credit(alice, "samples", 7.0)
    await first.publish()
    records, failures = dht.records, []

    async def failing(key: str | bytes) -> tuple[Record, ...]:
        if len(failures) < 2:
            failures.append(key)
            raise PeerError("cut off")
        return await records(key)

    monkeypatch.setattr(dht, "records", failing)
    for ticks, samples in ((1, 7.0), (2, 8.0)):  # stopped before it could read, and after
        service = service_of(members[0])
        service.ledger.credit(alice, "samples", 1.0)
        for _ in range(ticks):
            await service.tick()
        await service.stop()
        assert (await reader.read())[0].samples == samples
    assert len(failures) == 2


async def test_only_what_reducers_and_workers_wrote_counts() -> None:
    members, services = await run_of(4)
    roles = (Role.WORKER, Role.REDUCER, Role.VIEWER, Role.GUEST)
    for member, service, role, amount in zip(members, services, roles, (1.0, 2.0, 4.0, 8.0), strict=True):
        member.peers.role = role
        service.ledger.credit(PeerId(b"t" * 32), "units", amount)
        await service.publish()
    assert await services[0].read() == (Contribution(PeerId(b"t" * 32), units=3.0),)


async def test_a_tally_published_under_many_keys_is_counted_once() -> None:
    members, services = await run_of(3)
    bob = services[1]
    bob.ledger.credit(members[0].peers.id, "samples", 5.0)
    await bob.publish()
    for shard in range(8):
        await members[1].dht.publish(f"{RUN}/credits/{shard}", bob._own_tally(), ttl_s=60)
    for service in services:
        assert await service.read() == (Contribution(members[0].peers.id, samples=5.0),)


async def test_a_stranger_s_record_is_passed_over() -> None:
    members, (service, *_) = await run_of(3)
    for shard in range(8):
        for value in ({"a": 1}, [b"k" * 32, []], [members[1].peers.public_key, [[b"x", [1]]]]):
            await members[1].dht.publish(f"{RUN}/credits/{shard}", value, ttl_s=60)
    assert await service.read() == ()
