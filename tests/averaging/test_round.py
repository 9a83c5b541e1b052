import asyncio
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.exchange import PREDICTED, Round
from colab_swarm.averaging.group import RoundRefused
from colab_swarm.averaging.messages import AveragingSettings, Chunk, RecallSpan, ReduceSpan
from colab_swarm.averaging.round import DRAIN_S, Averager
from colab_swarm.averaging.strategy import forecast_s
from colab_swarm.errors import PeerLost
from colab_swarm.net.peers import Buffer, Message, Role, Stream
from colab_swarm.sim import HOME, LAN, SimNetwork, SimPeers
from colab_swarm.sim.network import SILENCE_S
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.vector import HostVector
from tests.averaging.swarm import NAMES, SETTINGS, contribution, make_group, run_round, vector

EXTRA_S = 3.0
"""How much longer than undisturbed a round may take when a member is lost."""
NANS = np.full(10, np.nan, np.float32).tobytes()


def mean(message: Message) -> bool:
    return isinstance(message, Chunk) and message.averaged


def opening(message: Message) -> bool:
    return isinstance(message, ReduceSpan)


def pair(other: str = "bob", *, dial_out: str = "") -> tuple[SimPeers, SimPeers]:
    """Alice and another peer that know each other; ``dial_out`` does not listen."""
    network = SimNetwork(seed=1)
    peers = network.peer("alice", listen=dial_out != "alice"), network.peer(other, listen=dial_out != other)
    network.introduce()
    return peers


def others_than(*gone: str) -> list[str]:
    return [name for name in NAMES[:4] if name not in gone]


@pytest.mark.parametrize(
    ("codec", "error"), [("float32", 1e-6), ("float16", 4e-3), ("bfloat16", 4e-2), ("int8", 0.05)]
)
def test_everyone_ends_with_the_same_weighted_mean(codec: str, error: float) -> None:
    outcome = run_round(codec=codec)
    outcome.assert_mean(atol=error)
    for result in outcome.results.values():
        assert len(result.contributors) == 4 and result.kept_local == () and result.spans_lost == ()


def test_bytes_are_counted_once_up_and_once_down() -> None:
    for result in run_round(numel=4 * 16384).results.values():
        assert result.sent_bytes == result.received_bytes == 6 * 65536


@pytest.mark.parametrize(
    "circumstances",
    [
        *({"numel": 0}, {"numel": 1}, {"numel": 3}, {"count": 1}),
        *({"clients": ["bob", "dave"]}, {"delays": {"carol": 3.0}}),
    ],
    ids=str,
)
def test_short_vectors_a_peer_alone_client_mode_and_a_late_member_give_the_mean_too(
    circumstances: dict[str, Any],
) -> None:
    outcome = run_round(**circumstances)
    outcome.assert_mean()
    assert all(outcome.spans[name].numel == 0 for name in circumstances.get("clients", ()))
    assert all(len(result.contributors) == len(outcome.names) for result in outcome.results.values())


def test_a_member_without_weight_only_receives() -> None:
    outcome = run_round(weights=[1, 0, 2, 3])
    outcome.assert_mean("alice", "carol", "dave")
    assert len(outcome.results["bob"].contributors) == 3
    assert outcome.results["bob"].sent_bytes == 3 * 4 * outcome.spans["bob"].numel  # the means of its span


def test_without_any_weight_everyone_keeps_its_own_and_says_so() -> None:
    outcome = run_round(weights=[0, 0, 0, 0])
    for name, values in outcome.vectors.items():
        np.testing.assert_array_equal(values, outcome.contributions[name])
        result = outcome.results[name]
        assert result.kept_local == ((0, 200_000),)
        assert sum(span.numel for span, lacking in result.gaps if lacking == (0, 1, 2, 3)) == 200_000


