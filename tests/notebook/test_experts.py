"""The experts panel."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from colab_swarm.moe.grid import Grid
from colab_swarm.moe.watch import ExpertsListing, ExpertsSnapshot, HostOfExperts, LiveExpert, ServedExpert
from colab_swarm.notebook.meters import draw_experts as draw
from colab_swarm.notebook.meters import summarize_experts as summary
from colab_swarm.notebook.theme import MAX_ROWS

GRID = Grid("ffn", (2, 4))
ALICE, BOB = "a1a1a1a1", "b2b2b2b2"


def live(uid: str, share: float | None, host: str = ALICE) -> LiveExpert:
    return LiveExpert(uid, host, host == BOB, 120, 12.3, share)


LISTING = ExpertsListing(
    GRID,
    live=(live("ffn.0.0", 0.0), live("ffn.0.1", 0.1), live("ffn.1.2", 0.9, BOB)),
    hosts=(HostOfExperts(ALICE, False, 2, 0.1, 0.045), HostOfExperts(BOB, True, 1, 0.9, None)),
    left_out=("ffn.1.1",),
    dead=("ffn.1.3",),
)
SERVED = (ServedExpert("ffn.1.2", 120, 64, 31.8, 2.5, 79.6, 0.0042, 0.12),)
SNAPSHOT = ExpertsSnapshot(LISTING, 4.0, SERVED)


def full(*sides: int, share: float = 0.0) -> ExpertsListing:
    grid = Grid("ffn", sides)
    return ExpertsListing(grid, tuple(live(grid.uid(i), share) for i in grid))


def test_the_summary_counts_live_experts_and_this_peers_work() -> None:
    assert summary(SNAPSHOT) == (
        "ffn[2 x 4]: 3 of 8 places live on 2 hosts, 1 left out, 1 dead, 1 here, 80 samples/s"
    )
    assert summary(ExpertsSnapshot(ExpertsListing(GRID))) == "ffn[2 x 4]: looking up the experts"
    assert summary(replace(SNAPSHOT, over=True)).endswith("; left")


def test_the_text_has_the_grid_the_hosts_and_this_peers_experts() -> None:
    assert draw(SNAPSHOT).text().splitlines()[1:] == [
        "  ⚠ not called for a while because they failed this peer: ffn.1.1",
        "  expert   state       host           step  of the updates",
        "  ffn.1.1  ! left out",
        "  ffn.1.3  x dead",
        "  ffn.1.2  live        b2b2b2b2 (me)  120   90%",
        "  ffn.0.1  live        a1a1a1a1       120   10%",
        "  ffn.0.0  live        a1a1a1a1       120   0%",
        "  host           experts  of the updates  round trip",
        "  a1a1a1a1       2        10%             45 ms",
        "  b2b2b2b2 (me)  1        90%             –",
        "  my expert  step  waiting  batch  calls/s  samples/s  latency, p50 / p99",
        "  ffn.1.2    120   64       32     2.5      80         4.2 ms / 120 ms",
    ]


def test_the_html_is_valid_and_has_the_same_content() -> None:
    tree = ElementTree.fromstring(draw(SNAPSHOT).html())
    bars = [element.get("aria-label") for element in tree.iter() if element.get("role") == "img"]
    assert bars == ["90% of the updates", "10% of the updates", "0% of the updates"]
    shown = " ".join(tree.itertext())
    for word in ("left out", "dead", "(me)", "4.2 ms / 120 ms", "45 ms"):
        assert word in shown


def test_a_large_grid_is_cut_and_counted_and_failed_experts_stay() -> None:
    listing = replace(full(64, 64, share=1 / 4096), dead=("ffn.9.9",))
    for shown in (draw(ExpertsSnapshot(listing, 1.0)).text(), draw(ExpertsSnapshot(listing, 1.0)).html()):
        assert f"and {4097 - MAX_ROWS:,} more experts" in shown and "x dead" in shown
        assert len(shown) < 20_000


def test_warnings_are_shown_and_escaped() -> None:
    faulty = ExpertsSnapshot(ExpertsListing(GRID), 1.0, fault="<script>\x1b[2J")
    assert "swarm.host_experts" in draw(faulty).text() and "swarm.host_experts" in draw(faulty).html()
    assert "<script" not in draw(faulty).html() and "\x1b" not in draw(faulty).html() + draw(faulty).text()
