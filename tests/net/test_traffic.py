import pytest

from colab_swarm.net import traffic as module
from colab_swarm.net.carrier import LinkType, NodeSettings, Path
from colab_swarm.net.peers import PeerId
from colab_swarm.net.traffic import REMEMBERED_RATES, Metering, RateMeter, TokenBucket

ALICE, BOB, CAROL, RELAY = map(PeerId, (b"alice", b"bob", b"carol", b"relay"))


def test_a_bucket_lets_a_burst_through_and_then_keeps_the_rate() -> None:
    bucket = TokenBucket(8e6, now=0.0)  # 1 MB/s, bursts of 100 kB
    bucket.take(100_000, now=0.0)
    assert bucket.delay(0.0) == 0.0
    bucket.take(50_000, now=0.0)
    assert bucket.delay(0.0) == pytest.approx(0.05) and bucket.delay(0.05) == pytest.approx(0.0)
    bucket.take(200_000, now=60.0)
    assert bucket.delay(60.0) == pytest.approx(0.1), "a long pause earns no longer burst"
    with pytest.raises(ValueError, match="rate_bps=0"):
        TokenBucket(0, now=0.0)


MB = 1_000_000


def test_the_meter_remembers_the_best_of_the_last_busy_times() -> None:
    meter = RateMeter()
    for step in range(31):
        meter.add(MB if step < 10 else MB // 2, now=step / 10)
    assert meter.peak_bps == pytest.approx(10 * MB * 8)
    assert meter.total_bytes == 10 * MB + 21 * MB // 2
    meter.add(100 * MB, now=3.1)
    meter.add(1, now=6.0)  # idle meanwhile
    assert meter.peak_bps == pytest.approx(10 * MB * 8)
    feed(meter, MB, every_s=0.5, begin=6.5, until=7.5 + 1.01 * REMEMBERED_RATES)
    assert meter.peak_bps == pytest.approx(2 * MB * 8, rel=0.01)  # the line has become slower


def feed(meter: RateMeter, size_bytes: int, *, every_s: float, until: float, begin: float = 0.0) -> None:
    for step in range(round((until - begin) / every_s) + 1):
        meter.add(size_bytes, now=begin + step * every_s)


@pytest.mark.parametrize(
    ("size_bytes", "every_s"),
    [(300, 0.05), (6_000, 0.1), (60_000, 1.0), (300_000, 10.0), (2 * MB, 3.0)],
    ids=["keep-alives", "records", "a record a second", "joins", "bursts"],
)
def test_talk_that_fills_no_line_leaves_its_rate_unknown(size_bytes: int, every_s: float) -> None:
    meter = RateMeter()
    feed(meter, size_bytes, every_s=every_s, until=100.0)
    assert meter.peak_bps is None and meter.total_bytes > 0


@pytest.mark.parametrize("line_bps", [1e6, 8e6, 1e9])
def test_a_line_that_is_full_for_some_seconds_is_known(line_bps: float) -> None:
    meter = RateMeter()
    feed(meter, 2_000, every_s=0.5, until=20.0)  # records
    every_s = 0.01
    if line_bps < 1e7:
        every_s = 192 * 1024 * 8 / line_bps  # a socket's buffer is filled again and again
    feed(meter, round(line_bps / 8 * every_s), every_s=every_s, begin=20.1, until=40.0)
    assert meter.peak_bps == pytest.approx(line_bps, rel=0.25)


def test_traffic_is_counted_for_peers_the_own_tunnel_and_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BOOK_ENTRIES", 2)
    metering, tunnel = Metering(NodeSettings(), lambda: 0.0), Path(LinkType.TUNNEL)
    links = [(ALICE, Path(), False), (BOB, tunnel, False), (BOB, tunnel, True), (CAROL, Path(), False)]
    for peer, path, dialled in (*links, (CAROL, Path(LinkType.RELAYED, RELAY), True)):
        for traffic in metering.traffic(peer, path, dialled=dialled):
            traffic.count(8, now=0.0)
    sent = [metering.statistics(peer, ()).sent_bytes for peer in (ALICE, BOB, CAROL, None)]
    assert sent == [0, 16, 16, 40]
    assert metering.tunnelled.total_bytes == 8 and metering.relayed_bytes() == {RELAY: 16}
