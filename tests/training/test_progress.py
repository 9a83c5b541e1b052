"""The pure core of `Progress`: who is on the branch, who is behind, when the batch is full."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.dht.service import Found
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.training.election import DISTRUST_S, FEW_STEPS, RECENT_S, Branch
from colab_swarm.training.forecast import ThroughputEstimator
from colab_swarm.training.known import LAST_RECORD_S
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import PLAUSIBLE, AssistantRecord, ProgressRecord

ALICE, BOB, CAROL, DAVE = (PeerId(bytes([n]) * 32) for n in range(4))


def record(step: int = 0, lineage: bytes = b"same", samples: float = 0.0, **rest: object) -> ProgressRecord:
    base = ProgressRecord(step, lineage, samples, 1.0, syncing=False, reduces=True, name="x")
    return msgspec.structs.replace(base, **rest)


def progress(own: ProgressRecord, others: dict[PeerId, ProgressRecord] | None = None) -> Progress:
    made = Progress(ALICE, own, round_samples=100)
    made.on_records(others or {}, now=0.0)
    return made


def author(voucher: bytes, role: Role = Role.WORKER) -> Found:
    return Found(None, 0.0, role, voucher)


CLIENT, LIAR = record(0, reduces=False), record(99, b"liar")
NEW, IDLE = record(7, b"new"), record(3, b"old", idle=True)


@pytest.mark.parametrize(
    ("records", "elected", "behind"),  # of alice, bob, carol and dave
    [
        pytest.param([record(3)], {ALICE}, False, id="alone"),
        pytest.param([*3 * [record(5)], LIAR], {ALICE, BOB, CAROL}, False, id="a minority ahead"),
        pytest.param([record(n) for n in (5, 6, 5, 6)], {BOB, DAVE}, True, id="half the peers ahead"),
        pytest.param([record(5, one) for one in (b"b", b"b", b"a")], {ALICE, BOB}, False, id="most peers"),
        pytest.param(
            [record(5, one) for one in (b"b", b"a", b"b", b"a")], {ALICE, CAROL}, False, id="smallest peer id"
        ),
        pytest.param([*3 * [CLIENT], record(3)], {DAVE}, True, id="only dave can be dialled"),
        pytest.param(3 * [CLIENT], {ALICE, BOB, CAROL}, False, id="none can be dialled"),
        pytest.param([NEW, IDLE, IDLE], {ALICE}, False, id="all others are idle"),
        pytest.param([IDLE, NEW, IDLE], {BOB}, True, id="all but one are idle"),
    ],
)
def test_the_swarm_elects_its_branch(
    records: list[ProgressRecord], elected: set[PeerId], behind: bool
) -> None:
    own, *others = records
    swarm = progress(own, dict(zip((BOB, CAROL, DAVE), others, strict=False)))
    assert swarm.election.branch().peers == elected and swarm.election.behind is behind


def test_the_old_records_of_a_founder_and_another_call_no_class_back_that_shares_an_invitation() -> None:
    class_, founder = Found(None, 0.0, Role.WORKER, b"class"), Found(None, 0.0, Role.AUTHORITY, b"founder")
    erin = PeerId(bytes([4]) * 32)
    swarm = progress(record(), {peer: record() for peer in (BOB, CAROL, DAVE, erin)})
    swarm.known.found = {**dict.fromkeys((ALICE, BOB, CAROL, erin), class_), DAVE: founder}
    everyone = dict.fromkeys((ALICE, BOB, CAROL, DAVE, erin), 1.0)
    for step in range(1, 9):
        swarm.known.advance(b"new")
        swarm.on_round(everyone, step, b"new", now=0.0)
    new, killed = record(8, b"new"), {DAVE: record(1, b"old"), erin: record(5, b"old")}
    for _ in range(10):  # the rounds' results outweigh records for a few reads
        swarm.on_records({BOB: new, CAROL: new, **killed}, now=0.0)
    assert swarm.election.branch().step == 8 and not swarm.election.behind


def test_a_group_stands_during_its_round_and_if_the_swarm_followed() -> None:
    swarm = progress(record(5), {BOB: record(5), CAROL: record(5)})
    assert swarm.election.stands(5, b"same")  # this peer may be in the round
    swarm.known.advance(b"alone")
    assert not swarm.election.stands(5, b"same")
    swarm.on_round({BOB: 1.0}, 6, b"alone", now=0.0)
    assert swarm.election.stands(5, b"same")  # half of them took the step


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("assisted", [False, True])
def test_one_member_that_can_be_dialled_does_not_move_those_that_cannot(ahead: int, assisted: bool) -> None:
    """They average by an assistant, or have averaged by that member."""
    swarm = progress(record(5, reduces=False))
    clients = {BOB: record(5, reduces=False), CAROL: record(5, reduces=False)}
    if assisted:
        swarm.known.on_assistants({b"d": AssistantRecord("dave", ("ws://dave",), "", 1.0)}, "")
    else:
        average(swarm, BOB, CAROL, DAVE)
    swarm.on_records({**clients, DAVE: record(5 + ahead, b"liar")}, now=60.0)
    assert swarm.election.branch().peers == {ALICE, BOB, CAROL} and not swarm.election.behind


@pytest.mark.parametrize("joined_at", [-1e18, 0.0, 99.0])
def test_a_member_that_claims_to_have_joined_first_lets_nobody_wait_for_the_first_step(
    joined_at: float,
) -> None:
    swarm = progress(record(joined_at=200.0))
    swarm.known.found = {BOB: author(b"bob", Role.AUTHORITY), DAVE: author(b"dave")}
    claim = record(joined_at=joined_at, min_peers=256)
    for asked in (0, 3):
        swarm.on_records({BOB: record(joined_at=100.0, min_peers=asked), DAVE: claim}, now=1.0)
        assert swarm.known.min_peers == max(asked, 1)
    swarm.on_records({BOB: claim, DAVE: claim}, now=2.0)
    assert swarm.known.min_peers == 256  # the authority may ask for any number


def test_one_member_with_other_settings_does_not_send_the_founder_of_a_run_away() -> None:
    """Its id is the smallest, which would win a tie."""
    mallory = PeerId(bytes(1))
    other = {mallory: record(agreement=(("lr", "2"),))}
    found = {ALICE: author(b"alice", Role.AUTHORITY), mallory: author(b"mallory")}
    founder = progress(record(agreement=(("lr", "1"),)))
    founder.known.found = found
    founder.on_records(other, now=1.0)
    assert founder.election.branch().peers == {ALICE, mallory} and not founder.election.disagreement()
    joiner = Progress(BOB, record(agreement=(("lr", "1"),)), round_samples=100)
    joiner.known.found = found
    joiner.on_records({**other, ALICE: founder.known.own}, now=1.0)
    assert not joiner.election.disagreement()


@pytest.mark.parametrize("identities", [16, 200])
def test_assistants_of_one_invitation_push_no_other_assistant_out(identities: int) -> None:
    swarm = progress(record())
    ghosts = [PeerId(b"\0" + index.to_bytes(2, "big")) for index in range(identities)]
    swarm.known.found = dict.fromkeys(ghosts, author(b"mallory")) | {
        BOB: author(b"bob"),
        CAROL: author(b"carol"),
    }
    helper = AssistantRecord("", ("ws://there",), "", 1.0)
    swarm.known.on_assistants(dict.fromkeys([*ghosts, BOB, CAROL], helper), "")
    assert {BOB, CAROL} < swarm.known.assistants.keys() and len(swarm.known.assistants) == 16


def test_members_without_a_record_are_one_account() -> None:
    swarm = progress(record(5))
    swarm.known.found = {BOB: author(b"bob")}
    accounts = {swarm.election.account_of(PeerId(b"ghost %d" % index)) for index in range(9)}
    assert len(accounts) == 1 and swarm.election.account_of(BOB) not in accounts


@pytest.mark.parametrize("lineages", [(b"a", b"b", b"c"), (b"c", b"b", b"a"), (b"b", b"c", b"a")])
def test_digests_which_differ_between_processors_do_not_decide_a_tie(lineages: tuple[bytes, ...]) -> None:
    own, *others = (record(5, lineage, reduces=False) for lineage in lineages)
    alone = progress(own, dict(zip((CAROL, BOB), others, strict=True)))
    assert alone.election.branch().peers == {ALICE} and not alone.election.behind


def test_one_step_ahead_on_the_same_path_waits_for_the_branch_and_two_are_behind() -> None:
    client = progress(record(5, b"shared", reduces=False), {BOB: record(5, b"shared")})
    client.known.advance(b"new")
    assert client.known.own.step == 6 and not client.election.behind
    client.on_records({BOB: record(5, b"other")}, now=1.0)
    assert client.election.behind  # that branch cannot follow
    client = progress(record(5, b"shared", reduces=False), {BOB: record(5, b"shared")})
    client.known.advance(b"one")
    client.known.advance(b"two")
    assert client.election.branch().peers == {BOB} and client.election.behind
    client.leap(5, b"shared", syncing=False)
    assert not client.election.behind
    client.on_records({BOB: record(19, b"bobs")}, now=1.0)
    client.leap(20, b"bobs new", syncing=False)
    assert not client.election.behind  # the lineage before is forgotten


def average(swarm: Progress, *peers: PeerId, now: float = 0.0) -> None:
    for step in range(1, 4):
        swarm.on_round(dict.fromkeys(peers, 1.0), step, b"same", now=now)


def test_rounds_of_a_minority_give_no_votes_until_the_others_have_left() -> None:
    split = {BOB: record(5, b"old"), CAROL: record(5, b"old"), DAVE: record(9, b"new")}
    swarm = progress(record(9, b"new"), {BOB: record(), CAROL: record()})
    average(swarm, ALICE, BOB, CAROL)
    swarm.on_records({DAVE: record()}, now=1.0)  # bob and carol are cut off
    average(swarm, ALICE, DAVE, now=1.0)
    swarm.on_records(split, now=2.0)
    assert swarm.election.branch().peers == {BOB, CAROL} and swarm.election.behind
    swarm.on_records({DAVE: record()}, now=RECENT_S)
    average(swarm, ALICE, DAVE, now=RECENT_S)
    swarm.on_records(split, now=RECENT_S)
    assert swarm.election.branch().peers == {ALICE, DAVE}


def test_two_late_joiners_that_average_alone_do_not_outvote_the_others() -> None:
    swarm = progress(record(9, b"new"), {peer: record(5, b"old") for peer in (BOB, CAROL)} | {DAVE: record()})
    average(swarm, ALICE, DAVE)
    assert swarm.election.branch().peers == {BOB, CAROL}


def test_peers_without_a_vote_decide_a_tie() -> None:
    swarm = progress(record(9, b"new"), {BOB: record()})
    average(swarm, ALICE, BOB)
    swarm.on_records({BOB: record(5, b"old")}, now=1.0)
    assert swarm.election.branch().peers == {ALICE}
    swarm.on_records({peer: record(5, b"old") for peer in (BOB, CAROL)}, now=1.0)
    assert swarm.election.branch().peers == {BOB, CAROL}


def test_samples_of_another_step_or_of_a_syncing_peer_do_not_count() -> None:
    others = {BOB: record(0, samples=40), CAROL: record(1, samples=1000)}
    others[DAVE] = record(0, samples=9, syncing=True)
    swarm = progress(record(0, samples=59), others)
    assert swarm.forecast.samples(0.0) == 99 and not swarm.forecast.batch_full(0.0, 0.0)
    assert swarm.forecast.samples_per_s() == 3
    swarm.known.own = record(0, samples=60)
    assert swarm.forecast.batch_full(0.0, 0.0) and swarm.forecast.seconds_to_batch(0.0) == 0


def test_news_from_a_round_outweighs_an_older_record_for_a_few_reads_only() -> None:
    old = {BOB: record(0, samples=50), CAROL: record(1, b"new", samples=7)}
    swarm = progress(record(1, b"new"), old)
    swarm.on_round(dict.fromkeys([ALICE, BOB, CAROL], 100.0), 1, b"new", now=0.0)
    swarm.on_records(old, now=0.0)
    assert swarm.known.all[BOB].step == 1 and swarm.forecast.samples(0.0) == 7
    for _ in range(10):
        swarm.on_records(old, now=0.0)
    assert swarm.known.all[BOB].step == 0
    swarm.on_round({BOB: 100.0}, 1, b"new", now=0.0)
    swarm.on_records({BOB: record(1, b"new", samples=5)}, now=5.0)
    assert swarm.forecast.samples(5.0) == 5


def test_a_peers_count_is_carried_on_for_a_moment_only() -> None:
    swarm = progress(record(samples=50), {BOB: record(samples=10, samples_per_s=4.0)})
    assert swarm.forecast.samples(2.0) == 50 + 10 + 8 and swarm.forecast.seconds_to_batch(0.0) == 40 / 5
    assert swarm.forecast.samples(1000.0) == 50 + 10 + 12


@pytest.mark.parametrize(
    ("since_s", "finished"),
    [
        # Of a micro-batch of 8 samples in 2 s, the one that runs; one that just ended is the last.
        (0.1, 8),
        (1.9, 8),
        (2.4, 8),
        (2.6, 16),
        # After some seconds without a word nothing more is expected.
        (5.5, 0),
    ],
)
def test_a_round_is_called_when_the_micro_batches_that_run_fill_the_batch(
    since_s: float, finished: int
) -> None:
    at = 1e9
    own = record(samples=100 - 20 - finished)
    bob = record(samples=20, samples_per_s=4.0, batch_s=2.0, counted_at=at)
    for missing in (0, 1):
        swarm = progress(msgspec.structs.replace(own, samples=own.samples - missing), {BOB: bob})
        # His record has just been read: so nothing is added for its age.
        assert swarm.forecast.batch_full(0.0, at + since_s) is not bool(missing)


@pytest.mark.parametrize(("last_round_s", "full"), [(0.0, True), (12.4, True), (12.6, False)])
def test_after_a_long_round_only_what_has_been_computed_counts(last_round_s: float, full: bool) -> None:
    bob = record(samples=20, samples_per_s=2.0, batch_s=4.0, counted_at=1e9)
    swarm = progress(record(samples=79, samples_per_s=2.0), {BOB: bob})
    swarm.forecast.last_round_s = last_round_s
    assert swarm.forecast.step_s == 25.0
    assert swarm.forecast.batch_full(0.0, 1e9 + 1.0) is full


def test_a_peer_that_has_counted_one_micro_batch_computes_another_like_it() -> None:
    bob = record(samples=30, samples_per_s=0.0, batch_s=0.0, counted_at=1e9)
    swarm = progress(record(samples=40), {BOB: bob})
    assert swarm.forecast.batch_full(0.0, 1e9 + 1.0)
    assert not swarm.forecast.batch_full(0.0, 1e9 + 10.0)


def test_a_boast_of_speed_does_not_let_the_others_await_the_step_all_the_time() -> None:
    honest = {BOB: record(), CAROL: record()}
    swarm = progress(record(), honest | {DAVE: record(samples_per_s=1e12)})
    assert swarm.forecast.seconds_to_batch(0.0) == 100 / (3 + PLAUSIBLE)
    swarm.known.own = record(samples_per_s=50.0)  # a fast peer knows its own speed
    assert swarm.forecast.seconds_to_batch(0.0) == 100 / (50 + 2 + 50)


def test_a_call_is_early_while_all_together_cannot_have_computed_the_batch() -> None:
    others = {BOB: record(batch_s=2.0), CAROL: record(batch_s=2.0, samples_per_s=1e9)}
    swarm = progress(record(batch_s=2.0, samples=10), others)
    swarm.on_round(dict.fromkeys([ALICE, BOB, CAROL], 1.0), 1, b"next", now=10.0)
    swarm.known.advance(b"next", samples=10)
    computable = (1 + PLAUSIBLE) * (5 + 2 * 2.0)
    early_s = (100 - 10 - computable) / (2 + PLAUSIBLE)
    assert swarm.forecast.early_s(15.0) == pytest.approx(early_s + 2.0)  # and a micro-batch
    assert swarm.forecast.early_s(16.0) == 0.0  # 10 + 9 * 10
    swarm.on_round({ALICE: 100.0}, 2, b"full", now=20.0)
    assert swarm.forecast.early_s(15.0) > 0.0  # for ten rounds
    for step in range(3, 12):
        swarm.on_round({ALICE: 100.0}, step, b"full", now=20.0)
    assert swarm.forecast.early_s(15.0) == 0.0  # records are late, and rounds are not short any more


def test_a_lost_peer_counts_again_with_a_new_record_or_when_it_is_linked_and_computes_nothing() -> None:
    records = {BOB: record(samples=10)}
    swarm = progress(record(), records)
    swarm.known.on_lost(BOB, now=0.0)
    for linked in (set(), {BOB}):  # it may have been killed, and not train again yet
        swarm.on_records(records, linked=linked, now=60.0)
        assert BOB not in swarm.known.all
    swarm.on_records({BOB: record(samples=11)}, now=60.0 + LAST_RECORD_S)
    assert swarm.forecast.samples(60.0 + LAST_RECORD_S) == 11
    swarm.known.on_lost(BOB, now=100.0)  # just after it published a record
    last_words = {BOB: record(samples=20)}
    swarm.on_records(last_words, linked={BOB}, now=102.0)
    swarm.on_records(last_words, linked={BOB}, now=101.0 + LAST_RECORD_S)
    assert BOB not in swarm.known.all
    paused = {BOB: record(paused=True)}
    swarm.on_records(paused, now=120.0)
    swarm.known.on_lost(BOB, now=120.0)
    swarm.on_records(paused, now=140.0)
    assert BOB not in swarm.known.all
    swarm.on_records(paused, linked={BOB}, now=140.0)
    assert BOB in swarm.known.all


def test_syncing_peers_take_part_but_lagging_peers_do_not() -> None:
    swarm = progress(record(5), {BOB: record(5), CAROL: record(4), DAVE: record(0, b"", syncing=True)})
    assert swarm.known.participants(5, b"same") == {ALICE, BOB, DAVE}
    assert progress(NEW, {BOB: IDLE, CAROL: IDLE}).known.participants(3, b"old") == set()  # idle


@pytest.mark.parametrize(
    "bad",
    [
        *({"samples": -1.0}, {"samples": float("nan")}, {"step": -1}, {"step": 1 << 62}),
        {"samples_per_s": 1e13},
        *({"upload_bps": -1.0}, {"download_bps": 1e12}, {"lineage": bytes(17)}),
    ],
)
def test_a_record_out_of_range_is_refused(bad: dict[str, object]) -> None:
    wire = msgspec.msgpack.encode(msgspec.structs.replace(record(), **bad))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire, type=ProgressRecord)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b"])), min_size=1, max_size=8))
def test_every_set_of_records_has_a_branch_with_a_peer(states: list[tuple[int, bytes]]) -> None:
    others = {PeerId(bytes([n]) * 32): record(*state) for n, state in enumerate(states)}
    branch = progress(record(*states[0]), others).election.branch()
    assert branch.peers and all(
        others[p].step == branch.step for p in branch.peers if p in others and p != ALICE
    )


def test_peers_that_could_not_give_the_state_they_claim_have_no_vote_for_a_while() -> None:
    others = {BOB: record(10**9, b"liar"), CAROL: record(5)}
    joiner = progress(record(0, b"", syncing=True), others)
    assert joiner.election.branch().step == 10**9
    joiner.election.distrust([BOB], now=0.0)
    joiner.on_records(others, now=DISTRUST_S - 1)
    assert joiner.election.branch().peers == {CAROL}
    joiner.on_records(others, now=DISTRUST_S)
    assert joiner.election.branch().step == 10**9
    joiner.election.distrust([BOB, CAROL], now=0.0)
    assert joiner.election.branch().peers == frozenset()
    joiner.election.trust_all()
    assert joiner.election.branch().step == 10**9
    joiner.election.distrust([BOB], now=0.0)
    joiner.election.distrust([BOB], now=DISTRUST_S)
    joiner.on_records(others, now=3 * DISTRUST_S - 1)  # the second time for twice as long
    assert joiner.election.branch().peers == {CAROL}


def test_a_step_to_which_the_swarm_cannot_have_come_since_the_last_round_has_no_vote() -> None:
    swarm = progress(record(9), {BOB: record(9), CAROL: record(9)})
    average(swarm, ALICE, BOB, CAROL)
    few, round_s = 9 + FEW_STEPS, 100 / 4
    liars = {BOB: record(few + 9), CAROL: record(few + 9), DAVE: record(9)}
    swarm.on_records(liars, now=round_s)
    assert swarm.election.branch().step == 9
    swarm.on_records(liars, now=1.2 * round_s)
    assert swarm.election.branch().step == few + 9  # by eight times the usual speed
    far = {BOB: record(5000), CAROL: record(5000)}
    swarm.on_records(far, now=round_s)
    assert swarm.election.branch().step == 5000  # this process slept
    swarm.leap(3, b"loaded", syncing=False)
    swarm.on_records(far | {DAVE: record(3, b"loaded")}, now=round_s)
    assert swarm.election.branch().step == 5000  # by an old checkpoint


def test_suspects_have_no_vote_even_if_others_are_distrusted_but_a_peer_without_a_state_waits_for_them() -> (
    None
):
    others = {BOB: record(4, b"frozen"), CAROL: record(4, b"frozen")}
    swarm = progress(record(5), others)
    assert swarm.election.branch().step == 4
    swarm.on_records(others, suspects=[BOB, CAROL], now=0.0)
    assert swarm.election.branch().step == 5
    swarm.election.distrust([DAVE], now=0.0)
    assert swarm.election.branch() == Branch(5, b"same", frozenset([ALICE]))
    swarm.election.trust_all()
    assert swarm.election.branch().step == 5 and swarm.election.branch().peers == {ALICE}
    swarm.on_records(others, now=1.0)
    assert swarm.election.branch().step == 4
    joiner = progress(record(0, b"", syncing=True), {BOB: record(4)})
    joiner.on_records({BOB: record(4)}, suspects=[BOB], now=0.0)
    assert joiner.election.branch().peers == {BOB}


async def test_a_lost_assistant_counts_again_by_a_newer_record_of_this_collaboration() -> None:
    async def read(told_at: float, *addresses: str, only: str = "") -> set[PeerId]:
        found = {AssistantRecord: {BOB: (AssistantRecord("bob", addresses, only, told_at), author(b"bob"))}}
        dht = SimpleNamespace(found=lambda key, kind: asyncio.sleep(0, found.get(kind, {})))
        await swarm.refresh(dht, SimpleNamespace(linked=set))  # type: ignore[arg-type]
        return {*swarm.known.assistants}

    swarm = progress(record())
    assert await read(1.0, "ws://bob") == {BOB} and not swarm.known.on_lost(BOB, now=0.0)
    assert (
        await read(1.0, "ws://bob") == await read(2.0) == await read(2.0, "ws://bob", only="run/x") == set()
    )
    assert await read(2.0, "ws://bob") == {BOB}


def test_samples_are_counted_while_a_peer_is_lost_on_another_thread() -> None:
    swarm = progress(record(samples=1.0), {BOB: record(samples=2.0), CAROL: record(samples=4.0)})

    class LosesWhoItShows(dict[PeerId, float]):
        def get(self, peer: PeerId, default: object = None) -> object:
            swarm.known.on_lost(peer, now=0.0)  # what the runtime's thread may do between any two looks
            return default

    swarm.known.updated_at = LosesWhoItShows()
    assert swarm.forecast.samples(0.0) == 7.0 and swarm.known.all.keys() == {ALICE}


def test_a_slow_trainer_is_not_idle_and_a_silent_one_is() -> None:
    trainer = ThroughputEstimator(0.0)
    assert not trainer.idle(600.0) and trainer.idle(601.0)  # its speed is unknown
    trainer.work(0.0)
    trainer.on_batch(1, 100.0)
    assert not trainer.idle(1100.0) and trainer.idle(1101.0)
    trainer.wait()
    assert not trainer.idle(1e6)


def test_a_trainer_is_ready_after_its_usual_time_until_it_is_far_overdue() -> None:
    trainer = ThroughputEstimator(0.0)
    trainer.work(0.0)
    for samples, now in ((10, 1.0), (5, 2.0)):
        trainer.on_batch(samples, now)
    assert trainer.samples_per_s == pytest.approx(0.8 * 10 + 0.2 * 5)
    ready = {now: trainer.ready_in_s(now, patience_s=5.0) for now in (2.5, 8.0, 8.5)}
    assert ready == {2.5: 0.5, 8.0: 0.0, 8.5: None}


def test_no_round_waits_for_idle_peers() -> None:
    swarm = progress(NEW, {BOB: IDLE, CAROL: IDLE})
    assert swarm.known.participants(3, b"old") == set() and {
        p for p, r in swarm.known.all.items() if r.absent
    } == {
        BOB,
        CAROL,
    }


@pytest.mark.parametrize(
    ("other", "there"),
    [
        pytest.param(record(9), True, id="beside"),
        pytest.param(record(7), True, id="a round late"),
        pytest.param(record(30), True, id="ahead"),
        pytest.param(record(6), False, id="stopped"),
        pytest.param(record(9, paused=True), False, id="paused"),
        pytest.param(record(9, syncing=True), False, id="catching up"),
    ],
)
def test_only_peers_that_are_there_are_counted(other: ProgressRecord, there: bool) -> None:
    swarm = progress(record(9), {BOB: other})
    assert (BOB in swarm.known.there) is there and ALICE in swarm.known.there
