"""A reducer that makes up a mean of clipped contributions is found, and only such a one."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from colab_swarm.averaging import audit as module
from colab_swarm.averaging.exchange import NO_DIGEST, AllReduce, Chunk
from colab_swarm.averaging.group import SpanRoots, plan_spans
from colab_swarm.averaging.reducer import SpanLedger
from colab_swarm.averaging.round import Averager
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.peers import Buffer, PeerId, Refusal, Stream
from colab_swarm.sim import LAN, SimNetwork, run_virtual
from colab_swarm.tensors.codecs import Floats, codec_of
from tests.averaging.swarm import NAMES, SETTINGS, make_group, signed, vector

NUMEL = 200_000
Hands = Callable[[AllReduce], None]


class Always(random.Random):
    def random(self) -> float:
        return 0.0


def corrupt(round_: AllReduce, factor: float = -1.0) -> None:
    """A dishonest reducer returns another value than the mean."""
    honest = round_.reducer.mean
    round_.reducer.mean = lambda chunk: factor * honest(chunk)  # type: ignore[method-assign, operator]


def exaggerate(round_: AllReduce) -> None:
    corrupt(round_, 1.2)


def misquote(round_: AllReduce) -> None:
    """It averages something else than alice sent, and says so to all."""
    take, alice = round_._take, 0

    def take_another(member: int, message: Chunk, payload: Buffer) -> None:
        if member == alice:
            codec = codec_of(message.codec or round_.group.terms.codec)
            values = codec.decode(payload, round_.ledger.chunk(round_.me, message.index).numel)
            payload = codec.encode(-values)
            round_._digests.setdefault(message.index, {})[alice] = b"x" * 16
        take(member, message, payload)

    round_._take = take_another  # type: ignore[method-assign]


def hide(round_: AllReduce) -> None:
    """An accomplice shows none of its contributions."""
    round_.sent = lambda *_: ("", b"")  # type: ignore[method-assign]


def dictate(round_: AllReduce, spared: tuple[int, ...] = ()) -> None:
    """It sends ones at once, as the mean of itself and the ``spared``, and says that nobody else sent anything."""
    kept = {round_.me, *spared}

    async def send_ones(stream: Stream) -> None:
        missing = tuple(i for i in range(len(round_.group.members)) if i not in kept)
        digests = b"".join(b"d" * 16 if i in kept else NO_DIGEST for i in range(len(round_.group.members)))
        for index, chunk in enumerate(round_.ledger.chunks[round_.me]):
            mean = Chunk(index, True, missing, digests=digests, signed=round_.sign(b"root"))
            await stream.send(mean, np.ones(chunk.numel, np.float32).tobytes())
        await stream.end()

    round_._return_means = send_ones  # type: ignore[method-assign]


def fork(round_: AllReduce, *, signs: bool = True) -> None:
    """It sends the first other member a mean that is 1e-5 larger, and signs that too."""
    honest, me = round_._return_means, round_.me
    told = SpanLedger(round_.group, round_.ledger.values.copy())

    async def send(stream: Stream) -> None:
        if stream.peer != round_.member(int(me == 0)).id:
            return await honest(stream)
        for at in range(len(round_.ledger.chunks[me])):
            while at == len(round_._means):
                await round_._more_means.wait()
            message, _ = round_._means[at]
            told.place(me, message.index, round_.reducer.mean(message.index), message.missing)
            mean = told.values[slice(*told.chunk(me, message.index))]
            mean *= np.float32(1.00001)
            if message.signed is not None and signs:
                message = msgspec.structs.replace(message, signed=round_.sign(told.root(me)))
            await stream.send(message, mean.tobytes())
        await stream.end()

    round_._return_means = send  # type: ignore[method-assign]


def fork_unsigned(round_: AllReduce) -> None:
    fork(round_, signs=False)


def leave_alice_out(round_: AllReduce) -> None:
    """As a reducer does to which alice has a slow line: her values come too late."""
    take, alice = round_._take, 0

    def take_others(member: int, message: Chunk, payload: Buffer) -> None:
        if member == alice:
            round_.drop(alice, "too slow")
        else:
            take(member, message, payload)

    round_._take = take_others  # type: ignore[method-assign]


def play(
    hands: dict[str, Hands],
    monkeypatch: pytest.MonkeyPatch,
    *,
    auditor: str = "bob",
    codec: str = "float32",
    count: int = 5,
) -> tuple[dict[str, list[str]], dict[str, PeerId], dict[str, Floats]]:
    """Play a clipped round of five peers, then one audit of the span of the liar; return faults and means by peer."""

    def begin(round_: AllReduce, peers: Any, *args: Any, **rest: Any) -> None:
        init(round_, peers, *args, **rest)
        hands.get(peers.name, lambda _: None)(round_)

    async def main() -> tuple[dict[str, list[str]], dict[str, PeerId], dict[str, Floats]]:
        network = SimNetwork(LAN, seed=1)
        peers = sorted((network.peer(name) for name in NAMES[:count]), key=lambda peer: peer.id)
        for name, peer in zip(NAMES, peers, strict=False):
            peer.name = name  # in the order of members
        network.introduce()
        logs = {peer.name: EventLog() for peer in peers}
        averagers = {peer.name: Averager(peer, SETTINGS, logs[peer.name]) for peer in peers}
        group = make_group(peers, [1.0] * count, NUMEL, codec=codec)
        group = msgspec.structs.replace(group, terms=msgspec.structs.replace(group.terms, clip=True))
        rows = [vector(9, NUMEL) + 0.3 * vector(i, NUMEL) for i in range(count)]
        joining = (averagers[peer.name].average(group, row) for peer, row in zip(peers, rows, strict=True))
        results = await asyncio.gather(*joining)
        assert not any(result.kept_local for result in results)
        exchange = averagers[auditor]._rounds[group.round_id]
        liar = list(logs).index(next(iter(hands), "erin"))
        exchange.told = {key: digests for key, digests in exchange.told.items() if key[0] == liar}
        await averagers[auditor].audit(group, Always())
        told = {name: [event.where for event in log.recent(Fault)] for name, log in logs.items()}
        ids = {peer.name: peer.id for peer in peers}
        return told, ids, dict(zip(ids, rows, strict=True))

    init = AllReduce.__init__
    monkeypatch.setattr(AllReduce, "__init__", begin)
    return run_virtual(main())


@pytest.mark.parametrize("hands", [corrupt, exaggerate])
@pytest.mark.parametrize("codec", ["float32", "float16", "int8"])
def test_all_members_leave_out_a_reducer_that_one_of_them_catches(
    hands: Hands, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ids, _ = play({"erin": hands}, monkeypatch, codec=codec)
    erin = f"reducer {ids['erin'].hex()[:8]}"
    assert told == {name: [erin] * (name != "erin") for name in NAMES[:5]}


def test_a_member_notices_at_once_that_its_contribution_was_not_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, ids, _ = play({"erin": misquote}, monkeypatch, auditor="erin")
    assert told["alice"] == [f"reducer {ids['erin'].hex()[:8]}"]


@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "topk:0.1", "sparseloco"])
@pytest.mark.parametrize("silent", [(), ("dave",)])
def test_an_honest_reducer_is_not_left_out(
    codec: str, silent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, *_ = play({"erin": lambda _: None, **dict.fromkeys(silent, hide)}, monkeypatch, codec=codec)
    assert not any(events for name, events in told.items() if name not in silent)


def test_an_accomplice_that_shows_nothing_does_not_hide_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    told, *_ = play({"erin": corrupt, "dave": hide}, monkeypatch)
    assert [bool(told[name]) for name in ("alice", "bob", "carol")] == [True] * 3


@pytest.mark.parametrize("count", [3, 5])
def test_a_reducer_that_declares_all_others_missing_dictates_nothing(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = NAMES[count - 1]
    told, ids, means = play({liar: dictate}, monkeypatch, count=count)
    first, *others = (means[name] for name in NAMES[: count - 1])
    assert all(np.array_equal(first, other) for other in others) and not np.any(first == 1.0)
    assert told == {name: [f"reducer {ids[liar].hex()[:8]}"] * (name != liar) for name in NAMES[:count]}
    assert np.linalg.norm(first - vector(9, NUMEL)) < 0.4 * np.linalg.norm(first)


def test_a_made_up_mean_that_lacks_a_minority_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told, ids, _ = play({"erin": lambda round_: dictate(round_, (1, 2, 3))}, monkeypatch)
    assert told["bob"] == told["carol"] == told["dave"] == [f"reducer {ids['erin'].hex()[:8]}"]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_mean_that_lacks_one_slow_member_stands_at_all_members(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {name: leave_alice_out for name in NAMES[1:count]}
    told, _, means = play(slow, monkeypatch, count=count)
    first, *others = means.values()
    assert all(np.array_equal(first, other) for other in others) and not any(told.values())
    own = plan_spans(NUMEL, [1.0] * count)[0]  # alice's span has her contribution, the others' lack it
    rows = [vector(9, NUMEL) + 0.3 * vector(i, NUMEL) for i in range(count)]
    without = np.mean(rows[1:], axis=0)
    assert np.allclose(first[own.stop :], without[own.stop :], atol=0.1) and not np.allclose(
        first, without, atol=0.1
    )


def test_a_reducer_that_signs_two_means_is_left_out_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told, ids, means = play({"erin": fork}, monkeypatch, auditor="alice")
    assert not np.array_equal(means["alice"], means["bob"])
    assert told == {name: [f"reducer {ids['erin'].hex()[:8]}"] * (name != "erin") for name in NAMES[:5]}


def test_a_member_leaves_out_a_reducer_that_signed_another_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    told, ids, means = play({"erin": fork_unsigned}, monkeypatch, auditor="alice")
    assert not np.array_equal(means["alice"], means["bob"])
    assert told["alice"] == [f"reducer {ids['erin'].hex()[:8]}"] and not told["bob"]


async def test_only_two_genuine_signatures_of_a_round_are_a_proof() -> None:
    alice, bob, carol = (SimNetwork(LAN, seed=1).peer(name) for name in NAMES[:3])
    group, other = (make_group([alice, bob, carol], [1.0] * 3, 10, round_id=n) for n in (1, 2))
    events = EventLog()
    averager = Averager(alice, SETTINGS, events)
    averager._rounds[group.round_id] = AllReduce(alice, group, vector(0, 10), SETTINGS)
    genuine, elsewhere, again = signed(group, bob), signed(other, bob, b"2"), signed(group, bob, b"2")
    forged = msgspec.structs.replace(signed(group, carol, b"2"), reducer=genuine.reducer)
    for told in (elsewhere, forged):
        with pytest.raises(Refusal, match="not valid"):
            await averager._serve_roots(carol.id, SpanRoots(group.round_id, (genuine, told)))
    await averager._serve_roots(carol.id, SpanRoots(group.round_id, (genuine, genuine)))
    assert not events.recent(Fault)
    await averager._serve_roots(carol.id, SpanRoots(group.round_id, (genuine, again)))
    assert [event.where for event in events.recent(Fault)] == [f"reducer {bob.id.hex()[:8]}"]


async def test_a_member_checks_an_accusation_of_another_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    async def check(_round: AllReduce, reducer: int, _index: int) -> bool:
        checked.append(reducer)
        return False

    monkeypatch.setattr("colab_swarm.averaging.round.lies", check)
    alice, bob, carol = (SimNetwork(LAN, seed=1).peer(name) for name in NAMES[:3])
    averager = Averager(alice, SETTINGS)
    group = make_group([alice, bob], [1.0] * 2, 10)
    exchange = averager._rounds[group.round_id] = AllReduce(alice, group, vector(0, 10), SETTINGS)
    exchange.told = {(1, 0): NO_DIGEST * 2}
    for accuser, reducer in (
        (carol, 1),
        (bob, 0),
        (bob, 1),
        (bob, 1),
    ):  # no member, no such mean, once, again
        accusation = module.Accusation(group.round_id, reducer, 0)
        assert (await averager._serve_accusation(accuser.id, accusation)).round_id == group.round_id
    assert checked == [1] and np.isfinite(exchange.ledger.values).all()