async def test_contributing_needs_the_role_of_a_worker() -> None:
    network = SimNetwork(seed=1)
    alice, bob, carol = peers = [network.peer(name) for name in NAMES[:3]]
    network.introduce()
    bob.role = Role.REDUCER
    averagers = [Averager(peer, SETTINGS) for peer in peers]
    group = make_group(peers, [1, 1, 1], 1000)
    vectors = [vector(seed, 1000) for seed in range(3)]
    results = await asyncio.gather(
        *(
            averager.average(group, HostVector(values))
            for averager, values in zip(averagers, vectors, strict=True)
        )
    )
    assert set(results[0].contributors) == set(results[2].contributors) == {alice.id, carol.id}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_mean_that_lacks_one_slow_member_stands_at_all_members(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Round.take

    def take_others(own: Round, member: int, message: Chunk, payload: Buffer) -> None:
        if member == 0 != own.me:  # its line to the other reducers is slow: its values come too late
            own._drop(0, "too slow")
        else:
            take(own, member, message, payload)

    monkeypatch.setattr(Round, "take", take_others)
    outcome = run_round(count)
    values = outcome.assert_equal_vectors()
    slow = next(name for name, span in outcome.spans.items() if span.start == 0)
    own = slice(*outcome.spans[slow])
    expected = outcome.mean(*(name for name in outcome.names if name != slow))
    expected[own] = outcome.mean()[own]
    np.testing.assert_allclose(values, expected, atol=1e-6)


PHASES: dict[str, Callable[[SimNetwork], None]] = {
    "before anything": lambda n: n.now().crash("bob"),
    "at its first stream": lambda n: n.when(opening, sender="bob").crash("bob"),
    "at the first stream to it": lambda n: n.when(opening, receiver="bob").crash("bob"),
    "while sending": lambda n: n.when(contribution, sender="bob", nth=4).crash("bob"),
    "while reducing": lambda n: n.when(contribution, receiver="bob", nth=4).crash("bob"),
    "at its first mean": lambda n: n.when(mean, sender="bob").crash("bob"),
    "before all means are back": lambda n: n.when(mean, sender="bob", nth=7).crash("bob"),
    "while it receives means": lambda n: n.when(mean, receiver="bob", nth=3).crash("bob"),
}


@pytest.mark.parametrize(("phase", "codec"), [*zip(PHASES, cycle(["float32", "int8"]), strict=False)])
def test_a_member_may_vanish_at_any_phase(phase: str, codec: str) -> None:
    outcome = run_round(numel=1_400_000, script=PHASES[phase], codec=codec)
    assert [fault.name for fault in outcome.fired] == ["crash"]
    values = outcome.assert_equal_vectors()
    assert sorted(outcome.vectors) == others_than("bob")
    with_bob, without_bob = outcome.mean(), outcome.mean(*others_than("bob"))
    tolerance = 1e-6 if codec == "float32" else 0.05
    assert (np.minimum(abs(values - with_bob), abs(values - without_bob)) <= tolerance).all()
    for name, result in outcome.results.items():
        told = with_bob.copy()
        for span, (lost,) in result.gaps:
            told[slice(*span)] = without_bob[slice(*span)]
            assert result.group.members[lost].id not in result.contributors
        assert (abs(values - told) <= tolerance).all()
        assert result.kept_local == () and outcome.seconds[name] < EXTRA_S
        if phase == "at the first stream to it":
            assert result.spans_lost == (outcome.spans["bob"],)


def test_where_no_span_was_lost_the_mean_over_the_survivors_is_exact() -> None:
    outcome = run_round(clients=["bob"], script=lambda n: n.when(opening, sender="bob").crash("bob"))
    assert [fault.name for fault in outcome.fired] == ["crash"]
    outcome.assert_mean(*others_than("bob"))
    for result in outcome.results.values():
        assert result.spans_lost == () and len(result.contributors) == 3


def test_the_coordinator_of_a_recovery_may_vanish_too() -> None:
    def script(network: SimNetwork) -> None:
        network.when(opening, receiver="bob").crash("bob")
        for name in ("alice", "carol", "dave", "erin"):
            recalled = network.when(lambda m: isinstance(m, RecallSpan) and m.contributions, sender=name)
            recalled.crash(name)

    outcome = run_round(6, script=script)
    assert len(outcome.fired) >= 2 and "bob" not in outcome.vectors
    for result in outcome.results.values():
        assert result.seconds < EXTRA_S


def test_a_silent_reducer_is_given_up_and_its_span_recovered() -> None:
    def script(network: SimNetwork) -> None:
        network.when(contribution, receiver="bob", nth=2).partition({"bob"}, set(others_than("bob")))

    outcome = run_round(script=script)
    assert [fault.name for fault in outcome.fired] == ["partition"]
    counted = list[bool]()
    for name in others_than("bob"):
        np.testing.assert_array_equal(outcome.vectors[name], outcome.vectors["alice"])
        result, own = outcome.results[name], outcome.spans[name].numel
        assert result.exchange_s <= result.seconds
        assert result.kept_local == () and result.received_bytes >= 4 * (200_000 + own)
        counted.append(result.sent_bytes >= 4 * (200_000 + own))
    assert counted.count(True) >= 2, "but for the coordinator, a survivor sends its contribution again"


def test_several_silent_survivors_hold_up_a_recovery_no_longer_than_one() -> None:
    def script(network: SimNetwork) -> None:
        network.when(contribution, receiver="bob", nth=2).partition(
            {"bob"}, {"carol"}, {"dave"}, {"alice", "erin"}
        )

    outcome = run_round(5, script=script)
    assert [fault.name for fault in outcome.fired] == ["partition"]
    for result in outcome.results.values():
        assert len(result.spans_lost) >= 3
        assert result.seconds < SILENCE_S + 1.5 * SETTINGS.dial_timeout_s  # virtual
    np.testing.assert_array_equal(outcome.vectors["alice"], outcome.vectors["erin"])


@pytest.mark.parametrize(("index", "payload"), [(0, bytes(39)), (7, bytes(40)), (0, NANS)])
async def test_a_sender_of_garbage_is_left_out_and_gets_the_mean(index: int, payload: bytes) -> None:
    alice, mallory = pair("mallory", dial_out="mallory")
    group = make_group([alice, mallory], [1, 9], 10)
    averager, clock = Averager(alice, SETTINGS), asyncio.get_running_loop().time
    going = asyncio.create_task(averager.average(group, HostVector(vector(0, 10))))
    async with await mallory.stream(alice.id, ReduceSpan(group.round_id), timeout_s=1) as stream:
        await stream.send(Chunk(index), payload)
        answer, returned = await stream.receive(Chunk)
        result, ended_at = await going, clock()
        await averager.drain("")
        assert clock() == ended_at + DRAIN_S, "its stream is open still"
        draining = asyncio.create_task(averager.drain(""))
        await asyncio.sleep(1.0)
    await draining
    assert clock() < ended_at + DRAIN_S + 1.5, "its stream is closed"
    assert result.contributors == (alice.id,) and answer.averaged
    np.testing.assert_allclose(np.frombuffer(returned, np.float32), vector(0, 10), rtol=1e-6)


@pytest.mark.parametrize("payload", [bytes(39), NANS])
async def test_a_reducer_that_returns_garbage_counts_as_lost(payload: bytes) -> None:
    alice, mallory = pair("mallory", dial_out="alice")

    async def reduce(opening: ReduceSpan, stream: Stream) -> None:
        await stream.send(Chunk(0, averaged=True), payload)
        await stream.end()

    group, values = make_group([alice, mallory], [1, 1], 10), vector(0, 10)
    mallory.serve_stream(ReduceSpan, reduce)
    result = await Averager(alice, SETTINGS).average(group, HostVector(values))
    assert len(result.spans_lost) == 1 and result.kept_local == ((0, 10),)
    np.testing.assert_array_equal(values, vector(0, 10))


async def test_a_stream_is_opened_again_if_the_link_is_still_there() -> None:
    alice, bob = pair(dial_out="alice")
    streams: list[Stream] = []

    async def reduce(opening: ReduceSpan, stream: Stream) -> None:
        streams.append(stream)
        if len(streams) == 1:
            stream.reset("a link of two was lost")
        else:
            await stream.send(Chunk(0, averaged=True), vector(9, 10).tobytes())
            await stream.end()

    group, values = make_group([alice, bob], [1, 1], 10), vector(0, 10)
    bob.serve_stream(ReduceSpan, reduce)
    result = await Averager(alice, SETTINGS).average(group, HostVector(values))
    assert len(streams) == 2 and result.spans_lost == ()
    np.testing.assert_array_equal(values, vector(9, 10))


async def test_at_its_deadline_a_round_ends_with_the_arrived_means() -> None:
    alice, bob = pair()
    averager, values = Averager(alice, AveragingSettings(round_timeout_s=2)), vector(0, 10)
    Averager(bob, SETTINGS)
    await asyncio.sleep(9.0)
    result = await averager.average(make_group([alice, bob], [1, 1], 10), HostVector(values))
    assert result.seconds == result.exchange_s == pytest.approx(2) and result.kept_local == ((0, 10),)
    told = result.event(began_at=1.0, now=5.5)  # the search for the group included
    assert (told.seconds, told.averaging_s, told.kept_local) == (4.5, result.seconds, 10)
    assert len(result.spans_lost) == 1
    async with await bob.stream(alice.id, ReduceSpan(result.group.round_id), timeout_s=1) as stream:
        await stream.send(Chunk(0), bytes(20))
        await stream.receive(Chunk)  # the late chunk finishes alice's span
    np.testing.assert_array_equal(values, vector(0, 10))  # which her trainer has applied by now


async def test_over_slow_lines_the_deadline_is_three_times_the_forecast() -> None:
    alice, bob = pair()
    averager, group = (
        Averager(alice, AveragingSettings(round_timeout_s=2)),
        make_group([alice, bob], [1, 1], 50_000),
    )
    Averager(bob, SETTINGS)
    slow = (msgspec.structs.replace(one, upload_bps=1e6, download_bps=1e6) for one in group.members)
    group = msgspec.structs.replace(group, members=tuple(slow))
    result = await averager.average(group, HostVector(vector(0, 50_000)))
    assert 1 < forecast_s(group) < 3 and result.kept_local
    assert result.seconds == pytest.approx(PREDICTED * forecast_s(group))


async def test_a_second_call_of_a_round_is_refused_before_it_takes_memory() -> None:
    alice = SimNetwork(LAN).peer("alice")
    averager, values = Averager(alice, SETTINGS), vector(0, 1_000_000)
    group = make_group([alice], [1], 1_000_000)
    await averager.average(group, HostVector(values))
    tracemalloc.start()
    with pytest.raises(RoundRefused, match="given up"):
        await averager.average(group, HostVector(values))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < values.nbytes / 2


async def test_a_contributor_that_cannot_be_dialled_is_dropped_when_its_link_is_lost() -> None:
    alice, bob = pair(dial_out="bob")
    averager, group = Averager(alice, SETTINGS), make_group([alice, bob], [1, 1], 10)
    await bob.link_to(alice.id, 1.0)
    going = asyncio.create_task(averager.average(group, HostVector(vector(0, 10))))
    await asyncio.sleep(1.0)
    bob.crash()
    assert (await going).contributors == (alice.id,) and going.result().seconds < EXTRA_S


@pytest.mark.parametrize("late", [False, True])
async def test_a_slow_reader_gets_the_means_though_later_rounds_take_the_memory(late: bool) -> None:
    """It begins while the round goes on, or when it has ended."""
    alice, bob = pair(dial_out="bob")
    averager, numel = Averager(alice, SETTINGS), 2_000_000
    group, values, means = make_group([alice, bob], [1, 0], numel), vector(0, numel), list[Floats]()
    tracemalloc.start()
    going = asyncio.create_task(averager.average(group, HostVector(values)))
    if late:
        await going
        assert tracemalloc.get_traced_memory()[0] < values.nbytes / 2
    tracemalloc.stop()
    async with await bob.stream(alice.id, ReduceSpan(group.round_id), timeout_s=1) as stream:
        while sum(map(len, means)) < numel:
            means.append(np.frombuffer((await stream.receive(Chunk))[1], np.float32).copy())
            for seed in (2, 3) if len(means) == 1 else ():
                later = make_group([alice], [1], numel, round_id=seed)
                await averager.average(later, HostVector(vector(seed, numel)))
            if late:
                values.fill(0.0)  # as nobody else may read it now
    await going
    np.testing.assert_array_equal(np.concatenate(means), vector(0, numel))


async def test_rounds_at_once_are_kept_apart() -> None:
    network = SimNetwork(HOME, seed=3)
    peers = [network.peer(name) for name in NAMES[:3]]
    network.introduce()
    averagers = [Averager(peer, SETTINGS) for peer in peers]
    vectors = {(r, i): vector(10 * r + i, 50_000) for r in (1, 2) for i in range(3)}
    expected = {r: sum(vectors[r, i] for i in range(3)) / 3 for r in (1, 2)}
    groups = {r: make_group(peers, [1, 1, 1], 50_000, round_id=r) for r in (1, 2)}
    await asyncio.gather(*(averagers[i].average(groups[r], HostVector(vectors[r, i])) for r, i in vectors))
    for (r, _), values in vectors.items():
        np.testing.assert_allclose(values, expected[r], atol=1e-6)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(averager.drain("") for averager in averagers))
    assert asyncio.get_running_loop().time() < began + 1.0, "no member is served any more"


