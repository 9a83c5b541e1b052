"""The dashboard as text: page, JSON and Prometheus."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from colab_swarm.backbone.web import CollaborationView, View, render_live, render_page, render_prometheus
from colab_swarm.markup import SCRIPT, content_security_policy
from tests.backbone.views import EVIL, view

EMPTY = CollaborationView("model", 0, 0.0, 0, 0, 0, (), (), (), None, "", 0)


def empty() -> View:
    return msgspec.structs.replace(view(), collaborations=(EMPTY,))


class Tags(HTMLParser):
    """Every tag of a page is closed in order; collects names and attributes."""

    VOID = frozenset({"meta", "br", "col"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.attributes: set[str] = set()
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("shown", [view(), view(steps=3), view(standing_in=2000), empty()])
def test_the_page_is_well_formed_and_a_peers_name_is_only_text(shown: View) -> None:
    tags = Tags(render_page(shown))
    assert tags.seen.count("script") == 1 and "img" not in tags.seen
    assert not any(name.startswith("on") for name in tags.attributes)
    assert EVIL not in render_page(shown)


def test_the_page_shows_what_it_should() -> None:
    live = render_live(view())
    for text in (
        "2,400", "103.4", "5 (+1)", "Step 2000, loss 7.724 pushed", "alice (aaaaaaaa)", "2.5 h", "12.3 GB sent",
    ):  # fmt: skip
        assert text in live, text


def test_the_page_warns_when_new_trainers_continue_from_a_checkpoint() -> None:
    assert (
        "There are no trainers now. New trainers continue from the checkpoint of step 2,000"
        in render_live(view(standing_in=2000))
    )


def test_an_empty_run_has_a_page_too() -> None:
    assert "Fewer than two losses reported yet" in render_live(empty())


def test_only_the_pages_own_script_may_run() -> None:
    policy = content_security_policy()
    assert "default-src 'none'" in policy and "'sha256-" in policy and "script-src 'unsafe" not in policy
    assert SCRIPT in render_page(view())


def test_prometheus_gets_a_line_for_each_figure() -> None:
    text = render_prometheus(view(evil='we"ird\\\n'))
    labels = r'\{run="sahajbert",collaboration="we\\"ird\\\\\\n"'
    assert re.search(rf"^colab_swarm_step{labels}\}} 2400\.0$", text, re.MULTILINE)
    assert re.search(rf'^colab_swarm_peers{labels},role="trainer"\}} 5\.0$', text, re.MULTILINE)
    line = re.compile(
        r'# TYPE \w+ (gauge|counter)|colab_swarm_\w+\{(\w+="([^"\\\n]|\\["\\n])*",?)+\} [-+0-9.e]+'
    )
    assert all(line.fullmatch(one) for one in text.splitlines())
