"""The adaptive strategy: against the paper's cases, its own linear program, and any simpler way to average."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from colab_swarm.averaging import strategy as module
from colab_swarm.averaging.group import Group, GroupMember, RoundTerms, Ticket, equal_shares
from colab_swarm.averaging.strategy import (
    CLAIM_CAP,
    AdaptiveShares,
    adaptive_shares,
    believed,
    forecast_s,
    plan_round,
)
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.codecs import BLOCK_VALUES, codec_of
from colab_swarm.tensors.sparse import drop_zeros

EQUAL = "peers reduce equal shares because all finish together (8 Mbit/s)"


def ticket(
    bps: float | None,
    down_bps: float | None = None,
    weight: float = 10.0,
    codec: str = "float32",
    **facts: bool,
) -> Ticket:
    """Of a peer that averages 1 MB: a rate of 8e6 bit/s takes a second for it."""
    terms = RoundTerms("run", 7, b"lineage", 250_000, b"schema", codec)
    return Ticket(terms, weight, upload_bps=bps, download_bps=down_bps or bps, **facts)


def peer(megabytes_per_s: float, **facts: bool) -> Ticket:
    return ticket(megabytes_per_s * 8e6, **facts)


def assistant(megabytes_per_s: float) -> Ticket:
    return ticket(megabytes_per_s * 8e6, weight=0, assists=True)


@pytest.mark.parametrize(
    ("peers", "shares", "averaging_s", "explanation"),
    [
        ([peer(1)] * 4, [0.25] * 4, 1.5, f"4 of 4 {EQUAL}"),
        ([*[peer(1)] * 4, assistant(100)], [0, 0, 0, 0, 1], 1.0, "1 of 5 peers reduces 100% because "),
        ([peer(1)] * 2, [0.5] * 2, 1.0, f"2 of 2 {EQUAL}"),
    ],
    ids=["all-reduce", "parameter server", "gossip"],
)
def test_the_special_cases_of_the_paper_are_recovered(
    peers: list[Ticket], shares: list[float], averaging_s: float, explanation: str
) -> None:
    found = plan_round(peers)
    assert found.shares == pytest.approx(shares) and found.averaging_s == pytest.approx(averaging_s)
    assert found.explanation.startswith(explanation)


def test_enough_peers_without_accelerators_recover_byteps_and_too_few_share_the_work() -> None:
    found = plan_round([*[peer(1)] * 4, *[assistant(1)] * 4])
    # BytePS: with as many assistants as trainers a trainer only sends and receives the vector once.
    assert found.shares == pytest.approx([0.0] * 4 + [0.25] * 4, abs=1e-5)
    assert found.averaging_s == pytest.approx(1)
    fewer = plan_round([*[peer(1)] * 4, *[assistant(1)] * 2])
    assert min(fewer.shares[4:]) > max(fewer.shares[:4]) > 0 and 1 < fewer.averaging_s < 1.5


def test_a_metered_peer_reduces_only_in_a_group_whose_reducers_all_are() -> None:
    fast, slow = ticket(80e6, metered=True), ticket(8e6)
    for plan in (plan_round, equal_shares):
        assert plan([fast, slow, ticket(8e6, reduces=False)]).shares == (0.0, 1.0, 0.0)
        shares = plan([fast, fast, ticket(8e6, reduces=False)]).shares
        assert shares[0] == shares[1] > 0 == shares[2]
    with pytest.raises(ValueError, match="nobody reduces"):
        plan_round([ticket(8e6, metered=True, reduces=False)])


@pytest.mark.parametrize("codec", ["sparseloco", "topk:0.01"])
@pytest.mark.parametrize("count", [1, 4, 8, 32])
def test_the_forecast_knows_how_sparse_the_mean_of_several_peers_is(codec: str, count: int) -> None:
    rng, one, numel = np.random.default_rng(count), codec_of(codec), 15 * BLOCK_VALUES
    contributions = rng.standard_normal((count, numel), dtype=np.float32)
    mean = np.mean([one.decode(one.encode(values), numel) for values in contributions], axis=0)
    halves = codec_of("float16").encode(mean.astype(np.float32))
    terms = RoundTerms("run", 7, b"lineage", numel, b"schema", codec, "float16")
    forecast, close = module.mean_bytes(terms, count), 0.03 if codec == "sparseloco" else 0.1
    assert forecast == pytest.approx(len(drop_zeros(halves) or halves), rel=close) and forecast <= 2 * numel


def test_a_mean_is_forecast_as_dense_where_contributions_or_the_means_codec_are() -> None:
    for codec, mean_codec, size in (("onebit", "float16", 8192), ("sparseloco", "float32", 16384)):
        assert module.mean_bytes(RoundTerms("", 1, b"", 4096, b"", codec, mean_codec), 4) == size
    assert module.mean_bytes(RoundTerms("", 1, b"", 0, b"", "sparseloco", "float16"), 4) == 0


def rounds_per_s(bytes_per_s: Sequence[float]) -> float:
    """Equation 1 as the paper has it, for peers that all compute: rates a_ij and g_ij of every pair, and xi."""
    n = len(bytes_per_s)
    a, g = np.arange(n * n).reshape(n, n), n * n + np.arange(n * n).reshape(n, n)
    rows: list[tuple[dict[int, float], float]] = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        rows += [({g[i, j]: 1.0, a[k, i]: -1.0}, 0.0) for j in range(n) for k in range(n)]
        rows.append(({x: 1.0 for j in others for x in (a[j, i], g[j, i])}, bytes_per_s[i]))
        rows.append(({x: 1.0 for j in others for x in (a[i, j], g[i, j])}, bytes_per_s[i]))
        rows.append(({2 * n * n: 1e6, **{g[j, i]: -1.0 for j in range(n)}}, 0.0))
    matrix = np.zeros((len(rows), 2 * n * n + 1))
    for row, (entries, _) in zip(matrix, rows, strict=True):
        row[list(entries)] = list(entries.values())
    goal = np.append(np.zeros(2 * n * n), -1.0)
    return float(-linprog(goal, A_ub=matrix, b_ub=[limit for _, limit in rows], method="highs").fun)


@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=5))
@settings(max_examples=25)
def test_shares_alone_reach_the_optimum_of_all_rates_of_equation_1(megabytes_per_s: list[float]) -> None:
    rates = rounds_per_s([rate * 1e6 for rate in megabytes_per_s])
    assert 1 / plan_round(list(map(peer, megabytes_per_s))).averaging_s == pytest.approx(rates, rel=1e-5)


def test_a_bottleneck_does_not_delay_the_other_peers() -> None:
    found = plan_round([peer(0.01), peer(1), peer(4), peer(4)])
    assert found.averaging_s == pytest.approx(100) and "of 1 peer (0.08 Mbit/s) are" in found.explanation
    assert found.bottleneck == "upload and download"
    assert found.shares == (0, 0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ((peer(1, reduces=False),) * 2, "nobody reduces"),
        ((ticket(None), ticket(None)), "one at least known"),
        ((peer(-1), peer(1)), "positive"),
    ],
)
def test_an_impossible_setup_is_named(peers: tuple[Ticket, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_round(peers)


def test_a_peer_alone_averages_nothing() -> None:
    assert plan_round([peer(1)]).averaging_s == 0


def test_rounds_of_unknown_bandwidth_have_equal_shares() -> None:
    for down_bps in (None, 8e6):
        tickets = [ticket(None, down_bps), ticket(None, reduces=False), ticket(None)]
        assert adaptive_shares(tickets) == equal_shares(tickets)
        assert adaptive_shares(tickets).shares == (1, 0, 1)


def test_shares_stay_equal_where_little_can_be_saved_and_the_median_replaces_an_unknown_bandwidth() -> None:
    found = adaptive_shares([ticket(8e6), ticket(8.4e6), ticket(7.8e6)])
    assert found.shares == pytest.approx([1 / 3] * 3) and found.averaging_s > 0
    found = adaptive_shares([ticket(None), ticket(8e6), ticket(8e6), ticket(0.8e6)])
    assert found.shares[0] == found.shares[1] > found.shares[3]


def test_an_assistant_has_no_contribution_wants_no_mean_and_gets_load_although_it_had_none() -> None:
    found = adaptive_shares([ticket(8e6, reduces=False)] * 3 + [ticket(80e6, weight=0, assists=True)])
    assert found.shares == (0, 0, 0, 1) and found.averaging_s == pytest.approx(1.0)
    found = adaptive_shares([ticket(8e6)] * 3 + [ticket(1e4, weight=0, assists=True)])
    assert found.shares[3] >= found.shares[0]


@pytest.mark.parametrize("claim", [1e12, math.inf, math.nan, -1.0])
def test_a_liar_slows_a_round_no_more_than_the_cap(claim: float) -> None:
    shares = adaptive_shares([*([ticket(8e6)] * 7), ticket(claim)]).shares
    truth = [peer(1)] * 8
    assert (plan_round(truth, shares).averaging_s / plan_round(truth).averaging_s) < module.CLAIM_CAP
    assert believed([1e12, 8e6]) == [module.CLAIM_CAP * 8e6, 8e6]  # one of two does not make the median
    assert believed([None, 0.0]) == [None, None]


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=8))
def test_any_claims_give_valid_shares(claims: list[float | None]) -> None:
    found = adaptive_shares([ticket(claim) for claim in claims])
    assert len(found.shares) == len(claims) and 0 < sum(found.shares) < math.inf
    assert all(share >= 0 for share in found.shares)
    assert found.explanation.isprintable()


def loads(shares: Sequence[float]) -> list[float]:
    parts = [share / sum(shares) for share in shares]
    return [(1 - part) + part * (len(parts) - 1) for part in parts]


def test_equals_whose_lines_are_never_full_do_not_talk_themselves_into_unequal_shares() -> None:
    """A fast network: rounds take as long as the most loaded peer's processor takes, rates come from the bytes."""
    strategy = AdaptiveShares()
    rates, taken = [8e6, 8e6, 8e6, 12e6], []
    for _ in range(60):
        tickets = [ticket(rate) for rate in rates]
        decided = strategy(tickets)
        carried = loads(decided.shares)
        taken.append(seconds := max(carried))
        rates = [max(0.98 * rate, 8e6 * load / seconds) for rate, load in zip(rates, carried, strict=True)]
        strategy.on_round(decided.shares, decided.averaging_s, seconds)
    assert min(taken[30:]) == pytest.approx(1.5) and max(taken[30:]) <= 1.6