async def test_a_stranger_cannot_take_part_in_a_round_and_bad_arguments_raise() -> None:
    network = SimNetwork(seed=1)
    alice, bob, mallory = (network.peer(name) for name in ("alice", "bob", "mallory"))
    network.introduce()
    averager = Averager(alice, SETTINGS)
    group = make_group([alice, bob], [1, 1], 10)
    with pytest.raises(ValueError, match="averages 10 values, the vector has 9"):
        await averager.average(group, HostVector(np.zeros(9, np.float32)))
    with pytest.raises(ValueError, match="member"):
        await Averager(mallory, SETTINGS).average(group, HostVector(np.zeros(10, np.float32)))
    going = asyncio.create_task(averager.average(group, HostVector(np.zeros(10, np.float32))))
    await asyncio.sleep(0)
    stream = await mallory.stream(alice.id, ReduceSpan(group.round_id), timeout_s=1)
    with pytest.raises(ConnectionError, match="without you"):
        await stream.receive(Chunk)
    going.cancel()


@given(seed=st.integers(0, 10**6))
@settings(max_examples=12)
@pytest.mark.slow
def test_random_crashes_never_stop_the_survivors(seed: int) -> None:
    rng = random.Random(seed)
    victims = rng.sample(NAMES[:6], rng.randint(1, 3))
    kinds = [contribution, mean, opening]

    def script(network: SimNetwork) -> None:
        for victim in victims:
            side = rng.choice(["sender", "receiver"])
            network.when(rng.choice(kinds), nth=rng.randint(1, 12), **{side: victim}).crash(victim)

    outcome = run_round(6, 400_000, script=script, seed=seed, codec=rng.choice(["float32", "float16"]))
    assert outcome.fired or len(outcome.vectors) == 6
    low = np.min([outcome.contributions[n] for n in outcome.names], axis=0) - 1e-2
    high = np.max([outcome.contributions[n] for n in outcome.names], axis=0) + 1e-2
    for name, values in outcome.vectors.items():
        assert ((low <= values) & (values <= high)).all(), f"seed {seed}"
        assert outcome.seconds[name] < SETTINGS.round_timeout_s / 2, f"seed {seed}"
    if len(outcome.fired) == 1:
        outcome.assert_equal_vectors()


