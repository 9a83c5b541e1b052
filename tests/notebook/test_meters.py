"""The panels of experts and of elastic members."""

from dataclasses import replace
from xml.etree import ElementTree

from colab_swarm.elastic.steps import ElasticSnapshot, ElasticStep
from colab_swarm.moe.calls import ExpertStatistics
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ExpertsSnapshot, LiveExpert
from colab_swarm.notebook.meters import draw_elastic, draw_experts
from colab_swarm.notebook.theme import MAX_ROWS

GRID = Grid("ffn", (2, 4))
ALICE, BOB = "a1a1a1a1", "b2b2b2b2"


def live(uid: str, share: float | None, host: str = ALICE) -> LiveExpert:
    return LiveExpert(uid, host, host == BOB, 120, share)


SERVED = (ExpertStatistics("ffn.1.2", 120, 318, 25, 31.8, 64, 2.5, 79.6, 0.0042),)
LIVE = (live("ffn.0.0", 0.0), live("ffn.0.1", 0.1), live("ffn.1.2", 0.9, BOB))
FAILED = {"left_out": ("ffn.1.1",), "dead": ("ffn.1.3",)}
SNAPSHOT = ExpertsSnapshot(GRID, LIVE, listed=True, served=SERVED, **FAILED)


def full(*sides: int, share: float = 0.0) -> ExpertsSnapshot:
    grid = Grid("ffn", sides)
    return ExpertsSnapshot(grid, tuple(live(grid.uid(i), share) for i in grid), listed=True)


def test_the_text_has_the_grid_and_this_peers_experts() -> None:
    assert draw_experts(SNAPSHOT).text().splitlines() == [
        "ffn[2 x 4]: 3 of 8 places live on 2 hosts, 1 left out, 1 dead, 1 here, 80 samples/s",
        "  ⚠ not called for a while because they failed this peer: ffn.1.1",
        "  expert   state       host           step  of the updates",
        "  ffn.1.1  ! left out",
        "  ffn.1.3  x dead",
        "  ffn.1.2  live        b2b2b2b2 (me)  120   90%",
        "  ffn.0.1  live        a1a1a1a1       120   10%",
        "  ffn.0.0  live        a1a1a1a1       120   0%",
        "  my expert  step  waiting  batch  calls/s  samples/s  latency",
        "  ffn.1.2    120   64       32     2.5      80         4 ms",
    ]
    assert draw_experts(ExpertsSnapshot(GRID)).line == "ffn[2 x 4]: looking up the experts"
    assert draw_experts(replace(SNAPSHOT, over=True)).line.endswith("; left")


def test_bars_tell_screen_readers_the_use() -> None:
    tree = ElementTree.fromstring(draw_experts(SNAPSHOT).html())
    bars = [element.get("aria-label") for element in tree.iter() if element.get("role") == "img"]
    assert bars == ["90% of the updates", "10% of the updates", "0% of the updates"]


def test_a_large_grid_is_cut_and_counted_and_failed_experts_stay() -> None:
    shown = draw_experts(replace(full(64, 64, share=1 / 4096), dead=("ffn.9.9",)))
    assert f"and {4097 - MAX_ROWS:,} more experts" in shown.text() and "x dead" in shown.text()
    assert len(shown.html()) < 20_000


def test_warnings_are_shown() -> None:
    shown = draw_experts(ExpertsSnapshot(GRID, listed=True, fault="nobody answers")).text()
    assert "swarm.experts.host" in shown and "nobody answers" in shown


def elastic(*inconsistencies: float, bound: float | None = 1.0) -> ElasticSnapshot:
    steps = tuple(ElasticStep(n, 0.01, 0.25, one, bound, ()) for n, one in enumerate(inconsistencies))
    return ElasticSnapshot("NormBounded(beta=0.5, measure='l2')", 0, 2, steps, False)


def test_the_line_has_the_inconsistency_and_its_cost() -> None:
    assert draw_elastic(elastic()).line == "NormBounded(beta=0.5, measure='l2'): no step yet, 2 members"
    assert draw_elastic(elastic(0.2, 0.4)).line.endswith(
        "step 1, 2 members; inconsistency 0.4 measured, 1 allowed, 10 ms waited, 25% missing by then"
    )
    assert "unknown allowed" in draw_elastic(elastic(0.2, bound=None)).line


def test_it_warns_above_the_bound() -> None:
    assert "!" not in draw_elastic(elastic(0.2, 0.9)).text()
    assert "⚠ The peers are further apart" in draw_elastic(elastic(0.2, 1.2)).text()


def test_the_chart_shows_measured_and_bound() -> None:
    tree = ElementTree.fromstring(draw_elastic(elastic(0.2, 0.4, 0.3)).html())
    lines = list(tree.iter("polyline"))
    assert "bound in theory" in " ".join(tree.itertext())
    assert "no bound is known" in draw_elastic(elastic(0.2, 0.4, bound=None)).html()
    assert [("stroke-dasharray" in line.attrib) for line in lines] == [True, False]
    assert all(len(line.attrib["points"].split()) >= 3 for line in lines)
