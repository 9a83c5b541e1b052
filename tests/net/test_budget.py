import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.net import carrier
from colab_swarm.net.carrier import LinkType, Metering, NodeSettings, Path, RateMeter, TokenBucket
from colab_swarm.net.peers import PeerId

ALICE, BOB, CAROL, RELAY = map(PeerId, (b"alice", b"bob", b"carol", b"relay"))


def test_a_bucket_lets_a_burst_through_and_then_keeps_the_rate() -> None:
    bucket = TokenBucket(8e6, now=0.0)  # 1 MB/s, bursts of 100 kB
    bucket.take(100_000, now=0.0)
    assert bucket.delay(0.0) == 0.0
    bucket.take(50_000, now=0.0)
    assert bucket.delay(0.0) == pytest.approx(0.05) and bucket.delay(0.05) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="rate_bps=0"):
        TokenBucket(0, now=0.0)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.0, 1.0)), min_size=1, max_size=30))
def test_waiting_for_the_delay_never_exceeds_the_rate(sends: list[tuple[int, float]]) -> None:
    rate_bps, now, sent_bytes = 8e6, 0.0, 0
    bucket = TokenBucket(rate_bps, now)
    for size_bytes, pause_s in sends:
        now += pause_s + bucket.delay(now + pause_s)
        assert sent_bytes <= 1e5 + now * rate_bps / 8 + 1e-3
        bucket.take(size_bytes, now)
        sent_bytes += size_bytes


def test_the_meter_remembers_the_best_busy_second() -> None:
    meter = RateMeter()
    for step in range(31):
        meter.add(1000 if step < 10 else 500, now=step / 10)
    assert meter.peak_bps == pytest.approx(10 * 1000 * 8)
    assert meter.total_bytes == 10 * 1000 + 21 * 500
    meter.add(1 << 20, now=3.1)
    meter.add(1, now=5.0)  # idle meanwhile
    assert meter.peak_bps == pytest.approx(10 * 1000 * 8)


def test_traffic_is_counted_for_peers_the_own_tunnel_and_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MAX_BOOK_ENTRIES", 2)
    metering, tunnel = Metering(NodeSettings(), lambda: 0.0), Path(LinkType.TUNNEL)
    links = [(ALICE, Path(), False), (BOB, tunnel, False), (BOB, tunnel, True), (CAROL, Path(), False)]
    for peer, path, dialled in (*links, (CAROL, Path(LinkType.RELAYED, RELAY), True)):
        for traffic in metering.traffic(peer, path, dialled=dialled):
            traffic.count(8, now=0.0)
    sent = [metering.statistics(peer, ()).sent_bytes for peer in (ALICE, BOB, CAROL, None)]
    assert sent == [0, 16, 16, 40]
    assert metering.tunnelled.total_bytes == 8 and metering.relayed_bytes() == {RELAY: 16}