@pytest.mark.parametrize(("nth", "clients"), [(1, ["alice", "bob"]), (3, ["alice"]), (6, ["alice", "bob"])])
def test_the_span_of_an_assistant_that_dies_is_recovered(nth: int, clients: Sequence[str]) -> None:
    def script(network: SimNetwork) -> None:
        network.when(lambda m: isinstance(m, Chunk), sender="dave", nth=nth).crash("dave")

    outcome = run_round(4, clients=clients, assistants=["carol", "dave"], script=script, numel=400_000)
    assert [fault.name for fault in outcome.fired] == ["crash"]
    outcome.assert_mean("alice", "bob")
    assert not any(outcome.results[name].kept_local for name in ("alice", "bob", "carol"))


@pytest.mark.parametrize(("reducer", "wanted"), [(2, ()), (-1, ()), (0, (1,)), (0, (-1,))])
async def test_a_recall_of_a_span_that_does_not_exist_is_refused(reducer: int, wanted: tuple[int]) -> None:
    alice, bob = pair()
    averager = Averager(alice, AveragingSettings(round_timeout_s=1))
    Averager(bob, SETTINGS)
    group = make_group([alice, bob], [1, 1], 10)
    averaging = asyncio.create_task(averager.average(group, HostVector(vector(0, 10))))
    stream = await bob.stream(alice.id, RecallSpan(group.round_id, reducer, wanted, False), timeout_s=5)
    with pytest.raises(PeerLost, match="ValueError"):
        await stream.receive(Chunk)
    await averaging


async def test_rounds_of_two_collaborations_do_not_push_each_other_out() -> None:
    alice = SimNetwork(LAN, seed=0).peer("alice")
    averager, vectors = Averager(alice, SETTINGS), [HostVector(vector(n, 10)) for n in range(2)]
    for n, one in enumerate(vectors):
        group = make_group([alice], [1], 10, round_id=n)
        terms = msgspec.structs.replace(group.terms, prefix=f"run/{n}")
        await averager.average(msgspec.structs.replace(group, terms=terms), one)
    assert all(averager.holds(one) for one in vectors)
    averager.forget("run/0")
    assert [averager.holds(values) for values in vectors] == [False, True]


def test_a_member_that_begins_after_a_reducer_crashed_counts_in_its_span() -> None:
    outcome = run_round(script=PHASES["at the first stream to it"], delays={"carol": 0.5})
    assert [fault.name for fault in outcome.fired] == ["crash"]
    outcome.assert_mean("alice", "carol", "dave")
