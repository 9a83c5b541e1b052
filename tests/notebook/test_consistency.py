"""The consistency meter."""

from __future__ import annotations

from xml.etree import ElementTree

from colab_swarm.elastic.steps import ElasticSnapshot, ElasticStep
from colab_swarm.notebook.meters import draw_elastic as draw
from colab_swarm.notebook.meters import summarize_elastic as summary


def snapshot(*inconsistencies: float, bound: float | None = 1.0) -> ElasticSnapshot:
    steps = tuple(
        ElasticStep(number, 0.01, 0.25, inconsistency, bound, ())
        for number, inconsistency in enumerate(inconsistencies)
    )
    return ElasticSnapshot("NormBounded(beta=0.5, measure='l2')", 0, 2, steps, False)


def test_the_summary_has_the_inconsistency_and_its_cost() -> None:
    assert summary(snapshot()) == "NormBounded(beta=0.5, measure='l2'): no step yet, 2 members"
    assert summary(snapshot(0.2, 0.4)).endswith(
        "step 1, 2 members; inconsistency 0.4 measured, 1 allowed, 10 ms waited, 25% missing by then"
    )
    assert "unknown allowed" in summary(snapshot(0.2, bound=None))


def test_it_warns_above_the_bound() -> None:
    assert "!" not in draw(snapshot(0.2, 0.9)).text()
    assert "further apart" in draw(snapshot(0.2, 1.2)).text()
    assert "⚠" in draw(snapshot(0.2, 1.2)).html()


def test_the_chart_shows_measured_and_bound() -> None:
    tree = ElementTree.fromstring(draw(snapshot(0.2, 0.4, 0.3)).html())
    lines = [one for one in tree.iter("polyline")]
    assert "bound in theory" in " ".join(tree.itertext())
    assert "no bound is known" in draw(snapshot(0.2, 0.4, bound=None)).html()
    assert [("stroke-dasharray" in line.attrib) for line in lines] == [True, False]
    assert all(len(line.attrib["points"].split()) >= 3 for line in lines)
