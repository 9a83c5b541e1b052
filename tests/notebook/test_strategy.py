from __future__ import annotations

import pytest

from colab_swarm.notebook.strategy import SplitKind, StrategyExplorer, compare, strategy_html, strategy_text

FAST, SLOW = SplitKind("fast", 8, 1000), SplitKind("slow", 16, 200)
VIEW = "application/vnd.jupyter.widget-view+json"


def test_the_adaptive_plan_is_never_slower_than_the_others() -> None:
    for kinds in ([FAST], [FAST, SLOW], [SLOW, SplitKind("server", 1, 2500, computes=False)]):
        found = compare(kinds, megabytes=100)
        assert found.plan.averaging_s <= 1.01 * min(found.all_reduce_s, found.server_s)
        assert sum(found.shares) == pytest.approx(1)


def test_fast_peers_reduce_more_where_others_are_slow() -> None:
    found = compare([FAST, SLOW], megabytes=100)
    assert found.shares[0] > 0.8
    assert "8 fast" in strategy_text(found) and "adaptive" in strategy_text(found)


def test_a_collaboration_in_which_nobody_computes_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody computes"):
        compare([SplitKind("server", 1, 1000, computes=False)], megabytes=1)


def test_without_a_front_end_it_is_text_and_static_html() -> None:
    explorer = StrategyExplorer([FAST, SLOW], megabytes=100, live=False)
    assert explorer._repr_mimebundle_() == {
        "text/plain": strategy_text(explorer.found),
        "text/html": strategy_html(explorer.found),
    }


def test_a_slider_draws_the_strategy_again() -> None:
    explorer = StrategyExplorer([FAST, SLOW], megabytes=100, live=True)
    before = explorer._view.value
    fast_count, fast_speed = explorer._box.children[0].children
    fast_speed.value = 100
    assert explorer._view.value != before
    assert explorer._view.value == strategy_html(compare([SplitKind("fast", 8, 100), SLOW], megabytes=100))
    explorer._box.children[1].children[0].value = 0
    fast_count.value = 0
    assert "nobody computes" in explorer._view.value
    fast_count.value = 2
    assert "2 fast" in explorer._view.value
    assert explorer._repr_mimebundle_()[VIEW]["model_id"] == explorer._box.model_id


def test_the_sliders_begin_with_what_was_asked_for() -> None:
    explorer = StrategyExplorer([SplitKind("odd", 2, 2512), SLOW], megabytes=100, live=True)
    assert [row.children[1].label for row in explorer._box.children[:2]] == ["2512", "200"]


def test_names_are_escaped() -> None:
    assert "<b>x" not in strategy_html(compare([SplitKind("<b>x", 2, 10)], megabytes=1))
