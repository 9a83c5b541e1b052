import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.net import carrier
from colab_swarm.net.carrier import LinkType, Metering, NodeSettings, Path, RateMeter, TokenBucket
from colab_swarm.net.peers import PeerId

ALICE, BOB, CAROL = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"c" * 32)


def test_a_bucket_lets_a_burst_through_and_then_keeps_the_rate() -> None:
    bucket = TokenBucket(8e6, now=0.0)  # 1 MB/s, bursts of 100 kB
    bucket.take(100_000, now=0.0)
    assert bucket.delay(0.0) == 0.0
    bucket.take(50_000, now=0.0)
    assert bucket.delay(0.0) == pytest.approx(0.05) and bucket.delay(0.05) == pytest.approx(0.0)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.0, 1.0)), min_size=1, max_size=30))
def test_waiting_for_the_delay_never_exceeds_the_rate(sends: list[tuple[int, float]]) -> None:
    rate_bps, now, sent_bytes = 8e6, 0.0, 0
    bucket = TokenBucket(rate_bps, now)
    for size_bytes, pause_s in sends:
        now += pause_s + bucket.delay(now + pause_s)
        assert sent_bytes <= 1e5 + now * rate_bps / 8 + 1e-3
        bucket.take(size_bytes, now)
        sent_bytes += size_bytes


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="rate_bps=0"):
        TokenBucket(0, now=0.0)


def test_the_meter_remembers_the_best_busy_second() -> None:
    meter = RateMeter()
    for step in range(31):
        meter.add(1000 if step < 10 else 500, now=step / 10)
    assert meter.peak_bps == pytest.approx(10 * 1000 * 8)
    assert meter.total_bytes == 10 * 1000 + 21 * 500


def test_the_meter_makes_no_rate_of_an_idle_time() -> None:
    meter = RateMeter()
    meter.add(1000, now=0.0)
    meter.add(1000, now=2.0)
    assert meter.peak_bps is None


def test_traffic_is_counted_for_the_last_peers_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MAX_BOOK_ENTRIES", 2)
    metering = Metering(NodeSettings(), lambda: 0.0)
    for peer in (ALICE, BOB, CAROL):
        metering.traffic(peer, Path(), dialled=True)[0].count(8, now=0.0)
    assert [metering.statistics(peer, ()).sent_bytes for peer in (ALICE, BOB, CAROL, None)] == [0, 8, 8, 24]


def test_a_tunnel_carries_what_is_sent_over_links_that_came_through_it() -> None:
    metering = Metering(NodeSettings(), lambda: 0.0)
    for way, dialled in ((LinkType.TUNNEL, False), (LinkType.TUNNEL, True), (LinkType.DIRECT, False)):
        metering.traffic(BOB, Path(way), dialled=dialled)[0].count(8, now=0.0)
    assert metering.tunnelled.total_bytes == 8
