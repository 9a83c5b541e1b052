"""The contribution ledger: nothing is lost, nothing invented, nobody credits itself."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from colab_swarm.averaging.group import Group, GroupMember, RoundTerms
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.sim import SimNetwork
from colab_swarm.trust.contributions import (
    MAX_ROWS,
    Contribution,
    ContributionLedger,
    Contributions,
    ShareTally,
    Tally,
    sum_tallies,
)
from tests.trust.run import run_with


def peer(index: int) -> PeerId:
    return PeerId(bytes([index]) * 32)


def group(weights: Sequence[float], shares: Sequence[float], numel: int = 100) -> Group:
    members = [
        GroupMember(peer(i), (), weight, share, samples=weight)
        for i, (weight, share) in enumerate(zip(weights, shares, strict=True))
    ]
    return Group(bytes(16), RoundTerms("", 1, b"", numel), tuple(members))


def summed(ledgers: Sequence[ContributionLedger]) -> dict[PeerId, Contribution]:
    contributions = sum_tallies({peer(i): ledger.tally() for i, ledger in enumerate(ledgers)})
    return {contribution.peer: contribution for contribution in contributions}


def after(round_: Group) -> dict[PeerId, Contribution]:
    """Return what all members together saw of a round that lost nothing."""
    everybody = [member.id for member in round_.members]
    ledgers = list(map(ContributionLedger, everybody))
    for ledger in ledgers:
        ledger.on_round(round_, everybody)
    return summed(ledgers)


def test_members_are_credited_with_samples_and_reducers_with_the_spans_that_others_got() -> None:
    found = after(group([8.0, 4.0, 0.0], [1.0, 0.0, 0.0]))
    assert {one.peer: one.samples for one in found.values()} == {peer(0): 8.0, peer(1): 4.0}
    assert after(group([8.0], [1.0])) == {}  # a round of one is not counted
    found = after(group([1.0, 1.0, 1.0], [3.0, 1.0, 0.0]))
    assert [found[peer(i)].reduced_bytes for i in range(3)] == [2 * 75 * 4, 2 * 25 * 4, 0]
    assert [found[peer(i)].samples for i in range(3)] == pytest.approx([1.0] * 3)
    round_, ledger = group([1.0, 1.0], [1.0, 1.0]), ContributionLedger(peer(0))
    ledger.on_round(round_, [peer(0)], spans_lost=[round_.spans()[1]])
    assert ledger.tally() == (), "a lost span and a lost contribution earn nothing"


def test_a_member_of_a_round_in_a_bucket_sees_all_samples_and_no_reducing() -> None:
    ledger = ContributionLedger(peer(0))
    ledger.on_bucket_round({peer(0): 8.0, peer(1): 4.0, peer(2): 2.0})
    assert summed([ledger]) == {
        peer(1): Contribution(peer(1), samples=4.0),
        peer(2): Contribution(peer(2), samples=2.0),
    }


def test_no_peer_credits_itself() -> None:
    ledger = ContributionLedger(peer(0))
    ledger.credit(peer(0), "units", 5)
    assert ledger.tally() == ()
    own, row = Contribution(peer(0), units=9.0), Contribution(peer(1), samples=1.0)
    forged = (own, row, row)  # and no other twice
    assert sum_tallies({peer(0): forged}) == (Contribution(peer(1), samples=1.0),)


def test_relays_and_experts_hosts_are_credited_with_what_grew_of_their_totals() -> None:
    ends = [ContributionLedger(peer(0)), ContributionLedger(peer(1))]
    for total in (1000, 1000, 5000):
        for ledger in ends:  # the two of a circuit
            ledger.on_totals("relayed_bytes", {peer(2): total}, 0.5)
    assert summed(ends) == {peer(2): Contribution(peer(2), relayed_bytes=5000.0)}
    caller = ContributionLedger(peer(0))
    for calls in ({peer(1): 3}, {peer(1): 3}, {peer(1): 10, peer(2): 4}, {peer(0): 7, peer(1): 10}):
        caller.on_totals("expert_calls", calls)
    assert {host: row.expert_calls for host, row in summed([caller]).items()} == {peer(1): 10.0, peer(2): 4.0}


def test_nonsense_is_not_credited_and_the_tally_is_bounded_and_keeps_the_largest() -> None:
    ledger = ContributionLedger(peer(0))
    for amount in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot be credited"):
            ledger.credit(peer(1), "samples", amount)
        row = Contribution(peer(1), amount)
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(ShareTally((row,))), type=ShareTally)
    for i in range(3 * MAX_ROWS):
        ledger.credit(PeerId(i.to_bytes(32)), "units", 1.0 + i)
    tally = ledger.tally()
    assert len(tally) == MAX_ROWS and tally[0].units == 3 * MAX_ROWS


def units(amount: float) -> Tally:
    return (Contribution(peer(9), units=amount),)


@pytest.mark.virtual_time
async def test_only_what_reducers_and_workers_tell_counts_and_their_newest_tally_replaces_the_last() -> None:
    network = SimNetwork()
    alice = network.peer("alice")
    seen = Contributions(alice, random.Random(0), units(100.0))
    for name, role in (("bob", Role.WORKER), ("carol", Role.REDUCER), ("victor", Role.VIEWER)):
        other = network.peer(name, role=role)
        other.learn(alice.contact)
        for amount in (1.0, 2.0):
            answer = await other.call(alice.id, ShareTally(units(amount)), ShareTally, timeout_s=5)
            assert answer.tally == units(100.0)
    assert await seen.read() == (Contribution(peer(9), units=104.0),)


async def test_a_peer_reads_what_it_saw_and_what_linked_peers_tell_it_also_after_they_left() -> None:
    async with run_with("alice", "bob") as (here, (authority, alice, bob)):
        dave = peer(9)
        alice.trust.contributions.ledger.credit(bob.node.id, "samples", 10.0)
        authority.trust.contributions.ledger.credit(dave, "relayed_bytes", 1e6)
        bob.trust.contributions.ledger.credit(alice.node.id, "samples", 4.0)
        bob.trust.contributions.ledger.credit(bob.node.id, "samples", 99.0)
        expected = [
            Contribution(bob.node.id, samples=10.0),
            Contribution(alice.node.id, samples=4.0),
            Contribution(dave, relayed_bytes=1e6),
        ]
        assert await authority.trust.contributions.read() == tuple(expected)
        # its last tally comes when it leaves
        bob.trust.contributions.ledger.credit(alice.node.id, "samples", 3.0)
        await here.leave(bob)
        expected[1] = Contribution(alice.node.id, samples=7.0)
        assert await authority.trust.contributions.read() == tuple(expected)