def test_unequal_lines_keep_their_unequal_shares() -> None:
    strategy = AdaptiveShares()
    tickets = [ticket(1.6e6)] * 4 + [ticket(16e6)] * 2
    for _ in range(60):
        decided = strategy(tickets)
        assert decided.shares == adaptive_shares(tickets).shares
        strategy.on_round(decided.shares, decided.averaging_s, 1.1 * decided.averaging_s)
    delays = [(None, 1.0), (1.0, 0.0), *[(1.0, 10.0)] * 20]  # the first two say nothing
    for _ in range(2):
        for predicted_s, seconds in delays:
            strategy.on_round((1, 2), predicted_s, seconds)
        assert strategy(tickets).shares != decided.shares
        for _ in range(200):
            strategy.on_round((1, 1), 1.0, 1.0)
    assert strategy(tickets).shares == decided.shares, "the delays are forgotten"


def test_a_client_alone_has_no_forecast_and_members_with_bandwidths_have_one() -> None:
    member, terms = (
        GroupMember(PeerId(bytes(32)), (), 1.0, 1.0, False, 1e6, 1e6),
        RoundTerms("", 7, b"", 1000),
    )
    assert forecast_s(Group(bytes(16), terms, (member,))) == 0.0
    others = tuple(GroupMember(PeerId(bytes([i]) * 32), (), 1.0, 1.0, True, 1e6, 1e6) for i in (1, 2))
    assert forecast_s(Group(bytes(16), terms, others)) == pytest.approx(4000 * 8 / 1e6, rel=0.1)


@pytest.mark.parametrize("claim_bps", [1e-300, -1.0, math.nan])
@pytest.mark.parametrize(("others_bps", "believed_bps"), [(None, None), (1e6, 1e6 / CLAIM_CAP)])
def test_one_member_that_claims_a_slow_line_makes_no_round_long(
    others_bps: float | None, believed_bps: float | None, claim_bps: float
) -> None:
    terms = RoundTerms("", 7, b"", 1000)
    rates_bps = [claim_bps, others_bps, others_bps, others_bps]
    members = []
    for number, bps in enumerate(rates_bps):
        share = float(number > 0)
        members.append(GroupMember(PeerId(bytes([number]) * 32), (), 1.0, share, True, bps, bps))
    longest_s = 0.0
    if believed_bps:
        longest_s = 4000 * 8 / believed_bps
    assert 0 <= forecast_s(Group(bytes(16), terms, tuple(members))) <= 1.01 * longest_s
